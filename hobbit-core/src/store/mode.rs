//! Which engine reads the experts: a decision from sizes, without measurements.

use std::fmt;

use crate::named::named;
use crate::units::ShortBytes;

/// The user's choice.
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

named!(IoMode, "I/O mode": Auto = "auto", Direct = "direct", Buffered = "buffered");

/// An engine that can be opened with [`super::open()`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// Past the page cache ([`super::direct`]).
    Direct,
    /// Through the page cache.
    Buffered,
}

named!(StoreKind, "engine": Direct = "direct", Buffered = "buffered");

/// Facts that decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// Expert bytes outside of our own cache, which are read again and again.
    pub expert_bytes: u64,
    /// Memory left for the page cache under the process's limit, after all that we allocate, in bytes.
    pub page_cache_bytes_available: u64,
    /// Whether the model's files can be read with `O_DIRECT`, else the reason ([`super::probe::direct`]).
    pub direct: Result<(), String>,
    /// Whether the kernel lets us make a ring, else the reason ([`super::probe::io_uring`]).
    pub io_uring: Result<(), String>,
}

impl Conditions {
    /// Whether the page cache has room for all experts outside of our own cache.
    pub fn fit_page_cache(&self) -> bool {
        self.expert_bytes <= self.page_cache_bytes_available
    }
}

/// The engine, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub kind: StoreKind,
    pub reason: String,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind, self.reason)
    }
}

/// Picks the engine. A mode that the user chose is followed if possible. `Auto` reads through the page cache if that
/// can hold all experts outside of our cache, and past it if pages would be evicted before their next use.
pub fn choose(mode: IoMode, conditions: &Conditions) -> Choice {
    let refused = conditions.io_uring.as_ref().err().or(conditions.direct.as_ref().err());
    let experts = ShortBytes(conditions.expert_bytes);
    let room = ShortBytes(conditions.page_cache_bytes_available);
    let (kind, reason) = match (mode, refused) {
        (IoMode::Buffered, _) => (StoreKind::Buffered, "as asked for".to_owned()),
        (IoMode::Direct, None) => (StoreKind::Direct, "as asked for".to_owned()),
        (IoMode::Direct, Some(why)) => (StoreKind::Buffered, format!("direct reads were asked for, but {why}")),
        (IoMode::Auto, _) if conditions.fit_page_cache() => (
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
            (Auto, 5 * GIB, GIB, yes(), yes(), StoreKind::Direct, "5.00 GiB of experts outside the cache exceed"),
            (Auto, GIB, 5 * GIB, yes(), yes(), StoreKind::Buffered, "can hold the 1.00 GiB"),
            (Auto, GIB, GIB, yes(), yes(), StoreKind::Buffered, "can hold"),
            (Auto, GIB + 1, GIB, yes(), yes(), StoreKind::Direct, "exceed"),
            (Auto, 0, 0, yes(), yes(), StoreKind::Buffered, "can hold the 0 B"),
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
}
