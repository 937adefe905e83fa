//! Memory that follows the phase: while tokens decode, the pages of llama.cpp's compute buffer are given back to the
//! system, and experts get more slots ([`MemoryPlan::decode`]). Before a prompt the slots shrink again, as far as its
//! width needs ([`MemoryPlan::free_compute`]). A new context has touched no page of its buffer, so a session begins
//! like one whose tokens decode.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::memory::tiers::Tiers;
use crate::engine::model::Model;
use crate::engine::seam::experts::Experts;
use hobbit_core::options::SessionOptions;
#[cfg(doc)]
use hobbit_core::plan::{MemoryPlan, RunMode};
use hobbit_core::route::DECODE_TOKENS_MAX;

/// Tokens decoded since a prompt before pages are given back, and between two checks. Both directions cost page faults
/// (with 16, answers of 64 tokens of a small fast model lost 8 % and prompts 11 %), and a server's prompts may come in
/// pieces between tokens of others. Batches of several streams read more at once, so they need the slots earlier.
const TOKENS: u32 = 64;

/// One session's part in it.
pub(super) struct Phases {
    experts: Arc<Experts>,
    /// Tokens of the widest ubatch.
    n_ubatch: u32,
    /// Most bytes of a batch's logits; 0 if there may be as many as tokens.
    logits: u64,
    /// Tokens since the last batch of more than a decoding batch has.
    n_decoded: u32,
    /// The pages were given back, and the next batch shows how many of them tokens need.
    is_given_back: bool,
}

impl Phases {
    /// For a session whose context has been made. The plan has one session's compute buffer.
    pub(super) fn new(model: &Model, options: &SessionOptions) -> Self {
        let experts = &model.shared.experts;
        if let Some(memories) = experts.memories().as_mut() {
            memories.n_sessions += 1;
            let is_alone = memories.n_sessions == 1;
            memories.use_compute(if is_alone { memories.prompt_only() } else { 0 });
        }
        let n_ubatch = options.n_ubatch.min(options.n_batch);
        let logits = u64::from(options.n_outputs_max.min(n_ubatch)) * model.n_vocab() as u64 * size_of::<f32>() as u64;
        Self { experts: Arc::clone(experts), n_ubatch, logits, n_decoded: 0, is_given_back: false }
    }

    /// A batch begins, with which slots lend `staging` bytes to staging.
    pub(super) fn begin(&mut self, n_tokens: u32, staging: u64, memories: &mut Tiers) {
        let mut free = memories.free_compute;
        if n_tokens as usize > DECODE_TOKENS_MAX {
            (self.n_decoded, self.is_given_back) = (0, false);
            free = free.min(memories.description.plan.free_compute(n_tokens, self.n_ubatch, self.logits));
        }
        memories.divide(free, staging);
    }

    /// A batch was evaluated. `buffer`: the addresses of llama.cpp's compute buffer, if it is ordinary memory.
    pub(super) fn end(&mut self, n_tokens: u32, buffer: Option<Range<usize>>, memories: &mut Tiers) {
        let is_alone = memories.n_sessions == 1 && memories.follows_phases();
        let (Some(buffer), true) = (buffer, is_alone) else { return memories.use_compute(0) };
        let (all, prompt_only) = (memories.description.plan.fixed.compute, memories.prompt_only());
        let is_within = |free: u64| pages::resident_bytes(&buffer) <= all - free;
        if n_tokens as usize > DECODE_TOKENS_MAX {
            if memories.free_compute > 0 && !is_within(memories.free_compute) {
                memories.use_compute(0);
            }
            return;
        }
        let before = self.n_decoded;
        self.n_decoded = before.wrapping_add(n_tokens);
        let is_decoding = memories.free_compute == prompt_only;
        let is_due = before / TOKENS != self.n_decoded / TOKENS;
        if is_decoding && (is_due || before == 0) && !is_within(prompt_only) {
            memories.use_compute(0);
        } else if !is_decoding && is_due {
            // SAFETY: the call into llama.cpp that saw the buffer has returned, and the context is as it left it. Its
            // graphs write all tensors of this buffer before they read them: inputs are set for every batch, and what
            // outlives a batch has been copied out of it.
            unsafe { pages::give_back(&buffer) };
            self.is_given_back = true;
        } else if !is_decoding && std::mem::take(&mut self.is_given_back) && is_within(prompt_only) {
            memories.use_compute(prompt_only);
        }
    }
}

/// Gives the pages of llama.cpp's compute buffer back after a batch, where mapped experts need them
/// ([`RunMode::Passthrough`]). To be called at once: the next batch may replace the buffer.
pub(super) fn give_back(buffer: Option<Range<usize>>) {
    if let Some(buffer) = buffer {
        // SAFETY: as in [`Phases::end`].
        unsafe { pages::give_back(&buffer) };
    }
}

impl Drop for Phases {
    fn drop(&mut self) {
        if let Some(memories) = self.experts.memories().as_mut() {
            memories.n_sessions -= 1;
        }
    }
}

#[cfg(target_os = "linux")]
mod pages {
    use std::ops::Range;
    use std::ptr;

    /// Pages that lie wholly in a range, and their size.
    fn whole(range: &Range<usize>) -> (Range<usize>, usize) {
        // SAFETY: no pointers.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
        (range.start.next_multiple_of(page)..range.end / page * page, page)
    }

    /// Returns memory to the system; it reads as zeros until it is written. Huge pages would bring back all of it with
    /// the first small tensors.
    ///
    /// # Safety
    /// The range is mapped, anonymous memory with dead contents, and nothing uses it during the call.
    pub(super) unsafe fn give_back(range: &Range<usize>) {
        let (pages, _) = whole(range);
        if !pages.is_empty() {
            let start = ptr::with_exposed_provenance_mut(pages.start);
            // SAFETY: by the caller.
            unsafe {
                libc::madvise(start, pages.len(), libc::MADV_NOHUGEPAGE);
                libc::madvise(start, pages.len(), libc::MADV_DONTNEED);
            }
        }
    }

    /// Bytes of a range that are in memory; all of it if the system does not say.
    pub(super) fn resident_bytes(range: &Range<usize>) -> u64 {
        let (pages, page) = whole(range);
        if pages.is_empty() {
            return 0;
        }
        let mut is_resident = vec![0u8; pages.len() / page];
        let start = ptr::with_exposed_provenance_mut(pages.start);
        // SAFETY: one byte is written for each page; a range that is not mapped is an error.
        let is_known = unsafe { libc::mincore(start, pages.len(), is_resident.as_mut_ptr()) == 0 };
        let n = is_resident.iter().filter(|state| **state & 1 != 0 || !is_known).count();
        (n * page) as u64
    }
}

/// Elsewhere slots do not follow the phase.
#[cfg(not(target_os = "linux"))]
mod pages {
    use std::ops::Range;

    pub(super) unsafe fn give_back(_: &Range<usize>) {}

    pub(super) fn resident_bytes(_: &Range<usize>) -> u64 {
        u64::MAX
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::pages;

    #[test]
    fn memory_that_was_given_back_is_not_resident_until_it_is_written() {
        let mut memory = vec![1u8; 8 << 20];
        let start = memory.as_mut_ptr().expose_provenance();
        let range = start..start + memory.len();
        let all = pages::resident_bytes(&range);
        assert!(all > 7 << 20, "{all}");
        // SAFETY: our own memory, which is written again below.
        unsafe { pages::give_back(&range) };
        assert_eq!(pages::resident_bytes(&range), 0);
        memory[4 << 20] = 7;
        let few = pages::resident_bytes(&range);
        assert!(0 < few && few < 1 << 20 && memory[5 << 20] == 0, "{few}");
    }
}
