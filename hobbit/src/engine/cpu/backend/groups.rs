//! Computes a product expert by expert, each as soon as its slice is in memory.

use std::ops::Range;

use super::*;
use crate::engine::seam::experts::RouterValues;
use hobbit_core::expert::Precision;

impl ExpertBackend {
    /// Computes a product expert by expert, each as soon as its slice is in memory.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`]; `node` is a product of kind `kind` and its other source is computed.
    pub(super) unsafe fn by_expert(
        &mut self,
        work: &mut Work,
        kind: SliceKind,
        node: *mut ggml_tensor,
    ) -> Result<(), Failed> {
        let (step, routing) = (work.step, &work.selection.routing);
        // SAFETY: the product and its source are live and allocated.
        let row_bytes = unsafe {
            for &index in &step.skipped {
                for &pair in routing.pairs_of(index) {
                    row_of(&*node, pair).write_bytes(0, (*node).ne[0] as usize);
                }
            }
            ((*(*node).src[1]).ne[0] + (*node).ne[0]) as usize * size_of::<f32>()
        };
        let slice_of = |used: Used| SliceId { version: step.version(used), kind };
        let mut pending = step.used.clone();
        while !pending.is_empty() {
            layer_router::poll(work.host, &self.abort)?;
            let mut here: Vec<(Used, Option<*mut u8>)> = Vec::new();
            pending.retain(|&used| match work.host.memory.locate(slice_of(used), used) {
                Place::Cached => {
                    here.push((used, None));
                    false
                }
                Place::Staged(slot) => {
                    here.push((used, Some(work.host.reads().staged(slot, slice_of(used)))));
                    false
                }
                Place::Pending => true,
            });
            if here.is_empty() {
                work.wait_for(slice_of(pending[0]), pending[0])?;
                continue;
            }
            // Experts of one view together, staged ones separately.
            here.sort_by_key(|(used, data)| (data.is_some(), used.share));
            let mut rest = here.as_slice();
            while !rest.is_empty() {
                let n = fitting(routing, rest, row_bytes);
                let (now, later) = rest.split_at(n);
                // SAFETY: the located slices are complete and stay: cached ones are pinned, staged ones are released
                // only after their product.
                unsafe {
                    self.groups(node, routing, now, |used| work.host.reads().view(step.layer, used.share, kind))?
                };
                for (used, _) in now.iter().filter(|(_, data)| data.is_some()) {
                    work.host.memory.release(slice_of(*used));
                }
                rest = later;
            }
        }
        Ok(())
    }

    /// Multiplies all rows routed to these experts in one run: gather, product and scatter for each view. A single row
    /// is not copied.
    ///
    /// # Safety
    /// As [`ExpertBackend::by_expert`]; the slices are complete until this returns.
    pub(super) unsafe fn groups<'a>(
        &mut self,
        node: *mut ggml_tensor,
        routing: &Routing,
        experts: &[(Used, Option<*mut u8>)],
        view_of: impl Fn(Used) -> ShareView<'a>,
    ) -> Result<(), Failed> {
        // SAFETY: by the caller: node and sources are live, allocated, rows of floats contiguous.
        let (input, output) = unsafe { (*(*node).src[1], *node) };
        assert!(input.type_ == llama::GGML_TYPE_F32 && input.nb[0] == size_of::<f32>(), "ggml multiplies floats");
        let (n_in, n_out) = (input.ne[0] as usize, output.ne[0] as usize);
        self.group_ids.clear();
        self.group_pairs.clear();
        let mut bounds = Vec::new();
        let mut is_plain = |used: Used| {
            let n = routing.pairs_of(used.index).len();
            // SAFETY: by the caller; whatever was added has been run.
            n >= kernels::ROWS_MIN && n >= unsafe { self.plain_from(&output, view_of(used)) }
        };
        let alone: Vec<bool> = experts.iter().map(|(used, _)| is_plain(*used)).collect();
        let together = |a: usize, b: usize| {
            let ((used_a, data_a), (used_b, data_b)) = (experts[a], experts[b]);
            !(alone[a] || alone[b]) && data_a.is_none() && data_b.is_none() && used_a.share == used_b.share
        };
        let positions: Vec<usize> = (0..experts.len()).collect();
        for group in positions.chunk_by(|&a, &b| together(a, b)) {
            let (is_plain, group) = (alone[group[0]], &experts[group[0]..=group[group.len() - 1]]);
            let start = self.group_ids.len();
            for (used, data) in group {
                let pairs = routing.pairs_of(used.index);
                let row = if data.is_some() { 0 } else { used.row.map_or(0, |row| row as i32) };
                self.group_pairs.extend_from_slice(pairs);
                self.group_ids.resize(self.group_pairs.len(), row);
            }
            let view = match group[0] {
                (used, Some(data)) => ShareView { base: data, n_slots: 1, ..view_of(used) },
                (used, None) => view_of(used),
            };
            bounds.push((start..self.group_ids.len(), view, is_plain));
        }
        if let [(rows, view, is_plain)] = &bounds[..] {
            let n_parts = rows.len().div_ceil(rows_at_once((n_in + n_out) * size_of::<f32>()));
            // Kernels take tiles of rows: the rows beyond whole tiles are the expert's last ones, as for llama.cpp.
            let part = rows.len().div_ceil(n_parts.max(1)).max(1).next_multiple_of(TILE_ROWS);
            for start in rows.clone().step_by(part) {
                let rows = start..rows.end.min(start + part);
                // SAFETY: by the caller.
                unsafe { self.run_groups((&input, &output), &[(rows, *view, *is_plain)])? };
            }
            return Ok(());
        }
        // SAFETY: by the caller.
        unsafe { self.run_groups((&input, &output), &bounds) }
    }

    /// Gathers the rows of groups that follow each other, multiplies them in one run, and scatters the results.
    ///
    /// # Safety
    /// As [`ExpertBackend::groups`] for `input` and `output`.
    unsafe fn run_groups(
        &mut self,
        (input, output): (&ggml_tensor, &ggml_tensor),
        groups: &[(Range<usize>, ShareView, bool)],
    ) -> Result<(), Failed> {
        let (n_in, n_out) = (input.ne[0] as usize, output.ne[0] as usize);
        let (Some((first, ..)), Some((last, ..))) = (groups.first(), groups.last()) else { return Ok(()) };
        let (start, n_rows) = (first.start, last.end - first.start);
        if self.gathered.len() < n_rows * n_in {
            self.gathered.resize(n_rows * n_in, 0.0);
        }
        if self.products.len() < n_rows * n_out {
            self.products.resize(n_rows * n_out, 0.0);
        }
        for (rows, view, is_plain) in groups {
            // SAFETY: by the caller; gathered rows, results and ids stay where they are until the run below.
            unsafe { self.add_group((input, output), (rows.clone(), start), *view, *is_plain)? };
        }
        self.inner.run()?;
        for (rows, ..) in groups.iter().filter(|(rows, ..)| rows.len() > 1) {
            for position in rows.clone() {
                // SAFETY: as above; the run is over.
                unsafe {
                    let from = self.products.as_ptr().add((position - start) * n_out);
                    row_of(output, self.group_pairs[position]).copy_from_nonoverlapping(from, n_out);
                }
            }
        }
        Ok(())
    }

    /// Adds the product of a group's rows, which it gathers, to the inner graph: all by one view, or by one expert's
    /// matrix. `first`: the run's first row.
    ///
    /// # Safety
    /// As [`ExpertBackend::groups`] for `input` and `output`; gathered rows, results and ids stay where they are until
    /// the graph has run.
    unsafe fn add_group(
        &mut self,
        (input, output): (&ggml_tensor, &ggml_tensor),
        (rows, first): (Range<usize>, usize),
        view: ShareView,
        is_plain: bool,
    ) -> Result<(), Failed> {
        self.inner.reserve()?;
        let n = rows.len();
        // SAFETY: by the caller.
        unsafe {
            let (from, to) = if n == 1 {
                let pair = self.group_pairs[rows.start];
                (row_of(input, pair), row_of(output, pair))
            } else {
                let (n_in, n_out) = (input.ne[0] as usize, output.ne[0] as usize);
                let from = self.gathered.as_mut_ptr().add((rows.start - first) * n_in);
                for (i, &pair) in self.group_pairs[rows.clone()].iter().enumerate() {
                    from.add(i * n_in).copy_from_nonoverlapping(row_of(input, pair), n_in);
                }
                (from, self.products.as_mut_ptr().add((rows.start - first) * n_out))
            };
            let ids = self.group_ids.as_mut_ptr().add(rows.start);
            let shape = |len: i64| [len, 1, n as i64, 1];
            let mut product = *output;
            let mut source = plain_tensor(llama::GGML_TYPE_F32, shape(input.ne[0]), from.cast(), &product);
            let ids = plain_tensor(llama::GGML_TYPE_I32, [1, n as i64, 1, 1], ids.cast(), &product);
            let result = plain_tensor(llama::GGML_TYPE_F32, shape(output.ne[0]), to.cast(), &product);
            let mut weights = view_tensor(&*product.src[0], view, &product);
            (product.ne, product.nb, product.data) = (result.ne, result.nb, result.data);
            if is_plain {
                product.op = llama::GGML_OP_MUL_MAT;
                let row = self.group_ids[rows.start] as usize;
                weights.data = weights.data.cast::<u8>().add(row * view.stride).cast();
                weights.ne[2] = 1;
                weights.nb[3] = weights.nb[2];
                let as_matrix = |tensor: &mut ggml_tensor| {
                    tensor.ne = [tensor.ne[0], n as i64, 1, 1];
                    tensor.nb[2] = n * tensor.nb[1];
                    tensor.nb[3] = tensor.nb[2];
                };
                as_matrix(&mut product);
                as_matrix(&mut source);
            }
            product.src[0] = self.inner.tensor(weights);
            product.src[1] = self.inner.tensor(source);
            product.src[2] = if is_plain { std::ptr::null_mut() } else { self.inner.tensor(ids) };
            let product = self.inner.tensor(product);
            self.inner.add(product);
        }
        Ok(())
    }

    // Products in llama.cpp's own memory: if it runs a model alone, the backend takes batches for the faster kernels.

    /// Computes nodes whose weights, if any, are wholly in host memory.
    ///
    /// # Safety
    /// As [`ExpertBackend::graph_compute`].
    pub(super) unsafe fn of_llama_cpp(&mut self, nodes: &[*mut ggml_tensor]) -> Result<(), Failed> {
        for &node in nodes {
            // SAFETY: by the caller.
            unsafe {
                match (*node).op {
                    llama::GGML_OP_MUL_MAT_ID => self.mapped(node)?,
                    _ => self.plain(node)?,
                }
            }
        }
        self.inner.run()
    }

    /// Computes a product with weights in host memory. Experts with enough rows for the plain kernels are multiplied
    /// separately.
    ///
    /// # Safety
    /// As [`ExpertBackend::graph_compute`].
    unsafe fn mapped(&mut self, node: *mut ggml_tensor) -> Result<(), Failed> {
        if Purpose::current().is_some_and(|purpose| purpose.gives_back) {
            // Other kernels need rows of their own, and memory is short.
            // SAFETY: by the caller: a node of a live graph.
            return unsafe {
                note_compute_buffer((*node).buffer);
                self.plain(node)
            };
        }
        // The choice and the rows must be computed, and a trial must not run nodes that were added before.
        self.inner.run()?;
        // SAFETY: by the caller: sources of a live node are live.
        let (weights, ids) = unsafe { (&*(*node).src[0], &*(*node).src[2]) };
        // SAFETY: nothing waits in the inner graph.
        let from = unsafe { self.kernels.plain_from(&mut self.inner, &*node, weights.type_, None) };
        let ids = RouterValues::of(ids, 0);
        // SAFETY: computed by an earlier split of this ubatch into host memory.
        let is_known = unsafe { self.routing.set(ids.read(), ids.n_used, weights.ne[2] as usize) }.is_ok();
        let routing = &self.routing;
        // ggml reports an id that is no expert. Experts are sorted by falling popularity.
        if !is_known || routing.needed.first().is_none_or(|&most| routing.pairs_of(most).len() < from) {
            // SAFETY: by the caller.
            return unsafe { self.plain(node) };
        }
        let view = ShareView {
            base: weights.data.cast(),
            stride: weights.nb[2],
            n_slots: weights.ne[2] as u32,
            type_id: weights.type_,
            row: (weights.nb[0], weights.nb[1]),
            interleaving: None,
        };
        let used = |&index: &u16| {
            let used =
                Used { index, precision: Precision::High, share: 0, row: Some(index.into()), is_on_device: false };
            (used, None)
        };
        let experts: Vec<_> = routing.needed.iter().map(used).collect();
        // SAFETY: by the caller; rows are of floats, as llama.cpp plans them.
        let row_bytes = unsafe { ((*(*node).src[1]).ne[0] + (*node).ne[0]) as usize * size_of::<f32>() };
        let routing = std::mem::take(&mut self.routing);
        let mut rest = experts.as_slice();
        let mut result = Ok(());
        while !rest.is_empty() && result.is_ok() {
            let (now, later) = rest.split_at(fitting(&routing, rest, row_bytes));
            // SAFETY: by the caller; the weights are llama.cpp's, and stay.
            result = unsafe { self.groups(node, &routing, now, |_| view) };
            rest = later;
        }
        self.routing = routing;
        result
    }
}

/// A multiple of the rows in a tile of any kernel.
const TILE_ROWS: usize = 64;

/// Rows of one expert that are gathered at once: as many as the usual ubatch has, whatever they take.
pub(super) fn rows_at_once(row_bytes: usize) -> usize {
    (GATHER_BYTES_MAX / row_bytes.max(1)).max(ROWS_AT_ONCE_MIN).next_multiple_of(TILE_ROWS)
}

/// Number of leading experts that may be gathered at once: at least one. In a batch, staged ones go one by one: the
/// staging slot of each takes the next read as soon as its product is done.
fn fitting(routing: &Routing, experts: &[(Used, Option<*mut u8>)], row_bytes: usize) -> usize {
    if routing.n_tokens > 1 && experts[0].1.is_some() {
        return 1;
    }
    let mut bytes = 0usize;
    let beyond = experts.iter().position(|(used, _)| {
        bytes = bytes.saturating_add(routing.pairs_of(used.index).len().saturating_mul(row_bytes));
        bytes > GATHER_BYTES_MAX
    });
    beyond.map_or(experts.len(), |n| n.max(1))
}
