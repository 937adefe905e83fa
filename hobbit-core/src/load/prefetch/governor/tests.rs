use rand_mt::Mt;

use super::GovernorReason::{Fixed, Harms, NoDifference, Pays, Trial, Untried};
use super::*;

/// Runs `n` tokens whose time depends on whether they prefetch; half of it is waiting. Returns how many prefetched.
fn run(governor: &mut Governor, n: usize, mut time: impl FnMut(bool) -> f64) -> usize {
    let mut on = 0;
    for _ in 0..n {
        let is_on = governor.is_on();
        assert_eq!(governor.predicts(), is_on, "tokens that are off pay for no predictions");
        on += usize::from(is_on);
        let seconds = time(is_on);
        governor.end_token(seconds, 0.5 * seconds);
    }
    on
}

fn times(on: f64, off: f64) -> impl Fn(bool) -> f64 {
    move |is_on| if is_on { on } else { off }
}

const FIRST: usize = 16;
const TRIAL: usize = 4 * 10;

/// A governor that has had one trial.
fn tried(on: f64, off: f64) -> Governor {
    let mut governor = Governor::of_prefetching();
    run(&mut governor, FIRST + TRIAL, times(on, off));
    governor
}

/// Tokens with so much noise, which may last: a part of each token's deviation is the one before's.
struct Noise {
    random: Mt,
    deviation: f64,
    lasting: f64,
    last: f64,
}

impl Noise {
    fn new(seed: u32, deviation: f64, lasting: f64) -> Self {
        Self { random: Mt::new(seed), deviation, lasting, last: 0.0 }
    }

    /// A factor whose mean is 1.
    fn next(&mut self) -> f64 {
        let uniform: f64 = (0..12).map(|_| f64::from(self.random.next_u32()) / f64::from(u32::MAX)).sum();
        self.last = self.lasting * self.last + (1.0 - self.lasting.powi(2)).sqrt() * (uniform - 6.0);
        (1.0 + self.deviation * self.last).max(0.1)
    }
}

/// Time of `n` tokens, to what they would take with the better setting throughout.
fn loss(n: usize, on: f64, off: f64, mut noise: Noise) -> f64 {
    let mut governor = Governor::of_prefetching();
    let n_on = run(&mut governor, n, |is_on| noise.next() * if is_on { on } else { off });
    let own = n_on as f64 * on + (n - n_on) as f64 * off;
    own / (n as f64 * on.min(off)) - 1.0
}

#[test]
fn a_trial_compares_batches_of_one_width() {
    // Prefetching saves nothing, but half of the batches that prefetch have eight tokens, each of which is faster.
    let mut governor = Governor::of_prefetching();
    for n in 0..FIRST + TRIAL {
        let n_tokens = if governor.is_on() && n % 2 == 1 { 8 } else { 1 };
        let seconds = 1.0 + 0.5 * f64::from(n_tokens);
        governor.end_batch(n_tokens, seconds, 0.5 * seconds);
    }
    let report = governor.report();
    assert_eq!((report.trials, report.is_on, report.reason), (1, false, NoDifference));
    assert_eq!(report.benefit_seconds, Some(0.0));
}

#[test]
fn a_trial_is_on_off_off_on_and_decides() {
    for (on, off, is_on, reason, given_up) in [
        (1.0, 1.0, false, NoDifference, 1),
        (0.995, 1.0, false, NoDifference, 1), // less than a hundredth
        (0.8, 1.0, true, Pays, 0),
        (1.5, 1.0, false, Harms, 1),
        (f64::NAN, f64::NAN, false, NoDifference, 1),
        (f64::INFINITY, -1.0, false, NoDifference, 1),
    ] {
        let mut governor = Governor::of_prefetching();
        let report = governor.report();
        assert_eq!((report.is_on, report.reason, report.rest_tokens), (false, Untried, 16), "short answers have none");
        assert_eq!(run(&mut governor, FIRST, times(1.0, 1.0)), 0);
        let windows = [10, 10, 10, 9].map(|n| run(&mut governor, n, times(on, off)));
        assert_eq!((windows, governor.report().reason), ([10, 0, 0, 9], Trial), "{on} {off}");
        run(&mut governor, 1, times(on, off));
        let report = governor.report();
        assert_eq!((report.is_on, report.reason, report.given_up), (is_on, reason, given_up), "{on} {off}");
        assert_eq!((report.trials, report.tokens_on, report.tokens_off), (1, 20, 36));
        assert!(report.rest_tokens >= 64, "{report:?}");
    }
}

#[test]
fn trials_become_rare_and_cost_little() {
    let mut paying = Governor::of_prefetching();
    assert!(run(&mut paying, 20_000, times(0.8, 1.0)) > 19_500 && paying.is_on());
    assert!((paying.report().benefit_seconds.unwrap() - 0.2).abs() < 1e-9);
    let mut harming = Governor::of_prefetching();
    let on = run(&mut harming, 20_000, times(1.5, 1.0));
    let report = harming.report();
    assert!(on < 300 && report.trials <= 12, "{on} of 20000, {report:?}");
    assert_eq!(report.given_up, 1, "it was never on between trials");
    // The longer, the more a trial loses: 20 tokens at 0.1 are two, 0.4 % of 500.
    assert_eq!([1.01, 1.1, 1.5].map(|on| tried(on, 1.0).report().rest_tokens), [64, 500, 2500]);
}

/// The promise of the defaults: at most a hundredth behind the better setting, with noise of a tenth to a third of a
/// token's time, in the mean of a hundred runs.
#[test]
fn a_longer_text_is_at_most_one_percent_behind() {
    for (on, off) in
        [(1.0, 1.0), (1.03, 1.0), (1.06, 1.0), (1.15, 1.0), (1.5, 1.0), (0.97, 1.0), (0.9, 1.0), (0.7, 1.0)]
    {
        for (deviation, lasting) in [(0.03, 0.0), (0.1, 0.0), (0.1, 0.6), (0.3, 0.0)] {
            let mut losses: Vec<f64> =
                (0..100).map(|seed| loss(4096, on, off, Noise::new(seed, deviation, lasting))).collect();
            losses.sort_by(f64::total_cmp);
            let mean = losses.iter().sum::<f64>() / 100.0;
            let what = format!("{on}, {deviation} {lasting}: mean {mean:.4}, 90th {:.4}", losses[90]);
            assert!(mean < 0.01 && losses[90] < 0.025, "{what}");
        }
    }
}

#[test]
fn changes_are_followed_both_ways() {
    let mut governor = Governor::of_prefetching();
    // Each time tokens slow down or speed up as a whole, as with another disk, text or budget.
    for (on, off, expected) in [(1.5, 1.0, false), (2.0, 4.0, true), (1.5, 1.0, false), (0.45, 0.5, true)] {
        run(&mut governor, 3000, times(on, off));
        let mut noise = Noise::new(1, 0.1, 0.0);
        let n_on = run(&mut governor, 1000, |is_on| noise.next() * if is_on { on } else { off });
        assert!(if expected { n_on > 900 } else { n_on < 100 }, "{on} on, {off} off: {n_on} of 1000");
    }
    assert_eq!(governor.report().given_up, 2);
}

#[test]
fn a_change_ends_a_long_rest() {
    let mut governor = Governor::of_prefetching();
    run(&mut governor, 20_000, times(1.1, 1.0));
    while governor.report().rest_tokens < 2000 {
        run(&mut governor, 1, times(1.1, 1.0));
    }
    run(&mut governor, 100, times(0.9, 1.1));
    assert!(governor.report().rest_tokens > 1000, "a tenth is no change");
    run(&mut governor, 500, times(0.9, 1.5));
    assert_eq!((governor.report().reason, governor.is_on()), (Pays, true));
}

#[test]
fn without_waits_there_is_no_trial() {
    let mut governor = Governor::of_prefetching();
    for _ in 0..1000 {
        governor.end_token(1.0, 0.005);
    }
    assert_eq!((governor.report().tokens_on, governor.report().reason), (0, Untried));
    assert!(run(&mut governor, 200, times(0.8, 1.0)) > 100, "once tokens wait, it is tried");
    // It stays, and is tried again, although tokens hardly wait any more: that may be its merit.
    for _ in 0..2000 {
        governor.end_token(0.8, 0.0);
    }
    assert!(governor.report().trials > 1);
}

#[test]
fn steady_trends_are_no_difference() {
    // A cache that fills: every token takes a bit less than the one before.
    for slope in [-0.01, 0.01] {
        let mut governor = Governor::of_prefetching();
        let mut token = 0.0;
        run(&mut governor, FIRST + TRIAL, |_| (token += 1.0, 2.0 + slope * token).1);
        let report = governor.report();
        assert!(report.reason == NoDifference && report.benefit_seconds.unwrap().abs() < 1e-9, "{report:?}");
    }
}

#[test]
fn a_trial_that_begins_without_ends_early_if_it_harms() {
    let windows = Windows { settings: &[OFF, ON, ON, OFF], measured: 8, settle: 2 };
    for (on, n_on) in [(1.3, 10), (1.0, 20), (0.7, 20)] {
        let mut governor = Governor::on_trial(windows, 0.01);
        let noise = |token: u32| if token.is_multiple_of(2) { 0.1 } else { 0.0 };
        let mut token = 0;
        assert_eq!(run(&mut governor, FIRST, times(on, 1.0)), 0);
        let time = |is_on| (token += 1, noise(token) + if is_on { on } else { 1.0 }).1;
        assert_eq!(run(&mut governor, TRIAL, time), n_on, "{on}");
        assert_eq!(
            governor.report().reason,
            if on > 1.0 {
                Harms
            } else if on < 1.0 {
                Pays
            } else {
                NoDifference
            }
        );
    }
}

#[test]
fn tokens_after_a_prompt_are_not_measured() {
    let mut governor = Governor::of_prefetching();
    run(&mut governor, FIRST, times(1.0, 1.0));
    for _ in 0..4 {
        run(&mut governor, 4, times(0.8, 1.0));
        governor.interrupt();
        run(&mut governor, 2, |_| 100.0);
        run(&mut governor, 4, times(0.8, 1.0));
    }
    let report = governor.report();
    assert!(report.reason == Pays && (report.benefit_seconds.unwrap() - 0.2).abs() < 1e-9, "{report:?}");
}

#[test]
fn a_fixed_choice_never_changes() {
    for choice in [true, false] {
        let mut governor = Governor::fixed(choice);
        for _ in 0..500 {
            assert!(governor.is_on() == choice && governor.predicts(), "they are judged in any case");
            governor.end_token(1.0, 1.0);
        }
        let report = governor.report();
        assert_eq!((report.reason, report.trials, report.rest_tokens), (Fixed, 0, 0));
    }
}
