//! Models in the Hub's cache: which there are, and their removal.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::names::{RepoId, Want, choose, is_commit, is_first_part_of_model, parts_of, quant_of};
use super::places::Places;

/// The branch that is fetched.
pub const BRANCH: &str = "main";
/// Limit of files in one snapshot.
const MOST_FILES: usize = 100_000;
/// Limit of nested directories in a snapshot.
const DEEPEST: usize = 16;
/// Limit of entries of the whole cache.
const LINKS_MAX: usize = 1_000_000;

/// A complete model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// `USER/REPO:QUANT`, as -hf takes it.
    pub name: String,
    /// Its parts, the first one first.
    pub files: Vec<PathBuf>,
    pub bytes: u64,
    /// The last time that it was read, as far as the file system records it.
    pub used: SystemTime,
}

/// The models in the cache, by name.
pub fn list(places: &Places) -> Vec<Kept> {
    let folders = fs::read_dir(&places.hub).into_iter().flatten().flatten();
    let mut found: Vec<Kept> = folders.filter_map(|folder| of_folder(&folder.path())).flatten().collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

fn of_folder(folder: &Path) -> Option<Vec<Kept>> {
    let name = folder.file_name()?.to_str()?.strip_prefix("models--")?;
    let id: RepoId = name.replacen("--", "/", 1).parse().ok()?;
    let snapshot = snapshot(folder)?;
    let names = files_in(&snapshot);
    let models = names.iter().filter(|name| is_first_part_of_model(name));
    let kept = models.filter_map(|first| {
        let quant = quant_of(first).filter(|quant| {
            choose(&names, &Want::Quant(quant.clone())).is_ok_and(|chosen| chosen.first() == Some(first))
        });
        let stem = || first.trim_end_matches(".gguf").to_owned();
        let files: Vec<PathBuf> = parts_of(first).iter().map(|part| snapshot.join(part)).collect();
        let found: Vec<fs::Metadata> = files.iter().map(|file| fs::metadata(file).ok()).collect::<Option<_>>()?;
        Some(Kept {
            name: format!("{id}:{}", quant.unwrap_or_else(stem)),
            bytes: found.iter().map(fs::Metadata::len).sum(),
            used: found.iter().filter_map(|file| file.accessed().ok()).max().unwrap_or(SystemTime::UNIX_EPOCH),
            files,
        })
    });
    Some(kept.collect())
}

/// The directory of the commit in the cache that was fetched last.
pub fn snapshot(folder: &Path) -> Option<PathBuf> {
    let commit = hobbit_core::files::read_text(&folder.join("refs").join(BRANCH), 1 << 10).ok()?;
    Some(folder.join("snapshots").join(Some(commit.trim()).filter(|commit| is_commit(commit))?))
}

/// Removes a model: the links to its files, and the files that nothing else in the cache links to. Other programs
/// share the cache, and a file that did not change between two commits is in the snapshots of both. Returns the bytes
/// of files that stay for that reason.
///
/// # Errors
/// A file that cannot be removed.
pub fn remove(kept: &Kept, places: &Places) -> std::io::Result<u64> {
    let hub = fs::canonicalize(&places.hub)?;
    let mut blobs = BTreeSet::new();
    for file in &kept.files {
        // A link leads to the file in `blobs`. One that leads out of the cache is not the cache's file.
        let blob = fs::canonicalize(file).ok().filter(|blob| blob.starts_with(&hub));
        fs::remove_file(file)?;
        blobs.extend(blob.filter(|blob| blob.exists()));
    }
    if blobs.is_empty() {
        return Ok(0);
    }
    let used = linked(&hub, 3 + DEEPEST, &mut { LINKS_MAX });
    let mut bytes = 0;
    for blob in blobs {
        if used.as_ref().is_none_or(|used| used.contains(&blob)) {
            bytes += fs::metadata(&blob)?.len();
        } else {
            fs::remove_file(blob)?;
        }
    }
    Ok(bytes)
}

/// The files that links below a directory lead to; `None` if there are too many entries or a directory is unreadable,
/// so that some are unknown.
fn linked(directory: &Path, depth: usize, left: &mut usize) -> Option<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).ok()? {
        let entry = entry.ok()?;
        *left = left.checked_sub(1)?;
        let kind = entry.file_type().ok()?;
        if kind.is_symlink() {
            found.extend(fs::canonicalize(entry.path()));
        } else if kind.is_dir() {
            found.append(&mut linked(&entry.path(), depth.checked_sub(1)?, left)?);
        }
    }
    Some(found)
}

/// The paths of the files below a directory, relative to it.
pub fn files_in(directory: &Path) -> Vec<String> {
    let mut names = Vec::new();
    add_files(directory, "", DEEPEST, &mut names);
    names
}

fn add_files(directory: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{prefix}{name}");
        match fs::metadata(entry.path()) {
            Ok(found) if found.is_file() && names.len() < MOST_FILES => names.push(name),
            Ok(found) if found.is_dir() && depth > 0 => add_files(&entry.path(), &format!("{name}/"), depth - 1, names),
            _ => {}
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn complete_models_are_listed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places {
            endpoint: String::new(),
            hub: dir.path().to_owned(),
            urls: PathBuf::new(),
            token: None,
            offline: false,
        };
        let folder = dir.path().join("models--a--b-GGUF");
        let (commit, blobs) = ("0".repeat(40), folder.join("blobs"));
        let snapshot = folder.join("snapshots").join(&commit);
        [&blobs, &snapshot, &folder.join("refs")].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        fs::write(folder.join("refs/main"), &commit).unwrap();
        let outside = dir.path().parent().unwrap().join(format!("{commit}-outside"));
        for (n, name) in ["m-Q8_0.gguf", "m-F16-00001-of-00002.gguf", "mmproj-F16.gguf", "README.md"].iter().enumerate()
        {
            fs::write(blobs.join(n.to_string()), [0; 5]).unwrap();
            std::os::unix::fs::symlink(format!("../../blobs/{n}"), snapshot.join(name)).unwrap();
        }
        fs::write(&outside, "x").unwrap();
        std::os::unix::fs::symlink(&outside, snapshot.join("m-F16-00002-of-00002.gguf")).unwrap();
        fs::create_dir_all(dir.path().join("models--..--x/refs")).unwrap();
        let names = || list(&places).into_iter().map(|kept| (kept.name, kept.bytes)).collect::<Vec<_>>();
        assert_eq!(names(), [("a/b-GGUF:F16".to_owned(), 6), ("a/b-GGUF:Q8_0".to_owned(), 5)]);
        assert_eq!(remove(&list(&places)[0], &places).unwrap(), 0);
        assert_eq!(names(), [("a/b-GGUF:Q8_0".to_owned(), 5)]);
        assert!(outside.exists() && !blobs.join("1").exists() && blobs.join("0").exists());
        fs::remove_file(outside).unwrap();
        // An incomplete split model is none.
        fs::write(snapshot.join("m-Q2_K-00001-of-00002.gguf"), "x").unwrap();
        assert_eq!(names().len(), 1);
    }

    /// A commit that changes the README alone has the same files of the model.
    #[test]
    fn files_of_other_snapshots_stay() {
        let dir = tempfile::tempdir().unwrap();
        let hub = dir.path().to_owned();
        let places = Places { endpoint: String::new(), hub, urls: PathBuf::new(), token: None, offline: false };
        let folder = dir.path().join("models--a--b-GGUF");
        let blobs = folder.join("blobs");
        let [old, new, other] = ["1", "2", "3"].map(|digit| folder.join("snapshots").join(digit.repeat(40)));
        let other = other.join("deep");
        [&blobs, &old, &new, &other, &folder.join("refs")].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        fs::write(folder.join("refs/main"), "2".repeat(40)).unwrap();
        let quants = [("F16", &[&new, &other][..]), ("Q4_0", &[&new]), ("Q8_0", &[&old, &new])];
        for (quant, snapshots) in quants {
            fs::write(blobs.join(quant), [0; 5]).unwrap();
            for snapshot in snapshots {
                std::os::unix::fs::symlink(blobs.join(quant), snapshot.join(format!("m-{quant}.gguf"))).unwrap();
            }
        }
        let all = list(&places);
        assert_eq!(all.iter().map(|kept| remove(kept, &places).unwrap()).collect::<Vec<_>>(), [5, 0, 5]);
        assert!(list(&places).is_empty());
        assert_eq!(quants.map(|(quant, _)| blobs.join(quant).exists()), [true, false, true]);
        assert_eq!(fs::read(old.join("m-Q8_0.gguf")).unwrap(), [0; 5]);
    }
}
