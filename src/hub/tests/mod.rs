//! Downloads from correct and faulty servers.

mod repo;
mod secure;
mod server;
mod url;

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::*;

/// Records all notes and never waits.
#[derive(Default)]
struct Memory {
    notes: RefCell<Vec<String>>,
    pauses: RefCell<Vec<u64>>,
    /// Called instead of a pause.
    instead: RefCell<Option<Box<dyn FnOnce()>>>,
    /// After so many questions about it the disk is full.
    fills_up_after: Cell<Option<u32>>,
}

impl Memory {
    fn notes(&self) -> String {
        self.notes.borrow().join("\n")
    }
}

impl Witness for Memory {
    fn note(&self, text: &str) {
        self.notes.borrow_mut().push(text.to_owned());
    }
    fn begin(&self, _: &str, _: Option<u64>, _: u64) {}
    fn at(&self, _: u64) {}
    fn end(&self) {}
    fn pause(&self, time: Duration) {
        self.pauses.borrow_mut().push(time.as_secs());
        if let Some(instead) = self.instead.borrow_mut().take() {
            instead();
        }
    }
    fn free_space(&self, _: &Path) -> std::io::Result<u64> {
        let Some(left) = self.fills_up_after.get() else { return Ok(1 << 40) };
        self.fills_up_after.set(Some(left.saturating_sub(1)));
        Ok(if left == 0 { 0 } else { 1 << 40 })
    }
}

/// A cache of a test's own, for a server that stands for the Hub.
struct Rig {
    dir: TempDir,
    places: Places,
    memory: Memory,
}

impl Rig {
    fn new(endpoint: String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (hub, urls) = (dir.path().join("hub"), dir.path().join("urls"));
        Self { places: Places { endpoint, hub, urls, token: None, offline: false }, memory: Memory::default(), dir }
    }

    fn hf(&self, repo: &str) -> Result<std::path::PathBuf, String> {
        self.fetch(&Source::repo(repo, None).unwrap())
    }

    fn mu(&self, url: &str) -> Result<std::path::PathBuf, String> {
        self.fetch(&Source::Url(url.to_owned()))
    }

    fn fetch(&self, source: &Source) -> Result<std::path::PathBuf, String> {
        fetch(source, &self.places, &self.memory).map_err(|error| error.to_string())
    }

    /// Every file and link below the caches, in order.
    fn files(&self) -> Vec<String> {
        fn walk(directory: &Path, root: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                match entry.file_type().unwrap().is_dir() {
                    true => walk(&entry.path(), root, found),
                    false => found.push(entry.path().strip_prefix(root).unwrap().display().to_string()),
                }
            }
        }
        let mut found = Vec::new();
        walk(self.dir.path(), self.dir.path(), &mut found);
        found.sort();
        found
    }
}

/// A file that passes for a model.
fn model(seed: u8, bytes: usize) -> Vec<u8> {
    let noise = (0..bytes).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8 ^ seed);
    b"GGUF".iter().copied().chain(noise.skip(4)).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hobbit_core::pack::Sha256(Sha256::digest(bytes).into()).to_string()
}
