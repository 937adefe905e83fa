//! How long this process's threads have run, and have waited for a core while they could have run.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use super::policy::Sample;

/// Nanoseconds run and waited, by thread.
pub(super) struct Waited(HashMap<u32, (u64, u64)>);

impl Waited {
    /// `None` where the kernel does not count.
    pub(super) fn look() -> Option<Self> {
        let threads = fs::read_dir("/proc/self/task").ok()?.flatten().filter_map(|entry| {
            let thread = entry.file_name().to_str()?.parse().ok()?;
            // A thread that has just ended has no file.
            Some((thread, parse(&fs::read_to_string(entry.path().join("schedstat")).ok()?)?))
        });
        Some(Self(threads.collect())).filter(|all| !all.0.is_empty())
    }

    /// What was added since an earlier look.
    pub(super) fn since(&self, before: &Self, elapsed: Duration) -> Sample {
        let mut sample = Sample { seconds: elapsed.as_secs_f64(), ..Sample::default() };
        for (thread, (ran, waited)) in &self.0 {
            let (ran_before, waited_before) = before.0.get(thread).copied().unwrap_or_default();
            sample.ran_seconds += ran.saturating_sub(ran_before) as f64 / 1e9;
            sample.waited_seconds += waited.saturating_sub(waited_before) as f64 / 1e9;
        }
        sample
    }
}

/// Time run and time waited, in nanoseconds, and turns.
fn parse(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_come_and_go_do_not_confuse_the_sum() {
        let look = |threads: &[(u32, (u64, u64))]| Waited(threads.iter().copied().collect());
        let before = look(&[(1, (1_000_000_000, 0)), (2, (5_000_000_000, 3_000_000_000))]);
        let now = look(&[(1, (1_500_000_000, 250_000_000)), (3, (500_000_000, 0))]);
        let expected = Sample { seconds: 1.0, ran_seconds: 1.0, waited_seconds: 0.25 };
        assert_eq!(now.since(&before, Duration::from_secs(1)), expected);
    }

    #[test]
    fn what_is_no_schedstat_is_not_read() {
        assert_eq!(parse("12 34 5\n"), Some((12, 34)));
        assert_eq!(parse("12\n"), None);
        assert_eq!(parse("a b c"), None);
    }
}
