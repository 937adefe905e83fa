//! How often a layer's virtual experts may change: as often as does not slow tokens down.

use crate::trial::{Trial, Windows, is_measured};

/// The period that is tried first.
const FIRST: u32 = 64;
/// Longest period.
const MOST: u32 = 1024;
/// Windows of a trial without (0) and with replacements (1). What the window before began is still being read.
const WINDOWS: Windows = Windows { settings: &[0, 1, 1, 0], measured: 14, settle: 2 };
/// Tokens from the end of a search to the next trial.
const REST_TOKENS: u32 = 512;
/// Maximum slowdown caused by replacements (SwapMoE raises the frequency up to it).
const SLOWER_MAX: f64 = 0.02;

/// Says when replacements may begin. Equal seconds make equal decisions.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    period: u32,
    search: Option<Search>,
}

#[derive(Clone, Debug)]
struct Search {
    state: State,
    /// The period before was tried and did not slow tokens down.
    is_better_known: bool,
}

#[derive(Clone, Debug)]
enum State {
    Trial(Trial),
    /// Tokens until the next trial.
    Rest(u32),
}

impl Turns {
    /// The period of runs in which time decides nothing.
    pub(super) const DETERMINISTIC: u32 = 16;

    /// Replaces in each layer once per `period` tokens, at least 1.
    pub(super) fn fixed(period: u32) -> Self {
        Self { period: period.max(1), search: None }
    }

    /// As often as does not slow tokens down.
    pub(super) fn auto() -> Self {
        Self { period: FIRST, search: Some(Search { state: State::trial(), is_better_known: false }) }
    }

    /// Tokens from one turn of a layer to its next.
    pub(super) fn period(&self) -> u32 {
        self.period
    }

    /// Whether no replacement is to begin before the next token, so that it can be compared.
    pub(super) fn is_paused(&self) -> bool {
        matches!(&self.search, Some(Search { state: State::Trial(trial), .. }) if trial.setting() == 0)
    }

    /// A token took so long.
    pub(super) fn end_token(&mut self, seconds: f64) {
        let Some(search) = &mut self.search else { return };
        if !is_measured(seconds) {
            return;
        }
        match &mut search.state {
            State::Rest(1) => (search.state, search.is_better_known) = (State::trial(), false),
            State::Rest(left) => *left -= 1,
            State::Trial(trial) => {
                trial.end_token(Some(seconds));
                if trial.is_over() {
                    let [without, with, _] = trial.took;
                    self.decide(with.seconds <= without.seconds * (1.0 + SLOWER_MAX));
                }
            }
        }
    }

    /// A trial is over: it did not slow tokens down, or it did.
    fn decide(&mut self, is_free: bool) {
        let Some(search) = &mut self.search else { return };
        let is_found = if is_free { self.period == 1 } else { search.is_better_known || self.period == MOST };
        search.state = if is_found { State::Rest(REST_TOKENS) } else { State::trial() };
        search.is_better_known |= is_free && !is_found;
        self.period = if is_free { (self.period / 2).max(1) } else { (self.period * 2).min(MOST) };
    }
}

impl State {
    fn trial() -> Self {
        Self::Trial(Trial::new(WINDOWS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of 10 ms, and `cost` more by the period where replacements may begin: periods as they change.
    fn periods(n_tokens: u32, cost: impl Fn(u32) -> f64) -> Vec<u32> {
        let mut turns = Turns::auto();
        let mut periods = vec![turns.period()];
        for _ in 0..n_tokens {
            let slower = if turns.is_paused() { 0.0 } else { cost(turns.period()) };
            turns.end_token(0.01 * (1.0 + slower));
            if periods.last() != Some(&turns.period()) {
                periods.push(turns.period());
            }
        }
        periods
    }

    #[test]
    fn replacements_come_more_often_until_tokens_slow_down() {
        let dear = |period: u32| 0.1 / f64::from(period);
        // At 4 tokens 2.5 %, at 8 half of that. After a rest 8 and 4 are tried again.
        assert_eq!(periods(64 * 5, dear), [64, 32, 16, 8, 4, 8]);
        assert_eq!(periods(64 * 5 + 512 + 128, dear), [64, 32, 16, 8, 4, 8, 4, 8]);
        assert_eq!(periods(2000, |_| 0.0), [64, 32, 16, 8, 4, 2, 1]);
        assert_eq!(periods(2000, |_| 1.0), [64, 128, 256, 512, 1024]);
        assert_eq!(periods(64 * 5, |period| if period < 256 { 1.0 } else { 0.0 }), [64, 128, 256, 128, 256]);
    }

    #[test]
    fn a_steady_change_is_not_blamed_on_replacements() {
        let mut turns = Turns::auto();
        for token in 0..64 {
            turns.end_token(1.0 + f64::from(token) * 0.01);
        }
        assert_eq!(turns.period(), 32);
        assert!(!turns.is_paused() || turns.search.is_some());
    }

    #[test]
    fn a_fixed_pace_stays() {
        let mut turns = Turns::fixed(0);
        assert_eq!((turns.period(), turns.is_paused()), (1, false));
        (0..1000).for_each(|token| turns.end_token(f64::from(token)));
        assert_eq!((turns.period(), turns.is_paused()), (1, false));
    }

    #[test]
    fn invalid_times_are_not_measured() {
        let mut turns = Turns::auto();
        for seconds in [f64::NAN, f64::INFINITY, -1.0] {
            turns.end_token(seconds);
        }
        let trial = turns.search.map(|search| search.state);
        assert!(matches!(trial, Some(State::Trial(trial)) if trial == Trial::new(WINDOWS)));
    }
}
