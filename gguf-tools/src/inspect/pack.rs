//! `gguf-tools inspect` of an expert pack: its records, and the cost of alignment.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use hobbit_core::expert::Precision;
use hobbit_core::pack::{Pack, PackKind, SliceTypes, slice_name};
use hobbit_core::profile::{Mixes, mixes_of_json};
use hobbit_core::units::{Bytes, Percent};
use serde::Serialize;

/// The report; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Report {
    file: PathBuf,
    bytes: u64,
    pack_version: u32,
    pack: PackKind,
    architecture: String,
    name: Option<String>,
    high: Option<String>,
    low: Option<String>,
    /// Low versions are bits of the high versions.
    #[serde(rename = "nested")]
    bit_planes: bool,
    source: Source,
    /// SHA-256 of the file that `unpack` writes, if there is a plain form.
    plain_sha256: Option<String>,
    t1: Option<f32>,
    t2: Option<f32>,
    /// Mixes for `hobbit-cli --max-loss`, if measured.
    mixes: Option<String>,
    layers: Vec<Layer>,
    ordinary_bytes: u64,
    high_bytes: u64,
    low_bytes: u64,
    /// Bytes of padding between tensors and inside records.
    padding_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Source {
    name: String,
    bytes: u64,
    sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Layer {
    layer: u16,
    n_expert: u16,
    high: Option<Records>,
    low: Option<Records>,
}

/// A layer's records of one precision.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Records {
    n: usize,
    /// Bytes of the smallest and the largest record.
    record_bytes: (u64, u64),
    weight_bytes: u64,
    bytes: u64,
    /// Number of records per combination of types.
    types: BTreeMap<String, usize>,
}

impl Report {
    pub fn of(pack: &Pack) -> Self {
        let raw = &pack.raw;
        let bytes = raw.file_bytes();
        let layers: Vec<Layer> = layers(pack);
        let (high, low): (Vec<_>, Vec<_>) = layers.iter().map(|l| (l.high.as_ref(), l.low.as_ref())).unzip();
        let sum = |records: &[Option<&Records>], of: fn(&Records) -> u64| -> u64 {
            records.iter().flatten().map(|records| of(records)).sum()
        };
        let (high_bytes, low_bytes) = (sum(&high, |r| r.bytes), sum(&low, |r| r.bytes));
        let in_records = high_bytes + low_bytes - sum(&high, |r| r.weight_bytes) - sum(&low, |r| r.weight_bytes);
        let tensor_bytes = raw.tensor_bytes();
        let between = bytes - raw.header_bytes.len() as u64 - tensor_bytes;
        let own: u64 = raw.tensors.iter().filter(|t| t.name.starts_with("hobbit.")).map(|t| t.extent.len).sum();
        let info = pack.info.clone();
        let source = Source { name: info.source_name, bytes: info.source_size, sha256: info.source_sha256.to_string() };
        Self {
            file: pack.path.clone(),
            bytes,
            pack_version: pack.version(),
            pack: pack.kind,
            architecture: raw.architecture().to_owned(),
            name: raw.metadata.get_str("general.name").map(str::to_owned),
            high: info.high,
            low: info.low,
            bit_planes: info.bit_planes,
            source,
            plain_sha256: info.plain_sha256.map(|digest| digest.to_string()),
            t1: info.t1,
            t2: info.t2,
            mixes: info.mixes.as_deref().map(mixes),
            layers,
            ordinary_bytes: tensor_bytes - own - high_bytes - low_bytes,
            high_bytes,
            low_bytes,
            padding_bytes: between + in_records,
        }
    }
}

/// The mixes measured for `--max-loss`, in brief.
fn mixes(text: &str) -> String {
    let of = |Mixes { mixes, text, cache_share, .. }: &Mixes| {
        format!("{} mixes on {text} with {:.0} of the experts in memory", mixes.len(), Percent(*cache_share))
    };
    match mixes_of_json(text) {
        Ok(all) => all.iter().map(of).collect::<Vec<_>>().join(", "),
        Err(reason) => format!("damaged: {reason}"),
    }
}

fn layers(pack: &Pack) -> Vec<Layer> {
    let catalog = &pack.catalog;
    let mut all: BTreeMap<(u16, Precision), Records> = BTreeMap::new();
    for packed in &pack.versions {
        let key = (packed.version.expert.layer, packed.version.precision);
        let weights = pack.weight_bytes(packed);
        let len = packed.record.len;
        let empty = Records { n: 0, record_bytes: (len, len), weight_bytes: 0, bytes: 0, types: BTreeMap::new() };
        let records = all.entry(key).or_insert(empty);
        records.n += 1;
        records.record_bytes = (records.record_bytes.0.min(len), records.record_bytes.1.max(len));
        records.weight_bytes += weights;
        records.bytes += len;
        *records.types.entry(words(&packed.types)).or_default() += 1;
    }
    let layer = |layer: &hobbit_core::gguf::LayerCatalog| Layer {
        layer: layer.layer,
        n_expert: layer.n_expert,
        high: all.get(&(layer.layer, Precision::High)).cloned(),
        low: all.get(&(layer.layer, Precision::Low)).cloned(),
    };
    catalog.layers.iter().map(layer).collect()
}

fn words(types: &SliceTypes) -> String {
    types.iter().map(|(kind, dtype)| format!("{}:{dtype}", slice_name(kind))).collect::<Vec<_>>().join(" ")
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}  {}", self.file.display(), Bytes(self.bytes))?;
        writeln!(f, "expert pack ({}), format version {}", self.pack.name(), self.pack_version)?;
        let name = self.name.as_deref().unwrap_or("unnamed");
        writeln!(f, "architecture {}, \"{name}\"", self.architecture)?;
        let Source { name, bytes, sha256 } = &self.source;
        writeln!(f, "made from {name}, {}, SHA-256 {sha256}", Bytes(*bytes))?;
        match &self.plain_sha256 {
            Some(digest) if digest == sha256 => writeln!(f, "unpacks to the same file")?,
            Some(digest) => writeln!(f, "unpacks to a plain model of SHA-256 {digest}")?,
            None => writeln!(f, "has no plain form")?,
        }
        for (what, types) in [("high", &self.high), ("low", &self.low)] {
            if let Some(types) = types {
                writeln!(f, "{what}: {types}")?;
            }
        }
        if self.bit_planes {
            writeln!(
                f,
                "bit planes: a low record is 4 of 8 bits; a high version is that record and the high one after it"
            )?;
        }
        if let (Some(t1), Some(t2)) = (self.t1, self.t2) {
            writeln!(f, "calibrated thresholds: T1 {t1}, T2 {t2}")?;
        }
        if let Some(mixes) = &self.mixes {
            writeln!(f, "measured for --max-loss: {mixes}")?;
        }

        writeln!(f, "\n{:<10}{:<6}{:>8}{:>14}{:>14}  types", "layers", "", "records", "per record", "all")?;
        for run in self.layers.chunk_by(|a, b| a.clone() == Layer { layer: a.layer, ..b.clone() }) {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            let range = super::range(first.layer.into(), last.layer.into());
            let both = [("high", &first.high), ("low", &first.low)];
            for (i, (what, records)) in both.iter().filter_map(|(w, r)| Some((*w, r.as_ref()?))).enumerate() {
                let range = if i == 0 { range.as_str() } else { "" };
                let (least, most) = records.record_bytes;
                let each =
                    if least == most { Bytes(least).to_string() } else { format!("{}-{}", Bytes(least), Bytes(most)) };
                let types: Vec<_> = match records.types.len() {
                    1 => records.types.keys().cloned().collect(),
                    _ => records.types.iter().map(|(types, n)| format!("{n} x ({types})")).collect(),
                };
                let all = Bytes(records.bytes).to_string();
                writeln!(f, "{range:<10}{what:<6}{:>8}{each:>14}{all:>14}  {}", records.n, types.join(", "))?;
            }
        }

        let share = |bytes: u64| 100.0 * bytes as f64 / self.bytes as f64;
        writeln!(f)?;
        for (what, bytes) in [
            ("ordinary tensors", self.ordinary_bytes),
            ("high records", self.high_bytes),
            ("low records", self.low_bytes),
            ("of all, padding", self.padding_bytes),
        ] {
            writeln!(f, "{what:<18}{:>14}{:>7.2} %", Bytes(bytes).to_string(), share(bytes))?;
        }
        Ok(())
    }
}
