//! Downloads one file: resumes it where it broke off, locks out other processes, checks size, free space and checksum,
//! and only then gives it its name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hobbit_core::units::Bytes;
use sha2::{Digest, Sha256};

use super::web::{Answer, Patience, TRIES, Web, etag, header, is_etag, number};
use super::{HubError, Witness, failed};

/// Bytes that are written at once.
const PIECE: usize = 1 << 18;
/// Minimum bytes that count as progress of a try.
const PROGRESS: u64 = 1 << 20;
/// Time within which a connection has to bring [`TRICKLE`], or is given up like one that broke off.
const TRICKLE_TIME: Duration = Duration::from_secs(60);
const TRICKLE: u64 = 64 << 10;
/// Restarts of one download at its first byte, so that no server has the same bytes fetched for ever.
const RESTARTS: u32 = 5;
/// Bytes that stay free on the disk.
const RESERVE: u64 = 64 << 20;
/// Bytes after which free space is checked again: other programs write there too.
const SPACE_CHECK: u64 = 16 << 20;
/// Time between two tries to take a lock.
const LOOK: Duration = Duration::from_millis(250);
const MAGIC: &[u8] = b"GGUF";

/// A file to download.
#[derive(Clone, Debug, Default)]
pub struct Item {
    pub url: String,
    /// In messages.
    pub name: String,
    pub target: PathBuf,
    /// Held while the file is written.
    pub lock: PathBuf,
    pub size: Option<u64>,
    /// Lower case.
    pub sha256: Option<String>,
    /// The server's etag, if it was asked for.
    pub etag: Option<String>,
    /// The target's name stands for its content, so a part of it never belongs to another version.
    pub is_addressed: bool,
}

impl Item {
    /// The file until it is complete.
    fn part(&self) -> PathBuf {
        beside(&self.target, ".incomplete")
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The etag of the file at `path`, which lies beside it.
pub fn etag_of(path: &Path) -> Option<String> {
    hobbit_core::files::read_text(&beside(path, ".etag"), 1 << 10).ok().filter(|etag| is_etag(etag))
}

/// Whether the same etag means the same bytes.
fn is_strong(etag: &str) -> bool {
    !etag.starts_with("W/")
}

/// A lock that other processes see, the Hub's own client among them; released when dropped.
pub struct Lock(#[expect(dead_code, reason = "held")] File);

impl Lock {
    /// Waits until no other process holds the lock.
    pub fn take(item: &Item, witness: &dyn Witness) -> Result<Self, HubError> {
        let path = &item.lock;
        make_directory_of(path)?;
        let file = open_own(path).map_err(failed(path, "open this lock"))?;
        let mut has_told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(failed(path, "lock this file")(error)),
            }
            if !std::mem::replace(&mut has_told, true) {
                witness.note(&format!("{}: another process downloads it; waiting", item.name));
            }
            if !witness.is_wanted() {
                return Err(HubError::Stopped { name: item.name.clone() });
            }
            witness.pause(LOOK);
        }
    }
}

/// Opens or makes a file of ours: no link is followed, and no pipe is read.
fn open_own(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW);
    // Windows's "open the link itself".
    #[cfg(windows)]
    std::os::windows::fs::OpenOptionsExt::custom_flags(&mut options, 0x0020_0000);
    let file = options.read(true).write(true).create(true).truncate(false).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("it is no regular file"));
    }
    Ok(file)
}

pub fn make_directory_of(path: &Path) -> Result<(), HubError> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory).map_err(failed(directory, "make this directory"))
}

/// Checks that the disk of `directory` has room for the missing bytes of `items`.
pub fn check_space<'a>(
    directory: &Path,
    items: impl Iterator<Item = &'a Item>,
    witness: &dyn Witness,
) -> Result<(), HubError> {
    fs::create_dir_all(directory).map_err(failed(directory, "make this directory"))?;
    let have =
        |item: &Item| fs::symlink_metadata(item.part()).map_or(0, |part| if part.is_file() { part.len() } else { 0 });
    let missing = items.map(|item| item.size.unwrap_or(0).saturating_sub(have(item)));
    check_room(directory, missing.fold(0, u64::saturating_add), witness)
}

fn check_room(directory: &Path, needed: u64, witness: &dyn Witness) -> Result<(), HubError> {
    let free = witness.free_space(directory).map_err(failed(directory, "ask for the free space of"))?;
    let free = free.saturating_sub(RESERVE);
    if needed <= free {
        return Ok(());
    }
    Err(HubError::Space { directory: directory.to_owned(), needed, free, reserve: RESERVE })
}

/// Downloads a file, whose lock is held.
///
/// # Errors
/// The server refuses, or the connection breaks off again and again (the part is kept); a wrong size or checksum (it is
/// removed).
pub fn fetch(web: &Web, item: &Item, witness: &dyn Witness) -> Result<(), HubError> {
    make_directory_of(&item.target)?;
    let mut transfer = Transfer::open(web, item, witness)?;
    witness.begin(&item.name, transfer.size, transfer.at);
    let outcome = transfer.run().and_then(|()| transfer.check_sum());
    witness.end();
    let part = item.part();
    if let Err(error) = outcome {
        use HubError::{NoLength, NotGguf, Size, Sum};
        if matches!(error, Size { .. } | NoLength { .. } | NotGguf { .. } | Sum { .. }) {
            let _ = fs::remove_file(&part);
            let _ = fs::remove_file(beside(&part, ".etag"));
        }
        return Err(error);
    }
    transfer.file.sync_all().map_err(failed(&part, "finish this part of a download"))?;
    fs::rename(&part, &item.target).map_err(failed(&item.target, "put the download here"))?;
    if !item.is_addressed && fs::rename(beside(&part, ".etag"), beside(&item.target, ".etag")).is_err() {
        let _ = fs::remove_file(beside(&item.target, ".etag")); // it is the old file's
    }
    if item.sha256.is_none() {
        witness.note(&format!("{}: the server gave no SHA-256: only its length was checked", item.name));
    }
    Ok(())
}

struct Transfer<'a> {
    web: &'a Web,
    item: &'a Item,
    witness: &'a dyn Witness,
    part: PathBuf,
    file: File,
    /// Bytes in the file, and their checksum.
    at: u64,
    sum: Sha256,
    size: Option<u64>,
    /// The server's etag for these bytes.
    etag: Option<String>,
    restarts: u32,
}

impl<'a> Transfer<'a> {
    /// Takes the part that an earlier run left, if it belongs to this file.
    fn open(web: &'a Web, item: &'a Item, witness: &'a dyn Witness) -> Result<Self, HubError> {
        let part = item.part();
        let file = open_own(&part).map_err(failed(&part, "write this part of a download"))?;
        let (etag, size) = (etag_of(&part), item.size);
        let mut transfer = Self { web, item, witness, part, file, at: 0, sum: Sha256::new(), size, etag, restarts: 0 };
        let mut piece = vec![0; PIECE];
        loop {
            match transfer.file.read(&mut piece).map_err(failed(&transfer.part, "read this part of a download"))? {
                0 => break,
                n => {
                    transfer.sum.update(&piece[..n]);
                    transfer.at += n as u64;
                }
            }
        }
        let known = transfer.etag.as_deref().filter(|etag| is_strong(etag));
        let is_same = known.is_some() && (item.etag.is_none() || item.etag.as_deref() == known);
        if !(item.is_addressed || is_same) || size.is_some_and(|size| transfer.at > size) {
            transfer.forget()?;
        }
        if transfer.at > 0 {
            witness.note(&format!("{}: going on at {}", item.name, Bytes(transfer.at)));
        }
        Ok(transfer)
    }

    fn run(&mut self) -> Result<(), HubError> {
        let mut patience = Patience::new(TRIES);
        while self.size != Some(self.at) {
            let before = self.at;
            if let Err(error) = self.attempt() {
                if self.restarts > RESTARTS || !self.witness.is_wanted() {
                    return Err(error);
                }
                if self.at.saturating_sub(before) >= PROGRESS {
                    patience.renew();
                }
                patience.wait(error, self.witness)?;
            }
        }
        Ok(())
    }

    fn attempt(&mut self) -> Result<(), HubError> {
        let range = format!("bytes={}-", self.at);
        let mut headers = Vec::new();
        if self.at > 0 {
            headers.push(("range", &*range));
            // A checksum is stronger than an etag, and a weak etag does not identify bytes.
            let is_checked = self.item.is_addressed || self.item.sha256.is_some();
            headers.extend(
                self.etag.as_deref().filter(|etag| !is_checked && is_strong(etag)).map(|etag| ("if-range", etag)),
            );
        }
        let answer = match self.web.get(&self.item.url, &self.item.name, &headers) {
            Err(HubError::Unreachable { host, why, wait, .. }) => {
                return Err(self.dropped(format!("({host} cannot be reached: {why})"), wait));
            }
            answer => answer?,
        };
        match answer.status().as_u16() {
            200 => {
                if self.at > 0 {
                    self.witness.note(&format!("{}: the server sends it from the start again", self.item.name));
                    self.start_over()?;
                }
                // An earlier answer's length may be another version's.
                self.size = self.item.size;
                self.expect(number(&answer, "content-length"))?;
                self.keep_etag(&answer)?;
            }
            206 => {
                let range = header(&answer, "content-range").and_then(range_of);
                let (from, all) = range.ok_or_else(|| self.not_understood("no range in it"))?;
                if from != self.at {
                    return Err(self.not_understood("another range than was asked for"));
                }
                // Some servers ignore `if-range`.
                let is_other = self.etag.is_some() && etag(&answer).is_some_and(|now| self.etag != Some(now));
                if is_other && self.item.sha256.is_none() {
                    self.start_over()?;
                    return Err(self.dropped("(it has changed there)".to_owned(), None));
                }
                self.expect(all.or_else(|| from.checked_add(number(&answer, "content-length")?)))?;
            }
            // The part is all of the file, or more.
            416 if self.at > 0 => {
                let all = header(&answer, "content-range").and_then(|text| text.trim().strip_prefix("bytes */"));
                let is_whole = all.and_then(|all| all.parse().ok()) == Some(self.at);
                if is_whole && self.size.is_none() {
                    self.size = Some(self.at);
                    return Ok(());
                }
                self.start_over()?;
                return Err(self.dropped("(the server has less)".to_owned(), Some(Duration::ZERO)));
            }
            status => return Err(HubError::Refused { what: self.item.name.clone(), status }),
        }
        self.copy(answer)
    }

    /// Writes the body to the part.
    fn copy(&mut self, mut answer: Answer) -> Result<(), HubError> {
        let mut body = answer.body_mut().as_reader();
        let mut piece = vec![0; PIECE];
        let mut begins = Vec::new();
        let looks = self.at == 0;
        let mut checked_at = self.at;
        let (mut since, mut had) = (self.witness.now(), self.at);
        self.check_room()?;
        loop {
            let read = match body.read(&mut piece) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.dropped(format!("({error})"), None)),
            };
            if looks && begins.len() < MAGIC.len() {
                begins.extend_from_slice(&piece[..read.min(16)]);
                if !begins.starts_with(&MAGIC[..MAGIC.len().min(begins.len())]) {
                    let begins = String::from_utf8_lossy(&begins).into_owned();
                    return Err(HubError::NotGguf { name: self.item.name.clone(), begins });
                }
            }
            let now = self.at + read as u64;
            if let Some(expected) = self.size.filter(|size| now > *size) {
                return Err(HubError::Size { name: self.item.name.clone(), found: now, expected });
            }
            if now - checked_at >= SPACE_CHECK {
                checked_at = now;
                self.check_room()?;
            }
            self.file.write_all(&piece[..read]).map_err(failed(&self.part, "write this part of a download"))?;
            self.sum.update(&piece[..read]);
            self.at = now;
            self.witness.at(self.at);
            let time = self.witness.now();
            if time.duration_since(since) >= TRICKLE_TIME {
                if self.at - had < TRICKLE && self.size != Some(self.at) {
                    let why = format!("(only {} came in {} s)", Bytes(self.at - had), TRICKLE_TIME.as_secs());
                    return Err(self.dropped(why, None));
                }
                (since, had) = (time, self.at);
            }
            if !self.witness.is_wanted() {
                return Err(HubError::Stopped { name: self.item.name.clone() });
            }
        }
        if self.size != Some(self.at) {
            return Err(self.dropped("(the connection ended)".to_owned(), None));
        }
        Ok(())
    }

    /// Compares the length that the server announces. A file without a length could be cut or endless.
    fn expect(&mut self, announced: Option<u64>) -> Result<(), HubError> {
        match (self.size, announced) {
            (Some(expected), Some(found)) if found != expected => {
                Err(HubError::Size { name: self.item.name.clone(), found, expected })
            }
            (None, None) => Err(HubError::NoLength { name: self.item.name.clone() }),
            (None, Some(_)) => {
                self.size = announced;
                self.witness.begin(&self.item.name, self.size, self.at);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Checks that the rest still fits on the disk.
    fn check_room(&self) -> Result<(), HubError> {
        let directory = self.part.parent().unwrap_or(Path::new("."));
        check_room(directory, self.size.unwrap_or(0).saturating_sub(self.at), self.witness)
    }

    fn check_sum(&mut self) -> Result<(), HubError> {
        let found = hobbit_core::pack::Sha256(std::mem::take(&mut self.sum).finalize().into()).to_string();
        match self.item.sha256.clone() {
            Some(expected) if expected != found => Err(HubError::Sum { name: self.item.name.clone(), found, expected }),
            _ => Ok(()),
        }
    }

    /// Empties the part, within the limit of restarts. The server may have another file by now, with another length.
    fn start_over(&mut self) -> Result<(), HubError> {
        self.restarts += 1;
        if self.restarts > RESTARTS {
            return Err(self.dropped(format!("(the server began again more than {RESTARTS} times)"), None));
        }
        self.forget()
    }

    fn forget(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(failed(&self.part, "empty this part of a download"))?;
        (self.at, self.sum, self.size, self.etag) = (0, Sha256::new(), self.item.size, None);
        Ok(())
    }

    /// Remembers the file's etag, so that a later run resumes only the same file.
    fn keep_etag(&mut self, answer: &Answer) -> Result<(), HubError> {
        self.etag = etag(answer);
        if self.item.is_addressed {
            return Ok(());
        }
        let path = beside(&self.part, ".etag");
        // The Hub's own etag is a checksum; the server to which it redirects has another.
        match if self.item.sha256.is_some() { &self.item.etag } else { &self.etag } {
            Some(etag) => hobbit_core::files::replace(&path, etag.as_bytes()).map_err(failed(&path, "write this file")),
            None => {
                let _ = fs::remove_file(&path);
                Ok(())
            }
        }
    }

    fn dropped(&self, why: String, wait: Option<Duration>) -> HubError {
        HubError::Dropped {
            name: self.item.name.clone(),
            at: self.at,
            size: self.size,
            why,
            part: self.part.clone(),
            wait,
        }
    }

    fn not_understood(&self, why: &str) -> HubError {
        HubError::Answer { what: self.item.name.clone(), why: why.to_owned() }
    }
}

/// First byte, and length of the file if it is known, of `bytes 5-9/10`.
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
