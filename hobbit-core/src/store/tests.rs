//! Each test runs on every engine.

use std::path::PathBuf;
use std::sync::Arc;

use crossbeam_channel::unbounded;

#[path = "../../../tests/fixture/not_run.rs"]
mod not_run;

mod mirrors;
mod planes;
mod rows;

use super::faulty::{Faults, FaultyStore, Hold};
use super::*;
use crate::expert::Extent;

/// Slots for tests, on pages; every byte starts as 0xEE.
pub struct SlotMemory {
    arena: Arena,
    slot_bytes: usize,
}

impl SlotMemory {
    pub fn new(slots: usize, slot_bytes: usize) -> Self {
        let arena = Arena::new(slots * slot_bytes).unwrap();
        // SAFETY: the arena is ours and no read has started.
        unsafe { arena.as_ptr().write_bytes(0xEE, arena.len()) };
        Self { arena, slot_bytes }
    }

    pub fn request(&self, ticket: u64, extent: Extent, slot: usize, lead: usize) -> ReadRequest {
        assert!((slot + 1) * self.slot_bytes <= self.arena.len());
        // SAFETY: inside the arena, and the tests wait for every answer before they look or drop.
        let dst = unsafe { SlotPtr::new(self.arena.as_ptr().add(slot * self.slot_bytes)) };
        ReadRequest { ticket, extent, dst, capacity: self.slot_bytes, lead, form: Form::AsIs }
    }

    /// A slot of its own at `shift` bytes into slot number `slot`, with `capacity` bytes.
    fn shifted(&self, extent: Extent, slot: usize, shift: usize, capacity: usize, lead: usize) -> ReadRequest {
        assert!(shift + capacity <= self.slot_bytes);
        let mut request = self.request(slot as u64, extent, slot, lead);
        // SAFETY: as in `request`.
        request.dst = unsafe { SlotPtr::new(request.dst.as_ptr().add(shift)) };
        request.capacity = capacity;
        request
    }

    pub fn bytes(&self, slot: usize, at: usize, len: usize) -> &[u8] {
        assert!(at + len <= self.slot_bytes && (slot + 1) * self.slot_bytes <= self.arena.len());
        // SAFETY: initialised, inside the arena, and no read is in flight when the tests look.
        unsafe { std::slice::from_raw_parts(self.arena.as_ptr().add(slot * self.slot_bytes + at), len) }
    }
}

pub fn read_one(store: &dyn Store, request: ReadRequest) -> ReadDone {
    read_all(store, vec![request]).remove(0)
}

/// Submits and waits for all answers, in the order in which they came.
fn read_all(store: &dyn Store, requests: Vec<ReadRequest>) -> Vec<ReadDone> {
    let (sender, answers) = unbounded();
    let sink: Arc<dyn Completion> = Arc::new(sender);
    let count = requests.len();
    store.submit(requests, &sink);
    (0..count).map(|_| answers.recv().unwrap()).collect()
}

/// Reads all requests; the answers are sorted by ticket.
fn read_sorted(store: &dyn Store, requests: impl Iterator<Item = ReadRequest>) -> Vec<ReadDone> {
    let mut answers = read_all(store, requests.collect());
    answers.sort_by_key(|done| done.ticket);
    answers
}

/// Two files whose byte at `offset` is known; neither length is a multiple of a block.
struct Files {
    folder: tempfile::TempDir,
    contents: Vec<Vec<u8>>,
}

fn byte_at(file: usize, offset: usize) -> u8 {
    ((offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 + file as u64 * 2) >> 56) as u8
}

impl Files {
    fn new() -> Self {
        let lens = [3_000_017, 70_001].into_iter().enumerate();
        Self::of(lens.map(|(file, len)| (0..len).map(|offset| byte_at(file, offset)).collect()).collect())
    }

    fn of(contents: Vec<Vec<u8>>) -> Self {
        // Beside the build's outputs, not in a temporary folder that may be memory without direct reads.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR").to_owned() + "/../target")
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        for (file, bytes) in contents.iter().enumerate() {
            std::fs::write(folder.path().join(file.to_string()), bytes).unwrap();
        }
        Self { folder, contents }
    }

    fn paths(&self) -> Vec<PathBuf> {
        (0..self.contents.len()).map(|file| self.folder.path().join(file.to_string())).collect()
    }

    fn expected(&self, extent: &Extent) -> &[u8] {
        &self.contents[extent.file as usize][extent.offset as usize..extent.end() as usize]
    }

    /// Every engine that this machine has, plain and reordered by a faulty wrapper.
    fn stores(&self) -> Vec<(String, Arc<dyn Store>)> {
        let contents = self.contents.iter().map(|bytes| Arc::from(bytes.as_slice())).collect();
        let mut plain: Vec<(String, Arc<dyn Store>)> = vec![
            ("memory".into(), Arc::new(MemoryStore::new(contents).unwrap())),
            ("buffered".into(), open(StoreKind::Buffered, &self.paths()).unwrap()),
        ];
        if let Some(direct) = self.direct(direct::DirectOptions::default()) {
            plain.push(("direct".into(), direct));
            for (name, depth, chunk_bytes, cut_bytes) in
                [("direct, small chunks", 2, 8192, None), ("direct, short reads", 3, 65536, Some(4096))]
            {
                let options = direct::DirectOptions { depth, chunk_bytes, cut_bytes };
                plain.extend(self.direct(options).map(|store| (name.into(), store)));
            }
        }
        let wrapped: Vec<_> = plain
            .iter()
            .map(|(name, store)| {
                let faults = Faults { hold: Some(Hold { answers_max: 7, seed: 42 }), ..Default::default() };
                let store: Arc<dyn Store> = Arc::new(FaultyStore::new(Arc::clone(store), faults));
                (format!("{name}, reordered"), store)
            })
            .collect();
        plain.into_iter().chain(wrapped).collect()
    }

    fn direct(&self, options: direct::DirectOptions) -> Option<Arc<dyn Store>> {
        if let Err(why) = probe::io_uring().and_then(|()| probe::direct(&self.paths()[0])) {
            not_run::not_run("store: direct reads", why);
            return None;
        }
        let files = self.paths().into_iter().map(|path| {
            let file = probe::open_direct(&path).unwrap();
            original::OpenFile { path, file }
        });
        Some(Arc::new(direct::DirectStore::start(files.collect(), options).unwrap()))
    }
}

/// Places that matter: block borders on either side, one byte, more than a chunk, the unaligned end of each file.
fn extents() -> Vec<Extent> {
    let blocks = [(0, 1), (0, 4096), (4095, 2), (4096, 4096), (32, 8160), (32, 8161), (12_345, 100_000), (500, 0)];
    let ends = [(1_000_000, 1_999_999), (2_999_999, 18), (3_000_016, 1), (0, 3_000_017)];
    let short = [(0, 70_001), (65_536, 4465), (69_632, 369), (70_000, 1)];
    let of = |file, places: &[(u64, u64)]| {
        places.iter().map(|&(offset, len)| Extent { file, offset, len }).collect::<Vec<_>>()
    };
    [of(0, &blocks), of(0, &ends), of(1, &short)].concat()
}

#[test]
fn every_engine_reads_every_extent_to_its_lead() {
    let files = Files::new();
    let extents = extents();
    let slot_bytes = slot_stride(3_000_017) as usize;
    let memory = SlotMemory::new(extents.len(), slot_bytes);
    for (name, store) in files.stores() {
        for wanted_lead in [None, Some(0), Some(64), Some(4095)] {
            // SAFETY: no read is in flight.
            unsafe { memory.arena.as_ptr().write_bytes(0xEE, memory.arena.len()) };
            let lead = |extent: &Extent| wanted_lead.unwrap_or_else(|| lead_of(extent));
            let requests = extents
                .iter()
                .zip(0..)
                .map(|(extent, slot)| memory.request(slot as u64 + 100, *extent, slot, lead(extent)));
            let answers = read_sorted(&*store, requests);
            for (slot, (extent, done)) in extents.iter().zip(&answers).enumerate() {
                assert_eq!(done.ticket, slot as u64 + 100, "{name}");
                let moved = *done.result.as_ref().unwrap_or_else(|error| panic!("{name} {extent:?}: {error}"));
                assert!(moved >= extent.len && moved <= slot_stride(extent.len), "{name} {extent:?}: {moved}");
                let got = memory.bytes(slot, lead(extent), extent.len as usize);
                assert!(got == files.expected(extent), "{name} {extent:?} lead {:?}", lead(extent));
            }
        }
    }
}

#[test]
fn slots_may_be_tight_or_unaligned() {
    let files = Files::new();
    let extent = Extent { file: 0, offset: 4064, len: 10_000 };
    let memory = SlotMemory::new(3, 20_480);
    for (name, store) in files.stores() {
        // Exactly the slice and no block more; an odd address; both.
        for (slot, shift, capacity, lead) in [(0, 0, 10_000, 0), (1, 37, 16_384, 9), (2, 1, 10_001, 1)] {
            let request = memory.shifted(extent, slot, shift, capacity, lead);
            let done = read_one(&*store, request);
            assert!(done.result.is_ok(), "{name}: {done:?}");
            assert!(memory.bytes(slot, shift + lead, 10_000) == files.expected(&extent), "{name} slot {slot}");
            assert!(memory.bytes(slot, shift + capacity, 1) == [0xEE], "{name} wrote past slot {slot}");
        }
    }
}

/// Requests that do not fit their memory or their extent.
fn assert_refused(files: &Files, requests: impl Fn() -> Vec<ReadRequest>) {
    for (name, store) in files.stores() {
        for request in requests() {
            let words = format!("{name} {request:?}");
            let error = read_one(&*store, request).result.unwrap_err();
            assert!(matches!(error, StoreError::SlotTooSmall { .. }), "{words}: {error}");
        }
    }
}

#[test]
fn requests_that_cannot_be_right_are_refused() {
    let files = Files::new();
    let memory = SlotMemory::new(1, 8192);
    let end = i64::MAX as u64 - 10;
    assert_refused(&files, || {
        [(0, 8193, 0), (0, 8192, 1), (0, 1, usize::MAX), (0, u64::MAX, 0), (u64::MAX, 1, 0), (end, 10, 0)]
            .map(|(offset, len, lead)| memory.request(5, Extent { file: 0, offset, len }, 0, lead))
            .into()
    });
    for (name, store) in files.stores() {
        let nowhere = Extent { file: 2, offset: 0, len: 1 };
        let done = read_one(&*store, memory.request(6, nowhere, 0, 0));
        assert!(matches!(done.result, Err(StoreError::NoSuchFile { file: 2, files: 2 })), "{name}");
    }
}

#[test]
fn a_file_that_shrank_is_named() {
    let files = Files::new();
    let memory = SlotMemory::new(3, slot_stride(2_000_000) as usize);
    let stores = files.stores();
    let path = files.folder.path().join("0");
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1_000_100).unwrap();
    for (name, store) in stores.into_iter().filter(|(name, _)| !name.starts_with("memory")) {
        let extents = [
            Extent { file: 0, offset: 0, len: 1_000_100 },
            Extent { file: 0, offset: 32, len: 1_000_069 },
            Extent { file: 0, offset: 2_000_000, len: 50_000 },
        ];
        let requests = extents.iter().zip(0..).map(|(extent, slot)| memory.request(slot as u64, *extent, slot, 0));
        let answers = read_sorted(&*store, requests);
        assert!(answers[0].result.is_ok(), "{name}: {:?}", answers[0]);
        for done in &answers[1..] {
            let error = done.result.as_ref().unwrap_err();
            assert!(matches!(error, StoreError::Shrank { file_len: 1_000_100, .. }), "{name}: {error}");
            let text = error.to_string();
            assert!(text.contains(path.to_str().unwrap()) && text.contains("restore the file"), "{name}: {text}");
        }
    }
}

#[test]
fn a_missing_file_is_named_when_opening() {
    let missing = PathBuf::from("/nonexistent/model.gguf");
    for kind in [StoreKind::Direct, StoreKind::Buffered] {
        let error = open(kind, std::slice::from_ref(&missing)).err().unwrap();
        let named = error.to_string().contains("/nonexistent/model.gguf");
        assert!(named || matches!(error, StoreError::Unavailable { .. }), "{error}");
    }
}

#[test]
fn dropping_a_store_answers_what_it_has_accepted() {
    let files = Files::new();
    let memory = SlotMemory::new(8, slot_stride(1_000_000) as usize);
    for (name, store) in files.stores() {
        let (sender, answers) = unbounded();
        let sink: Arc<dyn Completion> = Arc::new(sender);
        let extent = |slot| Extent { file: 0, offset: slot as u64 * 1000, len: 1_000_000 };
        store.submit((0..8).map(|slot| memory.request(slot as u64, extent(slot), slot, 0)).collect(), &sink);
        drop(store);
        drop(sink);
        // The channel closes when the last answer is out.
        assert_eq!(answers.iter().filter(|done| done.result.is_ok()).count(), 8, "{name}");
    }
}

#[test]
fn memory_that_is_touched_as_needed_keeps_what_is_written() {
    // Many times what is faulted in at once.
    let arena = Arena::touched_as_needed(100 << 20).unwrap();
    arena.need(arena.as_ptr(), 10 << 20);
    arena.need(arena.as_ptr().wrapping_add(5 << 20), usize::MAX);
    // Outside of the arena.
    arena.need(arena.as_ptr().wrapping_sub(1 << 20), 1 << 20);
    arena.need_nothing();
    arena.need(arena.as_ptr().wrapping_add((100 << 20) - 1), 1);
    for offset in (0..arena.len()).step_by(BLOCK_BYTES as usize) {
        // SAFETY: inside the arena, which has no other user.
        unsafe { arena.as_ptr().add(offset).write(7) };
    }
    // SAFETY: as above.
    let is_given_back = unsafe { arena.discard(0..50 << 20) };
    let at = |offset: usize| {
        // SAFETY: inside the arena.
        unsafe { arena.as_ptr().add(offset).read() }
    };
    assert_eq!((at(50 << 20), at(arena.len() - BLOCK_BYTES as usize)), (7, 7));
    assert_eq!(at(0), if is_given_back { 0 } else { 7 });
}
