//! A layer of eight experts with four slots, two of them used by a token; reads land by a script.

use super::super::manual::{KINDS, Manual, Small, begin_split, multiply, split};
use super::super::{Residency, Selection, Split};
use super::*;
use crate::predict::RouterScores;
use crate::route::{Rerouting, Weighing};

type Toy = Residency<Manual, ()>;

const LAYER: u16 = 0;
const N_USED: usize = 2;

fn small(slots: u32) -> Small {
    Small { n_layers: 1, slots: (slots, None), ..Small::default() }
}

fn toy(small: Small, period: u32) -> Toy {
    let mut toy = small.residency();
    let update = VirtualUpdate::Tokens(period);
    toy.rerouting = Rerouting { only_present: true, ..Rerouting::default() };
    toy.keep_virtual_experts(VirtualExpertsOptions { n_used: N_USED, update, ..Default::default() });
    toy
}

fn is_present(toy: &Toy, index: u16) -> bool {
    toy.is_present(ExpertId { layer: LAYER, index }, &())
}

/// Evaluates tokens whose router wants these experts, and has the others only where they are present. How many reads
/// products waited for.
fn evaluate(toy: &mut Toy, small: &Small, tokens: &[[u16; N_USED]]) -> usize {
    let (n_tokens, mut chosen) = (tokens.len() as u32, Selection::default());
    let phase = Phase::of(tokens.len(), tokens.len() < 9);
    toy.begin_batch(phase, n_tokens);
    let ids = tokens.iter().flatten().map(|&index| i32::from(index));
    chosen.set(&Split { phase, ..split(small, LAYER, N_USED) }, ids).unwrap();
    if phase.is_decode() {
        let scores =
            |token: &[u16; N_USED]| (0..8).map(|index| if token.contains(&index) { 0.4 } else { 0.03 }).collect();
        let scores: Vec<RouterScores> = tokens
            .iter()
            .map(scores)
            .map(|scores: Vec<f32>| RouterScores { selection: scores.clone(), weights: scores })
            .collect();
        let weights = vec![0.5; N_USED * tokens.len()];
        toy.reroute(&mut chosen, &weights, (&scores, Weighing::Normalised), &());
    }
    chosen.demand(&mut toy.precisions, &[]);
    let step = begin_split(toy, &mut chosen, &());
    let is_demanded = |class: &LoadClass| !class.is_background();
    let waited = toy.reads().waiting.iter().filter(|(class, _)| is_demanded(class)).count();
    multiply(toy, &step, &KINDS);
    toy.end(step, &chosen);
    toy.end_batch(phase, n_tokens, 0.01);
    waited
}

/// A prompt of nine tokens: too many to be sent elsewhere.
fn prompt(toy: &mut Toy, small: &Small, experts: [u16; N_USED]) {
    evaluate(toy, small, &[experts; 9]);
}

fn present(toy: &Toy) -> Vec<u16> {
    (0..8).filter(|&index| is_present(toy, index)).collect()
}

fn reading(toy: &Toy) -> Vec<u16> {
    let mut experts: Vec<u16> =
        toy.reads().waiting.iter().map(|(_, read)| read.target.version().expert.index).collect();
    experts.dedup();
    experts
}

/// Lands all that is read.
fn land(toy: &mut Toy, fails: bool) {
    while !toy.reads().waiting.is_empty() {
        toy.reads_mut().land(0, fails);
    }
}

/// A layer whose four slots hold 0 to 3; 0 and 1 are wanted most.
fn filled(period: u32) -> (Toy, Small) {
    let small = small(4);
    let mut toy = toy(small, period);
    prompt(&mut toy, &small, [2, 3]);
    prompt(&mut toy, &small, [0, 1]);
    prompt(&mut toy, &small, [0, 1]);
    assert_eq!(present(&toy), [0, 1, 2, 3]);
    (toy, small)
}

#[test]
fn who_is_wanted_comes_in_the_background_and_who_is_not_leaves() {
    let (mut toy, small) = filled(1);
    // 6 is wanted less than every resident expert: nothing changes. Later it is worth more than 3, then more than 2.
    let mut reads = Vec::new();
    for token in 0..40 {
        assert_eq!(evaluate(&mut toy, &small, &[[0, 6]]), 0, "token {token} waited");
        if !reading(&toy).is_empty() {
            reads.push((token, reading(&toy)));
            assert!(!is_present(&toy, 6));
            break;
        }
    }
    assert_eq!(reads.len(), 1);
    assert_eq!(reads[0].1, [6]);
    // 3 has left to make a spare slot; 6 is no candidate however long its read takes.
    assert_eq!(present(&toy), [0, 1, 2]);
    for _ in 0..5 {
        assert_eq!(evaluate(&mut toy, &small, &[[0, 6]]), 0);
        assert_eq!((present(&toy), reading(&toy)), (vec![0, 1, 2], vec![6]));
    }
    // It lands while a token is computed: from the next one on it is present, and 2 has given the spare slot back.
    land(&mut toy, false);
    toy.memory.poll();
    assert_eq!(present(&toy), [0, 1, 2]);
    assert_eq!(evaluate(&mut toy, &small, &[[0, 6]]), 0);
    assert_eq!(present(&toy), [0, 1, 6]);
    let report = toy.virtual_experts.as_ref().unwrap().report();
    assert_eq!((report.replacements, report.failed, report.period_tokens), (1, 0, 1));
}

#[test]
fn a_failed_read_keeps_the_old_expert() {
    let (mut toy, small) = filled(1);
    while reading(&toy).is_empty() {
        evaluate(&mut toy, &small, &[[0, 6]]);
    }
    land(&mut toy, true);
    assert_eq!(evaluate(&mut toy, &small, &[[0, 1]]), 0);
    assert_eq!(present(&toy), [0, 1, 2]);
    let report = toy.virtual_experts.as_ref().unwrap().report();
    assert_eq!((report.replacements, report.failed), (0, 1));
    assert!(toy.memory.take_failure().is_none(), "no token waited for it");
    // It is tried again when it is wanted enough again.
    for _ in 0..200 {
        evaluate(&mut toy, &small, &[[0, 6]]);
        if !reading(&toy).is_empty() {
            break;
        }
    }
    assert_eq!(reading(&toy), [6]);
}

#[test]
fn a_full_queue_changes_nothing() {
    let (mut toy, small) = filled(1);
    toy.reads_mut().refuses = usize::MAX;
    for _ in 0..40 {
        assert_eq!(evaluate(&mut toy, &small, &[[0, 6]]), 0);
    }
    assert_eq!(present(&toy), [0, 1, 2]);
    let report = toy.virtual_experts.as_ref().unwrap().report();
    assert_eq!((report.replacements, report.failed), (0, 0));
}

#[test]
fn a_layer_has_its_turn_once_in_a_period() {
    let (mut toy, small) = filled(16);
    let mut begun = Vec::new();
    for token in 0..200u32 {
        // Others are wanted all the time.
        let wanted = [4 + (token / 20 % 4) as u16, 4 + ((token / 20 + 1) % 4) as u16];
        assert_eq!(evaluate(&mut toy, &small, &[wanted]), 0);
        if !reading(&toy).is_empty() {
            begun.push(token);
            land(&mut toy, false);
        }
    }
    assert!(begun.len() > 5, "{begun:?}");
    assert!(begun.windows(2).all(|two| two[1] - two[0] >= 16), "{begun:?}");
}

#[test]
fn layers_take_turns() {
    let small = Small { n_layers: 4, ..small(4) };
    let toy = toy(small, 16);
    let next: Vec<u64> = toy.virtual_experts.as_ref().unwrap().lanes.iter().map(|lane| lane.next).collect();
    assert_eq!(next, [0, 4, 8, 12]);
}

#[test]
fn nothing_is_read_where_every_expert_is_there() {
    let small = small(8);
    let mut toy = toy(small, 1);
    for first in [0, 2, 4] {
        prompt(&mut toy, &small, [first, first + 1]);
    }
    // Missing experts are read, and not masked.
    assert_eq!(evaluate(&mut toy, &small, &[[6, 7]]), 2 * KINDS.len());
    for token in 0..50u16 {
        assert_eq!(evaluate(&mut toy, &small, &[[token % 8, (token + 3) % 8]]), 0);
        assert_eq!(toy.reads().waiting.len(), 0);
    }
    assert_eq!(present(&toy), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn no_layer_is_left_with_fewer_than_a_token_uses() {
    let small = small(2);
    let mut toy = toy(small, 1);
    prompt(&mut toy, &small, [0, 1]);
    for _ in 0..50 {
        assert_eq!(evaluate(&mut toy, &small, &[[4, 5]]), 0);
        assert_eq!((present(&toy), reading(&toy)), (vec![0, 1], vec![]));
    }
}

#[test]
fn empty_slots_are_filled_without_taking_turns() {
    let small = small(5);
    let mut toy = toy(small, 1000);
    // The first token has nothing: it waits for what it wants.
    assert_eq!(evaluate(&mut toy, &small, &[[0, 1]]), 2 * KINDS.len());
    let mut filled = Vec::new();
    for wanted in [[2, 3], [2, 3], [2, 3]] {
        assert_eq!(evaluate(&mut toy, &small, &[wanted]), 0);
        filled.extend(reading(&toy));
        land(&mut toy, false);
    }
    // One is left to spare.
    assert_eq!(filled, [2, 3]);
    assert_eq!(present(&toy), [0, 1, 2, 3]);
}

#[test]
fn a_prompt_takes_back_what_has_not_begun_and_uses_what_has() {
    let (mut toy, small) = filled(1);
    while reading(&toy).is_empty() {
        evaluate(&mut toy, &small, &[[0, 6]]);
    }
    prompt(&mut toy, &small, [6, 7]);
    assert!(toy.virtual_experts.as_ref().unwrap().underway.is_empty());
    assert!(reading(&toy).is_empty() && is_present(&toy, 6) && is_present(&toy, 7));
    assert_eq!(toy.reads().n_answered, toy.reads().n_submitted);
}

#[test]
fn in_repeatable_runs_the_speed_of_reads_decides_nothing() {
    let run = |lands_early: bool| {
        let small = Small { deterministic: true, ..small(4) };
        let mut toy = toy(small, 4);
        prompt(&mut toy, &small, [0, 1]);
        let mut seen = Vec::new();
        for token in 0..60u16 {
            evaluate(&mut toy, &small, &[[token / 8 % 8, (token / 8 + 1) % 8]]);
            if lands_early {
                land(&mut toy, false);
                toy.memory.poll();
            }
            seen.push(present(&toy));
        }
        seen
    };
    assert_eq!(run(false), run(true));
    assert!(run(true).windows(2).any(|two| two[0] != two[1]));
}
