//! Models from the Hub (`-hf`) and from any server (`-mu`).
//!
//! Pure: [`Source`] names a model, [`names`] checks names and picks files of a repository, [`places`] reads the
//! environment, [`kept`] lists what the cache has. With the feature `hub`: `web` sends requests, `transfer` fetches one
//! file, `repo` knows where it belongs. A [`Witness`] sees progress: a terminal, a client of the server, or a test.
//!
//! Servers are not trusted: names do not lead out of the cache, answers are capped, sizes and checksums are compared
//! before a file gets its name, and the token goes to the endpoint alone.

pub mod kept;
pub mod names;
pub mod places;

#[cfg(feature = "hub")]
mod repo;
#[cfg(all(test, feature = "hub"))]
mod tests;
#[cfg(feature = "hub")]
mod transfer;
#[cfg(feature = "hub")]
mod web;

#[cfg(feature = "hub")]
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[cfg(feature = "hub")]
use hobbit_core::units::Bytes;

pub use names::{RepoId, Want};
pub use places::{Given, Places, Token, TokenArgs};

/// A model that is not a local file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Repo { id: RepoId, want: Want },
    Url(String),
}

impl Source {
    /// Reads `USER/REPO[:QUANT]`; `file` overrides the quant.
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
    /// The time now.
    fn now(&self) -> Instant {
        Instant::now()
    }
    /// Waits.
    fn pause(&self, time: Duration);
    /// Whether the download is still wanted; asked after each piece.
    fn is_wanted(&self) -> bool {
        true
    }
    /// Free bytes on the disk of `directory`.
    #[cfg(feature = "hub")]
    fn free_space(&self, directory: &std::path::Path) -> std::io::Result<u64> {
        fs4::available_space(directory)
    }
}

/// Downloads the missing files of a model; returns the first one's path.
#[cfg(feature = "hub")]
pub fn fetch(source: &Source, places: &Places, witness: &dyn Witness) -> Result<PathBuf, HubError> {
    let web = web::Web::new(places);
    match source {
        Source::Repo { id, want } => repo::fetch_repo(id, want, places, &web, witness),
        Source::Url(url) => repo::fetch_url(url, places, &web, witness),
    }
}

/// The first `n_bytes` of a repository's model, and no more of it than that.
#[cfg(feature = "hub")]
pub fn beginning(source: &Source, places: &Places, n_bytes: u64, witness: &dyn Witness) -> Result<Vec<u8>, HubError> {
    match source {
        Source::Repo { id, want } => repo::beginning(id, want, places, n_bytes, witness),
        Source::Url(url) => Err(HubError::Given(format!("'{url}' is not in a repository of the Hub"))),
    }
}

#[cfg(feature = "hub")]
/// Why a model was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("{repo}: {source}")]
    Choice { repo: String, source: names::ChoiceError },
    #[error(
        "{what}: the server answered {status}: it does not exist, or is private or gated; accept its conditions on \
         its page and give a token with --hf-token or HF_TOKEN"
    )]
    Denied { what: String, status: u16 },
    #[error("{what}: the server answered 404: there is no such thing; check the name")]
    NotFound { what: String },
    #[error(
        "{what}: the server answered {status}; try again later, or fetch the file with another program and give it \
         with -m"
    )]
    Refused { what: String, status: u16 },
    #[error(
        "{what}: {host} cannot be reached ({why}); check the network, or give --offline to use what is in the cache"
    )]
    Unreachable { what: String, host: String, why: String, wait: Option<Duration> },
    #[error(
        "{what}: no secure connection to {host} ({why}); check the address, this machine's clock, and whether a proxy \
         puts in a certificate of its own; or fetch the file with another program and give it with -m"
    )]
    Insecure { what: String, host: String, why: String },
    #[error("{what}: the server redirects {why}")]
    Redirect { what: String, why: &'static str },
    #[error("{what}: unexpected answer of the server: {why}")]
    Answer { what: String, why: String },
    #[error("{name}: broke off at {} {why}; run again to resume; the part is kept in {}", how_far(*.at, *.size),
            .part.display())]
    Dropped { name: String, at: u64, size: Option<u64>, why: String, part: PathBuf, wait: Option<Duration> },
    #[error("{name}: the server has {found} bytes, expected {expected}: it is not the file that was asked for")]
    Size { name: String, found: u64, expected: u64 },
    #[error(
        "{name}: the server does not say how long this file is, so it could be cut or endless; fetch it with another \
         program and give it with -m"
    )]
    NoLength { name: String },
    #[error(
        "{name}: its SHA-256 is {found}, expected {expected}: it was damaged on its way; the part that came was \
         removed: run again"
    )]
    Sum { name: String, found: String, expected: String },
    #[error("{name}: what the server sends is no GGUF file (it begins with {begins:?}); check the name")]
    NotGguf { name: String, begins: String },
    #[error("{}: {} are needed and {} are free ({} more stay free); make room, or set another directory with HF_HOME \
            (or LLAMA_CACHE)", .directory.display(), Bytes(*.needed), Bytes(*.free), Bytes(*.reserve))]
    Space { directory: PathBuf, needed: u64, free: u64, reserve: u64 },
    #[error("{what}: not in {} ({why}); run once without --offline", .place.display())]
    NotCached { what: String, place: PathBuf, why: String },
    #[error("{}: cannot {doing}", .path.display())]
    File { path: PathBuf, doing: &'static str, source: std::io::Error },
    #[error("{name}: stopped; asked again, the download goes on")]
    Stopped { name: String },
    #[error("{0}")]
    Given(String),
}

#[cfg(feature = "hub")]
fn how_far(at: u64, size: Option<u64>) -> String {
    match size {
        Some(size) => format!("{} of {}", Bytes(at), Bytes(size)),
        None => Bytes(at).to_string(),
    }
}

#[cfg(feature = "hub")]
impl HubError {
    /// Whether the server could not be reached, so that a cached file may serve.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Insecure { .. })
    }

    /// Whether a retry may succeed; with the delay that the server asked for, if any.
    pub fn may_pass(&self) -> Option<Option<Duration>> {
        match self {
            Self::Unreachable { wait, .. } | Self::Dropped { wait, .. } => Some(*wait),
            _ => None,
        }
    }
}

/// Adds the path to a system error.
#[cfg(feature = "hub")]
fn failed(path: &std::path::Path, doing: &'static str) -> impl FnOnce(std::io::Error) -> HubError {
    let path = path.to_owned();
    move |source| HubError::File { path, doing, source }
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
