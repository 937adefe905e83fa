//! A saved sequence, the server's slot or hobbit-cli's prompt: the tokens, and llama.cpp's state for them. Damaged
//! files and those of another model are refused before llama.cpp reads them, and files of other kinds are never
//! replaced.

use std::io::{Error, ErrorKind};
use std::path::Path;

use hobbit::options::Token;
use hobbit_core::files;
use xxhash_rust::xxh3::xxh3_64;

/// Magic, mark, number of tokens, bytes of the state, checksum of the remaining data.
const HEADER: usize = 8 + 8 + 8 + 8 + 8;
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

/// Writes a slot and returns its length in bytes. Readers see the old file or the new one.
///
/// # Errors
/// `InvalidInput` if the name is taken by anything but a saved slot; otherwise the system's error.
pub fn write(path: &Path, mark: u64, tokens: &[Token], state: &[u8]) -> std::io::Result<u64> {
    check_is_file(path)?;
    let mut bytes = Vec::with_capacity(HEADER + tokens.len() * 4 + state.len());
    bytes.extend_from_slice(&files::SEQUENCE_MAGIC);
    bytes.extend_from_slice(&mark.to_le_bytes());
    bytes.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&(state.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&[0; 8]);
    tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
    bytes.extend_from_slice(state);
    let sum = xxh3_64(&bytes[HEADER..]);
    bytes[HEADER - 8..HEADER].copy_from_slice(&sum.to_le_bytes());
    files::overwrite(path, files::Kind::Sequence, &bytes).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Error::new(ErrorKind::InvalidInput, error),
        _ => error,
    })?;
    Ok(bytes.len() as u64)
}

/// Reads a slot: tokens, state, bytes of the file.
///
/// # Errors
/// The reason why the file cannot be used.
pub fn read(path: &Path, mark: u64) -> Result<(Vec<Token>, Vec<u8>, u64), String> {
    check_is_file(path).map_err(|error| error.to_string())?;
    let bytes = files::capped::read(path, BYTES_MAX).map_err(|error| error.to_string())?;
    parse(&bytes, mark).map(|(tokens, state)| (tokens, state, bytes.len() as u64))
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

fn parse(bytes: &[u8], mark: u64) -> Result<(Vec<Token>, Vec<u8>), String> {
    let number = |at: usize| {
        let eight = bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok());
        eight.map(u64::from_le_bytes).ok_or_else(|| "the file is cut off".to_owned())
    };
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
    let n_token_bytes = n_tokens.checked_mul(4).filter(|n| n.checked_add(n_state) == Some(rest.len() as u64));
    let n_token_bytes = n_token_bytes.ok_or("its lengths are wrong: it is damaged")?;
    if xxh3_64(rest) != sum {
        return Err("its checksum is wrong: it is damaged".to_owned());
    }
    let (tokens, state) = rest.split_at(n_token_bytes as usize);
    let tokens = tokens.chunks_exact(4).map(|four| Token::from_le_bytes([four[0], four[1], four[2], four[3]]));
    Ok((tokens.collect(), state.to_vec()))
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
        let n = write(&path, 7, &[1, -2, 3], b"state").unwrap();
        assert_eq!(read(&path, 7), Ok((vec![1, -2, 3], b"state".to_vec(), n)));
        assert!(read(&path, 8).unwrap_err().contains("another model"));
        assert!(read(&directory.path().join("none"), 7).is_err());
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slot");
        write(&path, 7, &[1, 2], b"abc").unwrap();
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
        assert!(write(&link, 7, &[1], b"x").is_err() && !file.exists());
        write(&file, 7, &[1], b"x").unwrap();
        assert!(read(&link, 7).unwrap_err().contains("a link"));
        assert!(write(directory.path(), 7, &[1], b"x").is_err());
        for text in ["GGUF\x03", "a log\n", "HOBBITTR", ""] {
            std::fs::write(&file, text).unwrap();
            let error = write(&file, 7, &[1], b"x").unwrap_err();
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
