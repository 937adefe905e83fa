use rand_mt::Mt;

use super::*;

/// Runs `n` tokens whose wait depends on whether they prefetch. Returns how many did.
fn run(governor: &mut Governor, n: usize, mut wait: impl FnMut(bool) -> f64) -> usize {
    let mut on = 0;
    for _ in 0..n {
        let is_on = governor.is_on();
        on += usize::from(is_on);
        governor.end_token(wait(is_on));
    }
    on
}

const TRIAL: usize = 4 * 10;

#[test]
fn a_trial_is_on_off_off_on() {
    let mut governor = Governor::new(GovernorOptions::default());
    let modes: Vec<bool> = (0..TRIAL)
        .map(|_| {
            assert_eq!(governor.report().reason, GovernorReason::Trial);
            let is_on = governor.is_on();
            governor.end_token(1.0);
            is_on
        })
        .collect();
    assert!(modes.chunks(10).map(|window| window.iter().filter(|on| **on).count()).eq([10, 0, 0, 10]));
    let report = governor.report();
    assert_eq!((report.is_on, report.reason, report.trials), (true, GovernorReason::NoDifference, 1));
    assert_eq!((report.tokens_on, report.tokens_off, report.rest_tokens), (20, 20, 64));
}

#[test]
fn what_pays_stays_on_and_is_tried_ever_more_rarely() {
    let mut governor = Governor::new(GovernorOptions::default());
    let wait = |is_on| if is_on { 0.8 } else { 1.0 };
    run(&mut governor, TRIAL, wait);
    let report = governor.report();
    assert_eq!((report.is_on, report.reason, report.given_up), (true, GovernorReason::Pays, 0));
    assert!((report.benefit_seconds.unwrap() - 0.2).abs() < 1e-9);
    let on = run(&mut governor, 20_000, wait);
    assert!(on > 19_500, "{on} of 20000");
    assert!(governor.is_on());
}

#[test]
fn what_harms_is_switched_off_and_costs_ever_less() {
    let mut governor = Governor::new(GovernorOptions::default());
    let wait = |is_on| if is_on { 1.5 } else { 1.0 };
    run(&mut governor, TRIAL, wait);
    let report = governor.report();
    assert_eq!((report.is_on, report.reason, report.given_up), (false, GovernorReason::Harms, 1));
    let on = run(&mut governor, 20_000, wait);
    assert!(on < 500, "{on} of 20000");
    assert_eq!(governor.report().given_up, 1, "it was never on between trials");
    // Rests double up to the longest.
    assert!(governor.report().trials <= 12, "{}", governor.report().trials);
}

#[test]
fn times_change_both_ways() {
    let mut governor = Governor::new(GovernorOptions { rest_tokens_max: 256, ..GovernorOptions::default() });
    for (on, off, expected) in [(1.5, 1.0, false), (0.5, 1.0, true), (1.5, 1.0, false), (0.9, 1.0, true)] {
        run(&mut governor, 1000, |is_on| if is_on { on } else { off });
        // Long enough for the longest rest and a trial; a trial may be running now.
        while governor.report().reason == GovernorReason::Trial {
            governor.end_token(if governor.is_on() { on } else { off });
        }
        assert_eq!(governor.is_on(), expected, "{on} on, {off} off");
    }
    assert_eq!(governor.report().given_up, 2);
}

#[test]
fn waits_that_fall_steadily_are_not_mistaken_for_a_benefit() {
    // A cache that fills: every token waits a bit less than the one before.
    for slope in [-0.01, 0.01] {
        let mut governor = Governor::new(GovernorOptions { settle_tokens: 0, ..GovernorOptions::default() });
        let mut token = 0.0;
        run(&mut governor, 32, |_| {
            token += 1.0;
            2.0 + slope * token
        });
        let report = governor.report();
        assert_eq!(report.reason, GovernorReason::NoDifference);
        assert!(report.benefit_seconds.unwrap().abs() < 1e-9, "{report:?}");
    }
}

#[test]
fn no_difference_leaves_things_as_they_are() {
    let mut governor = Governor::new(GovernorOptions::default());
    run(&mut governor, TRIAL, |is_on| if is_on { 0.5 } else { 1.0 });
    assert!(governor.is_on());
    // Noise that says nothing: the same waits for both.
    let mut token = 0;
    run(&mut governor, 64 + TRIAL, |_| {
        token += 1;
        f64::from(token % 2)
    });
    let report = governor.report();
    assert_eq!((report.is_on, report.reason), (true, GovernorReason::NoDifference), "{report:?}");
    // Less than a hundredth is no difference either, however exact.
    let mut governor = Governor::new(GovernorOptions::default());
    run(&mut governor, TRIAL, |is_on| if is_on { 0.995 } else { 1.0 });
    assert_eq!(governor.report().reason, GovernorReason::NoDifference);
}

#[test]
fn the_planners_account_ends_it_early_until_a_trial_contradicts() {
    let mut governor = Governor::new(GovernorOptions::default());
    let wait = |is_on| if is_on { 0.5 } else { 1.0 };
    let saving = |governor: &mut Governor, n: usize, saved: f64| {
        for _ in 0..n {
            governor.account(saved, 0.1);
            governor.account(f64::NAN, 0.0);
            let is_on = governor.is_on();
            governor.end_token(wait(is_on));
        }
    };
    saving(&mut governor, TRIAL + 20, 0.2);
    assert_eq!(governor.report().reason, GovernorReason::Pays);
    saving(&mut governor, 8, 0.0);
    let report = governor.report();
    assert_eq!((report.is_on, report.reason, report.given_up), (false, GovernorReason::Accounts, 1));
    // Waits say otherwise: from now on they are believed.
    saving(&mut governor, 64 + TRIAL, 0.0);
    assert_eq!(governor.report().reason, GovernorReason::Pays);
    saving(&mut governor, 60, 0.0);
    assert!(governor.is_on());
    // Once a trial has found harm, the account counts again.
    run(&mut governor, 4 + TRIAL, |is_on| if is_on { 2.0 } else { 1.0 });
    assert_eq!(governor.report().reason, GovernorReason::Harms);
    run(&mut governor, 64 + TRIAL, wait);
    assert_eq!(governor.report().reason, GovernorReason::Pays);
    saving(&mut governor, 8, 0.0);
    assert_eq!(governor.report().reason, GovernorReason::Accounts);
}

#[test]
fn the_users_word_is_not_measured() {
    for is_on in [true, false] {
        let mut governor = Governor::fixed(is_on);
        governor.account(0.0, 9.0);
        let on = run(&mut governor, 1000, |is_on| if is_on { 2.0 } else { 0.0 });
        assert_eq!(on, if is_on { 1000 } else { 0 });
        assert_eq!((governor.report().reason, governor.report().trials), (GovernorReason::Fixed, 0));
    }
}

#[test]
fn what_was_not_measured_decides_nothing() {
    let mut governor = Governor::new(GovernorOptions::default());
    let mut bad = [f64::NAN, f64::INFINITY, -1.0].into_iter().cycle();
    run(&mut governor, TRIAL, |_| bad.next().unwrap());
    assert_eq!(governor.report().reason, GovernorReason::NoDifference);
    // Lengths that make no sense are mended.
    let zero = GovernorOptions {
        window_tokens: 0,
        settle_tokens: 0,
        rest_tokens: 0,
        rest_tokens_max: 0,
        ..Default::default()
    };
    let mut governor = Governor::new(zero);
    run(&mut governor, 100, |is_on| if is_on { 0.5 } else { 1.0 });
    assert!(governor.report().trials > 10);
}

#[test]
fn under_noise_harm_stays_small_and_most_of_a_benefit_is_kept() {
    // Waits of half the mean's spread, as hits and misses make them; a fifth more, or less, with prefetching.
    for (seed, factor) in (1..=8).flat_map(|seed| [(seed, 1.2), (seed, 0.8)]) {
        let mut random = Mt::new(seed);
        let mut governor = Governor::new(GovernorOptions::default());
        let n = 50_000;
        let on = run(&mut governor, n, |is_on| {
            let noise = f64::from(random.next_u32()) / f64::from(u32::MAX);
            (0.13 + 1.74 * noise) * if is_on { factor } else { 1.0 }
        });
        let share = on as f64 / n as f64;
        // An eighth of the time on costs an eighth of a fifth: 2.5 %.
        assert!(if factor > 1.0 { share < 0.125 } else { share > 0.75 }, "seed {seed}, factor {factor}: {share}");
    }
}
