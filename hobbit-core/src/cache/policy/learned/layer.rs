//! Statistics of one layer's experts.

use super::learner::{Features, Follow};
use super::{HORIZON_TOKENS, N_FEATURES, N_RATES, PRIOR_TOKENS};
use crate::cache::bytes::{Cursor, Writer};
use crate::cache::policy::Use;
use crate::expert::Precision;

/// Experts that a token uses of those of a layer, as a part, until something is known.
const USED_PART: f32 = 0.125;

/// Router scores span many orders of magnitude; `ln(score / threshold)` is clamped to these.
const MARGINS: std::ops::RangeInclusive<f32> = -8.0..=4.0;

/// Scales logarithms to about 1, so that all weights are learned at one rate.
const LOG_SCALE: f32 = 0.25;

/// Demands of its layer that count as an expert's own.
const PRIOR_DEMANDS: f32 = 4.0;

#[derive(Clone, Copy, Debug, Default)]
struct Expert {
    /// Fading means by half-life: of the router's scores, and of uses.
    evidence: [f32; N_RATES],
    uses: [f32; N_RATES],
    n_sequence: f32,
    n_run: f32,
    /// The step of its last use; 0 for never.
    last_step: u64,
    demands: Demands,
    is_resident: [bool; Precision::COUNT],
}

/// Demands of uses without a resident high version, which would have served all of them: high precision, low precision,
/// nothing.
type Demands = [f32; 3];

/// Least bytes of a saved expert.
const EXPERT_BYTES: usize = 4 * (2 * N_RATES + 4) + 8;

impl Expert {
    fn save(&self, out: &mut Writer) {
        out.f32s(&self.evidence);
        out.f32s(&self.uses);
        out.f32s(&[self.n_run]);
        out.u64(self.last_step);
        out.f32s(&self.demands);
    }

    fn load(saved: &mut Cursor, step: u64) -> Option<Self> {
        Some(Self {
            evidence: saved.f32s()?,
            uses: saved.f32s()?,
            n_run: saved.amounts().map(|[n_run]| n_run)?,
            last_step: saved.events().filter(|last_step| *last_step <= step)?,
            demands: saved.amounts()?,
            ..Self::default()
        })
    }
}

/// One layer. The tokens of a batch are steps that come at once.
#[derive(Clone, Debug, Default)]
pub(super) struct Layer {
    experts: Vec<Expert>,
    step: u64,
    running: Running,
    /// Experts that a single token uses; 0 until one was seen.
    n_chosen: usize,
    /// Whether evidence comes from scores or from the weights of chosen experts; `None` before any.
    is_scored: Option<bool>,
    sequence_tokens: f32,
    run_tokens: f32,
    demands: Demands,
    follow: Follow,
    examples: Examples,
    /// Cache of [`Layer::probability`].
    probabilities: Vec<Option<f32>>,
    scratch: Vec<f32>,
}

/// The running step.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    /// `None` before the first one of a sequence.
    token: Option<u64>,
    /// Tokens of the batch; at least 1 once the step has begun.
    n_tokens: u64,
    /// Rows of scores.
    n_rows: u32,
    /// Sum of the weights of uses.
    weight: f32,
    /// Experts used.
    n_used: usize,
}

#[derive(Clone, Debug, Default)]
struct Examples {
    /// Features some steps ago, and whether a use came since then; by expert.
    all: Vec<(Features, bool)>,
    /// Steps since then.
    age: u32,
}

fn fade(means: &mut [f32; N_RATES], keep: &[f32; N_RATES], value: f32) {
    means.iter_mut().zip(*keep).for_each(|(mean, keep)| *mean = *mean * keep + value * (1.0 - keep));
}

impl Layer {
    /// Begins the step of this token, unless it is running. If the examples are old enough, `learn` gets them
    /// and new ones replace them.
    pub(super) fn begin_step(
        &mut self,
        token: u64,
        keep: &[f32; N_RATES],
        learn: impl FnOnce(bool, &[(Features, bool)]),
    ) {
        if self.running.token == Some(token) {
            return;
        }
        if self.running.n_rows > 1 || self.running.weight > 1.5 {
            // A batch uses nearly all experts: there is nothing to learn.
            self.examples.all.clear();
            self.follow.used[0].clear();
        } else if self.running.n_used > 0 {
            self.n_chosen = self.running.n_used;
            self.follow.learn(self.experts.len());
        }
        self.examples.age += 1;
        if self.examples.all.is_empty() || self.examples.age >= HORIZON_TOKENS {
            let mut all = std::mem::take(&mut self.examples.all);
            learn(self.is_scored(), &all);
            all.clear();
            all.extend((0..self.experts.len()).map(|index| (self.features(index), false)));
            self.examples = Examples { all, age: 0 };
        }
        // A sequence that went back to earlier tokens does not tell how many they were.
        let before = self.running.token;
        let n_tokens = before.map_or(Some(token.saturating_add(1)), |before| token.checked_sub(before)).unwrap_or(1);
        self.running = Running { token: Some(token), n_tokens, ..Running::default() };
        self.probabilities.clear();
        self.follow.used.reverse();
        self.follow.used[0].clear();
        self.step = self.step.saturating_add(n_tokens);
        self.sequence_tokens += 1.0;
        self.run_tokens += 1.0;
        self.experts.iter_mut().for_each(|expert| fade(&mut expert.uses, keep, 0.0));
    }

    /// Whether the weights for scores apply.
    pub(super) fn is_scored(&self) -> bool {
        self.is_scored == Some(true)
    }

    pub(super) fn begin_sequence(&mut self) {
        self.running = Running::default();
        self.sequence_tokens = 0.0;
        self.probabilities.clear();
        self.experts.iter_mut().for_each(|expert| expert.n_sequence = 0.0);
        self.follow.used[0].clear();
        self.examples.all.clear();
    }

    /// Statistics that outlive a sequence; residents are saved elsewhere.
    pub(super) fn save(&self, out: &mut Writer) {
        out.u64(self.step);
        out.u64(self.n_chosen as u64);
        out.put([self.is_scored.map_or(2, u8::from)]);
        out.f32s(&[self.run_tokens]);
        out.f32s(&self.demands);
        out.count(self.experts.len());
        self.experts.iter().for_each(|expert| expert.save(out));
        self.follow.save(out);
    }

    pub(super) fn load(saved: &mut Cursor) -> Option<Self> {
        let step = saved.events()?;
        let n_chosen = usize::try_from(saved.events()?).ok()?;
        let is_scored = match saved.array()? {
            [0] => Some(false),
            [1] => Some(true),
            [2] => None,
            _ => return None,
        };
        let ([run_tokens], demands) = (saved.amounts()?, saved.amounts()?);
        let n_experts = saved.count(EXPERT_BYTES).filter(|n| *n <= usize::from(u16::MAX) + 1)?;
        let experts: Option<Vec<Expert>> = (0..n_experts).map(|_| Expert::load(saved, step)).collect();
        let (experts, follow) = (experts?, Follow::load(saved)?);
        Some(Self { experts, step, n_chosen, is_scored, run_tokens, demands, follow, ..Self::default() })
    }

    fn expert(&mut self, index: u16) -> &mut Expert {
        let index = usize::from(index);
        if self.experts.len() <= index {
            self.experts.resize(index + 1, Expert::default());
        }
        &mut self.experts[index]
    }

    /// Forgets evidence of the other kind; `true` for the first of this kind.
    fn expect_evidence(&mut self, is_scored: bool) -> bool {
        let is_first = self.is_scored != Some(is_scored);
        if is_first {
            self.is_scored = Some(is_scored);
            self.examples.all.clear();
            self.experts.iter_mut().for_each(|expert| expert.evidence = [0.0; N_RATES]);
        }
        is_first
    }

    /// An expert's evidence is the logarithm of the ratio of its score to the last selected one's.
    pub(super) fn on_scores(&mut self, scores: &[f32], keep: &[f32; N_RATES]) {
        self.running.n_rows += 1;
        self.probabilities.clear();
        if scores.is_empty() {
            return;
        }
        self.expert((scores.len() - 1).min(usize::from(u16::MAX)) as u16);
        let is_first = self.expect_evidence(true);
        let positive = |score: f32| if score.is_finite() { score.max(1e-12) } else { 1e-12 };
        self.scratch.clear();
        self.scratch.extend(scores.iter().copied().map(positive));
        let guess = (scores.len() as f32 * USED_PART).ceil() as usize;
        let n_chosen = if self.n_chosen > 0 { self.n_chosen } else { guess }.clamp(1, scores.len());
        let threshold = *self.scratch.select_nth_unstable_by(n_chosen - 1, |a, b| b.total_cmp(a)).1;
        for (expert, score) in self.experts.iter_mut().zip(scores.iter().copied().map(positive)) {
            let margin = (score / threshold).ln().clamp(*MARGINS.start(), *MARGINS.end()) * LOG_SCALE;
            if is_first { expert.evidence = [margin; N_RATES] } else { fade(&mut expert.evidence, keep, margin) }
        }
    }

    /// A use in the running step. Without scores, an expert's evidence is its weight, 0 if it was not chosen.
    pub(super) fn on_use(&mut self, index: u16, usage: Use, keep: &[f32; N_RATES]) {
        let weight = if usage.weight.is_finite() { usage.weight.clamp(0.0, 1e6) } else { 0.0 };
        if self.running.n_rows == 0 {
            self.expect_evidence(false);
            if self.running.n_used == 0 {
                self.experts.iter_mut().for_each(|expert| fade(&mut expert.evidence, keep, 0.0));
            }
            let evidence = weight / (1.0 + weight);
            let means = &mut self.expert(index).evidence;
            means.iter_mut().zip(*keep).for_each(|(mean, keep)| *mean += evidence * (1.0 - keep));
        }
        self.probabilities.clear();
        let tokens_before = self.running.weight.max(1.0);
        self.running.weight += weight;
        let more_tokens = self.running.weight.max(1.0) - tokens_before;
        self.sequence_tokens += more_tokens;
        self.run_tokens += more_tokens;
        self.running.n_used += 1;
        let n_tokens = usage.n_tokens as f32;
        let before = self.step - self.running.n_tokens;
        let last = self.step - u64::from(usage.since).min(self.running.n_tokens - 1);
        let expert = self.expert(index);
        let is_first_use = usage.precision.is_some() && expert.last_step <= before;
        let is_revealed = !expert.is_resident[Precision::High.index()];
        if is_first_use {
            expert.last_step = last;
            expert.uses.iter_mut().zip(*keep).for_each(|(mean, keep)| *mean += 1.0 - keep);
            expert.n_sequence += n_tokens;
            expert.n_run += n_tokens;
            if let Some((_, came)) = self.examples.all.get_mut(usize::from(index)) {
                *came = true;
            }
            self.follow.used[0].push(index);
        }
        if is_revealed {
            let demand = usage.precision.map_or(2, Precision::index);
            self.experts[usize::from(index)].demands[demand] += 1.0;
            self.demands[demand] += 1.0;
        }
    }

    pub(super) fn set_resident(&mut self, index: u16, precision: Precision, is_resident: bool) {
        self.expert(index).is_resident[precision.index()] = is_resident;
    }

    pub(super) fn features(&self, index: usize) -> Features {
        let expert = self.experts.get(index).copied().unwrap_or_default();
        let prior = PRIOR_TOKENS;
        let ever = (expert.n_run + prior * USED_PART) / (self.run_tokens + prior);
        let lately = (expert.n_sequence + prior * ever) / (self.sequence_tokens + prior);
        let logarithm = |frequency: f32| frequency.clamp(1e-4, 1.0).ln() * LOG_SCALE;
        let next = self.follow.chance(index);
        let mut features = [1.0; N_FEATURES];
        features[1..=N_RATES].copy_from_slice(&expert.evidence);
        features[1 + N_RATES..=2 * N_RATES].copy_from_slice(&expert.uses);
        let age = if expert.last_step > 0 { self.step - expert.last_step } else { self.step } as f32;
        let [inverse_age, log_age] = [1.0 / (1.0 + age), -(1.0 + age).ln() * LOG_SCALE];
        let rest = [logarithm(lately), logarithm(ever), inverse_age, log_age, logarithm(next)];
        features[1 + 2 * N_RATES..].copy_from_slice(&rest);
        features
    }

    /// The probability of a use, cached until the next event in this layer.
    pub(super) fn probability(&mut self, index: usize, compute: impl FnOnce(&Self, usize) -> f32) -> f32 {
        if let Some(Some(known)) = self.probabilities.get(index) {
            return *known;
        }
        let probability = compute(self, index);
        self.probabilities.resize(self.probabilities.len().max(index + 1), None);
        self.probabilities[index] = Some(probability);
        probability
    }

    /// Cost of a use without this version, in high loads: 0 while the expert's other version serves it.
    pub(super) fn cost(&self, index: u16, precision: Precision, low_cost: f32) -> f32 {
        let expert = self.experts.get(usize::from(index)).copied().unwrap_or_default();
        let [high_is_here, low_is_here] = expert.is_resident;
        let total = |demands: Demands| demands.into_iter().sum::<f32>();
        let part = |demand: usize, prior: f32| {
            let layer = (self.demands[demand] + prior) / (total(self.demands) + 1.0);
            (expert.demands[demand] + PRIOR_DEMANDS * layer) / (total(expert.demands) + PRIOR_DEMANDS)
        };
        let (high, low) = (part(Precision::High.index(), 1.0), part(Precision::Low.index(), 0.0) * low_cost);
        match precision {
            Precision::High if low_is_here => high,
            Precision::High => high + low,
            Precision::Low if high_is_here => 0.0,
            Precision::Low => low,
        }
    }
}
