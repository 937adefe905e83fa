//! Compares counts with records. Pure.

use std::collections::BTreeSet;
use std::fmt;

use crate::counts::Counts;

/// Result of a bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within the margin.
    Same,
    /// More instructions than the margin allows.
    Slower,
    /// Fewer than the margin explains: the recording hides the next regression as long as it stands.
    Faster,
    /// Recorded, and not counted.
    Gone,
    /// Counted, and never recorded.
    New,
}

/// One bench: the instructions that were recorded and counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub name: String,
    pub recorded: Option<u64>,
    pub found: Option<u64>,
    pub verdict: Verdict,
}

/// Every bench of either, by name. The margin is in percent of what was recorded.
pub fn compare(recorded: &Counts, found: &Counts, margin_percent: f64) -> Vec<Line> {
    let names: BTreeSet<&String> = recorded.keys().chain(found.keys()).collect();
    let line = |name: &String| {
        let (recorded, found) = (recorded.get(name).copied(), found.get(name).copied());
        let verdict = match (recorded, found) {
            (Some(recorded), Some(found)) => {
                let (allowed, change) = (recorded as f64 * margin_percent / 100.0, found as f64 - recorded as f64);
                match change {
                    _ if change > allowed => Verdict::Slower,
                    _ if change < -allowed => Verdict::Faster,
                    _ => Verdict::Same,
                }
            }
            (Some(_), None) => Verdict::Gone,
            (None, _) => Verdict::New,
        };
        Line { name: name.clone(), recorded, found, verdict }
    };
    names.into_iter().map(line).collect()
}

impl Verdict {
    /// Whether the check fails. A faster bench does not fail; record it.
    pub const fn fails(self) -> bool {
        matches!(self, Self::Slower | Self::Gone | Self::New)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let change = self.recorded.zip(self.found).map_or("-".to_owned(), |(recorded, found)| {
            format!("{:+.2} %", 100.0 * (found as f64 - recorded as f64) / (recorded as f64).max(1.0))
        });
        let words = match self.verdict {
            Verdict::Same => "",
            Verdict::Slower => "more than the margin allows",
            Verdict::Faster => "fewer: record it (--record)",
            Verdict::Gone => "recorded, but not counted any more: --record if that is meant",
            Verdict::New => "never recorded: --record",
        };
        let (recorded, found) = (number(self.recorded), number(self.found));
        let line = format!("{:<34} {recorded:>10} {found:>10} {change:>10}  {words}", self.name);
        f.write_str(line.trim_end())
    }
}

/// Above the lines.
pub fn heading() -> String {
    format!("{:<34} {:>10} {:>10} {:>10}", "instructions", "recorded", "found", "change")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(all: &[(&str, u64)]) -> Counts {
        all.iter().map(|&(name, n)| (name.to_owned(), n)).collect()
    }

    #[test]
    fn the_margin_is_up_to_and_including() {
        let verdict = |found| compare(&counts(&[("a", 1000)]), &counts(&[("a", found)]), 5.0)[0].verdict;
        assert_eq!(
            [949, 950, 1000, 1050, 1051].map(verdict),
            [Verdict::Faster, Verdict::Same, Verdict::Same, Verdict::Same, Verdict::Slower]
        );
        assert_eq!([Verdict::Faster, Verdict::Same, Verdict::Slower].map(Verdict::fails), [false, false, true]);
    }

    #[test]
    fn benches_come_and_go_by_name() {
        let lines = compare(&counts(&[("a", 1), ("b", 2)]), &counts(&[("b", 2), ("c", 3)]), 5.0);
        let verdicts: Vec<_> = lines.iter().map(|line| (line.name.as_str(), line.verdict)).collect();
        assert_eq!(verdicts, [("a", Verdict::Gone), ("b", Verdict::Same), ("c", Verdict::New)]);
        assert!(Verdict::Gone.fails() && Verdict::New.fails());
    }

    #[test]
    fn a_line_names_all_there_is_to_know() {
        let lines = compare(&counts(&[("cache::hit lru", 1000)]), &counts(&[("cache::hit lru", 1100)]), 5.0);
        let words: Vec<String> = lines[0].to_string().split_whitespace().map(str::to_owned).collect();
        assert_eq!(words.join(" "), "cache::hit lru 1000 1100 +10.00 % more than the margin allows");
        assert_eq!(compare(&counts(&[("a", 0)]), &counts(&[("a", 0)]), 5.0)[0].verdict, Verdict::Same);
    }
}
