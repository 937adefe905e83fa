//! A saved sequence, the server's slot or hobbit-cli's prompt: the tokens, llama.cpp's state for them, and checkpoints
//! if the model needs them to go back. Damaged files and those of another model are refused before llama.cpp reads
//! them, and files of other kinds are never replaced.

use std::io::{Error, ErrorKind};
use std::path::Path;
use std::sync::Arc;

use hobbit::options::Token;
use hobbit_core::checkpoints::Checkpoint;
use hobbit_core::files;
use xxhash_rust::xxh3::xxh3_64;

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
    let n_checkpoints: usize = checkpoints.iter().map(|own| CHECKPOINT_HEADER + own.state.len()).sum();
    let mut bytes = Vec::with_capacity(HEADER + tokens.len() * 4 + state.len() + n_checkpoints);
    bytes.extend_from_slice(&files::SEQUENCE_MAGIC);
    bytes.extend_from_slice(&mark.to_le_bytes());
    bytes.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&(state.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&[0; 8]);
    tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
    bytes.extend_from_slice(state);
    for Checkpoint { n_tokens, is_boundary, state } in checkpoints {
        for number in [*n_tokens as u64, u64::from(*is_boundary), state.len() as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(state);
    }
    let sum = xxh3_64(&bytes[HEADER..]);
    bytes[HEADER - 8..HEADER].copy_from_slice(&sum.to_le_bytes());
    files::overwrite(path, files::Kind::Sequence, &bytes).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Error::new(ErrorKind::InvalidInput, error),
        _ => error,
    })?;
    Ok(bytes.len() as u64)
}

/// Reads a slot; also returns the bytes of the file.
///
/// # Errors
/// The reason why the file cannot be used.
pub fn read(path: &Path, mark: u64) -> Result<(Saved, u64), String> {
    check_is_file(path).map_err(|error| error.to_string())?;
    let bytes = files::read(path, BYTES_MAX).map_err(|error| error.to_string())?;
    parse(&bytes, mark).map(|saved| (saved, bytes.len() as u64))
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

fn parse(bytes: &[u8], mark: u64) -> Result<Saved, String> {
    let number = |at: usize| number_at(bytes, at).ok_or_else(|| "the file is cut off".to_owned());
    if bytes.get(..8) != Some(&files::SEQUENCE_MAGIC) {
        return Err("it is no saved slot".to_owned());
    }
    let (found, n_tokens, n_state, sum) = (number(8)?, number(16)?, number(24)?, number(32)?);
    if found != mark {
        return Err(
            "it is of another model, of other adapters, of another type of KV cache, or was evaluated with other \
                    settings (rope, --override-kv, precision, routing)"
                .to_owned(),
        );
    }
    let rest = &bytes[HEADER..];
    const DAMAGED: &str = "its lengths are wrong: it is damaged";
    let n_token_bytes = n_tokens.checked_mul(4).ok_or(DAMAGED)?;
    let n_bytes = n_token_bytes.checked_add(n_state).filter(|n| *n <= rest.len() as u64).ok_or(DAMAGED)?;
    if xxh3_64(rest) != sum {
        return Err("its checksum is wrong: it is damaged".to_owned());
    }
    let (own, rest) = rest.split_at(n_bytes as usize);
    let (tokens, state) = own.split_at(n_token_bytes as usize);
    let tokens = tokens.chunks_exact(4).map(|four| Token::from_le_bytes([four[0], four[1], four[2], four[3]]));
    let checkpoints = checkpoints(rest, n_tokens).ok_or("its checkpoints are wrong: it is damaged")?;
    Ok(Saved { tokens: tokens.collect(), state: state.to_vec(), checkpoints })
}

/// The checkpoints that `bytes` consist of, of a sequence of `n_tokens` tokens; `None` if they are not in order.
fn checkpoints(mut bytes: &[u8], n_tokens: u64) -> Option<Vec<Checkpoint>> {
    let (mut all, mut last) = (Vec::new(), 0);
    while !bytes.is_empty() {
        let (n, is_boundary, len) = (number_at(bytes, 0)?, number_at(bytes, 8)?, number_at(bytes, 16)?);
        if n <= last || n > n_tokens || is_boundary > 1 {
            return None;
        }
        let (state, rest) = bytes[CHECKPOINT_HEADER..].split_at_checked(usize::try_from(len).ok()?)?;
        let state = Arc::new(state.to_vec());
        all.push(Checkpoint { n_tokens: n as usize, is_boundary: is_boundary == 1, state });
        (bytes, last) = (rest, n);
    }
    Some(all)
}

fn number_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()).map(u64::from_le_bytes)
}

/// Whether `name` is a plain file name, without any path.
#[cfg(any(test, feature = "server"))]
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
    fn what_is_written_is_read() {
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

    #[test]
    fn damage_is_found_wherever_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slot");
        let state = Arc::new(b"def".to_vec());
        let checkpoint = Checkpoint { n_tokens: 2, is_boundary: true, state };
        write(&path, 7, &[1, 2], b"abc", &[checkpoint]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            assert!(parse(&damaged, 7).is_err(), "byte {at}");
            assert!(parse(&whole[..at], 7).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn what_is_no_slot_is_left_alone() {
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
