//! Made-up machines: a curve, noise, and what the controller makes of them.

use super::*;

const STRENGTHS: (Knob, [f32; 7]) = (Knob::CacheBias, [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]);

/// Noise with a mean of 1, from a seeded generator.
struct Noise(u64);

impl Noise {
    fn next(&mut self, share: f64) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1.0 + share * ((self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    }
}

/// Milliseconds of a token by strength: what half of the reads cost is soon saved, the rest is products.
const CURVE: [f64; 7] = [100.0, 80.0, 66.0, 57.0, 51.0, 47.0, 45.0];

/// Runs `tokens` tokens; returns how often the chosen strength changed after the first trial.
fn run(latency: &mut Latency, tokens: usize, noise: &mut Noise, curve: &dyn Fn(usize, usize) -> f64) -> usize {
    let mut changes = 0;
    for token in 0..tokens {
        let before = (latency.step, latency.trials);
        latency.end_token(curve(token, latency.running()) / 1e3 * noise.next(0.4));
        changes += usize::from(before.1 > 0 && latency.step != before.0);
    }
    changes
}

#[test]
fn the_smallest_strength_that_meets_the_target_is_found_and_kept() {
    for (target, expected) in [(200.0, 0), (101.0, 0), (85.0, 1), (70.0, 2), (60.0, 3), (54.0, 4), (49.0, 5), (46.5, 6)]
    {
        for seed in 0..8 {
            let mut latency = Latency::new(target / 1e3, STRENGTHS);
            let mut noise = Noise(seed);
            run(&mut latency, 1500, &mut noise, &|_, strength| CURVE[strength]);
            let found = latency.step;
            assert!(found == expected || found == expected + 1, "target {target}: {found}, expected {expected}");
            let changes = run(&mut latency, 4000, &mut noise, &|_, strength| CURVE[strength]);
            assert!(changes <= 6, "target {target}, seed {seed}: {changes} changes");
            let report = latency.report();
            assert_eq!(report.is_reachable, Some(true), "{report:?}");
            let took = CURVE[latency.step];
            assert!(took <= 1.05 * target, "target {target}: {took}");
        }
    }
}

#[test]
fn an_exact_machine_is_understood_after_two_trials() {
    let mut latency = Latency::new(0.060, STRENGTHS);
    for _ in 0..(120 + 64 + 120) {
        latency.end_token(CURVE[latency.running()] / 1e3);
    }
    assert_eq!((latency.step, latency.trials, latency.strength()), (3, 2, STRENGTHS.1[3]));
    let report = latency.report();
    assert_eq!(report.measured.len(), 5, "the ends, and the neighbours: {report:?}");
    assert!((report.seconds.unwrap() - 0.057).abs() < 1e-9 && !report.is_trying);
}

#[test]
fn a_trial_tries_three_strengths_there_and_back() {
    let mut latency = Latency::new(1.0, STRENGTHS);
    let mut tried = Vec::new();
    for token in 0..6 * WINDOWS.tokens() {
        tried.push(latency.running());
        // Tokens before the strength has settled are slow, and do not count.
        latency.end_token(if token % WINDOWS.tokens() < WINDOWS.settle { 1e3 } else { 0.1 });
    }
    assert_eq!(tried, [0, 3, 6, 6, 3, 0].map(|strength| [strength; WINDOWS.tokens() as usize]).concat());
    assert_eq!((latency.trials, latency.step), (1, 0));
    assert!((latency.report().seconds.unwrap() - 0.1).abs() < 1e-9);
}

#[test]
fn a_steady_drift_changes_no_decision() {
    // Tokens get slower by a half in a trial of 120, whatever the strength: nothing is gained by any.
    let mut latency = Latency::new(10.0, STRENGTHS);
    for token in 0..120 {
        latency.end_token(1.0 + f64::from(token) / 240.0);
    }
    let known: Vec<f64> = latency.known.iter().filter(|known| known.weight > 0.0).map(|known| known.mean).collect();
    assert!(known.iter().all(|seconds| (seconds - known[0]).abs() < 0.01), "{known:?}");
}

#[test]
fn out_of_reach_is_the_maximum_and_told_once() {
    let mut latency = Latency::new(0.020, STRENGTHS);
    let mut noise = Noise(7);
    run(&mut latency, 120, &mut noise, &|_, strength| CURVE[strength]);
    assert_eq!(latency.step, 6);
    let news = latency.take_news().unwrap();
    assert!((news.least_seconds.unwrap() - 0.045).abs() < 0.005, "{news:?}");
    assert_eq!((news.is_reachable, news.strength), (Some(false), 0.3));
    run(&mut latency, 60, &mut noise, &|_, strength| CURVE[strength]);
    assert_eq!((latency.take_news().is_some(), latency.step), (false, 6));
}

#[test]
fn another_text_or_a_smaller_cache_is_followed() {
    let mut latency = Latency::new(0.060, STRENGTHS);
    let mut noise = Noise(1);
    run(&mut latency, 3000, &mut noise, &|_, strength| CURVE[strength]);
    let before = latency.step;
    // A quarter slower: the target takes two or three more steps, of which the first ones do not wait for a trial.
    run(&mut latency, 300, &mut noise, &|_, strength| 1.25 * CURVE[strength]);
    assert!(latency.step > before, "{before} and {}", latency.step);
    run(&mut latency, 2000, &mut noise, &|_, strength| 1.25 * CURVE[strength]);
    assert!(1.25 * CURVE[latency.step] <= 1.05 * 60.0, "{}", latency.step);
    // Twice as fast: soon nothing has to be given up.
    run(&mut latency, 20_000, &mut noise, &|_, strength| 0.5 * CURVE[strength]);
    assert_eq!(latency.step, 0);
}

#[test]
fn rests_double_while_trials_confirm_each_other() {
    let mut latency = Latency::new(0.070, STRENGTHS);
    let mut rests = Vec::new();
    for _ in 0..6000 {
        let trials = latency.trials;
        latency.end_token(CURVE[latency.running()] / 1e3);
        if latency.trials > trials {
            rests.push(latency.rest);
        }
    }
    assert_eq!(rests[rests.len() - 3..].windows(2).filter(|pair| pair[1] == 2 * pair[0]).count(), 2, "{rests:?}");
    let mut latency = Latency::new(0.2, STRENGTHS);
    (0..20_000).for_each(|_| latency.end_token(0.1));
    assert_eq!(latency.rest, REST_TOKENS_MAX);
}

#[test]
fn invalid_times_do_not_count() {
    let mut latency = Latency::new(0.060, STRENGTHS);
    for seconds in [f64::NAN, f64::INFINITY, -1.0, 0.0].into_iter().cycle().take(2000) {
        latency.end_token(seconds);
    }
    let report = latency.report();
    assert_eq!((report.strength, report.is_reachable, report.seconds), (0.0, None, None));
    assert!(latency.take_news().is_none() && report.measured.is_empty());
}

#[test]
fn the_curve_never_rises_and_is_nearest() {
    let measured = |mean, weight| FadingMean { mean, weight };
    let points = [(0, measured(4.0, 1.0)), (2, measured(1.0, 1.0)), (3, measured(3.0, 3.0)), (6, measured(2.0, 1.0))];
    assert_eq!(never_rising(points.into_iter()), [(0, 4.0), (2, 2.5), (3, 2.5), (6, 2.0)]);
    assert_eq!(never_rising([].into_iter()), []);
    let rising = (0..4).map(|at| (at, measured(at as f64, 1.0)));
    assert_eq!(never_rising(rising), [(0, 1.5), (1, 1.5), (2, 1.5), (3, 1.5)]);
}
