//! Bandwidth of random reads of a slice's size: the roofline that benches print beside their results.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;

use super::{Arena, Completion, Form, ReadDone, ReadRequest, SlotPtr, Store, StoreError, lead_of, slot_stride};
use crate::expert::Extent;
use crate::random::SplitMix64;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    pub reads: u64,
    /// Bytes moved, whole blocks included.
    pub bytes: u64,
    /// Wall time from the first request to the last answer.
    pub elapsed: Duration,
}

impl Bandwidth {
    /// Bytes per second of wall time; 0 when nothing was measured.
    pub fn bytes_per_second(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }
}

/// Reads slices of `slice_bytes` at random places of `ranges` (say, the expert tensors), `depth` at a time, until
/// `bytes_max` bytes are asked for or `duration_max` is over. The places are the same in every run, and 32-byte
/// aligned as a GGUF's tensors are. Memory use: `depth` slots.
///
/// # Errors
/// The first failed read. Ranges shorter than a slice are not read; when all are, the result is empty.
pub fn measure_random_read(
    store: &dyn Store,
    ranges: &[Extent],
    slice_bytes: u64,
    depth: usize,
    bytes_max: u64,
    duration_max: Duration,
) -> Result<Bandwidth, StoreError> {
    let mut places = places(ranges, slice_bytes);
    let slot_bytes = slot_stride(slice_bytes) as usize;
    let bytes = slot_bytes * depth;
    let slots = Arena::new(bytes).map_err(|source| StoreError::Memory { bytes: bytes as u64, source })?;
    let request = |slot: usize, extent: Extent| ReadRequest {
        ticket: slot as u64,
        extent,
        // SAFETY: slot number `slot < depth` lies in the arena, which outlives the loop below: every request is
        // answered before the arena is dropped, and a slot is reused only after its answer.
        dst: unsafe { SlotPtr::new(slots.as_ptr().add(slot * slot_bytes)) },
        capacity: slot_bytes,
        lead: lead_of(&extent),
        form: Form::AsIs,
    };
    let (sender, answers) = unbounded::<ReadDone>();
    let sink: Arc<dyn Completion> = Arc::new(sender);
    let started = Instant::now();
    let mut result = Bandwidth { reads: 0, bytes: 0, elapsed: Duration::ZERO };
    let mut failure = None;
    let mut asked = 0;
    let mut in_flight = 0;
    let mut idle: Vec<usize> = (0..depth).collect();
    loop {
        while failure.is_none() && asked < bytes_max && started.elapsed() < duration_max {
            let Some(slot) = idle.pop() else { break };
            let Some(extent) = places.next() else { break };
            store.submit(vec![request(slot, extent)], &sink);
            asked += slice_bytes.max(1);
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        let done = answers.recv().expect("the sink is alive, and a store answers every request");
        in_flight -= 1;
        idle.push(done.ticket as usize);
        match done.result {
            Ok(bytes) => {
                result.reads += 1;
                result.bytes += bytes;
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    result.elapsed = started.elapsed();
    failure.map_or(Ok(result), Err)
}

/// An endless, repeatable series of places; empty if no range is long enough.
fn places(ranges: &[Extent], slice_bytes: u64) -> impl Iterator<Item = Extent> {
    let ranges: Vec<Extent> = ranges.iter().copied().filter(|range| range.len >= slice_bytes).collect();
    let mut random = SplitMix64::new(0);
    let mut random = move |below: u64| random.bits() % below;
    std::iter::from_fn(move || {
        let range = ranges.get(random(ranges.len().max(1) as u64) as usize)?;
        let offset = range.offset + random(range.len - slice_bytes + 1) / 32 * 32;
        Some(Extent { file: range.file, offset, len: slice_bytes })
    })
}

#[cfg(test)]
mod tests {
    use super::super::MemoryStore;
    use super::*;

    #[test]
    fn places_lie_in_ranges_that_are_long_enough() {
        let ranges = [
            Extent { file: 0, offset: 64, len: 999 },
            Extent { file: 1, offset: 96, len: 1000 },
            Extent { file: 2, offset: 4096, len: 5000 },
        ];
        let mut seen = [0; 3];
        for place in places(&ranges, 1000).take(500) {
            let range = ranges[place.file as usize];
            assert!(place.offset >= range.offset && place.end() <= range.end() && place.offset % 32 == 0, "{place:?}");
            seen[place.file as usize] += 1;
        }
        assert!(seen[0] == 0 && seen[1] > 100 && seen[2] > 100, "{seen:?}");
        assert!(places(&ranges, 6000).next().is_none());
    }

    #[test]
    fn it_reads_what_it_is_asked_to_and_reports_failures() {
        let store = MemoryStore::new(vec![vec![7; 100_000].into()]).unwrap();
        let whole = [Extent { file: 0, offset: 0, len: 100_000 }];
        let hour = Duration::from_secs(3600);
        let measured = measure_random_read(&store, &whole, 1000, 3, 10_000, hour).unwrap();
        assert_eq!((measured.reads, measured.bytes), (10, 10_000));
        let none = measure_random_read(&store, &whole, 200_000, 3, 10_000, hour).unwrap();
        assert_eq!((none.reads, none.bytes_per_second() >= 0.0), (0, true));
        let beyond = [Extent { file: 0, offset: 99_968, len: 64 }];
        assert!(measure_random_read(&store, &beyond, 64, 2, 1000, hour).is_err());
    }
}
