//! Making up for experts that were skipped.

/// Sets the router weights of a token's skipped experts to zero and scales the others so that the sum stays.
/// `weights` and `skipped` are `[n_expert_used]`; what has no flag is not skipped.
///
/// Without a skipped expert not a bit changes. Where the others sum to nothing that could be scaled, they stay as
/// they are.
pub fn renormalise(weights: &mut [f32], skipped: &[bool]) {
    if !skipped.contains(&true) {
        return;
    }
    let sum = |weights: &[f32]| -> f64 { weights.iter().copied().map(f64::from).sum() };
    let whole = sum(weights);
    for (weight, _) in weights.iter_mut().zip(skipped).filter(|(_, skipped)| **skipped) {
        *weight = 0.0;
    }
    let scale = whole / sum(weights);
    if scale.is_finite() && scale > 0.0 {
        weights.iter_mut().for_each(|weight| *weight = (f64::from(*weight) * scale) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renormalised<const N: usize>(mut weights: [f32; N], skipped: [bool; N]) -> [f32; N] {
        renormalise(&mut weights, &skipped);
        weights
    }

    #[test]
    fn the_sum_stays() {
        assert_eq!(renormalised([0.5, 0.25, 0.25], [false, false, true]), [0.6666667, 0.33333334, 0.0]);
        // llama.cpp may have scaled the weights: their sum need not be 1.
        assert_eq!(renormalised([2.0, 0.5], [false, true]), [2.5, 0.0]);
        assert_eq!(renormalised([-1.0, -1.0], [true, false]), [0.0, -2.0]);
    }

    #[test]
    fn without_a_skipped_expert_not_a_bit_changes() {
        let weights = [0.1f32, 0.7, 1e-30, f32::NAN];
        let same = renormalised(weights, [false; 4]);
        assert_eq!(same.map(f32::to_bits), weights.map(f32::to_bits));
    }

    #[test]
    fn nothing_is_divided_by_zero() {
        assert_eq!(renormalised([0.7, 0.3], [true, true]), [0.0, 0.0]);
        assert_eq!(renormalised([0.7, 0.0], [true, false]), [0.0, 0.0]);
        assert_eq!(renormalised([0.0, 0.0], [true, false]), [0.0, 0.0]);
        // A sum of the other sign must not flip anything.
        assert_eq!(renormalised([-2.0, 1.0], [true, false]), [0.0, 1.0]);
        assert_eq!(renormalised([f32::INFINITY, 1.0], [true, false]), [0.0, 1.0]);
    }
}
