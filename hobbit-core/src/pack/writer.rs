//! The jobs of a plan, on several threads; one thread collects the checksums and reports the progress.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use sha2::Digest;
use xxhash_rust::xxh3::xxh3_64;

use super::bytes::{self, Interrupted, write_all_at};
use super::error::{WriteError, output};
use super::format::{ROW_BYTES, Sha256};
use super::job::{Jobs, Scratch};
use super::plan::{Job, Plan};
use super::progress::{OnProgress, Progress, Stage};
use super::{Pack, format, unpack};
use crate::gguf::writer::Layout;
use crate::gguf::{Recode, SourceFile, WriteError as HeaderError};

/// The result of a thread's work.
enum Message {
    Done(usize, u64),
    Digest(Sha256),
    Failed(WriteError),
}

/// A writer at work.
pub(super) struct Writer<'a> {
    pub plan: &'a Plan<'a>,
    pub partial: &'a Path,
    pub file: &'a File,
    pub progress: OnProgress<'a>,
    /// Checksum of each finished job.
    pub checksums: Vec<Option<u64>>,
    /// Number of finished jobs.
    pub finished: usize,
}

impl Writer<'_> {
    fn tell(&mut self, stage: Stage, done: u64, total: u64) -> Result<(), WriteError> {
        match (self.progress)(Progress { stage, done, total, finished: self.finished }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WriteError::Stopped { path: self.partial.to_owned() }),
        }
    }

    /// Runs all jobs and hashes the source; returns the digest.
    pub fn work(&mut self, recode: &dyn Recode) -> Result<Sha256, WriteError> {
        let (plan, threads) = (self.plan, self.plan.spec.threads.max(1));
        let open = |(file, i): (&SourceFile, u32)| File::open(&file.path).map_err(|error| plan.source_error(i, error));
        let files = plan.source.files.iter().zip(0..).map(open).collect::<Result<Vec<File>, WriteError>>()?;
        let total: u64 = plan.targets.iter().map(|target| target.len).sum();
        let (next, hashed, stop) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let (written, partial) = (AtomicU64::new(0), self.partial);
        let jobs = Jobs { plan, recode, files: &files, out: self.file, partial, written, stop: &stop };
        let (mut failure, mut digest) = (None, None);
        std::thread::scope(|scope| {
            let (send, receive) = bounded(2 * threads);
            for _ in 0..threads.min(plan.jobs.len()) {
                let send = send.clone();
                scope.spawn(|| worker(&jobs, &next, send));
            }
            scope.spawn(|| hasher(plan, &files, &hashed, &stop, send));
            loop {
                let told = match receive.recv_timeout(Duration::from_millis(100)) {
                    Ok(Message::Done(job, checksum)) => {
                        self.checksums[job] = Some(checksum);
                        self.finished += 1;
                        Ok(())
                    }
                    Ok(Message::Digest(found)) => {
                        digest = Some(found);
                        Ok(())
                    }
                    Ok(Message::Failed(error)) => Err(error),
                    Err(RecvTimeoutError::Timeout) => Ok(()),
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                let (done, read) = (jobs.written.load(Ordering::Relaxed), hashed.load(Ordering::Relaxed));
                let told = told.and_then(|()| match self.finished < plan.jobs.len() {
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
        match (failure, digest) {
            (Some(error), _) => Err(error),
            (None, Some(digest)) => Ok(digest),
            (None, None) => Err(WriteError::Stopped { path: self.partial.to_owned() }),
        }
    }

    /// Writes everything that is neither a tensor of the model nor a record.
    pub fn finish_file(&mut self, layout: &Layout) -> Result<(), WriteError> {
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
                        let error = HeaderError::Name {
                            what: "type",
                            name: dtype.map_or_else(String::new, |dtype| dtype.to_string()),
                            fault: "has an id of more than 8 bits",
                        };
                        WriteError::Header { path: plan.source.files[0].path.clone(), error }
                    })?;
                    index.extend(bytes);
                }
            }
        }
        for part in [&plan.source_header, &index, &plan.gaps, &layout.header] {
            checksums.extend(xxh3_64(part).to_le_bytes());
        }
        let parts = [
            (format::HEADER, &plan.source_header),
            (format::GAPS, &plan.gaps),
            (format::PATHS, &plan.paths),
            (format::INDEX, &index),
            (format::CHECKSUMS, &checksums),
        ];
        let write = |bytes: &[u8], at| write_all_at(self.file, bytes, at).map_err(output(self.partial, "write"));
        for (name, bytes) in parts {
            let Some(tensor) = layout.tensors.iter().find(|tensor| tensor.name == name) else { continue };
            debug_assert_eq!(tensor.extent.len, bytes.len() as u64);
            write(bytes, tensor.extent.offset)?;
        }
        write(&layout.header, 0)?;
        self.file.set_len(layout.len).map_err(output(self.partial, "set the length of"))
    }

    /// Digest of the plain model with the high versions' types.
    pub fn plain_digest(&mut self) -> Result<Sha256, WriteError> {
        let pack = Pack::open(self.partial).map_err(WriteError::ReadBack)?;
        let (partial, finished) = (self.partial, self.finished);
        let progress = &mut *self.progress;
        let mut tell = |done, total| progress(Progress { stage: Stage::Hashing, done, total, finished });
        unpack::digest(&pack, &mut tell).map_err(|error| match error {
            unpack::UnpackError::Stopped { .. } => WriteError::Stopped { path: partial.to_owned() },
            unpack::UnpackError::Pack(error) => WriteError::ReadBack(error),
            other => WriteError::ReadBack(super::PackError::malformed(partial, "plain model", other, "one digest")),
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
            Err(WriteError::Stopped { .. }) => return,
            Err(error) => Message::Failed(error),
        };
        // Sending fails only without a receiver, and the receiver outlives all senders.
        let _ = send.send(message);
    }
}

fn hasher(plan: &Plan<'_>, files: &[File], hashed: &AtomicU64, stop: &AtomicBool, send: Sender<Message>) {
    let mut hash = sha2::Sha256::new();
    let walked = bytes::walk(
        &plan.source.one_file(),
        files,
        |_| Vec::new(), // a plain model's segments all have a source
        |bytes| {
            hash.update(bytes);
            hashed.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            if stop.load(Ordering::Relaxed) { Err(()) } else { Ok(()) }
        },
    );
    let message = match walked {
        Ok(()) => Message::Digest(Sha256(hash.finalize().into())),
        Err(Interrupted::Sink(())) => return,
        Err(Interrupted::Read(file, error)) => Message::Failed(plan.source_error(file, error)),
    };
    let _ = send.send(message);
}
