//! Sensitivity of each expert: a layer's measured loss, divided among its experts.
//!
//! EdgeMoE lowers one expert at a time and measures the loss, E x L runs over the text for each width. Here every
//! *layer* is lowered once, and its measured loss (mean KL divergence from the exact predictions) is divided in
//! proportion to
//!
//! ```text
//! I_e * |W_e|^4    I_e = sum over the expert's uses of its squared router weight   (Uses::importance)
//!                  |W_e| = norm of all its matrices together                       (LayerNorms)
//! ```
//!
//! An expert adds its router weight times its output to a token's hidden state. Its output is proportional to the norms
//! of two matrices, and KL divergence is quadratic in small errors.

/// Divides a layer's measured loss among its experts: `importance` and `norms` are `[n_expert]`. Without any difference
/// between experts, each gets the same.
pub fn divide(measured: f64, importance: &[f64], norms: &[f32]) -> Vec<f64> {
    let parts: Vec<f64> = importance.iter().zip(norms).map(|(i, norm)| i.max(0.0) * f64::from(*norm).powi(4)).collect();
    let total: f64 = parts.iter().sum();
    if total > 0.0 && total.is_finite() {
        parts.into_iter().map(|part| measured * part / total).collect()
    } else {
        vec![measured / parts.len().max(1) as f64; parts.len()]
    }
}

/// The most of `n` that can be lowered together within `max_loss`, and the measured loss, found by bisection. Of `n`
/// experts, most robust first, this is EdgeMoE's "measure and adjust" (section III-B); of 100 percent of a prompt's
/// experts, least popular first, it is Fate's share p (section 4.5). `guess` is tried first. `measure` runs the text
/// with that many lowered, at most `log2(n) + 2` times; with none lowered nothing is lost.
pub fn most_lowered<E>(
    n: usize,
    guess: usize,
    max_loss: f64,
    mut measure: impl FnMut(usize) -> Result<f64, E>,
) -> Result<(usize, f64), E> {
    // The answer lies between `kept.0`, which is within the loss, and `most`.
    let (mut kept, mut most) = ((0, 0.0), n);
    let mut next = guess.clamp(n.min(1), n);
    while kept.0 < most {
        let loss = measure(next)?;
        if loss <= max_loss {
            kept = (next, loss);
        } else {
            most = next - 1;
        }
        next = kept.0 + (most - kept.0).div_ceil(2);
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn shares_follow_importance_and_norms_and_add_up_to_the_measurement() {
        assert_eq!(divide(8.0, &[1.0, 2.0, 5.0], &[1.0; 3]), [1.0, 2.0, 5.0]);
        assert_eq!(divide(34.0, &[1.0, 2.0, 1.0], &[1.0, 2.0, 1.0]), [1.0, 32.0, 1.0]);
        assert_eq!(divide(8.0, &[0.0, 0.0], &[1.0, 1.0]), [4.0, 4.0]);
        assert_eq!(divide(8.0, &[1.0, 1.0], &[f32::INFINITY, 1.0]), [4.0, 4.0]);
        assert_eq!(divide(8.0, &[], &[]), [0.0; 0]);
    }

    #[test]
    fn as_many_are_lowered_as_the_measured_loss_allows() {
        for guess in [0, 1, 37, 100, 1000] {
            let of = |max_loss: f64| {
                let mut tried = Vec::new();
                let measured = |n: usize| Ok::<_, Infallible>((tried.push(n), (n as f64 / 100.0).powi(2)).1);
                let found = most_lowered(100, guess, max_loss, measured).unwrap();
                assert!(tried.len() <= 8 && tried.iter().all(|n| (1..=100).contains(n)), "{tried:?}");
                assert_eq!(tried.first(), Some(&guess.clamp(1, 100)));
                assert!(found.0 == 0 || tried.contains(&found.0), "{found:?} was not measured: {tried:?}");
                found
            };
            assert_eq!([of(0.25), of(1.0), of(2.0)].map(|found| found.0), [50, 100, 100]);
            assert_eq!([of(0.0), of(-1.0), of(f64::NAN)], [(0, 0.0); 3]);
            assert_eq!(of(0.09), (30, 0.3f64.powi(2)));
        }
        assert_eq!(most_lowered(0, 5, 1.0, |_| Err("nothing to measure")), Ok((0, 0.0)));
    }

    #[test]
    fn a_share_of_prompts_is_found_in_whole_percents() {
        // With eight experts, one more is lowered every 12.5 percent, at 0.3 percent loss each.
        let loss = |percent: usize| 0.003 * (percent * 8 / 100) as f64;
        let of = |max_loss| most_lowered(100, 25, max_loss, |percent| Ok::<_, Infallible>(loss(percent))).unwrap();
        assert_eq!(of(0.01), (49, loss(49)), "the most that lower no fourth expert");
        assert_eq!([of(0.1).0, of(0.003).0, of(0.001).0], [100, 24, 12]);
    }
}
