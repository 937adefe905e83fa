//! Copies of a model's files on another disk: found by name, compared with the model before they are trusted.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::{Original, StoreError, advise_random};
use crate::files::FileExt;
use crate::files::FileState;
use crate::random::SplitMix64;

/// Bytes at the start of a file that are compared as a whole: the header is there.
const HEAD_BYTES: u64 = 16 << 20;
/// Sampled blocks behind them, and their size.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 4096;

/// A copy of a model's files, or of some of them; each may end earlier than the model's.
#[derive(Debug)]
pub struct Mirror {
    /// The path that the user gave.
    pub path: PathBuf,
    files: Vec<Original>,
    /// By file of the model, its copy in `files`.
    places: Vec<Option<usize>>,
}

/// Why a mirror cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    #[error("{}: cannot read this file: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{}: this is no regular file", path.display())]
    NoFile { path: PathBuf },
    #[error("{}: no file of the model's names is in this directory", path.display())]
    NoneOfTheNames { path: PathBuf },
    #[error("{}: this file is the model's own, no copy on another disk", path.display())]
    Same { path: PathBuf },
    #[error("{}: this file is empty", path.display())]
    Empty { path: PathBuf },
    #[error("{}: this file is longer than {}: {len} bytes, not {expected}", path.display(), model.display())]
    Longer { path: PathBuf, model: PathBuf, len: u64, expected: u64 },
    #[error("{}: this file differs from {} (at byte {offset})", path.display(), model.display())]
    Differs { path: PathBuf, model: PathBuf, offset: u64 },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Places where copies of `names` may be: `path` itself, or files of these names in it.
pub fn candidates<'a>(path: &Path, names: impl Iterator<Item = &'a Path>) -> Vec<PathBuf> {
    if !path.is_dir() {
        return vec![path.to_owned()];
    }
    names.filter_map(Path::file_name).map(|name| path.join(name)).collect()
}

impl Mirror {
    /// Opens the copy of `originals` at `path`, and compares the start and some blocks of each file. A file is that of
    /// the same name, else the first; in a directory, files may be missing.
    pub fn open(path: &Path, originals: &[Original]) -> Result<Self, MirrorError> {
        let mut mirror = Self { path: path.to_owned(), files: Vec::new(), places: vec![None; originals.len()] };
        let metadata = std::fs::metadata(path).map_err(|source| unreadable(path, source))?;
        if metadata.is_dir() {
            for (place, original) in originals.iter().enumerate() {
                let Some(name) = original.path.file_name() else { continue };
                match checked(&path.join(name), original) {
                    Err(MirrorError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                    found => mirror.add(place, found?),
                }
            }
        } else {
            let is_named = |original: &Original| original.path.file_name() == path.file_name();
            let place = originals.iter().position(is_named).unwrap_or(0);
            mirror.add(place, checked(path, &originals[place])?);
        }
        if mirror.files.is_empty() { Err(MirrorError::NoneOfTheNames { path: path.to_owned() }) } else { Ok(mirror) }
    }

    fn add(&mut self, place: usize, file: Original) {
        self.places[place] = Some(self.files.len());
        self.files.push(file);
    }

    /// The files, as their store reads them.
    pub fn files(&self) -> &[Original] {
        &self.files
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.state.len).sum()
    }

    /// Checks that the copy of file `file` of the model has not been written to since it was compared.
    pub(super) fn check_unwritten(&self, file: u32) -> Result<(), StoreError> {
        let place = self.places.get(file as usize).copied().flatten();
        place.map_or(Ok(()), |place| self.files[place].check_unwritten())
    }

    /// The number in [`Mirror::files`] of the copy of file `file` of the model, if it has the bytes up to `end`.
    pub(super) fn place(&self, file: u32, end: u64) -> Option<u32> {
        let place = (*self.places.get(file as usize)?)?;
        (end <= self.files[place].state.len).then_some(place as u32) // as many as the model has
    }
}

fn unreadable(path: &Path, source: io::Error) -> MirrorError {
    MirrorError::Unreadable { path: path.to_owned(), source }
}

/// Opens a copy of `original` and compares it.
fn checked(path: &Path, original: &Original) -> Result<Original, MirrorError> {
    // Opening a pipe waits for its writer.
    let metadata = std::fs::metadata(path).map_err(|source| unreadable(path, source))?;
    if !metadata.is_file() {
        return Err(MirrorError::NoFile { path: path.to_owned() });
    }
    let (state, model) = (FileState::at(path).map_err(|source| unreadable(path, source))?, || original.path.clone());
    let expected = original.state.len;
    if state.is_same_file(&original.state) {
        return Err(MirrorError::Same { path: path.to_owned() });
    }
    if state.len == 0 {
        return Err(MirrorError::Empty { path: path.to_owned() });
    }
    if state.len > expected {
        return Err(MirrorError::Longer { path: path.to_owned(), model: model(), len: state.len, expected });
    }
    let copy = match Original::open(path, state) {
        Err(StoreError::Open { path, source, .. }) => return Err(MirrorError::Unreadable { path, source }),
        opened => opened?,
    };
    let (file, of_model) = (copy.again()?, original.again()?);
    [&file, &of_model].into_iter().for_each(advise_random);
    for (offset, len) in samples(state.len) {
        let [found, wanted] = [(&file, path), (&of_model, original.path.as_path())].map(|(file, path)| {
            let bytes = read(file, offset, len);
            bytes.map_err(|source| unreadable(path, source))
        });
        if found? != wanted? {
            return Err(MirrorError::Differs { path: path.to_owned(), model: model(), offset });
        }
    }
    copy.check()?;
    Ok(copy)
}

fn read(file: &File, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len as usize]; // a MiB at most
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// Ranges of a file of `len` bytes to compare, as offset and length: all of the start, then a block in each of equal
/// parts of the rest, the last one at the end.
fn samples(len: u64) -> Vec<(u64, u64)> {
    const MIB: u64 = 1 << 20;
    let head = len.min(HEAD_BYTES);
    let mut samples: Vec<_> = (0..head).step_by(MIB as usize).map(|at| (at, MIB.min(head - at))).collect();
    let rest = len - head;
    if rest <= SAMPLES * SAMPLE_BYTES {
        samples.extend((rest > 0).then_some((head, rest)));
        return samples;
    }
    let mut random = SplitMix64::new(0);
    let part = rest / SAMPLES;
    let place = |i: u64| head + i * part + random.bits() % (part - SAMPLE_BYTES + 1);
    samples.extend((0..SAMPLES).map(place).map(|at| (at, SAMPLE_BYTES)));
    samples.push((len - SAMPLE_BYTES, SAMPLE_BYTES));
    samples
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn original(path: &Path, bytes: &[u8]) -> Original {
        fs::write(path, bytes).unwrap();
        Original::open(path, FileState::at(path).unwrap()).unwrap()
    }

    #[test]
    fn samples_have_the_start_the_end_and_blocks_between() {
        assert_eq!(samples(5000), [(0, 5000)]);
        for len in [HEAD_BYTES + 1, HEAD_BYTES + 1_000_000, 40 << 30] {
            let samples = samples(len);
            let head: u64 = samples.iter().take_while(|(at, _)| *at < HEAD_BYTES).map(|(_, len)| len).sum();
            assert_eq!(head, HEAD_BYTES, "{len}");
            assert_eq!(samples.last().map(|(at, n)| at + n), Some(len));
            assert!(samples.iter().all(|(at, n)| at + n <= len && *n <= 1 << 20), "{len}: {samples:?}");
            assert!(samples.len() as u64 <= 16 + SAMPLES + 1);
        }
    }

    #[test]
    fn copies_are_compared() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
        let models = [original(&dir.path().join("a"), &bytes), original(&dir.path().join("b"), &bytes[7..1_000_007])];
        let path = other.path().join("copy");
        let open = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            Mirror::open(&path, &models)
        };
        for len in [1, 4096, 1_234_567, 3_000_000] {
            let mirror = open(&bytes[..len]).unwrap();
            assert_eq!(
                (mirror.bytes(), mirror.place(0, len as u64), mirror.place(0, len as u64 + 1)),
                (len as u64, Some(0), None)
            );
            assert_eq!((mirror.place(1, 1), mirror.place(2, 1)), (None, None));
        }
        let mut changed = bytes.clone();
        changed[2_999_999] ^= 1;
        let longer = [bytes.as_slice(), &[0]].concat();
        for (bytes, reason) in [(&changed[..], "differs from"), (&longer, "longer than"), (&[], "empty")] {
            let error = open(bytes).unwrap_err().to_string();
            assert!(error.starts_with(path.to_str().unwrap()) && error.contains(reason), "{error}");
        }
        let open = |path: &Path| Mirror::open(path, &models).map_err(|error| error.to_string());
        assert!(open(&other.path().join("absent")).unwrap_err().contains("cannot read this file: "));
        assert!(open(&models[0].path).unwrap_err().contains("the model's own"));
        if cfg!(unix) {
            assert!(open(Path::new("/dev/zero")).unwrap_err().contains("no regular file"));
        }
        assert!(open(other.path()).unwrap_err().contains("no file of the model's names"));
        // Files of a directory are found by name; one file, too.
        fs::write(other.path().join("b"), &bytes[7..100]).unwrap();
        for path in [other.path().to_owned(), other.path().join("b")] {
            let mirror = open(&path).unwrap();
            assert_eq!((mirror.place(1, 93), mirror.place(1, 94), mirror.place(0, 1)), (Some(0), None, None));
        }
        let names = [models[0].path.as_path(), &models[1].path];
        assert_eq!(candidates(other.path(), names.into_iter()), [other.path().join("a"), other.path().join("b")]);
        assert_eq!(candidates(&path, names.into_iter()), [path]);
    }
}
