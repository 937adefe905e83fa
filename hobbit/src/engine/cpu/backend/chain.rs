//! Computes the experts of one or a few tokens from the layer's first product to its last, each as far as its slices
//! are in memory: one expert finishes while another is still being read. Computed product by product, all experts would
//! stop at the first missing slice.
//!
//! Intermediate results live in scratch, one row per use, in the order in which experts begin. llama.cpp may have
//! planned their own memory for its later nodes too, which run earlier here than it expects. So a chain writes nothing
//! of llama.cpp's before its end, and then only the last result: no other result may be read outside of it. A row's
//! bits do not depend on neighbouring rows, and all rows of an expert go through one product, as elsewhere.

use std::ops::Range;
use std::slice;

use super::*;

/// A layer's products and the nodes between them.
pub(crate) struct Chain {
    links: Vec<Link>,
    inputs: Vec<Input>,
    /// Number of nodes it replaces in the segment.
    pub(crate) n_nodes: usize,
    /// Experts per token, and tokens: one row per pair.
    shape: [usize; 2],
    /// Floats of scratch it needs.
    n_floats: usize,
}

/// A node.
struct Link {
    node: *mut ggml_tensor,
    /// The matrix that it multiplies by. `None`: each row depends on the same row of its operands only.
    kind: Option<SliceKind>,
    /// By source.
    operands: [Operand; 3],
    /// First float of its rows in scratch.
    start: usize,
}

/// A source of a link. Sizes and positions count floats; `first` is a position in scratch.
#[derive(Clone, Copy)]
enum Operand {
    None,
    /// One row per pair.
    Rows {
        first: usize,
        stride: usize,
        len: usize,
    },
    /// One row for all pairs.
    Shared {
        first: usize,
        len: usize,
    },
    /// A table of weights, unchanged.
    Whole,
    /// Expert or slot numbers.
    Ids,
}

/// An input of a product that is no result of the chain.
struct Input {
    tensor: *mut ggml_tensor,
    /// First float of its copy in scratch.
    start: usize,
    /// Whether each pair has its own row.
    is_by_pair: bool,
}

/// A chain's scratch memory, by address: nodes keep addresses into it until they have run, and a mutable slice of it
/// made in between would invalidate them.
#[derive(Clone, Copy)]
struct Scratch {
    base: *mut f32,
    n_floats: usize,
}

impl Scratch {
    /// The address of `n` floats.
    fn floats(self, first: usize, n: usize) -> *mut f32 {
        assert!(first <= self.n_floats && n <= self.n_floats - first, "a chain counts the scratch that it needs");
        // SAFETY: checked above to be inside.
        unsafe { self.base.add(first) }
    }
}

/// Progress of an expert through the chain.
struct Progress {
    used: Used,
    /// Links that have been computed.
    done: usize,
    /// Links up to which it can be computed now.
    to: usize,
    /// Its rows, once it has begun.
    rows: Range<usize>,
}

/// An expert's part in a link that runs now. `data`: its slice, if that has no slot.
struct Part {
    used: Used,
    rows: Range<usize>,
    data: Option<*mut u8>,
}

impl ExpertBackend {
    /// Computes a chain; skipped experts give zeros.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`]; `chain` is of its segment.
    pub(super) unsafe fn chain(&mut self, work: &mut Work, chain: &Chain) -> Result<(), Failed> {
        let mut memory = std::mem::take(&mut self.gathered);
        if memory.len() < chain.n_floats {
            // Fresh: what is not used of it takes no memory.
            memory = vec![0.0; chain.n_floats];
        }
        let scratch = Scratch { base: memory.as_mut_ptr(), n_floats: chain.n_floats };
        // SAFETY: by the caller; the memory is only used through `scratch` until the result is there.
        let result = unsafe { self.chain_in(work, chain, scratch) };
        self.gathered = memory;
        result
    }

    /// As [`ExpertBackend::chain`], with scratch of `chain.n_floats`.
    ///
    /// # Safety
    /// As [`ExpertBackend::chain`]; the scratch is used by nothing else meanwhile.
    unsafe fn chain_in(&mut self, work: &mut Work, chain: &Chain, scratch: Scratch) -> Result<(), Failed> {
        let (step, routing) = (work.step, &work.selection.routing);
        for input in chain.inputs.iter().filter(|input| !input.is_by_pair) {
            // SAFETY: the tensors are live and computed.
            unsafe { input.copy(Pair::default(), 0, scratch) };
        }
        let slice_of = |used: Used, kind| SliceId { version: step.version(used), kind };
        let mut pending: Vec<_> = step.used.iter().map(|&used| Progress { used, done: 0, to: 0, rows: 0..0 }).collect();
        self.group_ids.clear();
        self.group_pairs.clear();
        while !pending.is_empty() {
            layer_router::poll(work.host, &self.abort)?;
            for progress in &mut pending {
                let used = progress.used;
                let is_here = |link: &&Link| {
                    link.kind.is_none_or(|kind| work.host.memory.locate(slice_of(used, kind), used) != Place::Pending)
                };
                progress.to = progress.done + chain.links[progress.done..].iter().take_while(is_here).count();
            }
            if pending.iter().all(|progress| progress.to == progress.done) {
                let Progress { used, done, .. } = pending[0];
                let first = slice_of(used, chain.links[done].kind.expect("other links wait for nothing"));
                work.wait_for(first, used)?;
                continue;
            }
            // SAFETY: by the caller.
            unsafe { self.take_up(routing, chain, &mut pending, scratch) };
            self.slot_ids.clear();
            // The graph keeps addresses of the ids pushed below.
            self.slot_ids.reserve(chain.links.len() * chain.n_rows());
            let mut staged = Vec::new();
            for (position, link) in chain.links.iter().enumerate() {
                let now = pending.iter().filter(|progress| (progress.done..progress.to).contains(&position));
                let now: Vec<Part> = now
                    .map(|progress| {
                        let slice = link.kind.map(|kind| slice_of(progress.used, kind));
                        let data = slice.and_then(|slice| match work.host.memory.locate(slice, progress.used) {
                            Place::Staged(slot) => {
                                staged.push(slice);
                                Some(work.host.reads().staged(slot, slice))
                            }
                            Place::Cached | Place::Pending => None,
                        });
                        Part { used: progress.used, rows: progress.rows.clone(), data }
                    })
                    .collect();
                for parts in now.chunk_by(|a, b| a.rows.end == b.rows.start && (link.kind.is_none() || a.is_beside(b)))
                {
                    let view = link.kind.map(|kind| work.host.reads().view(step.layer, parts[0].used.share, kind));
                    // SAFETY: located slices are complete and stay until the run below is over; so do scratch and ids.
                    unsafe { self.link(link, parts, chain.shape[1] > 1, view, scratch)? };
                }
            }
            self.inner.run()?;
            staged.into_iter().for_each(|slice| work.host.memory.release(slice));
            pending.iter_mut().for_each(|progress| progress.done = progress.to);
            pending.retain(|progress| progress.done < chain.links.len());
        }
        // Not earlier: the result's memory may be an input's.
        let last = chain.links.last().expect("a chain has a product");
        // SAFETY: the result is live and has a row for each pair.
        unsafe {
            let (len, stride) = ((*last.node).ne[0] as usize, last.stride());
            for (row, &pair) in self.group_pairs.iter().enumerate() {
                let from = scratch.floats(last.start + row * stride, len);
                row_of(&*last.node, pair).copy_from_nonoverlapping(from, len);
            }
            for &pair in step.skipped.iter().flat_map(|&index| routing.pairs_of(index)) {
                row_of(&*last.node, pair).write_bytes(0, len);
            }
        }
        Ok(())
    }

    /// Computes the rows of the result that some experts give, in one graph, and returns each with its pair.
    /// `input_of`: a pair's row of every input. `view_of`: a view of one slot for each matrix of an expert.
    ///
    /// # Safety
    /// The chain's nodes and the tables of weights that they read are live, and in host memory; so are the views.
    pub(crate) unsafe fn rows<'i, 'v>(
        &mut self,
        chain: &Chain,
        routing: &Routing,
        experts: &[Used],
        input_of: impl Fn(Pair) -> &'i [f32],
        view_of: impl Fn(Used, SliceKind) -> ShareView<'v>,
    ) -> Result<Vec<(Pair, Vec<f32>)>, Failed> {
        self.inner.discard();
        let mut memory = std::mem::take(&mut self.gathered);
        if memory.len() < chain.n_floats {
            // Fresh: what is not used of it takes no memory.
            memory = vec![0.0; chain.n_floats];
        }
        let scratch = Scratch { base: memory.as_mut_ptr(), n_floats: chain.n_floats };
        // SAFETY: by the caller; the memory is only used through `scratch` until the rows are there.
        let rows = unsafe { self.rows_in(chain, routing, experts, input_of, view_of, scratch) };
        self.gathered = memory;
        rows
    }

    /// As [`ExpertBackend::rows`], with scratch of `chain.n_floats`.
    ///
    /// # Safety
    /// As there; the scratch is used by nothing else meanwhile.
    unsafe fn rows_in<'i, 'v>(
        &mut self,
        chain: &Chain,
        routing: &Routing,
        experts: &[Used],
        input_of: impl Fn(Pair) -> &'i [f32],
        view_of: impl Fn(Used, SliceKind) -> ShareView<'v>,
        scratch: Scratch,
    ) -> Result<Vec<(Pair, Vec<f32>)>, Failed> {
        self.group_ids.clear();
        self.group_pairs.clear();
        let mut parts: Vec<Part> = Vec::with_capacity(experts.len());
        for &used in experts {
            let first = self.group_pairs.len();
            self.group_pairs.extend_from_slice(routing.pairs_of(used.index));
            self.group_ids.resize(self.group_pairs.len(), used.index.into());
            parts.push(Part { used, rows: first..self.group_pairs.len(), data: None });
        }
        for own in &chain.inputs {
            let n_rows = if own.is_by_pair { self.group_pairs.len() } else { 1 };
            for (row, &pair) in self.group_pairs.iter().take(n_rows).enumerate() {
                let input = input_of(pair);
                let to = scratch.floats(own.start + row * input.len(), input.len());
                // SAFETY: `floats` gives as many floats; they are no part of `input`.
                unsafe { to.copy_from_nonoverlapping(input.as_ptr(), input.len()) };
            }
        }
        self.slot_ids.clear();
        // The graph keeps addresses of the ids pushed below.
        self.slot_ids.reserve(chain.links.len() * self.group_pairs.len());
        let by_token = chain.shape[1] > 1;
        for link in &chain.links {
            let Some(kind) = link.kind else {
                // SAFETY: scratch and ids stay until the run below is over.
                unsafe { self.link(link, &parts, by_token, None, scratch)? };
                continue;
            };
            for part in &parts {
                let view = view_of(part.used, kind);
                let part = Part { used: part.used, rows: part.rows.clone(), data: Some(view.base) };
                // SAFETY: by the caller; scratch and ids stay until the run below is over.
                unsafe { self.link(link, &[part], by_token, Some(view), scratch)? };
            }
        }
        self.inner.run()?;
        let last = chain.links.last().expect("a chain has a product");
        let row = |(row, &pair): (usize, &Pair)| {
            // SAFETY: the last link's node is live; its rows are in scratch, and the run is over.
            let values = unsafe {
                let len = (*last.node).ne[0] as usize;
                slice::from_raw_parts(scratch.floats(last.start + row * last.stride(), len), len).to_vec()
            };
            (pair, values)
        };
        Ok(self.group_pairs.iter().enumerate().map(row).collect())
    }

    /// Threads of [`ExpertBackend::rows`].
    pub(crate) fn set_row_threads(&mut self, n_threads: c_int) {
        self.inner.set_n_threads(n_threads);
    }

    /// Assigns rows to experts that begin, those of one view side by side, and sorts the experts by row.
    ///
    /// # Safety
    /// As [`ExpertBackend::chain`].
    unsafe fn take_up(&mut self, routing: &Routing, chain: &Chain, pending: &mut [Progress], scratch: Scratch) {
        pending.sort_by_key(|progress| match (progress.done, progress.to) {
            (0, 0) => (2, 0, 0),
            (0, _) => (1, usize::from(progress.used.row.is_none()), usize::from(progress.used.share)),
            _ => (0, progress.rows.start, 0),
        });
        for progress in pending.iter_mut().filter(|progress| progress.done == 0 && progress.to > 0) {
            let index = progress.used.index;
            let first = self.group_pairs.len();
            self.group_pairs.extend_from_slice(routing.pairs_of(index));
            progress.rows = first..self.group_pairs.len();
            self.group_ids.resize(self.group_pairs.len(), i32::from(index));
            for input in chain.inputs.iter().filter(|input| input.is_by_pair) {
                for row in progress.rows.clone() {
                    // SAFETY: by the caller: the input has a row for each pair.
                    unsafe { input.copy(self.group_pairs[row], row, scratch) };
                }
            }
        }
    }

    /// Appends the rows of some experts of a link. `by_token`: each row is a token of its own, not one use of a
    /// single token. `view`: the slots of a product.
    ///
    /// # Safety
    /// As [`Inner::add`]: scratch, ids and the slices stay until the run is over.
    unsafe fn link(
        &mut self,
        link: &Link,
        parts: &[Part],
        by_token: bool,
        view: Option<ShareView<'_>>,
        scratch: Scratch,
    ) -> Result<(), Failed> {
        let rows = parts[0].rows.start..parts[parts.len() - 1].rows.end;
        self.inner.reserve()?;
        // SAFETY: by the caller; the link's node and sources are live.
        unsafe {
            let mut node = *link.node;
            node.view_src = std::ptr::null_mut();
            let floats = |first: usize, stride: usize, len: usize, n: usize| {
                let data = scratch.floats(first, n.saturating_sub(1) * stride + len);
                // An expert has several rows only of several tokens: ggml's kernels for rearranged weights have room
                // for one row of each expert and token.
                let (uses, tokens) = if by_token { (1, n) } else { (n, 1) };
                let shape = [len as i64, uses as i64, tokens as i64, 1];
                let mut tensor = plain_tensor(llama::GGML_TYPE_F32, shape, data.cast(), &node);
                let row = stride * size_of::<f32>();
                (tensor.nb[1], tensor.nb[2], tensor.nb[3]) = (row, uses * row, n * row);
                tensor
            };
            let mut sources = [None; 3];
            for (source, operand) in sources.iter_mut().zip(link.operands) {
                *source = match operand {
                    Operand::None => None,
                    Operand::Rows { first, stride, len } => {
                        Some(floats(first + rows.start * stride, stride, len, rows.len()))
                    }
                    Operand::Shared { first, len } => Some(floats(first, len, len, 1)),
                    Operand::Whole => None,
                    Operand::Ids => {
                        let n = rows.len() as i64;
                        let shape = if by_token { [1, n, 1, 1] } else { [n, 1, 1, 1] };
                        let ids = match view {
                            Some(_) => {
                                let first = self.slot_ids.len();
                                for part in parts {
                                    // A slice without a slot is the whole view.
                                    let row = part.used.row.filter(|_| part.data.is_none()).unwrap_or(0);
                                    self.slot_ids.resize(self.slot_ids.len() + part.rows.len(), row as i32);
                                }
                                self.slot_ids.as_mut_ptr().add(first)
                            }
                            None => self.group_ids.as_mut_ptr().add(rows.start),
                        };
                        Some(plain_tensor(llama::GGML_TYPE_I32, shape, ids.cast(), &node))
                    }
                };
            }
            if let Some(view) = view {
                let view = parts[0].data.map_or(view, |base| ShareView { base, n_slots: 1, ..view });
                sources[0] = Some(view_tensor(&*node.src[0], view, &node));
            }
            let stride = link.stride();
            let result = floats(link.start + rows.start * stride, stride, node.ne[0] as usize, rows.len());
            (node.ne, node.nb, node.data) = (result.ne, result.nb, result.data);
            for (place, source) in node.src.iter_mut().zip(sources) {
                if let Some(source) = source {
                    *place = self.inner.tensor(source);
                }
            }
            let node = self.inner.tensor(node);
            self.inner.add(node);
        }
        Ok(())
    }
}

impl Chain {
    /// The chain that a segment begins with. `shape`: experts per token, and tokens. `kind_of`: the matrix that a node
    /// multiplies by, if it is a product. `n_uses`: how many times the graph's nodes read a tensor, those of other
    /// splits included. `None` if a node between the products is not computed row by row, or if a node outside of the
    /// chain reads a result that stays in scratch.
    ///
    /// # Safety
    /// Nodes of a live graph; `nodes[0]` is a product.
    pub(crate) unsafe fn of(
        nodes: &[*mut ggml_tensor],
        shape: [usize; 2],
        kind_of: impl Fn(*mut ggml_tensor) -> Option<SliceKind>,
        n_uses: impl Fn(*mut ggml_tensor) -> Option<usize>,
    ) -> Option<Self> {
        let mut chain = Self { links: Vec::new(), inputs: Vec::new(), n_nodes: 0, shape, n_floats: 0 };
        // SAFETY: by the caller; sources of live nodes are live.
        unsafe {
            let ids = (*nodes[0]).src[2];
            chain.n_nodes = nodes.iter().rposition(|&node| kind_of(node).is_some())? + 1;
            for &node in nodes[..chain.n_nodes].iter().filter(|&&node| !is_view((*node).op)) {
                let (kind, sources) = (kind_of(node), &(*node).src);
                let mut operands = [Operand::None; 3];
                if kind.is_some() {
                    let rows = chain.rows(sources[1]).or_else(|| chain.input(sources[1]))?;
                    operands = [Operand::Whole, rows, Operand::Ids];
                } else {
                    for (i, &source) in sources.iter().enumerate().filter(|(_, source)| !source.is_null()) {
                        *operands.get_mut(i)? = match (*node).op {
                            llama::GGML_OP_ADD_ID if i == 1 => Operand::Whole,
                            llama::GGML_OP_ADD_ID if source == ids => Operand::Ids,
                            _ => chain.rows(source)?,
                        };
                    }
                }
                if !is_rows(&*node, shape) || kind.is_none() && !is_by_row(&*node, &operands) {
                    return None;
                }
                chain.links.push(Link { node, kind, operands, start: chain.n_floats });
                chain.n_floats += chain.links[chain.links.len() - 1].stride() * chain.n_rows();
            }
            // All results but the last one stay in scratch, where nodes outside of the chain do not find them.
            let inside = &nodes[..chain.n_nodes];
            let result = root(chain.links.last()?.node);
            let n_inside = |tensor| inside.iter().flat_map(|&node| (*node).src).filter(|&src| src == tensor).count();
            let is_inner = |&&node: &&*mut ggml_tensor| {
                root(node) != result && chain.links.iter().any(|link| root(link.node) == root(node))
            };
            let stays = |&node: &*mut ggml_tensor| {
                (*node).flags & llama::GGML_TENSOR_FLAG_OUTPUT as i32 == 0 && n_uses(node) == Some(n_inside(node))
            };
            inside.iter().filter(is_inner).all(stays).then_some(chain)
        }
    }

    /// Whether its products read no other input than this.
    pub(crate) fn reads_only(&self, input: *mut ggml_tensor) -> bool {
        self.inputs.iter().all(|own| own.tensor == input)
    }

    /// Replaces every node by a copy, for a computation in other memory.
    pub(crate) fn replace_nodes(&mut self, mut copy: impl FnMut(*mut ggml_tensor) -> *mut ggml_tensor) {
        self.links.iter_mut().for_each(|link| link.node = copy(link.node));
    }

    fn n_rows(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// A tensor with a row per pair that is a result of the chain's, or a part of its rows.
    ///
    /// # Safety
    /// `source` is live.
    unsafe fn rows(&self, source: *mut ggml_tensor) -> Option<Operand> {
        // SAFETY: by the caller; nodes of links are live.
        unsafe {
            // The last link that wrote there: some nodes overwrite their source.
            let link = self.links.iter().rev().find(|link| root(link.node) == root(source))?;
            let (tensor, result) = (&*source, &*link.node);
            let offset = tensor.view_offs.checked_sub(result.view_offs)? / size_of::<f32>();
            let (len, stride) = (tensor.ne[0] as usize, link.stride());
            let strides = |tensor: &ggml_tensor| (tensor.nb[1], if self.shape[1] > 1 { tensor.nb[2] } else { 0 });
            let is_part = offset + len <= result.ne[0] as usize && strides(tensor) == strides(result);
            (is_part && is_rows(tensor, self.shape)).then_some(Operand::Rows {
                first: link.start + offset,
                stride,
                len,
            })
        }
    }

    /// An input that is no result of the chain: copied to scratch, since results may overwrite it.
    ///
    /// # Safety
    /// `source` is live.
    unsafe fn input(&mut self, source: *mut ggml_tensor) -> Option<Operand> {
        // SAFETY: by the caller.
        let tensor = unsafe { &*source };
        let len = tensor.ne[0] as usize;
        let [n_used, n_tokens] = self.shape;
        // A token's experts may share its row: then each gets a copy, unless there is only one token.
        let is_of_token = is_rows(tensor, [1, n_tokens]);
        let is_by_pair = is_rows(tensor, self.shape) && n_used > 1 || is_of_token && n_tokens > 1;
        if !is_by_pair && !is_of_token {
            return None;
        }
        let known = self.inputs.iter().find(|input| input.tensor == source).map(|input| input.start);
        let first = known.unwrap_or_else(|| {
            let start = self.n_floats;
            self.n_floats += len * if is_by_pair { self.n_rows() } else { 1 };
            self.inputs.push(Input { tensor: source, start, is_by_pair });
            start
        });
        Some(if is_by_pair { Operand::Rows { first, stride: len, len } } else { Operand::Shared { first, len } })
    }
}

impl Link {
    /// Floats between rows.
    fn stride(&self) -> usize {
        // SAFETY: a chain is used while its nodes are live.
        unsafe { (*self.node).nb[1] / size_of::<f32>() }
    }
}

impl Input {
    /// Copies the row of a pair to row `row` in scratch.
    ///
    /// # Safety
    /// The tensor is live and computed, and has the pair; the scratch is live.
    unsafe fn copy(&self, pair: Pair, row: usize, scratch: Scratch) {
        // SAFETY: by the caller; rows are contiguous floats, and none of llama.cpp's lies in our scratch.
        unsafe {
            let len = (*self.tensor).ne[0] as usize;
            let from = row_of(&*self.tensor, pair);
            scratch.floats(self.start + row * len, len).copy_from_nonoverlapping(from, len);
        }
    }
}

impl Part {
    /// Whether both have slots of one view.
    fn is_beside(&self, other: &Self) -> bool {
        self.used.share == other.used.share && self.data.is_none() && other.data.is_none()
    }
}

/// The tensor that owns the memory.
///
/// # Safety
/// `tensor` is live.
unsafe fn root(tensor: *mut ggml_tensor) -> *mut ggml_tensor {
    // SAFETY: by the caller.
    let source = unsafe { (*tensor).view_src };
    if source.is_null() { tensor } else { source }
}

/// Whether a tensor has `n` rows of contiguous floats for each of `n_tokens` tokens.
fn is_rows(tensor: &ggml_tensor, [n, n_tokens]: [usize; 2]) -> bool {
    tensor.type_ == llama::GGML_TYPE_F32
        && tensor.nb[0] == size_of::<f32>()
        && (tensor.ne[1] as usize, tensor.ne[2] as usize, tensor.ne[3]) == (n, n_tokens, 1)
}

/// Whether each row of a node that is no product depends on the same row of its operands only.
fn is_by_row(node: &ggml_tensor, operands: &[Operand; 3]) -> bool {
    let len = |operand: &Operand| if let Operand::Rows { len, .. } = operand { Some(*len as i64) } else { None };
    let [a, b, c] = operands;
    match node.op {
        llama::GGML_OP_UNARY | llama::GGML_OP_CLAMP | llama::GGML_OP_SCALE | llama::GGML_OP_SQR => {
            len(a) == Some(node.ne[0]) && matches!((b, c), (Operand::None, Operand::None))
        }
        llama::GGML_OP_ADD | llama::GGML_OP_MUL => {
            len(a) == Some(node.ne[0]) && len(b) == len(a) && matches!(c, Operand::None)
        }
        llama::GGML_OP_GLU => len(a).is_some() && (matches!(b, Operand::None) || len(b) == len(a)),
        llama::GGML_OP_ADD_ID => len(a) == Some(node.ne[0]) && matches!((b, c), (Operand::Whole, Operand::Ids)),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
