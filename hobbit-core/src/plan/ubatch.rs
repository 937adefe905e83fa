//! Number of a prompt's tokens computed at once. Every ubatch uses nearly every expert and reads the ones that are not
//! resident, so fewer and wider ubatches read less. The memory of their activations is taken from the slots.
//!
//! The rule ignores speeds: reads and products overlap, and reading less never takes longer.

/// A wider ubatch takes at most this part of the cache, because the tokens after the prompt need the slots.
const CACHE_SHARE: u64 = 16;

/// Another width must read at most this percentage of the usual width's bytes.
const READ_PERCENT_MAX: u64 = 80;

/// Widths are multiples of this: kernels process tiles of rows.
const STEP: u32 = 64;

/// Maximum passes over a batch to consider: beyond that, one more or less saves little.
const PASSES_MAX: usize = 64;

/// Input of the choice of a prompt's ubatch width. Sizes are bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UbatchInput {
    pub n_prompt: u64,
    /// Tokens submitted at once, the maximum width.
    pub n_batch: u32,
    pub usual: u32,
    /// All experts in high precision.
    pub expert_bytes: u64,
    /// Resident bytes of experts at the usual width.
    pub cache_bytes: u64,
    /// Activations of one computed token.
    pub token_bytes: u64,
}

impl UbatchInput {
    /// The width that reads least, if it saves enough; otherwise the usual one.
    pub fn choose(&self) -> u32 {
        let usual = self.usual.min(self.n_batch);
        let passes_now = self.passes(usual);
        // The narrowest width for each number of passes over a whole batch.
        let longest = self.n_prompt.min(self.n_batch.into()) as u32;
        let narrowest =
            |passes: u32| longest.div_ceil(passes).checked_next_multiple_of(STEP).unwrap_or(u32::MAX).min(self.n_batch);
        let passes = (1..longest.div_ceil(usual.max(1))).take(PASSES_MAX);
        let widths = passes.map(narrowest).filter(|width| *width > usual);
        let read = |width: u32| u128::from(self.passes(width)).saturating_mul(self.missing(width).into());
        let best =
            widths.filter(|width| self.takes(*width) <= self.cache_bytes / CACHE_SHARE).min_by_key(|w| (read(*w), *w));
        let is_worth_it = |width: &u32| {
            self.passes(*width) < passes_now && read(*width) <= read(usual) / 100 * u128::from(READ_PERCENT_MAX)
        };
        best.filter(is_worth_it).unwrap_or(usual)
    }

    /// Ubatches of the whole prompt: batches are divided, and their remainders are not joined.
    pub fn passes(&self, width: u32) -> u64 {
        let (n_batch, width) = (u64::from(self.n_batch.max(1)), u64::from(width.max(1)));
        (self.n_prompt / n_batch) * n_batch.div_ceil(width) + (self.n_prompt % n_batch).div_ceil(width)
    }

    /// Bytes that a ubatch takes beyond the usual width.
    fn takes(&self, width: u32) -> u64 {
        u64::from(width.saturating_sub(self.usual)).saturating_mul(self.token_bytes)
    }

    fn missing(&self, width: u32) -> u64 {
        self.expert_bytes.saturating_sub(self.cache_bytes.saturating_sub(self.takes(width)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn input(n_prompt: u64) -> UbatchInput {
        UbatchInput {
            n_prompt,
            n_batch: 2048,
            usual: 512,
            expert_bytes: 18_000 * MIB,
            cache_bytes: 4_000 * MIB,
            token_bytes: 100 << 10,
        }
    }

    #[test]
    fn passes_are_saved() {
        for (n_prompt, width, passes) in [
            (1, 512, 1),
            (512, 512, 1),
            // Two passes become one, of exactly the prompt's width.
            (513, 576, 1),
            (1024, 1024, 1),
            (2000, 2048, 1),
            (2048, 2048, 1),
            (4096, 2048, 2),
            (4097, 2048, 3),
        ] {
            let input = input(n_prompt);
            let chosen = input.choose();
            assert_eq!((chosen, input.passes(chosen)), (width, passes), "{n_prompt} tokens");
        }
    }

    #[test]
    fn nothing_changes_where_nothing_is_gained() {
        let fits = UbatchInput { cache_bytes: 18_000 * MIB, ..input(2048) };
        assert_eq!(fits.choose(), 512, "everything is resident");
        let narrow = UbatchInput { n_batch: 512, ..input(2048) };
        assert_eq!((narrow.choose(), narrow.passes(512)), (512, 4), "no wider batch");
        let narrower = UbatchInput { n_batch: 100, ..input(2048) };
        assert_eq!(narrower.choose(), 100);
        assert_eq!(UbatchInput::default().choose(), 0);
    }

    #[test]
    fn slots_are_worth_more_than_a_pass() {
        // 4000 MiB / 16 are 250 MiB: room for 512 more tokens of 400 KiB, not for 1536.
        let heavy = UbatchInput { token_bytes: 400 << 10, ..input(2048) };
        assert_eq!((heavy.choose(), heavy.passes(1024)), (1024, 2));
        let heavier = UbatchInput { token_bytes: MIB, ..input(2048) };
        assert_eq!((heavier.choose(), heavier.passes(704)), (704, 3));
        let heaviest = UbatchInput { token_bytes: 2 * MIB, ..input(2048) };
        assert_eq!(heaviest.choose(), 512);
        assert_eq!(UbatchInput { token_bytes: u64::MAX, ..input(2048) }.choose(), 512);
        assert_eq!(UbatchInput { cache_bytes: 0, ..input(2048) }.choose(), 512, "nothing to take it from");
    }

    #[test]
    fn absurd_prompts_are_divided() {
        let absurd = UbatchInput { n_prompt: u64::MAX, n_batch: u32::MAX, usual: 1, ..input(0) };
        assert!(absurd.choose() >= 1);
    }
}
