//! Systems without control groups: no process of a run can be limited.

use std::path::Path;

use anyhow::{Result, bail};

use super::answer::Usage;

/// A group that cannot be made.
pub(super) enum Cgroup {}

impl Cgroup {
    pub(super) fn new(_: u64) -> Result<Self> {
        bail!("this needs Linux's control groups; give the memory with --budget instead")
    }

    pub(super) fn usage(&self) -> Usage {
        match *self {}
    }
}

/// Nothing: no group is made of it.
pub(super) fn drop_file(_: &Path) -> Result<()> {
    Ok(())
}
