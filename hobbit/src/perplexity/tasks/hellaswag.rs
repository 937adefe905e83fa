//! HellaSwag: which of four endings follows.

use super::TaskError;

const LINES: usize = 6;

/// One task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HellaSwag {
    /// What goes before.
    pub context: String,
    /// Number of the right ending, 0 to 3.
    pub gold: usize,
    /// The endings; a space belongs before each.
    pub endings: [String; 4],
}

/// Reads tasks of six lines each: context, number of the right ending, four endings.
///
/// # Errors
/// No tasks, an incomplete one, or a number that is none.
pub fn parse_hellaswag(text: &str) -> Result<Vec<HellaSwag>, TaskError> {
    let mut lines: Vec<&str> = text.split('\n').collect();
    // What follows the last newline is a line only if it is not empty.
    lines.pop_if(|last| last.is_empty());
    if lines.is_empty() {
        return Err(TaskError::NoTasks);
    }
    if !lines.len().is_multiple_of(LINES) {
        return Err(TaskError::NotSixLines { found: lines.len() });
    }
    let task = |(i, lines): (usize, &[&str])| {
        let bad = || TaskError::Gold { task: i + 1, found: lines[1].to_owned() };
        let gold = lines[1].trim().parse().ok().filter(|&gold: &usize| gold < 4).ok_or_else(bad)?;
        let endings = [2, 3, 4, 5].map(|line| lines[line].to_owned());
        Ok(HellaSwag { context: lines[0].to_owned(), gold, endings })
    };
    lines.chunks_exact(LINES).enumerate().map(task).collect()
}

impl HellaSwag {
    /// The four texts.
    pub fn texts(&self) -> [String; 4] {
        [0, 1, 2, 3].map(|i| format!("{} {}", self.context, self.endings[i]))
    }
}

/// A share and the interval it lies in with 95 % confidence, all 0..=1.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Interval {
    /// Share of tasks that were solved.
    pub share: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Wilson's score interval of `n_right` right answers among `n`.
pub fn wilson_interval(n_right: usize, n: usize) -> Interval {
    const Z: f64 = 1.95996398454;
    let n = n as f64;
    let share = n_right as f64 / n;
    let z = Z * Z / n;
    let half = z * (n * (4.0 * share * (1.0 - share) + z)).sqrt() / (Z + Z);
    let end = |half: f64| (share + z * 0.5 + half) / (1.0 + z);
    Interval { share, low: end(-half), high: end(half) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TASK: &str = "Cooking: A man\n2\nsings\nruns\nstirs the pot\nsleeps";

    #[test]
    fn six_lines_are_a_task() {
        for end in ["", "\n"] {
            let tasks = parse_hellaswag(&format!("{TASK}\n{TASK}{end}")).unwrap();
            assert_eq!((tasks.len(), tasks[1].gold), (2, 2));
            assert_eq!(tasks[0].texts()[2], "Cooking: A man stirs the pot");
        }
        assert_eq!(parse_hellaswag(""), Err(TaskError::NoTasks));
        assert_eq!(parse_hellaswag("a\n0\nb"), Err(TaskError::NotSixLines { found: 3 }));
        for gold in ["4", "-1", "two", ""] {
            let text = TASK.replacen("\n2\n", &format!("\n{gold}\n"), 1);
            assert_eq!(parse_hellaswag(&text), Err(TaskError::Gold { task: 1, found: gold.into() }));
        }
    }

    #[test]
    fn wilson() {
        // Textbook values for 8 of 10.
        let found = wilson_interval(8, 10);
        assert_eq!(found.share, 0.8);
        assert!((found.low - 0.4902).abs() < 1e-4 && (found.high - 0.9433).abs() < 1e-4, "{found:?}");
        let none = wilson_interval(0, 5);
        assert!(none.low.abs() < 1e-12 && none.high > 0.3);
    }
}
