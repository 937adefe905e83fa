//! Single rows of large tables: read when a graph needs them. The latest are kept in a bounded cache.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use crossbeam_channel::{Receiver, unbounded};

use super::{Arena, Completion, Form, ReadDone, ReadRequest, SlotPtr, Store, StoreError, lead_of, slot_stride};
use crate::expert::Extent;

/// Maximum bytes of a table's cache.
const CACHE_BYTES_MAX: u64 = 8 << 20;
/// A cache holds at most one of so many rows: otherwise the table might as well stay in memory.
const ROWS_PER_PLACE: u64 = 8;
/// Rows read at once.
const READS_MAX: usize = 32;

/// A table of equal rows, one after the other in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTable {
    pub extent: Extent,
    /// At least 1; divides the bytes of `extent`.
    pub n_rows: u64,
}

impl RowTable {
    /// The longest row that a [`RowReader`] takes, in bytes.
    pub const ROW_BYTES_MAX: u64 = 128 << 10;

    pub fn row_bytes(&self) -> u64 {
        self.extent.len / self.n_rows
    }

    fn row(&self, row: u32) -> Extent {
        assert!(u64::from(row) < self.n_rows, "row {row} of {}", self.n_rows);
        let len = self.row_bytes();
        Extent { offset: self.extent.offset + u64::from(row) * len, len, ..self.extent }
    }

    fn n_places(&self) -> u64 {
        (CACHE_BYTES_MAX / self.row_bytes().max(1)).min(self.n_rows / ROWS_PER_PLACE).max(1)
    }
}

/// Reads rows of a model's tables.
pub struct RowReader {
    store: Arc<dyn Store>,
    sink: Arc<dyn Completion>,
    answers: Receiver<ReadDone>,
    tables: Vec<RowTable>,
    caches: Vec<Cache>,
    windows: Windows,
    /// Table and row of each window that is read or about to be taken.
    reads: Vec<(usize, u32)>,
    /// Reads without an answer.
    n_open: usize,
}

impl RowReader {
    /// Memory of a reader, in bytes.
    pub fn memory_bytes(tables: &[RowTable]) -> u64 {
        let caches: u64 = tables.iter().map(|table| table.n_places() * table.row_bytes()).sum();
        caches + READS_MAX as u64 * window_bytes(tables)
    }

    /// A reader of `tables`, whose files `store` has.
    ///
    /// # Errors
    /// [`StoreError::Memory`].
    pub fn new(store: Arc<dyn Store>, tables: Vec<RowTable>) -> Result<Self, StoreError> {
        let memory = |bytes: u64| Arena::new(bytes as usize).map_err(|source| StoreError::Memory { bytes, source });
        let cache = |table: &RowTable| Ok(Cache::new(memory(table.n_places() * table.row_bytes())?, table));
        let caches = tables.iter().map(cache).collect::<Result<_, StoreError>>()?;
        let bytes = window_bytes(&tables);
        let windows = Windows { memory: memory(READS_MAX as u64 * bytes)?, bytes: bytes as usize };
        let (sink, answers) = unbounded();
        Ok(Self { store, sink: Arc::new(sink), answers, tables, caches, windows, reads: Vec::new(), n_open: 0 })
    }

    /// Starts reading rows that will be needed soon, by table and number, as far as they are not in memory.
    ///
    /// # Panics
    /// If a row is not in its table.
    pub fn expect(&mut self, rows: impl Iterator<Item = (usize, u32)>) {
        self.settle();
        let mut reads = Vec::new();
        for (table, row) in rows {
            if reads.len() < READS_MAX && !self.caches[table].has(row) && !reads.contains(&(table, row)) {
                reads.push((table, row));
            }
        }
        self.start(reads);
    }

    /// Gives `take` the bytes of these rows, each with its index in `rows`, in any order.
    ///
    /// # Errors
    /// The first read that failed.
    ///
    /// # Panics
    /// If a row is not in the table.
    pub fn read(
        &mut self,
        table: usize,
        rows: impl Iterator<Item = u32>,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<(), StoreError> {
        self.settle();
        let mut missing = Vec::new();
        for (index, row) in rows.enumerate() {
            match self.caches[table].get(row) {
                Some(bytes) => take(index, bytes),
                None => missing.push((row, index)),
            }
        }
        missing.sort_unstable();
        let by_row: Vec<&[(u32, usize)]> = missing.chunk_by(|a, b| a.0 == b.0).collect();
        for round in by_row.chunks(READS_MAX) {
            self.start(round.iter().map(|same| (table, same[0].0)).collect());
            self.wait()?;
            for (window, same) in round.iter().enumerate() {
                let bytes = self.windows.bytes(window, &self.tables[table].row(same[0].0));
                same.iter().for_each(|&(_, index)| take(index, bytes));
                self.caches[table].put(same[0].0, bytes);
            }
            self.reads.clear();
        }
        Ok(())
    }

    fn start(&mut self, reads: Vec<(usize, u32)>) {
        let request = |(window, &(table, row)): (usize, &(usize, u32))| {
            let extent = self.tables[table].row(row);
            let lead = lead_of(&extent);
            // SAFETY: the window lies in memory of ours that lives until every read is answered (`drop` waits) and
            // that nothing else uses meanwhile: `start` follows the end of the reads before.
            let dst = unsafe { SlotPtr::new(self.windows.start(window)) };
            ReadRequest { ticket: window as u64, extent, dst, capacity: self.windows.bytes, lead, form: Form::AsIs }
        };
        let requests: Vec<ReadRequest> = reads.iter().enumerate().map(request).collect();
        self.n_open = requests.len();
        self.reads = reads;
        if self.n_open > 0 {
            self.store.submit(requests, &self.sink);
        }
    }

    /// Waits for all reads; without an error, their rows are in their windows.
    fn wait(&mut self) -> Result<(), StoreError> {
        let mut result = Ok(());
        for _ in 0..mem::take(&mut self.n_open) {
            let done = self.answers.recv().expect("a sender is kept beside the receiver");
            result = result.and(done.result.map(drop));
        }
        if result.is_err() {
            self.reads.clear();
        }
        result
    }

    /// Puts expected rows into their caches. If one cannot be read, the error occurs again when a graph needs it.
    fn settle(&mut self) {
        if self.wait().is_ok() {
            for (window, (table, row)) in mem::take(&mut self.reads).into_iter().enumerate() {
                self.caches[table].put(row, self.windows.bytes(window, &self.tables[table].row(row)));
            }
        }
    }
}

impl Drop for RowReader {
    fn drop(&mut self) {
        // Reads in flight write to the windows.
        let _ = self.wait();
    }
}

fn window_bytes(tables: &[RowTable]) -> u64 {
    slot_stride(tables.iter().map(RowTable::row_bytes).max().unwrap_or(0))
}

/// Memory that rows are read into, with the rest of their blocks.
struct Windows {
    memory: Arena,
    /// Bytes of one.
    bytes: usize,
}

impl Windows {
    fn start(&self, window: usize) -> *mut u8 {
        assert!(window < READS_MAX);
        self.memory.as_ptr().wrapping_add(window * self.bytes)
    }

    /// The bytes of a row that has been read.
    fn bytes(&self, window: usize, row: &Extent) -> &[u8] {
        // SAFETY: a window has room for a row at any lead; callers have waited for its read.
        unsafe { std::slice::from_raw_parts(self.start(window).add(lead_of(row)), row.len as usize) }
    }
}

/// Rows of one table. Second chance: a row that was used since the hand passed it stays.
struct Cache {
    memory: Arena,
    row_bytes: usize,
    places: HashMap<u32, usize>,
    /// Row in each place, and whether it was used.
    rows: Vec<(Option<u32>, bool)>,
    hand: usize,
}

impl Cache {
    fn new(memory: Arena, table: &RowTable) -> Self {
        let rows = vec![(None, false); table.n_places() as usize];
        Self { memory, row_bytes: table.row_bytes() as usize, places: HashMap::new(), rows, hand: 0 }
    }

    fn has(&self, row: u32) -> bool {
        self.places.contains_key(&row)
    }

    fn get(&mut self, row: u32) -> Option<&[u8]> {
        let place = *self.places.get(&row)?;
        self.rows[place].1 = true;
        // SAFETY: the memory has room for all places, and is ours alone.
        Some(unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(place * self.row_bytes), self.row_bytes) })
    }

    fn put(&mut self, row: u32, bytes: &[u8]) {
        if self.has(row) {
            return;
        }
        while mem::take(&mut self.rows[self.hand].1) {
            self.hand = (self.hand + 1) % self.rows.len();
        }
        let place = self.hand;
        self.hand = (place + 1) % self.rows.len();
        if let Some(evicted) = self.rows[place].0.replace(row) {
            self.places.remove(&evicted);
        }
        self.places.insert(row, place);
        assert_eq!(bytes.len(), self.row_bytes);
        // SAFETY: as in `get`; `bytes` lie in other memory.
        unsafe {
            self.memory.as_ptr().add(place * self.row_bytes).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryStore;
    use super::super::faulty::{Faults, FaultyStore};
    use super::*;

    const ROW: usize = 96;
    const N_ROWS: u32 = 200;

    /// A file with two tables, at odd places, whose rows begin with their number.
    fn file() -> (Arc<[u8]>, Vec<RowTable>) {
        let mut bytes = vec![0u8; 32];
        let mut table = |first: u8| {
            let offset = bytes.len() as u64;
            for row in 0..N_ROWS {
                bytes.extend([row as u8, first]);
                bytes.extend((2..ROW).map(|i| i as u8));
            }
            let extent = Extent { file: 0, offset, len: bytes.len() as u64 - offset };
            bytes.extend([0; 64]);
            RowTable { extent, n_rows: N_ROWS.into() }
        };
        let tables = vec![table(7), table(9)];
        (bytes.into(), tables)
    }

    fn reader(faults: Faults) -> RowReader {
        let (bytes, tables) = file();
        let store = Arc::new(MemoryStore::new(vec![bytes]).unwrap());
        RowReader::new(Arc::new(FaultyStore::new(store, faults)), tables).unwrap()
    }

    fn check(reader: &mut RowReader, table: usize, rows: &[u32]) {
        let mut seen = vec![None; rows.len()];
        let take = |index: usize, bytes: &[u8]| {
            assert_eq!((bytes.len(), bytes[ROW - 1]), (ROW, ROW as u8 - 1));
            assert_eq!(seen[index].replace((u32::from(bytes[0]), bytes[1])), None, "row {index} was given twice");
        };
        reader.read(table, rows.iter().copied(), take).unwrap();
        let wanted: Vec<_> = rows.iter().map(|row| Some((*row, [7, 9][table]))).collect();
        assert_eq!(seen, wanted);
    }

    #[test]
    fn rows_are_read_once_each_and_given_in_every_place() {
        let mut reader = reader(Faults::default());
        check(&mut reader, 0, &[]);
        check(&mut reader, 0, &[3, 199, 3, 0]);
        check(&mut reader, 1, &[0, 3]);
        check(&mut reader, 0, &(0..N_ROWS).rev().chain(0..N_ROWS).collect::<Vec<_>>());
    }

    #[test]
    fn recent_rows_need_no_read_and_the_cache_is_bounded() {
        // Every read after the first three fails.
        let mut reader = reader(Faults { io_error: (3..1000).collect(), ..Faults::default() });
        check(&mut reader, 0, &[5, 6, 7]);
        check(&mut reader, 0, &[7, 6, 5, 5]);
        assert!(reader.read(0, [8].into_iter(), |_, _| ()).is_err());
        check(&mut reader, 0, &[6]);
        let places = reader.caches[0].rows.len();
        assert_eq!(places as u64, u64::from(N_ROWS) / ROWS_PER_PLACE);
        let mut reader = self::reader(Faults::default());
        for row in 0..N_ROWS {
            check(&mut reader, 0, &[row, 0]);
            assert!(reader.caches[0].places.len() <= places);
        }
        // Row 0 was used all along, row 1 never again.
        assert!(reader.caches[0].has(0) && !reader.caches[0].has(1));
    }

    #[test]
    fn expected_rows_are_read_ahead_and_their_errors_wait() {
        let mut reader = reader(Faults { io_error: vec![1], ..Faults::default() });
        reader.expect([(0, 4)].into_iter());
        reader.expect([(0, 4), (1, 4)].into_iter());
        check(&mut reader, 1, &[4]);
        check(&mut reader, 0, &[4]);
        reader.expect((0..N_ROWS).map(|row| (1, row)));
        check(&mut reader, 1, &[0, 150]);
        reader.expect([(0, 1)].into_iter());
    }

    #[test]
    fn a_failed_read_is_an_error_and_harms_no_later_one() {
        let shrunk = [(0, file().1[1].extent.offset + 500)].into();
        let mut reader = reader(Faults { shrunk, ..Faults::default() });
        let error = reader.read(1, [1, 150].into_iter(), |_, _| ()).unwrap_err();
        assert!(matches!(error, StoreError::Shrank { .. }), "{error}");
        check(&mut reader, 1, &[1, 2]);
        check(&mut reader, 0, &[150]);
    }

    #[test]
    fn memory_is_counted() {
        let (_, tables) = file();
        let caches = 2 * (u64::from(N_ROWS) / ROWS_PER_PLACE) * ROW as u64;
        assert_eq!(RowReader::memory_bytes(&tables), caches + READS_MAX as u64 * 8192);
        let extent = Extent { file: 0, offset: 0, len: 4 << 30 };
        let large = RowTable { extent, n_rows: 1 << 20 };
        assert!(RowReader::memory_bytes(&[large]) < 9 << 20);
    }
}
