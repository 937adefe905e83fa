//! Memory that follows the phase: while tokens decode, the pages of llama.cpp's compute buffer are given back to the
//! system, and experts get more slots ([`MemoryPlan::decode`]). Before a prompt the slots shrink again.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::experts::Experts;
use crate::engine::tiers::Tiers;
#[cfg(doc)]
use hobbit_core::plan::{MemoryPlan, RunMode};
use hobbit_core::route::{DECODE_TOKENS_MAX, Phase};

/// Decoding batches in a row before pages are given back, and between two checks. Both directions cost page faults
/// (with 16, answers of 64 tokens of a small fast model lost 8 % and prompts 11 %), and a server's prompts may come in
/// pieces between tokens of others.
const BATCHES: u32 = 64;

/// One session's part in it.
pub(super) struct Phases {
    experts: Arc<Experts>,
    /// Batches since the last one of more tokens than a decoding batch has.
    n_narrow: u32,
    /// The pages were given back, and the next batch shows how many of them tokens need.
    is_given_back: bool,
}

impl Phases {
    /// For a session whose context has been made: another session's tokens may have decoded last.
    pub(super) fn new(experts: &Arc<Experts>) -> Self {
        if let Some(memories) = experts.memories().as_mut() {
            memories.n_sessions += 1;
            memories.enter(Phase::Prompt);
        }
        Self { experts: Arc::clone(experts), n_narrow: 0, is_given_back: false }
    }

    /// A batch begins.
    pub(super) fn begin(&mut self, n_tokens: u32, memories: &mut Tiers) {
        if n_tokens as usize > DECODE_TOKENS_MAX {
            (self.n_narrow, self.is_given_back) = (0, false);
            memories.enter(Phase::Prompt);
        }
    }

    /// A batch was evaluated. `buffer`: the addresses of llama.cpp's compute buffer, if it is ordinary memory.
    pub(super) fn end(&mut self, n_tokens: u32, buffer: Option<Range<usize>>, memories: &mut Tiers) {
        let limit = memories.description.plan.decode.as_ref().map(|decode| decode.compute);
        // The plan has one session's compute buffer.
        let is_alone = memories.n_sessions == 1 && memories.follows_phases();
        let (Some(buffer), Some(limit), true) = (buffer, limit, is_alone) else { return };
        if n_tokens as usize > DECODE_TOKENS_MAX {
            return;
        }
        self.n_narrow = self.n_narrow.wrapping_add(1);
        let (is_decoding, is_due) = (memories.phase.is_decode(), self.n_narrow.is_multiple_of(BATCHES));
        if is_decoding && is_due && pages::resident_bytes(&buffer) > limit {
            memories.enter(Phase::Prompt);
        } else if !is_decoding && is_due {
            // SAFETY: the call into llama.cpp that saw the buffer has returned, and the context is as it left it. Its
            // graphs write all tensors of this buffer before they read them: inputs are set for every batch, and what
            // outlives a batch has been copied out of it.
            unsafe { pages::give_back(&buffer) };
            self.is_given_back = true;
        } else if !is_decoding && std::mem::take(&mut self.is_given_back) && pages::resident_bytes(&buffer) <= limit {
            memories.enter(Phase::Decode);
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
