//! Submits products: as whole nodes, for some of a token's experts, or for some of a batch's.
//!
//! A product of a single token's experts works on the rows of input and output in place. For a batch, all rows of the
//! same experts are gathered, multiplied and scattered by nodes of the same graph.
//!
//! Indices share the link with experts, so all indices known in advance are uploaded before a region's experts
//! ([`Launch::prepare`]): behind them, no product could start before the last expert has arrived.

mod indices;

use std::collections::HashMap;
use std::slice;

use ggml_sys::llama::{self, GGML_STATUS_SUCCESS, ggml_backend_dev_t, ggml_tensor};

use self::indices::{Form, INDEX_ALIGNMENT, Scratch, forms, gathered_bytes, zeros_and_rows};
use super::early::Early;
use crate::engine::ggml::Stream;
use crate::engine::ggml::graph::{Graph, is_view, rows, tensor_at};
use crate::engine::memory::device_tier::{Tier, Weights};
use crate::engine::seam::layer_router::Failed;
use hobbit_core::expert::SliceId;
use hobbit_core::residency::Used;
use hobbit_core::route::{Pair, Routing};

/// Maximum nodes of a graph.
const NODES_MAX: usize = 1024;

/// Rows that one node zeroes.
const ZERO_ROWS: usize = 16;

/// Initial room for the index bytes of one region.
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
}

/// The experts of a region, with their rows of slots.
pub(super) struct Members<'a> {
    /// On the device, by share.
    pub(super) present: &'a [Vec<(Used, u32)>],
    /// Multiplied one by one.
    pub(super) coming: &'a [(Used, u32)],
    /// Uses whose rows will be zero.
    pub(super) skipped: &'a [Pair],
}

/// The graph being built, and the data that its nodes read.
pub(super) struct Launch {
    /// Where graphs run.
    pub(super) stream: Stream,
    graph: Graph,
    /// Whether the graph multiplies.
    has_products: bool,
    dev: ggml_backend_dev_t,
    scratch: Option<Scratch>,
    /// Indices of this region, each once, in the layout of the start of the scratch memory.
    indices: Vec<u8>,
    /// Bytes of `indices` that have been uploaded; the rest are uploaded before the graph being built runs.
    sent: usize,
    /// Positions of these bytes in `indices`.
    places: HashMap<Vec<u8>, usize>,
    /// Bytes reserved for indices at the start of the scratch memory.
    index_room: usize,
    /// Host memory that copies may still be reading.
    kept: Vec<Vec<u8>>,
    /// The slots of every use of the region, where the device has looked them up.
    pub(super) slots: Option<ggml_tensor>,
}

impl Launch {
    /// `None` if ggml refuses a graph.
    pub(super) fn new(stream: Stream, dev: ggml_backend_dev_t) -> Option<Self> {
        Some(Self {
            stream,
            graph: Graph::new(NODES_MAX)?,
            has_products: false,
            dev,
            scratch: None,
            indices: Vec::new(),
            sent: 0,
            places: HashMap::new(),
            index_room: INDEX_ROOM,
            kept: Vec::new(),
            slots: None,
        })
    }

    /// Discards nodes that were built and not submitted.
    pub(super) fn discard(&mut self) {
        self.graph.discard();
        self.has_products = false;
        self.forget_indices();
    }

    /// Later submissions overwrite the indices, after everything that reads them.
    fn forget_indices(&mut self) {
        self.indices.clear();
        self.places.clear();
        self.sent = 0;
    }

    /// Waits for all submitted work.
    pub(super) fn synchronize(&mut self) {
        self.stream.synchronize();
        self.copied();
    }

    /// All copies submitted by [`Launch::set`] have run.
    pub(super) fn copied(&mut self) {
        self.kept.clear();
    }

    /// Copies bytes into a tensor, after all submitted work.
    ///
    /// # Safety
    /// The tensor is allocated on the device and has the bytes from `offset`.
    pub(super) unsafe fn set(&mut self, tensor: *mut ggml_tensor, bytes: Vec<u8>, offset: usize) {
        // SAFETY: by the caller; the bytes are kept until the stream has been waited for.
        unsafe { self.stream.set(tensor, bytes.as_ptr().cast(), offset, bytes.len()) };
        self.kept.push(bytes);
    }

    /// Appends a node that is no expert product.
    ///
    /// # Safety
    /// As [`Graph::add`].
    pub(super) unsafe fn plain(&mut self, tier: &mut Tier, node: *mut ggml_tensor) -> Result<(), Failed> {
        // SAFETY: by the caller.
        unsafe {
            if is_view((*node).op) {
                return Ok(());
            }
            self.reserve(tier, 1)?;
            let mut copy = *node;
            for src in copy.src.iter_mut().chain([&mut copy.view_src]).filter(|src| !src.is_null()) {
                *src = self.graph.leaf(&**src);
            }
            self.add(copy);
        }
        Ok(())
    }

    /// Submits the graph built so far.
    pub(super) fn submit(&mut self, tier: &mut Tier) -> Result<(), Failed> {
        self.send_indices(None);
        self.has_products = false;
        match self.graph.submit(&self.stream, || tier.shrink(&self.stream, 0) > 0) {
            GGML_STATUS_SUCCESS => Ok(()),
            status => Err(status),
        }
    }

    /// Submits the launch if it has products: other nodes take next to no time.
    pub(super) fn submit_products(&mut self, tier: &mut Tier) -> Result<(), Failed> {
        if self.has_products { self.submit(tier) } else { Ok(()) }
    }

    /// `beside`: nothing that has not run reads the scratch memory, and the copy need not wait for the stream.
    fn send_indices(&mut self, beside: Option<&mut Early>) {
        if self.indices.len() > self.sent {
            let indices = self.indices[self.sent..].to_vec();
            let tensor = self.scratch.as_ref().expect("indices were given a place").tensor;
            // SAFETY: the scratch tensor has room for them at its start; the bytes are kept until they are copied.
            unsafe {
                match beside {
                    Some(early) => {
                        early.set(&self.stream, tensor, &indices, self.sent);
                        self.kept.push(indices);
                    }
                    None => self.set(tensor, indices, self.sent),
                }
            }
            self.sent = self.indices.len();
        }
    }

    /// A region begins after all earlier work has been submitted: uploads the indices that its products will need, as
    /// far as they are known. Others are uploaded later. `beside`: products of the region have been begun early.
    ///
    /// # Safety
    /// As [`Launch::products`].
    pub(super) unsafe fn prepare(
        &mut self,
        tier: &mut Tier,
        routing: &Routing,
        products: &[*mut ggml_tensor],
        Members { present, coming, skipped }: Members,
        beside: Option<&mut Early>,
    ) -> Result<(), Failed> {
        self.forget_indices();
        let mut wanted: Vec<Vec<u8>> = Vec::new();
        let mut rows_max = 0;
        for &node in products {
            // SAFETY: live by the caller.
            let (input, output) = unsafe { (*(*node).src[1], *node) };
            wanted.extend(skipped.chunks(ZERO_ROWS).flat_map(|pairs| zeros_and_rows(routing, pairs, &output)));
            let alone = coming.iter().map(slice::from_ref);
            for members in present.iter().map(Vec::as_slice).chain(alone) {
                for form in forms(routing, &input, &output, members, true) {
                    match form {
                        Form::Whole(ids) | Form::InPlace(_, ids) => wanted.push(ids),
                        Form::Gathered(n, indices) => {
                            rows_max = rows_max.max(gathered_bytes(&input, &output, n).iter().sum());
                            wanted.extend(indices);
                        }
                    }
                }
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        let bytes = wanted.iter().map(|bytes| bytes.len().next_multiple_of(INDEX_ALIGNMENT)).sum();
        // Room for the rows as well: allocating it later would have to wait for the stream.
        self.room(tier, bytes, rows_max)?;
        for bytes in wanted {
            self.place(bytes);
        }
        self.send_indices(beside);
        Ok(())
    }

    /// Multiplies all rows of a single token and submits this. The slots of its experts `ids` are looked up in `table`,
    /// into `choice`, which is on the device. `products`: nodes, and the tensors of their slots.
    ///
    /// # Safety
    /// As [`Launch::add_products`]; every row of the table is a slot.
    pub(super) unsafe fn products_by_table(
        &mut self,
        tier: &mut Tier,
        (table, ids): (ggml_tensor, *mut ggml_tensor),
        choice: ggml_tensor,
        products: &[(*mut ggml_tensor, *mut ggml_tensor)],
    ) -> Result<(), Failed> {
        self.reserve(tier, products.len() + 1)?;
        // SAFETY: by the caller.
        unsafe {
            let (table, ids) = (self.graph.tensor(table), self.graph.leaf(&*ids));
            let mut slots = choice;
            slots.src[0] = self.add(look_up(table, ids, choice));
            slots.op = llama::GGML_OP_RESHAPE;
            let slots = self.graph.tensor(slots);
            for &(node, tensor) in products {
                let mut product = *node;
                product.src[1] = self.graph.leaf(&*product.src[1]);
                self.add_product(product, Weights::Shared { tensor, row: 0 }, slots);
            }
        }
        self.submit(tier)
    }

    fn reserve(&mut self, tier: &mut Tier, n: usize) -> Result<(), Failed> {
        if self.graph.has_room(n) { Ok(()) } else { self.submit(tier) }
    }

    /// Appends a node, after [`Launch::reserve`].
    ///
    /// # Safety
    /// As [`Graph::add`].
    unsafe fn add(&mut self, mut node: ggml_tensor) -> *mut ggml_tensor {
        node.flags |= llama::GGML_TENSOR_FLAG_COMPUTE as i32;
        let node = self.graph.tensor(node);
        // SAFETY: by the caller.
        unsafe { self.graph.add(node) };
        node
    }

    /// Multiplies the rows of these experts, whose slices are on the device (or will be before the next submission
    /// runs). `alone`: one by one. If some are outside of slots, all are submitted, because that memory is used again.
    ///
    /// # Safety
    /// As [`Launch::add_products`].
    pub(super) unsafe fn products(
        &mut self,
        routing: &Routing,
        tier: &mut Tier,
        products: &[(Product, Weights)],
        alone: bool,
    ) -> Result<(), Failed> {
        for products in products.chunks(if alone { 1 } else { products.len().max(1) }) {
            // SAFETY: by the caller.
            unsafe { self.add_products(routing, tier, products)? };
        }
        if tier.is_unified() {
            let mut staged = products.iter().filter(|(product, _)| product.used.row.is_none()).peekable();
            if staged.peek().is_some() {
                self.submit(tier)?;
                tier.copies.used_on_host(&self.stream, staged.map(|(product, _)| product.slice));
            }
        } else if products.iter().any(|(_, weights)| matches!(weights, Weights::Single { .. })) {
            self.submit(tier)?;
            tier.copies.used(&self.stream, products.iter().map(|(product, _)| product.slice));
        }
        Ok(())
    }

    /// Appends products.
    ///
    /// # Safety
    /// The products and their sources are live, allocated on the device, and computed before.
    unsafe fn add_products(
        &mut self,
        routing: &Routing,
        tier: &mut Tier,
        products: &[(Product, Weights)],
    ) -> Result<(), Failed> {
        for of_node in products.chunk_by(|(a, _), (b, _)| a.node == b.node) {
            let mut groups: Vec<(Weights, Vec<(Used, u32)>)> = Vec::new();
            for &(Product { used, .. }, weights) in of_node {
                let known = groups.iter_mut().find(|(known, _)| known.is_with(&weights));
                match (weights, known) {
                    (Weights::Shared { row, .. }, Some((_, members))) => members.push((used, row)),
                    (Weights::Shared { row, .. }, None) => groups.push((weights, vec![(used, row)])),
                    (Weights::Single { .. }, _) => groups.push((weights, vec![(used, 0)])),
                }
            }
            // SAFETY: live by the caller.
            let (input, output) = unsafe { (*(*of_node[0].0.node).src[1], *of_node[0].0.node) };
            for (weights, members) in groups {
                if let Some(slots) = self.slots {
                    // SAFETY: by the caller.
                    unsafe {
                        self.reserve(tier, 1)?;
                        let mut product = output;
                        product.src[1] = self.graph.leaf(&input);
                        let slots = self.graph.tensor(slots);
                        self.add_product(product, weights, slots);
                    }
                    continue;
                }
                let is_shared = matches!(weights, Weights::Shared { .. });
                for form in forms(routing, &input, &output, &members, is_shared) {
                    // SAFETY: by the caller.
                    unsafe { self.multiply(tier, routing, &input, &output, weights, form)? };
                }
            }
        }
        Ok(())
    }

    /// Multiplies rows of the product `output`, which has the input `input`.
    ///
    /// # Safety
    /// As [`Launch::products`].
    unsafe fn multiply(
        &mut self,
        tier: &mut Tier,
        routing: &Routing,
        input: &ggml_tensor,
        output: &ggml_tensor,
        weights: Weights,
        form: Form,
    ) -> Result<(), Failed> {
        // SAFETY: by the caller; ranks are rows of the product.
        unsafe {
            match form {
                Form::Whole(ids) => {
                    self.reserve(tier, 1)?;
                    let ([place], _) = self.indices(tier, [ids], 0)?;
                    let ids =
                        self.indices_at(place, llama::GGML_TYPE_I32, [routing.n_used as i64, routing.n_tokens as i64]);
                    let mut product = *output;
                    product.src[1] = self.graph.leaf(input);
                    self.add_product(product, weights, ids);
                }
                Form::InPlace(first, slots) => {
                    let n = (slots.len() / size_of::<i32>()) as i64;
                    self.reserve(tier, 1)?;
                    let ([place], _) = self.indices(tier, [slots], 0)?;
                    let ids = self.indices_at(place, llama::GGML_TYPE_I32, [n, 1]);
                    let mut part = rows(output, first, n);
                    let input = if input.ne[1] > 1 { rows(input, first, n) } else { *input };
                    part.src[1] = self.graph.leaf(&input);
                    self.add_product(part, weights, ids);
                }
                Form::Gathered(n, indices) => self.gathered(tier, input, output, weights, n, indices)?,
            }
        }
        Ok(())
    }

    /// Gathers a batch's rows, multiplies them, and scatters the results; all rows of an expert stay together.
    unsafe fn gathered(
        &mut self,
        tier: &mut Tier,
        input: &ggml_tensor,
        output: &ggml_tensor,
        weights: Weights,
        n: usize,
        indices: [Vec<u8>; 3],
    ) -> Result<(), Failed> {
        let (n_in, n_out) = (input.ne[0], output.ne[0]);
        let [in_bytes, out_bytes] = gathered_bytes(input, output, n);
        let n = n as i64;
        // SAFETY: by the caller of `multiply`.
        unsafe {
            self.reserve(tier, 3)?;
            let ([from, ids, to], rows_at) = self.indices(tier, indices, in_bytes + out_bytes)?;
            let from = self.indices_at(from, llama::GGML_TYPE_I32, [n, 1]);
            let ids = self.indices_at(ids, llama::GGML_TYPE_I32, [1, n]);
            let to = self.indices_at(to, llama::GGML_TYPE_I64, [n, 1]);
            let (gathered, results) = (rows_at, rows_at + in_bytes);

            let mut get = self.floats_at(gathered, [n_in, n, 1]);
            get.op = llama::GGML_OP_GET_ROWS;
            get.src[0] = self.graph.leaf(&flat(input));
            get.src[1] = from;
            let get = self.add(get);

            let mut product = *output;
            let result = self.floats_at(results, [n_out, 1, n]);
            (product.ne, product.nb, product.data) = (result.ne, result.nb, result.data);
            (product.buffer, product.view_src, product.view_offs) = (result.buffer, result.view_src, result.view_offs);
            let mut rows_in = self.floats_at(gathered, [n_in, 1, n]);
            // The product must run after the gathering: backends see this from its sources.
            rows_in.src[0] = get;
            rows_in.op = llama::GGML_OP_RESHAPE;
            product.src[1] = self.graph.tensor(rows_in);
            let product = self.add_product(product, weights, ids);

            let mut rows_out = self.floats_at(results, [n_out, n, 1]);
            rows_out.src[0] = product;
            rows_out.op = llama::GGML_OP_RESHAPE;
            let rows_out = self.graph.tensor(rows_out);
            self.scatter(output, rows_out, to);
        }
        Ok(())
    }

    /// Zeroes the rows of uses.
    ///
    /// # Safety
    /// As [`Launch::products`].
    pub(super) unsafe fn zero(
        &mut self,
        tier: &mut Tier,
        routing: &Routing,
        node: *mut ggml_tensor,
        pairs: &[Pair],
    ) -> Result<(), Failed> {
        // SAFETY: live by the caller.
        let output = unsafe { *node };
        for pairs in pairs.chunks(ZERO_ROWS) {
            let n = pairs.len() as i64;
            self.reserve(tier, 1)?;
            let ([zeros, to], _) = self.indices(tier, zeros_and_rows(routing, pairs, &output), 0)?;
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
            self.add(set);
        }
    }

    /// Appends a product with its weights and ids replaced.
    unsafe fn add_product(
        &mut self,
        mut product: ggml_tensor,
        weights: Weights,
        ids: *mut ggml_tensor,
    ) -> *mut ggml_tensor {
        product.src[0] = match weights {
            Weights::Shared { tensor, .. } => tensor,
            Weights::Single { data, buffer, whole, type_, ne } => {
                self.graph.tensor(tensor_at(type_, [ne[0], ne[1], 1, 1], data, buffer, whole))
            }
        };
        product.src[2] = ids;
        self.has_products = true;
        // SAFETY: by the caller of `products`.
        unsafe { self.add(product) }
    }
}

/// The rows `ids` of `table`, written to `target`.
pub(super) fn look_up(table: *mut ggml_tensor, ids: *mut ggml_tensor, target: ggml_tensor) -> ggml_tensor {
    let mut node = target;
    (node.ne, node.nb) = ([1, target.ne[0], 1, 1], [target.nb[0], target.nb[0], target.nb[1], target.nb[1]]);
    node.op = llama::GGML_OP_GET_ROWS;
    (node.src[0], node.src[1]) = (table, ids);
    node
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
