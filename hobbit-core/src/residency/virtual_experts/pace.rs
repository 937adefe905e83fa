//! How often a layer's virtual experts may change: as often as does not slow tokens down.

/// The period that is tried first.
const FIRST: u32 = 64;
/// No longer one is.
const MOST: u32 = 1024;
/// Tokens in each of a trial's windows.
const WINDOW_TOKENS: u32 = 16;
/// Tokens at the start of a window that are not measured: what the window before began is still being read.
const SETTLE_TOKENS: u32 = 2;
/// Windows of a trial with replacements: in the middle, so that what changes steadily meanwhile falls on both alike.
const WINDOWS: [bool; 4] = [false, true, true, false];
/// Tokens from the end of a search to the next trial.
const REST_TOKENS: u32 = 512;
/// By so much replacements may slow tokens down (SwapMoE raises the frequency until they would).
const SLOWER_MAX: f64 = 0.02;

/// Says when replacements may begin. Equal seconds make equal decisions.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    period: u32,
    search: Option<Search>,
}

#[derive(Clone, Debug, Default)]
struct Search {
    state: State,
    /// Tokens of the running trial so far.
    n_tokens: u32,
    /// Seconds of its measured tokens, without and with replacements.
    seconds: [f64; 2],
    /// The period before was tried and did not slow tokens down.
    is_better_known: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Trial,
    /// For so many tokens more.
    Rest(u32),
}

impl Pace {
    /// The period of runs in which time decides nothing.
    pub(super) const DETERMINISTIC: u32 = 16;

    /// Each layer once in so many tokens, at least 1.
    pub(super) fn fixed(period: u32) -> Self {
        Self { period: period.max(1), search: None }
    }

    /// As often as does not slow tokens down.
    pub(super) fn auto() -> Self {
        Self { period: FIRST, search: Some(Search::default()) }
    }

    /// Tokens from one turn of a layer to its next.
    pub(super) fn period(&self) -> u32 {
        self.period
    }

    /// Whether no replacement is to begin before the next token, so that it can be compared.
    pub(super) fn is_paused(&self) -> bool {
        let in_trial = self.search.as_ref().filter(|search| search.state == State::Trial);
        in_trial.is_some_and(|search| !WINDOWS[(search.n_tokens / WINDOW_TOKENS) as usize])
    }

    /// A token took so long.
    pub(super) fn end_token(&mut self, seconds: f64) {
        let Some(search) = &mut self.search else { return };
        if !seconds.is_finite() || seconds < 0.0 {
            return;
        }
        match search.state {
            State::Rest(1) => (search.state, search.is_better_known) = (State::Trial, false),
            State::Rest(left) => search.state = State::Rest(left - 1),
            State::Trial => {
                let (window, token) = (search.n_tokens / WINDOW_TOKENS, search.n_tokens % WINDOW_TOKENS);
                if token >= SETTLE_TOKENS {
                    search.seconds[usize::from(WINDOWS[window as usize])] += seconds;
                }
                search.n_tokens += 1;
                if search.n_tokens == WINDOW_TOKENS * WINDOWS.len() as u32 {
                    let [without, with] = std::mem::take(&mut search.seconds);
                    search.n_tokens = 0;
                    self.decide(with <= without * (1.0 + SLOWER_MAX));
                }
            }
        }
    }

    /// A trial is over: it did not slow tokens down, or it did.
    fn decide(&mut self, is_free: bool) {
        let Some(search) = &mut self.search else { return };
        let rest = State::Rest(REST_TOKENS);
        match is_free {
            true if self.period == 1 => search.state = rest,
            true => (self.period, search.is_better_known) = (self.period / 2, true),
            false => {
                let is_known = search.is_better_known || self.period == MOST;
                self.period = (self.period * 2).min(MOST);
                search.state = if is_known { rest } else { State::Trial };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of 10 ms, and `cost` more by the period where replacements may begin: periods as they change.
    fn periods(n_tokens: u32, cost: impl Fn(u32) -> f64) -> Vec<u32> {
        let mut pace = Pace::auto();
        let mut periods = vec![pace.period()];
        for _ in 0..n_tokens {
            let slower = if pace.is_paused() { 0.0 } else { cost(pace.period()) };
            pace.end_token(0.01 * (1.0 + slower));
            if periods.last() != Some(&pace.period()) {
                periods.push(pace.period());
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
    fn what_changes_steadily_is_no_ones_fault() {
        let mut pace = Pace::auto();
        for token in 0..64 {
            pace.end_token(1.0 + f64::from(token) * 0.01);
        }
        assert_eq!(pace.period(), 32);
        assert!(!pace.is_paused() || pace.search.is_some());
    }

    #[test]
    fn a_fixed_pace_stays() {
        let mut pace = Pace::fixed(0);
        assert_eq!((pace.period(), pace.is_paused()), (1, false));
        (0..1000).for_each(|token| pace.end_token(f64::from(token)));
        assert_eq!((pace.period(), pace.is_paused()), (1, false));
    }

    #[test]
    fn times_that_are_none_are_not_measured() {
        let mut pace = Pace::auto();
        for seconds in [f64::NAN, f64::INFINITY, -1.0] {
            pace.end_token(seconds);
        }
        assert_eq!(pace.search.as_ref().unwrap().n_tokens, 0);
    }
}
