//! Errors of downloads, with what to do about them.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::choice::ChoiceError;
use hobbit_core::units::Bytes;

/// Why a model was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("{repo}: {source}")]
    Choice { repo: String, source: ChoiceError },
    #[error(
        "{what}: the server says {status}: it does not exist, or is private or gated; accept its conditions on its page and give \
         a token with --hf-token or HF_TOKEN"
    )]
    Denied { what: String, status: u16 },
    #[error("{what}: the server says 404: there is no such thing; check the name")]
    NotFound { what: String },
    #[error("{what}: the server says {status}, and nothing can be made of that")]
    Refused { what: String, status: u16 },
    #[error(
        "{what}: {host} cannot be reached ({why}); check the network, or give --offline to use what is in the cache"
    )]
    Unreachable { what: String, host: String, why: String, wait: Option<Duration> },
    #[error(
        "{what}: no secure connection to {host} ({why}); check the address, this machine's clock, and whether a proxy puts \
         in a certificate of its own; or fetch the file with another program and give it with -m"
    )]
    Insecure { what: String, host: String, why: String },
    #[error("{what}: the server redirects {why}")]
    Redirect { what: String, why: &'static str },
    #[error("{what}: the server's answer is not understood: {why}")]
    Answer { what: String, why: String },
    #[error("{name}: broke off at {} {why}; what came is kept in {}: run again to go on", how_far(*.at, *.size), .part.display())]
    Dropped { name: String, at: u64, size: Option<u64>, why: String, part: PathBuf, wait: Option<Duration> },
    #[error("{name}: the server has {said} bytes, expected {expected}: it is not the file that was asked for")]
    Size { name: String, said: u64, expected: u64 },
    #[error(
        "{name}: the server does not say how long this file is, so it could be cut or endless; fetch it with another program \
         and give it with -m"
    )]
    NoLength { name: String },
    #[error(
        "{name}: its SHA-256 is {found}, expected {expected}: it was damaged on its way; the part that came was removed: run \
         again"
    )]
    Sum { name: String, found: String, expected: String },
    #[error("{name}: what the server sends is no GGUF file (it begins with {begins:?}); check the name")]
    NotGguf { name: String, begins: String },
    #[error("{}: {} are needed and {} are free ({} more stay free); make room, or keep models elsewhere with HF_HOME (or \
            LLAMA_CACHE)", .directory.display(), Bytes(*.needed), Bytes(*.free), Bytes(*.reserve))]
    Space { directory: PathBuf, needed: u64, free: u64, reserve: u64 },
    #[error("{what}: not in {} ({why}); run once without --offline", .place.display())]
    NotCached { what: String, place: PathBuf, why: String },
    #[error("{}: cannot {doing}", .path.display())]
    File { path: PathBuf, doing: &'static str, source: io::Error },
    #[error("{0}")]
    Given(String),
}

fn how_far(at: u64, size: Option<u64>) -> String {
    match size {
        Some(size) => format!("{} of {}", Bytes(at), Bytes(size)),
        None => Bytes(at).to_string(),
    }
}

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
pub fn failed(path: &std::path::Path, doing: &'static str) -> impl FnOnce(io::Error) -> HubError {
    let path = path.to_owned();
    move |source| HubError::File { path, doing, source }
}
