//! One job of a writer: copying a tensor, or making a record of an expert's slices. Streaming: whatever the size of an
//! expert, a thread holds a few megabytes.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xxhash_rust::xxh3::Xxh3;

use super::bytes::{self, read_exact_at, write_all_at};
use super::error::{WriteError, output};
use super::plan::{Job, Plan, importance_of};
use crate::expert::Extent;
use crate::gguf::{ExpertTensor, GgmlType, Recode};

/// Of a recoded slice, bytes of its rows at a time as 32-bit floats.
const CHUNK: u64 = 4 << 20;

/// What all jobs share.
pub(super) struct Jobs<'a> {
    pub plan: &'a Plan<'a>,
    pub recode: &'a dyn Recode,
    /// Of the source.
    pub files: &'a [File],
    pub out: &'a File,
    pub partial: &'a Path,
    /// Bytes of all jobs.
    pub written: AtomicU64,
    /// Somebody asked for an end.
    pub stop: &'a AtomicBool,
}

/// A thread's buffers.
#[derive(Default)]
pub(super) struct Scratch {
    read: Vec<u8>,
    made: Vec<u8>,
}

/// Writes at the target's next byte and hashes what it writes.
struct Target<'a> {
    jobs: &'a Jobs<'a>,
    at: u64,
    hash: Xxh3,
}

impl Target<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        write_all_at(self.jobs.out, bytes, self.at).map_err(output(self.jobs.partial, "write"))?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        self.jobs.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        match self.jobs.stop.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(WriteError::Stopped { path: self.jobs.partial.to_owned() }),
        }
    }
}

impl Jobs<'_> {
    /// Does the job and answers the xxh3-64 of what it wrote.
    pub fn run(&self, job: usize, scratch: &mut Scratch) -> Result<u64, WriteError> {
        let start = self.plan.targets[job].offset;
        let mut target = Target { jobs: self, at: start, hash: Xxh3::new() };
        match self.plan.jobs[job] {
            Job::Tensor(i) => self.copy(self.plan.source.tensors[i].extent, &mut target, scratch)?,
            Job::Record(row) => {
                let row = &self.plan.rows[row];
                let layer = self.plan.layer(row);
                let class = row.types.class(layer).expect("the plan chose types that fit the rows");
                for (tensor, slice) in layer.tensors.iter().zip(&class.slices) {
                    let extent = tensor.extent(row.version.expert.index);
                    match slice.dtype == tensor.dtype {
                        true => self.copy(extent, &mut target, scratch)?,
                        false => {
                            self.slice(tensor, row.version.expert.index, slice.dtype, extent, &mut target, scratch)?
                        }
                    }
                    let padding = start + slice.region + slice.capacity - target.at;
                    target.put(&vec![0; padding as usize])?; // less than a block
                }
            }
        }
        Ok(target.hash.digest())
    }

    fn copy(&self, source: Extent, target: &mut Target<'_>, scratch: &mut Scratch) -> Result<(), WriteError> {
        let file = &self.files[source.file as usize];
        bytes::read(file, source, &mut scratch.read, |bytes| target.put(bytes))
            .map_err(|ended| ended.or_read(|file, error| self.plan.source_error(file, error)))
    }

    fn slice(
        &self,
        tensor: &ExpertTensor,
        index: u16,
        to: GgmlType,
        source: Extent,
        target: &mut Target<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), WriteError> {
        let row_bytes = source.len / tensor.ne1;
        let rows_max = (CHUNK / (4 * tensor.ne0)).max(1);
        let importance = importance_of(self.plan.spec.importance, tensor, index)?;
        let fault = |error| WriteError::Recode { tensor: format!("{}[{index}]", tensor.name), error };
        let mut row = 0;
        while row < tensor.ne1 {
            let n = rows_max.min(tensor.ne1 - row);
            scratch.read.resize((n * row_bytes) as usize, 0);
            read_exact_at(&self.files[source.file as usize], &mut scratch.read, source.offset + row * row_bytes)
                .map_err(|error| self.plan.source_error(source.file, error))?;
            scratch.made.clear();
            let (columns, made) = (importance.as_deref(), &mut scratch.made);
            self.recode.recode(tensor.dtype, to, tensor.ne0, &scratch.read, columns, made).map_err(fault)?;
            let (found, expected) = (scratch.made.len() as u64, to.row_bytes(tensor.ne0).map_or(0, |bytes| bytes * n));
            if found != expected {
                let tensor = format!("{}[{index}]", tensor.name);
                return Err(WriteError::RecodedLength { tensor, found, expected });
            }
            target.put(&scratch.made)?;
            row += n;
        }
        Ok(())
    }
}
