//! Models from the Hub (`-hf`) and from any server (`-mu`).
//!
//! Pure: [`Source`] names a model, [`choice`] picks files of a repository, [`names`] checks names, [`places`] reads the
//! environment. With the feature `hub`: `web` sends requests, `transfer` fetches one file, `repo` and `url` know where it
//! belongs. A [`Witness`] sees progress: a terminal, or a test.
//!
//! Servers are not trusted: names do not lead out of the cache, answers are capped, sizes and checksums are compared before
//! a file gets its name, and the token goes to the endpoint alone.

pub mod choice;
pub mod names;
pub mod places;

#[cfg(feature = "hub")]
mod error;
#[cfg(feature = "hub")]
mod repo;
#[cfg(all(test, feature = "hub"))]
mod tests;
#[cfg(feature = "hub")]
mod transfer;
#[cfg(feature = "hub")]
mod url;
#[cfg(feature = "hub")]
mod web;

use std::time::Duration;

pub use choice::Want;
#[cfg(feature = "hub")]
pub use error::HubError;
pub use names::RepoId;
pub use places::{Given, Places, Token};

/// A model that is not a local file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Repo { id: RepoId, want: Want },
    Url(String),
}

impl Source {
    /// Reads `USER/REPO[:QUANT]`; `file` overrides the quant.
    ///
    /// # Errors
    /// The text names no repository.
    pub fn repo(text: &str, file: Option<&str>) -> Result<Self, String> {
        let (id, quant) = text.split_once(':').map_or((text, None), |(id, quant)| (id, Some(quant)));
        let want = match (file, quant) {
            (Some(file), _) => Want::File(file.to_owned()),
            (None, Some("")) => return Err(format!("'{text}': a quant is expected after ':'")),
            (None, Some(quant)) => Want::Quant(quant.to_owned()),
            (None, None) => Want::Usual,
        };
        Ok(Self::Repo { id: id.parse()?, want })
    }
}

/// Sees the progress of a download.
pub trait Witness {
    /// Shows a line.
    fn note(&self, text: &str);
    /// A file begins, of which `have` bytes are here; called again when its size becomes known.
    fn begin(&self, name: &str, size: Option<u64>, have: u64);
    /// `bytes` of the file are here.
    fn at(&self, bytes: u64);
    /// The download of this file succeeded or failed.
    fn end(&self);
    /// Waits.
    fn pause(&self, time: Duration);
    /// Free bytes on the disk of `directory`.
    #[cfg(feature = "hub")]
    fn free_space(&self, directory: &std::path::Path) -> std::io::Result<u64> {
        fs4::available_space(directory)
    }
}

/// Downloads the missing files of a model; returns the first one's path.
///
/// # Errors
/// The download failed; the message says what to do.
#[cfg(feature = "hub")]
pub fn fetch(source: &Source, places: &Places, witness: &dyn Witness) -> Result<std::path::PathBuf, HubError> {
    let web = web::Web::new(places);
    match source {
        Source::Repo { id, want } => repo::fetch(id, want, places, &web, witness),
        Source::Url(url) => url::fetch(url, places, &web, witness),
    }
}

#[cfg(test)]
mod source_tests {
    use super::*;

    #[test]
    fn sources() {
        let repo = |id: &str, want| Source::Repo { id: id.parse().unwrap(), want };
        assert_eq!(Source::repo("a/b", None).unwrap(), repo("a/b", Want::Usual));
        assert_eq!(Source::repo("a/b:Q8_0", None).unwrap(), repo("a/b", Want::Quant("Q8_0".into())));
        assert_eq!(Source::repo("a/b:Q8_0", Some("c.gguf")).unwrap(), repo("a/b", Want::File("c.gguf".into())));
        for bad in ["a", "a/b:", "a/b/c", "a:b/c"] {
            assert!(Source::repo(bad, None).is_err(), "{bad}");
        }
    }
}
