//! `hobbit-sim import`: recordings of other programs as traces. One format so far, `route_trace v1`, as BigMoeOnEdge
//! publishes it, with a line for every chosen expert:
//!
//! ```text
//! # route_trace v1
//! # model=NAME arch=NAME n_layer=N n_expert=N n_expert_used=N
//! # layer=N expert_bytes=N dense_bytes=N              each layer with experts, ascending
//! turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//! 0,0,0,0,0,49,0.221297,0,3059712                     phase 0: prompt, 1: decode; step: the token; slot: rank
//! ```
//!
//! A batch is stored layer by layer. A layer may have lines for its last tokens only, because the others need no
//! logits. The last two columns describe that program's cache; they only have to be numbers.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::args::ImportArgs;
use hobbit_core::expert::Precision;
use hobbit_core::files::{self, Kind, read_text};
use hobbit_core::route::{DECODE_TOKENS_MAX, Demand, Routing};
use hobbit_core::trace::{Header, Layer, LayerRecord, ModelDescription, Needed, Phase, TraceWriter};

const FIRST: &str = "# route_trace v1";
const COLUMNS: [&str; 9] = ["turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes"];
/// Maximum bytes of a recording: tens of thousands of tokens.
const BYTES_MAX: u64 = 256 << 20;

/// One line.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Row {
    turn: u32,
    phase: u8,
    step: u64,
    layer: u16,
    slot: u16,
    expert: u16,
    weight: f32,
    #[serde(rename = "residency")]
    _residency: u32,
    #[serde(rename = "expert_bytes")]
    _expert_bytes: u64,
}

pub fn run(args: &ImportArgs, out: &mut dyn Write) -> Result<()> {
    super::check_output(&args.output, Kind::Trace, std::slice::from_ref(&args.file))?;
    let in_file = || args.file.display().to_string();
    let text = read_text(&args.file, BYTES_MAX).with_context(in_file)?;
    let (trace, prompt, decoded) = import(&text, &args.file).with_context(in_file)?;
    let written = files::overwrite(&args.output, Kind::Trace, &trace);
    written.with_context(|| format!("{}: cannot write this file", args.output.display()))?;
    writeln!(out, "{prompt} tokens of prompts, {decoded} decoded; written to {}", args.output.display())?;
    Ok(())
}

/// The trace of a `route_trace v1`, with its numbers of prompt tokens and decoded tokens. The trace is exact, has as
/// many slots as experts (the recording's own cache is not ours) and no times.
fn import(text: &str, path: &Path) -> Result<(Vec<u8>, usize, usize)> {
    let model = model(text, path)?;
    let mut header = Header { model, ..Header::default() };
    header.settings.more.insert("source".into(), FIRST.trim_start_matches("# ").into());
    let mut writer = TraceWriter::new(Vec::new(), &header)?;
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(text.as_bytes());
    ensure!(*reader.headers()? == COLUMNS[..], "expected the columns {}", COLUMNS.join(","));
    let columns = csv::StringRecord::from(&COLUMNS[..]);
    let mut rows: Vec<(u64, Row)> = Vec::new();
    for record in reader.into_records() {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        rows.push((line, record.deserialize(Some(&columns)).with_context(|| format!("line {line}"))?));
    }
    let mut tokens = [0, 0];
    // End of the last batch.
    let mut last: Option<(u32, u64)> = None;
    // A batch ends where layer numbers start over.
    let continues = |a: &Row, b: &Row| (a.turn, a.phase) == (b.turn, b.phase) && a.layer <= b.layer;
    for rows in rows.chunk_by(|(_, a), (_, b)| continues(a, b)) {
        let (line, first) = rows[0];
        let at = (first.turn, first.step);
        ensure!(last < Some(at), "line {line}: turn {} step {} follows a later one", at.0, at.1);
        if last.is_none_or(|(turn, _)| turn < first.turn) {
            writer.sequence()?;
        }
        let n_tokens = batch(rows, &header, &mut writer)?;
        last = Some((first.turn, first.step + n_tokens as u64 - 1));
        tokens[usize::from(first.phase)] += n_tokens;
    }
    ensure!(last.is_some(), "expected lines of experts after the columns");
    Ok((writer.finish()?, tokens[0], tokens[1]))
}

/// Parses the lines before the column names.
fn model(text: &str, path: &Path) -> Result<ModelDescription> {
    let mut lines = (1..).zip(text.lines());
    ensure!(lines.next().is_some_and(|(_, line)| line == FIRST), "line 1: expected {FIRST:?}");
    let (mut name, mut architecture, mut n_layer, mut n_expert, mut n_used) = (None, None, None, None, None);
    let mut layers = Vec::new();
    for (number, line) in lines {
        let Some(line) = line.strip_prefix("# ") else { break };
        let (mut layer, mut bytes) = (None, None);
        for word in line.split_ascii_whitespace() {
            let Some((key, value)) = word.split_once('=') else {
                bail!("line {number}: expected name=value, found {word:?}");
            };
            let number = || value.parse().with_context(|| format!("line {number}: {key}={value}"));
            let count = || number().and_then(|n: u64| Ok(u16::try_from(n)?));
            match key {
                "model" => name = Some(value.to_owned()),
                "arch" => architecture = Some(value.to_owned()),
                "n_layer" => n_layer = Some(count()?),
                "n_expert" => n_expert = Some(count()?),
                "n_expert_used" => n_used = Some(count()?),
                "layer" => layer = Some(count()?),
                "expert_bytes" => bytes = Some(number()?),
                // Unused fields, and fields of later versions.
                _ => {}
            }
        }
        if let (Some(layer), Some(bytes_high), Some(n_expert), Some(n_used)) = (layer, bytes, n_expert, n_used) {
            ensure!(Some(layer) < n_layer, "line {number}: layer {layer} of {}", n_layer.unwrap_or(0));
            let slots_high = u32::from(n_expert);
            layers.push(Layer { layer, n_expert, n_used, bytes_high, slots_high, ..Layer::default() });
        }
    }
    ensure!(!layers.is_empty(), "expected the lines \"# model=...\" and \"# layer=...\"");
    let stem = || path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(ModelDescription { name: name.unwrap_or_else(stem), architecture: architecture.unwrap_or_default(), layers })
}

/// Writes a batch; returns its tokens.
fn batch(rows: &[(u64, Row)], header: &Header, writer: &mut TraceWriter<Vec<u8>>) -> Result<usize> {
    let (number, first) = rows[0];
    let phase = match first.phase {
        0 => Phase::Prompt,
        1 => Phase::Decode,
        other => bail!("line {number}: phase {other}, expected 0 or 1"),
    };
    let last_step = rows.iter().map(|(_, row)| row.step).max().unwrap_or(0);
    let mut layers = header.model.layers.iter();
    let (mut n_tokens, mut routing) = (0, Routing::default());
    for rows in rows.chunk_by(|a, b| a.1.layer == b.1.layer) {
        let (number, first) = rows[0];
        let layer = layers.next().filter(|layer| layer.layer == first.layer);
        let Some(layer) = layer else { bail!("line {number}: layer {} out of turn, or unknown", first.layer) };
        let k = usize::from(layer.n_used);
        let mut record = LayerRecord::new(layer.layer, layer.n_used);
        for (nth, token) in (0..).zip(rows.chunks(k)) {
            for (rank, (number, row)) in (0..).zip(token) {
                let at = (row.step, row.slot);
                ensure!(at == (first.step + nth, rank), "line {number}: token {} slot {} out of turn", at.0, at.1);
                ensure!(row.expert < layer.n_expert, "line {number}: expert {} of {}", row.expert, layer.n_expert);
                ensure!((0.0..=1e4).contains(&row.weight), "line {number}: a weight of {}", row.weight);
            }
            let (number, _) = token[token.len() - 1];
            ensure!(token.len() == k, "line {number}: {} of {k} experts of a token", token.len());
            let chosen: Vec<u16> = token.iter().map(|(_, row)| row.expert).collect();
            let repeats = chosen.iter().enumerate().any(|(i, expert)| chosen[..i].contains(expert));
            ensure!(!repeats, "line {number}: a token has an expert twice");
            let weights: Vec<f32> = token.iter().map(|(_, row)| row.weight).collect();
            record.push_token(&chosen, &weights, None, 0);
        }
        let n = record.n_tokens as usize;
        ensure!(rows[rows.len() - 1].1.step == last_step, "line {number}: the layer lacks the batch's last token");
        ensure!(n_tokens == 0 || n <= n_tokens, "line {number}: the layer has {n} tokens, the first {n_tokens}");
        n_tokens = n_tokens.max(n);
        let ids = record.chosen.iter().map(|&expert| i32::from(expert));
        routing.set(ids, k, usize::from(layer.n_expert)).map_err(|id| anyhow::anyhow!("expert {id}"))?;
        let needed = |&expert: &u16| {
            let used = Some(Precision::High);
            Needed { expert, demand: Demand::High, used, hit: true, class: None, bytes: 0 }
        };
        record.needed = routing.needed.iter().map(needed).collect();
        writer.layer(&record)?;
    }
    if let Some(missing) = layers.next() {
        bail!("line {}: the batch ends before layer {}", rows[rows.len() - 1].0, missing.layer);
    }
    let is_few = n_tokens <= DECODE_TOKENS_MAX;
    ensure!(phase == Phase::Prompt || is_few, "line {number}: {n_tokens} tokens decoded at once");
    writer.batch(phase, n_tokens as u32, 0.0)?;
    Ok(n_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::trace::{Record, TraceReader};

    /// Two layers of four experts, two of them used: a prompt of two tokens, of which the last layer has one, and a
    /// token.
    const SMALL: &str = "\
# route_trace v1
# model=toy.gguf arch=toymoe n_layer=3 n_expert=4 n_expert_used=2
# layer=1 expert_bytes=100 dense_bytes=7
# layer=2 expert_bytes=90 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,3,0.75,0,100
0,0,0,1,1,1,0.25,0,100
0,0,1,1,0,1,0.5,1,0
0,0,1,1,1,0,0.5,0,100
0,0,1,2,0,2,0.625,0,90
0,0,1,2,1,3,0.375,0,90
0,1,2,1,0,1,0.5,0,0
0,1,2,1,1,2,0.5,0,100
0,1,2,2,0,0,0.5,0,90
0,1,2,2,1,3,0.5,0,0
";

    fn records(text: &str) -> Result<(Header, Vec<Record>)> {
        let (bytes, _, _) = import(text, Path::new("toy.csv"))?;
        let mut reader = TraceReader::new(&bytes[..], "toy.trace")?;
        let records = (&mut reader).collect::<Result<_, _>>()?;
        Ok((reader.header().clone(), records))
    }

    #[test]
    fn every_choice_is_kept() {
        let (header, records) = records(SMALL).unwrap();
        let sizes: Vec<_> = header.model.layers.iter().map(|layer| (layer.layer, layer.bytes_high)).collect();
        assert_eq!((header.model.architecture.as_str(), sizes), ("toymoe", vec![(1, 100), (2, 90)]));
        let layers: Vec<_> = records
            .iter()
            .filter_map(|record| match record {
                Record::Layer(layer) => Some((layer.layer, layer.chosen.clone(), layer.weights.clone())),
                _ => None,
            })
            .collect();
        let expected = [
            (1, vec![3, 1, 1, 0], vec![0.75, 0.25, 0.5, 0.5]),
            (2, vec![2, 3], vec![0.625, 0.375]),
            (1, vec![1, 2], vec![0.5, 0.5]),
            (2, vec![0, 3], vec![0.5, 0.5]),
        ];
        assert_eq!(layers, expected);
        let batches: Vec<_> = records
            .iter()
            .filter_map(|record| match record {
                Record::Batch { phase, n_tokens, .. } => Some((*phase, *n_tokens)),
                _ => None,
            })
            .collect();
        assert_eq!(batches, [(Phase::Prompt, 2), (Phase::Decode, 1)]);
    }

    #[test]
    fn faults_are_refused_by_their_line() {
        let cases = [
            ("# route_trace v1\n", "# route_trace v2\n", "line 1: expected"),
            ("n_expert=4", "n_expert=-4", "line 2: n_expert=-4"),
            ("n_expert=4", "n_expert=70000", "out of range"),
            ("# layer=2 expert", "# layer=3 expert", "line 4: layer 3 of 3"),
            ("# layer=2 expert_bytes=90", "# layer=1 expert_bytes=90", "expected ascending"),
            ("expert_bytes=100 dense", "expert_bytes=0 dense", "0 bytes high"),
            ("residency,expert_bytes\n", "residency\n", "expected the columns"),
            ("0,0,0,1,1,1,0.25,0,100\n", "0,0,0,1,1,1,0.25,0\n", "line: 7"),
            ("0,0,0,1,1,1,0.25,0,100\n", "", "slot 0 out of turn"),
            ("0,0,0,1,1,1,0.25", "0,0,0,1,1,4,0.25", "line 7: expert 4 of 4"),
            ("0,0,0,1,1,1,0.25", "0,0,0,1,1,3,0.25", "line 7: a token has an expert twice"),
            ("0,0,0,1,1,1,0.25", "0,0,0,1,1,1,NaN", "a weight of NaN"),
            ("0,0,0,1,1,1,0.25", "0,2,0,1,1,1,0.25", "of 2 experts of a token"),
            ("0,1,2,2,1,3,0.5,0,0\n", "", "line 14: 1 of 2 experts of a token"),
            ("0,1,2,2,0,0,0.5,0,90\n0,1,2,2,1,3,0.5,0,0\n", "", "the batch ends before layer 2"),
            ("0,1,2,1,0,1,0.5,0,0\n0,1,2,1,1,2,0.5,0,100\n", "", "layer 2 out of turn"),
        ];
        for (from, to, expected) in cases {
            assert!(SMALL.contains(from), "{from}");
            let error = format!("{:#}", records(&SMALL.replacen(from, to, 1)).unwrap_err());
            assert!(error.contains(expected), "{from:?} as {to:?}: {error}");
        }
        let nothing = format!("{:#}", records(&SMALL[..SMALL.find("0,0,0,1").unwrap()]).unwrap_err());
        assert!(nothing.contains("expected lines of experts"), "{nothing}");
        let back = format!("{:#}", records(&SMALL.replace("\n0,1,2,", "\n0,1,1,")).unwrap_err());
        assert!(back.contains("turn 0 step 1 follows a later one"), "{back}");
    }

    /// A truncated file is always detected.
    #[test]
    fn no_prefix_is_taken_for_the_whole() {
        let whole = records(SMALL).unwrap().1.len();
        for end in 0..SMALL.len() - 1 {
            if let Ok((_, records)) = records(&SMALL[..end]) {
                // A cut between batches, or within a number, cannot be detected.
                assert!(records.len() < whole || SMALL[end..].len() <= 2, "{end}");
            }
        }
    }
}
