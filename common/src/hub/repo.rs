//! Where models belong. Those of the Hub have the layout of its own cache: `blobs` by content, `snapshots` of commits
//! that link to them, `refs` that name commits. Files that other clients of the Hub fetched are found, and the other
//! way round. Models of other servers are kept by URL: each directory of a server has one in the cache, with all parts
//! of a split model.

use std::fs;
use std::io::Read as _;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use super::kept::{BRANCH, files_in, snapshot};
use super::names::{RepoId, Want, blob_name, choose, file_of_url, is_commit, is_sha256, parts_of, path_within};
use super::places::Places;
use super::transfer::{self, Item, Lock, check_space, etag_of, make_directory_of};
use super::web::{Announced, TRIES, Web};
use super::{HubError, Witness, failed};

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

/// Downloads the missing files of a model of the Hub; returns the first one's path.
pub fn fetch_repo(
    id: &RepoId,
    want: &Want,
    places: &Places,
    web: &Web,
    witness: &dyn Witness,
) -> Result<PathBuf, HubError> {
    let repo = Repo { id, places, folder: format!("models--{}", id.as_str().replace('/', "--")) };
    let kept = repo.kept(want);
    if places.offline {
        return kept;
    }
    // With the model in the cache there is no need to wait for a server that is away.
    let tries = if kept.is_ok() { 1 } else { TRIES };
    match (repo.info(web, tries, witness), kept) {
        (Err(error), Ok(path)) if error.is_unreachable() => {
            witness.note(&format!("{error}; taking what is in the cache"));
            Ok(path)
        }
        (info, _) => repo.fetch(&info?, want, web, witness),
    }
}

/// The first `n_bytes` of the model's first file.
pub fn beginning(
    id: &RepoId,
    want: &Want,
    places: &Places,
    n_bytes: u64,
    witness: &dyn Witness,
) -> Result<Vec<u8>, HubError> {
    let (web, repo) = (Web::new(places), Repo { id, places, folder: String::new() });
    let info = repo.info(&web, TRIES, witness)?;
    let chosen = repo.choose(&info, want)?;
    let (what, range) = (format!("{id}/{}", chosen[0]), format!("bytes=0-{}", n_bytes.saturating_sub(1)));
    let mut answer = web.get(&repo.url(&info.sha, &chosen[0]), &what, &[("range", &range)])?;
    let mut bytes = Vec::new();
    let read = answer.body_mut().as_reader().take(n_bytes).read_to_end(&mut bytes);
    read.map_err(|error| HubError::Answer { what, why: error.to_string() })?;
    Ok(bytes)
}

impl Repo<'_> {
    fn info(&self, web: &Web, tries: u32, witness: &dyn Witness) -> Result<Info, HubError> {
        let url = format!("{}/api/models/{}/revision/{BRANCH}?blobs=true", self.places.endpoint, self.id);
        let info: Info = web.json(&url, self.id.as_str(), tries, witness)?;
        if !is_commit(&info.sha) {
            return Err(HubError::Answer { what: self.id.to_string(), why: "it names no commit".to_owned() });
        }
        Ok(info)
    }

    fn choose(&self, info: &Info, want: &Want) -> Result<Vec<String>, HubError> {
        let names: Vec<String> = info.siblings.iter().map(|file| file.rfilename.clone()).collect();
        choose(&names, want).map_err(|source| HubError::Choice { repo: self.id.to_string(), source })
    }

    fn url(&self, commit: &str, name: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.places.endpoint, self.id, path_escaped(name))
    }

    fn path(&self, parts: &[&str]) -> PathBuf {
        [self.places.hub.as_path(), Path::new(&self.folder)].into_iter().chain(parts.iter().map(Path::new)).collect()
    }

    /// The first file of a model that is in the cache.
    fn kept(&self, want: &Want) -> Result<PathBuf, HubError> {
        let missing = |why: String| HubError::NotCached { what: self.id.to_string(), place: self.path(&[]), why };
        let snapshot = snapshot(&self.path(&[])).ok_or_else(|| missing("nothing was fetched yet".to_owned()))?;
        let chosen = choose(&files_in(&snapshot), want).map_err(|error| missing(error.to_string()))?;
        Ok(snapshot.join(&chosen[0]))
    }

    fn fetch(&self, info: &Info, want: &Want, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
        let hostile = info.siblings.iter().filter(|file| path_within(&file.rfilename).is_none()).count();
        if hostile > 0 {
            witness.note(&format!("{}: {hostile} names of files lead out of the repository and are ignored", self.id));
        }
        let chosen = self.choose(info, want)?;
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
        let url = self.url(commit, name);
        let what = format!("{}/{name}", self.id);
        let (blob, size) = match blob {
            Some(blob) => (blob, size),
            None => {
                let announced = web.head(&url, &what, TRIES, witness)?;
                let blob = announced.sha256.or_else(|| blob_name(&announced.etag?));
                let why = || "there is no etag to keep it by".to_owned();
                (blob.ok_or_else(|| HubError::Answer { what: what.clone(), why: why() })?, announced.size)
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
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(target, pointer);
    #[cfg(windows)]
    let linked = std::os::windows::fs::symlink_file(target, pointer);
    // A file system without links gets the file itself, as with the Hub's own client. Windows asks for a privilege, and
    // Wine says that it made a link which is not there.
    linked
        .and_then(|()| fs::metadata(pointer).map(drop))
        .or_else(|_| fs::rename(blob, pointer))
        .map_err(failed(pointer, "make this link"))
}

/// `path` as seen from `directory`.
fn relative(path: &Path, directory: &Path) -> PathBuf {
    let shared = path.components().zip(directory.components()).take_while(|(a, b)| a == b).count();
    let up = directory.components().skip(shared).map(|_| Component::ParentDir);
    up.chain(path.components().skip(shared)).collect()
}

/// Downloads the missing files of the model at `url`; returns the first one's path.
pub fn fetch_url(url: &str, places: &Places, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
    let items = items(url, places)?;
    for item in &items {
        if !places.offline {
            let _lock = Lock::take(item, witness)?;
            update(item, web, witness)?;
        } else if !item.target.is_file() {
            let (what, place) = (item.name.clone(), item.target.clone());
            return Err(HubError::NotCached { what, place, why: "it was not fetched".to_owned() });
        }
    }
    Ok(items[0].target.clone())
}

/// The files of the model at a URL, the first part first.
fn items(url: &str, places: &Places) -> Result<Vec<Item>, HubError> {
    let no_file =
        || HubError::Given(format!("--model-url: '{url}' names no file, expected one such as https://host/model.gguf"));
    let name = file_of_url(url).ok_or_else(no_file)?;
    let (path, query) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
    let query = query.split('#').next().unwrap_or_default();
    let directory = &path[..path.len() - name.len()];
    let host = directory.split("://").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    let host = host.rsplit('@').next().unwrap_or_default(); // without a user's name and password
    let host = host.replace(|c: char| !(c.is_ascii_alphanumeric() || c == '.' || c == '-'), "_");
    let hash = xxh3_64(format!("{directory}{query}").as_bytes());
    let place = places.urls.join("url").join(format!("{}-{hash:016x}", host.trim_start_matches('.')));
    let item = |name: String| Item {
        url: format!("{directory}{name}{query}"),
        target: place.join(&name),
        lock: place.join(format!("{name}.lock")),
        name,
        ..Item::default()
    };
    Ok(parts_of(name).into_iter().map(item).collect())
}

/// Downloads a file if it is missing, or if the server has another version by now.
fn update(item: &Item, web: &Web, witness: &dyn Witness) -> Result<(), HubError> {
    let (is_here, etag) = (item.target.is_file(), etag_of(&item.target));
    if is_here && etag.is_none() {
        return Ok(()); // a change could not be seen
    }
    let Announced { etag: current, sha256, size } =
        match web.head(&item.url, &item.name, if is_here { 1 } else { TRIES }, witness) {
            Ok(announced) => announced,
            Err(error) if is_here => {
                witness.note(&format!("{error}; taking what is in the cache"));
                return Ok(());
            }
            // Some servers do not answer HEAD, and have the file.
            Err(HubError::Refused { .. } | HubError::Denied { .. } | HubError::NotFound { .. }) => Announced::default(),
            Err(error) => return Err(error),
        };
    if is_here && (current.is_none() || current == etag) {
        return Ok(());
    }
    let size = size.filter(|_| sha256.is_some()); // others are asked with GET
    transfer::fetch(web, &Item { sha256, size, etag: current, ..item.clone() }, witness)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::places::HUB;

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

    fn targets(url: &str) -> Result<Vec<(String, String)>, String> {
        let places = Places { endpoint: HUB.into(), hub: "/h".into(), urls: "/u".into(), token: None, offline: false };
        let items = items(url, &places).map_err(|error| error.to_string())?;
        Ok(items.into_iter().map(|item| (item.url, item.target.display().to_string())).collect())
    }

    #[test]
    fn each_directory_of_a_server_has_one_here() {
        let one = &targets("https://user:secret@h:80/a/m.gguf?x=1#f").unwrap()[0];
        assert_eq!(one.0, "https://user:secret@h:80/a/m.gguf?x=1");
        assert!(
            one.1.starts_with("/u/url/h_80-") && one.1.ends_with("/m.gguf") && !one.1.contains("secret"),
            "{}",
            one.1
        );
        assert_ne!(one.1, targets("https://user:secret@h:80/b/m.gguf?x=1").unwrap()[0].1);
        assert_ne!(one.1, targets("https://user:secret@h:80/a/m.gguf?x=2").unwrap()[0].1);
    }

    #[test]
    fn parts_are_neighbours() {
        let both = targets("http://h/m-00002-of-00002.gguf?t=1").unwrap();
        assert_eq!(both[0].0, "http://h/m-00001-of-00002.gguf?t=1");
        assert_eq!(both[1].0, "http://h/m-00002-of-00002.gguf?t=1");
        assert_eq!(both[0].1.rsplit_once('/').unwrap().0, both[1].1.rsplit_once('/').unwrap().0);
    }

    #[test]
    fn urls_without_a_file_are_refused() {
        for bad in ["m.gguf", "http://h/", "http://h/..", "http://h/a\\b", "http://../../m"] {
            let found = targets(bad);
            assert!(found.is_err() || found.unwrap()[0].1.starts_with("/u/url/"), "{bad}");
        }
    }
}
