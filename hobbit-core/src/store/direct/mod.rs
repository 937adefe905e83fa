//! `io_uring` and `O_DIRECT`: past the page cache, many operations in flight, one thread that mostly sleeps.
//!
//! Random slices of a 4 GiB file, all queued at once, huge-page slots, chunks of 1 MiB, 16 operations (virtual machine
//! of 2 cores, virtio disk, where `dd iflag=direct bs=4M`, one request at a time, gets 1.2 GB/s):
//!
//! ```text
//!   slices in flight        1     2     4     8    16
//!   1.6 MB    GB/s        2.9   3.4   3.5   3.5   3.5
//!   15.6 MB   GB/s        3.7   3.7   3.8                  CPU: 0.01-0.02 s per GiB (1.6 MB one at a time: 0.04)
//!   buffered, not in the page cache: 1.0-1.6 GB/s, CPU 0.3-0.5 s per GiB; in it: 8-19 GB/s, 0.04-0.08 s per GiB
//! ```
//!
//! The file was written minutes before: the host may have served part of it from its own memory.
//!
//! Chunks of 512 KiB to 4 MiB and 8 to 32 operations differ by less than the noise; below 512 KiB the CPU time grows.
//! Registered buffers gained nothing (15.6 MB, two in flight: 3.45 and 3.46 GB/s with, 3.25 and 3.64 without; equal
//! CPU time), so there are none.

mod ring;
mod slices;
mod units;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Sender, bounded, unbounded};

use self::ring::{Bell, Command, Reader};
use super::StoreError;
use super::original::OpenFile;
use super::probe;
use super::request::{Completion, ReadDone, ReadRequest};
use super::{BLOCK_BYTES, Store, threads};

/// Name of the engine that reads past the page cache.
pub(super) const ENGINE: &str = "direct";

/// Settings of the direct engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectOptions {
    /// Operations that the kernel holds at a time.
    pub depth: u32,
    /// Bytes of one operation, a multiple of [`BLOCK_BYTES`]: a big slice is split so that it fills the queue alone.
    pub chunk_bytes: u32,
    /// For tests: operations ask for at most this much, as if the kernel had cut them short.
    #[cfg(test)]
    pub(super) cut_bytes: Option<u32>,
}

impl Default for DirectOptions {
    fn default() -> Self {
        Self {
            depth: 16,
            chunk_bytes: 1 << 20,
            #[cfg(test)]
            cut_bytes: None,
        }
    }
}

/// Reads the blocks around each slice straight into its slot.
pub(crate) struct DirectStore {
    commands: Sender<Command>,
    bell: Arc<Bell>,
    files: usize,
    thread: Option<JoinHandle<()>>,
}

pub(super) fn probe_ring() -> std::io::Result<()> {
    ring::new_ring(1).map(drop)
}

impl DirectStore {
    /// Starts the ring's thread on files that were opened past the page cache.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] where the kernel has or allows no `io_uring`, [`StoreError::Thread`].
    ///
    /// # Panics
    /// When `depth` is 0 or `chunk_bytes` is not a positive multiple of [`BLOCK_BYTES`].
    pub fn start(open: Vec<OpenFile>, options: DirectOptions) -> Result<Self, StoreError> {
        assert!(options.depth > 0 && options.chunk_bytes > 0);
        assert_eq!(u64::from(options.chunk_bytes) % BLOCK_BYTES, 0);
        let n_files = open.len();
        let bell = Arc::new(Bell::new().map_err(|source| StoreError::Thread { engine: ENGINE, source })?);
        let (commands, inbox) = unbounded();
        // The ring is made on its own thread (the kernel may then skip locking); `ready` brings its verdict.
        let (ready, verdict) = bounded(1);
        let thread = {
            let bell = Arc::clone(&bell);
            threads::spawn(format!("hobbit-{ENGINE}"), move || {
                let (reader, verdict) = match Reader::new(open, options, inbox, bell) {
                    Ok(reader) => (Some(reader), Ok(())),
                    Err(error) => (None, Err(error)),
                };
                let _ = ready.send(verdict);
                if let Some(mut reader) = reader {
                    reader.run();
                }
            })
            .map_err(|source| StoreError::Thread { engine: ENGINE, source })?
        };
        match verdict.recv() {
            Ok(Ok(())) => Ok(Self { commands, bell, files: n_files, thread: Some(thread) }),
            Ok(Err(error)) => Err(StoreError::Unavailable { engine: ENGINE, reason: probe::refusal(&error) }),
            Err(_) => Err(StoreError::Stopped { engine: ENGINE }),
        }
    }
}

impl Store for DirectStore {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        let mut accepted = Vec::with_capacity(requests.len());
        for request in requests {
            match request.check(self.files) {
                Ok(()) if request.extent.len > 0 => accepted.push(request),
                Ok(()) => Arc::clone(sink).complete(ReadDone { ticket: request.ticket, result: Ok(0) }),
                Err(error) => Arc::clone(sink).complete(ReadDone { ticket: request.ticket, result: Err(error) }),
            }
        }
        if accepted.is_empty() {
            return;
        }
        match self.commands.send(Command::Read { requests: accepted, sink: Arc::clone(sink) }) {
            Ok(()) => self.bell.ring(),
            Err(refused) => {
                let Command::Read { requests, .. } = refused.into_inner() else { return };
                for request in requests {
                    let error = StoreError::Stopped { engine: ENGINE };
                    Arc::clone(sink).complete(ReadDone { ticket: request.ticket, result: Err(error) });
                }
            }
        }
    }
}

impl Drop for DirectStore {
    fn drop(&mut self) {
        // The thread answers everything accepted before this command.
        let _ = self.commands.send(Command::Stop);
        self.bell.ring();
        let Some(thread) = self.thread.take() else { return };
        // The last owner may be a completion on the ring's thread: it cannot wait for itself.
        if thread.thread().id() != thread::current().id() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

impl Bell {
    /// Wakes the thread if it sleeps; the command must be in the channel already.
    fn ring(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.strike();
        }
    }
}
