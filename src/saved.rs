//! A saved sequence, the server's slot or hobbit-cli's prompt: the tokens, llama.cpp's state for them, and checkpoints
//! if the model needs them to go back. Damaged files and those of another model are refused before llama.cpp reads
//! them, and files of other kinds are never replaced.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

use hobbit::options::Token;
use hobbit_core::checkpoints::Checkpoint;
use hobbit_core::files;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Magic, mark, number of tokens, bytes of the state, checksum of the remaining data.
const HEADER: usize = 8 + 8 + 8 + 8 + 8;
/// A checkpoint, after the state: number of tokens, whether it is a boundary, bytes of the state.
const CHECKPOINT_HEADER: usize = 8 + 8 + 8;
/// Maximum bytes to read.
const BYTES_MAX: u64 = 64 << 30;

/// A mark of the model and its options: sequences with another mark are refused.
#[cfg(feature = "engine")]
pub fn mark(model: &hobbit::Model, model_options: &hobbit::ModelOptions, options: &hobbit::SessionOptions) -> u64 {
    let info = model.info();
    let adapters = &model_options.adapters;
    let words = format!(
        "{} {} {} {} {} {:?} {:?} {:?} {:?}",
        info.architecture,
        info.n_params,
        info.tensor_bytes,
        info.n_layer,
        model.n_vocab(),
        options.type_k,
        options.type_v,
        options.rope,
        model_options.kv_overrides,
    );
    // Fine-tunes of a model differ only in their weights.
    let print = hobbit_core::pack::fingerprint(model.gguf()).map_or_else(|_| String::new(), |print| print.to_string());
    // Keys and values of approximate runs are approximate.
    let approximate = if model_options.precision.demands_exactness() {
        String::new()
    } else {
        format!("{:?} {:?} {:?}", model_options.low, model_options.precision, model_options.routing)
    };
    let words = format!("{words} {print} {approximate}");
    // Adapters and control vectors change the state: identify the files by name and size.
    let mut words = vec![words];
    for (flag, path) in adapters.files() {
        let size = std::fs::metadata(path).map_or(0, |found| found.len());
        words.push(format!("{flag} {} {size}", path.file_name().unwrap_or_default().display()));
    }
    words.extend(adapters.control_vectors.iter().map(|file| file.scale.to_string()));
    words.extend(adapters.control_layers.map(|layers| format!("{layers:?}")));
    xxh3_64(words.join("\n").as_bytes())
}

/// The mark for these LoRA scales.
pub fn mark_with(mark: u64, lora: &[f32]) -> u64 {
    if lora.iter().all(|scale| *scale == 0.0) {
        return mark;
    }
    let with = |mark: u64, scale: &f32| [mark.to_le_bytes(), u64::from(scale.to_bits()).to_le_bytes()].concat();
    lora.iter().fold(mark, |mark, scale| xxh3_64(&with(mark, scale)))
}

/// A saved sequence.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Saved {
    pub tokens: Vec<Token>,
    pub state: Vec<u8>,
    /// In the order of their tokens.
    pub checkpoints: Vec<Checkpoint>,
}

/// Writes a slot and returns its length in bytes. Readers see the old file or the new one.
///
/// # Errors
/// `InvalidInput` if the name is taken by anything but a saved slot; otherwise the system's error.
pub fn write(
    path: &Path,
    mark: u64,
    tokens: &[Token],
    state: &[u8],
    checkpoints: &[Checkpoint],
) -> std::io::Result<u64> {
    check_is_file(path)?;
    // The state and the checkpoints are written from where they are: they may take gigabytes.
    let token_bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let header = |checkpoint: &Checkpoint| {
        le_bytes(&[checkpoint.n_tokens as u64, u64::from(checkpoint.is_boundary), checkpoint.state.len() as u64])
    };
    let headers: Vec<Vec<u8>> = checkpoints.iter().map(header).collect();
    let checkpoints =
        headers.iter().zip(checkpoints).flat_map(|(header, checkpoint)| [&header[..], &checkpoint.state[..]]);
    let data: Vec<&[u8]> = [&token_bytes[..], state].into_iter().chain(checkpoints).collect();
    let mut sum = Xxh3::new();
    data.iter().for_each(|part| sum.update(part));
    let numbers = le_bytes(&[mark, tokens.len() as u64, state.len() as u64, sum.digest()]);
    let parts: Vec<&[u8]> = [&files::SEQUENCE_MAGIC[..], &numbers[..]].into_iter().chain(data).collect();
    files::overwrite_in_parts(path, files::Kind::Sequence, &parts).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Error::new(ErrorKind::InvalidInput, error),
        _ => error,
    })?;
    Ok(parts.iter().map(|part| part.len() as u64).sum())
}

/// Reads a slot; also returns the bytes of the file.
///
/// # Errors
/// The reason why the file cannot be used.
pub fn read(path: &Path, mark: u64) -> Result<(Saved, u64), String> {
    let file = open(path, mark)?;
    let n_bytes = file.n_bytes();
    file.read().map(|saved| (saved, n_bytes))
}

/// Opens a saved sequence and checks its header.
///
/// # Errors
/// The reason why the file cannot be used.
pub fn open(path: &Path, mark: u64) -> Result<SavedFile, String> {
    let failed = |error: Error| error.to_string();
    check_is_file(path).map_err(failed)?;
    let mut file = File::open(path).map_err(failed)?;
    let n_bytes = file.metadata().map_err(failed)?.len();
    let mut header = Vec::new();
    (&mut file).take(HEADER as u64).read_to_end(&mut header).map_err(failed)?;
    if header.get(..8) != Some(&files::SEQUENCE_MAGIC) {
        return Err("it is no saved slot".to_owned());
    }
    let number = |at: usize| number_at(&header, at).ok_or(CUT_OFF);
    let (found, n_tokens, n_state, sum) = (number(8)?, number(16)?, number(24)?, number(32)?);
    if found != mark {
        return Err(
            "it is of another model, of other adapters, of another type of KV cache, or was evaluated with other \
                    settings (rope, --override-kv, precision, routing)"
                .to_owned(),
        );
    }
    if n_bytes > BYTES_MAX {
        return Err(format!("it is longer than {} GiB, more than any such file has", BYTES_MAX >> 30));
    }
    let n_left = n_bytes.saturating_sub(HEADER as u64);
    let n_data = n_tokens.checked_mul(4).and_then(|n| n.checked_add(n_state));
    if n_data.is_none_or(|n| n > n_left) {
        return Err(DAMAGED.to_owned());
    }
    Ok(SavedFile { file, n_bytes, n_tokens, n_state, expected_sum: sum, n_left, sum: Xxh3::new() })
}

const CUT_OFF: &str = "the file is cut off";
const DAMAGED: &str = "its lengths are wrong: it is damaged";

/// The file of a saved sequence, whose header is checked.
pub struct SavedFile {
    file: File,
    n_bytes: u64,
    n_tokens: u64,
    /// Bytes of the state.
    n_state: u64,
    expected_sum: u64,
    /// Bytes that are not read yet.
    n_left: u64,
    /// Checksum of the data that was read so far.
    sum: Xxh3,
}

impl SavedFile {
    /// Bytes of the file. What [`Self::read`] returns takes no more.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Reads the sequence.
    ///
    /// # Errors
    /// The reason why the file cannot be used.
    pub fn read(mut self) -> Result<Saved, String> {
        let tokens = self.next(4 * self.n_tokens)?;
        let tokens = tokens.chunks_exact(4).map(|four| Token::from_le_bytes([four[0], four[1], four[2], four[3]]));
        let (tokens, state) = (tokens.collect(), self.next(self.n_state)?);
        let (mut checkpoints, mut last) = (Vec::new(), 0);
        while self.n_left > 0 {
            let header = self.next(CHECKPOINT_HEADER as u64)?;
            let number = |at: usize| number_at(&header, at).ok_or(CUT_OFF);
            let (n, is_boundary, len) = (number(0)?, number(8)?, number(16)?);
            if n <= last || n > self.n_tokens || is_boundary > 1 {
                return Err("its checkpoints are wrong: it is damaged".to_owned());
            }
            let state = Arc::new(self.next(len)?);
            checkpoints.push(Checkpoint { n_tokens: n as usize, is_boundary: is_boundary == 1, state });
            last = n;
        }
        if self.sum.digest() != self.expected_sum {
            return Err("its checksum is wrong: it is damaged".to_owned());
        }
        Ok(Saved { tokens, state, checkpoints })
    }

    /// The next `n` bytes. A length that a damaged file claims takes no memory.
    fn next(&mut self, n: u64) -> Result<Vec<u8>, String> {
        if n > self.n_left {
            return Err(DAMAGED.to_owned());
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(n as usize).map_err(|error| error.to_string())?;
        (&mut self.file).take(n).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        if (bytes.len() as u64) < n {
            return Err(CUT_OFF.to_owned());
        }
        self.n_left -= n;
        self.sum.update(&bytes);
        Ok(bytes)
    }
}

/// Requires a regular file or none: a symlink may lead out of the directory, and a FIFO never ends.
fn check_is_file(path: &Path) -> std::io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => {
            let message = "this name is taken by a link, a pipe or a directory; give another name";
            Err(Error::new(ErrorKind::InvalidInput, message))
        }
        _ => Ok(()),
    }
}

/// The bytes of numbers, as the file has them.
fn le_bytes(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn number_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()).map(u64::from_le_bytes)
}

/// Whether `name` is a plain file name, without any path.
pub fn is_file_name(name: &str) -> bool {
    const FORBIDDEN: &[char] =
        &['/', '\\', ':', '*', '?', '"', '<', '>', '|', '\u{FF0E}', '\u{2215}', '\u{2216}', '\u{FFFD}', '\u{FEFF}'];
    !name.is_empty()
        && name.len() <= 255
        && !name.chars().any(|character| character.is_control() || FORBIDDEN.contains(&character))
        && !name.starts_with(' ')
        && !name.ends_with([' ', '.'])
        && !name.contains("..")
        && name != "."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_values_are_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slot");
        let checkpoint = |n_tokens: usize, state: &[u8]| Checkpoint {
            n_tokens,
            is_boundary: n_tokens == 1,
            state: Arc::new(state.to_vec()),
        };
        for checkpoints in [Vec::new(), vec![checkpoint(1, b"one"), checkpoint(3, b"")]] {
            let n = write(&path, 7, &[1, -2, 3], b"state", &checkpoints).unwrap();
            let saved = Saved { tokens: vec![1, -2, 3], state: b"state".to_vec(), checkpoints };
            assert_eq!(read(&path, 7), Ok((saved, n)));
        }
        // Checkpoints after more tokens than there are, and out of order.
        for wrong in [vec![checkpoint(4, b"x")], vec![checkpoint(2, b"x"), checkpoint(2, b"x")]] {
            write(&path, 7, &[1, -2, 3], b"state", &wrong).unwrap();
            assert!(read(&path, 7).unwrap_err().contains("checkpoints"));
        }
        assert!(read(&path, 8).unwrap_err().contains("another model"));
        assert!(read(&directory.path().join("none"), 7).is_err());
    }

    /// Files of earlier versions can be read.
    #[test]
    fn the_format_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slot");
        let checkpoint = Checkpoint { n_tokens: 1, is_boundary: true, state: Arc::new(b"one".to_vec()) };
        write(&path, 7, &[1, -2], b"state", &[checkpoint]).unwrap();
        let data = b"\x01\0\0\0\xfe\xff\xff\xffstate\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0one";
        let header = b"HOBSLOT1\x07\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0";
        let file = [&header[..], &xxh3_64(data).to_le_bytes(), data].concat();
        assert_eq!(std::fs::read(&path).unwrap(), file);
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slot");
        let state = Arc::new(b"def".to_vec());
        let checkpoint = Checkpoint { n_tokens: 2, is_boundary: true, state };
        write(&path, 7, &[1, 2], b"abc", &[checkpoint]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let is_refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            read(&path, 7).is_err()
        };
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            assert!(is_refused(&damaged), "byte {at}");
            assert!(is_refused(&whole[..at]), "{at} bytes");
        }
        // A length without bytes.
        let mut damaged = whole.clone();
        damaged[24..32].copy_from_slice(&(1u64 << 40).to_le_bytes());
        assert!(is_refused(&damaged));
        assert!(!is_refused(&whole));
    }

    #[cfg(unix)]
    #[test]
    fn files_that_are_no_saved_sequence_stay_untouched() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(write(&link, 7, &[1], b"x", &[]).is_err() && !file.exists());
        write(&file, 7, &[1], b"x", &[]).unwrap();
        assert!(read(&link, 7).unwrap_err().contains("a link"));
        assert!(write(directory.path(), 7, &[1], b"x", &[]).is_err());
        for text in ["GGUF\x03", "a log\n", "HOBBITTR", ""] {
            std::fs::write(&file, text).unwrap();
            let error = write(&file, 7, &[1], b"x", &[]).unwrap_err();
            assert!(
                error.kind() == ErrorKind::InvalidInput && error.to_string().contains("no saved sequence"),
                "{error}"
            );
            assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
        }
    }

    #[test]
    fn names_stay_in_their_directory() {
        for name in ["a", "slot 1.bin", "é", ".hidden", "a.b"] {
            assert!(is_file_name(name), "{name:?}");
        }
        let long = "a".repeat(256);
        for name in [
            "",
            ".",
            "..",
            "../a",
            "a/b",
            "/etc/passwd",
            "a\\b",
            "a\0b",
            "a\n",
            " a",
            "a ",
            "a.",
            "c:",
            "a..b",
            "\u{FF0E}",
            &long,
        ] {
            assert!(!is_file_name(name), "{name:?}");
        }
    }
}
