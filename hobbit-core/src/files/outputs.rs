//! Which files may be overwritten: never one that the run reads, under any name; otherwise only one of the kind about
//! to be written.
//!
//! [`check`] validates flags before anything is loaded; [`create`] opens files that are written in place, [`overwrite`]
//! writes files whole or not at all, and both check again. The first kibibyte decides a file's kind:
//!
//! | written | may replace |
//! |---|---|
//! | a log | text: no byte 0, and no GGUF |
//! | JSON | a file that begins with `{` or `[` |
//! | a page | a file that begins as HTML does |
//! | a trace, a path table, a model or pack | a file that begins as one, even if truncated |
//! | a saved sequence | a file with the whole magic: sequences are never written in part |
//! | log-probabilities | a base file, complete or from an interrupted run |
//!
//! An empty file may always be replaced, except by a sequence (it may be a log without lines yet). Pipes and devices
//! such as `/dev/null` are written to and stay; a GGUF is written in parts and needs a regular file. A link stays a
//! link: the file behind it is written ([`destination`]).

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Bytes read to decide a file's kind.
const HEAD_BYTES: u64 = 1024;

const GGUF: &[u8] = b"GGUF";

pub(crate) const TRACE_MAGIC: [u8; 8] = *b"HOBBITTR";

pub(crate) const PATH_TABLE_MAGIC: [u8; 4] = *b"hbPT";

/// First bytes of a saved sequence: tokens and llama.cpp's state.
pub const SEQUENCE_MAGIC: [u8; 8] = *b"HOBSLOT1";

/// First bytes of a complete base file; zeros until its run ends.
pub(crate) const BASE_MAGIC: [u8; 8] = *b"_logits_";

/// Kind of file about to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Log,
    /// Statistics, a profile, a policy.
    Json,
    /// A trace of routing (docs/TRACE.md).
    Trace,
    /// Log-probabilities to compare with, in the format of `llama-perplexity --kl-divergence-base`.
    Base,
    /// A sequence's tokens and state.
    Sequence,
    /// A path table: which experts follow which.
    PathTable,
    /// A GGUF: a model or an expert pack.
    Model,
    /// A model that is being written: its header is still zeros.
    PartialModel,
    /// A cache state; the engine itself refuses to replace other files.
    CacheState,
}

impl Kind {
    /// Name for messages.
    const fn words(self) -> &'static str {
        match self {
            Self::Log => "text",
            Self::Json => "JSON",
            Self::Trace => "trace",
            Self::Base => "file of log-probabilities",
            Self::Sequence => "saved sequence",
            Self::PathTable => "path table",
            Self::Model => "GGUF",
            Self::PartialModel => "unfinished GGUF",
            Self::CacheState => "cache state",
        }
    }

    /// Whether a file that begins with these bytes may be written over.
    fn may_replace(self, head: &[u8]) -> bool {
        let begins_with = |magic: &[u8]| head.starts_with(magic) || magic.starts_with(head);
        match self {
            Self::Log => !head.contains(&0) && !head.starts_with(GGUF),
            Self::Json => {
                let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
                !head.contains(&0) && matches!(text.first(), None | Some(b'{' | b'['))
            }
            Self::Trace => begins_with(&TRACE_MAGIC),
            Self::Base => is_base(head),
            Self::Sequence => head.starts_with(&SEQUENCE_MAGIC),
            Self::PathTable => begins_with(&PATH_TABLE_MAGIC),
            Self::Model => begins_with(GGUF),
            Self::PartialModel => begins_with(GGUF) || head.iter().all(|byte| *byte == 0),
            Self::CacheState => true,
        }
    }
}

/// Whether a file begins as a base file, finished or not: its magic or zeros, then three positive numbers, as far as
/// the file goes.
fn is_base(head: &[u8]) -> bool {
    let (magic, numbers) = head.split_at(head.len().min(BASE_MAGIC.len()));
    let is_positive = |number: &[u8]| number.iter().any(|byte| *byte != 0) && number[3] < 0x80;
    let is_begun = BASE_MAGIC.starts_with(magic) || magic.iter().all(|byte| *byte == 0);
    is_begun && numbers.chunks_exact(4).take(3).all(is_positive)
}

/// A file that a run writes.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// Name in errors: a program's flag or a setting.
    pub flag: &'a str,
    /// Destination. For JSON, `-` means no file.
    pub path: &'a Path,
    pub kind: Kind,
}

/// A file that a run reads.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Name in errors, as [`Output::flag`].
    pub flag: &'a str,
    pub path: &'a Path,
}

/// Why a file is not written.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    #[error(
        "{flag} {}: this is the file of {input_flag}{}, and would be destroyed; give {flag} a name of its own",
        path.display(), other_name(path, input)
    )]
    IsInput { flag: String, path: PathBuf, input_flag: String, input: PathBuf },
    #[error("{flag} {}: this is the file of {other_flag} too; give each a name of its own", path.display())]
    Twice { flag: String, path: PathBuf, other_flag: String },
    #[error("{flag} {}: {reason}", path.display())]
    Refused { flag: String, path: PathBuf, reason: Refusal },
    #[error(
        "{flag} {}: cannot write this file: {source}; choose a directory that exists and can be written", path.display()
    )]
    Unwritable { flag: String, path: PathBuf, source: io::Error },
}

impl OutputError {
    /// Whether the command line is at fault, and not the disk.
    pub fn is_usage(&self) -> bool {
        !matches!(self, Self::Unwritable { .. })
    }
}

/// Why an existing file must not be overwritten.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(
        "this file exists and is no {}: it would be destroyed; give another name, or remove it first", expected.words()
    )]
    OtherKind { expected: Kind },
    #[error(
        "this file exists and cannot be read ({source}), so what would be lost is unknown; give another name, or \
            remove it first"
    )]
    Unreadable { source: io::Error },
    #[error("this is a {found}, and a {} needs a regular file; give another name", expected.words())]
    NoFile { found: &'static str, expected: Kind },
}

fn other_name(path: &Path, input: &Path) -> String {
    if path == input { String::new() } else { format!(", {}", input.display()) }
}

/// Checks that no output is a file that the run reads (hard links and symlinks included), that no two outputs are the
/// same file, that each existing one may be overwritten, and that all can be written. Changes no file.
pub fn check(outputs: &[Output<'_>], inputs: &[Input<'_>]) -> Result<(), OutputError> {
    let is_stdout = |output: &Output<'_>| output.kind == Kind::Json && output.path == Path::new("-");
    let given: Vec<_> = outputs.iter().filter(|output| !is_stdout(output)).collect();
    let identified = given.iter().filter_map(|output| Some((*output, Identity::of(output.path)?)));
    let outputs: Vec<_> = identified.collect();
    let inputs: Vec<(&Input<'_>, Option<Identity>)> =
        inputs.iter().map(|input| (input, Identity::of(input.path))).collect();
    for (i, (output, identity)) in outputs.iter().enumerate() {
        let (flag, path) = (output.flag.to_owned(), output.path.to_owned());
        if let Some((input, _)) = inputs.iter().find(|(_, input)| input.as_ref() == Some(identity)) {
            let (input_flag, input) = (input.flag.to_owned(), input.path.to_owned());
            return Err(OutputError::IsInput { flag, path, input_flag, input });
        }
        if let Some((other, _)) = outputs[..i].iter().find(|(_, other)| other == identity) {
            return Err(OutputError::Twice { flag, path, other_flag: other.flag.to_owned() });
        }
    }
    for Output { flag, path, kind } in given {
        let own = || ((*flag).to_owned(), path.to_path_buf());
        look(path, *kind).map_err(|reason| OutputError::Refused { flag: own().0, path: own().1, reason })?;
        try_writing(path, *kind).map_err(|source| OutputError::Unwritable { flag: own().0, path: own().1, source })?;
    }
    Ok(())
}

/// The file that a user's path leads to through links, also if there is no file yet.
pub fn destination(path: &Path) -> PathBuf {
    const LINKS_MAX: usize = 40; // as Linux follows
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        if let Ok(found) = fs::canonicalize(&path) {
            return found;
        }
        let Ok(target) = fs::read_link(&path) else { break };
        path = super::directory_of(&path).join(target);
    }
    path
}

/// Opens a file to write from its beginning, as [`File::create`] does, but checks an existing file before truncating
/// it.
///
/// # Errors
/// The system's error; [`io::ErrorKind::AlreadyExists`] with a [`Refusal`] if the file may not be overwritten.
pub fn create(path: &Path, kind: Kind) -> io::Result<File> {
    if !is_file(path) {
        return File::create(path);
    }
    let mut file = File::options().read(true).write(true).open(path)?;
    look_into(&mut file, kind).map_err(|refusal| io::Error::new(io::ErrorKind::AlreadyExists, refusal))?;
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

/// Writes a file whole or not at all. The old file stays until the new one is on disk; a file of another kind is not
/// replaced. A symlink stays a symlink.
///
/// # Errors
/// As [`create`]; a full disk. Nothing is left behind then.
pub fn overwrite(path: &Path, kind: Kind, bytes: &[u8]) -> io::Result<()> {
    overwrite_in_parts(path, kind, &[bytes])
}

/// As [`overwrite`], with bytes that are in several places.
pub fn overwrite_in_parts(path: &Path, kind: Kind, parts: &[&[u8]]) -> io::Result<()> {
    look(path, kind).map_err(|refusal| io::Error::new(io::ErrorKind::AlreadyExists, refusal))?;
    if is_descriptor(path) {
        let mut file = File::options().append(true).open(path)?;
        return parts.iter().try_for_each(|part| file.write_all(part));
    }
    super::replace_in_parts(&destination(path), parts)
}

/// Finds out whether a file of the kind can be written to `path`. Changes nothing.
fn try_writing(path: &Path, kind: Kind) -> io::Result<()> {
    let is_written_in_place = matches!(kind, Kind::Log | Kind::Json | Kind::Trace | Kind::Base | Kind::PathTable);
    if is_written_in_place && is_file(path) {
        return File::options().append(true).open(path).map(drop);
    }
    if is_descriptor(path) { Ok(()) } else { super::try_replacing(&destination(path)) }
}

/// Whether the file at `path`, if any, may be overwritten.
pub fn look(path: &Path, kind: Kind) -> Result<(), Refusal> {
    if let (Kind::Model | Kind::PartialModel, Some(found)) = (kind, other_than_file(path)) {
        return Err(Refusal::NoFile { found, expected: kind });
    }
    if !is_file(path) || kind == Kind::CacheState {
        return Ok(());
    }
    let mut file = File::open(path).map_err(|source| Refusal::Unreadable { source })?;
    look_into(&mut file, kind)
}

fn look_into(file: &mut File, kind: Kind) -> Result<(), Refusal> {
    let mut head = Vec::new();
    file.take(HEAD_BYTES).read_to_end(&mut head).map_err(|source| Refusal::Unreadable { source })?;
    if kind.may_replace(&head) { Ok(()) } else { Err(Refusal::OtherKind { expected: kind }) }
}

/// Whether a regular file is there, whose contents could be lost.
fn is_file(path: &Path) -> bool {
    !is_descriptor(path) && fs::metadata(path).is_ok_and(|found| found.is_file())
}

/// The name of what is at `path`, behind links, if that is no regular file.
fn other_than_file(path: &Path) -> Option<&'static str> {
    if is_device(path) {
        return Some("device");
    }
    let found = fs::metadata(path).ok()?.file_type();
    Some(match () {
        () if found.is_file() && !is_descriptor(path) => return None,
        () if found.is_dir() => "directory",
        #[cfg(unix)]
        () if std::os::unix::fs::FileTypeExt::is_fifo(&found) => "pipe",
        #[cfg(unix)]
        () if std::os::unix::fs::FileTypeExt::is_socket(&found) => "socket",
        () if found.is_file() => "descriptor",
        () => "device",
    })
}

/// Whether a name stands for a device in every directory of Windows: `NUL`, `con.txt`, `COM1`; or it is in the
/// namespace of devices.
#[cfg(windows)]
pub(crate) fn is_device(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_uppercase();
    let stem = name.split(['.', ':']).next().unwrap_or_default().trim_end();
    let is_numbered =
        |kind: &str| stem.strip_prefix(kind).is_some_and(|n| n.len() == 1 && n.as_bytes()[0].is_ascii_digit());
    ["NUL", "CON", "CONIN$", "CONOUT$", "PRN", "AUX"].contains(&stem)
        || is_numbered("COM")
        || is_numbered("LPT")
        || path.as_os_str().to_string_lossy().starts_with(r"\\.\")
}

/// Whether a name stands for a device. Only Windows has such names; on other systems devices are files.
#[cfg(not(windows))]
pub(crate) fn is_device(_: &Path) -> bool {
    false
}

/// Whether a path names a descriptor, that is, a file that the user has opened, or a device of Windows.
fn is_descriptor(path: &Path) -> bool {
    is_device(path)
        || ["/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd", "/proc/self/fd"]
            .iter()
            .any(|name| path.starts_with(name))
}

/// The file that a path names.
#[derive(PartialEq)]
enum Identity {
    /// An existing file ([`super::FileState::identity`]).
    File(u64, u64),
    /// A file that does not exist yet: its directory and its name there.
    Nowhere(PathBuf),
}

impl Identity {
    /// `None` for anything but a file.
    fn of(path: &Path) -> Option<Self> {
        match fs::metadata(path) {
            _ if is_device(path) => None,
            Ok(_) if !is_file(path) => None,
            Ok(_) => super::FileState::at(path).ok().map(|state| Self::File(state.identity().0, state.identity().1)),
            Err(_) => {
                let directory = super::directory_of(path);
                let directory = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
                Some(Self::Nowhere(directory.join(path.file_name()?)))
            }
        }
    }
}

#[cfg(test)]
mod tests;
