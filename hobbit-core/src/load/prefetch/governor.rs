//! Whether prefetching pays: measured, and given up where it does not.

use std::fmt;

use smart_default::SmartDefault;

/// Lengths of trials, and the certainty they need. All lengths are in tokens: equal waits make equal decisions.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct GovernorOptions {
    /// Tokens measured in each of a trial's four windows; at least 1.
    #[default(8)]
    pub window_tokens: u32,
    /// Tokens at the start of a window that are not measured: the window before has filled the cache.
    #[default(2)]
    pub settle_tokens: u32,
    /// Tokens from one trial to the next at first. Each trial that confirms the one before doubles it.
    #[default(64)]
    pub rest_tokens: u32,
    #[default(4096)]
    pub rest_tokens_max: u32,
    /// Standard errors that on and off must differ by.
    #[default(1.0)]
    pub errors_min: f64,
    /// Part of the wait without prefetching that they must differ by.
    #[default(0.01)]
    pub share_min: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GovernorReason {
    /// The user said so.
    Fixed,
    /// It is being tried: on and off in turns.
    #[default]
    Trial,
    /// Tokens waited less with it.
    Pays,
    /// Tokens waited more with it.
    Harms,
    /// No difference was measured: the setting stays, on at first.
    NoDifference,
    /// Since the last trial, wrong guesses delayed more than right ones saved, by the planner's estimates.
    Accounts,
}

impl fmt::Display for GovernorReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fixed => "as asked",
            Self::Trial => "being tried",
            Self::Pays => "tokens wait less with it",
            Self::Harms => "tokens wait more with it",
            Self::NoDifference => "no difference measured",
            Self::Accounts => "wrong guesses cost more than right ones saved",
        })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct GovernorReport {
    pub is_on: bool,
    pub reason: GovernorReason,
    /// Wait per token without prefetching minus with it, in seconds, by the last trial.
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

/// Switches prefetching on and off.
///
/// A trial is four windows: on, off, off, on, so that steady changes (a cache that fills) affect both sides alike. If
/// tokens wait clearly less with prefetching it stays on, if clearly more it is switched off, and otherwise it stays as
/// before. The next trial comes after a rest, which doubles as long as trials confirm each other: lasting harm costs a
/// vanishing share of the tokens.
///
/// Between trials a negative account of the planner, averaged over the last tokens, switches prefetching off. If the
/// next trial contradicts that, the account counts again only after a trial has found harm: measured waits are worth
/// more than estimates.
///
/// For each decode batch: [`Governor::is_on`], the batch, [`Governor::end_token`]. A batch of several tokens counts as
/// one, because all of them waited together.
#[derive(Clone, Debug, SmartDefault)]
pub struct Governor {
    options: GovernorOptions,
    #[default(State::Trial(0))]
    state: State,
    /// The last decision; on before the first, because prefetching pays by the planner's estimates.
    #[default(true)]
    decided_on: bool,
    /// Tokens of the next rest.
    rest: u32,
    on: Mean,
    off: Mean,
    /// Running mean of the planner's account in seconds per token, and its tokens.
    account: (f64, u32),
    /// The running token's account.
    balance: f64,
    /// The last decision was the account's.
    was_off_by_account: bool,
    /// `false` after a trial has contradicted the account.
    #[default(true)]
    trusts_account: bool,
    /// Without the fields that follow from the state.
    report: GovernorReport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Fixed,
    /// Tokens since the trial began.
    Trial(u32),
    /// Tokens until the next one.
    Rest(u32),
}

/// The mean of measured seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mean {
    pub(crate) n: u32,
    pub(crate) seconds: f64,
    /// Sum of squared deviations from the mean.
    squares: f64,
}

impl Mean {
    pub(crate) fn add(&mut self, seconds: f64) {
        self.n += 1;
        let deviation = seconds - self.seconds;
        self.seconds += deviation / f64::from(self.n);
        self.squares += deviation * (seconds - self.seconds);
    }

    /// Variance of the mean: its standard error squared.
    pub(crate) fn variance(&self) -> f64 {
        let n = f64::from(self.n);
        if self.n > 1 { self.squares / (n - 1.0) / n } else { 0.0 }
    }
}

impl Governor {
    const WINDOWS_ON: [bool; 4] = [true, false, false, true];

    /// Begins with a trial. Lengths of 0 count as 1, a longest rest below the first one as the first one.
    pub fn new(options: GovernorOptions) -> Self {
        let rest_tokens = options.rest_tokens.max(1);
        let options = GovernorOptions {
            window_tokens: options.window_tokens.clamp(1, 1 << 20),
            settle_tokens: options.settle_tokens.min(1 << 20),
            rest_tokens,
            rest_tokens_max: options.rest_tokens_max.max(rest_tokens),
            ..options
        };
        Self { rest: rest_tokens, options, ..Self::default() }
    }

    /// Always on or always off: the user's choice, and deterministic mode.
    pub fn fixed(is_on: bool) -> Self {
        let report = GovernorReport { reason: GovernorReason::Fixed, ..GovernorReport::default() };
        Self { state: State::Fixed, decided_on: is_on, report, ..Self::default() }
    }

    pub fn is_on(&self) -> bool {
        match self.state {
            State::Trial(token) => Self::WINDOWS_ON[(token / self.window()) as usize % 4],
            State::Fixed | State::Rest(_) => self.decided_on,
        }
    }

    /// Prefetching is off until the next trial: predictions are not needed.
    pub fn has_given_up(&self) -> bool {
        matches!(self.state, State::Rest(_)) && !self.decided_on
    }

    /// Seconds of a layer's [`super::Settled`].
    pub fn account(&mut self, saved_seconds: f64, delayed_seconds: f64) {
        let balance = saved_seconds - delayed_seconds;
        if balance.is_finite() {
            self.balance += balance;
        }
    }

    /// A decode batch is over; it waited `wait_seconds` for experts. A negative or NaN wait was not measured: the token
    /// counts, its wait does not.
    pub fn end_token(&mut self, wait_seconds: f64) {
        let is_on = self.is_on();
        *(if is_on { &mut self.report.tokens_on } else { &mut self.report.tokens_off }) += 1;
        let balance = std::mem::take(&mut self.balance);
        match self.state {
            State::Fixed => {}
            State::Trial(token) => {
                let is_settled = token % self.window() >= self.options.settle_tokens;
                if is_settled && wait_seconds.is_finite() && wait_seconds >= 0.0 {
                    let waits = if is_on { &mut self.on } else { &mut self.off };
                    waits.add(wait_seconds);
                }
                self.state = State::Trial(token + 1);
                if token + 1 == 4 * self.window() {
                    self.judge();
                }
            }
            State::Rest(left) => {
                if left <= 1 {
                    self.begin_trial();
                } else {
                    self.state = State::Rest(left - 1);
                    self.watch(balance);
                }
            }
        }
    }

    pub fn report(&self) -> GovernorReport {
        let rest_tokens = if let State::Rest(left) = self.state { left } else { 0 };
        GovernorReport { is_on: self.is_on(), rest_tokens, ..self.report }
    }

    fn window(&self) -> u32 {
        self.options.settle_tokens + self.options.window_tokens
    }

    fn begin_trial(&mut self) {
        (self.on, self.off) = Default::default();
        self.report.reason = GovernorReason::Trial;
        self.state = State::Trial(0);
    }

    fn judge(&mut self) {
        self.report.trials += 1;
        let benefit = self.off.seconds - self.on.seconds;
        let error = (self.on.variance() + self.off.variance()).sqrt();
        (self.report.benefit_seconds, self.report.benefit_error_seconds) = (Some(benefit), Some(error));
        let margin = f64::max(self.options.errors_min * error, self.options.share_min * self.off.seconds);
        let (is_on, reason) = if benefit > margin {
            self.trusts_account &= !self.was_off_by_account;
            (true, GovernorReason::Pays)
        } else if benefit < -margin {
            self.trusts_account = true;
            (false, GovernorReason::Harms)
        } else {
            (self.decided_on, GovernorReason::NoDifference)
        };
        self.decide(is_on, reason);
    }

    fn watch(&mut self, balance: f64) {
        if !(self.decided_on && self.trusts_account) {
            return;
        }
        let (mean, n) = &mut self.account;
        *n = n.saturating_add(1);
        *mean += (balance - *mean) / f64::from((*n).min(self.options.window_tokens));
        if *n >= self.options.window_tokens && *mean < 0.0 {
            self.decide(false, GovernorReason::Accounts);
        }
    }

    fn decide(&mut self, is_on: bool, reason: GovernorReason) {
        let is_confirmed = self.decided_on == is_on && self.report.trials > 1;
        self.report.given_up += u64::from(!is_on && (self.decided_on || self.report.trials == 1));
        self.rest = match is_confirmed {
            true => self.rest.saturating_mul(2).min(self.options.rest_tokens_max),
            false => self.options.rest_tokens,
        };
        self.decided_on = is_on;
        self.report.reason = reason;
        self.was_off_by_account = reason == GovernorReason::Accounts;
        self.account = (0.0, 0);
        self.state = State::Rest(self.rest);
    }
}

#[cfg(test)]
mod tests;
