//! The models that there are: of a directory, and of the Hub's cache. Names of requests are looked up here and never
//! become paths.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use hobbit_common::hub::Places;
use hobbit_common::hub::kept::{self, Kept};
use hobbit_common::hub::names::{is_first_part_of_model, parts_of};

/// A model that can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub file: PathBuf,
    /// The encoder of images or sound beside it.
    pub projector: Option<PathBuf>,
    /// Bytes of all parts.
    pub bytes: u64,
    /// When the file was changed, in seconds since 1970.
    pub modified: u64,
    /// In the Hub's cache.
    pub kept: Option<Kept>,
}

/// Models by name. A directory's own have precedence over the cache's.
pub fn scan(directory: &Path, places: &Places) -> BTreeMap<String, Entry> {
    let mut all = BTreeMap::new();
    for kept in kept::list(places) {
        let (name, file) = (kept.name.clone(), kept.files[0].clone());
        let (modified, bytes) = (modified(&file), kept.bytes);
        all.insert(name.clone(), Entry { name, file, projector: None, bytes, modified, kept: Some(kept) });
    }
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let below = entries.map(|entry| entry.path()).filter(|path| path.is_dir());
    let mut add = |entry: Entry| all.insert(entry.name.clone(), entry);
    for below in below {
        // A directory with one model gives it its name, as in llama-server, and its projector.
        let mut found = models_in(&below);
        let Some(name) = below.file_name().and_then(|name| name.to_str()) else { continue };
        if let [only] = &mut found[..] {
            only.name = name.to_owned();
            only.projector = projector_in(&below);
        } else {
            found.iter_mut().for_each(|entry| entry.name = format!("{name}/{}", entry.name));
        }
        found.into_iter().for_each(|entry| drop(add(entry)));
    }
    models_in(directory).into_iter().for_each(|entry| drop(add(entry)));
    all
}

/// The complete models of a directory.
fn models_in(directory: &Path) -> Vec<Entry> {
    let names = files_of(directory);
    // macOS keeps a file's attributes in `._NAME` on other systems' disks.
    let models =
        names.iter().filter(|name| is_first_part_of_model(name) && !accompanies(name) && !name.starts_with('.'));
    models.filter_map(|name| model_at(&directory.join(name))).collect()
}

/// The model of this file, the first one of a split model, if it is complete.
pub fn model_at(file: &Path) -> Option<Entry> {
    let name = file.file_name()?.to_str()?;
    let parts = parts_of(name);
    let sizes = parts.iter().map(|part| fs::metadata(file.with_file_name(part)).map(|found| found.len()).ok());
    let bytes = sizes.sum::<Option<u64>>()?;
    let stem = name.trim_end_matches(".gguf");
    let stem = if parts.len() > 1 { stem.rsplit_once("-00001-of-")?.0 } else { stem };
    let (name, file, modified) = (stem.to_owned(), file.to_owned(), modified(file));
    Some(Entry { name, file, projector: None, bytes, modified, kept: None })
}

/// Whether a file accompanies another model: a draft model, or low versions of experts (`--low`).
fn accompanies(name: &str) -> bool {
    let stem = name.trim_end_matches(".gguf").to_ascii_lowercase();
    stem.starts_with("draft-") || stem.ends_with("-draft") || stem.ends_with(".hobbit") && stem.contains(".low-")
}

fn projector_in(directory: &Path) -> Option<PathBuf> {
    let is_projector = |name: &String| name.contains("mmproj") && name.ends_with(".gguf") && !name.starts_with('.');
    let found = files_of(directory).into_iter().find(is_projector);
    found.map(|name| directory.join(name))
}

/// Names of files, sorted.
fn files_of(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.path().is_file());
    let mut names: Vec<String> = files.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

fn modified(file: &Path) -> u64 {
    let time = fs::metadata(file).and_then(|found| found.modified()).ok();
    time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs())
}

/// The model of that name; `NAME:latest` is `NAME`, as for Ollama's clients, and `USER/REPO` the repository's only one.
pub fn find<'a>(all: &'a BTreeMap<String, Entry>, name: &str) -> Option<&'a Entry> {
    let bare = name.strip_prefix("hf.co/").unwrap_or(name);
    let bare = bare.strip_suffix(":latest").unwrap_or(bare);
    let prefix = format!("{bare}:");
    let mut of_repo = all.values().filter(|entry| entry.name.starts_with(&prefix));
    let only = of_repo.next().filter(|_| of_repo.next().is_none());
    all.get(name).or_else(|| all.get(bare)).or(only)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_llama_servers() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let files = "a.gguf ._a.gguf .hidden.gguf a-draft.gguf a.low-q2_k.hobbit.gguf mmproj-a.gguf note.txt \
                     s-00001-of-00002.gguf s-00002-of-00002.gguf cut-00001-of-00002.gguf vision/v-Q8_0.gguf \
                     vision/._mmproj-v.gguf vision/mmproj-v.gguf two/x.gguf two/y.gguf empty/readme";
        for file in files.split_whitespace() {
            fs::create_dir_all(at(file).parent().unwrap()).unwrap();
            fs::write(at(file), "12345").unwrap();
        }
        let places =
            Places { endpoint: String::new(), hub: at("no cache"), urls: PathBuf::new(), token: None, offline: false };
        let all = scan(dir.path(), &places);
        let names: Vec<_> = all.values().map(|entry| (entry.name.as_str(), entry.bytes)).collect();
        assert_eq!(names, [("a", 5), ("s", 10), ("two/x", 5), ("two/y", 5), ("vision", 5)]);
        assert_eq!(all["vision"].projector, Some(at("vision/mmproj-v.gguf")));
        assert_eq!(all["s"].file, at("s-00001-of-00002.gguf"));
        let found = |name| find(&all, name).map(|entry| entry.name.as_str());
        assert_eq!((found("a"), found("a:latest"), found("vision")), (Some("a"), Some("a"), Some("vision")));
        for name in ["", "a.gguf", "../a", "two", "vision/v-Q8_0", "/etc/passwd", "a\0", "A"] {
            assert_eq!(found(name), None, "{name}");
        }
    }
}
