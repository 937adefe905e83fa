//! Models of the Hub's repositories, in the layout of the Hub's own cache: `blobs` by content, `snapshots` of commits that point to
//! them, `refs` that name commits. Files that other clients of the Hub have fetched are found, and the other way round.

use std::fs;
use std::path::{Component, Path, PathBuf};

use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde::Deserialize;

use super::Witness;
use super::choice::{Want, choose};
use super::error::{HubError, failed};
use super::names::{RepoId, blob_name, is_commit, is_sha256, path_within};
use super::places::Places;
use super::transfer::{self, Item, Lock, check_space, make_directory_of};
use super::web::{Method, TRIES, Web, path_escaped};

/// The branch that is fetched.
const BRANCH: &str = "main";
/// Files of one snapshot.
const MOST_FILES: usize = 100_000;
/// Directories within directories of a snapshot.
const DEEPEST: usize = 16;

/// What the Hub says about a repository (`/api/models/…/revision/main?blobs=true`).
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

/// What is known about a file before it is fetched.
#[derive(Clone, Debug, Default)]
struct Known {
    /// Name of its blob.
    blob: Option<String>,
    size: Option<u64>,
}

impl Known {
    fn of(sibling: &Sibling) -> Self {
        let lfs = sibling.lfs.as_ref();
        let blob = lfs.map_or(sibling.blob_id.as_ref(), |lfs| lfs.sha256.as_ref());
        Self { blob: blob.and_then(|name| blob_name(name)), size: lfs.and_then(|lfs| lfs.size).or(sibling.size) }
    }
}

/// A repository, there and here.
struct Both<'a> {
    id: &'a RepoId,
    places: &'a Places,
    repo: Repo,
    cache: CacheRepo,
}

/// The first file of the model that is wanted, all of whose files are here then.
///
/// # Errors
/// Nothing there that is wanted, and whatever [`transfer::fetch`] says.
pub fn fetch(id: &RepoId, want: &Want, places: &Places, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
    let repo = Repo::with_revision(id.to_string(), RepoType::Model, BRANCH.to_owned());
    let both = Both { id, places, cache: Cache::new(places.hub.clone()).repo(repo.clone()), repo };
    let kept = both.kept(want);
    if places.offline {
        return kept;
    }
    // Whoever has it need not wait for a server that is away.
    let tries = if kept.is_ok() { 1 } else { TRIES };
    let url = format!("{}/api/{}?blobs=true", places.endpoint, both.repo.api_url());
    match web.json::<Info>(&url, id.as_str(), tries, witness) {
        Ok(info) => both.fetch(&info, want, web, witness),
        Err(error) if error.is_unreachable() => match kept {
            Ok(path) => {
                witness.note(&format!("{error}; taking what is in the cache"));
                Ok(path)
            }
            Err(_) => Err(error),
        },
        Err(error) => Err(error),
    }
}

impl Both<'_> {
    /// Where the repository is kept.
    fn place(&self) -> PathBuf {
        self.places.hub.join(self.repo.folder_name())
    }

    /// The first file of what is here.
    fn kept(&self, want: &Want) -> Result<PathBuf, HubError> {
        let missing = |why: String| HubError::NotCached { what: self.id.to_string(), place: self.place(), why };
        let reference = self.place().join("refs").join(BRANCH);
        let commit =
            hobbit::files::capped::read(&reference, 1 << 10).ok().and_then(|text| String::from_utf8(text).ok());
        let commit = commit.as_deref().map(str::trim).filter(|commit| is_commit(commit));
        let snapshot = self.cache.pointer_path(commit.ok_or_else(|| missing("nothing was fetched yet".to_owned()))?);
        let mut names = Vec::new();
        files_in(&snapshot, "", DEEPEST, &mut names);
        let chosen = choose(&names, want).map_err(|error| missing(error.to_string()))?;
        let first =
            chosen.first().and_then(|name| path_within(name)).ok_or_else(|| missing("nothing there".to_owned()))?;
        Ok(snapshot.join(first))
    }

    fn fetch(&self, info: &Info, want: &Want, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
        if !is_commit(&info.sha) {
            let why = "it names no commit".to_owned();
            return Err(HubError::Answer { what: self.id.to_string(), why });
        }
        let names: Vec<String> = info.siblings.iter().map(|file| file.rfilename.clone()).collect();
        let hostile = names.iter().filter(|name| path_within(name).is_none()).count();
        if hostile > 0 {
            witness.note(&format!("{}: {hostile} names of files lead elsewhere and are passed over", self.id));
        }
        let chosen = choose(&names, want).map_err(|source| HubError::Choice { repo: self.id.to_string(), source })?;
        let snapshot = self.cache.pointer_path(&info.sha);
        let mut first = None;
        let mut missing = Vec::new();
        for name in &chosen {
            let pointer = snapshot.join(path_within(name).unwrap_or_default());
            let sibling = info.siblings.iter().find(|file| file.rfilename == *name);
            let known = sibling.map(Known::of).unwrap_or_default();
            if !is_whole(&pointer, known.size) {
                let item = self.item(&info.sha, name, known, web, witness)?;
                missing.push((pointer.clone(), item));
            }
            first.get_or_insert(pointer);
        }
        let items: Vec<Item> =
            missing.iter().map(|(_, item)| item.clone()).filter(|item| !is_whole(&item.target, item.size)).collect();
        check_space(&self.places.hub, &items, witness)?;
        for (pointer, item) in &missing {
            let _lock = Lock::take(&item.lock, &item.name, witness)?;
            // Another process may have been here.
            if !is_whole(&item.target, item.size) {
                let fetched = transfer::fetch(web, item, witness)?;
                if !fetched.is_checked {
                    witness.note(&format!("{}: the server gave no SHA-256: only its length was checked", item.name));
                }
            }
            point(pointer, &item.target)?;
        }
        let reference = self.place().join("refs").join(BRANCH);
        self.cache.create_ref(&info.sha).map_err(failed(&reference, "write this file"))?;
        first.ok_or_else(|| HubError::Answer { what: self.id.to_string(), why: "it has no files".to_owned() })
    }

    /// How a file of a commit is fetched.
    fn item(&self, commit: &str, name: &str, known: Known, web: &Web, witness: &dyn Witness) -> Result<Item, HubError> {
        let repo = Repo::with_revision(self.id.to_string(), RepoType::Model, commit.to_owned());
        let url =
            format!("{}/{}/resolve/{}/{}", self.places.endpoint, repo.url(), repo.url_revision(), path_escaped(name));
        let what = format!("{}/{name}", self.id);
        let known = match known {
            Known { blob: Some(_), .. } => known,
            _ => asked(&url, &what, web, witness)?,
        };
        let no_etag = || HubError::Answer { what: what.clone(), why: "there is no etag to keep it by".to_owned() };
        let blob = known.blob.ok_or_else(no_etag)?;
        let target = self.cache.blob_path(&blob);
        // Names that the Hub's own client uses, so that each goes on where the other stopped.
        let lock = self.places.hub.join(".locks").join(self.repo.folder_name()).join(format!("{blob}.lock"));
        let part = self.cache.blob_path(&format!("{blob}.incomplete"));
        let sha256 = is_sha256(&blob).then_some(blob);
        Ok(Item { url, name: what, target, part, lock, size: known.size, sha256, etag: None, is_addressed: true })
    }
}

/// What a server's headers say about a file, where its listing did not.
fn asked(url: &str, what: &str, web: &Web, witness: &dyn Witness) -> Result<Known, HubError> {
    let answer = web.insist(Method::Head, url, what, &[], TRIES, witness)?;
    let etag = answer.linked.etag.as_deref().or(answer.header("etag")).and_then(blob_name);
    let length = || answer.header("content-length")?.parse().ok();
    Ok(Known { blob: etag, size: answer.linked.size.or_else(length) })
}

/// Whether a file is there with all its bytes.
fn is_whole(path: &Path, size: Option<u64>) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && size.is_none_or(|size| size == found.len()))
}

/// Lets `pointer`, in a snapshot, stand for `blob`.
fn point(pointer: &Path, blob: &Path) -> Result<(), HubError> {
    make_directory_of(pointer)?;
    let _ = fs::remove_file(pointer);
    let target = relative(blob, pointer.parent().unwrap_or(Path::new("")));
    // Where there are no links the file itself is put there, as the Hub's own client does.
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

/// Paths of the files below `directory`, with `/` between their parts.
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
    fn links_are_relative() {
        let blob = Path::new("/c/models--a--b/blobs/x");
        assert_eq!(relative(blob, Path::new("/c/models--a--b/snapshots/s")), Path::new("../../blobs/x"));
        assert_eq!(relative(blob, Path::new("/c/models--a--b/snapshots/s/Q4")), Path::new("../../../blobs/x"));
    }
}
