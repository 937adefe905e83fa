//! Reading untrusted traces.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use super::TraceError;
use super::bytes::Fields;
use super::header::{HEADER_BYTES_MAX, Header, MAGIC, VERSION};
use super::record::{CLASSES, DEMANDS, LayerRecord, Needed, PHASES, PRECISIONS, Prediction, Record, ResidentsRecord};
use crate::expert::{ExpertId, Precision, Version};

pub(super) const RECORD_BYTES_MAX: u64 = 64 << 20;

pub(super) const SEQUENCE: u8 = 1;
pub(super) const LAYER: u8 = 2;
pub(super) const LOAD: u8 = 3;
pub(super) const BATCH: u8 = 4;
pub(super) const RESIDENTS: u8 = 5;
pub(super) const WITHDRAWN: u8 = 6;
pub(super) const MEASURED: u8 = 7;
pub(super) const EXECUTED: u8 = 8;

/// The records of a trace, in order. Ends after the last whole record of a truncated file, and after the first error.
/// Skips records of unknown kinds.
#[derive(Debug)]
pub struct TraceReader<R> {
    input: R,
    path: PathBuf,
    header: Header,
    offset: u64,
    payload: Vec<u8>,
    /// Executed experts of the next layer, if they differ from its router's choice, and the offset of that record.
    executed: Option<(u64, Executed)>,
    is_done: bool,
    truncated: Option<u64>,
}

/// Experts that tokens used in place of their router's choice.
#[derive(Debug)]
struct Executed {
    /// Block number, tokens, experts per token.
    shape: (u16, u32, u16),
    /// `[n_tokens, n_used]`.
    experts: Vec<u16>,
}

impl TraceReader<BufReader<File>> {
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|error| TraceError::Io { path: path.to_owned(), action: "open", error })?;
        Self::new(BufReader::with_capacity(1 << 20, file), path)
    }
}

impl<R: Read> TraceReader<R> {
    /// Reads the header; `path` is for messages.
    pub fn new(mut input: R, path: impl Into<PathBuf>) -> Result<Self, TraceError> {
        let path = path.into();
        let io = |error| TraceError::Io { path: path.clone(), action: "read", error };
        let damaged = |reason: String| TraceError::Header { path: path.clone(), reason };
        let mut start = Vec::with_capacity(16);
        input.by_ref().take(16).read_to_end(&mut start).map_err(io)?;
        if !start.starts_with(&MAGIC) {
            start.truncate(MAGIC.len());
            return Err(TraceError::Magic { path, found: start });
        }
        let start: [u8; 16] =
            start.try_into().map_err(|start: Vec<u8>| damaged(format!("it ends after {} bytes", start.len())))?;
        let [.., v0, v1, _, _, l0, l1, l2, l3] = start;
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(TraceError::Version { path, found: version, expected: VERSION });
        }
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        if len > HEADER_BYTES_MAX {
            return Err(damaged(format!("it claims {len} bytes, expected at most {HEADER_BYTES_MAX}")));
        }
        let mut json = Vec::new();
        input.by_ref().take(u64::from(len)).read_to_end(&mut json).map_err(io)?;
        if json.len() < len as usize {
            return Err(damaged(format!("it has {} of {len} bytes", json.len())));
        }
        let header: Header = serde_json::from_slice(&json).map_err(|error| damaged(error.to_string()))?;
        header.check().map_err(damaged)?;
        let offset = 16 + u64::from(len);
        Ok(Self { input, path, header, offset, payload: json, executed: None, is_done: false, truncated: None })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes read so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Offset of the truncated record, once the end has been reached; `None` for a whole trace.
    pub fn truncated(&self) -> Option<u64> {
        self.truncated
    }

    /// The next record of a known kind; `None` at the end.
    fn record(&mut self) -> Result<Option<Record>, TraceError> {
        loop {
            let start = self.offset;
            let Some(tag) = self.byte()? else {
                self.truncated = self.executed.take().map(|(start, _)| start);
                return Ok(None);
            };
            let Some(len) = self.len(start)? else { return Ok(self.cut(start)) };
            self.fill(len)?;
            if (self.payload.len() as u64) < len {
                return Ok(self.cut(start));
            }
            let mut fields = Fields::new(&self.payload);
            let before = if (SEQUENCE..=EXECUTED).contains(&tag) { self.executed.take() } else { None };
            if let (Some(_), false) = (&before, tag == LAYER) {
                return Err(self.damaged(start, "executed experts are without the layer that they are of".into()));
            }
            let record = match tag {
                SEQUENCE => Ok(Some(Record::Sequence)),
                LAYER => layer(&mut fields, &self.header)
                    .and_then(|record| with_executed(record, before.map(|(_, executed)| executed)))
                    .map(|layer| Some(Record::Layer(layer))),
                LOAD => load(&mut fields, &self.header).map(Some),
                BATCH => batch(&mut fields).map(Some),
                RESIDENTS => residents(&mut fields, &self.header).map(Some),
                WITHDRAWN => withdrawn(&mut fields, &self.header).map(Some),
                MEASURED => measured(&mut fields).map(Some),
                EXECUTED => executed(&mut fields, &self.header).map(|executed| {
                    self.executed = Some((start, executed));
                    None
                }),
                _ => continue,
            };
            let record = record.and_then(|record| match fields.left() {
                0 => Ok(record),
                left => Err(format!("{left} bytes are left over at its end")),
            });
            if let Some(record) = record.map_err(|reason| self.damaged(start, reason))? {
                return Ok(Some(record));
            }
        }
    }

    fn cut(&mut self, start: u64) -> Option<Record> {
        self.truncated = Some(self.executed.take().map_or(start, |(start, _)| start));
        None
    }

    /// Reads `n` bytes, or what is left of the file.
    fn fill(&mut self, n: u64) -> Result<(), TraceError> {
        self.payload.clear();
        let read = self.input.by_ref().take(n).read_to_end(&mut self.payload);
        self.offset += read.map_err(|error| self.io(error))? as u64;
        Ok(())
    }

    fn byte(&mut self) -> Result<Option<u8>, TraceError> {
        self.fill(1)?;
        Ok(self.payload.first().copied())
    }

    /// Bytes of the payload; `None` where the file ends within the number.
    fn len(&mut self, start: u64) -> Result<Option<u64>, TraceError> {
        let mut len = 0u64;
        for shift in [0, 7, 14, 21] {
            let Some(byte) = self.byte()? else { return Ok(None) };
            len |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                let claim = || format!("it claims {len} bytes, at most {RECORD_BYTES_MAX}");
                return if len <= RECORD_BYTES_MAX { Ok(Some(len)) } else { Err(self.damaged(start, claim())) };
            }
        }
        Err(self.damaged(start, format!("it claims more than {RECORD_BYTES_MAX} bytes")))
    }

    fn io(&self, error: io::Error) -> TraceError {
        TraceError::Io { path: self.path.clone(), action: "read", error }
    }

    fn damaged(&self, offset: u64, reason: String) -> TraceError {
        TraceError::Record { path: self.path.clone(), offset, reason }
    }
}

impl<R: Read> Iterator for TraceReader<R> {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let next = self.record().transpose();
        self.is_done = !matches!(next, Some(Ok(_)));
        next
    }
}

/// Block number, experts of the layer, tokens and experts per token.
fn shape(fields: &mut Fields, header: &Header) -> Result<(u16, u64, usize, usize), String> {
    let number = fields.below(1 << 16, "the layer")? as u16;
    let described = header.layer(number).ok_or_else(|| format!("the model has no layer {number} with experts"))?;
    let n_expert = u64::from(described.n_expert);
    let n_tokens = fields.count(1, "the number of tokens")?;
    let n_used = fields.below(n_expert + 1, "the number of experts per token")? as usize;
    if n_tokens == 0 || n_used == 0 {
        return Err(format!("layer {number} has {n_tokens} tokens of {n_used} experts"));
    }
    Ok((number, n_expert, n_tokens, n_used))
}

/// Uses of experts, each of at least `least` bytes, so that capacities are bounded by the bytes read.
fn uses(fields: &Fields, n_tokens: usize, n_used: usize, least: usize) -> Result<usize, String> {
    let uses = n_tokens.checked_mul(n_used).filter(|uses| *uses <= fields.left() / least);
    uses.ok_or_else(|| format!("{n_tokens} tokens of {n_used} experts have no room in {} bytes", fields.left()))
}

fn executed(fields: &mut Fields, header: &Header) -> Result<Executed, String> {
    let (number, n_expert, n_tokens, n_used) = shape(fields, header)?;
    let uses = uses(fields, n_tokens, n_used, 1)?;
    let experts = (0..uses).map(|_| Ok(fields.below(n_expert, "an expert")? as u16)).collect::<Result<_, String>>()?;
    Ok(Executed { shape: (number, n_tokens as u32, n_used as u16), experts })
}

fn with_executed(mut record: LayerRecord, executed: Option<Executed>) -> Result<LayerRecord, String> {
    let Some(Executed { shape, experts }) = executed else { return Ok(record) };
    let own = (record.layer, record.n_tokens, record.n_used);
    if shape != own {
        let (layer, n_tokens, n_used) = shape;
        return Err(format!(
            "executed experts of layer {layer} ({n_tokens} tokens, {n_used} each) stand before layer {}",
            own.0
        ));
    }
    record.executed = experts;
    Ok(record)
}

fn layer(fields: &mut Fields, header: &Header) -> Result<LayerRecord, String> {
    let (number, n_expert, n_tokens, n_used) = shape(fields, header)?;
    let scores = fields.below(n_expert + 2, "the number of scores")? as usize;
    let (has_scores, n_unselected) = (scores > 0, scores.saturating_sub(1));
    let uses = uses(fields, n_tokens, n_used, 3)?;
    let mut record = LayerRecord::new(number, n_used as u16);
    record.n_tokens = n_tokens as u32; // at most the record's bytes
    record.chosen.reserve_exact(uses);
    record.weights.reserve_exact(uses);
    for _ in 0..n_tokens {
        for _ in 0..n_used {
            record.chosen.push(fields.below(n_expert, "an expert")? as u16);
        }
        for _ in 0..n_used {
            record.weights.push(fields.f16("a weight")?);
        }
        if has_scores {
            for _ in 0..n_used {
                record.scores.push(fields.f16("a score")?);
            }
            for _ in 0..n_unselected {
                record.unselected.push((fields.below(n_expert, "an expert")? as u16, fields.f16("a score")?));
            }
        }
    }
    for _ in 0..fields.count(4, "the number of predictions")? {
        let distance = fields.u8("a distance")?;
        // The predicted layer may have more experts than this one.
        let expert = fields.below(1 << 16, "a predicted expert")? as u16;
        let score = fields.f16("a score")?;
        if distance == 0 {
            return Err("a prediction has distance 0, expected 1 or more".into());
        }
        record.predictions.push(Prediction { token: 0, distance, expert, score });
    }
    for _ in 0..fields.count(2, "the number of needed experts")? {
        record.needed.push(needed(fields, n_expert)?);
    }
    record.wait_seconds = fields.seconds("the wait")?;
    record.compute_seconds = fields.seconds("the computation")?;
    // The list follows only if some predictions are not for the first token.
    if fields.left() > 0 {
        for prediction in &mut record.predictions {
            prediction.token = fields.below(n_tokens as u64, "a prediction's token")? as u16;
        }
    }
    Ok(record)
}

fn needed(fields: &mut Fields, n_expert: u64) -> Result<Needed, String> {
    let expert = fields.below(n_expert, "a needed expert")? as u16;
    let flags = fields.u8("an expert's flags")?;
    let (used, demand) = (PRECISIONS.get(usize::from(flags & 3)), DEMANDS.get(usize::from(flags >> 2 & 3)));
    let (Some(&used), Some(&demand), 0) = (used, demand, flags >> 7) else {
        return Err(format!("expert {expert} has flags {flags:#04x}"));
    };
    let class = CLASSES[usize::from(flags >> 5 & 3)];
    let bytes = if class.is_some() { fields.varint("bytes")? } else { 0 };
    Ok(Needed { expert, demand, used, hit: flags & 16 != 0, class, bytes })
}

/// A version of an expert of the model.
fn version(fields: &mut Fields, header: &Header) -> Result<Version, String> {
    let layer = fields.below(1 << 16, "the layer")? as u16;
    let described = header.layer(layer).ok_or_else(|| format!("the model has no layer {layer} with experts"))?;
    let index = fields.below(u64::from(described.n_expert), "the expert")? as u16;
    let precision = match fields.u8("the precision")? {
        0 => Precision::High,
        1 => Precision::Low,
        other => return Err(format!("the precision is {other}, expected 0 or 1")),
    };
    Ok(Version { expert: ExpertId { layer, index }, precision })
}

fn load(fields: &mut Fields, header: &Header) -> Result<Record, String> {
    let version = version(fields, header)?;
    let id = fields.u8("the class")?;
    let class = CLASSES.get(usize::from(id)).ok_or_else(|| format!("a read is of class {id}, expected 0 to 3"))?;
    let class = class.ok_or("the class of a read is 0, expected 1 to 3")?;
    Ok(Record::Load { version, class, bytes: fields.varint("bytes")? })
}

fn withdrawn(fields: &mut Fields, header: &Header) -> Result<Record, String> {
    Ok(Record::Withdrawn { version: version(fields, header)?, bytes: fields.varint("bytes")? })
}

fn residents(fields: &mut Fields, header: &Header) -> Result<Record, String> {
    let mut record = ResidentsRecord::default();
    for _ in 0..fields.count(3, "the number of residents")? {
        record.versions.push(version(fields, header)?);
    }
    let n = fields.count(1, "the number of bytes of statistics")?;
    record.statistics = fields.bytes(n, "the statistics")?.to_vec();
    Ok(Record::Residents(record))
}

fn measured(fields: &mut Fields) -> Result<Record, String> {
    let json = fields.bytes(fields.left(), "the numbers")?;
    let host = serde_json::from_slice(json).map_err(|error| format!("the machine's numbers: {error}"))?;
    Ok(Record::Measured { host })
}

fn batch(fields: &mut Fields) -> Result<Record, String> {
    let number = fields.u8("the phase")?;
    let phase = PHASES.get(usize::from(number)).copied();
    let phase = phase.ok_or_else(|| format!("the phase is {number}, expected 0 or 1"))?;
    let n_tokens = fields.below(1 << 32, "the number of tokens")? as u32;
    Ok(Record::Batch { phase, n_tokens, seconds: fields.seconds("the batch")? })
}
