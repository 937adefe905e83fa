//! One job of a writer: copying a tensor, or making a record of an expert's slices. Jobs stream: a thread holds a few
//! megabytes, whatever the size of an expert.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xxhash_rust::xxh3::Xxh3;

use super::bit_planes::{self, Planes};
use super::bytes;
use super::error::WriteError;
use super::format::Row;
use super::partial::Partial;
use super::plan::{Job, Plan, importance_of};
use crate::expert::{Extent, Precision, Version};
use crate::files::FileExt;
use crate::gguf::{ExpertClass, ExpertTensor, GgmlType, LayerExperts, Recode, RecodeError};
use crate::planes;
use crate::store::BLOCK_BYTES;

/// Bytes of a recoded slice's rows converted at a time, as 32-bit floats.
const CHUNK: u64 = 4 << 20;

pub(super) struct Jobs<'a> {
    pub plan: &'a Plan<'a>,
    pub recode: &'a dyn Recode,
    pub files: &'a [File],
    pub partial: &'a Partial,
    pub written: AtomicU64,
    pub stop: &'a AtomicBool,
}

#[derive(Default)]
pub(super) struct Scratch {
    read: Vec<u8>,
    made: Vec<u8>,
    high: Vec<u8>,
    low: Vec<u8>,
}

/// Writes at the target's next byte and hashes what it writes.
struct Target<'a> {
    jobs: &'a Jobs<'a>,
    at: u64,
    hash: Xxh3,
}

impl Target<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.jobs.partial.write(bytes, self.at)?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        self.jobs.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if self.jobs.stop.load(Ordering::Relaxed) { Err(self.jobs.partial.stopped().into()) } else { Ok(()) }
    }

    /// Writes zeros up to `end`, which is less than a block away.
    fn pad(&mut self, end: u64) -> Result<(), WriteError> {
        self.put(&vec![0; (end - self.at) as usize])
    }
}

impl Jobs<'_> {
    /// Runs the job and returns the xxh3-64 of its bytes.
    pub fn run(&self, job: usize, scratch: &mut Scratch) -> Result<u64, WriteError> {
        let start = self.plan.targets[job].offset;
        let mut target = Target { jobs: self, at: start, hash: Xxh3::new() };
        match self.plan.jobs[job] {
            Job::Tensor(i) => self.copy(self.plan.source.tensors[i].extent, &mut target, scratch)?,
            Job::Record(row) => {
                let row = &self.plan.rows[row];
                let layer = self.plan.layer(row);
                let class = row.types.class(layer).expect("the plan chose types that fit the rows");
                if self.plan.spec.bit_planes {
                    self.planes(row, layer, &class, &mut target, scratch)?;
                    return Ok(target.hash.digest());
                }
                for (tensor, slice) in layer.tensors.iter().zip(&class.slices) {
                    let index = row.version.expert.index;
                    if slice.dtype == tensor.dtype {
                        self.copy(tensor.extent(index), &mut target, scratch)?;
                    } else {
                        self.rows(tensor, index, slice.dtype, scratch, |rows, _| target.put(rows))?;
                    }
                    target.pad(start + slice.region + slice.capacity)?;
                }
            }
        }
        Ok(target.hash.digest())
    }

    fn planes(
        &self,
        row: &Row,
        layer: &LayerExperts,
        class: &ExpertClass,
        target: &mut Target<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), WriteError> {
        let Version { expert, precision } = row.version;
        let (start, parts) = (target.at, Planes::of(class, precision).expect("the plan has placed it"));
        for (tensor, (at, bytes)) in layer.tensors.iter().zip(&parts.slices) {
            let index = expert.index;
            self.rows(tensor, index, bit_planes::type_of(Precision::High), scratch, |rows, [high, low]| {
                let n_blocks = rows.len() / planes::Q8_0_BYTES;
                high.resize(n_blocks * planes::HIGH_BYTES, 0);
                low.resize(n_blocks * planes::LOW_BYTES, 0);
                if !planes::split(rows, high, low) {
                    return Err(WriteError::Scale { tensor: format!("{}[{index}]", tensor.name) });
                }
                target.put(if precision == Precision::Low { high } else { low })
            })?;
            target.pad(start + (at + bytes).next_multiple_of(BLOCK_BYTES))?;
        }
        Ok(())
    }

    fn copy(&self, source: Extent, target: &mut Target<'_>, scratch: &mut Scratch) -> Result<(), WriteError> {
        let file = &self.files[source.file as usize];
        bytes::read(file, source, &mut scratch.read, |bytes| target.put(bytes))
            .map_err(|ended| ended.or_read(|file, error| self.plan.source_error(file, error)))
    }

    /// Passes an expert's rows of a tensor to `sink`, some at a time and in this type, with room for the output.
    fn rows(
        &self,
        tensor: &ExpertTensor,
        index: u16,
        to: GgmlType,
        Scratch { read, made, high, low }: &mut Scratch,
        mut sink: impl FnMut(&[u8], [&mut Vec<u8>; 2]) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        let source = tensor.extent(index);
        let row_bytes = source.len / tensor.ne1;
        let rows_max = (CHUNK / (4 * tensor.ne0)).max(1);
        let is_recoded = to != tensor.dtype;
        let importance = if is_recoded { importance_of(self.plan.spec.importance, tensor, index)? } else { None };
        let fault = |error| WriteError::Recode { tensor: format!("{}[{index}]", tensor.name), error };
        let mut row = 0;
        while row < tensor.ne1 {
            let n = rows_max.min(tensor.ne1 - row);
            read.resize((n * row_bytes) as usize, 0);
            let read_rows = self.files[source.file as usize].read_exact_at(read, source.offset + row * row_bytes);
            read_rows.map_err(|error| self.plan.source_error(source.file, error))?;
            if is_recoded {
                made.clear();
                self.recode.recode(tensor.dtype, to, tensor.ne0, read, importance.as_deref(), made).map_err(fault)?;
                // Whole rows of the new type, as many as were read.
                let row_bytes = to.row_bytes(tensor.ne0).unwrap_or(0);
                let found = made.len() as u64;
                if found != row_bytes * n {
                    return Err(fault(RecodeError::DataLength { dtype: to, n_per_row: tensor.ne0, row_bytes, found }));
                }
            }
            sink(if is_recoded { made } else { read }, [high, low])?;
            row += n;
        }
        Ok(())
    }
}
