//! What is finished of a pack that is being written, so that a killed writer can go on.
//!
//! `OUT.partial.journal` is a header and then one row per finished job, 64 bytes each, every one with a checksum of
//! its own: a row torn by a crash is no row. What a row claims is checked against the partial file before it is
//! believed, so neither the order of writes on the disk nor a lost row can do harm.
//!
//! | bytes | header | row |
//! |---|---|---|
//! | 0..8 | `hobbitpj` | number of the job, or 2^64 - 1 for the source's SHA-256 |
//! | 8..16 | 1 | xxh3-64 of the job's bytes, or the SHA-256's first 8 bytes |
//! | 16..40 | SHA-256 of the plan | 0, or the SHA-256's other 24 bytes |
//! | 40..48 | its last 8 bytes | 0 |
//! | 48..56 | 0 | 0 |
//! | 56..64 | xxh3-64 of bytes 0..56 | xxh3-64 of bytes 0..56 |

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::format::Sha256;
use crate::files::sole::{self, SoleError};

const ROW: usize = 64;
const MAGIC: &[u8; 8] = b"hobbitpj";
const VERSION: u64 = 1;
const SOURCE_DIGEST: u64 = u64::MAX;

/// A journal open for writing, locked against other writers.
pub(super) struct Journal {
    file: File,
    pub path: PathBuf,
}

/// What an earlier writer has left behind.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Finished {
    /// Job and xxh3-64 of its bytes, in the order of finishing.
    pub jobs: Vec<(usize, u64)>,
    /// The source's digest.
    pub source: Option<Sha256>,
}

fn seal(mut row: [u8; ROW]) -> [u8; ROW] {
    let checksum = xxh3_64(&row[..56]);
    row[56..].copy_from_slice(&checksum.to_le_bytes());
    row
}

/// The bytes of a row from `at` on.
fn part<const N: usize>(row: &[u8; ROW], at: usize) -> [u8; N] {
    row[at..at + N].try_into().expect("parts lie in the row")
}

/// Of a first word and what follows it.
fn row(first: u64, rest: &[u8]) -> [u8; ROW] {
    let mut row = [0; ROW];
    row[..8].copy_from_slice(&first.to_le_bytes());
    row[8..8 + rest.len()].copy_from_slice(rest);
    seal(row)
}

fn header(plan: &Sha256) -> [u8; ROW] {
    row(u64::from_le_bytes(*MAGIC), &[&VERSION.to_le_bytes()[..], &plan.0].concat())
}

impl Journal {
    /// Opens the journal at `path` for the plan of this digest, and says what is finished. `fresh`: nothing is, whatever
    /// the journal says. `None`: it belongs to another plan.
    pub fn open(path: &Path, plan: &Sha256, fresh: bool) -> Result<Option<(Self, Finished)>, SoleError> {
        let mut file = sole::open(path)?;
        let mut bytes = Vec::new();
        if !fresh {
            file.read_to_end(&mut bytes)?;
        }
        let finished = match bytes.as_chunks().0.split_first() {
            Some((first, rows)) if *first == header(plan) => {
                // A torn last row is cut off, so that what follows begins at a row's place.
                let whole = ((rows.len() + 1) * ROW) as u64;
                file.set_len(whole)?;
                file.seek(SeekFrom::Start(whole))?;
                finished(rows)
            }
            Some((first, _)) if seal(*first) == *first && first.starts_with(MAGIC) => return Ok(None),
            // Empty, or killed while the header was written: nothing was finished then.
            _ => {
                file.set_len(0)?;
                file.seek(SeekFrom::Start(0))?;
                file.write_all(&header(plan))?;
                Finished::default()
            }
        };
        Ok(Some((Self { file, path: path.to_owned() }, finished)))
    }

    /// Notes that a job is finished.
    pub fn job(&mut self, job: usize, checksum: u64) -> io::Result<()> {
        self.file.write_all(&row(job as u64, &checksum.to_le_bytes()))
    }

    /// Notes the source's digest.
    pub fn source(&mut self, digest: &Sha256) -> io::Result<()> {
        self.file.write_all(&row(SOURCE_DIGEST, &digest.0))
    }
}

fn finished(rows: &[[u8; ROW]]) -> Finished {
    let mut finished = Finished::default();
    for row in rows.iter().filter(|row| seal(**row) == **row) {
        match u64::from_le_bytes(part(row, 0)) {
            SOURCE_DIGEST => finished.source = Some(Sha256(part(row, 8))),
            job => {
                let checksum = u64::from_le_bytes(part(row, 8));
                finished.jobs.extend(usize::try_from(job).ok().map(|job| (job, checksum)));
            }
        }
    }
    finished
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Sha256 = Sha256([7; 32]);

    #[test]
    fn rows_are_found_again_and_damaged_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let (mut journal, finished) = Journal::open(&path, &PLAN, false).unwrap().unwrap();
        assert_eq!(finished, Finished::default());
        journal.job(3, 33).unwrap();
        journal.job(0, 44).unwrap();
        journal.source(&Sha256([9; 32])).unwrap();
        journal.job(5, 55).unwrap();
        assert!(matches!(Journal::open(&path, &PLAN, false), Err(SoleError::Busy)));
        drop(journal);

        let mut bytes = std::fs::read(&path).unwrap();
        bytes[64 + 9] ^= 1; // the first row
        bytes.truncate(bytes.len() - 1); // the last one
        std::fs::write(&path, &bytes).unwrap();
        let (mut journal, finished) = Journal::open(&path, &PLAN, false).unwrap().unwrap();
        assert_eq!(finished, Finished { jobs: vec![(0, 44)], source: Some(Sha256([9; 32])) });
        journal.job(6, 66).unwrap();
        drop(journal);

        assert!(matches!(Journal::open(&path, &Sha256([8; 32]), false), Ok(None)));
        let (journal, finished) = Journal::open(&path, &PLAN, false).unwrap().unwrap();
        assert_eq!(finished.jobs, [(0, 44), (6, 66)]);
        drop(journal);
        let (_, finished) = Journal::open(&path, &Sha256([8; 32]), true).unwrap().unwrap();
        assert_eq!((finished, std::fs::read(&path).unwrap().len()), (Finished::default(), 64));
    }

    #[test]
    fn a_journal_cut_anywhere_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let (mut journal, _) = Journal::open(&path, &PLAN, false).unwrap().unwrap();
        journal.job(1, 1).unwrap();
        drop(journal);
        let bytes = std::fs::read(&path).unwrap();
        for cut in 0..bytes.len() {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let (_, finished) = Journal::open(&path, &PLAN, false).unwrap().unwrap();
            assert_eq!(finished, Finished::default(), "{cut}");
        }
    }
}
