//! Base files: a model's log-probabilities over a text, for others to be compared with.
//!
//! The format of `llama-perplexity --kl-divergence-base`, little-endian throughout:
//!
//! ```text
//! 8 bytes  "_logits_"
//! i32      n_ctx
//! i32      n_vocab
//! i32      n_chunk
//! i32      tokens, [n_ctx, n_chunk]
//! u16      rows, [row_words(n_vocab), n_ctx - 1 - n_ctx / 2, n_chunk]    see super::logits
//! ```
//!
//! Rows are written as they are computed, out of order if chunks are evaluated together. The first 8 bytes are written
//! last, so that the file of an interrupted run does not count as a base.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::chunking::n_scored;
use super::logits::row_words;
use crate::files;
use crate::options::Token;

const MAGIC: &[u8; 8] = &files::BASE_MAGIC;
const HEAD_BYTES: u64 = MAGIC.len() as u64 + 3 * 4;

#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    #[error("{}: cannot {action} this base file: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },
    #[error(
        "{}: this does not look like a file containing log-probabilities, or the run that made it did not end",
        path.display()
    )]
    NotABase { path: PathBuf },
    /// A number in the head that no run writes.
    #[error("{}: the head is damaged ({what} is {found}); make the base again", path.display())]
    Damaged { path: PathBuf, what: &'static str, found: i64 },
    /// The run that made it did not end: bytes found and expected, and complete chunks.
    #[error(
        "{}: cut off: {found} bytes where {expected} belong; it holds {complete} complete chunks; use no more, or \
         make the base again",
        path.display()
    )]
    CutOff { path: PathBuf, found: u64, expected: u64, complete: usize },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseHead {
    pub n_ctx: usize,
    pub n_vocab: usize,
    /// The text, `[n_ctx, n_chunk]`.
    pub tokens: Vec<Token>,
}

impl BaseHead {
    pub fn n_chunk(&self) -> usize {
        self.tokens.len() / self.n_ctx.max(1)
    }

    fn row_bytes(&self) -> u64 {
        row_words(self.n_vocab) as u64 * 2
    }

    fn chunk_bytes(&self) -> u64 {
        self.row_bytes() * n_scored(self.n_ctx) as u64
    }

    /// Where a row lies in the file. Saturates: a hostile head may have any numbers.
    fn offset(&self, chunk: usize, row: usize) -> u64 {
        let before = HEAD_BYTES + 4 * self.tokens.len() as u64;
        let chunks = self.chunk_bytes().saturating_mul(chunk as u64);
        before.saturating_add(chunks).saturating_add(self.row_bytes().saturating_mul(row as u64))
    }
}

pub struct BaseWriter {
    path: PathBuf,
    file: File,
    head: BaseHead,
}

impl BaseWriter {
    /// Creates the file, or empties the base file that is there, and writes its head.
    pub fn create(path: &Path, head: BaseHead) -> Result<Self, BaseError> {
        let mut bytes = vec![0; MAGIC.len()];
        for (what, n) in [("n_ctx", head.n_ctx), ("n_vocab", head.n_vocab), ("n_chunk", head.n_chunk())] {
            let found = i64::try_from(n).unwrap_or(i64::MAX);
            let n = i32::try_from(n).map_err(|_| BaseError::Damaged { path: path.to_owned(), what, found })?;
            bytes.extend(n.to_le_bytes());
        }
        bytes.extend(head.tokens.iter().flat_map(|token| token.to_le_bytes()));
        let file = files::create(path, files::Kind::Base).and_then(|mut file| file.write_all(&bytes).map(|()| file));
        let file = file.map_err(|source| BaseError::Io { path: path.to_owned(), action: "write", source })?;
        Ok(Self { path: path.to_owned(), file, head })
    }

    /// Writes neighbouring rows of a chunk, from row number `row` on, as [`super::logits::encode`] makes them.
    pub fn rows(&mut self, chunk: usize, row: usize, words: &[u16]) -> Result<(), BaseError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write_at(self.head.offset(chunk, row), &bytes)
    }

    /// Marks the file as complete.
    pub fn finish(mut self) -> Result<(), BaseError> {
        self.write_at(0, MAGIC)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BaseError> {
        let written = self.file.seek(SeekFrom::Start(offset)).and_then(|_| self.file.write_all(bytes));
        written.map_err(|source| BaseError::Io { path: self.path.clone(), action: "write", source })
    }
}

pub struct BaseReader {
    path: PathBuf,
    file: File,
    pub head: BaseHead,
    bytes: u64,
}

impl BaseReader {
    /// Opens a base file and reads its head. Every number is checked against the file's length before memory is taken.
    pub fn open(path: &Path) -> Result<Self, BaseError> {
        let io = |source| BaseError::Io { path: path.to_owned(), action: "read", source };
        let mut file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let mut head = [0u8; HEAD_BYTES as usize];
        if bytes < HEAD_BYTES {
            return Err(BaseError::NotABase { path: path.to_owned() });
        }
        file.read_exact(&mut head).map_err(io)?;
        let (magic, numbers) = head.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(BaseError::NotABase { path: path.to_owned() });
        }
        let damaged = |what, found| BaseError::Damaged { path: path.to_owned(), what, found };
        let mut counts = [0usize; 3];
        // Below 3 tokens of context no token is scored.
        for (i, (what, least)) in [("n_ctx", 3), ("n_vocab", 1), ("n_chunk", 1)].into_iter().enumerate() {
            let number = i32::from_le_bytes([0, 1, 2, 3].map(|byte| numbers[4 * i + byte]));
            counts[i] =
                usize::try_from(number).ok().filter(|&n| n >= least).ok_or_else(|| damaged(what, number.into()))?;
        }
        let [n_ctx, n_vocab, n_chunk] = counts;
        let n_tokens = n_ctx as u64 * n_chunk as u64;
        if n_tokens > (bytes - HEAD_BYTES) / 4 {
            return Err(damaged("n_chunk", n_chunk as i64));
        }
        let mut tokens = vec![0u8; n_tokens as usize * 4];
        file.read_exact(&mut tokens).map_err(io)?;
        let tokens: Vec<Token> =
            tokens.chunks_exact(4).map(|b| Token::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let is_known = |token: Token| usize::try_from(token).is_ok_and(|token| token < n_vocab);
        if let Some(&token) = tokens.iter().find(|&&token| !is_known(token)) {
            return Err(damaged("a token", token.into()));
        }
        Ok(Self { path: path.to_owned(), file, head: BaseHead { n_ctx, n_vocab, tokens }, bytes })
    }

    /// Checks that the file has the rows of the first `n_chunk` chunks.
    pub fn holds(&self, n_chunk: usize) -> Result<(), BaseError> {
        let rows = self.bytes - self.head.offset(0, 0);
        let complete = usize::try_from(rows / self.head.chunk_bytes()).unwrap_or(usize::MAX);
        if complete >= n_chunk {
            return Ok(());
        }
        let expected = self.head.offset(n_chunk, 0);
        Err(BaseError::CutOff { path: self.path.clone(), found: self.bytes, expected, complete })
    }

    /// Reads neighbouring rows of a chunk, from row number `row` on.
    pub fn rows(&mut self, chunk: usize, row: usize, words: &mut [u16]) -> Result<(), BaseError> {
        let mut bytes = vec![0u8; words.len() * 2];
        let offset = self.head.offset(chunk, row);
        let read = self.file.seek(SeekFrom::Start(offset)).and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(|source| BaseError::Io { path: self.path.clone(), action: "read", source })?;
        for (word, pair) in words.iter_mut().zip(bytes.chunks_exact(2)) {
            *word = u16::from_le_bytes([pair[0], pair[1]]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> BaseHead {
        BaseHead { n_ctx: 4, n_vocab: 5, tokens: (0..8).map(|i| i % 5).collect() }
    }

    fn written(dir: &Path) -> PathBuf {
        let path = dir.join("base");
        let mut writer = BaseWriter::create(&path, head()).unwrap();
        // One scored token a chunk, in any order.
        writer.rows(1, 0, &[9; 10]).unwrap();
        writer.rows(0, 0, &[7; 10]).unwrap();
        assert!(matches!(BaseReader::open(&path), Err(BaseError::NotABase { .. })), "not finished yet");
        writer.finish().unwrap();
        path
    }

    #[test]
    fn a_base_round_trips_in_the_documented_layout() {
        let dir = tempfile::tempdir().unwrap();
        let path = written(dir.path());
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 20 + 8 * 4 + 2 * 20);
        assert_eq!(bytes[..24], *b"_logits_\x04\0\0\0\x05\0\0\0\x02\0\0\0\0\0\0\0");
        let mut reader = BaseReader::open(&path).unwrap();
        assert_eq!((&reader.head, reader.head.n_chunk()), (&head(), 2));
        reader.holds(2).unwrap();
        let mut words = [0; 10];
        for (chunk, word) in [(1, 9), (0, 7)] {
            reader.rows(chunk, 0, &mut words).unwrap();
            assert_eq!(words, [word; 10]);
        }
        assert!(reader.rows(2, 0, &mut words).is_err());
    }

    #[test]
    fn a_cut_off_base_names_the_complete_chunks() {
        let dir = tempfile::tempdir().unwrap();
        let path = written(dir.path());
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let reader = BaseReader::open(&path).unwrap();
        reader.holds(1).unwrap();
        let error = reader.holds(2).unwrap_err().to_string();
        assert!(error.contains("91 bytes where 92 belong") && error.contains("holds 1 complete"), "{error}");
    }

    #[test]
    fn nonsense_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = written(dir.path());
        let good = std::fs::read(&path).unwrap();
        for (offset, bytes, part) in [
            (0, &b"x"[..], "does not look like"),
            (8, &2i32.to_le_bytes(), "n_ctx is 2"),
            (8, &(-1i32).to_le_bytes(), "n_ctx is -1"),
            (12, &0i32.to_le_bytes(), "n_vocab is 0"),
            (16, &i32::MAX.to_le_bytes(), "n_chunk is 2147483647"),
            (20, &5i32.to_le_bytes(), "a token is 5"),
            (20, &(-1i32).to_le_bytes(), "a token is -1"),
        ] {
            let mut bad = good.clone();
            bad[offset..offset + bytes.len()].copy_from_slice(bytes);
            std::fs::write(&path, bad).unwrap();
            let error = BaseReader::open(&path).err().unwrap().to_string();
            assert!(error.contains(part) && error.contains("base"), "{error}");
        }
        for length in [0, 19] {
            std::fs::write(&path, &good[..length]).unwrap();
            assert!(matches!(BaseReader::open(&path), Err(BaseError::NotABase { .. })));
        }
        assert!(matches!(BaseReader::open(&dir.path().join("none")), Err(BaseError::Io { .. })));
    }
}
