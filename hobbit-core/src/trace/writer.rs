//! Appending records to a trace.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use super::bytes::{put_f16, put_f32, put_varint};
use super::header::{HEADER_BYTES_MAX, Header, MAGIC, VERSION};
use super::record::{CLASSES, DEMANDS, LayerRecord, Needed, PHASES, PRECISIONS, ReadClass, ResidentsRecord};
use super::{TraceError, reader};
use crate::expert::Version;
use crate::route::Phase;

/// Size of the buffer before the file is written.
const BUFFER_BYTES: usize = 256 << 10;

/// Writes a trace. Records are buffered up to 256 KiB; in the steady state a record allocates nothing.
#[derive(Debug)]
pub struct TraceWriter<W: Write> {
    out: W,
    buffer: Vec<u8>,
    payload: Vec<u8>,
    /// Bytes written to `out`, whole records only.
    whole: u64,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// [`TraceError::Io`]; [`TraceError::Unwritable`] for a header that readers would refuse.
    pub fn new(out: W, header: &Header) -> Result<Self, TraceError> {
        let unwritable = |reason: String| TraceError::Unwritable { reason };
        header.check().map_err(unwritable)?;
        let json = serde_json::to_vec(header).map_err(|error| unwritable(error.to_string()))?;
        let len = u32::try_from(json.len()).ok().filter(|len| *len <= HEADER_BYTES_MAX);
        let len = len.ok_or_else(|| unwritable(format!("the header has {} bytes", json.len())))?;
        let mut buffer = Vec::with_capacity(BUFFER_BYTES + (16 << 10));
        buffer.extend_from_slice(&MAGIC);
        buffer.extend_from_slice(&VERSION.to_le_bytes());
        buffer.extend_from_slice(&[0; 2]);
        buffer.extend_from_slice(&len.to_le_bytes());
        buffer.extend_from_slice(&json);
        let mut writer = Self { out, buffer, payload: Vec::new(), whole: 0 };
        writer.flush()?;
        Ok(writer)
    }

    /// Records the start of a new sequence.
    pub fn sequence(&mut self) -> Result<(), TraceError> {
        self.payload.clear();
        self.append(reader::SEQUENCE)
    }

    /// Records one layer of the batch that the next [`TraceWriter::batch`] ends.
    pub fn layer(&mut self, record: &LayerRecord) -> Result<(), TraceError> {
        check(record).map_err(|reason| TraceError::Unwritable { reason })?;
        if !record.executed.is_empty() {
            self.payload.clear();
            put_shape(&mut self.payload, record);
            record.executed.iter().for_each(|&expert| put_varint(&mut self.payload, u64::from(expert)));
            self.append(reader::EXECUTED)?;
        }
        let out = &mut self.payload;
        out.clear();
        put_shape(out, record);
        let (n_used, n_unselected) = (usize::from(record.n_used), record.n_unselected());
        put_varint(out, if record.scores.is_empty() { 0 } else { n_unselected as u64 + 1 });
        for token in 0..record.n_tokens as usize {
            let of_token = token * n_used..(token + 1) * n_used;
            record.chosen[of_token.clone()].iter().for_each(|&expert| put_varint(out, u64::from(expert)));
            record.weights[of_token.clone()].iter().for_each(|&weight| put_f16(out, weight));
            if !record.scores.is_empty() {
                record.scores[of_token].iter().for_each(|&score| put_f16(out, score));
                for &(expert, score) in &record.unselected[token * n_unselected..(token + 1) * n_unselected] {
                    put_varint(out, u64::from(expert));
                    put_f16(out, score);
                }
            }
        }
        put_varint(out, record.predictions.len() as u64);
        for prediction in &record.predictions {
            out.push(prediction.distance);
            put_varint(out, u64::from(prediction.expert));
            put_f16(out, prediction.score);
        }
        put_varint(out, record.needed.len() as u64);
        for needed in &record.needed {
            put_varint(out, u64::from(needed.expert));
            out.push(flags(needed));
            if needed.class.is_some() {
                put_varint(out, needed.bytes);
            }
        }
        put_f32(out, record.wait_seconds);
        put_f32(out, record.compute_seconds);
        if record.predictions.iter().any(|prediction| prediction.token > 0) {
            record.predictions.iter().for_each(|prediction| put_varint(out, u64::from(prediction.token)));
        }
        self.append(reader::LAYER)
    }

    /// Records the start of a read without a waiting product.
    pub fn load(&mut self, version: Version, class: ReadClass, bytes: u64) -> Result<(), TraceError> {
        let out = &mut self.payload;
        out.clear();
        put_version(out, version);
        out.push(code(&CLASSES, Some(class)));
        put_varint(out, bytes);
        self.append(reader::LOAD)
    }

    /// Records an evaluated batch of `n_tokens` tokens and its wall time in seconds.
    pub fn batch(&mut self, phase: Phase, n_tokens: u32, seconds: f32) -> Result<(), TraceError> {
        let out = &mut self.payload;
        out.clear();
        out.push(code(&PHASES, phase));
        put_varint(out, u64::from(n_tokens));
        put_f32(out, seconds);
        self.append(reader::BATCH)
    }

    /// Records that a background read was withdrawn before it started.
    pub fn withdrawn(&mut self, version: Version, bytes: u64) -> Result<(), TraceError> {
        let out = &mut self.payload;
        out.clear();
        put_version(out, version);
        put_varint(out, bytes);
        self.append(reader::WITHDRAWN)
    }

    /// Records the residents before the first batch.
    pub fn residents(&mut self, record: &ResidentsRecord) -> Result<(), TraceError> {
        let out = &mut self.payload;
        out.clear();
        put_varint(out, record.versions.len() as u64);
        record.versions.iter().for_each(|&version| put_version(out, version));
        put_varint(out, record.statistics.len() as u64);
        out.extend_from_slice(&record.statistics);
        self.append(reader::RESIDENTS)
    }

    /// Records the current measurements of the machine.
    pub fn measured(&mut self, host: &BTreeMap<String, f64>) -> Result<(), TraceError> {
        let unwritable = |reason: String| TraceError::Unwritable { reason };
        if let Some((name, value)) = host.iter().find(|(_, value)| !value.is_finite()) {
            return Err(unwritable(format!("{name} is {value}, expected a finite number")));
        }
        self.payload.clear();
        serde_json::to_writer(&mut self.payload, host).map_err(|error| unwritable(error.to_string()))?;
        self.append(reader::MEASURED)
    }

    /// Bytes written to the file, all of them whole records: after a record that failed half-way, the file can be
    /// truncated here.
    pub fn whole_bytes(&self) -> u64 {
        self.whole
    }

    pub fn get_ref(&self) -> &W {
        &self.out
    }

    /// Writes the buffer to the file.
    ///
    /// # Errors
    /// [`TraceError::Io`]: part of the buffer may have been written; the buffer is dropped.
    pub fn flush(&mut self) -> Result<(), TraceError> {
        let written = self.out.write_all(&self.buffer).and_then(|()| self.out.flush());
        self.whole += if written.is_ok() { self.buffer.len() as u64 } else { 0 };
        self.buffer.clear();
        written.map_err(|error| TraceError::Io { path: PathBuf::new(), action: "write", error })
    }

    pub fn finish(mut self) -> Result<W, TraceError> {
        self.flush()?;
        Ok(self.out)
    }

    fn append(&mut self, tag: u8) -> Result<(), TraceError> {
        let len = self.payload.len() as u64;
        if len > reader::RECORD_BYTES_MAX {
            let reason = format!("a record has {len} bytes, at most {} are allowed", reader::RECORD_BYTES_MAX);
            return Err(TraceError::Unwritable { reason });
        }
        self.buffer.push(tag);
        put_varint(&mut self.buffer, len);
        self.buffer.extend_from_slice(&self.payload);
        if self.buffer.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }
}

/// Used precision in bits 0 and 1 (2: skipped), demand in 2 and 3, hit in 4, reason of the read in 5 and 6.
fn flags(needed: &Needed) -> u8 {
    let (used, demand) = (code(&PRECISIONS, needed.used), code(&DEMANDS, needed.demand));
    used | demand << 2 | u8::from(needed.hit) << 4 | code(&CLASSES, needed.class) << 5
}

fn code<T: PartialEq>(table: &[T], value: T) -> u8 {
    table.iter().position(|known| *known == value).expect("tables are complete") as u8
}

fn put_shape(out: &mut Vec<u8>, record: &LayerRecord) {
    put_varint(out, u64::from(record.layer));
    put_varint(out, u64::from(record.n_tokens));
    put_varint(out, u64::from(record.n_used));
}

fn put_version(out: &mut Vec<u8>, version: Version) {
    put_varint(out, u64::from(version.expert.layer));
    put_varint(out, u64::from(version.expert.index));
    out.push(version.precision.index() as u8);
}

/// Checks that the lengths of the lists agree.
fn check(record: &LayerRecord) -> Result<(), String> {
    let uses = record.n_tokens as usize * usize::from(record.n_used);
    let layer = record.layer;
    if record.n_tokens == 0 || record.n_used == 0 {
        return Err(format!("layer {layer} has {} tokens of {} experts", record.n_tokens, record.n_used));
    }
    for (what, found, is_optional) in [
        ("experts", record.chosen.len(), false),
        ("executed experts", record.executed.len(), true),
        ("weights", record.weights.len(), false),
        ("scores", record.scores.len(), true),
    ] {
        if found != uses && !(is_optional && found == 0) {
            return Err(format!("layer {layer} has {found} {what}, expected {uses}"));
        }
    }
    let is_even = record.unselected.len() == record.n_unselected() * record.n_tokens as usize;
    if !is_even || (record.scores.is_empty() && !record.unselected.is_empty()) {
        return Err(format!(
            "layer {layer} has {} unselected experts, expected as many for every token",
            record.unselected.len()
        ));
    }
    if record.predictions.iter().any(|prediction| prediction.distance == 0) {
        return Err(format!("layer {layer} has a prediction of distance 0, expected 1 or more"));
    }
    if let Some(prediction) =
        record.predictions.iter().find(|prediction| u32::from(prediction.token) >= record.n_tokens)
    {
        let (token, n_tokens) = (prediction.token, record.n_tokens);
        return Err(format!("layer {layer} has a prediction for token {token} of {n_tokens}"));
    }
    if [record.wait_seconds, record.compute_seconds].iter().any(|s| !(0.0..=f32::MAX).contains(s)) {
        return Err(format!("layer {layer} took {} + {} seconds", record.wait_seconds, record.compute_seconds));
    }
    Ok(())
}
