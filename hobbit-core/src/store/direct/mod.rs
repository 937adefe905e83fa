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
//! On a disk that bounds operations, chunks of 4 MiB read slices of 3.4 MiB up to four times as fast as chunks of 1 MiB,
//! if slots are on huge pages (`benches/results/mirror.md`).
//! Registered buffers gained nothing (15.6 MB, two in flight: 3.45 and 3.46 GB/s with, 3.25 and 3.64 without; equal
//! CPU time), so there are none.

mod slices;
mod units;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use io_uring::{IoUring, cqueue, opcode, squeue, types};

use self::slices::{Issue, Operation, Slice};
use self::units::Buffers;
use super::original::OpenFile;
use super::{BLOCK_BYTES, Completion, ReadDone, ReadRequest, Store, StoreError, probe, threads};

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
            chunk_bytes: 4 << 20,
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
    new_ring(1).map(drop)
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
                let inbox = Inbox { commands: inbox, bell, is_armed: false };
                let (reader, verdict) = match Reader::new(open, options, inbox) {
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

// The thread: takes requests from a channel, keeps the kernel's queue full, sends answers.

/// Marks the answer of the bell's read; chunk numbers are far below.
const BELL: u64 = u64::MAX;
/// Refusals of the kernel to take or hand out operations, in a row and a millisecond apart, before giving up.
const REFUSALS_MAX: u32 = 1000;

/// A message to the thread.
enum Command {
    Read { requests: Vec<ReadRequest>, sink: Arc<dyn Completion> },
    Stop,
}

/// Wakes the thread out of its wait in the kernel.
struct Bell {
    event: File,
    /// Set by the thread before it waits; the side that clears it strikes.
    asleep: AtomicBool,
}

impl Bell {
    fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `eventfd` has just returned it, so it has no other owner.
        let event = File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
        Ok(Self { event, asleep: AtomicBool::new(false) })
    }

    /// Wakes the thread if it sleeps; the command must be in the channel already.
    fn ring(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.strike();
        }
    }

    fn strike(&self) {
        // An eventfd's counter takes 2^64 - 2 strikes before a write would wait.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = (&self.event).read(&mut [0; 8]);
    }
}

/// Commands to the thread, and the bell that announces them.
struct Inbox {
    commands: Receiver<Command>,
    bell: Arc<Bell>,
    /// Whether the bell's poll is with the kernel.
    is_armed: bool,
}

/// State of the thread.
struct Reader {
    ring: IoUring,
    files: Vec<OpenFile>,
    options: DirectOptions,
    inbox: Inbox,
    stopping: bool,
    /// Slices begun or waiting; a number is reused after the end of its slice.
    slices: Vec<Option<Slice>>,
    unused: Vec<usize>,
    /// Slices with chunks to issue, in order of arrival.
    queue: VecDeque<usize>,
    /// Each operation with the kernel, and the number of its slice; index = user data.
    operations: Vec<Option<(usize, Operation)>>,
    idle: Vec<usize>,
    /// For requests of bit planes or rows.
    buffers: Buffers,
}

impl Reader {
    /// Makes the ring on the calling thread, which must be the one that runs it.
    fn new(files: Vec<OpenFile>, options: DirectOptions, inbox: Inbox) -> io::Result<Self> {
        // Room for the bell beside the reads.
        let ring = new_ring(options.depth + 1)?;
        let descriptors: Vec<_> = files.iter().map(|file| file.file.as_raw_fd()).collect();
        if !descriptors.is_empty() {
            ring.submitter().register_files(&descriptors)?;
        }
        let depth = options.depth as usize;
        Ok(Self {
            ring,
            files,
            options,
            inbox,
            stopping: false,
            slices: Vec::new(),
            unused: Vec::new(),
            queue: VecDeque::new(),
            operations: (0..depth).map(|_| None).collect(),
            idle: (0..depth).rev().collect(),
            buffers: Buffers::default(),
        })
    }

    /// Serves until told to stop, then finishes what it has.
    fn run(&mut self) {
        ask_for_prompt_wake_ups();
        loop {
            self.take_commands();
            self.issue();
            if self.stopping && self.idle.len() == self.operations.len() && self.queue.is_empty() {
                return;
            }
            self.wait();
            self.reap();
        }
    }

    fn take_commands(&mut self) {
        while let Ok(command) = self.inbox.commands.try_recv() {
            match command {
                Command::Read { requests, sink } => {
                    for request in requests {
                        let Some(slice) = Slice::new(request, Arc::clone(&sink)) else { continue };
                        let slice = Some(slice);
                        let number = match self.unused.pop() {
                            Some(number) => {
                                self.slices[number] = slice;
                                number
                            }
                            None => {
                                self.slices.push(slice);
                                self.slices.len() - 1
                            }
                        };
                        self.queue.push_back(number);
                    }
                }
                Command::Stop => self.stopping = true,
            }
        }
    }

    /// Fills the kernel's queue, oldest slice first.
    fn issue(&mut self) {
        while let (Some(&number), Some(&place)) = (self.queue.front(), self.idle.last()) {
            let slice = self.slices[number].as_mut().expect("a queued slice is alive");
            let operation = match slice.issue(self.options.chunk_bytes, &mut self.buffers) {
                Issue::Operation(operation) => operation,
                // A buffer in use belongs to operations with the kernel, whose answers free it.
                Issue::Wait => break,
                Issue::Nothing => {
                    self.queue.pop_front();
                    self.end_if_over(number);
                    continue;
                }
            };
            let len = operation.chunk.len;
            #[cfg(test)]
            let len = self.options.cut_bytes.map_or(len, |cut| len.min(cut));
            let entry = opcode::Read::new(types::Fixed(slice.file() as u32), operation.address, len)
                .offset(operation.chunk.offset)
                .build()
                .user_data(place as u64);
            self.operations[place] = Some((number, operation));
            self.idle.pop();
            self.push(&entry);
        }
        if !self.inbox.is_armed {
            let entry = opcode::PollAdd::new(types::Fd(self.inbox.bell.event.as_raw_fd()), libc::POLLIN as u32)
                .build()
                .user_data(BELL);
            self.push(&entry);
            self.inbox.is_armed = true;
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: a read's memory belongs to a slice that stays in `slices` until the kernel has answered for all of
        // its chunks, and is valid until then by the contract of `SlotPtr::new`; the file stays open as long as the
        // ring. The bell's poll passes no memory.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("the ring has an entry for every operation and the bell");
    }

    /// Hands the queue to the kernel and sleeps until an answer or the bell.
    fn wait(&mut self) {
        self.inbox.bell.asleep.store(true, Ordering::SeqCst);
        let mut refusals = 0;
        loop {
            // A command that came before `asleep` was set rang no bell. If one came after, the bell is ringing.
            let want = usize::from(self.inbox.commands.is_empty());
            match self.ring.submit_and_wait(want) {
                Ok(_) => break,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The answers' queue is full: reap first.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => break,
                Err(error) => {
                    refusals += 1;
                    if refusals > REFUSALS_MAX {
                        // Slots still belong to the kernel: neither an answer nor a return would be sound.
                        eprintln!("hobbit: the kernel no longer serves its io_uring ({error}); giving up");
                        std::process::abort();
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        self.inbox.bell.asleep.store(false, Ordering::SeqCst);
    }

    fn reap(&mut self) {
        loop {
            // One at a time: an answer may submit more, and the entry's borrow must end before.
            let Some(answer) = self.ring.completion().next() else { return };
            if answer.user_data() == BELL {
                self.inbox.is_armed = false;
                self.inbox.bell.silence();
            } else {
                self.landed(&answer);
            }
        }
    }

    fn landed(&mut self, answer: &cqueue::Entry) {
        let place = answer.user_data() as usize;
        let (number, operation) = self.operations[place].take().expect("answered once");
        self.idle.push(place);
        let slice = self.slices[number].as_mut().expect("alive until its chunks have landed");
        let file = &self.files[slice.file()];
        if slice.landed(operation, answer.result(), file, &mut self.buffers) && !self.queue.contains(&number) {
            self.queue.push_front(number);
        }
        self.end_if_over(number);
    }

    fn end_if_over(&mut self, number: usize) {
        let is_over = self.slices[number].as_ref().is_some_and(Slice::is_over);
        if let Some(slice) = self.slices[number].take_if(|_| is_over) {
            self.queue.retain(|&queued| queued != number);
            self.unused.push(number);
            slice.finish(&mut self.buffers);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Reached by a panic only with operations in flight: their memory must not be given back.
        if self.idle.len() != self.operations.len() {
            eprintln!("hobbit: the io_uring thread failed with reads in flight; giving up");
            std::process::abort();
        }
        for slice in self.slices.iter_mut().filter_map(Option::take) {
            slice.refuse(&mut self.buffers);
        }
    }
}

/// A ring with one submitting thread if the kernel supports that (6.1), else a plain one.
fn new_ring(entries: u32) -> io::Result<IoUring> {
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(entries)
        .or_else(|error| if error.raw_os_error() == Some(libc::EINVAL) { IoUring::new(entries) } else { Err(error) })
}

/// Time slice of the ring's thread, in nanoseconds: the least that the kernel grants.
const SLICE_NS: u64 = 100_000;

/// Asks the scheduler for prompt wake-ups. While every core computes, a thread that has slept waits for the end of
/// another thread's time slice (3 ms) before it may give the next read to the disk; a thread with a short slice goes
/// first (EEVDF: earlier deadline). Two cores, two spinning threads, slices of 15.6 MB two at a time: 2.2-2.3 GB/s
/// without, 3.3-3.8 GB/s with it. The buffered threads copy much more and gain nothing.
///
/// Linux 6.12 and newer; older kernels ignore it.
fn ask_for_prompt_wake_ups() {
    // SAFETY: `sched_attr` is plain integers, for which zero is valid.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the structure is writable and `size` bytes long; 0 is the calling thread.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if read != 0 || attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attributes.sched_runtime = SLICE_NS;
    // SAFETY: the structure is initialised; its `size` field was set by the kernel above.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}
