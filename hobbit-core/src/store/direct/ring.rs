//! The ring's thread: takes requests from a channel, keeps the kernel's queue full, sends answers.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::Receiver;
use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::slices::{Issue, Operation, Slice};
use super::units::Buffers;
use super::{DirectOptions, OpenFile};
use crate::store::request::{Completion, ReadRequest};

/// Marks the answer of the bell's read; chunk numbers are far below.
const BELL: u64 = u64::MAX;
/// Refusals of the kernel to take or hand out operations, in a row and a millisecond apart, before giving up.
const REFUSALS_MAX: u32 = 1000;

/// A message to the thread.
pub(super) enum Command {
    Read { requests: Vec<ReadRequest>, sink: Arc<dyn Completion> },
    Stop,
}

/// Wakes the thread out of its wait in the kernel.
pub(super) struct Bell {
    event: File,
    /// Set by the thread before it waits; the side that clears it strikes.
    pub asleep: AtomicBool,
}

impl Bell {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `eventfd` has just returned it, so it has no other owner.
        let event = File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
        Ok(Self { event, asleep: AtomicBool::new(false) })
    }

    pub(crate) fn strike(&self) {
        // An eventfd's counter takes 2^64 - 2 strikes before a write would wait.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = (&self.event).read(&mut [0; 8]);
    }
}

/// The thread's own state.
pub(super) struct Reader {
    ring: IoUring,
    files: Vec<OpenFile>,
    options: DirectOptions,
    inbox: Receiver<Command>,
    bell: Arc<Bell>,
    /// Whether the bell's poll is with the kernel.
    bell_armed: bool,
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
    pub fn new(
        files: Vec<OpenFile>,
        options: DirectOptions,
        inbox: Receiver<Command>,
        bell: Arc<Bell>,
    ) -> io::Result<Self> {
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
            bell,
            bell_armed: false,
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
    pub fn run(&mut self) {
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
        while let Ok(command) = self.inbox.try_recv() {
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
        if !self.bell_armed {
            let entry = opcode::PollAdd::new(types::Fd(self.bell.event.as_raw_fd()), libc::POLLIN as u32)
                .build()
                .user_data(BELL);
            self.push(&entry);
            self.bell_armed = true;
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
        self.bell.asleep.store(true, Ordering::SeqCst);
        let mut refusals = 0;
        loop {
            // A command that came before `asleep` was set rang no bell. If one came after, the bell is ringing.
            let want = usize::from(self.inbox.is_empty());
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
        self.bell.asleep.store(false, Ordering::SeqCst);
    }

    fn reap(&mut self) {
        loop {
            // One at a time: an answer may submit more, and the entry's borrow must end before.
            let Some(answer) = self.ring.completion().next() else { return };
            if answer.user_data() == BELL {
                self.bell_armed = false;
                self.bell.silence();
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
pub(in crate::store) fn new_ring(entries: u32) -> io::Result<IoUring> {
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
