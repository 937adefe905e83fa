//! Submits products: as whole nodes, or for some of a token's experts, or for some of a batch's.
//!
//! A product of a single token's experts works on the rows of input and output in place. Of a batch, all rows that go to
//! the same experts are gathered, multiplied and scattered by nodes of the same graph.
//!
//! Indices share the link with experts, so whatever is known of them goes before a region's uploads
//! ([`Launch::prepare`]): behind these, no product could start before the last expert has come.

mod scratch;

use std::collections::HashMap;
use std::slice;

use ggml_sys::llama::{self, GGML_STATUS_SUCCESS, ggml_backend_dev_t, ggml_tensor};

use self::scratch::{INDEX_ALIGNMENT, Scratch};
use super::failure::Failed;
use super::graph::{Graph, rows, tensor_at};
use super::indices::{
    gather_indices, gathered_bytes, groups_of_rows, row_bytes, runs_of_ranks, whole_ids, zeros_and_rows,
};
use crate::engine::compute::is_view;
use crate::engine::tier::stream::Stream;
use crate::engine::tier::{Tier, Weights};
use crate::expert::SliceId;
use crate::residency::Used;
use crate::route::{Pair, Routing};

/// Rows that one node sets to zero.
const ZERO_ROWS: usize = 16;

/// Index bytes of one region, at first.
const INDEX_ROOM: usize = 64 << 10;

/// One expert's part in a product.
#[derive(Clone, Copy)]
pub(super) struct Product {
    /// The expert product.
    pub(super) node: *mut ggml_tensor,
    /// The expert.
    pub(super) used: Used,
    /// Its slice.
    pub(super) slice: SliceId,
    /// Where that is.
    pub(super) weights: Weights,
}

/// The graph being built, and what its nodes read.
pub(super) struct Launch {
    graph: Graph,
    dev: ggml_backend_dev_t,
    scratch: Option<Scratch>,
    /// Indices of this region, each once, as they lie at the start of the scratch memory.
    indices: Vec<u8>,
    /// How many of these bytes have been uploaded; the others are before the graph being built runs.
    sent: usize,
    /// Where in `indices` these bytes are.
    places: HashMap<Vec<u8>, usize>,
    /// Bytes at the start of the scratch memory that are theirs.
    index_room: usize,
    /// Host memory that copies may still be reading.
    kept: Vec<Vec<u8>>,
}

/// What a region will multiply, as far as is known when it begins.
pub(super) struct Foreseen<'a> {
    pub(super) products: &'a [*mut ggml_tensor],
    /// Experts that are there with the rows they have, by share.
    pub(super) present: &'a [Vec<(Used, u32)>],
    /// The others, which are multiplied one by one.
    pub(super) coming: &'a [(Used, u32)],
    /// Uses whose rows will be zero.
    pub(super) skipped: &'a [Pair],
}

impl Launch {
    pub(super) fn new(graph: Graph, dev: ggml_backend_dev_t) -> Self {
        Self {
            graph,
            dev,
            scratch: None,
            indices: Vec::new(),
            sent: 0,
            places: HashMap::new(),
            index_room: INDEX_ROOM,
            kept: Vec::new(),
        }
    }

    /// Forgets what was built and not submitted.
    pub(super) fn discard(&mut self) {
        self.graph.discard();
        self.forget_indices();
    }

    /// What is submitted from here on overwrites them, after all that reads them.
    fn forget_indices(&mut self) {
        self.indices.clear();
        self.places.clear();
        self.sent = 0;
    }

    /// The stream has been waited for.
    pub(super) fn settled(&mut self) {
        self.kept.clear();
    }

    /// Copies bytes into a tensor, after all that has been submitted.
    ///
    /// # Safety
    /// The tensor is allocated on the device and has the bytes from `offset`.
    pub(super) unsafe fn set(&mut self, stream: &Stream, tensor: *mut ggml_tensor, bytes: Vec<u8>, offset: usize) {
        // SAFETY: by the caller; the bytes are kept until the stream has been waited for.
        unsafe { stream.set(tensor, bytes.as_ptr().cast(), offset, bytes.len()) };
        self.kept.push(bytes);
    }

    /// Appends a node that is no expert product.
    ///
    /// # Safety
    /// As [`Graph::add`].
    pub(super) unsafe fn plain(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        node: *mut ggml_tensor,
    ) -> Result<(), Failed> {
        // SAFETY: by the caller.
        unsafe {
            if is_view((*node).op) {
                return Ok(());
            }
            self.reserve(stream, tier, 1)?;
            let mut copy = *node;
            for src in copy.src.iter_mut().filter(|src| !src.is_null()) {
                *src = self.graph.leaf(&**src);
            }
            if !copy.view_src.is_null() {
                copy.view_src = self.graph.leaf(&*copy.view_src);
            }
            let copy = self.graph.tensor(copy);
            self.graph.add(copy);
        }
        Ok(())
    }

    /// Starts what has been built.
    pub(super) fn submit(&mut self, stream: &Stream, tier: &mut Tier) -> Result<(), Failed> {
        self.send_indices(stream);
        match self.graph.submit(stream, || tier.shrink(stream, 0) > 0) {
            GGML_STATUS_SUCCESS => Ok(()),
            status => Err(status),
        }
    }

    fn send_indices(&mut self, stream: &Stream) {
        if self.indices.len() > self.sent {
            let indices = self.indices[self.sent..].to_vec();
            let tensor = self.scratch.as_ref().expect("indices were given a place").tensor;
            // SAFETY: the scratch tensor has room for them at its start.
            unsafe { self.set(stream, tensor, indices, self.sent) };
            self.sent = self.indices.len();
        }
    }

    /// A region begins, all before it has been submitted: uploads the indices that its products will need. What turns
    /// out otherwise is uploaded when it does.
    ///
    /// # Safety
    /// As [`Launch::products`].
    pub(super) unsafe fn prepare(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        routing: &Routing,
        foreseen: &Foreseen,
    ) -> Result<(), Failed> {
        let Foreseen { products, present, coming, skipped } = *foreseen;
        self.forget_indices();
        let mut wanted: Vec<Vec<u8>> = Vec::new();
        let mut rows_max = 0;
        for &node in products {
            // SAFETY: live by the caller.
            let (input, output) = unsafe { (*(*node).src[1], *node) };
            let row_bytes = row_bytes(&input, &output);
            wanted.extend(skipped.chunks(ZERO_ROWS).flat_map(|pairs| zeros_and_rows(routing, pairs, &output)));
            let alone = coming.iter().map(slice::from_ref);
            for members in present.iter().map(Vec::as_slice).chain(alone) {
                if members.len() == routing.needed.len() {
                    wanted.push(whole_ids(routing, members));
                } else if routing.n_tokens == 1 {
                    wanted.extend(runs_of_ranks(routing, members).into_iter().map(|(_, rows)| rows));
                } else {
                    let groups = groups_of_rows(routing, members, row_bytes);
                    let bytes_of = |pairs: &Vec<_>| gathered_bytes(&input, &output, pairs.len()).iter().sum();
                    rows_max = groups.iter().map(bytes_of).fold(rows_max, usize::max);
                    wanted.extend(groups.iter().flat_map(|pairs| gather_indices(routing, pairs, input.ne[1])));
                }
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        let bytes = wanted.iter().map(|bytes| bytes.len().next_multiple_of(INDEX_ALIGNMENT)).sum();
        // Room for the rows as well: made later, the stream would have to be waited for.
        self.room(stream, tier, bytes, rows_max)?;
        for bytes in wanted {
            self.index(stream, tier, bytes)?;
        }
        self.send_indices(stream);
        Ok(())
    }

    fn reserve(&mut self, stream: &Stream, tier: &mut Tier, n: usize) -> Result<(), Failed> {
        if self.graph.has_room(n) { Ok(()) } else { self.submit(stream, tier) }
    }

    /// Multiplies the rows of these experts, whose slices are on the device (or will be before what `stream` runs next).
    ///
    /// # Safety
    /// The products and their sources are live, allocated on the device, and computed before.
    pub(super) unsafe fn products(
        &mut self,
        stream: &Stream,
        routing: &Routing,
        tier: &mut Tier,
        products: &[Product],
    ) -> Result<(), Failed> {
        let n_all = routing.needed.len();
        for of_node in products.chunk_by(|a, b| a.node == b.node) {
            let mut groups: Vec<(Weights, Vec<(Used, u32)>)> = Vec::new();
            for product in of_node {
                let weights = product.weights;
                let known = groups.iter_mut().find(|(known, _)| known.is_with(&weights));
                match (weights, known) {
                    (Weights::Shared { row, .. }, Some((_, members))) => members.push((product.used, row)),
                    (Weights::Shared { row, .. }, None) => groups.push((weights, vec![(product.used, row)])),
                    (Weights::Single { .. }, _) => groups.push((weights, vec![(product.used, 0)])),
                }
            }
            let node = of_node[0].node;
            for (weights, members) in groups {
                // SAFETY: by the caller.
                unsafe {
                    match weights {
                        Weights::Shared { .. } if members.len() == n_all => {
                            self.whole(stream, tier, routing, node, weights, &members)?;
                        }
                        _ if routing.n_tokens == 1 => {
                            self.in_place(stream, tier, routing, node, weights, &members)?;
                        }
                        _ => self.gathered(stream, tier, routing, node, weights, &members)?,
                    }
                }
            }
        }
        let slices = |of: fn(&Product) -> bool| products.iter().filter(move |p| of(p)).map(|product| product.slice);
        if tier.is_unified() {
            if products.iter().any(|product| product.used.row.is_none()) {
                self.submit(stream, tier)?;
                tier.used_on_host(stream, slices(|product| product.used.row.is_none()));
            }
        } else if products.iter().any(|product| matches!(product.weights, Weights::Single { .. })) {
            self.submit(stream, tier)?;
            tier.used(stream, slices(|_| true));
        }
        Ok(())
    }

    /// Every row at once: the node as it came, on slots.
    unsafe fn whole(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        routing: &Routing,
        node: *mut ggml_tensor,
        weights: Weights,
        members: &[(Used, u32)],
    ) -> Result<(), Failed> {
        // SAFETY: by the caller of `products`.
        unsafe {
            self.reserve(stream, tier, 1)?;
            let place = self.index(stream, tier, whole_ids(routing, members))?;
            let ids = self.indices_at(place, llama::GGML_TYPE_I32, [routing.n_used as i64, routing.n_tokens as i64]);
            let mut product = *node;
            product.src[1] = self.graph.leaf(&*product.src[1]);
            self.multiply(product, weights, ids);
        }
        Ok(())
    }

    /// A single token's rows, as many neighbours at once as there are.
    unsafe fn in_place(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        routing: &Routing,
        node: *mut ggml_tensor,
        weights: Weights,
        members: &[(Used, u32)],
    ) -> Result<(), Failed> {
        for (first, rows_of_run) in runs_of_ranks(routing, members) {
            let n = (rows_of_run.len() / size_of::<i32>()) as i64;
            // SAFETY: by the caller of `products`; the ranks are rows of the product.
            unsafe {
                self.reserve(stream, tier, 1)?;
                let place = self.index(stream, tier, rows_of_run)?;
                let ids = self.indices_at(place, llama::GGML_TYPE_I32, [n, 1]);
                let mut part = rows(&*node, first, n);
                let input = &*part.src[1];
                let input = if input.ne[1] > 1 { rows(input, first, n) } else { *input };
                part.src[1] = self.graph.leaf(&input);
                self.multiply(part, weights, ids);
            }
        }
        Ok(())
    }

    /// A batch's rows: gather, product, scatter, all rows of an expert together.
    unsafe fn gathered(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        routing: &Routing,
        node: *mut ggml_tensor,
        weights: Weights,
        members: &[(Used, u32)],
    ) -> Result<(), Failed> {
        // SAFETY: live by the caller of `products`.
        let (input, output) = unsafe { (*(*node).src[1], *node) };
        for pairs in groups_of_rows(routing, members, row_bytes(&input, &output)) {
            // SAFETY: by the caller of `products`.
            unsafe { self.gathered_rows(stream, tier, routing, &output, &input, weights, &pairs)? };
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    unsafe fn gathered_rows(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        routing: &Routing,
        output: &ggml_tensor,
        input: &ggml_tensor,
        weights: Weights,
        pairs: &[(Pair, u32)],
    ) -> Result<(), Failed> {
        let n = pairs.len();
        let (n_in, n_out) = (input.ne[0] as usize, output.ne[0] as usize);
        let [in_bytes, out_bytes] = gathered_bytes(input, output, n);
        // SAFETY: by the caller.
        unsafe {
            self.reserve(stream, tier, 3)?;
            let indices = gather_indices(routing, pairs, input.ne[1]);
            let ([from, ids, to], rows_at) = self.indices(stream, tier, indices, in_bytes + out_bytes)?;
            let from = self.indices_at(from, llama::GGML_TYPE_I32, [n as i64, 1]);
            let ids = self.indices_at(ids, llama::GGML_TYPE_I32, [1, n as i64]);
            let to = self.indices_at(to, llama::GGML_TYPE_I64, [n as i64, 1]);
            let (gathered, results) = (rows_at, rows_at + in_bytes);

            let mut get = self.floats_at(gathered, [n_in as i64, n as i64, 1]);
            get.op = llama::GGML_OP_GET_ROWS;
            get.src[0] = self.graph.leaf(&flat(input));
            get.src[1] = from;
            let get = self.graph.tensor(get);
            self.graph.add(get);

            let mut product = *output;
            let result = self.floats_at(results, [n_out as i64, 1, n as i64]);
            (product.ne, product.nb, product.data) = (result.ne, result.nb, result.data);
            (product.buffer, product.view_src, product.view_offs) = (result.buffer, result.view_src, result.view_offs);
            let mut rows_in = self.floats_at(gathered, [n_in as i64, 1, n as i64]);
            // The product waits for the gathered rows: backends find that out by their sources.
            rows_in.src[0] = get;
            rows_in.op = llama::GGML_OP_RESHAPE;
            product.src[1] = self.graph.tensor(rows_in);
            let product = self.multiply(product, weights, ids);

            let mut rows_out = self.floats_at(results, [n_out as i64, n as i64, 1]);
            rows_out.src[0] = product;
            rows_out.op = llama::GGML_OP_RESHAPE;
            let rows_out = self.graph.tensor(rows_out);
            self.scatter(output, rows_out, to);
        }
        Ok(())
    }

    /// Sets the rows of uses to zero.
    ///
    /// # Safety
    /// As [`Launch::products`].
    pub(super) unsafe fn zero(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        routing: &Routing,
        node: *mut ggml_tensor,
        pairs: &[Pair],
    ) -> Result<(), Failed> {
        // SAFETY: live by the caller.
        let output = unsafe { *node };
        for pairs in pairs.chunks(ZERO_ROWS) {
            let n = pairs.len() as i64;
            self.reserve(stream, tier, 1)?;
            let ([zeros, to], _) = self.indices(stream, tier, zeros_and_rows(routing, pairs, &output), 0)?;
            let zeros = self.floats_at(zeros, [output.ne[0], n, 1]);
            let zeros = self.graph.tensor(zeros);
            let to = self.indices_at(to, llama::GGML_TYPE_I64, [n, 1]);
            // SAFETY: by the caller.
            unsafe { self.scatter(&output, zeros, to) };
        }
        Ok(())
    }

    /// Appends a node that writes `rows` to the rows `to` of a product.
    unsafe fn scatter(&mut self, output: &ggml_tensor, rows: *mut ggml_tensor, to: *mut ggml_tensor) {
        // SAFETY: by the caller of `products` or `zero`.
        unsafe {
            let target = self.graph.leaf(&flat(output));
            let mut set = flat(output);
            set.op = llama::GGML_OP_SET_ROWS;
            set.op_params = std::mem::zeroed();
            set.src.fill(std::ptr::null_mut());
            set.view_src = target;
            set.view_offs = 0;
            set.src[0] = rows;
            set.src[1] = to;
            set.src[2] = target;
            let set = self.graph.tensor(set);
            self.graph.add(set);
        }
    }

    /// Appends a product with its weights and ids replaced.
    unsafe fn multiply(
        &mut self,
        mut product: ggml_tensor,
        weights: Weights,
        ids: *mut ggml_tensor,
    ) -> *mut ggml_tensor {
        product.src[0] = match weights {
            Weights::Shared { tensor, .. } => tensor,
            Weights::Single { data, place, type_, ne } => {
                self.graph.tensor(tensor_at(type_, [ne[0], ne[1], 1, 1], data, place.buffer, place.whole))
            }
        };
        product.src[2] = ids;
        let product = self.graph.tensor(product);
        // SAFETY: by the caller of `products`.
        unsafe { self.graph.add(product) };
        product
    }
}

/// `[n, ranks, tokens]` as `[n, ranks * tokens]`.
fn flat(tensor: &ggml_tensor) -> ggml_tensor {
    let mut flat = *tensor;
    let stride = if tensor.ne[1] > 1 { tensor.nb[1] } else { tensor.nb[2] };
    assert!(tensor.ne[1] == 1 || tensor.nb[2] == tensor.nb[1] * tensor.ne[1] as usize, "rows of a product follow");
    flat.ne = [tensor.ne[0], tensor.ne[1] * tensor.ne[2], 1, 1];
    let all = stride * flat.ne[1] as usize;
    flat.nb = [tensor.nb[0], stride, all, all];
    flat
}

impl Weights {
    /// Whether both are rows of one tensor.
    fn is_with(&self, other: &Weights) -> bool {
        matches!((self, other), (Weights::Shared { tensor: a, .. }, Weights::Shared { tensor: b, .. }) if a == b)
    }
}
