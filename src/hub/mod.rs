//! Models from the Hub (`-hf`) and from any server (`-mu`).
//!
//! **Pure.** [`Source`] is what was asked for; [`choice`] picks files of a repository, [`names`] says which names are safe, [`places`] reads
//! the environment.
//!
//! **With servers** (feature `hub`). `web` asks, `transfer` fetches one file whole, `repo` and `url` know where it belongs. Who
//! watches is a [`Witness`]: a person at a terminal, or a test.
//!
//! What comes from servers is not trusted: names do not lead out of the cache, answers are capped, sizes and sums are checked before
//! a file has its name, and the token goes to the endpoint alone.

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

/// A model that is somewhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Repo { id: RepoId, want: Want },
    Url(String),
}

impl Source {
    /// Of `USER/REPO[:QUANT]`; a file beats the quant.
    ///
    /// # Errors
    /// What is no repository.
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

/// Who is told how far a download is.
pub trait Witness {
    /// Something worth a line.
    fn note(&self, text: &str);
    /// A file begins, of which `have` bytes are here already; again where its size becomes known.
    fn begin(&self, name: &str, size: Option<u64>, have: u64);
    /// So many bytes are here.
    fn at(&self, bytes: u64);
    /// The file is here, or will not come.
    fn end(&self);
    /// Waits.
    fn pause(&self, time: Duration);
    /// Bytes that are free on the disk of `directory`.
    #[cfg(feature = "hub")]
    fn free_space(&self, directory: &std::path::Path) -> std::io::Result<u64> {
        fs4::available_space(directory)
    }
}

/// The file of a model that is somewhere else, of a split one the first. What is not here yet is fetched.
///
/// # Errors
/// With what can be done about it.
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
    fn what_is_asked_for() {
        let repo = |id: &str, want| Source::Repo { id: id.parse().unwrap(), want };
        assert_eq!(Source::repo("a/b", None).unwrap(), repo("a/b", Want::Usual));
        assert_eq!(Source::repo("a/b:Q8_0", None).unwrap(), repo("a/b", Want::Quant("Q8_0".into())));
        assert_eq!(Source::repo("a/b:Q8_0", Some("c.gguf")).unwrap(), repo("a/b", Want::File("c.gguf".into())));
        for bad in ["a", "a/b:", "a/b/c", "a:b/c"] {
            assert!(Source::repo(bad, None).is_err(), "{bad}");
        }
    }
}
