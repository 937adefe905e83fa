//! Small models with manual reads: the order of reads, and the steps made of them.

use super::manual::{KINDS, Manual, Small, begin_split, multiply, split};
use super::*;
use crate::cache::policy::PolicyKind;
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::load::prefetch::{Governor, PrefetchOptions, PrefetchRule, Prefetcher};
use crate::predict::{self, PredictShape, PredictorKind};
use crate::route::{Phase, Thresholds};
use SliceKind::{Down, Gate, Up};

type Toy = Residency<Manual, ()>;

fn high(layer: u16, index: u16) -> Version {
    Version::high(ExpertId { layer, index })
}

/// Begins a layer of tokens that choose these experts, with equal weights.
fn begin(toy: &mut Toy, small: &Small, chosen: &mut Selection, layer: u16, tokens: &[&[u16]]) -> LayerStep {
    let n_used = tokens[0].len();
    let ids = tokens.iter().flat_map(|token| token.iter().map(|&index| i32::from(index)));
    chosen.set(&split(small, layer, n_used), ids).unwrap();
    let weights = if toy.precisions.is_exact() { Vec::new() } else { vec![1.0; tokens.len() * n_used] };
    chosen.demand(&mut toy.precisions, &weights);
    begin_split(toy, chosen, &())
}

/// Lands everything that a step waits for, and ends it.
fn finish(toy: &mut Toy, chosen: &Selection, step: LayerStep) {
    multiply(toy, &step, &KINDS);
    toy.end(step, chosen);
}

fn run(toy: &mut Toy, small: &Small, chosen: &mut Selection, layer: u16, tokens: &[&[u16]]) {
    let step = begin(toy, small, chosen, layer, tokens);
    finish(toy, chosen, step);
}

/// Waiting reads: class, expert, matrix (none for a whole slot), and whether it goes into staging.
fn waiting(toy: &Toy) -> Vec<(LoadClass, u16, Option<SliceKind>, bool)> {
    let of = |&(class, read): &(LoadClass, Read)| {
        let index = read.target.version().expert.index;
        match read.target {
            Target::Slot { slice, .. } => (class, index, Some(slice.kind), false),
            Target::Record { .. } => (class, index, None, false),
            Target::Staging { slice, .. } => (class, index, Some(slice.kind), true),
        }
    };
    toy.reads().waiting.iter().map(of).collect()
}

#[test]
fn misses_are_read_matrix_by_matrix_and_hit_the_next_time() {
    let small = Small::default();
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[5, 3]]);
    let demand = |index, kind| (LoadClass::OnDemandHigh, index, Some(kind), false);
    let order = [(5, Gate), (3, Gate), (5, Up), (3, Up), (5, Down), (3, Down)].map(|(index, kind)| demand(index, kind));
    assert_eq!(waiting(&toy), order);
    toy.reads_mut().land(1, false);
    toy.memory.poll();
    let places = |toy: &Toy| {
        step.used
            .iter()
            .map(|&used| toy.memory.locate(SliceId { version: step.version(used), kind: Gate }, used))
            .collect::<Vec<_>>()
    };
    assert_eq!(places(&toy), [Place::Pending, Place::Cached]);
    finish(&mut toy, &chosen, step);
    assert_eq!((toy.counters().hits, toy.counters().misses), (0, 2));
    run(&mut toy, &small, &mut chosen, 0, &[&[3, 5]]);
    assert_eq!((toy.counters().hits, toy.counters().misses), (2, 2));
    assert_eq!((toy.counters().slices_loaded, toy.counters().bytes_read, toy.reads().n_submitted), (6, 24000, 6));
    let stats = toy.layer_stats();
    assert_eq!((stats[0].slots, stats[0].hits, stats[0].misses, stats[1].misses), (2, 2, 2, 0));
}

#[test]
fn experts_without_a_slot_stream_through_staging_in_order_of_use() {
    let small = Small { n_staging: 2, slots: (1, None), ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[1, 2, 3]]);
    let staged = |index, kind| (LoadClass::OnDemandHigh, index, Some(kind), true);
    assert_eq!(waiting(&toy)[3..], [staged(2, Gate), staged(3, Gate)], "both slots are taken");
    toy.reads_mut().land(3, false);
    toy.memory.poll();
    assert_eq!(waiting(&toy).len(), 4, "nothing is released yet");
    toy.memory.release(SliceId { version: high(0, 2), kind: Gate });
    assert_eq!(waiting(&toy)[4], staged(2, Up));
    toy.end(step, &chosen);
    toy.memory.settle();
    run(&mut toy, &small, &mut chosen, 0, &[&[1, 2, 3]]);
    assert_eq!((toy.counters().hits, toy.counters().misses), (1, 5));
}

#[test]
fn staging_changes_its_size_between_layers() {
    let small = Small { n_expert: 10, n_staging: 2, slots: (1, None), ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let nine: [&[u16]; 3] = [&[0, 1, 2], &[3, 4, 5], &[6, 7, 8]];
    let ahead =
        |toy: &Toy| toy.memory.in_flight.staging.slices().filter(|slice| slice.version.expert.layer == 1).count();
    for (n_staging, n_ahead) in [(20, 20), (2, 2)] {
        toy.quiesce();
        toy.memory.set_staging(n_staging);
        assert_eq!((toy.memory.n_staging(), ahead(&toy)), (n_staging, 0), "what was staged is dropped");
        run(&mut toy, &small, &mut chosen, 0, &nine);
        assert_eq!(ahead(&toy), n_ahead, "the next layer is read as far as there is room");
    }
}

#[test]
fn a_layer_in_two_splits_is_decided_once() {
    let small = Small::default();
    let (mut toy, mut one, mut other) = (small.residency(), Selection::default(), Selection::default());
    let part = |toy: &mut Toy, chosen: &mut Selection, kinds: &'static [SliceKind]| {
        chosen.set(&Split { kinds, ..split(&small, 0, 2) }, [4, 6].into_iter()).unwrap();
        if !chosen.is_later_split() {
            chosen.demand(&mut toy.precisions, &[]);
        }
        let step = begin_split(toy, chosen, &());
        multiply(toy, &step, kinds);
        toy.end(step, chosen);
    };
    part(&mut toy, &mut one, &[Gate, Up]);
    assert!(!one.is_later_split());
    run(&mut toy, &small, &mut other, 0, &[&[0, 1]]);
    part(&mut toy, &mut one, &[Down]);
    assert!(one.is_later_split());
    assert_eq!((toy.counters().hits, toy.counters().misses), (0, 4), "the second split counts nothing");
    part(&mut toy, &mut one, &[Gate, Up]);
    assert!(!one.is_later_split(), "the next token");
    assert_eq!(toy.counters().hits + toy.counters().misses, 6);
}

#[test]
fn nine_tenths_of_a_layer_are_dense_and_fill_the_next_one() {
    let small = Small { n_expert: 10, slots: (3, None), n_staging: 99, ..Small::default() };
    let nine: [&[u16]; 3] = [&[0, 1, 2], &[3, 4, 5], &[6, 7, 8]];
    let eight: [&[u16]; 3] = [&[0, 1, 2], &[3, 4, 5], &[6, 7, 7]];
    let all: [&[u16]; 1] = [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]];
    for (tokens, n_slots, n_staged) in [(&nine[..], 9, 21), (&eight[..], 0, 0), (&all[..], 0, 0)] {
        let (mut toy, mut chosen) = (small.residency(), Selection::default());
        let step = begin(&mut toy, &small, &mut chosen, 0, tokens);
        let ahead = |is_staged| {
            let of = |(class, .., staged): &(_, _, _, bool)| *class == LoadClass::ReadAhead && *staged == is_staged;
            waiting(&toy).iter().filter(|read| of(read)).count()
        };
        assert_eq!((ahead(false), ahead(true)), (n_slots, n_staged), "{tokens:?}");
        finish(&mut toy, &chosen, step);
        // Reads that the next layer does not need and that have not started are withdrawn.
        let step = begin(&mut toy, &small, &mut chosen, 1, &[&[0, 9]]);
        assert!(waiting(&toy).iter().all(|(class, ..)| *class == LoadClass::OnDemandHigh), "{tokens:?}");
        finish(&mut toy, &chosen, step);
    }
}

#[test]
fn the_experts_most_tokens_expect_are_read_ahead_first() {
    let small = Small { n_expert: 10, slots: (3, None), n_staging: 99, ..Small::default() };
    let order = |expected: &[[u16; 2]]| {
        let (mut toy, mut chosen) = (small.residency(), Selection::default());
        chosen.set(&split(&small, 0, 3), 0..9).unwrap();
        chosen.demand(&mut toy.precisions, &[]);
        expected.iter().for_each(|token| chosen.expected.add(*token));
        let step = begin_split(&mut toy, &mut chosen, &());
        let gates = waiting(&toy)
            .into_iter()
            .filter(|(class, _, kind, _)| *class == LoadClass::ReadAhead && *kind == Some(Gate));
        let order: Vec<u16> = gates.map(|(_, index, ..)| index).collect();
        finish(&mut toy, &chosen, step);
        // Another layer's choice knows nothing of it.
        chosen.set(&split(&small, 1, 3), 0..9).unwrap();
        assert_eq!(chosen.expected.of(7), 0);
        order
    };
    assert_eq!(order(&[]), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(order(&[[7, 2], [7, 4], [2, 7]]), [7, 2, 4, 0, 1, 3, 5, 6, 8, 9], "three into slots, the others staged");
}

#[test]
fn the_least_popular_experts_of_a_prompt_are_read_ahead_in_low_precision() {
    let small = Small { slots: (3, Some(1)), n_staging: 99, ..Small::default() };
    let ahead = |expected: &[[u16; 2]], phase: Phase, t1: f32| {
        let (mut toy, mut chosen) = (small.residency(), Selection::default());
        (toy.precisions.options.prefill_low, toy.precisions.thresholds.t1) = (Some(0.25), t1);
        chosen.set(&Split { phase, ..split(&small, 0, 4) }, 0..8).unwrap();
        chosen.demand(&mut toy.precisions, &[0.25; 8]);
        expected.iter().for_each(|token| chosen.expected.add(*token));
        let step = begin_split(&mut toy, &mut chosen, &());
        let is_gate = |target: &Target| match target {
            Target::Slot { slice, .. } | Target::Staging { slice, .. } => slice.kind == Gate,
            Target::Record { .. } => false,
        };
        let reads = toy.reads().waiting.iter();
        let ahead = reads.filter(|(class, read)| *class == LoadClass::ReadAhead && is_gate(&read.target));
        let versions: Vec<Version> = ahead.map(|(_, read)| read.target.version()).collect();
        finish(&mut toy, &chosen, step);
        let of = |precision| {
            let own = versions.iter().filter(|version| version.precision == precision);
            own.map(|version| version.expert.index).collect::<Vec<_>>()
        };
        [of(Precision::High), of(Precision::Low)]
    };
    let known = [[7, 2], [7, 4], [2, 7]];
    assert_eq!(ahead(&known, Phase::Prompt, 1.0), [vec![7, 2, 4, 0, 1, 3], vec![5, 6]]);
    assert_eq!(ahead(&[], Phase::Prompt, 1.0), [vec![0, 1, 2, 3, 4, 5], vec![]], "the popularity is not known");
    assert_eq!(ahead(&known, Phase::Prompt, 0.6)[1], [0u16; 0], "a token's first experts stay high");
    assert_eq!(ahead(&known, Phase::Decode, 1.0)[1], [0u16; 0], "what decodes is high");
}

#[test]
fn a_prompts_uses_are_its_tokens() {
    let small = Small { n_layers: 1, policy: PolicyKind::Lfu, ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    // Two ubatches: expert 0 is used by three tokens, expert 1 by one and by one more later.
    toy.begin_batch(Phase::Prompt, 4);
    run(&mut toy, &small, &mut chosen, 0, &[&[0], &[0], &[1]]);
    run(&mut toy, &small, &mut chosen, 0, &[&[0]]);
    toy.end_batch(Phase::Prompt, 4, 0.1);
    for expert in [1, 2] {
        toy.begin_batch(Phase::Decode, 1);
        run(&mut toy, &small, &mut chosen, 0, &[&[expert]]);
        toy.end_batch(Phase::Decode, 1, 0.1);
    }
    let is_resident = [0, 1, 2].map(|index| toy.cache().is_complete(high(0, index)));
    assert_eq!(is_resident, [true, false, true], "three uses of five tokens are more than two");
}

#[test]
fn records_are_read_at_once_if_they_are_small_or_few() {
    const MIB: u64 = 1 << 20;
    for (record, few, many) in [
        (Some(2 * MIB), 2, 3),
        (Some(2 * MIB + 1), 2, 9),
        (Some(8 * MIB), 2, 9),
        (Some(8 * MIB + 1), 6, 9),
        (None, 6, 9),
    ] {
        let small = Small { record, slots: (4, None), ..Small::default() };
        let n_reads = |token: &[u16]| {
            let (mut toy, mut chosen) = (small.residency(), Selection::default());
            run(&mut toy, &small, &mut chosen, 0, &[token]);
            run(&mut toy, &small, &mut chosen, 0, &[token]);
            assert_eq!(toy.counters().hits, token.len() as u64);
            toy.reads().n_submitted
        };
        assert_eq!((n_reads(&[1, 2]), n_reads(&[1, 2, 3])), (few, many), "{record:?}");
    }
}

#[test]
fn weights_and_residents_decide_the_precision() {
    let small = Small { slots: (2, Some(2)), thresholds: Thresholds { t1: 0.5, t2: 0.75 }, ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let mut used = |toy: &mut Toy, ids: [i32; 3], weights: [f32; 3]| {
        chosen.set(&split(&small, 0, 3), ids.into_iter()).unwrap();
        chosen.demand(&mut toy.precisions, &weights);
        let step = begin_split(toy, &mut chosen, &());
        let used: Vec<_> = step.used.iter().map(|used| (used.index, used.precision)).collect();
        let skipped = step.skipped.clone();
        assert_eq!(chosen.leaves_out(&step), !skipped.is_empty());
        finish(toy, &chosen, step);
        (used, skipped)
    };
    let (hi, lo) = (Precision::High, Precision::Low);
    // Unimportance 0, 0.6, 0.9: high, low, nothing.
    assert_eq!(used(&mut toy, [0, 1, 2], [0.6, 0.3, 0.1]), (vec![(0, hi), (1, lo)], vec![2]));
    // A resident high version is used though low would do, a resident low one though nothing would.
    assert_eq!(used(&mut toy, [3, 0, 1], [0.6, 0.3, 0.1]), (vec![(3, hi), (0, hi), (1, lo)], vec![]));
    toy.precisions.forced_low.insert(ExpertId { layer: 0, index: 0 });
    assert_eq!(used(&mut toy, [0, 3, 5], [0.6, 0.3, 0.1]), (vec![(0, lo), (3, hi)], vec![5]));
    let counters = toy.counters();
    assert_eq!((counters.used.high, counters.used.low, counters.used.skipped), (4, 3, 2));
    assert_eq!((counters.hits, counters.misses), (3, 6));
}

#[test]
fn an_awaited_failure_is_reported_once() {
    let small = Small::default();
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[1, 2]]);
    toy.reads_mut().land(0, true);
    toy.reads_mut().land(0, true);
    toy.memory.poll();
    assert_eq!(toy.memory.take_failure().map(|read| read.target.version()), Some(high(0, 1)), "the first");
    assert_eq!(toy.memory.take_failure(), None);
    toy.end(step, &chosen);
    // After a failed batch nothing is under way, and nothing of it fails the next one.
    toy.memory.settle();
    assert_eq!((toy.reads().outstanding(), toy.memory.take_failure()), (0, None));
    // Complete matrices stay; those that failed are read again.
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[1, 2]]);
    assert_eq!(waiting(&toy), [1, 2].map(|index| (LoadClass::OnDemandHigh, index, Some(Gate), false)));
    finish(&mut toy, &chosen, step);
    assert_eq!((toy.counters().hits, toy.counters().misses), (0, 4));
}

#[test]
fn reads_that_find_no_room_fail_only_who_waits_for_them() {
    let small = Small { n_expert: 4, ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    toy.reads_mut().refuses = 1;
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[1, 2]]);
    assert_eq!(toy.memory.take_failure().map(|read| read.target.version()), Some(high(0, 1)));
    toy.end(step, &chosen);
    toy.memory.settle();
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[0, 1], &[2, 3]]);
    toy.reads_mut().refuses = 99;
    finish(&mut toy, &chosen, step);
    assert_eq!(toy.memory.take_failure(), None);
}

#[test]
fn one_upgrade_a_token_while_nothing_is_read() {
    let small =
        Small { n_layers: 1, slots: (2, Some(4)), thresholds: Thresholds { t1: 0.5, t2: 1.0 }, ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let mut token = |toy: &mut Toy, is_slow: bool| {
        chosen.set(&split(&small, 0, 3), [0, 1, 2].into_iter()).unwrap();
        // Experts 1 and 2 come in low precision.
        chosen.demand(&mut toy.precisions, &[0.8, 0.1, 0.1]);
        let step = begin_split(toy, &mut chosen, &());
        finish(toy, &chosen, step);
        if !is_slow {
            toy.memory.settle();
        }
        toy.end_batch(Phase::Decode, 1, 0.1);
    };
    for _ in 0..4 {
        token(&mut toy, true);
    }
    let is_upgrade = |(class, ..): &(LoadClass, u16, Option<SliceKind>, bool)| *class == LoadClass::Upgrade;
    assert_eq!(waiting(&toy).len(), 3);
    assert!(waiting(&toy).iter().all(is_upgrade), "the low version serves meanwhile");
    let upgraded = waiting(&toy)[0].1;
    assert!(
        toy.cache().is_complete(Version::low(ExpertId { layer: 0, index: upgraded })) && toy.counters().upgrades == 0
    );
    token(&mut toy, false);
    assert_eq!(toy.counters().upgrades, 0, "needed now: it is a read like any other");
}

/// A high version that the low one is a part of: only what that lacks is read, in the background and on demand.
#[test]
fn a_nested_version_is_completed_from_the_low_one() {
    let small = Small {
        n_layers: 1,
        slots: (3, Some(4)),
        thresholds: Thresholds { t1: 0.5, t2: 1.0 },
        nested: true,
        ..Small::default()
    };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let mut token = |toy: &mut Toy, experts: [i32; 3]| {
        let before = toy.counters().bytes_read;
        chosen.set(&split(&small, 0, 3), experts.into_iter()).unwrap();
        chosen.demand(&mut toy.precisions, &[0.8, 0.1, 0.1]);
        let step = begin_split(toy, &mut chosen, &());
        finish(toy, &chosen, step);
        let read = toy.counters().bytes_read - before;
        toy.memory.settle();
        toy.end_batch(Phase::Decode, 1, 0.1);
        read
    };
    assert_eq!(token(&mut toy, [0, 1, 2]), 12_000 + 2 * 3_000);
    // Expert 1 is wanted in high precision now, and there in low.
    assert_eq!(token(&mut toy, [1, 0, 2]), 9_000);
    while toy.counters().upgrades == 0 {
        assert_eq!(token(&mut toy, [0, 1, 2]), 0);
    }
    assert_eq!(toy.counters().bytes_read, 18_000 + 9_000 + 9_000, "and expert 2's, which was upgraded");
    assert!(!toy.cache().is_complete(Version::low(ExpertId { layer: 0, index: 2 })));
    // The low version has gone: all of the high one is read, and nothing is pinned for it.
    assert!(toy.cache().residents().all(|(_, slot)| !toy.cache().is_pinned(slot)));
    assert_eq!(token(&mut toy, [3, 0, 1]), 12_000);
}

#[test]
fn free_slots_are_filled_while_no_read_is_awaited() {
    let small = Small { slots: (3, None), ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    toy.fill_free_slots(true, Vec::new());
    assert!(waiting(&toy).iter().all(|(class, ..)| *class == LoadClass::Fill));
    assert_eq!(waiting(&toy).len(), 18);
    toy.begin_batch(Phase::Prompt, 5);
    assert_eq!(waiting(&toy), [], "an evaluation withdraws what has not started");
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[6, 7]]);
    finish(&mut toy, &chosen, step);
    assert_eq!(toy.finish_filling(), 6 * 12000);
    assert!(
        toy.cache().is_complete(high(0, 6))
            && toy.cache().is_complete(high(0, 0))
            && toy.cache().is_complete(high(1, 2))
    );
    run(&mut toy, &small, &mut chosen, 1, &[&[0, 1]]);
    assert_eq!((toy.counters().hits, toy.counters().misses), (2, 2));
}

#[test]
fn some_reads_for_free_slots_can_be_awaited() {
    let mut toy = Small { slots: (3, None), ..Small::default() }.residency();
    toy.fill_free_slots(true, Vec::new());
    assert!(!toy.memory.wait(), "no product waits for them");
    toy.memory.hasten_filling(5_000);
    while toy.memory.wait() {}
    assert_eq!(toy.counters().bytes_read, 2 * 12_000, "the experts that the first 5,000 bytes belong to");
}

#[test]
fn the_experts_of_an_earlier_run_take_free_slots_first() {
    let small = Small { slots: (3, None), ..Small::default() };
    let mut toy = small.residency();
    let first = vec![high(0, 7), high(1, 5), high(0, 4)];
    toy.fill_free_slots(true, first);
    let experts: Vec<u16> = waiting(&toy).iter().map(|read| read.1).step_by(KINDS.len()).collect();
    assert_eq!(experts, [7, 5, 4, 0, 0, 1]);
    // A prompt takes a slot meanwhile; the rest of the list comes before others again.
    let mut chosen = Selection::default();
    toy.begin_batch(Phase::Prompt, 1);
    run(&mut toy, &small, &mut chosen, 0, &[&[1, 2]]);
    assert_eq!(toy.finish_filling(), 6 * 12000);
    assert!(toy.cache().is_complete(high(0, 7)) && toy.cache().is_complete(high(1, 5)));
    assert!(!toy.cache().is_complete(high(0, 4)), "no slot is left for it");
}

#[test]
fn resident_experts_are_read_again() {
    let small = Small::default();
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    for token in [&[0, 1], &[1, 4]] {
        run(&mut toy, &small, &mut chosen, 0, &[token]);
        toy.end_batch(Phase::Decode, 1, 0.1);
    }
    let saved = toy.memory.save("");
    let mut again = small.residency();
    assert_eq!(again.memory.restore(&saved), 2);
    assert!(
        again.cache().is_complete(high(0, 1))
            && again.cache().is_complete(high(0, 4))
            && !again.cache().is_complete(high(0, 0))
    );
    let mut assumed = small.residency();
    assumed.memory.assume(&saved);
    assert_eq!((assumed.cache().is_complete(high(0, 4)), assumed.reads().n_submitted), (true, 0));
    let mut failing = small.residency();
    failing.reads_mut().script = vec![(0, true); 1];
    assert_eq!(
        (failing.memory.restore(&saved), failing.memory.take_failure()),
        (1, None),
        "it is read when it is needed"
    );
}

#[test]
fn shares_that_shrink_lose_residents_unless_they_are_in_use() {
    let small = Small::default();
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[1, 2]]);
    let share = toy.layout().shares(0)[0].id;
    assert!(!toy.memory.resize_share(share, 1), "both are being read");
    finish(&mut toy, &chosen, step);
    assert!(toy.memory.resize_share(share, 1));
    assert_eq!([1, 2].map(|index| toy.cache().is_complete(high(0, index))), [true, false]);
    run(&mut toy, &small, &mut chosen, 0, &[&[1, 2]]);
    assert_eq!((toy.counters().hits, toy.counters().misses), (1, 3));
}

/// HOBBIT masks predicted experts (section 3.3), however unlikely they are. What finds no slot then is staged.
#[test]
fn a_read_ahead_evicts_no_predicted_expert() {
    let small = Small::default();
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    let shape = PredictShape::new((0..2).map(|layer| (layer, small.n_expert)), |_| 3);
    let options = PrefetchOptions { rule: PrefetchRule::All, ..PrefetchOptions::default() };
    toy.lookahead = Some(Lookahead::new(
        predict::build(PredictorKind::StackedGate, shape.clone(), None, 0),
        Prefetcher::new(options, Default::default()),
        Governor::fixed(true),
        LookaheadOptions { shape, distance_max: 1, hides_waits: false },
    ));
    run(&mut toy, &small, &mut chosen, 1, &[&[0, 1]]);
    let step = begin(&mut toy, &small, &mut chosen, 0, &[&[2, 3]]);
    let scores = [0.05, 0.0, 0.0, 0.0, 0.0, 0.75, 0.2, 0.0];
    toy.predict(&step, &chosen.token_choices(), vec![vec![(1, scores.to_vec())]], None, &());
    let ahead: Vec<_> = waiting(&toy).into_iter().filter(|(class, ..)| *class == LoadClass::Prefetch).collect();
    let read = |index, kind, is_staged| (LoadClass::Prefetch, index, Some(kind), is_staged);
    let expected = [(5, false), (6, true)].map(|(index, is_staged)| KINDS.map(|kind| read(index, kind, is_staged)));
    assert_eq!(ahead, expected.concat());
    let is_resident = |index| toy.cache().lookup(high(1, index)).is_some();
    assert_eq!([0, 1, 5, 6].map(is_resident), [true, false, true, false], "0 is older than 1, but predicted");
    finish(&mut toy, &chosen, step);
}

/// A batch of tokens that each choose one expert of layer 0; `is_draft` is by token.
fn draft(toy: &mut Toy, small: &Small, chosen: &mut Selection, tokens: &[u16], is_draft: &[bool]) {
    let n_tokens = tokens.len() as u32;
    toy.begin_batch(Phase::Decode, n_tokens);
    toy.drafts.expect(is_draft);
    let tokens: Vec<[u16; 1]> = tokens.iter().map(|token| [*token]).collect();
    let tokens: Vec<&[u16]> = tokens.iter().map(<[u16; 1]>::as_slice).collect();
    run(toy, small, chosen, 0, &tokens);
    toy.end_batch(Phase::Decode, n_tokens, 0.0);
}

fn residents(toy: &Toy) -> Vec<u16> {
    let mut all: Vec<u16> = toy.cache().residents().map(|(version, _)| version.expert.index).collect();
    all.sort_unstable();
    all
}

#[test]
fn experts_of_rejected_drafts_are_evicted_first() {
    for (accepted, left) in [([false, false, false], [1, 2, 6]), ([false, true, false], [2, 3, 6])] {
        let small = Small { slots: (3, None), ..Small::default() };
        let (mut toy, mut chosen) = (small.residency(), Selection::default());
        // 1 was used before 2, and 3 after both: least recently used, 1 would leave.
        run(&mut toy, &small, &mut chosen, 0, &[&[1]]);
        draft(&mut toy, &small, &mut chosen, &[2, 3], &[false, true]);
        toy.judge_drafts(&accepted);
        assert_eq!(residents(&toy), [1, 2, 3]);
        run(&mut toy, &small, &mut chosen, 0, &[&[6]]);
        assert_eq!(residents(&toy), left, "{accepted:?}");
    }
}

#[test]
fn an_expert_that_a_token_and_a_rejected_draft_chose_stays() {
    let small = Small { slots: (2, None), ..Small::default() };
    let (mut toy, mut chosen) = (small.residency(), Selection::default());
    run(&mut toy, &small, &mut chosen, 0, &[&[1]]);
    draft(&mut toy, &small, &mut chosen, &[2, 2], &[false, true]);
    toy.judge_drafts(&[false, false]);
    run(&mut toy, &small, &mut chosen, 0, &[&[6]]);
    assert_eq!(residents(&toy), [2, 6]);
    // An expert that was there before is no worse for a rejected draft.
    draft(&mut toy, &small, &mut chosen, &[6, 2], &[false, true]);
    toy.judge_drafts(&[false, false]);
    run(&mut toy, &small, &mut chosen, 0, &[&[7]]);
    assert_eq!(residents(&toy), [6, 7], "2 was used longest ago");
}

#[test]
fn policies_see_accepted_drafts_as_tokens_of_their_own() {
    let small = Small { slots: (6, None), ..Small::default() };
    let texts: [&[u16]; 2] = [&[1, 2, 3, 1, 4], &[1, 2, 3, 1, 4]];
    let mut uses = Vec::new();
    for (tokens, is_drafted) in texts.into_iter().zip([false, true]) {
        let (mut toy, mut chosen) = (small.residency(), Selection::default());
        if is_drafted {
            // The last draft is rejected.
            draft(&mut toy, &small, &mut chosen, &[1, 2, 3, 7], &[false, true, true, true]);
            toy.judge_drafts(&[false, true, true, false]);
            draft(&mut toy, &small, &mut chosen, &[1, 4], &[false, true]);
            toy.judge_drafts(&[false, true]);
        } else {
            tokens.iter().for_each(|token| draft(&mut toy, &small, &mut chosen, &[*token], &[false]));
        }
        uses.push((1..8).map(|index| toy.cache().recent_uses(ExpertId { layer: 0, index })).collect::<Vec<_>>());
    }
    assert_eq!(uses[0], uses[1]);
    assert!(uses[0][0] > 1.5 && uses[0][6] == 0.0, "{uses:?}");
}
