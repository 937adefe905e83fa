//! Detects competition for our cores from how long our threads wait for one.

/// Activity of the process's threads between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sample {
    pub(super) seconds: f64,
    /// Seconds run, summed over all compute threads.
    pub(super) ran_seconds: f64,
    /// Seconds the compute threads were runnable while other programs had the cores; our own reader threads do not
    /// count.
    pub(super) waited_seconds: f64,
}

/// Share of runnable time spent waiting at which the cores count as contended, if two samples in a row agree.
const WAITED_SHARE_CONTENDED: f64 = 0.05;

/// Share at which one sample suffices. A smaller share may be a moment of the system's own work.
const WAITED_SHARE_CERTAIN: f64 = 0.15;

/// Share below which the cores are free again.
const WAITED_SHARE_CALM: f64 = 0.02;

/// Minimum load, in cores, for a sample to count.
const BUSY_CORES_MIN: f64 = 0.1;

/// Initial calm time before threads spin again, in seconds. Short, because the contention may have been a moment of the
/// system's own work.
const PATIENCE_SECONDS: f64 = 0.5;

/// Maximum calm time, reached by doubling after each relapse.
const PATIENCE_SECONDS_MAX: f64 = 32.0;

/// Contention that returns within this time never ended: sleeping threads wait less.
const RELAPSE_SECONDS: f64 = 2.0;

/// State between two samples.
#[derive(Debug)]
pub(super) struct Contention {
    is_contended: bool,
    /// The last sample was above the contended share but below the certain one.
    is_suspected: bool,
    /// Seconds of calm so far; when not contended, seconds since contention ended.
    calm_seconds: f64,
    patience_seconds: f64,
}

impl Default for Contention {
    fn default() -> Self {
        Self {
            is_contended: false,
            is_suspected: false,
            calm_seconds: f64::INFINITY,
            patience_seconds: PATIENCE_SECONDS,
        }
    }
}

impl Contention {
    /// Whether others compute on our cores.
    pub(super) fn observe(&mut self, sample: Sample) -> bool {
        let could_run = sample.ran_seconds + sample.waited_seconds;
        if could_run < BUSY_CORES_MIN * sample.seconds {
            return self.is_contended;
        }
        let share = sample.waited_seconds / could_run;
        if !self.is_contended {
            self.calm_seconds += sample.seconds;
            let was_suspected = std::mem::replace(&mut self.is_suspected, share >= WAITED_SHARE_CONTENDED);
            if share >= WAITED_SHARE_CERTAIN || self.is_suspected && was_suspected {
                self.patience_seconds = match self.calm_seconds <= RELAPSE_SECONDS {
                    true => (2.0 * self.patience_seconds).min(PATIENCE_SECONDS_MAX),
                    false => PATIENCE_SECONDS,
                };
                (self.is_contended, self.calm_seconds) = (true, 0.0);
            }
        } else if share >= WAITED_SHARE_CALM {
            self.calm_seconds = 0.0;
        } else {
            self.calm_seconds += sample.seconds;
            if self.calm_seconds >= self.patience_seconds {
                (self.is_contended, self.calm_seconds) = (false, 0.0);
            }
        }
        self.is_contended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second in which two threads could run and waited for this share of it.
    fn second(share: f64) -> Sample {
        Sample { seconds: 1.0, ran_seconds: 2.0 * (1.0 - share), waited_seconds: 2.0 * share }
    }

    /// Calm seconds until the cores count as free.
    fn seconds_to_calm(contention: &mut Contention) -> usize {
        (1..200).find(|_| !contention.observe(second(0.0))).expect("it ends")
    }

    #[test]
    fn waiting_for_cores_is_noticed_at_once_and_forgotten_later() {
        let mut contention = Contention::default();
        assert!(!contention.observe(second(0.01)));
        assert!(contention.observe(second(0.2)));
        for _ in 0..100 {
            assert!(contention.observe(second(0.03)), "less waiting is still waiting");
        }
        assert_eq!(seconds_to_calm(&mut contention), 1);
        assert!(!contention.observe(second(0.01)));
    }

    #[test]
    fn a_moment_of_waiting_is_no_other_program() {
        let mut contention = Contention::default();
        for _ in 0..3 {
            assert!(!contention.observe(second(0.1)));
            assert!(!contention.observe(second(0.0)));
        }
        assert!(!contention.observe(second(0.1)));
        assert!(contention.observe(second(0.1)));
    }

    #[test]
    fn who_comes_back_at_once_is_believed_to_stay() {
        let mut contention = Contention::default();
        for expected in [1, 1, 2, 4, 8, 16, 32, 32] {
            assert!(contention.observe(second(0.2)));
            assert_eq!(seconds_to_calm(&mut contention), expected);
        }
        for _ in 0..3 {
            assert!(!contention.observe(second(0.0)));
        }
        assert!(contention.observe(second(0.2)));
        assert_eq!(seconds_to_calm(&mut contention), 1, "after a while it starts anew");
    }

    #[test]
    fn while_nobody_computes_nothing_changes() {
        let idle = Sample { seconds: 1.0, ran_seconds: 0.01, waited_seconds: 0.02 };
        let mut contention = Contention::default();
        assert!(!contention.observe(idle));
        assert!(contention.observe(second(0.2)));
        for _ in 0..100 {
            assert!(contention.observe(idle));
        }
    }
}
