//! `gguf-tools verify` of an expert pack: layout, index, and every byte against its checksum.

use std::path::PathBuf;

use hobbit_core::pack::{self, Fault, Pack, PackKind};
use hobbit_core::units::Bytes;
use serde::Serialize;

use crate::bar::Bar;

/// The findings, as `--json` prints them.
#[derive(Debug, Serialize)]
pub struct Report {
    ok: bool,
    files: Vec<PathBuf>,
    pack: PackKind,
    tensors: usize,
    versions: usize,
    bytes: u64,
    faults: Vec<Fault>,
    error: Option<String>,
}

impl Report {
    /// Reads the whole pack.
    ///
    /// # Errors
    /// The pack cannot be opened, or Ctrl-C.
    pub fn of(pack: &Pack) -> anyhow::Result<Self> {
        let mut bar = Bar::new()?;
        let verified = pack::verify(pack, &mut |done, total| bar.show("verifying", done, total))?;
        drop(bar);
        let Some(pack::Verified { tensors, versions, bytes, faults }) = verified else {
            anyhow::bail!("{}: stopped before everything was read", pack.path.display());
        };
        let (ok, files) = (faults.is_empty(), vec![pack.path.clone()]);
        Ok(Self { ok, files, pack: pack.kind, tensors, versions, bytes, faults, error: None })
    }

    /// As text.
    pub fn lines(&self) -> String {
        let file = self.files.first().map(|path| path.display().to_string()).unwrap_or_default();
        let mut text: String = self.faults.iter().map(|fault| format!("{file}: {fault}\n")).collect();
        if self.ok {
            let (kind, size) = (self.pack.name(), Bytes(self.bytes));
            text += &format!("ok: {kind} pack, {} tensors, {} records, {size}\n", self.tensors, self.versions);
        }
        text
    }

    /// Whether all is well.
    ///
    /// # Errors
    /// Something is damaged.
    pub fn outcome(&self) -> anyhow::Result<()> {
        let file = self.files.first().map(|path| path.display().to_string()).unwrap_or_default();
        let (n, all) = (self.faults.len(), self.tensors + self.versions);
        anyhow::ensure!(
            self.ok,
            "{file}: {n} faults in {all} tensors and records; pack the model again, or fetch the pack again"
        );
        Ok(())
    }
}
