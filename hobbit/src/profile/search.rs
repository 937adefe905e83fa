//! Thresholds for a tolerated loss: few measurements, because each is a run over the text.

use crate::route::Thresholds;

/// What thresholds did to a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// What was tried.
    pub thresholds: Thresholds,
    /// Relative increase of perplexity; 0.01 is one percent.
    pub loss: f64,
    /// Expert bytes read per token.
    pub bytes_per_token: f64,
}

/// The least traffic that keeps the loss within `max_loss`, as far as bisection finds it: first the lowest T1 with T2 = 1
/// (nothing skipped), then the lowest T2 beside it. `candidates` are the thresholds to be tried, ascending, the last one
/// 1; `measure` runs the text. At most `2 * (log2(candidates) + 1) + 1` measurements.
///
/// Loss need not grow evenly with falling thresholds; the answer has been measured in any case. `None` if not even
/// T1 = T2 = 1 keeps the loss: `max_loss` is negative or no number.
///
/// # Errors
/// Whatever `measure` answers.
pub fn search<E>(
    candidates: &[f32],
    max_loss: f64,
    mut measure: impl FnMut(Thresholds) -> Result<Trial, E>,
) -> Result<Option<Trial>, E> {
    let mut best: Option<Trial> = None;
    let mut keeps = |thresholds| {
        let trial = measure(thresholds)?;
        let keeps = trial.loss <= max_loss;
        if keeps && best.is_none_or(|best| trial.bytes_per_token < best.bytes_per_token) {
            best = Some(trial);
        }
        Ok(keeps)
    };
    if !keeps(Thresholds { t1: 1.0, t2: 1.0 })? {
        return Ok(None);
    }
    let t1 = lowest(candidates, |t1| keeps(Thresholds { t1, t2: 1.0 }))?;
    let from = candidates.partition_point(|t2| *t2 < t1);
    lowest(&candidates[from..], |t2| keeps(Thresholds { t1, t2 }))?;
    Ok(best)
}

/// The most of `n` that can be lowered together within `max_loss`, and what that loses: the mixed model is measured, and more
/// or fewer are lowered until the tolerance is met, by bisection. Of `n` experts, most robust first, that is EdgeMoE's
/// (section III-B); of 100 percent of a prompt's, least popular first, Fate's share p (section 4.5). `guess` is
/// tried first; `measure` is asked for the loss of lowering so many, at most `log2(n) + 2` times. Nothing lowered loses nothing.
///
/// # Errors
/// Whatever `measure` answers.
pub fn most_lowered<E>(
    n: usize,
    guess: usize,
    max_loss: f64,
    mut measure: impl FnMut(usize) -> Result<f64, E>,
) -> Result<(usize, f64), E> {
    // So many are known to keep the loss; so many and one more are the most that could.
    let (mut kept, mut most) = ((0, 0.0), n);
    let mut next = guess.clamp(n.min(1), n);
    while kept.0 < most {
        let loss = measure(next)?;
        match loss <= max_loss {
            true => kept = (next, loss),
            false => most = next - 1,
        }
        next = kept.0 + (most - kept.0).div_ceil(2);
    }
    Ok(kept)
}

/// The lowest that `keeps`, if those above it do too; the last, 1, is known to.
fn lowest<E>(candidates: &[f32], mut keeps: impl FnMut(f32) -> Result<bool, E>) -> Result<f32, E> {
    let (mut low, mut high) = (0, candidates.len().saturating_sub(1));
    while low < high {
        let middle = low.midpoint(high);
        match keeps(candidates[middle])? {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    Ok(candidates.get(low).copied().unwrap_or(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const CANDIDATES: [f32; 11] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

    fn run(max_loss: f64, loss: impl Fn(Thresholds) -> f64) -> (Option<Trial>, usize) {
        let mut n = 0;
        let found = search(&CANDIDATES, max_loss, |thresholds| {
            n += 1;
            let bytes_per_token = f64::from(2.0 * thresholds.t1 + thresholds.t2);
            Ok::<_, Infallible>(Trial { thresholds, loss: loss(thresholds), bytes_per_token })
        });
        (found.unwrap(), n)
    }

    #[test]
    fn first_t1_then_t2() {
        let loss = |t: Thresholds| f64::from((1.0 - t.t1) * 0.1 + (1.0 - t.t2) * 0.5);
        let (found, n) = run(0.05, loss);
        let found = found.unwrap();
        assert!(found.loss <= 0.05 && found.thresholds.t1 <= 0.6, "{found:?}");
        assert!(n <= 9, "{n} measurements");
    }

    #[test]
    fn everything_low_if_nothing_is_lost_and_nothing_low_if_all_is() {
        let (free, _) = run(0.01, |_| 0.0);
        assert_eq!(free.unwrap().thresholds, Thresholds { t1: 0.0, t2: 0.0 });
        let (dear, _) = run(0.01, |t| if t.t1 < 1.0 { 1.0 } else { 0.0 });
        assert_eq!(dear.unwrap().thresholds, Thresholds { t1: 1.0, t2: 1.0 });
        assert_eq!(run(-0.1, |_| 0.0).0, None);
        assert_eq!(run(f64::NAN, |_| 0.0).0, None);
    }

    #[test]
    fn the_answer_keeps_the_loss_even_where_loss_is_not_even() {
        let (found, _) = run(0.01, |t| if (0.25..0.45).contains(&t.t1) { 0.02 } else { 0.005 });
        assert!(found.unwrap().loss <= 0.01);
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
        // Of eight experts an eighth more is lowered every 12.5 percent, at 0.3 percent each.
        let loss = |percent: usize| 0.003 * (percent * 8 / 100) as f64;
        let of = |max_loss: f64| {
            let mut tried = Vec::new();
            let measured = |percent| Ok::<_, Infallible>((tried.push(percent), loss(percent)).1);
            let found = most_lowered(100, 25, max_loss, measured).unwrap();
            assert!(found.0 == 0 || tried.contains(&found.0), "{found:?} was not measured: {tried:?}");
            (found, tried.len())
        };
        assert_eq!(of(0.01).0, (49, loss(49)), "the most that lower no fourth expert");
        assert_eq!([of(0.1).0.0, of(0.003).0.0, of(0.001).0.0], [100, 24, 12]);
        assert!(of(0.01).1 <= 8);
    }

    #[test]
    fn a_failure_ends_the_search() {
        assert_eq!(search(&CANDIDATES, 0.1, |_| Err::<Trial, _>("disk")), Err("disk"));
    }
}
