//! `gguf-tools inspect`: a model's contents, and what its experts take.

pub mod forecast;
mod pack;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args as _, FromArgMatches as _};
use hobbit_core::gguf::{ExpertMap, Gguf, LayerExperts};
use hobbit_core::pack::{Pack, slice_name};
use hobbit_core::units::{Bytes, Percent};
use serde::Serialize;

use crate::shared::JsonArgs;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Model; of a split model, any shard
    #[arg(required_unless_present = "shape")]
    file: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
    #[command(flatten)]
    forecast: forecast::Args,
}

const EXAMPLES: &str = "\
Examples:
  gguf-tools inspect model.gguf
      Print its parts, and the bytes of its experts.
  gguf-tools inspect model.gguf --forecast
      Predict its speed on this machine.
  head -c 40M download.gguf > part.gguf
  gguf-tools inspect part.gguf --forecast --ram 32GiB --disk 5GB/s --cpu 60GB/s
      Predict from the first megabytes, for another machine.
  gguf-tools inspect --forecast --shape deepseek-v3 --ram 64GiB --gpu 24GiB@1TB/s
      Predict without a file.";

pub fn run(args: Args) -> anyhow::Result<()> {
    if args.forecast.forecast {
        return forecast::run(&args.forecast, args.file.as_ref(), args.json);
    }
    let file = args.file.context("give a file, or --forecast --shape NAME")?;
    let gguf = Gguf::open(&file)?;
    if Pack::is_pack(&gguf) {
        args.json.print(&pack::Report::of(&Pack::open(&file)?))
    } else {
        args.json.print(&Report::of(&gguf)?)
    }
}

/// Prints the forecast of a file, or of the beginning of one, on this machine.
///
/// # Errors
/// As [`run`].
pub fn predict(file: PathBuf) -> anyhow::Result<()> {
    let command = Args::augment_args(clap::Command::new("inspect").no_binary_name(true));
    let matches = command.try_get_matches_from(["--forecast".into(), file.into_os_string()])?;
    run(Args::from_arg_matches(&matches)?)
}

/// `3`, or `3-7`.
fn range(first: u64, last: u64) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

#[derive(Debug, Serialize)]
struct Report {
    files: Vec<FileSize>,
    gguf_version: u32,
    architecture: String,
    name: Option<String>,
    n_tensors: usize,
    n_elements: u64,
    tensor_bytes: u64,
    expert_bytes: u64,
    types: Vec<TypeSize>,
    layers: Vec<Layer>,
    /// Tensors outside of blocks: embeddings, output.
    outside_bytes: u64,
    n_expert_used: Option<u64>,
    /// Expert bytes that one token multiplies with.
    expert_bytes_per_token: Option<u64>,
}

#[derive(Debug, Serialize)]
struct FileSize {
    path: PathBuf,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct TypeSize {
    #[serde(rename = "type")]
    dtype: &'static str,
    tensors: u64,
    bytes: u64,
    expert_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Layer {
    layer: u64,
    n_expert: u32,
    /// One expert, all slices.
    expert_bytes: u64,
    experts_bytes: u64,
    /// Attention, norms, router, shared experts.
    other_bytes: u64,
    /// Slice name to type.
    expert_types: BTreeMap<&'static str, &'static str>,
}

impl Report {
    fn of(gguf: &Gguf) -> anyhow::Result<Self> {
        let experts = gguf.experts()?;
        let n_expert_used = Some(u64::from(gguf.n_expert_used_max())).filter(|n| *n > 0);
        let per_token = n_expert_used.filter(|_| !experts.is_empty());
        let per_token = per_token.map(|_| experts.bytes_per_token(|layer| gguf.n_expert_used(layer)));
        let layers = layers(gguf, &experts);
        let in_layers: u64 = layers.iter().map(|l| l.experts_bytes + l.other_bytes).sum();
        Ok(Self {
            files: gguf.files.iter().map(|f| FileSize { path: f.path.clone(), bytes: f.len }).collect(),
            gguf_version: gguf.version,
            architecture: gguf.architecture().to_owned(),
            name: gguf.metadata.get_str("general.name").map(str::to_owned),
            n_tensors: gguf.tensors.len(),
            n_elements: gguf.tensors.iter().map(|t| t.dims.iter().product::<u64>()).sum(),
            tensor_bytes: gguf.tensor_bytes(),
            expert_bytes: experts.bytes(),
            types: types(gguf, &experts),
            outside_bytes: gguf.tensor_bytes() - in_layers,
            layers,
            n_expert_used,
            expert_bytes_per_token: per_token,
        })
    }
}

fn types(gguf: &Gguf, experts: &ExpertMap) -> Vec<TypeSize> {
    let mut sizes = BTreeMap::new();
    for t in &gguf.tensors {
        let empty = TypeSize { dtype: t.dtype.name(), tensors: 0, bytes: 0, expert_bytes: 0 };
        let size = sizes.entry(t.dtype).or_insert(empty);
        size.tensors += 1;
        size.bytes += t.extent.len;
    }
    for t in experts.layers.iter().flat_map(|l| &l.tensors) {
        if let Some(size) = sizes.get_mut(&t.dtype) {
            size.expert_bytes += t.slice_bytes * u64::from(t.n_expert);
        }
    }
    let mut sizes: Vec<_> = sizes.into_values().collect();
    sizes.sort_by_key(|s| std::cmp::Reverse(s.bytes));
    sizes
}

fn layers(gguf: &Gguf, experts: &ExpertMap) -> Vec<Layer> {
    let mut bytes = BTreeMap::<u64, u64>::new();
    for t in &gguf.tensors {
        let layer = t.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')?.0.parse().ok());
        if let Some(layer) = layer {
            *bytes.entry(layer).or_default() += t.extent.len;
        }
    }
    let layer = |(layer, bytes): (u64, u64)| {
        let own = u16::try_from(layer).ok().and_then(|l| experts.layer(l));
        let experts_bytes = own.map_or(0, LayerExperts::bytes);
        Layer {
            layer,
            n_expert: own.map_or(0, |l| l.n_expert),
            expert_bytes: own.map_or(0, LayerExperts::expert_bytes),
            experts_bytes,
            other_bytes: bytes - experts_bytes,
            expert_types: own
                .into_iter()
                .flat_map(|l| &l.tensors)
                .map(|t| (slice_name(t.kind), t.dtype.name()))
                .collect(),
        }
    };
    bytes.into_iter().map(layer).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            writeln!(f, "{}  {}", file.path.display(), Bytes(file.bytes))?;
        }
        let name = self.name.as_deref().unwrap_or("unnamed");
        writeln!(f, "architecture {}, \"{name}\", GGUF version {}", self.architecture, self.gguf_version)?;
        let parameters = match self.n_elements {
            n if n < 1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
            n => format!("{:.2} B", n as f64 / 1e9),
        };
        writeln!(f, "{} tensors, {parameters} parameters, {}", self.n_tensors, Bytes(self.tensor_bytes))?;

        writeln!(f, "\n{:<10}{:>8}{:>14}{:>14}", "type", "tensors", "bytes", "in experts")?;
        for t in &self.types {
            let (all, experts) = (Bytes(t.bytes).to_string(), Bytes(t.expert_bytes).to_string());
            writeln!(f, "{:<10}{:>8}{all:>14}{experts:>14}", t.dtype, t.tensors)?;
        }

        writeln!(
            f,
            "\n{:<10}{:>8}{:>14}{:>14}{:>14}  types",
            "layers", "experts", "per expert", "all experts", "other"
        )?;
        for run in self.layers.chunk_by(|a, b| a.clone() == Layer { layer: a.layer, ..b.clone() }) {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            let range = range(first.layer, last.layer);
            let [each, all, other] =
                [first.expert_bytes, first.experts_bytes, first.other_bytes].map(|n| Bytes(n).to_string());
            let mut types = String::new();
            for (slice, dtype) in &first.expert_types {
                write!(types, " {slice}:{dtype}")?;
            }
            writeln!(f, "{range:<10}{:>8}{each:>14}{all:>14}{other:>14} {types}", first.n_expert)?;
        }
        writeln!(f, "outside of layers: {}", Bytes(self.outside_bytes))?;

        if self.expert_bytes == 0 {
            return writeln!(f, "\nNo experts: a dense model.");
        }
        let share = Percent(self.expert_bytes as f64 / self.tensor_bytes as f64);
        writeln!(f, "\nexperts: {}, {share:.0} of all weights", Bytes(self.expert_bytes))?;
        match (self.n_expert_used, self.expert_bytes_per_token) {
            (Some(n), Some(bytes)) => writeln!(f, "one token uses {n} per layer: {}", Bytes(bytes))?,
            _ => writeln!(f, "experts per token: not given by the file")?,
        }
        writeln!(f, "KV cache and compute buffers come on top; they depend on the context size.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::gguf::{GgmlType, HeaderBuilder};

    fn report(n_used: Option<u32>) -> Report {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("toy.gguf");
        let mut header = HeaderBuilder::new(32).unwrap();
        header.key("general.architecture", "toy").unwrap();
        if let Some(n) = n_used {
            header.key("toy.expert_used_count", n).unwrap();
        }
        header.tensor("token_embd.weight", GgmlType::F16, &[32, 5]).unwrap();
        header.tensor("blk.0.ffn_up.weight", GgmlType::F32, &[32, 2]).unwrap();
        for l in 1..3 {
            header.tensor(&format!("blk.{l}.attn_q.weight"), GgmlType::F32, &[32, 1]).unwrap();
            for (slice, dtype) in [("gate", GgmlType::Q8_0), ("up", GgmlType::Q8_0), ("down", GgmlType::F16)] {
                header.tensor(&format!("blk.{l}.ffn_{slice}_exps.weight"), dtype, &[32, 32, 8]).unwrap();
            }
        }
        let mut file = std::fs::File::create(&path).unwrap();
        header.finish().write(&mut file, |t, out| out.write_all(&vec![0; t.extent.len as usize])).unwrap();
        Report::of(&Gguf::open(&path).unwrap()).unwrap()
    }

    #[test]
    fn sizes_add_up() {
        let expert = 2 * 34 * 32 + 2 * 32 * 32;
        let report = report(Some(2));
        assert_eq!(report.expert_bytes, 2 * 8 * expert);
        assert_eq!(report.expert_bytes_per_token, Some(2 * 2 * expert));
        assert_eq!(report.outside_bytes, 320);
        assert_eq!(report.tensor_bytes, 320 + 256 + 2 * 128 + report.expert_bytes);
        assert_eq!(report.types.iter().map(|t| t.bytes).sum::<u64>(), report.tensor_bytes);
        let [dense, first, second] = report.layers.as_slice() else { panic!("{:?}", report.layers) };
        assert_eq!((dense.n_expert, dense.other_bytes), (0, 256));
        assert_eq!((first.n_expert, first.expert_bytes, first.other_bytes), (8, expert, 128));
        assert_eq!(first.expert_types["down"], "f16");
        assert_eq!(*second, Layer { layer: 2, ..first.clone() });
    }

    #[test]
    fn the_text_folds_equal_layers() {
        let text = report(None).to_string();
        assert!(text.contains("1-2 ") && text.contains("gate:q8_0 up:q8_0"), "{text}");
        assert!(text.contains("experts per token: not given"), "{text}");
    }
}
