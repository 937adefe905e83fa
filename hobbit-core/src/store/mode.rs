//! Which engine reads the experts: a decision from sizes, no measurement of its own.

use std::fmt;
use std::str::FromStr;

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// By [`Conditions`].
    #[default]
    Auto,
    /// Past the page cache.
    Direct,
    /// Through the page cache.
    Buffered,
}

impl IoMode {
    /// Every mode, as typed.
    pub const NAMES: [&'static str; 3] = ["auto", "direct", "buffered"];
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES[*self as usize])
    }
}

/// A word that names no [`IoMode`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown I/O mode {0:?}: expected auto, direct or buffered")]
pub struct UnknownIoMode(pub String);

impl FromStr for IoMode {
    type Err = UnknownIoMode;

    fn from_str(text: &str) -> Result<Self, UnknownIoMode> {
        let all = [Self::Auto, Self::Direct, Self::Buffered];
        all.into_iter().find(|mode| Self::NAMES[*mode as usize] == text).ok_or_else(|| UnknownIoMode(text.to_owned()))
    }
}

/// An engine that can be opened with [`super::open()`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// [`super::direct`].
    Direct,
    /// [`super::buffered`].
    Buffered,
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Buffered => "buffered",
        })
    }
}

/// What the decision depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// Expert bytes that will not be in our own cache, and so are read again and again.
    pub expert_bytes: u64,
    /// Memory left for the page cache under the process's limit, after all that we allocate, in bytes.
    pub page_cache_bytes_available: u64,
    /// Whether the model's files can be read with `O_DIRECT`; `Err` says why not ([`super::probe::direct`]).
    pub direct: Result<(), String>,
    /// Whether the kernel lets us make a ring; `Err` says why not ([`super::probe::io_uring`]).
    pub io_uring: Result<(), String>,
}

/// The engine, and the sentence that tells the user why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Which engine.
    pub kind: StoreKind,
    /// Why, for people.
    pub reason: String,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind, self.reason)
    }
}

/// Picks the engine. A mode that was asked for is followed where it can be; `Auto` reads through the page cache where
/// that would come to hold every expert we do not, and past it where the pages would be gone before their next use.
pub fn choose(mode: IoMode, conditions: &Conditions) -> Choice {
    let refused = conditions.io_uring.as_ref().err().or(conditions.direct.as_ref().err());
    let experts = Size(conditions.expert_bytes);
    let room = Size(conditions.page_cache_bytes_available);
    let (kind, reason) = match (mode, refused) {
        (IoMode::Buffered, _) => (StoreKind::Buffered, "as asked for".to_owned()),
        (IoMode::Direct, None) => (StoreKind::Direct, "as asked for".to_owned()),
        (IoMode::Direct, Some(why)) => (StoreKind::Buffered, format!("direct reads were asked for, but {why}")),
        (IoMode::Auto, _) if experts.0 <= room.0 => (
            StoreKind::Buffered,
            format!("the page cache can hold the {experts} of experts outside the cache: {room} available"),
        ),
        (IoMode::Auto, None) => (
            StoreKind::Direct,
            format!("{experts} of experts outside the cache exceed the {room} available to the page cache"),
        ),
        (IoMode::Auto, Some(why)) => (
            StoreKind::Buffered,
            format!("{experts} of experts exceed the {room} available to the page cache, but no direct reads: {why}"),
        ),
    };
    Choice { kind, reason }
}

/// Bytes for people.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.0 as f64 / (1 << 20) as f64;
        if mib >= 1024.0 { write!(f, "{:.1} GiB", mib / 1024.0) } else { write!(f, "{mib:.0} MiB") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_conditions_decide_unless_the_user_does() {
        use IoMode::{Auto, Buffered, Direct};
        const GIB: u64 = 1 << 30;
        let yes = || Ok(());
        let seccomp = || Err("io_uring is forbidden here".to_owned());
        let tmpfs = || Err("the file system of /m.gguf refuses O_DIRECT".to_owned());
        for (mode, experts, room, direct, ring, kind, reason) in [
            (Auto, 5 * GIB, GIB, yes(), yes(), StoreKind::Direct, "5.0 GiB of experts outside the cache exceed"),
            (Auto, GIB, 5 * GIB, yes(), yes(), StoreKind::Buffered, "can hold the 1.0 GiB"),
            (Auto, GIB, GIB, yes(), yes(), StoreKind::Buffered, "can hold"),
            (Auto, GIB + 1, GIB, yes(), yes(), StoreKind::Direct, "exceed"),
            (Auto, 0, 0, yes(), yes(), StoreKind::Buffered, "can hold the 0 MiB"),
            (Auto, 5 * GIB, GIB, yes(), seccomp(), StoreKind::Buffered, "io_uring is forbidden here"),
            (Auto, 5 * GIB, GIB, tmpfs(), yes(), StoreKind::Buffered, "/m.gguf refuses O_DIRECT"),
            (Direct, GIB, 5 * GIB, yes(), yes(), StoreKind::Direct, "as asked for"),
            (Direct, 5 * GIB, GIB, tmpfs(), yes(), StoreKind::Buffered, "asked for, but the file system"),
            (Direct, 5 * GIB, GIB, yes(), seccomp(), StoreKind::Buffered, "asked for, but io_uring"),
            (Buffered, 5 * GIB, 0, yes(), yes(), StoreKind::Buffered, "as asked for"),
            (Buffered, 5 * GIB, 0, tmpfs(), seccomp(), StoreKind::Buffered, "as asked for"),
        ] {
            let conditions =
                Conditions { expert_bytes: experts, page_cache_bytes_available: room, direct, io_uring: ring };
            let choice = choose(mode, &conditions);
            assert_eq!(choice.kind, kind, "{mode} {conditions:?}");
            assert!(choice.reason.contains(reason), "{mode} {conditions:?}: {choice}");
        }
    }

    #[test]
    fn modes_read_back_as_written() {
        for mode in [IoMode::Auto, IoMode::Direct, IoMode::Buffered] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert_eq!("mmap".parse::<IoMode>(), Err(UnknownIoMode("mmap".into())));
    }
}
