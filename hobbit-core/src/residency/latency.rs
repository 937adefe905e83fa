//! The smallest strength of rerouting with which tokens take no longer than they may (SMoE's latency target).
//!
//! A strength is a step on a ladder of λ or α ([`RoutingOptions::ladder`](crate::options::RoutingOptions::ladder)):
//! with every step tokens may go a little further for an expert that is in memory, and take less time, or as long. A
//! *trial* tries three of them in six windows, A B C C B A, so that what changes steadily meanwhile (a cache that
//! fills, a context that grows) falls on all alike. Through what is known of all strengths a curve is drawn that
//! never rises (isotonic regression), and the smallest strength below the target is taken. The first trial tries the
//! ladder's ends and its middle, later ones the strength that was found and its neighbours. They come after rests,
//! which double as long as trials confirm each other.
//!
//! There is a step of hysteresis: one step down takes two trials in a row. Up it goes at once, and in a rest too,
//! after two windows in a row in which tokens took clearly longer than they may.
//!
//! Pure: the times of tokens are data.

use crate::options::Knob;
use crate::stats::{LatencyReport, LatencyStep};
use crate::trial::{FadingMean, Mean, Trial, Windows};

// Lengths are in tokens.

/// A trial's six windows: its first tokens live on what the window before left in the cache.
const WINDOWS: Windows = Windows { settings: &[0, 1, 2, 2, 1, 0], measured: 16, settle: 4 };

/// From one trial to the next at first. Each trial that confirms the one before doubles it.
const REST_TOKENS: u32 = 64;
const REST_TOKENS_MAX: u32 = 4096;

/// Share of the target by which a window of a rest exceeds it clearly.
const SLACK: f64 = 0.05;

/// See the module. One engine thread uses it: [`Latency::strength`], a single token, [`Latency::end_token`]. Batches
/// are not shown to it.
#[derive(Clone, Debug)]
pub struct Latency {
    target_seconds: f64,
    /// The strength in use.
    knob: Knob,
    /// Strengths of it, ascending, at least 3.
    ladder: Vec<f32>,
    /// The step that was found last.
    step: usize,
    state: State,
    /// The last measured time of tokens with each strength.
    known: Vec<FadingMean>,
    /// Tokens of the next rest.
    rest: u32,
    /// The last trial would have gone one step down.
    would_lower: bool,
    /// The last window of the rest was too slow.
    was_slow: bool,
    trials: u64,
    /// A notice is pending: the target is out of reach.
    has_news: bool,
    /// A notice was given, or is pending.
    is_told: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// The trial of three strengths.
    Trial { tried: [usize; 3], trial: Trial },
    /// Tokens until the next trial, tokens since the strength changed or a window ended, and what they took.
    Rest { left: u32, token: u32, took: Mean },
}

/// Weight of earlier measurements after a change that was not tried.
const STALE: f64 = 0.125;

impl Latency {
    /// Begins with a trial.
    pub fn new<const N: usize>(target_seconds: f64, (knob, ladder): (Knob, [f32; N])) -> Self {
        const { assert!(N >= 3, "a trial tries three") };
        let top = N - 1;
        Self {
            target_seconds,
            known: vec![FadingMean::default(); N],
            knob,
            ladder: ladder.to_vec(),
            step: 0,
            state: State::trial([0, top / 2, top]),
            rest: REST_TOKENS,
            would_lower: false,
            was_slow: false,
            trials: 0,
            has_news: false,
            is_told: false,
        }
    }

    /// The strength in use.
    pub fn knob(&self) -> Knob {
        self.knob
    }

    /// How strong it is for the running token.
    pub fn strength(&self) -> f32 {
        self.ladder[self.running()]
    }

    /// The step for the running token.
    fn running(&self) -> usize {
        match &self.state {
            State::Trial { tried, trial } => tried[trial.setting()],
            State::Rest { .. } => self.step,
        }
    }

    /// Records the time of a single token, in seconds. An invalid time was not measured: only the token counts.
    pub fn end_token(&mut self, seconds: f64) {
        let is_measured = seconds.is_finite() && seconds > 0.0;
        match &mut self.state {
            State::Trial { tried, trial } => {
                trial.end_token(is_measured.then_some(seconds));
                if trial.is_over() {
                    let (tried, took) = (*tried, trial.took);
                    self.judge(tried.into_iter().zip(took));
                }
            }
            State::Rest { left, token, took } => {
                if is_measured && *token >= WINDOWS.settle {
                    took.add(seconds);
                }
                (*token, *left) = (*token + 1, left.saturating_sub(1));
                let (is_over, is_window) = (*left == 0, *token == WINDOWS.tokens());
                if is_window {
                    self.watch();
                }
                if is_over {
                    self.state = State::trial(self.neighbours());
                }
            }
        }
    }

    /// Three strengths, the one that was found in their middle as far as the ladder goes.
    fn neighbours(&self) -> [usize; 3] {
        let low = self.step.saturating_sub(1).min(self.ladder.len() - 3);
        [low, low + 1, low + 2]
    }

    /// A window of a rest is over.
    fn watch(&mut self) {
        let State::Rest { token, took, .. } = &mut self.state else { return };
        let mean = std::mem::take(took);
        // Nothing has changed: the next window needs no tokens to settle.
        *token = WINDOWS.settle;
        if mean.n == 0 {
            return;
        }
        self.learn(self.step, &mean, 0.75);
        let is_slow = mean.seconds - mean.variance().sqrt() > self.target_seconds * (1.0 + SLACK);
        let is_clear = is_slow && self.was_slow;
        self.was_slow = is_slow && !is_clear;
        if is_clear && self.step + 1 < self.ladder.len() {
            self.known.iter_mut().for_each(|known| known.fade(STALE));
            self.step += 1;
            self.rest = REST_TOKENS;
            self.would_lower = false;
            if let State::Rest { left, token, .. } = &mut self.state {
                (*left, *token) = ((*left).min(REST_TOKENS), 0);
            }
        } else if is_clear {
            self.tell();
        }
    }

    /// Adds the time of more tokens with a strength; earlier ones count for this much less.
    fn learn(&mut self, strength: usize, mean: &Mean, keeps: f64) {
        if mean.n > 0 {
            self.known[strength].fade(keeps);
            self.known[strength].take(mean.seconds, mean.n.into());
        }
    }

    /// The user is to know when a target gets out of reach.
    fn tell(&mut self) {
        let is_out = self.is_reachable() == Some(false);
        self.has_news |= is_out && !self.is_told;
        self.is_told = is_out;
    }

    /// A trial is over: what tokens took with the strengths it tried.
    fn judge(&mut self, tried: impl Iterator<Item = (usize, Mean)>) {
        self.known.iter_mut().for_each(|known| known.fade(0.5));
        for (strength, mean) in tried {
            self.learn(strength, &mean, 1.0);
        }
        self.trials += 1;
        let before = self.step;
        let top = self.ladder.len() - 1;
        let needed = (0..top).find(|&strength| self.seconds(strength).is_none_or(|took| took <= self.target_seconds));
        let needed = needed.unwrap_or(top);
        let is_step_down = needed + 1 == self.step && self.trials > 1;
        let waits = is_step_down && !self.would_lower;
        self.would_lower = waits;
        if !waits {
            self.step = needed;
        }
        let is_confirmed = self.step == before && !waits && self.trials > 1;
        self.rest = if is_confirmed { self.rest.saturating_mul(2).min(REST_TOKENS_MAX) } else { REST_TOKENS };
        self.was_slow = false;
        self.tell();
        self.state = State::Rest { left: self.rest, token: 0, took: Mean::default() };
    }

    /// Time of a token with a strength, by the curve through all measurements; `None` without any.
    fn seconds(&self, strength: usize) -> Option<f64> {
        let points = (0..).zip(self.known.iter().copied()).filter(|(_, known)| known.weight > 0.0);
        let curve = never_rising(points);
        let next = curve.partition_point(|(at, _)| *at < strength);
        let (after, before) = (curve.get(next).or(curve.last())?, curve.get(next.saturating_sub(1))?);
        if after.0 == before.0 || strength >= after.0 {
            return Some(after.1);
        }
        let part = strength.saturating_sub(before.0) as f64 / (after.0 - before.0) as f64;
        Some(before.1 + part * (after.1 - before.1))
    }

    /// Whether any strength meets the target; `None` before the first trial's end.
    fn is_reachable(&self) -> Option<bool> {
        let least = self.seconds(self.ladder.len() - 1).filter(|_| self.trials > 0)?;
        Some(least <= self.target_seconds * (1.0 + SLACK))
    }

    /// The notice that the target cannot be met, once.
    pub fn take_news(&mut self) -> Option<LatencyReport> {
        std::mem::take(&mut self.has_news).then(|| self.report())
    }

    pub fn report(&self) -> LatencyReport {
        let measured = self.ladder.iter().zip(&self.known).filter(|(_, known)| known.weight > 0.0);
        LatencyReport {
            target_seconds: self.target_seconds,
            knob: self.knob,
            strength: self.ladder[self.step],
            is_trying: matches!(self.state, State::Trial { .. }),
            seconds: self.seconds(self.step),
            is_reachable: self.is_reachable(),
            least_seconds: self.seconds(self.ladder.len() - 1),
            trials: self.trials,
            measured: measured.map(|(&strength, known)| LatencyStep { strength, seconds: known.mean }).collect(),
        }
    }
}

impl State {
    fn trial(tried: [usize; 3]) -> Self {
        Self::Trial { tried, trial: Trial::new(WINDOWS) }
    }
}

/// The curve that never rises and is nearest to these points (pool adjacent violators), ascending by position.
fn never_rising(points: impl Iterator<Item = (usize, FadingMean)>) -> Vec<(usize, f64)> {
    // Each with the positions that share it.
    let mut blocks: Vec<(Vec<usize>, FadingMean)> = Vec::new();
    for (at, point) in points {
        blocks.push((vec![at], point));
        while let [.., (_, before), (_, last)] = &blocks[..]
            && last.mean > before.mean
            && let (Some((positions, last)), Some((others, before))) = (blocks.pop(), blocks.last_mut())
        {
            before.take(last.mean, last.weight);
            others.extend(positions);
        }
    }
    blocks.iter().flat_map(|(positions, point)| positions.iter().map(|&at| (at, point.mean))).collect()
}

#[cfg(test)]
mod tests;
