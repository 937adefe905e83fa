//! How many tokens to draft in the next step, by what drafts cost here and how many of them are accepted. Pure.
//!
//! With experts on the disk a wider step may read more of them, so drafting does not always pay. [`Gate`] measures the
//! seconds of steps by their width, apart from waiting for missing experts, how many experts a token and a draft miss
//! now, and the share of accepted drafts by their place. It drafts if more tokens a second are expected, and, where
//! tokens wait for experts, if trials confirm it.

use std::collections::VecDeque;
use std::fmt;

use serde::Serialize;

use crate::load::prefetch::{Governor, GovernorReport};
use crate::route::DECODE_TOKENS_MAX;
use crate::trial::{FadingMean, Windows, is_measured};
use crate::units::Percent;

/// Tokens over which a loss is bounded.
const WINDOW_TOKENS: u64 = 256;
/// Most seconds that drafting may lose in such a window, as a share of the window's seconds without drafts. Below the
/// promised 2 %, because seconds are estimates.
const LOSS_MAX: f64 = 0.015;
/// Steps after which a measured time counts half, and drafts after which an acceptance does.
const HALF_LIFE: f64 = 32.0;
/// Half-lives of the number of missing experts, which changes with the text, and of the pace.
const MISSING_HALF_LIFE: f64 = 4.0;
const PACE_HALF_LIFE: f64 = 8.0;
/// Steps after which a time counts half beside a new one of the same width.
const AGE_HALF_LIFE: f64 = 128.0;
/// Expected gain below which no drafts are made.
const GAIN_MIN: f64 = 0.02;
/// Trials decide if a token waits for missing experts longer than this part of its time.
const WAIT_MIN: f64 = 0.03;
/// The windows of such a trial. Experts that steps with drafts evict are missing for some tokens, so they are long.
const TRIALS: Windows = Windows { settings: &[0, 1, 1, 0], measured: 16, settle: 8 };
/// Part of a token's time that drafts must win, or lose, there.
const TRIALS_MIN: f64 = 0.05;
/// Steps with drafts after which the time of a step without any is measured again.
const PLAIN_EVERY: u32 = 32;
/// Steps with drafts since then after which one of them has one more draft than seems best, to measure it.
const WIDER_AT: u32 = 16;
/// Steps without drafts before the first draft: the first ones read more than later ones.
const PLAIN_FIRST: u32 = 8;
/// Steps with drafts in a trial.
const TRIAL_STEPS: u32 = 4;
/// Steps from one trial to the next. Each trial without a gain doubles it.
const REST_MIN: u32 = 32;
const REST_MAX: u32 = 2048;
/// Tokens that a draft model reads before its speed is known, twice: the first ones bring its weights into memory.
const FIRST_READS: usize = 32;
/// Assumed before it is measured: the share of drafts that is accepted, the weight of that assumption in drafts, and
/// the part of a step's time that one more token adds.
const ACCEPTANCE: f64 = 0.6;
const ACCEPTANCE_WEIGHT: f64 = 1.5;
const SLOPE: f64 = 0.4;

/// Settings of a [`Gate`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateOptions {
    /// Most tokens to draft in a step, for each sequence.
    pub n_max: u32,
    /// Always draft as many, and measure only.
    pub fixed: bool,
    /// The drafter computes `n_max` drafts however few are asked for.
    pub always_n_max: bool,
}

/// One step: a batch with the next token of each sequence and its drafts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// For each sequence, drafted tokens in the batch, and how many of them were accepted.
    pub drafts: Vec<(u32, u32)>,
    pub draft_seconds: f64,
    /// Tokens that a draft model read to catch up with the texts before it drafted, and seconds of that.
    pub caught_up: (usize, f64),
    /// Seconds of evaluating the batch.
    pub seconds: f64,
    /// The part of `seconds` in which it waited for missing experts.
    pub wait_seconds: f64,
    /// Missing experts that only drafts wanted, and all other missing experts.
    pub n_missing: (u64, u64),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GateReport {
    pub steps: u64,
    pub steps_with_drafts: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// Tokens that the last step was allowed to draft for each sequence.
    pub n_drafts: u32,
    /// Seconds of drafting and catching up.
    pub draft_seconds: f64,
    /// Batch width in tokens, and recent seconds of a step of that width without waiting for missing experts.
    pub seconds_by_width: Vec<(u32, f64)>,
    /// Trials of drafting where tokens wait for experts.
    pub trials: GovernorReport,
}

impl fmt::Display for GateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, steps_with_drafts, drafted, accepted, .. } = self;
        if *drafted == 0 {
            return write!(f, "no drafts");
        }
        let share = Percent(*accepted as f64 / *drafted as f64);
        write!(f, "{accepted} of {drafted} drafts accepted ({share}) in {steps_with_drafts} of {steps} steps")
    }
}

impl FadingMean {
    /// Adds a value, limited to four times the mean: a single hiccup says little about the next step.
    fn add(&mut self, value: f64, half_life: f64) {
        let value = if self.weight > 2.0 { value.min(4.0 * self.mean) } else { value };
        self.add_whole(value, half_life);
    }

    fn add_whole(&mut self, value: f64, half_life: f64) {
        self.fade(f64::exp2(-1.0 / half_life));
        self.take(value, 1.0);
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Missing {
    /// For a token that is no draft, now.
    of_token: FadingMean,
    /// In steps with drafts: for a token, and for a draft beyond its token's.
    beside_drafts: FadingMean,
    of_draft: FadingMean,
    /// Missed experts of a step, and the seconds of waiting for them.
    of_step: FadingMean,
    wait_seconds: FadingMean,
}

impl Missing {
    fn add(&mut self, step: &Step, n_sequences: u32, n_drafted: u32) {
        let (of_drafts, others) = step.n_missing;
        let of_token = others as f64 / f64::from(n_sequences);
        self.of_token.add_whole(of_token, MISSING_HALF_LIFE);
        if n_drafted > 0 {
            self.beside_drafts.add_whole(of_token, HALF_LIFE);
            self.of_draft.add_whole(of_drafts as f64 / f64::from(n_drafted), HALF_LIFE);
        }
        self.of_step.add((of_drafts + others) as f64, HALF_LIFE);
        self.wait_seconds.add(step.wait(), HALF_LIFE);
    }

    /// Seconds for which a step will wait.
    fn seconds(&self, n_sequences: u32, n_drafts: u32) -> f64 {
        if self.of_step.mean <= 0.0 {
            return self.wait_seconds.mean;
        }
        // A draft misses as many more than a token as it did before.
        let share = if self.beside_drafts.mean > 0.0 { self.of_draft.mean / self.beside_drafts.mean } else { 1.0 };
        let n_missing = self.of_token.mean * (f64::from(n_sequences) + share * f64::from(n_drafts));
        n_missing * self.wait_seconds.mean / self.of_step.mean
    }
}

impl Step {
    /// Seconds of waiting, at most those of evaluating.
    fn wait(&self) -> f64 {
        if is_measured(self.wait_seconds) { self.wait_seconds.min(self.seconds) } else { 0.0 }
    }

    fn drafting(&self) -> f64 {
        if is_measured(self.draft_seconds) { self.draft_seconds } else { 0.0 }
    }
}

/// Seconds of steps without waiting for missing experts.
#[derive(Clone, Debug)]
struct Times {
    /// By width, as multiples of `pace` then; `[0]` is unused.
    by_width: Vec<FadingMean>,
    /// Seconds of a token's step without drafts now. Steps of all widths become faster while the cache warms up and
    /// slower beside other programs, so one width tells what others take that were measured earlier.
    pace: FadingMean,
}

impl Times {
    fn add(&mut self, width: usize, seconds: f64, has_drafts: bool) {
        if !has_drafts || self.pace.weight <= 0.0 {
            self.pace.add(seconds / (1.0 + SLOPE * (width - 1) as f64), PACE_HALF_LIFE);
        }
        self.by_width[width].add(seconds / self.pace.mean.max(f64::MIN_POSITIVE), HALF_LIFE);
    }

    fn is_known(&self, width: usize) -> bool {
        self.by_width[width].weight > 0.0
    }

    /// Recent seconds of a step of this width, which is known.
    fn at(&self, width: usize) -> f64 {
        self.by_width[width].mean * self.pace.mean
    }

    /// Seconds of a step of `width` tokens: measured, or on the line through the nearest measured widths; `None` if
    /// none is known.
    fn of(&self, width: usize) -> Option<f64> {
        let known = |at: &usize| self.is_known(*at);
        let below = (1..=width).rev().find(known)?;
        if below == width {
            return Some(self.at(width));
        }
        let (x, y) = (below as f64, self.at(below));
        let slope_to = |other: usize| ((self.at(other) - y) / (other as f64 - x)).max(0.0);
        let nearest = (width + 1..self.by_width.len()).find(known).or_else(|| (1..below).rev().find(known));
        let slope = nearest.map_or(SLOPE * y / x, slope_to);
        Some(y + slope * (width as f64 - x))
    }
}

/// Seconds that drafts take.
#[derive(Clone, Debug, Default)]
struct Drafting {
    /// To draft one token.
    draft: FadingMean,
    /// Spent on drafting since the last draft.
    vain: f64,
    /// To read one token into a draft model.
    read: FadingMean,
    /// Steps in which it read.
    n_reads: u32,
}

/// Losses of drafts.
#[derive(Clone, Debug, Default)]
struct Ledger {
    /// Tokens of recent steps, with the seconds they lost (negative: won).
    steps: VecDeque<(u64, f64)>,
    /// Seconds of catching up that later tokens have to win back, and how much each.
    debt: f64,
    debt_of_token: f64,
}

impl Ledger {
    fn borrow(&mut self, seconds: f64) {
        self.debt += seconds;
        self.debt_of_token = self.debt / WINDOW_TOKENS as f64;
    }

    /// Enters a step's loss, with its part of the debt.
    fn enter(&mut self, tokens: u64, lost: f64) {
        let paid = self.debt.min(self.debt_of_token * tokens as f64);
        self.debt -= paid;
        self.steps.push_back((tokens, lost + paid));
        let mut held: u64 = self.steps.iter().map(|(tokens, _)| tokens).sum();
        while let Some((tokens, _)) = self.steps.front().filter(|(tokens, _)| held - tokens >= WINDOW_TOKENS) {
            held -= tokens;
            self.steps.pop_front();
        }
    }

    /// The most seconds that a stretch of steps up to now has lost.
    fn worst(&self) -> f64 {
        let (mut sum, mut worst) = (0.0, 0.0_f64);
        for (_, lost) in self.steps.iter().rev() {
            sum += lost;
            worst = worst.max(sum);
        }
        worst
    }
}

/// When steps without drafts, and short trials of drafts, are due.
#[derive(Clone, Debug)]
struct Turns {
    plain_steps: u32,
    /// Steps with drafts since the last without.
    since_plain: u32,
    /// Steps with drafts left in the trial; 0 between trials.
    trial: u32,
    rest: u32,
    rest_left: u32,
}

impl Turns {
    fn end_step(&mut self, has_drafts: bool) {
        if !has_drafts {
            self.plain_steps = self.plain_steps.saturating_add(1);
            self.since_plain = 0;
            self.rest_left = self.rest_left.saturating_sub(1);
            return;
        }
        self.since_plain += 1;
        if self.trial > 0 {
            self.trial -= 1;
            if self.trial == 0 {
                self.rest_left = self.rest;
            }
        }
    }

    /// Whether drafts may be made: they are expected to pay, or a trial runs or begins.
    fn may_draft(&mut self, pays: bool) -> bool {
        if self.trial > 0 {
            return true;
        }
        if pays {
            self.rest = REST_MIN;
        } else if self.rest_left > 0 {
            return false;
        } else {
            self.trial = TRIAL_STEPS;
            self.rest = (2 * self.rest).min(REST_MAX);
        }
        true
    }
}

/// Decides how many tokens to draft.
///
/// For each step: [`Gate::n_drafts`], the step, [`Gate::stepped`]. A step of `s` sequences with `k` drafts each takes
/// `T(s (1 + k))` and brings `s (1 + a_1 + a_1 a_2 + ...)` tokens, where `a_i` is the acceptance of the i-th draft
/// after accepted ones. The gate takes the `k` with the most tokens a second. If that is 0, short trials look whether
/// it has changed, ever more rarely. Whatever it expects, drafts stop if they have lost 1.5 % of any stretch of the
/// last 256 tokens.
///
/// Steps of several tokens also change which experts stay in memory, so that later tokens miss others. No estimate
/// shows that, so while tokens wait for missing experts, drafts have to win in trials against stretches without any
/// ([`Governor`]).
///
/// Before a draft model drafts, it may have to read much of the text. That time is spread over 256 tokens: drafts must
/// win it back within these. A trial, of which nothing is expected, may not lose it.
#[derive(Clone, Debug)]
pub struct Gate {
    options: GateOptions,
    times: Times,
    missing: Missing,
    /// By place in the draft.
    acceptance: Vec<FadingMean>,
    drafting: Drafting,
    ledger: Ledger,
    turns: Turns,
    /// Whether drafts win where tokens wait for experts, and whether the running step would have drafts if so.
    trials: Governor,
    is_tried: bool,
    report: GateReport,
}

impl Gate {
    pub fn new(options: GateOptions) -> Self {
        let n_max = options.n_max.min(DECODE_TOKENS_MAX as u32 - 1);
        Self {
            options: GateOptions { n_max, ..options },
            times: Times { by_width: vec![FadingMean::default(); DECODE_TOKENS_MAX + 1], pace: FadingMean::default() },
            missing: Missing::default(),
            acceptance: vec![FadingMean::default(); n_max as usize],
            drafting: Drafting::default(),
            ledger: Ledger::default(),
            turns: Turns { plain_steps: 0, since_plain: 0, trial: TRIAL_STEPS, rest: REST_MIN, rest_left: 0 },
            trials: Governor::on_trial(TRIALS, TRIALS_MIN),
            is_tried: false,
            report: GateReport::default(),
        }
    }

    /// Most tokens to draft in the next step for each of `n_sequences`; 0: none. The batch stays within
    /// [`DECODE_TOKENS_MAX`] tokens. `n_behind`: tokens that a draft model has to read before ([`Step::caught_up`]).
    pub fn n_drafts(&mut self, n_sequences: usize, n_behind: usize) -> u32 {
        let n_sequences = n_sequences.max(1) as u32;
        let n_drafts = self.decide(n_sequences, n_behind as f64 * self.drafting.read.mean);
        self.is_tried = n_drafts > 0 && !self.options.fixed && self.waits(n_sequences);
        self.report.n_drafts = if self.is_tried && !self.trials.is_on() { 0 } else { n_drafts };
        self.report.n_drafts
    }

    /// Most tokens that a draft model should read for a sequence now. If it lacks more, it cannot draft yet.
    pub fn n_reads_max(&self) -> usize {
        if self.options.fixed || self.drafting.n_reads >= 2 { usize::MAX } else { FIRST_READS }
    }

    /// Records a step. Seconds that are negative or not finite were not measured.
    pub fn stepped(&mut self, step: &Step) {
        let n_sequences = step.drafts.len() as u32;
        let n_drafted: u32 = step.drafts.iter().map(|(drafted, _)| drafted).sum();
        let n_accepted: u32 = step.drafts.iter().map(|(drafted, accepted)| accepted.min(drafted)).sum();
        if n_sequences == 0 {
            return;
        }
        self.report.steps += 1;
        self.report.steps_with_drafts += u64::from(n_drafted > 0);
        self.report.drafted += u64::from(n_drafted);
        self.report.accepted += u64::from(n_accepted);
        if is_measured(step.draft_seconds) {
            self.report.draft_seconds += step.draft_seconds;
            self.drafting.vain += step.draft_seconds;
            if n_drafted > 0 {
                let of_draft = std::mem::take(&mut self.drafting.vain) / self.n_computed(n_sequences, n_drafted);
                self.drafting.draft.add(of_draft, HALF_LIFE);
            }
        }
        if let (n_read @ 1.., seconds) = step.caught_up
            && is_measured(seconds)
        {
            self.report.draft_seconds += seconds;
            self.drafting.n_reads += 1;
            if self.drafting.n_reads == 2 {
                self.drafting.read = FadingMean::default();
            }
            self.drafting.read.add(seconds / n_read as f64, HALF_LIFE);
            self.ledger.borrow(seconds);
        }
        for &(drafted, accepted) in &step.drafts {
            // Drafts behind a rejected one were not judged.
            for (at, place) in self.acceptance.iter_mut().enumerate().take(drafted.min(accepted + 1) as usize) {
                place.add(f64::from(u8::from(at < accepted as usize)), HALF_LIFE);
            }
        }
        let width = (n_sequences + n_drafted) as usize;
        self.times.by_width.iter_mut().for_each(|recent| recent.fade(f64::exp2(-1.0 / AGE_HALF_LIFE)));
        if width <= DECODE_TOKENS_MAX && is_measured(step.seconds) {
            self.times.add(width, step.seconds - step.wait(), n_drafted > 0);
            self.missing.add(step, n_sequences, n_drafted);
        }
        self.turns.end_step(n_drafted > 0);
        let n_tokens = n_sequences + n_accepted;
        if self.is_tried {
            self.compare(step, n_tokens);
        }
        self.ledger.enter(n_tokens.into(), self.lost(step, n_sequences, n_drafted, n_tokens));
    }

    /// A prompt was read: trials do not measure the next tokens, which miss what it evicted.
    pub fn interrupt(&mut self) {
        self.trials.interrupt();
    }

    pub fn report(&self) -> GateReport {
        let known = (0..=DECODE_TOKENS_MAX).filter(|width| self.times.is_known(*width));
        let seconds_by_width = known.map(|width| (width as u32, self.times.at(width))).collect();
        GateReport { seconds_by_width, trials: self.trials.report(), ..self.report.clone() }
    }

    /// Whether tokens wait for missing experts.
    fn waits(&self, n_sequences: u32) -> bool {
        let plain = self.step_seconds(n_sequences, 0).unwrap_or(0.0);
        self.missing.seconds(n_sequences, 0) > WAIT_MIN * plain
    }

    /// Gives a step's tokens to the trials.
    fn compare(&mut self, step: &Step, n_tokens: u32) {
        let of_token = |seconds: f64| seconds / f64::from(n_tokens);
        for _ in 0..n_tokens {
            self.trials.end_token(of_token(step.seconds + step.drafting()), of_token(step.wait()));
        }
    }

    /// `catch_up`: seconds in which a draft model would read before.
    fn decide(&mut self, n_sequences: u32, catch_up: f64) -> u32 {
        let room = (DECODE_TOKENS_MAX as u32 / n_sequences).saturating_sub(1);
        let n_max = self.options.n_max.min(room);
        if self.options.fixed || n_max == 0 {
            return n_max;
        }
        let Some(plain) = self.step_seconds(n_sequences, 0) else { return 0 };
        if self.turns.plain_steps < PLAIN_FIRST || self.turns.since_plain >= PLAIN_EVERY {
            return 0;
        }
        let (best, rate) = self.best(n_sequences, n_max, plain, catch_up);
        let pays = rate > (1.0 + GAIN_MIN) / plain;
        if !self.turns.may_draft(pays) {
            return 0;
        }
        let (wanted, at_stake) = match pays {
            true if self.turns.since_plain == WIDER_AT => ((best + 1).min(n_max), 0.0),
            true => (best, 0.0),
            false => (best.max(n_max.min(2)), catch_up),
        };
        // Fewer drafts lose less if all are rejected.
        let left = LOSS_MAX * WINDOW_TOKENS as f64 * plain / f64::from(n_sequences) - self.ledger.worst() - at_stake;
        (1..=wanted).rev().find(|&k| self.cost(n_sequences, k, plain) - plain <= left).unwrap_or(0)
    }

    /// The number of drafts, at least 1, with the most tokens a second for each sequence, and these.
    fn best(&self, n_sequences: u32, n_max: u32, plain: f64, catch_up: f64) -> (u32, f64) {
        let catch_up = catch_up * f64::from(n_sequences) / WINDOW_TOKENS as f64;
        let (mut best, mut best_rate) = (1, 0.0);
        let (mut tokens, mut reached) = (1.0, 1.0);
        for k in 1..=n_max {
            reached *= self.acceptance_at(k as usize - 1);
            tokens += reached;
            let rate = tokens / (self.cost(n_sequences, k, plain) + catch_up * tokens);
            if rate > best_rate {
                (best, best_rate) = (k, rate);
            }
        }
        (best, best_rate)
    }

    /// Seconds of a step with `k` drafts for each sequence, and of drafting them.
    fn cost(&self, n_sequences: u32, k: u32, plain: f64) -> f64 {
        let n_drafts = n_sequences * k;
        let seconds = self.step_seconds(n_sequences, n_drafts).unwrap_or(plain * (1.0 + SLOPE * f64::from(n_drafts)));
        seconds + self.drafting.draft.mean * self.n_computed(n_sequences, n_drafts)
    }

    /// Drafts that the drafter computes for `n_drafts`.
    fn n_computed(&self, n_sequences: u32, n_drafts: u32) -> f64 {
        f64::from(if self.options.always_n_max { n_sequences * self.options.n_max } else { n_drafts })
    }

    /// Acceptance of the draft at `place` after accepted ones: measured, and before that as at the place before.
    fn acceptance_at(&self, place: usize) -> f64 {
        let before = if place == 0 { ACCEPTANCE } else { self.acceptance_at(place - 1) };
        let FadingMean { mean, weight } = self.acceptance[place];
        (mean * weight + before * ACCEPTANCE_WEIGHT) / (weight + ACCEPTANCE_WEIGHT)
    }

    /// Seconds of a step, with as many missing experts as now; `None` if no step was measured.
    fn step_seconds(&self, n_sequences: u32, n_drafts: u32) -> Option<f64> {
        let width = (n_sequences + n_drafts).min(DECODE_TOKENS_MAX as u32);
        Some(self.times.of(width as usize)? + self.missing.seconds(n_sequences, n_drafts))
    }

    /// Seconds that a step has lost beside its tokens without drafts, at recent times.
    fn lost(&self, step: &Step, n_sequences: u32, n_drafted: u32, n_tokens: u32) -> f64 {
        let seconds = |n_drafts| self.step_seconds(n_sequences, n_drafts);
        let (Some(plain), Some(took)) = (seconds(0), seconds(n_drafted)) else { return 0.0 };
        took + step.drafting() - plain * f64::from(n_tokens) / f64::from(n_sequences)
    }
}

#[cfg(test)]
mod tests;
