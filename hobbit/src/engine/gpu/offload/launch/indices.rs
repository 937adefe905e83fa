//! The rows that a product reads, multiplies by and writes, as backends need them: index tensors, as bytes; and device
//! memory for these, for gathered rows and for their results.

use ggml_sys::llama::{self, GGML_STATUS_ALLOC_FAILED, ggml_backend_dev_t, ggml_tensor};

use super::Launch;
use crate::engine::ggml::graph::tensor_at;
use crate::engine::ggml::{Buffer, Context};
use crate::engine::memory::device_tier::Tier;
use crate::engine::seam::layer_router::Failed;
use hobbit_core::residency::Used;
use hobbit_core::route::{Pair, Routing};

/// Alignment of gathered rows and results, in floats.
const ROW_ALIGNMENT: usize = 64;

/// Gathered rows and their results that one group may have, in bytes (more only where one expert alone has more).
const GATHER_BYTES_MAX: usize = 32 << 20;

/// How one node multiplies rows of some experts, with the indices that it reads.
pub(super) enum Form {
    /// Every row at once: the original node, on slots.
    Whole(Vec<u8>),
    /// A single token's rows in place: the first rank, and the slots of it and the following ranks.
    InPlace(i64, Vec<u8>),
    /// Number of a batch's rows that are gathered, multiplied and scattered, and their indices.
    Gathered(usize, [Vec<u8>; 3]),
}

/// The forms in which experts with these slots are multiplied. `is_shared`: the slots are rows of one tensor.
pub(super) fn forms(
    routing: &Routing,
    input: &ggml_tensor,
    output: &ggml_tensor,
    members: &[(Used, u32)],
    is_shared: bool,
) -> impl Iterator<Item = Form> {
    let is_whole = is_shared && members.len() == routing.needed.len();
    let whole = is_whole.then(|| Form::Whole(whole_ids(routing, members)));
    let members = if is_whole { &[] } else { members };
    let (of_token, of_batch) = if routing.n_tokens == 1 { (members, &[][..]) } else { (&[][..], members) };
    let runs = runs_of_ranks(routing, of_token).into_iter().map(|(first, slots)| Form::InPlace(first, slots));
    let row_bytes = (input.ne[0] + output.ne[0]) as usize * size_of::<f32>();
    let groups = groups_of_rows(routing, of_batch, row_bytes);
    let ranks = input.ne[1];
    let gathered =
        groups.into_iter().map(move |pairs| Form::Gathered(pairs.len(), gather_indices(routing, &pairs, ranks)));
    whole.into_iter().chain(runs).chain(gathered)
}

/// `n` gathered rows, and their results, in bytes.
pub(super) fn gathered_bytes(input: &ggml_tensor, output: &ggml_tensor, n: usize) -> [usize; 2] {
    [input, output].map(|rows| (n * rows.ne[0] as usize).next_multiple_of(ROW_ALIGNMENT) * size_of::<f32>())
}

/// The slot of every use, `[n_tokens][n_used]`.
fn whole_ids(routing: &Routing, members: &[(Used, u32)]) -> Vec<u8> {
    let mut by_expert: Vec<i32> = Vec::new();
    for &(used, row) in members {
        let index = usize::from(used.index);
        by_expert.resize(by_expert.len().max(index + 1), -1);
        by_expert[index] = row as i32;
    }
    routing.ids.iter().flat_map(|&id| by_expert[usize::from(id)].to_ne_bytes()).collect()
}

/// For a single token: runs of neighbouring ranks, each as its first rank and its slots.
fn runs_of_ranks(routing: &Routing, members: &[(Used, u32)]) -> Vec<(i64, Vec<u8>)> {
    let mut ranks: Vec<(u32, u32)> = members
        .iter()
        .flat_map(|&(used, row)| routing.pairs_of(used.index).iter().map(move |pair| (pair.rank, row)))
        .collect();
    ranks.sort_unstable();
    ranks
        .chunk_by(|a, b| a.0 + 1 == b.0)
        .map(|run| (i64::from(run[0].0), run.iter().flat_map(|(_, row)| (*row as i32).to_ne_bytes()).collect()))
        .collect()
}

/// The uses of experts with their slots, in groups of as many experts as may be gathered together.
fn groups_of_rows(routing: &Routing, members: &[(Used, u32)], row_bytes: usize) -> Vec<Vec<(Pair, u32)>> {
    let mut groups = Vec::new();
    let mut rest = members;
    while !rest.is_empty() {
        let mut n_rows = 0;
        let n = rest.iter().take_while(|(used, _)| {
            let before = n_rows;
            n_rows += routing.pairs_of(used.index).len();
            before == 0 || n_rows * row_bytes <= GATHER_BYTES_MAX
        });
        let (now, later) = rest.split_at(n.count());
        rest = later;
        let pairs = |&(used, row): &(Used, u32)| routing.pairs_of(used.index).iter().map(move |&pair| (pair, row));
        groups.push(now.iter().flat_map(pairs).collect());
    }
    groups
}

/// For uses: their rows in the input (`ranks` per token), their slots, and their rows in the product.
fn gather_indices(routing: &Routing, pairs: &[(Pair, u32)], ranks: i64) -> [Vec<u8>; 3] {
    let n_used = routing.n_used as i64;
    let position = |pair: Pair, ranks: i64| i64::from(pair.token) * ranks + i64::from(pair.rank) % ranks;
    [
        pairs.iter().flat_map(|(pair, _)| (position(*pair, ranks) as i32).to_ne_bytes()).collect(),
        pairs.iter().flat_map(|(_, row)| (*row as i32).to_ne_bytes()).collect(),
        pairs.iter().flat_map(|(pair, _)| position(*pair, n_used).to_ne_bytes()).collect(),
    ]
}

/// Rows of zeros, and the rows they overwrite.
pub(super) fn zeros_and_rows(routing: &Routing, pairs: &[Pair], output: &ggml_tensor) -> [Vec<u8>; 2] {
    let rows = pairs.iter().map(|pair| i64::from(pair.token) * routing.n_used as i64 + i64::from(pair.rank));
    let zeros = vec![0; pairs.len() * output.ne[0] as usize * size_of::<f32>()];
    [zeros, rows.flat_map(i64::to_ne_bytes).collect()]
}

// Device memory.

/// Alignment of index tensors in bytes.
pub(super) const INDEX_ALIGNMENT: usize = 256;

/// Scratch memory grows in steps of this many bytes.
const SCRATCH_STEP: usize = 1 << 20;

/// Device memory for indices, gathered rows and their results.
pub(super) struct Scratch {
    pub(super) tensor: *mut ggml_tensor,
    bytes: usize,
    _memory: (Buffer, Context),
}

impl Scratch {
    fn new(dev: ggml_backend_dev_t, bytes: usize) -> Option<Self> {
        let context = Context::new(1, 0)?;
        let tensor = context.tensor(llama::GGML_TYPE_I8, [bytes as i64, 1, 1]);
        // SAFETY: a registered device.
        let buffer = context.allocate(unsafe { llama::ggml_backend_dev_buffer_type(dev) })?;
        Some(Self { tensor, bytes, _memory: (buffer, context) })
    }
}

impl Launch {
    /// The place of indices in the scratch tensor, where they are before the graph being built runs. The caller makes
    /// room.
    pub(super) fn place(&mut self, bytes: Vec<u8>) -> usize {
        if let Some(&place) = self.places.get(&bytes) {
            return place;
        }
        let place = self.indices.len();
        self.indices.extend_from_slice(&bytes);
        self.indices.resize(self.indices.len().next_multiple_of(INDEX_ALIGNMENT), 0);
        self.places.insert(bytes, place);
        place
    }

    /// The places of indices, and the place of `row_bytes` bytes of rows.
    pub(super) fn indices<const N: usize>(
        &mut self,
        tier: &mut Tier,
        indices: [Vec<u8>; N],
        row_bytes: usize,
    ) -> Result<([usize; N], usize), Failed> {
        // Room for all of them at once: one must not overwrite another.
        let is_known = indices.iter().all(|bytes| self.places.contains_key(bytes));
        let index_bytes = |bytes: &Vec<u8>| bytes.len().next_multiple_of(INDEX_ALIGNMENT);
        let index_bytes = if is_known { 0 } else { indices.iter().map(index_bytes).sum() };
        let rows_at = self.room(tier, index_bytes, row_bytes)?;
        Ok((indices.map(|bytes| self.place(bytes)), rows_at))
    }

    /// Makes room for `index_bytes` more index bytes and `row_bytes` bytes of rows. Returns the rows' place.
    pub(super) fn room(&mut self, tier: &mut Tier, index_bytes: usize, row_bytes: usize) -> Result<usize, Failed> {
        if self.indices.len() + index_bytes > self.index_room {
            self.submit(tier)?;
            self.forget_indices();
            self.index_room = self.index_room.max(index_bytes.next_power_of_two());
        }
        let bytes = self.index_room + row_bytes;
        if self.scratch.as_ref().is_none_or(|scratch| scratch.bytes < bytes) {
            // Submitted work and the graph being built point into the old memory.
            self.submit(tier)?;
            self.synchronize();
            self.scratch = None;
            let bytes = bytes.next_multiple_of(SCRATCH_STEP);
            self.scratch = Scratch::new(self.dev, bytes);
            if self.scratch.is_none() && tier.shrink(&self.stream, bytes as u64) > 0 {
                self.scratch = Scratch::new(self.dev, bytes);
            }
            if self.scratch.is_none() {
                return Err(GGML_STATUS_ALLOC_FAILED);
            }
            self.sent = 0;
        }
        Ok(self.index_room)
    }

    pub(super) fn indices_at(&mut self, place: usize, type_: llama::ggml_type, ne: [i64; 2]) -> *mut ggml_tensor {
        let tensor = self.scratch_tensor(type_, [ne[0], ne[1], 1, 1], place);
        self.graph.tensor(tensor)
    }

    pub(super) fn floats_at(&self, place: usize, ne: [i64; 3]) -> ggml_tensor {
        self.scratch_tensor(llama::GGML_TYPE_F32, [ne[0], ne[1], ne[2], 1], place)
    }

    fn scratch_tensor(&self, type_: llama::ggml_type, ne: [i64; 4], place: usize) -> ggml_tensor {
        let whole = self.scratch.as_ref().expect("room was made").tensor;
        // SAFETY: the scratch tensor is live.
        let (data, buffer) = unsafe { ((*whole).data.cast::<u8>().wrapping_add(place), (*whole).buffer) };
        tensor_at(type_, ne, data, buffer, Some(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::expert::Precision;

    fn routing(ids: &[i32], n_used: usize) -> Routing {
        let mut routing = Routing::default();
        routing.set(ids.iter().copied(), n_used, 8).unwrap();
        routing
    }

    fn at(index: u16, row: u32) -> (Used, u32) {
        let used = Used { index, precision: Precision::High, share: 0, row: None, is_on_device: false };
        (used, row)
    }

    fn i32s(bytes: &[u8]) -> Vec<i32> {
        bytes.chunks_exact(4).map(|bytes| i32::from_ne_bytes(bytes.try_into().unwrap())).collect()
    }

    fn i64s(bytes: &[u8]) -> Vec<i64> {
        bytes.chunks_exact(8).map(|bytes| i64::from_ne_bytes(bytes.try_into().unwrap())).collect()
    }

    #[test]
    fn a_tokens_neighbouring_ranks_are_one_run() {
        let routing = routing(&[5, 2, 7, 1], 4);
        let runs = runs_of_ranks(&routing, &[at(1, 10), at(2, 11), at(5, 12)]);
        let runs: Vec<_> = runs.iter().map(|(first, rows)| (*first, i32s(rows))).collect();
        assert_eq!(runs, [(0, vec![12, 11]), (3, vec![10])]);
    }

    #[test]
    fn a_whole_product_has_the_slot_of_every_use() {
        let routing = routing(&[3, 1, 1, 0], 2);
        assert_eq!(i32s(&whole_ids(&routing, &[at(0, 4), at(1, 5), at(3, 6)])), [6, 5, 5, 4]);
    }

    #[test]
    fn gathered_rows_come_expert_by_expert() {
        let routing = routing(&[3, 1, 1, 0], 2);
        let groups = groups_of_rows(&routing, &[at(1, 5), at(3, 6)], 1);
        assert_eq!(groups.len(), 1);
        let [from, slots, to] = gather_indices(&routing, &groups[0], 1);
        assert_eq!((i32s(&from), i32s(&slots), i64s(&to)), (vec![0, 1, 0], vec![5, 5, 6], vec![1, 2, 0]));
        let [from, _, _] = gather_indices(&routing, &groups[0], 2);
        assert_eq!(i32s(&from), [1, 2, 0], "each use has an input row of its own");
    }

    #[test]
    fn groups_are_bounded_but_no_expert_is_divided() {
        let routing = routing(&[3, 1, 1, 0], 2);
        let groups = groups_of_rows(&routing, &[at(1, 0), at(3, 0), at(0, 0)], GATHER_BYTES_MAX);
        assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1]);
    }
}
