//! Products that are submitted before the host knows the router's choice, so that the device does not wait for it.
//!
//! The device finds the slots of the chosen experts itself: a table in its memory has the slot of each expert of a
//! layer, and a `GET_ROWS` node looks up those of the choice. The products that read the region's input are submitted
//! with these right behind the router, and the choice comes to the host meanwhile, on a stream of its own. If every
//! expert has a slot, the rest of the region takes its slots from the device, too. Otherwise rows of experts without a
//! slot have been multiplied by the weights of another one, and are multiplied again.
//!
//! The rest of the region is not submitted before the host knows the choice, because it may overwrite the input.

use std::rc::Rc;

use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_tensor};

use super::helper::Node;
use super::launch::{Launch, look_up};
use crate::engine::ggml::graph::{overlap, tensor_at};
use crate::engine::ggml::{Buffer, Context, Event, Events, Stream};
use crate::engine::memory::device_tier::{SlotsOfLayer, Tier};
use crate::engine::seam::layer_router::Failed;
use hobbit_core::residency::Layout;
use hobbit_core::route::Pair;

/// Alignment of a layer's table in bytes, more than any backend's.
const TABLE_ALIGNMENT: usize = 512;

/// A context's means to begin products early.
pub(super) struct Early {
    /// Copies results to the host.
    pub(super) results: Stream,
    pub(super) events: Events,
    /// The tables of all layers, and behind them the slots of the running layer's choice.
    tensor: *mut ggml_tensor,
    stride: usize,
    /// Contents of the tables, by layer.
    sent: Vec<Vec<i32>>,
    _memory: (Buffer, Context),
}

/// The running layer's products that were begun early.
pub(super) struct EarlyProducts {
    pub(super) nodes: Vec<*mut ggml_tensor>,
    /// On the device: the slots of the choice.
    pub(super) ids: ggml_tensor,
    slots: SlotsOfLayer,
    /// Slots by rank, once the choice is known; `None` for an expert without a slot.
    by_rank: Vec<Option<u32>>,
    /// The choice and all that the host reads has been computed.
    pub(super) chosen: Rc<Event>,
}

impl Early {
    /// `None` if the device has no events, cannot look up slots, or refuses memory.
    pub(super) fn new(dev: ggml_backend_dev_t, layout: &Layout) -> Option<Self> {
        let results = Stream::new(dev)?;
        let has = results.interface();
        if has.event_record.is_none() || has.event_wait.is_none() || has.get_tensor_async.is_none() {
            return None;
        }
        let n_expert = layout.layers().map(|layer| layout.n_expert(layer)).max()?;
        let stride = (usize::from(n_expert) * size_of::<i32>()).next_multiple_of(TABLE_ALIGNMENT);
        let n_layers = usize::from(layout.n_blocks());
        let context = Context::new(1, 0)?;
        let tensor = context.tensor(llama::GGML_TYPE_I8, [stride as i64, n_layers as i64 + 1, 1]);
        // SAFETY: a registered device.
        let buffer = context.allocate(unsafe { llama::ggml_backend_dev_buffer_type(dev) })?;
        let (events, sent) = (Events::new(dev), vec![Vec::new(); n_layers]);
        let early = Self { results, events, tensor, stride, sent, _memory: (buffer, context) };
        let [mut table, mut choice] = [early.table(0, 1), early.choice(1)];
        let node = look_up(&raw mut table, &raw mut choice, early.choice(1));
        // SAFETY: the node and its sources are live.
        unsafe { llama::ggml_backend_dev_supports_op(dev, &raw const node) }.then_some(early)
    }

    /// The slots of a layer's experts, as rows.
    fn table(&self, layer: u16, n_expert: usize) -> ggml_tensor {
        self.part(usize::from(layer), [1, n_expert as i64])
    }

    /// The slots of a choice.
    fn choice(&self, n_used: i64) -> ggml_tensor {
        self.part(self.sent.len(), [n_used, 1])
    }

    fn part(&self, at: usize, ne: [i64; 2]) -> ggml_tensor {
        // SAFETY: the tensor is live.
        let (data, buffer) = unsafe { ((*self.tensor).data.cast::<u8>(), (*self.tensor).buffer) };
        let data = data.wrapping_add(at * self.stride);
        tensor_at(llama::GGML_TYPE_I32, [ne[0], ne[1], 1, 1], data, buffer, Some(self.tensor))
    }

    /// Submits `products` of a single token, whose experts are `ids` on the device. `None` if one of them writes over
    /// a tensor in `read`, or if an expert has no slot and the weights are not quantised.
    ///
    /// # Errors
    /// The device's status.
    ///
    /// # Safety
    /// `ids`, `products` and `read` are live nodes of the layer, allocated on the device; the sources of the products
    /// have been submitted.
    pub(super) unsafe fn begin(
        &mut self,
        launch: &mut Launch,
        tier: &mut Tier,
        (layer, ids): (u16, *mut ggml_tensor),
        slots: SlotsOfLayer,
        products: &[Node],
        read: &[Option<*mut ggml_tensor>],
    ) -> Result<Option<EarlyProducts>, Failed> {
        // SAFETY: by the caller; the tier's tensors are live.
        unsafe {
            if products.iter().any(|&(node, _)| read.iter().flatten().any(|&read| overlap(node, read))) {
                return Ok(None);
            }
            let with_weights = |&(node, kind): &Node| Some((node, tier.slots.tensor(layer, slots.pool, kind?)));
            let products: Vec<_> = products.iter().filter_map(with_weights).collect();
            // A token that chose experts without a slot has one slot several times. For weights that are not quantised,
            // CUDA's kernels leave out all ranks of a repeated slot but one, or end the process.
            let takes_repeats = products.iter().all(|&(_, weights)| llama::ggml_is_quantized((*weights).type_));
            if !takes_repeats && slots.rows.contains(&None) {
                return Ok(None);
            }
            let rows = slots.table();
            let known = &mut self.sent[usize::from(layer)];
            if *known != rows {
                let bytes = rows.iter().flat_map(|row| row.to_ne_bytes()).collect();
                launch.set(self.tensor, bytes, usize::from(layer) * self.stride);
                known.clone_from(&rows);
            }
            let Some(chosen) = self.events.record(&launch.stream) else { return Ok(None) };
            let (table, choice) = (self.table(layer, rows.len()), self.choice((*ids).ne[0]));
            launch.products_by_table(tier, (table, ids), choice, &products)?;
            let nodes = products.into_iter().map(|(node, _)| node).collect();
            Ok(Some(EarlyProducts { nodes, ids: choice, slots, by_rank: Vec::new(), chosen }))
        }
    }

    /// Copies bytes into a tensor, beside the early products, and before all later work of `compute`: on that stream
    /// the copy would begin behind the products, and its bytes would find the link taken by experts.
    ///
    /// # Safety
    /// As [`Stream::set`]; no submitted work reads or writes the tensor there.
    pub(super) unsafe fn set(&mut self, compute: &Stream, tensor: *mut ggml_tensor, bytes: &[u8], offset: usize) {
        // SAFETY: by the caller.
        unsafe { self.results.set(tensor, bytes.as_ptr().cast(), offset, bytes.len()) };
        self.events.record(&self.results).into_iter().for_each(|copied| compute.wait(&copied));
    }
}

impl EarlyProducts {
    /// The host knows the choice.
    pub(super) fn chose(&mut self, ids: impl Iterator<Item = i32>) {
        let slot = |id: i32| self.slots.rows.get(usize::try_from(id).ok()?).copied().flatten();
        self.by_rank = ids.map(slot).collect();
    }

    /// Whether these ranks were multiplied by the weights in this place: a pool and a row.
    pub(super) fn have(&self, (pool, row): (u16, u32), pairs: &[Pair]) -> bool {
        pool == self.slots.pool && pairs.iter().all(|pair| self.by_rank[pair.rank as usize] == Some(row))
    }
}
