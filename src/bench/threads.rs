//! Number of threads for plain llama.cpp: the fastest one, which depends on the case. Where it waits for page faults,
//! twice the cores are best; where the model fits, the cores.

use std::collections::HashSet;
use std::str::FromStr;

use super::case::Test;
use super::record::Tried;

/// Maximum threads of llama.cpp.
const MOST: i32 = 512;
/// Tokens of a trial, in the context, prompt and decoded: enough to separate the candidates.
const TRIAL: Test = Test { n_prompt: 32, n_gen: 8, n_depth: 64 };

/// The value of `--baseline-threads`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThreadChoice {
    /// The cores, and twice as many.
    Auto,
    /// These numbers; a single one is not tried.
    Of(Vec<i32>),
}

impl FromStr for ThreadChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let number = |part: &str| {
            let n = part.trim().parse().ok().filter(|n| (1..=MOST).contains(n));
            n.ok_or_else(|| format!("'{part}': expected auto, or numbers from 1 to {MOST} such as 2,4"))
        };
        text.split(',').map(number).collect::<Result<_, _>>().map(Self::Of)
    }
}

impl ThreadChoice {
    /// The candidates on a machine with this many cores.
    pub fn candidates(&self, cores: usize) -> Vec<i32> {
        let cores = i32::try_from(cores).unwrap_or(MOST).clamp(1, MOST);
        let mut all = match self {
            Self::Auto => vec![cores, (2 * cores).min(MOST)],
            Self::Of(numbers) => numbers.clone(),
        };
        let mut seen = HashSet::new();
        all.retain(|n| seen.insert(*n));
        all
    }
}

/// The fastest number; on a tie, the first.
pub fn best(tried: &[Tried]) -> Option<i32> {
    let speed = |one: &Tried| one.tokens_per_second.unwrap_or(0.0);
    // On a tie `max_by` takes the last.
    tried.iter().rev().max_by(|a, b| speed(a).total_cmp(&speed(b))).map(|one| one.threads)
}

/// The trial for a test.
pub fn trial(test: Test) -> Test {
    Test {
        n_prompt: test.n_prompt.min(TRIAL.n_prompt),
        n_gen: test.n_gen.min(TRIAL.n_gen),
        n_depth: test.n_depth.min(TRIAL.n_depth),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_and_tried() {
        let candidates = |text: &str| text.parse::<ThreadChoice>().map(|choice| choice.candidates(2));
        assert_eq!(candidates("auto"), Ok(vec![2, 4]));
        assert_eq!(candidates("8"), Ok(vec![8]));
        assert_eq!(candidates("4,2,4"), Ok(vec![4, 2]));
        assert_eq!(ThreadChoice::Auto.candidates(400), [400, 512]);
        for wrong in ["", "0", "513", "2,x", "all"] {
            assert!(candidates(wrong).unwrap_err().contains("expected auto, or numbers from 1 to 512"), "{wrong}");
        }
    }

    #[test]
    fn the_fastest_is_taken() {
        let tried = |threads, speed| Tried { threads, tokens_per_second: speed };
        assert_eq!(best(&[tried(2, Some(3.0)), tried(4, Some(5.0)), tried(8, Some(5.0))]), Some(4));
        assert_eq!(best(&[tried(2, None), tried(4, Some(0.1))]), Some(4), "the other was killed");
        assert_eq!(best(&[tried(2, None), tried(4, None)]), Some(2));
        assert_eq!(best(&[]), None);
        assert_eq!(Tried::new(2, 40, 4_000_000_000), tried(2, Some(10.0)));
    }

    #[test]
    fn trials_are_short() {
        let test = |n_prompt, n_gen, n_depth| Test { n_prompt, n_gen, n_depth };
        assert_eq!(trial(test(128, 128, 4096)), test(32, 8, 64));
        assert_eq!(trial(test(0, 4, 0)), test(0, 4, 0));
    }
}
