//! A whole trace in memory, as batches of layers.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::SimError;
use crate::trace::{Header, LayerRecord, Phase, Record, ResidentsRecord, TraceError, TraceReader};

/// What was evaluated, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A new sequence begins.
    Sequence,
    /// A batch was evaluated.
    Batch(Batch),
}

/// One evaluated batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// What for.
    pub phase: Phase,
    /// Tokens.
    pub n_tokens: u32,
    /// Wall time when it was recorded.
    pub seconds: f64,
    /// One record per layer with experts, in the order in which they ran.
    pub layers: Vec<LayerRecord>,
}

impl Batch {
    /// Recorded seconds beside expert products and waits, for each layer.
    pub fn other_seconds_per_layer(&self) -> f64 {
        let experts: f64 = self.layers.iter().map(|l| f64::from(l.wait_seconds) + f64::from(l.compute_seconds)).sum();
        (self.seconds - experts).max(0.0) / self.layers.len().max(1) as f64
    }
}

/// A trace in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// File, for messages.
    pub path: PathBuf,
    /// What the trace begins with, with what was measured later in place of what was known then.
    pub header: Header,
    /// What was resident before the first batch; empty unless it was a warm start.
    pub start: ResidentsRecord,
    /// Whole batches. A batch that was cut off is not among them.
    pub events: Vec<Event>,
    /// First byte that was cut off, if the file does not end with a whole record.
    pub truncated: Option<u64>,
}

impl Recording {
    /// Reads a file.
    ///
    /// # Errors
    /// [`SimError::Trace`]; [`SimError::NoBatches`] for a trace of nothing.
    pub fn open(path: &Path) -> Result<Self, SimError> {
        Self::read(TraceReader::open(path)?, path)
    }

    /// Takes all records of a reader; `path` is for messages.
    ///
    /// # Errors
    /// As [`Recording::open`].
    pub fn read<R: Read>(mut reader: TraceReader<R>, path: &Path) -> Result<Self, SimError> {
        let header = reader.header().clone();
        let mut recording = Self {
            path: path.to_owned(),
            header,
            start: ResidentsRecord::default(),
            events: Vec::new(),
            truncated: None,
        };
        recording.take(&mut reader)?;
        if recording.batches().next().is_none() {
            return Err(SimError::NoBatches { path: path.to_owned() });
        }
        recording.truncated = reader.truncated();
        Ok(recording)
    }

    fn take(&mut self, records: impl Iterator<Item = Result<Record, TraceError>>) -> Result<(), TraceError> {
        let mut layers = Vec::new();
        for record in records {
            match record? {
                Record::Sequence => self.events.push(Event::Sequence),
                Record::Layer(layer) => layers.push(layer),
                Record::Batch { phase, n_tokens, seconds } => self.events.push(Event::Batch(Batch {
                    phase,
                    n_tokens,
                    seconds: f64::from(seconds),
                    layers: std::mem::take(&mut layers),
                })),
                Record::Residents(start) => self.start = start,
                Record::Measured { host } => self.header.host.extend(host),
                Record::Load { .. } | Record::Withdrawn { .. } => {}
            }
        }
        Ok(())
    }

    /// Pretends that every expert had a low version of so many percent of its bytes, where the model had none.
    pub fn assume_low(&mut self, percent: f64) {
        for layer in self.header.model.layers.iter_mut().filter(|layer| layer.bytes_low == 0) {
            layer.bytes_low = ((layer.bytes_high as f64 * percent / 100.0) as u64).clamp(1, layer.bytes_high);
        }
    }

    /// Tokens of all batches.
    pub fn n_tokens(&self) -> u64 {
        self.batches().map(|batch| u64::from(batch.n_tokens)).sum()
    }

    /// Every evaluated batch.
    pub fn batches(&self) -> impl Iterator<Item = &Batch> {
        self.events.iter().filter_map(|event| match event {
            Event::Batch(batch) => Some(batch),
            Event::Sequence => None,
        })
    }
}
