//! How sensitive each expert is: an affordable guess, made true layer by layer.

use crate::expert::SliceKind;

/// How far recoded weights are from the original ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SliceError {
    /// Sum of the squared differences, weighted by the columns' importance.
    pub error: f64,
    /// Sum of the squared original weights, weighted alike.
    pub norm: f64,
}

impl SliceError {
    /// Adds rows of as many elements as `columns` has, or of any length without importance. Both are of equal length.
    pub fn add(&mut self, original: &[f32], recoded: &[f32], columns: Option<&[f32]>) {
        let pairs = original.iter().zip(recoded).map(|(a, b)| (f64::from(*a), f64::from(*a) - f64::from(*b)));
        match columns {
            None => pairs.for_each(|(a, d)| self.add_one(a, d, 1.0)),
            Some(columns) => {
                pairs.zip(columns.iter().cycle()).for_each(|((a, d), c)| self.add_one(a, d, f64::from(*c)));
            }
        }
    }

    fn add_one(&mut self, weight: f64, difference: f64, importance: f64) {
        self.error += importance * difference * difference;
        self.norm += importance * weight * weight;
    }

    /// Relative squared error, 0 for weights that are all zero.
    pub fn relative(&self) -> f64 {
        let relative = self.error / self.norm;
        if relative.is_finite() { relative } else { 0.0 }
    }
}

/// How large the error of an expert's output is, in units that only compare experts of one layer: the mean relative error of
/// its slices, times the squared norms of those that its output is proportional to. The gate's is not among them: an
/// activation function bounds it or passes it on.
pub fn output_error(slices: &[(SliceKind, SliceError)]) -> f64 {
    let relative: f64 = slices.iter().map(|(_, error)| error.relative()).sum();
    let norms = slices.iter().filter(|(kind, _)| *kind != SliceKind::Gate).map(|(_, error)| error.norm);
    relative / slices.len().max(1) as f64 * norms.product::<f64>()
}

/// Divides a layer's measured loss among its experts in proportion to importance times error, `[n_expert]` each.
/// Where nothing distinguishes them, each gets the same.
pub fn divide(measured: f64, importance: &[f64], errors: &[f64]) -> Vec<f64> {
    let raw: Vec<f64> = importance.iter().zip(errors).map(|(i, e)| (i * e).max(0.0)).collect();
    let total: f64 = raw.iter().sum();
    match total > 0.0 && total.is_finite() {
        true => raw.into_iter().map(|share| measured * share / total).collect(),
        false => vec![measured / raw.len().max(1) as f64; raw.len()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_weighted() {
        let mut plain = SliceError::default();
        plain.add(&[1.0, 2.0, 2.0, 0.0], &[1.0, 1.0, 2.0, 0.0], None);
        assert_eq!((plain, plain.relative()), (SliceError { error: 1.0, norm: 9.0 }, 1.0 / 9.0));
        let mut weighted = SliceError::default();
        weighted.add(&[1.0, 2.0, 2.0, 0.0], &[1.0, 1.0, 2.0, 0.0], Some(&[1.0, 0.5]));
        assert_eq!(weighted, SliceError { error: 0.5, norm: 5.0 + 2.0 });
        assert_eq!(SliceError::default().relative(), 0.0);
    }

    #[test]
    fn an_experts_output_grows_with_its_matrices_but_the_gate() {
        let slice = |error, norm| SliceError { error, norm };
        let errors = |gate| {
            [
                (SliceKind::Gate, slice(0.1 * gate, gate)),
                (SliceKind::Up, slice(0.4, 2.0)),
                (SliceKind::Down, slice(1.5, 5.0)),
            ]
        };
        assert!((output_error(&errors(1.0)) - 0.2 * 10.0).abs() < 1e-12);
        assert_eq!(output_error(&errors(1.0)), output_error(&errors(4.0)));
        assert_eq!(output_error(&[]), 0.0);
    }

    #[test]
    fn shares_add_up_to_what_was_measured() {
        assert_eq!(divide(8.0, &[1.0, 2.0, 1.0], &[1.0, 1.0, 5.0]), [1.0, 2.0, 5.0]);
        assert_eq!(divide(8.0, &[0.0, 0.0], &[1.0, 1.0]), [4.0, 4.0]);
        assert_eq!(divide(8.0, &[], &[]), [0.0; 0]);
    }
}
