use proptest::prelude::*;

use super::*;
use crate::profile::hull::hull;

fn choices(table: &[(u64, f64)]) -> Vec<Choice> {
    table.iter().map(|&(bytes, loss)| Choice { bytes, loss }).collect()
}

fn size(experts: &[Vec<Choice>], chosen: &[usize]) -> u64 {
    experts.iter().zip(chosen).map(|(choices, &i)| choices[i].bytes).sum()
}

fn nats(experts: &[Vec<Choice>], chosen: &[usize]) -> f64 {
    experts.iter().zip(chosen).map(|(choices, &i)| choices[i].loss).sum()
}

#[test]
fn the_most_robust_is_lowered_first() {
    let experts = [choices(&[(100, 0.0), (50, 0.010)]), choices(&[(100, 0.0), (50, 0.002), (25, 0.010)])];
    let at = |max| choose(&experts, Goal::MaxLoss(max)).unwrap();
    assert_eq!(at(0.0), [0, 0]);
    assert_eq!(at(0.0021), [0, 1]);
    assert_eq!(at(0.0125), [1, 1]);
    assert_eq!(at(1.0), [1, 2]);
    let fits = |bytes| choose(&experts, Goal::TargetSize { bytes, other: 1000 });
    assert_eq!(fits(1200), Ok(vec![0, 0]));
    assert_eq!(fits(1199), Ok(vec![0, 1]));
    assert_eq!(fits(1075), Ok(vec![1, 2]));
    let Err(WidthsError::TargetSize { target: 1074, smallest: 1075, loss }) = fits(1074) else { panic!("reachable") };
    assert!((loss - 0.02f64.exp_m1()).abs() < 1e-12);
}

#[test]
fn steps_that_no_line_supports_are_passed_over() {
    // The middle width loses more than the narrow one; the widest saves nothing.
    let experts = [choices(&[(100, 0.0), (100, 0.0), (60, 0.9), (40, 0.1)])];
    assert_eq!(choose(&experts, Goal::MaxLoss(0.05)), Ok(vec![0]));
    assert_eq!(choose(&experts, Goal::MaxLoss(0.2)), Ok(vec![3]));
}

#[test]
fn a_number_of_experts_is_lowered_in_the_order_of_their_losses() {
    let expert = |loss| choices(&[(100, 0.0), (50, loss)]);
    let experts = [expert(0.3), expert(0.1), choices(&[(50, 0.0), (50, 0.0)]), expert(0.2)];
    let chosen = |n| choose(&experts, Goal::Lowered { max_loss: 0.0, n }).unwrap();
    assert_eq!([0, 1, 2, 9].map(chosen), [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 1]]);
}

#[test]
fn the_number_of_lowered_experts_is_adjusted_by_measurements() {
    let search = |n_max, predicted, limit: u64| {
        let runs = adjust(n_max, predicted, 0.5, |n| Ok::<_, ()>(n as f64 / limit as f64 / 2.0)).unwrap();
        assert!(runs.len() <= RUNS_MAX && runs.iter().all(|(n, _)| (1..=n_max).contains(n)), "{runs:?}");
        let within = runs.iter().filter(|(_, loss)| *loss <= 0.5).map(|(n, _)| *n);
        (runs[0].0, within.max().unwrap_or(0))
    };
    assert_eq!(search(48, 20, 33), (20, 33), "predicted too few");
    assert_eq!(search(48, 40, 7), (40, 7), "predicted too many");
    assert_eq!(search(48, 0, 100), (1, 48), "all of them");
    assert_eq!(search(1, 9, 1), (1, 1));
    let (_, found) = search(6144, 1000, 3000);
    assert!((3000 - 6144 / 64..=3000).contains(&found), "{found}");
    assert_eq!(adjust(8, 4, 0.5, |_| Err("disk")), Err("disk"));
}

/// Up to four experts with up to three widths, losses in quarters of a permille.
fn experts() -> impl Strategy<Value = Vec<Vec<Choice>>> {
    let lowered = prop::collection::vec((1..100u64, 0..40u32), 0..4);
    let expert = lowered.prop_map(|lowered| {
        let lowered = lowered.into_iter().map(|(bytes, loss)| Choice { bytes, loss: f64::from(loss) / 4000.0 });
        [Choice { bytes: 100, loss: 0.0 }].into_iter().chain(lowered).collect()
    });
    prop::collection::vec(expert, 0..5)
}

fn every_combination(experts: &[Vec<Choice>]) -> Vec<Vec<usize>> {
    experts.iter().fold(vec![Vec::new()], |all, choices| {
        let extended = |done: &Vec<usize>| {
            let done = done.clone();
            (0..choices.len()).map(move |i| done.iter().copied().chain([i]).collect())
        };
        all.iter().flat_map(extended).collect()
    })
}

fn largest_step(experts: &[Vec<Choice>]) -> u64 {
    let step =
        |choices: &Vec<Choice>| hull(choices).windows(2).map(|w| choices[w[0]].bytes - choices[w[1]].bytes).max();
    experts.iter().filter_map(step).max().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_tolerance_is_kept_and_a_larger_one_never_gives_a_larger_file(
        experts in experts(), a in 0.0..0.05f64, b in 0.0..0.05f64,
    ) {
        let (less, more) = (a.min(b), a.max(b));
        let [strict, loose] = [less, more].map(|max| choose(&experts, Goal::MaxLoss(max)).unwrap());
        prop_assert!(nats(&experts, &strict).exp_m1() <= less + 1e-12);
        prop_assert!(size(&experts, &loose) <= size(&experts, &strict));
        prop_assert!(nats(&experts, &loose) >= nats(&experts, &strict) - 1e-12);
        prop_assert_eq!(choose(&experts, Goal::MaxLoss(less)).unwrap(), strict, "deterministic");
    }

    #[test]
    fn no_choice_within_the_tolerance_saves_a_step_more(experts in experts(), max in 0.0..0.05f64) {
        let ours = size(&experts, &choose(&experts, Goal::MaxLoss(max)).unwrap());
        let all = every_combination(&experts);
        let within = all.iter().filter(|chosen| nats(&experts, chosen).exp_m1() <= max);
        let best = within.map(|chosen| size(&experts, chosen)).min().unwrap();
        prop_assert!(ours <= best + largest_step(&experts), "{} against {}", ours, best);
    }

    #[test]
    fn a_size_is_kept_where_it_can_be(experts in experts(), target in 0..600u64) {
        let all = every_combination(&experts);
        let smallest = all.iter().map(|chosen| size(&experts, chosen)).min().unwrap();
        match choose(&experts, Goal::TargetSize { bytes: target, other: 10 }) {
            Ok(chosen) => {
                prop_assert!(size(&experts, &chosen) + 10 <= target);
                // A choice that fits with a step's bytes less room loses no less.
                let room = (target - 10).saturating_sub(largest_step(&experts));
                let tighter = all.iter().filter(|other| size(&experts, other) <= room);
                let least = tighter.map(|other| nats(&experts, other)).fold(f64::INFINITY, f64::min);
                prop_assert!(nats(&experts, &chosen) <= least + 1e-12);
            }
            Err(WidthsError::TargetSize { smallest: ours, .. }) => {
                prop_assert_eq!(ours, smallest + 10);
                prop_assert!(smallest + 10 > target);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
