//! Report of the kernels for the rows of one expert in batches.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::options::KernelChoice;

/// Kernels that multiply the experts' rows in batches. Displays as a line of `-v`, without a line end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReport {
    pub choice: KernelChoice,
    /// Trials by all sessions of the process.
    pub trials: Vec<KernelTrial>,
}

/// ggml's two ways to multiply the rows of one expert, `MUL_MAT_ID` and a plain `MUL_MAT`, as tried once on this
/// machine for weights of one type and shape, `[n_in, n_out]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelTrial {
    /// ggml's name of the weights' type, such as `q8_0`.
    #[serde(rename = "type")]
    pub dtype: String,
    /// Elements of a row of the weights.
    pub n_in: u64,
    /// Rows of the weights.
    pub n_out: u64,
    /// The weights' bytes are in the order of llama.cpp's kernels for this CPU.
    #[serde(default)]
    pub rearranged: bool,
    pub threads: i32,
    /// Timings, the most rows first, down to the first number of rows at which the plain product is no faster.
    pub speeds: Vec<KernelSpeed>,
    /// Minimum rows of one expert at which the plain product is faster; `None` if it never is.
    pub from_rows: Option<usize>,
    /// Whether both give the same bits; `None` if not compared, because the plain product is no faster.
    pub identical: Option<bool>,
    /// Time of the trial, in nanoseconds.
    pub took_ns: u64,
}

/// One of a trial's measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSpeed {
    pub rows: usize,
    /// The plain product's speed, in percent of `MUL_MAT_ID`'s.
    pub percent: u32,
}

impl KernelTrial {
    /// Minimum rows at which the plain product is used, if ever.
    pub fn plain_from(&self, choice: KernelChoice) -> Option<usize> {
        self.from_rows.filter(|_| self.identical == Some(true) || choice == KernelChoice::Fastest)
    }
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernels: {}", self.choice)?;
        for trial in &self.trials {
            let KernelTrial { dtype, n_in, n_out, .. } = trial;
            let order = if trial.rearranged { " rearranged" } else { "" };
            write!(f, "; {dtype} [{n_in} x {n_out}]{order}: ")?;
            let speed = trial.speeds.first().map_or(1.0, |most| f64::from(most.percent) / 100.0);
            let bits = if trial.identical == Some(true) { "same bits" } else { "other last bits" };
            match (trial.plain_from(self.choice), trial.from_rows) {
                (Some(rows), _) => write!(f, "plain products from {rows} rows, {speed:.1}x, {bits}")?,
                (None, Some(_)) => write!(f, "llama.cpp's, for a plain product ({speed:.1}x) gives {bits}")?,
                (None, None) => write!(f, "llama.cpp's, a plain product is no faster ({speed:.1}x)")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(from_rows: Option<usize>, identical: Option<bool>) -> KernelTrial {
        KernelTrial {
            dtype: "f16".into(),
            n_in: 256,
            n_out: 64,
            rearranged: false,
            threads: 2,
            speeds: vec![KernelSpeed { rows: 64, percent: 187 }],
            from_rows,
            identical,
            took_ns: 50_000_000,
        }
    }

    #[test]
    fn other_bits_are_taken_by_fastest_alone() {
        for (trial, identical, fastest) in [
            (trial(Some(16), Some(true)), Some(16), Some(16)),
            (trial(Some(32), Some(false)), None, Some(32)),
            (trial(None, None), None, None),
        ] {
            assert_eq!(trial.plain_from(KernelChoice::Identical), identical);
            assert_eq!(trial.plain_from(KernelChoice::Fastest), fastest);
        }
    }

    #[test]
    fn in_words() {
        let line = |choice, trials: &[KernelTrial]| KernelReport { choice, trials: trials.to_vec() }.to_string();
        assert_eq!(line(KernelChoice::Identical, &[]), "kernels: identical");
        let other = trial(Some(16), Some(false));
        let never = KernelTrial { rearranged: true, ..trial(None, None) };
        assert_eq!(
            line(KernelChoice::Identical, &[other.clone(), trial(Some(32), Some(true))]),
            "kernels: identical; f16 [256 x 64]: llama.cpp's, for a plain product (1.9x) gives other last bits; \
             f16 [256 x 64]: \
             plain products from 32 rows, 1.9x, same bits"
        );
        assert_eq!(
            line(KernelChoice::Fastest, &[other, never]),
            "kernels: fastest; f16 [256 x 64]: plain products from 16 rows, 1.9x, other last bits; f16 [256 x 64] \
             rearranged: llama.cpp's, a plain product is no faster (1.9x)"
        );
    }
}
