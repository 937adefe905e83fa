use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn misses(sizes: &[(u64, bool)]) -> Vec<Miss> {
    let miss = |(i, &(bytes, on_host)): (usize, &(u64, bool))| Miss {
        index: 10 + i as u16,
        bytes,
        rows: 1,
        score: 1.0 / (1.0 + i as f32),
        on_host,
    };
    sizes.iter().enumerate().map(miss).collect()
}

/// Whole seconds per MiB, no constants.
fn costs(link: f64, cpu: f64) -> Costs {
    Costs {
        link: RunningMean::seeded(link / MIB as f64),
        cpu: RunningMean::seeded(cpu / MIB as f64),
        link_latency: 0.0,
        cpu_overhead: 0.0,
        tail: 0.0,
    }
}

#[test]
fn prompts_are_helped_while_an_expert_has_few_tokens_and_memory_is_bounded() {
    let helps = |n_rows, missing, input, result| helps_prompt(n_rows, 8, missing, [input, result]);
    assert!(helps(512, 16 * MIB, MIB, 32 * MIB));
    assert!(!helps(513, 16 * MIB, MIB, 32 * MIB), "an expert has more than 64 tokens");
    assert!(!helps(512, 16 * MIB - 1, MIB, 32 * MIB), "too little is missing");
    assert!(!helps(512, 16 * MIB, MIB, 32 * MIB + 1), "the results take too much memory");
}

#[test]
fn important_experts_are_copied_and_the_rest_is_computed_where_it_is_done_sooner() {
    use HelperMode::{Auto, Off, On};
    const HOST: (u64, bool) = (MIB, true);
    const FILE: (u64, bool) = (MIB, false);
    type Case<'a> = (HelperMode, &'a [(u64, bool)], Costs, f64, &'a [u16], &'a [u16], f64);
    let cases: &[Case] = &[
        (Auto, &[], costs(1.0, 1.0), 0.5, &[], &[], 0.5),
        (Auto, &[HOST; 4], costs(1.0, 1.0), 0.0, &[10, 11], &[12, 13], 2.0),
        // Equal either way: a copy may be of use again.
        (Auto, &[HOST; 3], costs(1.0, 1.0), 0.0, &[10, 11], &[12], 2.0),
        (Auto, &[HOST], costs(1.0, 1.0), 0.0, &[10], &[], 1.0),
        (Auto, &[HOST; 4], costs(1.0, 3.0), 0.0, &[10, 11, 12], &[13], 3.0),
        (Auto, &[HOST; 4], costs(9.0, 1.0), 0.0, &[], &[10, 11, 12, 13], 4.0),
        (Auto, &[HOST; 4], costs(1.0, 9.0), 0.0, &[10, 11, 12, 13], &[], 4.0),
        // Copies that hide behind what the device computes anyway are free.
        (Auto, &[HOST; 4], costs(1.0, 1.0), 4.0, &[10, 11, 12, 13], &[], 4.0),
        // A read from the file occupies the link.
        (Auto, &[FILE, HOST, FILE, HOST], costs(1.0, 1.0), 0.0, &[10, 12], &[11, 13], 2.0),
        (Auto, &[(3 * MIB, true), HOST, HOST], costs(1.0, 1.0), 0.0, &[10], &[11, 12], 3.0),
        (Off, &[HOST; 3], costs(9.0, 1.0), 0.0, &[10, 11, 12], &[], 27.0),
        (On, &[HOST, FILE, HOST], costs(1.0, 9.0), 0.0, &[11], &[10, 12], 18.0),
    ];
    for (mode, sizes, costs, busy, copy, cpu, finish) in cases {
        let found = split(&misses(sizes), costs, *busy, *mode);
        let expected = Split { copy: copy.to_vec(), cpu: cpu.to_vec(), finish: *finish, probes_link: false };
        assert_eq!(found, expected, "{mode:?} {sizes:?} {costs:?} busy {busy}");
    }
}

#[test]
fn rows_beyond_four_take_the_cpu_longer_and_the_link_not() {
    let [most, second, third] =
        [(10, 16), (11, 8), (12, 4)].map(|(index, rows)| Miss { index, bytes: MIB, rows, score: 0.5, on_host: true });
    assert_eq!([most, second, third].map(|miss| miss.work()), [4 * MIB, 2 * MIB, MIB]);
    let found = split(&[most, second, third], &costs(1.0, 0.5), 0.0, HelperMode::Auto);
    // Two copies take 2 s; one copy would leave 1.5 s to the CPU, none 3.5 s.
    assert_eq!(found, Split { copy: vec![10], cpu: vec![11, 12], finish: 1.5, probes_link: false });
    assert_eq!(split(&[third; 1], &costs(1.0, 0.5), 0.0, HelperMode::Auto).cpu, [12]);
}

#[test]
fn latency_overhead_and_tail_count() {
    let misses = misses(&[(MIB, true); 2]);
    let one = costs(1.0, 1.0);
    assert!(split(&misses, &Costs { cpu_overhead: 2.0, ..one }, 0.0, HelperMode::Auto).cpu.is_empty());
    assert!(split(&misses, &Costs { link_latency: 2.0, ..one }, 0.0, HelperMode::Auto).copy.is_empty());
    assert!(split(&misses, &Costs { tail: 2.0, ..one }, 0.0, HelperMode::Auto).copy.is_empty());
    assert_eq!(split(&misses, &Costs { tail: 0.5, ..one }, 0.0, HelperMode::Auto).finish, 1.5);
}

#[test]
fn an_unknown_cost_copies_everything_until_it_was_tried_once() {
    let misses = misses(&[(MIB, true); 3]);
    let unknown_cpu = Costs { cpu: RunningMean::default(), ..costs(1.0, 1.0) };
    let unknown_link = Costs { link: RunningMean::default(), ..costs(1.0, 1.0) };
    for unknown in [unknown_cpu, unknown_link, Costs::default()] {
        assert_eq!(split(&misses, &unknown, 0.0, HelperMode::Auto).copy, [10, 11, 12]);
    }
    let mut balancer = Balancer::new(unknown_cpu, HelperMode::Auto);
    assert_eq!(balancer.split(&misses, 0.0).cpu, [12]);
    balancer.observe_cpu(MIB, 0.1);
    assert_eq!(balancer.split(&misses, 0.0).cpu, [10, 11, 12]);
    for unknown in [unknown_link, Costs::default()] {
        assert_eq!(Balancer::new(unknown, HelperMode::Auto).split(&misses[..1], 0.0).copy, [10]);
    }
    assert!(Balancer::new(unknown_cpu, HelperMode::Off).split(&misses, 0.0).cpu.is_empty());
}

#[test]
fn the_first_sample_is_taken_as_it_is_and_an_outlier_is_cut() {
    let mut mean = RunningMean::default();
    for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        mean.add(nonsense);
        assert_eq!(mean.get(), None);
        assert_eq!(RunningMean::seeded(nonsense).get(), None);
    }
    mean.add(4.0);
    assert_eq!(mean.get(), Some(4.0));
    mean.add(8.0);
    assert_eq!(mean.get(), Some(6.0));
    (0..100).for_each(|_| mean.add(1.0));
    let settled = mean.get().unwrap();
    assert!((settled - 1.0).abs() < 1e-3, "{settled}");
    mean.add(1e9);
    let after = mean.get().unwrap();
    assert!((after / settled - (1.0 + 7.0 * RunningMean::WEIGHT_MIN)).abs() < 1e-9, "{after}");
    mean.age();
    mean.add(after);
    mean.add(4.0 * after);
    assert!(mean.get().unwrap() > 1.9 * after, "old knowledge gives way");
}

#[test]
fn constants_are_taken_off_what_is_observed_but_never_all_of_it() {
    let of = |costs: Costs| Balancer::new(costs, HelperMode::Auto);
    let mut balancer = of(Costs { link_latency: 1.0, cpu_overhead: 2.0, ..Costs::default() });
    balancer.observe_copy(10, 6.0);
    balancer.observe_cpu(10, 7.0);
    assert_eq!((balancer.costs.link.get(), balancer.costs.cpu.get()), (Some(0.5), Some(0.5)));
    assert_eq!((balancer.costs.copy(2, 10), balancer.costs.cpu(10)), (Some(7.0), Some(7.0)));
    let mut balancer = of(Costs { cpu_overhead: 2.0, ..Costs::default() });
    balancer.observe_cpu(1, 1.0);
    assert_eq!(balancer.costs.cpu.get(), Some(0.125));
    balancer.observe_cpu(0, 1.0);
    balancer.observe_copy(0, 1.0);
    assert_eq!((balancer.costs.link.get(), balancer.costs.cpu.get()), (None, Some(0.125)));
}

#[test]
fn probes_become_rarer_while_they_confirm_and_stay_within_their_share() {
    let misses = misses(&[(MIB, true); 2]);
    // 2.01 s with a probe instead of 2: always affordable after a step.
    let mut balancer = Balancer::new(costs(1.0, 2.01), HelperMode::Auto);
    let mut probed = Vec::new();
    for step in 0..2000 {
        let split = balancer.split(&misses, 0.0);
        split.copy.iter().for_each(|_| balancer.observe_copy(MIB, 1.0));
        if !split.cpu.is_empty() {
            probed.push(step);
            balancer.observe_cpu(MIB, 2.01);
        }
    }
    let gaps: Vec<_> = probed.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
    assert_eq!(gaps[..6], [16, 32, 64, 128, 256, 256], "{probed:?}");
    // 40 s instead of 2: 38 lost each time, so never within 38 * 32 / 2 steps of each other.
    let mut balancer = Balancer::new(costs(1.0, 40.0), HelperMode::Auto);
    let probed: Vec<_> = (0..2000)
        .filter(|_| {
            let split = balancer.split(&misses, 0.0);
            split.copy.iter().for_each(|_| balancer.observe_copy(MIB, 1.0));
            split.cpu.iter().for_each(|_| balancer.observe_cpu(MIB, 40.0));
            !split.cpu.is_empty()
        })
        .collect();
    assert!(probed.len() == 3 && probed.windows(2).all(|pair| pair[1] - pair[0] >= 608), "{probed:?}");
}

fn any_costs() -> impl Strategy<Value = Costs> {
    let seconds = || prop_oneof![Just(0.0), 1e-7..1e-2];
    (1e-12..1e-6, seconds(), 1e-12..1e-6, seconds(), seconds()).prop_map(
        |(link, link_latency, cpu, cpu_overhead, tail)| Costs {
            link: RunningMean::seeded(link),
            link_latency,
            cpu: RunningMean::seeded(cpu),
            cpu_overhead,
            tail,
        },
    )
}

proptest! {
    #[test]
    fn no_cut_of_the_list_is_sooner_by_the_model(
        sizes in prop::collection::vec((1..64 * MIB, prop::bool::weighted(0.8)), 0..16),
        costs in any_costs(),
        busy in prop_oneof![Just(0.0), 0.0..0.1],
    ) {
        let misses = misses(&sizes);
        let n_host = misses.iter().filter(|miss| miss.on_host).count();
        let found = split(&misses, &costs, busy, HelperMode::Auto);
        for n_copied in 0..=n_host {
            prop_assert!(found.finish <= cut(&misses, n_copied, &costs, busy).finish);
        }
        prop_assert!(found.finish <= split(&misses, &costs, busy, HelperMode::Off).finish);
        prop_assert!(found.finish <= split(&misses, &costs, busy, HelperMode::On).finish);

        // Every miss once, in order; what the CPU gets is in host memory and less important than what is copied from
        // it.
        let mut all: Vec<u16> = found.copy.iter().chain(&found.cpu).copied().collect();
        all.sort_unstable();
        prop_assert!(all.iter().eq(misses.iter().map(|miss| &miss.index)));
        prop_assert!(found.copy.is_sorted() && found.cpu.is_sorted());
        let of = |index: u16| misses.iter().find(|miss| miss.index == index).unwrap();
        prop_assert!(found.cpu.iter().all(|&index| of(index).on_host));
        let least_copied = found.copy.iter().filter(|&&index| of(index).on_host).max();
        prop_assert!(least_copied.is_none_or(|least| found.cpu.iter().all(|index| index > least)));
    }
}

/// A probe says that it is one, so that it is measured: after that the link is left alone for longer and longer.
#[test]
fn probes_that_are_measured_become_rare() {
    let mut balancer = Balancer::new(costs(9.0, 1.0), HelperMode::Auto);
    let misses = misses(&[(MIB, true); 8]);
    let mut at = Vec::new();
    for step in 0..2000 {
        let split = balancer.split(&misses, 0.0);
        assert_eq!((split.copy.len(), split.cpu.len()), if split.probes_link { (1, 7) } else { (0, 8) });
        balancer.observe_cpu(split.cpu.len() as u64 * MIB, split.cpu.len() as f64);
        if split.probes_link {
            at.push(step);
            balancer.observe_copy(MIB, 9.0);
        }
    }
    // 320 probes if only each 32nd is measured.
    assert_eq!(at, [8, 25, 58, 123, 252, 509, 766, 1023, 1280, 1537, 1794]);
}
