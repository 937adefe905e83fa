//! Whether a setting pays, such as prefetching: measured, and given up where it does not.

use std::fmt;

use crate::trial::{Mean, Trial, Windows, is_measured};

/// Whether the setting is off or on in a trial's windows.
const OFF: usize = 0;
const ON: usize = 1;

/// Tokens before the first trial: short answers have none.
const FIRST_TOKENS: u32 = 16;

/// Fewest tokens from one trial to the next. Each clear trial that confirms the one before doubles them.
const REST_TOKENS: u32 = 64;
const REST_TOKENS_MAX: u32 = 4096;

/// Most of the time that trials may cost: the worse setting's loss in a trial, spread over the rest behind it.
const COST_MAX: f64 = 0.004;

/// Standard errors that on and off must differ by.
const ERRORS_MIN: f64 = 0.5;

/// Standard errors that make a difference clear.
const ERRORS_CLEAR: f64 = 2.0;

/// Part of a token's time that the standard error, and waits for reads, must exceed to count.
const PART_MIN: f64 = 0.01;

/// Change of a token's time since the last trial that makes its result worthless.
const CHANGE_MIN: f64 = 0.2;

/// Part of the earlier trials' weight that is left at the next one.
const KEEP: f64 = 0.9;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GovernorReason {
    /// The user said so.
    Fixed,
    /// No trial has ended yet.
    #[default]
    Untried,
    /// It is being tried: on and off in turns.
    Trial,
    /// Tokens took less time with it.
    Pays,
    /// Tokens took more time with it.
    Harms,
    /// No clear difference was measured: the setting stays, off at first.
    NoDifference,
}

impl fmt::Display for GovernorReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fixed => "as asked",
            Self::Untried => "not tried yet",
            Self::Trial => "being tried",
            Self::Pays => "tokens are faster with it",
            Self::Harms => "tokens are slower with it",
            Self::NoDifference => "no difference measured",
        })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct GovernorReport {
    pub is_on: bool,
    pub reason: GovernorReason,
    /// Time per token without prefetching minus with it, in seconds, by the last trial.
    pub benefit_seconds: Option<f64>,
    /// Standard error of that.
    pub benefit_error_seconds: Option<f64>,
    pub trials: u64,
    /// Times that prefetching was given up after it had been on, or had been tried for the first time.
    pub given_up: u64,
    pub tokens_on: u64,
    pub tokens_off: u64,
    /// Tokens until the next trial; 0 in a trial, and where there will be none.
    pub rest_tokens: u32,
}

/// Switches a setting on and off.
///
/// It is off at first. A trial compares four windows. Tokens that are off make no predictions, so what predictions cost
/// is a part of what is compared. Trials add up, later ones weighing more, until the difference is clear. If
/// tokens are clearly faster with the setting it is on, if clearly slower off, and otherwise it stays as before.
///
/// The next trial comes after a rest that is long enough for what the worse setting lost in the trial to be at most
/// 0.4 % of the time. It doubles as long as clear trials confirm each other. If the time of tokens changes
/// meanwhile, by another text, another budget or another load of the disk, earlier trials no longer count. While
/// the setting is off and tokens hardly wait for reads, there is no trial: waits are what it changes.
///
/// For each decode batch: [`Governor::is_on`], the batch, [`Governor::end_batch`]. A batch of several tokens counts as
/// one. A trial measures batches of one width: tokens of wider ones are faster whatever is read ahead.
#[derive(Clone, Debug, Default)]
pub struct Governor {
    windows: Windows,
    /// Part of a token's time that the setting must win, or lose, to be switched.
    part_min: f64,
    state: State,
    /// The last decision.
    decided_on: bool,
    /// Tokens of the next rest.
    rest: u32,
    /// Times of the last trial's tokens.
    on: Mean,
    off: Mean,
    /// Tokens of a trial's batches, once it has one.
    width: Option<u32>,
    /// Result of the trials so far: the saved part of a token's time, and its variance.
    found: Option<(f64, f64)>,
    /// Tokens that are not measured.
    unsettled: u32,
    lately: Lately,
    /// Without the fields that follow from the state.
    report: GovernorReport,
}

/// Tokens measured since the last trial.
#[derive(Clone, Copy, Debug, Default)]
struct Lately {
    n: u32,
    /// Running means of their time, and of their waits for reads.
    seconds: f64,
    waited: f64,
}

#[derive(Clone, Debug, Default, PartialEq)]
enum State {
    #[default]
    Fixed,
    Trial(Trial),
    /// Tokens until the next one, and until the last one has paid for itself.
    Rest {
        left: u32,
        owed: u32,
    },
}

impl Governor {
    /// Smallest variance of a trial's result: no trial is exact to a thousandth.
    const VARIANCE_MIN: f64 = 1e-6;

    /// Prefetching, off until a trial shows that it pays. It changes what is in memory for the next layers.
    pub fn of_prefetching() -> Self {
        Self::on_trial(Windows { settings: &[ON, OFF, OFF, ON], measured: 8, settle: 2 }, 0.01)
    }

    /// Off until a trial shows that it pays: that it wins `part_min` of a token's time. Setting 1 is on.
    pub(crate) fn on_trial(windows: Windows, part_min: f64) -> Self {
        Self {
            windows,
            part_min,
            rest: REST_TOKENS,
            state: State::Rest { left: FIRST_TOKENS, owed: 0 },
            ..Self::default()
        }
    }

    /// Always on or always off: the user's choice, and deterministic mode.
    pub fn fixed(is_on: bool) -> Self {
        let report = GovernorReport { reason: GovernorReason::Fixed, ..GovernorReport::default() };
        Self { decided_on: is_on, report, ..Self::default() }
    }

    pub fn is_on(&self) -> bool {
        match &self.state {
            State::Trial(trial) => trial.setting() == ON,
            State::Fixed | State::Rest { .. } => self.decided_on,
        }
    }

    /// Whether predictions are made. If prefetching is off by the user's choice, they are still made and judged.
    pub fn predicts(&self) -> bool {
        self.is_on() || self.state == State::Fixed
    }

    /// Something else than a decode batch ran: the next tokens are not measured.
    pub fn interrupt(&mut self) {
        self.unsettled = self.windows.settle;
        if let State::Trial(trial) = &mut self.state {
            trial.interrupt();
        }
    }

    /// A decode batch of `n_tokens` is over; otherwise as `Governor::end_token`.
    pub fn end_batch(&mut self, n_tokens: u32, seconds: f64, waited: f64) {
        let is_trial = matches!(self.state, State::Trial(_));
        let is_alike = !is_trial || *self.width.get_or_insert(n_tokens) == n_tokens;
        let per_token = f64::from(n_tokens.max(1));
        self.end_token(if is_alike { seconds / per_token } else { f64::NAN }, waited / per_token);
    }

    /// A token is over: it took `seconds`, of which it waited `waited` for experts. A negative or NaN time was
    /// not measured: the token counts, its time does not.
    pub(crate) fn end_token(&mut self, seconds: f64, waited: f64) {
        let is_on = self.is_on();
        *(if is_on { &mut self.report.tokens_on } else { &mut self.report.tokens_off }) += 1;
        let is_settled = self.unsettled == 0;
        self.unsettled = self.unsettled.saturating_sub(1);
        match &mut self.state {
            State::Fixed => {}
            State::Trial(trial) => {
                let is_window_over = trial.end_token(is_measured(seconds).then_some(seconds));
                let is_over = trial.is_over();
                [self.off, self.on, _] = trial.took;
                if is_window_over && (is_over || self.harms_clearly()) {
                    self.judge();
                }
            }
            &mut State::Rest { left, owed } => {
                if is_settled && is_measured(seconds) {
                    self.watch(seconds, waited);
                }
                let (left, owed) = (left.saturating_sub(1), owed.saturating_sub(1));
                let left = if self.has_changed() { self.forget(left.min(owed)) } else { left };
                self.state = State::Rest { left, owed };
                if left == 0 && self.may_gain() {
                    self.begin_trial();
                }
            }
        }
    }

    pub fn report(&self) -> GovernorReport {
        let rest_tokens = if let State::Rest { left, .. } = self.state { left } else { 0 };
        GovernorReport { is_on: self.is_on(), rest_tokens, ..self.report }
    }

    fn begin_trial(&mut self) {
        (self.on, self.off, self.width) = Default::default();
        self.report.reason = GovernorReason::Trial;
        self.state = State::Trial(Trial::new(self.windows));
    }

    /// Whether a trial need not go on: a cache that fills speaks for the later windows, so only if these are on.
    fn harms_clearly(&self) -> bool {
        let error = (self.on.variance() + self.off.variance()).sqrt();
        let is_worse = self.on.n > 0 && self.on.seconds - self.off.seconds > ERRORS_CLEAR * error;
        is_worse && self.windows.settings[0] == OFF
    }

    fn judge(&mut self) {
        self.report.trials += 1;
        let benefit = self.off.seconds - self.on.seconds;
        let variance = self.on.variance() + self.off.variance();
        (self.report.benefit_seconds, self.report.benefit_error_seconds) = (Some(benefit), Some(variance.sqrt()));
        if self.on.n > 0 && self.off.n > 0 && self.off.seconds > 0.0 {
            let square = self.off.seconds.powi(2);
            let (saved, variance) = (benefit / self.off.seconds, (variance / square).max(Self::VARIANCE_MIN));
            let (before, weight) = self.found.map_or((0.0, 0.0), |(saved, variance)| (saved, KEEP / variance));
            let sum = weight + 1.0 / variance;
            self.found = Some(((before * weight + saved / variance) / sum, 1.0 / sum));
        }
        let (saved, error) = self.found.map_or((0.0, f64::INFINITY), |(saved, variance)| (saved, variance.sqrt()));
        let margin = f64::max(ERRORS_MIN * error, self.part_min);
        let (is_on, reason) = match saved {
            _ if saved > margin => (true, GovernorReason::Pays),
            _ if saved < -margin => (false, GovernorReason::Harms),
            _ => (self.decided_on, GovernorReason::NoDifference),
        };
        let is_clear = saved.abs() > ERRORS_CLEAR * error || error < PART_MIN;
        let is_confirmed = self.decided_on == is_on && self.report.trials > 1;
        self.report.given_up += u64::from(!is_on && (self.decided_on || self.report.trials == 1));
        self.rest =
            if is_confirmed && is_clear { self.rest.saturating_mul(2).min(REST_TOKENS_MAX) } else { REST_TOKENS };
        // Half of a trial's tokens have the worse setting.
        let lost = 2.0 * f64::from(self.windows.tokens()) * saved.abs();
        let owed = (lost / COST_MAX).min(f64::from(REST_TOKENS_MAX)) as u32;
        self.decided_on = is_on;
        self.report.reason = reason;
        self.lately = Lately::default();
        self.state = State::Rest { left: self.rest.max(owed), owed };
        self.interrupt();
    }

    /// Running means over as many tokens as a trial measures.
    fn watch(&mut self, seconds: f64, waited: f64) {
        self.lately.n = self.lately.n.saturating_add(1);
        let n = f64::from(self.lately.n.min(4 * self.windows.measured));
        self.lately.seconds += (seconds - self.lately.seconds) / n;
        self.lately.waited += (waited - self.lately.waited) / n;
    }

    /// Whether tokens take another time than in the last trial, beyond what chance explains.
    fn has_changed(&self) -> bool {
        let then = if self.decided_on { &self.on } else { &self.off };
        if then.n == 0 || self.lately.n < 4 * self.windows.measured {
            return false;
        }
        let margin = f64::max(CHANGE_MIN * then.seconds, 4.0 * then.variance().sqrt());
        (self.lately.seconds - then.seconds).abs() > margin
    }

    /// Earlier trials no longer count; the next one comes in `left` tokens.
    fn forget(&mut self, left: u32) -> u32 {
        self.found = None;
        self.rest = REST_TOKENS;
        (self.on, self.off) = Default::default();
        left
    }

    /// Whether a trial may find that the other setting is better: prefetching saves waits only.
    fn may_gain(&self) -> bool {
        self.decided_on || self.lately.waited > PART_MIN * self.lately.seconds
    }
}

#[cfg(test)]
mod tests;
