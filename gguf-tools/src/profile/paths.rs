//! Path tables: counts which experts follow which, during a run over the text or from a trace.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use hobbit_core::predict::{PathBatches, PathLimits, PathTable, PathTableBuilder, PredictShape};
use hobbit_core::profile::write_path_table;
use hobbit_core::trace::{Record, TraceReader};
use hobbit_programs::output::tell;

use crate::shared::{Bar, Opened};

/// Flags of `profile` about path tables.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write a path table for --predictor path-table: counts of the experts that follow those of the two layers before.
    /// More --tokens make a better table
    #[arg(long, value_name = "FILE")]
    pub path_table: Option<PathBuf>,
    /// Count the experts of a trace (hobbit-cli --trace) instead of running the model over a text
    #[arg(long, value_name = "FILE", requires = "path_table",
          conflicts_with_all = ["text", "shares", "max_loss", "widths", "output", "json"])]
    pub from_trace: Option<PathBuf>,
}

/// Empty counts for a model of this shape.
pub fn batches(shape: PredictShape) -> PathBatches {
    PathBatches::new(PathTableBuilder::new(shape, PathLimits::default()))
}

/// Writes the table and prints a summary.
pub fn write(path: &Path, table: &PathTable) -> anyhow::Result<()> {
    write_path_table(path, table)?;
    let (n_pairs, n_layers, n_tokens) = (table.n_pairs(), table.n_layers(), table.n_tokens());
    tell(format_args!("{}: {n_pairs} pairs of expert sets in {n_layers} layers, of {n_tokens} tokens", path.display()));
    Ok(())
}

/// The path table from a trace of the model at `model`, plain or a pack.
pub fn of_trace(model: &Path, trace: &Path) -> anyhow::Result<PathTable> {
    let mut reader = TraceReader::open(trace)?;
    let layers = reader.header().model.layers.iter().map(|layer| (layer.layer, layer.n_expert, layer.n_used));
    let shape = PredictShape { layers: layers.collect() };
    let opened = Opened::of(model)?;
    ensure!(
        !shape.layers.is_empty()
            && shape
                == PredictShape::of_header(&opened.gguf, &opened.map, shape.layers.last().map(|(layer, ..)| *layer)),
        "{}: recorded of {}, whose layers and experts are not those of {}; record this model with hobbit-cli --trace",
        trace.display(),
        reader.header().model.name,
        model.display()
    );
    let n_bytes = std::fs::metadata(trace).map_or(0, |metadata| metadata.len());
    let mut bar = Bar::new()?;
    let mut batches = batches(shape);
    while let Some(record) = reader.next() {
        match record? {
            Record::Layer(layer) => batches.layer(layer.layer, layer.n_used.into(), layer.chosen),
            Record::Batch { .. } | Record::Sequence => batches.end_batch(),
            Record::Load { .. } | Record::Residents(_) | Record::Withdrawn { .. } | Record::Measured { .. } => {}
        }
        ensure!(bar.show("counting", reader.offset(), n_bytes).is_continue(), "interrupted");
    }
    drop(bar);
    if let Some(offset) = reader.truncated() {
        tell(format_args!("note: {}: cut off at byte {offset}; the part before it was counted", trace.display()));
    }
    let table = batches.build();
    ensure!(table.n_tokens() > 0, "{}: no tokens; record a run that evaluates some", trace.display());
    Ok(table)
}
