//! Models of any server, by their URL. Each URL has a directory of its own, in which the parts of a split model are neighbours.

use std::path::PathBuf;

use xxhash_rust::xxh3::xxh3_64;

use super::Witness;
use super::choice::parts;
use super::error::{HubError, failed};
use super::names::{blob_name, file_of_url, is_sha256};
use super::places::Places;
use super::transfer::{self, Fetched, Item, Lock, etag_of, etag_path};
use super::web::{Method, TRIES, Web};

/// The first file of the model at `url`, all of whose files are here then.
///
/// # Errors
/// As [`transfer::fetch`]; a URL that names no file.
pub fn fetch(url: &str, places: &Places, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
    let items = items(url, places)?;
    for item in &items {
        if places.offline {
            if !item.target.is_file() {
                let place = item.target.clone();
                return Err(HubError::NotCached {
                    what: item.name.clone(),
                    place,
                    why: "it was not fetched".to_owned(),
                });
            }
            continue;
        }
        let _lock = Lock::take(&item.lock, &item.name, witness)?;
        one(item, web, witness)?;
    }
    Ok(items[0].target.clone())
}

/// What is fetched for a URL, the first part first.
fn items(url: &str, places: &Places) -> Result<Vec<Item>, HubError> {
    let no_file =
        || HubError::Given(format!("--model-url: '{url}' names no file, expected one such as https://host/model.gguf"));
    let name = file_of_url(url).ok_or_else(no_file)?;
    let (path, query) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
    let query = query.split('#').next().unwrap_or_default();
    let directory = &path[..path.len() - name.len()];
    let host = directory.split("://").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    // Who it is for may stand before the host; it is no name for a directory.
    let host: String =
        host.rsplit('@').next().unwrap_or_default().chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    let hash = xxh3_64(format!("{directory}{query}").as_bytes());
    let place = places.urls.join("url").join(format!("{}-{hash:016x}", host.trim_start_matches('.')));
    let item = |name: String| Item {
        url: format!("{directory}{name}{query}"),
        target: place.join(&name),
        part: place.join(format!("{name}.incomplete")),
        lock: place.join(format!("{name}.lock")),
        name,
        size: None,
        sha256: None,
        etag: None,
        is_addressed: false,
    };
    Ok(parts(name).into_iter().map(item).collect())
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '.' || c == '-'
}

/// Fetches a file if it is not here, or is another one there by now.
fn one(item: &Item, web: &Web, witness: &dyn Witness) -> Result<(), HubError> {
    let (is_here, etag) = (item.target.is_file(), etag_of(&item.target));
    if is_here && etag.is_none() {
        return Ok(()); // nothing to tell a change by
    }
    let asked = web.insist(Method::Head, &item.url, &item.name, &[], if is_here { 1 } else { TRIES }, witness);
    let answer = match asked {
        Ok(answer) => Some(answer),
        Err(error) if is_here => {
            witness.note(&format!("{error}; taking what is in the cache"));
            return Ok(());
        }
        // Servers that do not answer such questions may have the file.
        Err(HubError::Refused { .. } | HubError::Denied { .. } | HubError::NotFound { .. }) => None,
        Err(error) => return Err(error),
    };
    let said = answer.as_ref().and_then(|answer| answer.linked.etag.as_deref().or(answer.header("etag")));
    let said = said.map(str::to_owned);
    if is_here && (said.is_none() || said == etag) {
        return Ok(());
    }
    let linked = answer.map(|answer| answer.linked).unwrap_or_default();
    let sha256 = linked.etag.as_deref().and_then(blob_name).filter(|name| is_sha256(name));
    let fetched = transfer::fetch(web, &Item { sha256, size: linked.size, etag: said, ..item.clone() }, witness)?;
    let Fetched { etag, is_checked } = fetched;
    if !is_checked {
        witness.note(&format!("{}: the server gave no SHA-256: only its length was checked", item.name));
    }
    let path = etag_path(&item.target);
    match etag {
        Some(etag) => hobbit::files::replace(&path, etag.as_bytes()).map_err(failed(&path, "write this file")),
        None => {
            let _ = std::fs::remove_file(&path);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::places::HUB;

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
    fn what_names_no_file_is_refused() {
        for bad in ["m.gguf", "http://h/", "http://h/..", "http://h/a\\b", "http://../../m"] {
            let found = targets(bad);
            assert!(found.is_err() || found.unwrap()[0].1.starts_with("/u/url/"), "{bad}");
        }
    }
}
