//! `gguf-tools verify`: checks that a file is complete and that its numbers are finite.
//!
//! Opening checks structure and extents, and gguf-rs reads the header a second time; then llama.cpp's own check reads
//! every block of every tensor, as `--check-tensors` does. Every byte of an expert pack must have its checksum.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, anyhow, ensure};
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{self, Pack, PackKind};
use hobbit_core::units::Bytes;
use serde::Serialize;

use crate::second_reader;
use crate::shared::{Bar, JsonArgs};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model; of a split model, any shard
    file: PathBuf,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    ok: bool,
    files: Vec<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pack: Option<PackKind>,
    tensors: usize,
    /// Records of a pack.
    #[serde(skip_serializing_if = "Option::is_none")]
    versions: Option<usize>,
    bytes: u64,
    /// Layers with experts of a plain model.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_layers: Option<usize>,
    notes: Vec<String>,
    faults: Vec<pack::Fault>,
    error: Option<String>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = Gguf::open(&args.file).map_err(anyhow::Error::from);
    let report = gguf.and_then(|gguf| {
        if Pack::is_pack(&gguf) { Report::of_pack(&Pack::open(&args.file)?) } else { Report::of_plain(&gguf) }
    });
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            if args.json.json {
                let error = Some(format!("{error:#}"));
                args.json.print(&Report { error, expert_layers: Some(0), ..Report::default() })?;
            }
            return Err(error);
        }
    };
    args.json.print(&report)?;
    let (n, all) = (report.faults.len(), report.tensors + report.versions.unwrap_or(0));
    ensure!(
        report.ok,
        "{}: {n} faults in {all} tensors and records; pack the model again, or fetch the pack again",
        args.file.display()
    );
    Ok(())
}

impl Report {
    fn of_plain(gguf: &Gguf) -> anyhow::Result<Self> {
        let expert_layers = Some(gguf.experts()?.layers.len());
        let not_read_twice = second_reader::compare(gguf)?.map(|why| format!("gguf-rs did not read the header: {why}"));
        let bytes = gguf.tensor_bytes();
        let mut bar = Bar::new()?;
        let mut progress = |part| bar.show("verifying", (f64::from(part) * bytes as f64) as u64, bytes).is_continue();
        let checked = hobbit::engine::check_weights(gguf, &mut progress);
        drop(bar);
        checked.map_err(|error| anyhow!("{error}; fetch or quantise the model again"))?;
        let is_refused = gguf.files.len() == 1 && !gguf.is_contiguous;
        let note = "tensors do not follow each other; llama.cpp itself refuses this file".to_owned();
        Ok(Self {
            ok: true,
            files: gguf.files.iter().map(|f| f.path.clone()).collect(),
            tensors: gguf.tensors.len(),
            bytes,
            expert_layers,
            notes: is_refused.then_some(note).into_iter().chain(not_read_twice).collect(),
            ..Self::default()
        })
    }

    fn of_pack(pack: &Pack) -> anyhow::Result<Self> {
        let mut bar = Bar::new()?;
        let verified = pack::verify(pack, &mut |done, total| bar.show("verifying", done, total))?;
        drop(bar);
        let stopped = || format!("{}: stopped before everything was read", pack.path.display());
        let pack::Verified { tensors, versions, bytes, faults } = verified.with_context(stopped)?;
        Ok(Self {
            ok: faults.is_empty(),
            files: vec![pack.path.clone()],
            pack: Some(pack.kind),
            tensors,
            versions: Some(versions),
            bytes,
            faults,
            ..Self::default()
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))?;
        self.faults.iter().try_for_each(|fault| writeln!(f, "{}: {fault}", self.files[0].display()))?;
        let (tensors, size, layers) = (self.tensors, Bytes(self.bytes), self.expert_layers.unwrap_or(0));
        match (self.ok, self.pack) {
            (false, _) => Ok(()),
            (true, Some(kind)) => {
                let versions = self.versions.unwrap_or(0);
                writeln!(f, "ok: {} pack, {tensors} tensors, {versions} records, {size}", kind.name())
            }
            (true, None) => {
                let n_files = self.files.len();
                writeln!(f, "ok: {n_files} file(s), {tensors} tensors, {size}, {layers} layers with experts")
            }
        }
    }
}
