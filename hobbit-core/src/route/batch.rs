//! Several tokens at once: one version of an expert serves all that chose it.

use super::Demand;

/// Most tokens of a batch that decodes.
pub const DECODE_TOKENS_MAX: usize = 16;

/// The purpose of a batch, decided once before it is evaluated. Every rule that treats generated tokens differently
/// from a prompt's goes by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// A prompt, or a part of one: experts are shared by its tokens, and speed is that of the whole.
    #[default]
    #[serde(rename = "prefill")]
    Prompt,
    /// Generated tokens: one sequence's next one, several sequences', or drafts. Each is treated as if it came alone.
    Decode,
}

impl Phase {
    /// The phase of a batch: it decodes if its tokens are few and the logits of each are wanted. A single token always
    /// decodes.
    pub fn of(n_tokens: usize, wants_all_logits: bool) -> Self {
        let is_few = n_tokens <= DECODE_TOKENS_MAX && wants_all_logits;
        if n_tokens == 1 || is_few { Self::Decode } else { Self::Prompt }
    }

    /// Whether it is [`Phase::Decode`].
    pub fn is_decode(self) -> bool {
        self == Self::Decode
    }
}

/// Adds what tokens ask of experts to what each expert of a layer is asked for: the highest demand of all that chose
/// it. `chosen` are the experts' indices with the tokens' demands; `by_expert` `[n_expert]` begins as
/// [`Demand::Skip`]. An index beyond it is no expert and counts for nothing.
pub fn merge(chosen: impl IntoIterator<Item = (u16, Demand)>, by_expert: &mut [Demand]) {
    for (index, demand) in chosen {
        if let Some(highest) = by_expert.get_mut(usize::from(index)) {
            *highest = demand.max(*highest);
        }
    }
}

/// Fate's popularity rule ("popularity-aware hybrid quantization", section 4.5): the least popular `share` of a
/// batch's active experts, rounded down, get at most [`Demand::Low`]; of those that need not come as they are asked
/// for, as HOBBIT has it of each token's most important one (`is_first`), so that there may be fewer.
///
/// `needed_by_popularity` are the active experts' indices, most tokens first; `share` is `0.0..=1.0`; `demands` is by
/// expert index. For prompts.
pub fn lower_least_popular(
    needed_by_popularity: &[u16],
    share: f32,
    is_first: impl Fn(u16) -> bool,
    demands: &mut [Demand],
) {
    let n_active = needed_by_popularity.len();
    // 0.7 is less than seven tenths as f32; a last bit must not take an expert away.
    let n_lowered = f64::from(share) * n_active as f64 * (1.0 + f64::from(f32::EPSILON));
    let n_lowered = (n_lowered as usize).min(n_active);
    let lowered = needed_by_popularity.iter().rev().filter(|index| !is_first(**index)).take(n_lowered);
    for &index in lowered {
        if let Some(demand) = demands.get_mut(usize::from(index)) {
            *demand = Demand::Low.min(*demand);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Demand::{High, Low, Skip};
    use super::*;

    #[test]
    fn few_tokens_whose_logits_are_all_wanted_decode() {
        let decodes = |n_tokens, all| Phase::of(n_tokens, all).is_decode();
        assert!(decodes(1, true) && decodes(1, false) && decodes(2, true) && decodes(DECODE_TOKENS_MAX, true));
        assert!(!decodes(2, false) && !decodes(DECODE_TOKENS_MAX + 1, true) && !decodes(512, true));
    }

    #[test]
    fn the_highest_demand_wins() {
        let mut by_expert = [Skip; 5];
        let chosen = [(0, Low), (1, High), (1, Skip), (0, Skip), (3, Skip), (0, Low), (9, High)];
        merge(chosen, &mut by_expert);
        assert_eq!(by_expert, [Low, High, Skip, Skip, Skip]);
    }

    fn lowered(share: f32, needed: &[u16], mut demands: [Demand; 6]) -> [Demand; 6] {
        lower_least_popular(needed, share, |_| false, &mut demands);
        demands
    }

    #[test]
    fn nobodys_first_expert_is_lowered() {
        let of = |share, firsts: &[u16]| {
            let mut demands = [High; 6];
            lower_least_popular(&[5, 3, 0, 1], share, |index| firsts.contains(&index), &mut demands);
            demands
        };
        assert_eq!(of(0.25, &[1]), [Low, High, High, High, High, High], "the next one in its place");
        assert_eq!(of(0.5, &[1, 0]), [High, High, High, Low, High, Low]);
        assert_eq!(of(0.5, &[1, 0, 3]), [High, High, High, High, High, Low], "fewer than the share");
        assert_eq!(of(1.0, &[0, 1, 3, 5]), [High; 6]);
    }

    #[test]
    fn the_least_popular_quarter_comes_in_low_precision() {
        let all = [5, 3, 0, 1];
        assert_eq!(lowered(0.25, &all, [High; 6]), [High, Low, High, High, High, High]);
        assert_eq!(lowered(0.5, &all, [High; 6]), [Low, Low, High, High, High, High]);
        assert_eq!(lowered(0.0, &all, [High; 6]), [High; 6]);
        assert_eq!(lowered(1.0, &all, [High; 6]), [Low, Low, High, Low, High, Low]);
        // Rounded down, and never raised.
        assert_eq!(lowered(0.25, &all[..3], [High; 6]), [High; 6]);
        assert_eq!(lowered(0.5, &all, [Skip; 6]), [Skip; 6]);
        assert_eq!(lowered(0.25, &[], [High; 6]), [High; 6]);
    }

    #[test]
    fn a_share_of_tenths_is_exact_and_nonsense_is_harmless() {
        let needed: Vec<u16> = (0..10).collect();
        for tenths in 0..=10u8 {
            let mut demands = [High; 10];
            lower_least_popular(&needed, f32::from(tenths) / 10.0, |_| false, &mut demands);
            assert_eq!(demands.iter().filter(|demand| **demand == Low).count(), usize::from(tenths));
        }
        assert_eq!(lowered(7.0, &[1, 77], [High; 6]), [High, Low, High, High, High, High]);
        assert_eq!(lowered(f32::NAN, &[1], [High; 6]), [High; 6]);
        assert_eq!(lowered(-1.0, &[1], [High; 6]), [High; 6]);
    }
}
