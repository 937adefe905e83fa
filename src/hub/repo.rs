//! Models of the Hub, in the layout of its own cache: `blobs` by content, `snapshots` of commits that link to them, `refs`
//! that name commits. Files that other clients of the Hub fetched are found, and the other way round.

use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::Witness;
use super::choice::{Want, choose};
use super::error::{HubError, failed};
use super::names::{RepoId, blob_name, is_commit, is_sha256, path_within};
use super::places::Places;
use super::transfer::{self, Item, Lock, check_space, make_directory_of};
use super::web::{TRIES, Web};

/// The branch that is fetched.
const BRANCH: &str = "main";
/// Limit of files in one snapshot.
const MOST_FILES: usize = 100_000;
/// Limit of nested directories in a snapshot.
const DEEPEST: usize = 16;

/// The Hub's answer to `/api/models/…/revision/main?blobs=true`.
#[derive(Debug, Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Sibling {
    /// Name of the blob, and its size.
    fn blob(&self) -> (Option<String>, Option<u64>) {
        let lfs = self.lfs.as_ref();
        let name = lfs.map_or(self.blob_id.as_ref(), |lfs| lfs.sha256.as_ref());
        (name.and_then(|name| blob_name(name)), lfs.and_then(|lfs| lfs.size).or(self.size))
    }
}

/// A repository, on the Hub and in the cache.
struct Repo<'a> {
    id: &'a RepoId,
    places: &'a Places,
    /// `models--user--name`.
    folder: String,
}

/// Downloads the missing files of the wanted model; returns the first one's path.
///
/// # Errors
/// The repository has no such model, or [`transfer::fetch`] failed.
pub fn fetch(id: &RepoId, want: &Want, places: &Places, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
    let repo = Repo { id, places, folder: format!("models--{}", id.as_str().replace('/', "--")) };
    let kept = repo.kept(want);
    if places.offline {
        return kept;
    }
    // With the model in the cache there is no need to wait for a server that is away.
    let tries = if kept.is_ok() { 1 } else { TRIES };
    let url = format!("{}/api/models/{id}/revision/{BRANCH}?blobs=true", places.endpoint);
    match (web.json::<Info>(&url, id.as_str(), tries, witness), kept) {
        (Err(error), Ok(path)) if error.is_unreachable() => {
            witness.note(&format!("{error}; taking what is in the cache"));
            Ok(path)
        }
        (info, _) => repo.fetch(&info?, want, web, witness),
    }
}

impl Repo<'_> {
    fn path(&self, parts: &[&str]) -> PathBuf {
        [self.places.hub.as_path(), Path::new(&self.folder)].into_iter().chain(parts.iter().map(Path::new)).collect()
    }

    /// The first file of a model that is in the cache.
    fn kept(&self, want: &Want) -> Result<PathBuf, HubError> {
        let missing = |why: String| HubError::NotCached { what: self.id.to_string(), place: self.path(&[]), why };
        let commit = hobbit_core::files::capped::read_text(&self.path(&["refs", BRANCH]), 1 << 10).ok();
        let commit = commit.as_deref().map(str::trim).filter(|commit| is_commit(commit));
        let snapshot = self.path(&["snapshots", commit.ok_or_else(|| missing("nothing was fetched yet".to_owned()))?]);
        let mut names = Vec::new();
        files_in(&snapshot, "", DEEPEST, &mut names);
        let chosen = choose(&names, want).map_err(|error| missing(error.to_string()))?;
        Ok(snapshot.join(&chosen[0]))
    }

    fn fetch(&self, info: &Info, want: &Want, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
        if !is_commit(&info.sha) {
            return Err(HubError::Answer { what: self.id.to_string(), why: "it names no commit".to_owned() });
        }
        let names: Vec<String> = info.siblings.iter().map(|file| file.rfilename.clone()).collect();
        let hostile = names.iter().filter(|name| path_within(name).is_none()).count();
        if hostile > 0 {
            witness.note(&format!("{}: {hostile} names of files lead elsewhere and are passed over", self.id));
        }
        let chosen = choose(&names, want).map_err(|source| HubError::Choice { repo: self.id.to_string(), source })?;
        let snapshot = self.path(&["snapshots", &info.sha]);
        let mut missing = Vec::new();
        for name in &chosen {
            let (blob, size) =
                info.siblings.iter().find(|file| file.rfilename == *name).map(Sibling::blob).unwrap_or_default();
            let pointer = snapshot.join(name);
            if !is_whole(&pointer, size) {
                missing.push((pointer, self.item(&info.sha, name, blob, size, web, witness)?));
            }
        }
        let items = missing.iter().map(|(_, item)| item).filter(|item| !is_whole(&item.target, item.size));
        check_space(&self.places.hub, items, witness)?;
        for (pointer, item) in &missing {
            let _lock = Lock::take(item, witness)?;
            // Another process may have fetched it meanwhile.
            if !is_whole(&item.target, item.size) {
                transfer::fetch(web, item, witness)?;
            }
            point(pointer, &item.target)?;
        }
        let reference = self.path(&["refs", BRANCH]);
        make_directory_of(&reference)?;
        hobbit_core::files::replace(&reference, info.sha.as_bytes()).map_err(failed(&reference, "write this file"))?;
        Ok(snapshot.join(&chosen[0]))
    }

    /// How a file of a commit is fetched. The server is asked where its listing does not name the blob.
    fn item(
        &self,
        commit: &str,
        name: &str,
        blob: Option<String>,
        size: Option<u64>,
        web: &Web,
        witness: &dyn Witness,
    ) -> Result<Item, HubError> {
        let url = format!("{}/{}/resolve/{commit}/{}", self.places.endpoint, self.id, path_escaped(name));
        let what = format!("{}/{name}", self.id);
        let (blob, size) = match blob {
            Some(blob) => (blob, size),
            None => {
                let said = web.head(&url, &what, TRIES, witness)?;
                let blob = said.sha256.or_else(|| blob_name(&said.etag?));
                let why = || "there is no etag to keep it by".to_owned();
                (blob.ok_or_else(|| HubError::Answer { what: what.clone(), why: why() })?, said.size)
            }
        };
        Ok(Item {
            url,
            name: what,
            // Names that the Hub's own client uses, so that each resumes what the other began.
            target: self.path(&["blobs", &blob]),
            lock: self.places.hub.join(".locks").join(&self.folder).join(format!("{blob}.lock")),
            size,
            sha256: is_sha256(&blob).then_some(blob),
            etag: None,
            is_addressed: true,
        })
    }
}

/// `text` as a part of a URL's path; slashes stay.
fn path_escaped(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes()
        .map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Whether a file exists with all its bytes.
fn is_whole(path: &Path, size: Option<u64>) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && size.is_none_or(|size| size == found.len()))
}

/// Makes `pointer`, in a snapshot, a link to `blob`.
fn point(pointer: &Path, blob: &Path) -> Result<(), HubError> {
    make_directory_of(pointer)?;
    let _ = fs::remove_file(pointer);
    let target = relative(blob, pointer.parent().unwrap_or(Path::new("")));
    // A file system without links gets the file itself, as with the Hub's own client.
    std::os::unix::fs::symlink(target, pointer)
        .or_else(|_| fs::rename(blob, pointer))
        .map_err(failed(pointer, "make this link"))
}

/// `path` as seen from `directory`.
fn relative(path: &Path, directory: &Path) -> PathBuf {
    let shared = path.components().zip(directory.components()).take_while(|(a, b)| a == b).count();
    let up = directory.components().skip(shared).map(|_| Component::ParentDir);
    up.chain(path.components().skip(shared)).collect()
}

/// Appends the paths of the files below `directory`.
fn files_in(directory: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{prefix}{name}");
        match fs::metadata(entry.path()) {
            Ok(found) if found.is_file() && names.len() < MOST_FILES => names.push(name),
            Ok(found) if found.is_dir() && depth > 0 => files_in(&entry.path(), &format!("{name}/"), depth - 1, names),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_escaped() {
        assert_eq!(path_escaped("Q4/a b#c?é.gguf"), "Q4/a%20b%23c%3F%C3%A9.gguf");
    }

    #[test]
    fn links_are_relative() {
        let blob = Path::new("/c/models--a--b/blobs/x");
        assert_eq!(relative(blob, Path::new("/c/models--a--b/snapshots/s")), Path::new("../../blobs/x"));
        assert_eq!(relative(blob, Path::new("/c/models--a--b/snapshots/s/Q4")), Path::new("../../../blobs/x"));
    }
}
