//! Models of any server, by their URL. Each directory of a server has one in the cache, with all parts of a split model.

use std::path::PathBuf;

use xxhash_rust::xxh3::xxh3_64;

use super::Witness;
use super::choice::parts;
use super::error::HubError;
use super::names::file_of_url;
use super::places::Places;
use super::transfer::{self, Item, Lock, etag_of};
use super::web::{Announced, TRIES, Web};

/// Downloads the missing files of the model at `url`; returns the first one's path.
///
/// # Errors
/// As [`transfer::fetch`]; a URL that names no file.
pub fn fetch(url: &str, places: &Places, web: &Web, witness: &dyn Witness) -> Result<PathBuf, HubError> {
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
    Ok(parts(name).into_iter().map(item).collect())
}

/// Downloads a file if it is missing, or if the server has another version by now.
fn update(item: &Item, web: &Web, witness: &dyn Witness) -> Result<(), HubError> {
    let (is_here, etag) = (item.target.is_file(), etag_of(&item.target));
    if is_here && etag.is_none() {
        return Ok(()); // a change could not be seen
    }
    let Announced { etag: said, sha256, size } =
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
    if is_here && (said.is_none() || said == etag) {
        return Ok(());
    }
    let size = size.filter(|_| sha256.is_some()); // others are asked with GET
    transfer::fetch(web, &Item { sha256, size, etag: said, ..item.clone() }, witness)
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
