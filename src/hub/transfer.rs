//! One file from a server to a place: resumed where it broke off, locked against other processes, checked, and only then there
//! under its name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use ureq::http::header;

use super::Witness;
use super::error::{HubError, failed};
use super::web::{Answer, Method, Patience, TRIES, Web, asked_wait, is_busy, sound};

/// Bytes that are written at once.
const PIECE: usize = 1 << 18;
/// Minimum bytes that count as progress of a try.
const PROGRESS: u64 = 1 << 20;
/// How often one download may begin again at its first byte: a server may not have the same bytes fetched for ever.
const RESTARTS: u32 = 5;
/// Bytes that stay free on the disk.
const RESERVE: u64 = 64 << 20;
/// Bytes after which the free space is checked again: other programs write there too.
const SPACE_CHECK: u64 = 16 << 20;
/// How often to look whether another process has finished the file.
const LOOK: Duration = Duration::from_millis(250);
/// What GGUF files begin with.
const MAGIC: &[u8] = b"GGUF";

/// A file that is to be fetched.
#[derive(Clone, Debug)]
pub struct Item {
    pub url: String,
    /// In messages.
    pub name: String,
    /// Where it comes to lie.
    pub target: PathBuf,
    /// What it is until then.
    pub part: PathBuf,
    /// Held while the part is written.
    pub lock: PathBuf,
    /// Bytes, if that is known.
    pub size: Option<u64>,
    /// Lower case.
    pub sha256: Option<String>,
    /// The server's etag, if it was asked for.
    pub etag: Option<String>,
    /// The target's name says what is in it: a part of it is never a part of something else.
    pub is_addressed: bool,
}

/// What a file is known by that was fetched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// The server's etag, as it came; the Hub's own, if it said one.
    pub etag: Option<String>,
    /// Whether its bytes were compared with a checksum.
    pub is_checked: bool,
}

/// A part that grows.
struct Part {
    file: File,
    at: u64,
    sum: Sha256,
}

impl Part {
    /// The part with what is there of it.
    fn open(path: &Path) -> Result<Self, HubError> {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path);
        let mut part =
            Self { file: opened.map_err(failed(path, "write this part of a download"))?, at: 0, sum: Sha256::new() };
        let mut piece = vec![0; PIECE];
        loop {
            match part.file.read(&mut piece).map_err(failed(path, "read this part of a download"))? {
                0 => return Ok(part),
                n => {
                    part.sum.update(&piece[..n]);
                    part.at += n as u64;
                }
            }
        }
    }

    fn forget(&mut self, path: &Path) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(failed(path, "empty this part of a download"))?;
        self.at = 0;
        self.sum = Sha256::new();
        Ok(())
    }

    fn push(&mut self, piece: &[u8], path: &Path) -> Result<(), HubError> {
        self.file.write_all(piece).map_err(failed(path, "write this part of a download"))?;
        self.sum.update(piece);
        self.at += piece.len() as u64;
        Ok(())
    }
}

/// A lock that other processes see, the Hub's own client among them; released at its end.
pub struct Lock(#[expect(dead_code, reason = "held")] File);

impl Lock {
    /// Waits for whoever holds it.
    pub fn take(path: &Path, name: &str, witness: &dyn Witness) -> Result<Self, HubError> {
        make_directory_of(path)?;
        let opened =
            OpenOptions::new().write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW).open(path);
        let file = opened.map_err(failed(path, "open this lock"))?;
        let mut has_told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(failed(path, "lock this file")(error)),
            }
            if !std::mem::replace(&mut has_told, true) {
                witness.note(&format!("{name}: another process downloads it; waiting"));
            }
            witness.pause(LOOK);
        }
    }
}

/// Makes the directory in which a file is to lie.
pub fn make_directory_of(path: &Path) -> Result<(), HubError> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory).map_err(failed(directory, "make this directory"))
}

/// Bytes of `item` that lie there from an earlier run.
pub fn already(item: &Item) -> u64 {
    fs::symlink_metadata(&item.part).map_or(0, |found| if found.is_file() { found.len() } else { 0 })
}

/// Checks that `directory`'s disk holds what `items` still lack.
///
/// # Errors
/// [`HubError::Space`].
pub fn check_space(directory: &Path, items: &[Item], witness: &dyn Witness) -> Result<(), HubError> {
    fs::create_dir_all(directory).map_err(failed(directory, "make this directory"))?;
    let needed = items.iter().map(|item| item.size.unwrap_or(0).saturating_sub(already(item)));
    check_room(directory, needed.fold(0, u64::saturating_add), witness)
}

/// Checks that `needed` bytes can be written in `directory`.
fn check_room(directory: &Path, needed: u64, witness: &dyn Witness) -> Result<(), HubError> {
    let free = witness.free_space(directory).map_err(failed(directory, "ask for the free space of"))?;
    let free = free.saturating_sub(RESERVE);
    if needed <= free {
        return Ok(());
    }
    Err(HubError::Space { directory: directory.to_owned(), needed, free, reserve: RESERVE })
}

/// Fetches a file, whose lock is held.
///
/// # Errors
/// What the server refuses; a connection that breaks off again and again (what came is kept); wrong sizes and sums (what came is
/// removed).
pub fn fetch(web: &Web, item: &Item, witness: &dyn Witness) -> Result<Fetched, HubError> {
    make_directory_of(&item.target)?;
    let mut part = Part::open(&item.part)?;
    let known = etag_of(&item.part);
    // A part of something that may have changed since is of no use.
    let is_same = known.is_some() && (item.etag.is_none() || item.etag == known);
    if !(item.is_addressed || is_same) || item.size.is_some_and(|size| part.at > size) {
        part.forget(&item.part)?;
    }
    if part.at > 0 {
        witness.note(&format!("{}: going on at {}", item.name, hobbit::units::Bytes(part.at)));
    }
    let mut transfer = Transfer { web, item, witness, part, size: item.size, etag: known, restarts: 0 };
    witness.begin(&item.name, transfer.size, transfer.part.at);
    let outcome = transfer.run();
    witness.end();
    outcome?;
    let Transfer { part, etag, .. } = transfer;
    let found = hobbit::pack::Sha256(part.sum.finalize().into()).to_string();
    if let Some(expected) = item.sha256.as_ref().filter(|expected| **expected != found) {
        remove(&item.part);
        return Err(HubError::Sum { name: item.name.clone(), found, expected: expected.clone() });
    }
    part.file.sync_all().map_err(failed(&item.part, "finish this part of a download"))?;
    fs::rename(&item.part, &item.target).map_err(failed(&item.target, "put the download here"))?;
    let _ = fs::remove_file(etag_path(&item.part));
    Ok(Fetched { etag, is_checked: item.sha256.is_some() })
}

/// Where the etag of a part or a file lies.
pub fn etag_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".etag");
    name.into()
}

/// The etag that a server gave to the file at `path`.
pub fn etag_of(path: &Path) -> Option<String> {
    let text = hobbit::files::capped::read(&etag_path(path), 1 << 10).ok()?;
    String::from_utf8(text).ok().filter(|etag| is_etag(etag))
}

/// Whether this may stand in a header.
fn is_etag(text: &str) -> bool {
    !text.is_empty() && text.len() <= 256 && text.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
}

/// Whether the same etag means the same bytes.
fn is_strong(etag: &str) -> bool {
    !etag.starts_with("W/")
}

/// Removes a part and what is known about it.
fn remove(part: &Path) {
    let _ = fs::remove_file(part);
    let _ = fs::remove_file(etag_path(part));
}

struct Transfer<'a> {
    web: &'a Web,
    item: &'a Item,
    witness: &'a dyn Witness,
    part: Part,
    size: Option<u64>,
    /// Belongs to the file of the part.
    etag: Option<String>,
    /// How often the part was thrown away.
    restarts: u32,
}

impl Transfer<'_> {
    fn run(&mut self) -> Result<(), HubError> {
        let mut patience = Patience::new(TRIES);
        loop {
            if self.size.is_some_and(|size| self.part.at == size) {
                return Ok(());
            }
            let before = self.part.at;
            let (why, wait) = match self.attempt() {
                Ok(Attempt::Done) => return Ok(()),
                Ok(Attempt::Broken { why, wait }) => (why, wait),
                Err(HubError::Unreachable { host, why, .. }) => (format!("({host} cannot be reached: {why})"), None),
                Err(error) => {
                    if matches!(error, HubError::Size { .. } | HubError::NoLength { .. } | HubError::NotGguf { .. }) {
                        remove(&self.item.part);
                    }
                    return Err(error);
                }
            };
            if self.part.at.saturating_sub(before) >= PROGRESS {
                patience.renew();
            }
            let Some(wait) = patience.next(wait) else {
                return Err(self.dropped(why));
            };
            let at = hobbit::units::Bytes(self.part.at);
            self.witness.note(&format!(
                "{}: broke off at {at} {why}; going on in {} s",
                self.item.name,
                wait.as_secs()
            ));
            self.witness.pause(wait);
        }
    }

    fn attempt(&mut self) -> Result<Attempt, HubError> {
        let range = format!("bytes={}-", self.part.at);
        let mut headers = Vec::new();
        if self.part.at > 0 {
            headers.push(("range", &*range));
            // Weak etags say nothing about bytes; a checksum says more than any.
            let is_checked = self.item.is_addressed || self.item.sha256.is_some();
            if let Some(etag) = self.etag.as_deref().filter(|etag| !is_checked && is_strong(etag)) {
                headers.push(("if-range", etag));
            }
        }
        let answer = self.web.ask(Method::Get, &self.item.url, &self.item.name, &headers)?;
        if is_busy(answer.status()) {
            return Ok(Attempt::Broken {
                why: format!("(the server says {})", answer.status()),
                wait: asked_wait(&answer),
            });
        }
        let answer = sound(answer, &self.item.name)?;
        match answer.status() {
            200 => {
                if self.part.at > 0 {
                    self.witness.note(&format!(
                        "{}: the server does not go on where it broke off; from the start",
                        self.item.name
                    ));
                    self.start_over()?;
                }
                self.expect(length(&answer))?;
                self.keep_etag(&answer)?;
            }
            206 => {
                let (from, all) = content_range(&answer).ok_or_else(|| self.not_understood("no range in it"))?;
                if from != self.part.at {
                    return Err(self.not_understood("another range than was asked for"));
                }
                // A server may not look at what the range was asked for.
                let now = answer.linked.etag.as_deref().or(answer.header(header::ETAG)).filter(|etag| is_etag(etag));
                let is_other = matches!((self.etag.as_deref(), now), (Some(before), Some(now)) if before != now);
                if is_other && self.item.sha256.is_none() {
                    self.start_over()?;
                    self.etag = None;
                    self.size = self.item.size;
                    return Ok(Attempt::Broken { why: "(it has changed there)".to_owned(), wait: None });
                }
                self.expect(all.or_else(|| from.checked_add(length(&answer)?)))?;
            }
            // The part is all of the file, or more.
            416 if self.part.at > 0 => {
                let all = answer.header(header::CONTENT_RANGE).and_then(|text| text.trim().strip_prefix("bytes */"));
                let is_whole = all.and_then(|all| all.parse().ok()) == Some(self.part.at);
                if is_whole && self.size.is_none_or(|size| size == self.part.at) {
                    return Ok(Attempt::Done);
                }
                self.start_over()?;
                self.size = self.item.size;
                return Ok(Attempt::Broken { why: "(the server has less)".to_owned(), wait: Some(Duration::ZERO) });
            }
            status => return Err(HubError::Refused { what: self.item.name.clone(), status }),
        }
        self.copy(answer)
    }

    /// Takes the body.
    fn copy(&mut self, mut answer: Answer) -> Result<Attempt, HubError> {
        let mut body = answer.response.body_mut().as_reader();
        let mut piece = vec![0; PIECE];
        let mut begins = Vec::new();
        let looks = self.part.at == 0;
        let mut checked_at = self.part.at;
        self.check_room()?;
        loop {
            let read = match body.read(&mut piece) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Attempt::Broken { why: format!("({error})"), wait: None }),
            };
            if looks && begins.len() < MAGIC.len() {
                begins.extend_from_slice(&piece[..read.min(16)]);
                if !begins.starts_with(&MAGIC[..MAGIC.len().min(begins.len())]) {
                    let begins = String::from_utf8_lossy(&begins).into_owned();
                    return Err(HubError::NotGguf { name: self.item.name.clone(), begins });
                }
            }
            let said = self.part.at + read as u64;
            if let Some(expected) = self.size.filter(|size| said > *size) {
                return Err(HubError::Size { name: self.item.name.clone(), said, expected });
            }
            if said - checked_at >= SPACE_CHECK {
                checked_at = said;
                self.check_room()?;
            }
            self.part.push(&piece[..read], &self.item.part)?;
            self.witness.at(self.part.at);
        }
        Ok(match self.size {
            Some(size) if self.part.at < size => {
                Attempt::Broken { why: "(the connection ended)".to_owned(), wait: None }
            }
            _ => Attempt::Done,
        })
    }

    /// The server says how long the file is. Without a length neither a cut file nor an endless one could be told.
    fn expect(&mut self, said: Option<u64>) -> Result<(), HubError> {
        match (self.size, said) {
            (Some(expected), Some(said)) if said != expected => {
                Err(HubError::Size { name: self.item.name.clone(), said, expected })
            }
            (None, None) => Err(HubError::NoLength { name: self.item.name.clone() }),
            (None, Some(said)) => {
                self.size = Some(said);
                self.witness.begin(&self.item.name, self.size, self.part.at);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Checks that the rest still fits on the disk.
    fn check_room(&self) -> Result<(), HubError> {
        let directory = self.item.part.parent().unwrap_or(Path::new("."));
        check_room(directory, self.size.unwrap_or(0).saturating_sub(self.part.at), self.witness)
    }

    /// Throws away what came.
    fn start_over(&mut self) -> Result<(), HubError> {
        self.restarts += 1;
        if self.restarts > RESTARTS {
            return Err(self.dropped(format!("(the server began again more than {RESTARTS} times)")));
        }
        self.part.forget(&self.item.part)
    }

    fn dropped(&self, why: String) -> HubError {
        let Item { name, part, .. } = self.item.clone();
        HubError::Dropped { name, at: self.part.at, size: self.size, why, part }
    }

    /// A later run goes on only with the same file.
    fn keep_etag(&mut self, answer: &Answer) -> Result<(), HubError> {
        let etag = answer.linked.etag.as_deref().or(answer.header(header::ETAG));
        self.etag = etag.filter(|etag| is_etag(etag)).map(str::to_owned);
        let path = etag_path(&self.item.part);
        match self.etag.as_ref().filter(|etag| is_strong(etag) && !self.item.is_addressed) {
            Some(etag) => hobbit::files::replace(&path, etag.as_bytes()).map_err(failed(&path, "write this file")),
            None => {
                let _ = fs::remove_file(&path);
                Ok(())
            }
        }
    }

    fn not_understood(&self, why: &str) -> HubError {
        HubError::Answer { what: self.item.name.clone(), why: why.to_owned() }
    }
}

enum Attempt {
    Done,
    Broken { why: String, wait: Option<Duration> },
}

/// Bytes of the body, as the server says.
fn length(answer: &Answer) -> Option<u64> {
    answer.header(header::CONTENT_LENGTH)?.trim().parse().ok()
}

/// First byte, and bytes in all if the server says, of `bytes 5-9/10`.
fn content_range(answer: &Answer) -> Option<(u64, Option<u64>)> {
    range_of(answer.header(header::CONTENT_RANGE)?)
}

fn range_of(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, all) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let all = if all == "*" { None } else { Some(all.parse().ok()?) };
    Some((range.split_once('-')?.0.parse().ok()?, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        assert_eq!(range_of("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(range_of("bytes 5-9/*"), Some((5, None)));
        for bad in ["", "bytes */10", "bytes 5/10", "5-9/10", "bytes 5-9/x", "bytes -5-9/10"] {
            assert_eq!(range_of(bad), None, "{bad}");
        }
    }
}
