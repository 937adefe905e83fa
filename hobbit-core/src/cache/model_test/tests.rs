//! Random scripts.

use super::*;
use crate::cache::policy::{Belady, Upcoming};
use crate::random::SplitMix64;

/// A failure names a seed that reproduces it everywhere.
fn script(seed: u64, len: usize) -> Vec<u8> {
    let mut random = SplitMix64::new(seed);
    (0..len).map(|_| (random.bits() >> 56) as u8).collect()
}

/// Whether PROPTEST_CASES asks for fewer cases than usual, and how many of `n` scripts a test then runs.
fn scripts(n: u64) -> (bool, u64) {
    let cases = u64::from(proptest::test_runner::Config::default().cases);
    (cases < 256, (n * cases).div_ceil(256))
}

/// Determinism of all: hash order would differ between two policies of a kind.
#[test]
fn every_policy_keeps_to_the_rules_and_repeats_itself() {
    let (is_short, n) = scripts(60);
    for kind in PolicyKind::ALL {
        let mut evictions = 0;
        for seed in 1..=n {
            eprintln!("{kind}, seed {seed}");
            let script = script(seed, 3000);
            let log = run_kind(kind, &script);
            assert_eq!(log, run_kind(kind, &script), "equal calls, equal answers");
            let evicts = |event: &&Event| matches!(event, Event::Acquired(Some(Acquired { evicted: Some(_), .. })));
            evictions += log.iter().filter(evicts).count();
        }
        assert!(is_short || evictions > 500, "{kind} chose {evictions} times only");
    }
    for seed in 1..=n {
        // Its future has nothing to do with the script.
        let future = (0..300).map(|time| Upcoming {
            time,
            expert: ExpertId { layer: time as u16 % 5, index: time as u16 % 7 },
            demand: Some(Precision::High),
        });
        let belady = || Box::new(Belady::new(future.clone(), 1.0));
        let script = script(seed, 3000);
        assert_eq!(run_policy(belady(), false, &script), run_policy(belady(), false, &script));
    }
}

#[test]
fn the_cache_equals_its_model_on_random_scripts() {
    let (mut evictions, mut refusals, mut upgrades, mut displacements, mut releases) = (0, 0, 0, 0, 0);
    let (mut resizes, mut lost, mut refused_resizes) = (0, 0, 0);
    let (is_short, n) = scripts(300);
    for seed in 1..=n {
        eprintln!("seed {seed}");
        let script = script(seed, 3000);
        let log = run_kind(PolicyKind::Lru, &script);
        assert_eq!(log, run_kind(PolicyKind::Lru, &script), "equal calls, equal answers");
        for event in log {
            match event {
                Event::Acquired(None) => refusals += 1,
                Event::Acquired(Some(acquired)) => evictions += usize::from(acquired.evicted.is_some()),
                Event::Upgraded(asked, acquired) => {
                    upgrades += usize::from(asked.is_some());
                    displacements += usize::from(asked.is_some() && acquired.is_some_and(|a| a.evicted.is_some()));
                }
                Event::Released(_, released) => releases += usize::from(released),
                Event::Resized(_, None) => refused_resizes += 1,
                Event::Resized(_, Some(evicted)) => {
                    resizes += 1;
                    lost += evicted;
                }
            }
        }
    }
    let reached = [evictions, refusals, upgrades, displacements, releases, resizes, lost, refused_resizes];
    eprintln!(
        "evictions, refusals, upgrades, of them by displacement, releases, resizes, evicted by these, refused ones: \
         {reached:?}"
    );
    assert!(
        is_short || reached.into_iter().zip([1000, 1000, 200, 100, 1000, 1000, 200, 100]).all(|(n, least)| n >= least),
        "scripts reach too little: {reached:?}"
    );
}

#[test]
fn the_first_byte_names_the_policy() {
    let script = script(3, 2000);
    let named = |byte: u8| run(&[&[byte], script.as_slice()].concat());
    for (kind, byte) in PolicyKind::ALL.into_iter().zip(0..) {
        assert_eq!(named(byte), run_kind(kind, &script));
    }
    assert!(run(&[]).is_empty());
}
