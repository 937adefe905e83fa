//! Writing a pack: streaming, on several threads.
//!
//! Everything is written to `OUT.partial` at its final offset, the header last; then the file is renamed. So a file
//! named `OUT` is complete. Memory: a few megabytes per thread, whatever the size of an expert.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use xxhash_rust::xxh3::xxh3_64;

use super::bytes::{self, Interrupted};
use super::error::{UnpackError, WriteError};
use super::fingerprint::fingerprint;
use super::format::{ROW_BYTES, Sha256};
use super::job::{Jobs, Scratch};
use super::partial::{self, Partial, PartialError};
use super::plan::{Fallback, Job, PackSpec, PlainForm, Plan};
use super::{Pack, format, unpack};
use crate::files::{FileState, Input};
use crate::gguf::writer::Layout;
use crate::gguf::{Gguf, Recode, SourceFile, WriteError as HeaderError};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub path: PathBuf,
    pub bytes: u64,
    pub versions: usize,
    /// Types that did not fit, and their replacements.
    pub fallbacks: Vec<Fallback>,
    pub source_sha256: Sha256,
    /// Digest of the output of [`super::unpack()`], if a plain GGUF can express the pack.
    pub plain_sha256: Option<Sha256>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub stage: Stage,
    pub done: u64,
    pub total: u64,
    pub finished: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    Writing,
    /// Hashing the source, or the plain model of the pack.
    Hashing,
}

/// Called often; returns whether to continue.
pub(crate) type OnProgress<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// Writes the pack of `source` described by `spec` to `out`. Overwrites the partial file of a killed call.
///
/// # Errors
/// [`WriteError`]. The unfinished file is removed.
pub fn write(
    source: &Gguf,
    out: &Path,
    spec: &PackSpec<'_>,
    recode: &dyn Recode,
    progress: OnProgress<'_>,
) -> Result<Written, WriteError> {
    let read: Vec<_> = source.files.iter().map(|file| Input { flag: "the model", path: &file.path }).collect();
    partial::check(out, spec.force, &read)?;
    let plan = Plan::new(source, spec, recode, fingerprint(source)?)?;
    let bytes = plan.layout(Sha256([0; 32]), None)?.len;
    let partial = Partial::open(out, spec.force, bytes)?;
    let checksums = vec![None; plan.jobs.len()];
    let mut writer = Writer { plan: &plan, partial: &partial, progress, checksums, finished: 0 };
    let (source_sha256, plain_sha256) = partial.finish(writer.fill(recode))?;
    let (path, versions, fallbacks) = (out.to_owned(), plan.rows.len(), plan.fallbacks);
    Ok(Written { path, bytes, versions, fallbacks, source_sha256, plain_sha256 })
}

enum Message {
    Done(usize, u64),
    Digest(Sha256),
    Failed(WriteError),
}

struct Writer<'a> {
    plan: &'a Plan<'a>,
    partial: &'a Partial,
    progress: OnProgress<'a>,
    checksums: Vec<Option<u64>>,
    finished: usize,
}

impl Writer<'_> {
    /// Writes the whole pack; returns the digests of the source and of the plain model.
    fn fill(&mut self, recode: &dyn Recode) -> Result<(Sha256, Option<Sha256>), WriteError> {
        let plan = self.plan;
        let digest = self.run_jobs(recode)?;
        let is_changed = |file: &&SourceFile| FileState::at(&file.path).is_ok_and(|now| now != file.state);
        if let Some(file) = plan.source.files.iter().find(is_changed) {
            return Err(WriteError::SourceChanged { path: file.path.clone() });
        }
        self.finish_file(&plan.layout(digest, None)?)?;
        let plain = match plan.plain {
            PlainForm::Source => Some(digest),
            PlainForm::None => None,
            PlainForm::Changed => {
                let plain = self.plain_digest()?;
                self.finish_file(&plan.layout(digest, Some(plain))?)?;
                Some(plain)
            }
        };
        Ok((digest, plain))
    }

    fn tell(&mut self, stage: Stage, done: u64, total: u64) -> Result<(), WriteError> {
        match (self.progress)(Progress { stage, done, total, finished: self.finished }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(self.partial.stopped().into()),
        }
    }

    /// Runs all jobs and hashes the source; returns the digest.
    fn run_jobs(&mut self, recode: &dyn Recode) -> Result<Sha256, WriteError> {
        let (plan, threads) = (self.plan, self.plan.spec.threads.max(1));
        let open = |(file, i): (&SourceFile, u32)| File::open(&file.path).map_err(|error| plan.source_error(i, error));
        let files = plan.source.files.iter().zip(0..).map(open).collect::<Result<Vec<File>, WriteError>>()?;
        let total: u64 = plan.targets.iter().map(|target| target.len).sum();
        let (next, hashed, stop) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let (partial, written) = (self.partial, AtomicU64::new(0));
        let jobs = Jobs { plan, recode, files: &files, partial, written, stop: &stop };
        let (mut failure, mut digest) = (None, None);
        std::thread::scope(|scope| {
            let (send, receive) = bounded(2 * threads);
            for _ in 0..threads.min(plan.jobs.len()) {
                let send = send.clone();
                scope.spawn(|| worker(&jobs, &next, send));
            }
            scope.spawn(|| hasher(plan, &files, &hashed, &stop, send));
            loop {
                let received = match receive.recv_timeout(Duration::from_millis(100)) {
                    Ok(Message::Failed(error)) => Err(error),
                    Err(RecvTimeoutError::Disconnected) => break,
                    Ok(Message::Done(job, checksum)) => {
                        self.checksums[job] = Some(checksum);
                        self.finished += 1;
                        Ok(())
                    }
                    Ok(Message::Digest(found)) => {
                        digest = Some(found);
                        Ok(())
                    }
                    Err(RecvTimeoutError::Timeout) => Ok(()),
                };
                let (done, read) = (jobs.written.load(Ordering::Relaxed), hashed.load(Ordering::Relaxed));
                let told = received.and_then(|()| match self.finished < plan.jobs.len() {
                    _ if failure.is_some() => Ok(()),
                    true => self.tell(Stage::Writing, done.min(total), total),
                    false => self.tell(Stage::Hashing, read, plan.source_size),
                });
                if let Err(error) = told {
                    stop.store(true, Ordering::Relaxed);
                    failure.get_or_insert(error);
                }
            }
        });
        failure.map_or(Ok(()), Err)?;
        digest.ok_or_else(|| self.partial.stopped().into())
    }

    /// Writes everything that is neither a tensor of the model nor a record.
    fn finish_file(&mut self, layout: &Layout) -> Result<(), WriteError> {
        let plan = self.plan;
        let mut index = Vec::with_capacity(plan.rows.len() * ROW_BYTES);
        let mut checksums = Vec::new();
        for (job, checksum) in plan.jobs.iter().zip(&self.checksums) {
            let checksum = checksum.expect("every job is finished");
            match job {
                Job::Tensor(_) => checksums.extend(checksum.to_le_bytes()),
                Job::Record(row) => {
                    let row = format::Row { checksum, ..plan.rows[*row] };
                    let bytes = row.encode().ok_or_else(|| {
                        let dtype = row.types.iter().map(|(_, dtype)| dtype).max_by_key(|dtype| dtype.id());
                        let name = dtype.map_or_else(String::new, |dtype| dtype.to_string());
                        let fault = "has an id of more than 8 bits";
                        plan.header_error(HeaderError::Name { what: "type", name, fault })
                    })?;
                    index.extend(bytes);
                }
            }
        }
        for part in [&plan.source_header, &index, &Vec::new(), &layout.header] {
            checksums.extend(xxh3_64(part).to_le_bytes());
        }
        for (name, bytes) in
            [(format::HEADER, &plan.source_header), (format::INDEX, &index), (format::CHECKSUMS, &checksums)]
        {
            let Some(tensor) = layout.tensors.iter().find(|tensor| tensor.name == name) else { continue };
            debug_assert_eq!(tensor.extent.len, bytes.len() as u64);
            self.partial.write(bytes, tensor.extent.offset)?;
        }
        self.partial.write(&layout.header, 0)?;
        Ok(self.partial.set_len(layout.len)?)
    }

    /// Digest of the plain model with the high versions' types.
    fn plain_digest(&mut self) -> Result<Sha256, WriteError> {
        let path = &self.partial.path;
        let pack = Pack::open(path).map_err(WriteError::ReadBack)?;
        let finished = self.finished;
        let progress = &mut *self.progress;
        let mut tell = |done, total| progress(Progress { stage: Stage::Hashing, done, total, finished });
        unpack::digest(&pack, &mut tell).map_err(|error| match error {
            UnpackError::Output(PartialError::Stopped { .. }) => self.partial.stopped().into(),
            UnpackError::Pack(error) => WriteError::ReadBack(error),
            other => WriteError::ReadBack(super::PackError::malformed(path, "plain model", other, "one digest")),
        })
    }
}

fn worker(jobs: &Jobs<'_>, next: &AtomicUsize, send: Sender<Message>) {
    let mut scratch = Scratch::default();
    while !jobs.stop.load(Ordering::Relaxed) {
        let job = next.fetch_add(1, Ordering::Relaxed);
        if job >= jobs.plan.jobs.len() {
            return;
        }
        let message = match jobs.run(job, &mut scratch) {
            Ok(checksum) => Message::Done(job, checksum),
            Err(WriteError::Output(PartialError::Stopped { .. })) => return,
            Err(error) => Message::Failed(error),
        };
        // Sending fails only without a receiver, and the receiver outlives all senders.
        let _ = send.send(message);
    }
}

fn hasher(plan: &Plan<'_>, files: &[File], hashed: &AtomicU64, stop: &AtomicBool, send: Sender<Message>) {
    let count = |bytes: &[u8]| {
        hashed.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if stop.load(Ordering::Relaxed) { Err(()) } else { Ok(()) }
    };
    // A plain model's segments all have a source.
    let message = match bytes::digest(&plan.source.one_file(), files, |_| Vec::new(), count) {
        Ok(digest) => Message::Digest(digest),
        Err(Interrupted::Sink(())) => return,
        Err(Interrupted::Read(file, error)) => Message::Failed(plan.source_error(file, error)),
    };
    let _ = send.send(message);
}
