//! The demand of a token for an expert (HOBBIT, section 3.2) and of several at once, which share one version, and the
//! version that answers it.

use crate::expert::Precision;

/// The demand of a token for an expert. Ordered: `Skip < Low < High`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Demand {
    /// The token does without the expert.
    Skip,
    /// The low-precision version is good enough.
    Low,
    /// The high-precision version.
    High,
}

/// HOBBIT's T1 and T2: the highest unimportance that is worth a high or a low version.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// Highest unimportance that asks for high precision, `0.0..=1.0`. At 1 everything does. At 0 nothing does, not
    /// even a token's first expert: "all low" is a setting too.
    pub t1: f32,
    /// Highest unimportance that asks for any version, `t1..=1.0`. At 1 nothing is skipped.
    pub t2: f32,
}

/// Thresholds that do not make sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ThresholdError(String);

impl Default for Thresholds {
    /// `Thresholds::MIXTRAL`.
    fn default() -> Self {
        Self::MIXTRAL
    }
}

impl Thresholds {
    /// HOBBIT's, for Mixtral-8x7B.
    pub(crate) const MIXTRAL: Self = Self { t1: 0.6, t2: 0.9 };

    /// Checked thresholds.
    ///
    /// # Errors
    /// [`ThresholdError`] unless `0 <= t1 <= t2 <= 1`.
    pub fn new(t1: f32, t2: f32) -> Result<Self, ThresholdError> {
        let Self { t1: default_t1, t2: default_t2 } = Self::default();
        for (name, found, example) in [("T1", t1, default_t1), ("T2", t2, default_t2)] {
            if !(0.0..=1.0).contains(&found) {
                let example = format!("give a number from 0 to 1, for example {example}");
                return Err(ThresholdError(format!("{name} = {found} is not a threshold; {example}")));
            }
        }
        if t1 > t2 {
            return Err(ThresholdError(format!("T1 = {t1} is above T2 = {t2}; give a larger T2 or a smaller T1")));
        }
        Ok(Self { t1, t2 })
    }

    /// The demand for an expert of this unimportance. A token's first expert, at 0, is never skipped.
    pub fn demand(&self, unimportance: f32) -> Demand {
        if self.t1 > 0.0 && unimportance <= self.t1 {
            Demand::High
        } else if unimportance <= self.t2 {
            Demand::Low
        } else {
            Demand::Skip
        }
    }

    /// The demands of one token for the experts it chose. `weights` are its router weights `[n_expert_used]`, in any
    /// order; `out` is replaced by the answers in the same order.
    ///
    /// Weights that rank nothing (all zero, or one of them no number) make every expert a first one.
    pub fn demands(&self, weights: &[f32], out: &mut Vec<Demand>) {
        out.clear();
        out.extend(each_unimportance(weights).map(|s| self.demand(s)));
    }
}

/// The unimportance of each expert a token chose, `0.0..=1.0`: the share of the router weights, as magnitudes, of the
/// experts that rank before it. Equal weights rank in the order given. `weights` `[n_expert_used]` may be in any order;
/// `out` is replaced by the answers in the same order.
///
/// Weights that rank nothing (all zero, or one of them no number) make every unimportance 0.
pub fn unimportance(weights: &[f32], out: &mut Vec<f32>) {
    out.clear();
    out.extend(each_unimportance(weights));
}

/// Compares every pair instead of sorting: a token has few experts, and nothing is allocated.
fn each_unimportance(weights: &[f32]) -> impl Iterator<Item = f32> {
    let magnitude = |weight: &f32| f64::from(weight.abs());
    let total: f64 = weights.iter().map(magnitude).sum();
    let ranks = total > 0.0 && total.is_finite();
    weights.iter().enumerate().map(move |(i, weight)| {
        if !ranks {
            return 0.0;
        }
        let mine = magnitude(weight);
        let before = |(j, other): (usize, f64)| (other > mine || (other == mine && j < i)).then_some(other);
        let before: f64 = weights.iter().map(magnitude).enumerate().filter_map(before).sum();
        ((before / total) as f32).min(1.0)
    })
}

/// Answers a demand: in which precision an expert is used now, if at all. If that version is not resident, it must be
/// loaded.
///
/// `is_resident`: which versions are in memory or on their way, by [`Precision::index`]. A resident high version always
/// wins; a resident low one is used rather than nothing. `has_low`: the expert has a low-precision version at all.
pub fn resolve(demand: Demand, is_resident: [bool; Precision::COUNT], has_low: bool) -> Option<Precision> {
    let [high, low] = is_resident;
    match demand {
        _ if high => Some(Precision::High),
        Demand::Low if has_low => Some(Precision::Low),
        Demand::High | Demand::Low => Some(Precision::High),
        Demand::Skip => low.then_some(Precision::Low),
    }
}

/// Sets the router weights of a token's skipped experts to zero and scales the others so that the sum stays.
/// `weights` and `skipped` are `[n_expert_used]`; an expert without a flag is not skipped.
///
/// Without a skipped expert not a bit changes. Weights whose sum cannot be scaled stay as they are.
pub fn renormalise(weights: &mut [f32], skipped: &[bool]) {
    if !skipped.contains(&true) {
        return;
    }
    let sum = |weights: &[f32]| -> f64 { weights.iter().copied().map(f64::from).sum() };
    let whole = sum(weights);
    for (weight, _) in weights.iter_mut().zip(skipped).filter(|(_, skipped)| **skipped) {
        *weight = 0.0;
    }
    scale(weights, whole / sum(weights));
}

/// Multiplies weights, unless the factor is no positive number.
pub(super) fn scale(weights: &mut [f32], by: f64) {
    if by.is_finite() && by > 0.0 {
        weights.iter_mut().for_each(|weight| *weight = (f64::from(*weight) * by) as f32);
    }
}

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

/// Raises the demand for each expert of a layer to the highest of the tokens that chose it. `chosen` are experts and
/// their tokens' demands; `by_expert` `[n_expert]` begins as [`Demand::Skip`]. Experts beyond it are ignored.
pub fn merge(chosen: impl IntoIterator<Item = (u16, Demand)>, by_expert: &mut [Demand]) {
    for (index, demand) in chosen {
        if let Some(highest) = by_expert.get_mut(usize::from(index)) {
            *highest = demand.max(*highest);
        }
    }
}

/// Fate's popularity rule ("popularity-aware hybrid quantization", section 4.5): the least popular `share` of a
/// batch's active experts, rounded down, get at most [`Demand::Low`]. Experts that some token ranks first (`is_first`)
/// keep their demand, as HOBBIT requires, so fewer may be lowered.
///
/// `needed_by_popularity` are the active experts' indices, most tokens first; `share` is `0.0..=1.0`; `demands` is by
/// expert index. For prompts.
pub(crate) fn lower_least_popular(
    needed_by_popularity: &[u16],
    share: f32,
    is_first: impl Fn(u16) -> bool,
    demands: &mut [Demand],
) {
    let n_lowered = n_least_popular(needed_by_popularity.len(), share);
    let lowered = needed_by_popularity.iter().rev().filter(|index| !is_first(**index)).take(n_lowered);
    for &index in lowered {
        if let Some(demand) = demands.get_mut(usize::from(index)) {
            *demand = Demand::Low.min(*demand);
        }
    }
}

/// Experts that the share of the least popular ones has, of `n_active`: rounded down.
pub(crate) fn n_least_popular(n_active: usize, share: f32) -> usize {
    // 0.7 is less than seven tenths as f32; a last bit must not take an expert away.
    let n = f64::from(share) * n_active as f64 * (1.0 + f64::from(f32::EPSILON));
    (n as usize).min(n_active)
}

#[cfg(test)]
mod tests {
    use super::Demand::{High, Low, Skip};
    use super::*;
    use proptest::prelude::*;

    fn demands(t1: f32, t2: f32, weights: &[f32]) -> Vec<Demand> {
        let mut out = vec![Skip; 9];
        Thresholds::new(t1, t2).unwrap().demands(weights, &mut out);
        out
    }

    fn unimportance_of(weights: &[f32]) -> Vec<f32> {
        let mut out = Vec::new();
        unimportance(weights, &mut out);
        out
    }

    #[test]
    fn mixtrals_top_two_with_the_papers_thresholds() {
        assert_eq!(Thresholds::default(), Thresholds { t1: 0.6, t2: 0.9 });
        assert_eq!(unimportance_of(&[0.7, 0.3]), [0.0, 0.7]);
        assert_eq!(demands(0.6, 0.9, &[0.7, 0.3]), [High, Low]);
        assert_eq!(demands(0.6, 0.9, &[0.55, 0.45]), [High, High]);
        assert_eq!(demands(0.6, 0.9, &[0.95, 0.05]), [High, Skip]);
        // On the border: up to and including.
        assert_eq!(demands(0.6, 0.9, &[0.6, 0.4]), [High, High]);
        assert_eq!(demands(0.6, 0.9, &[0.9, 0.1]), [High, Low]);
    }

    #[test]
    fn order_sign_and_scale_of_the_weights_do_not_matter() {
        assert_eq!(unimportance_of(&[1.0, 4.0, 2.0, 1.0]), [0.75, 0.0, 0.5, 0.875]);
        assert_eq!(unimportance_of(&[-0.125, 0.5, -0.25, 0.125]), [0.75, 0.0, 0.5, 0.875]);
        assert_eq!(demands(0.5, 0.75, &[1.0, 4.0, 2.0, 1.0]), [Low, High, High, Skip]);
        assert_eq!(unimportance_of(&[f32::MAX, f32::MAX]), [0.0, 0.5]);
        assert_eq!(unimportance_of(&[2.5]), [0.0]);
        assert!(unimportance_of(&[]).is_empty());
    }

    #[test]
    fn the_ends_of_the_thresholds_are_all_high_and_all_low() {
        let weights = [0.97, 0.02, 0.01, 0.0];
        assert_eq!(demands(1.0, 1.0, &weights), [High; 4]);
        assert_eq!(demands(0.0, 1.0, &weights), [Low; 4]);
        assert_eq!(demands(0.0, 0.0, &weights), [Low, Skip, Skip, Skip]);
        assert_eq!(demands(0.5, 1.0, &weights), [High, Low, Low, Low]);
        assert_eq!(demands(0.5, 0.5, &weights), [High, Skip, Skip, Skip]);
    }

    #[test]
    fn weights_that_rank_nothing_make_every_expert_a_first_one() {
        for weights in [[0.0, 0.0], [f32::NAN, 0.5], [0.5, f32::INFINITY], [f32::NEG_INFINITY, f32::NAN], [-0.0, 0.0]] {
            assert_eq!(unimportance_of(&weights), [0.0, 0.0]);
            assert_eq!(demands(0.6, 0.9, &weights), [High, High], "{weights:?}");
            assert_eq!(demands(0.0, 0.9, &weights), [Low, Low], "{weights:?}");
        }
    }

    #[test]
    fn senseless_thresholds_are_refused() {
        let message = |t1, t2| Thresholds::new(t1, t2).unwrap_err().to_string();
        assert_eq!(message(-0.1, 0.9), "T1 = -0.1 is not a threshold; give a number from 0 to 1, for example 0.6");
        assert_eq!(message(0.5, 1.5), "T2 = 1.5 is not a threshold; give a number from 0 to 1, for example 0.9");
        assert_eq!(message(0.95, 0.9), "T1 = 0.95 is above T2 = 0.9; give a larger T2 or a smaller T1");
        assert!(message(f32::NAN, 0.9).starts_with("T1 = NaN is not"));
        assert!(Thresholds::new(0.5, 0.5).is_ok());
    }

    /// The paper's words: sort, sum up what comes before.
    fn by_sorting(weights: &[f32]) -> Vec<f32> {
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|&a, &b| weights[b].abs().total_cmp(&weights[a].abs()));
        let total: f64 = weights.iter().map(|weight| f64::from(weight.abs())).sum();
        let mut s = vec![0.0; weights.len()];
        let mut before = 0.0;
        for i in order {
            s[i] = (before / total) as f32;
            before += f64::from(weights[i].abs());
        }
        s
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pairs_rank_as_sorting_does(weights in prop::collection::vec(-8..=8i8, 1..12)) {
            let weights: Vec<f32> = weights.into_iter().map(|weight| f32::from(weight) / 8.0).collect();
            prop_assume!(weights.iter().any(|weight| *weight != 0.0));
            prop_assert_eq!(unimportance_of(&weights), by_sorting(&weights));
        }
    }

    #[test]
    fn every_case() {
        use Demand as D;
        const HIGH: Option<Precision> = Some(Precision::High);
        const LOW: Option<Precision> = Some(Precision::Low);
        let (neither, low, high, both) = ([false, false], [false, true], [true, false], [true, true]);
        let table = [
            // Demand, resident, what an expert with a low version gets, and one without.
            (D::High, neither, HIGH, HIGH),
            (D::High, low, HIGH, HIGH),
            (D::High, high, HIGH, HIGH),
            (D::High, both, HIGH, HIGH),
            (D::Low, neither, LOW, HIGH),
            (D::Low, low, LOW, HIGH),
            (D::Low, high, HIGH, HIGH),
            (D::Low, both, HIGH, HIGH),
            (D::Skip, neither, None, None),
            (D::Skip, low, LOW, LOW),
            (D::Skip, high, HIGH, HIGH),
            (D::Skip, both, HIGH, HIGH),
        ];
        for (demand, resident, with_low, without) in table {
            assert_eq!(resolve(demand, resident, true), with_low, "{demand:?} {resident:?}");
            assert_eq!(resolve(demand, resident, false), without, "{demand:?} {resident:?}, no low version");
        }
    }

    fn renormalised<const N: usize>(mut weights: [f32; N], skipped: [bool; N]) -> [f32; N] {
        renormalise(&mut weights, &skipped);
        weights
    }

    #[test]
    fn the_sum_stays() {
        assert_eq!(renormalised([0.5, 0.25, 0.25], [false, false, true]), [0.6666667, 0.33333334, 0.0]);
        // llama.cpp may have scaled the weights: their sum need not be 1.
        assert_eq!(renormalised([2.0, 0.5], [false, true]), [2.5, 0.0]);
        assert_eq!(renormalised([-1.0, -1.0], [true, false]), [0.0, -2.0]);
    }

    #[test]
    fn without_a_skipped_expert_not_a_bit_changes() {
        let weights = [0.1f32, 0.7, 1e-30, f32::NAN];
        let same = renormalised(weights, [false; 4]);
        assert_eq!(same.map(f32::to_bits), weights.map(f32::to_bits));
    }

    #[test]
    fn nothing_is_divided_by_zero() {
        assert_eq!(renormalised([0.7, 0.3], [true, true]), [0.0, 0.0]);
        assert_eq!(renormalised([0.7, 0.0], [true, false]), [0.0, 0.0]);
        assert_eq!(renormalised([0.0, 0.0], [true, false]), [0.0, 0.0]);
        // A sum of the other sign must not flip anything.
        assert_eq!(renormalised([-2.0, 1.0], [true, false]), [0.0, 1.0]);
        assert_eq!(renormalised([f32::INFINITY, 1.0], [true, false]), [0.0, 1.0]);
    }

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
    fn no_tokens_first_choice_is_lowered() {
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
