//! Properties of all policies, and helpers of their tests.

pub(super) mod replay;
pub(super) mod scripts;

use super::*;
use proptest::prelude::*;
use replay::{Choice, Trace};

const SHAPE: Shape = Shape { n_layers: 4, low_cost: 0.25 };

fn make(kind: PolicyKind) -> Box<dyn Policy> {
    build(kind, &Weights::default(), SHAPE)
}

/// One layer, tokens of one expert each.
fn trace(indices: &[u16]) -> Trace {
    let choice = |&index| {
        let scores = (0..8).map(|expert| if expert == index { 0.3 } else { 0.1 }).collect();
        vec![Choice { layer: 0, scores, chosen: vec![(index, 1.0)] }]
    };
    Trace { n_expert: 8, n_layers: 1, tokens: indices.iter().map(choice).collect() }
}

#[test]
fn every_policy_keeps_what_alone_is_used() {
    for kind in PolicyKind::ALL {
        let misses = trace(&[0, 1, 2].repeat(50)).misses(make(kind), 3, true);
        assert_eq!(misses, 3, "{kind}");
    }
}

#[test]
fn a_policy_that_was_told_nothing_decides_all_the_same() {
    for kind in PolicyKind::ALL {
        let version = |index| Version::low(ExpertId { layer: 9, index });
        let candidates = [3, 1].map(|index| Candidate { version: version(index), last_use: 0 });
        let position = make(kind).victim(Version::high(version(3).expert), &candidates, Now { token: 0, layer: 0 });
        assert_eq!(position, 0, "{kind}: equal ones go in slot order");
    }
}

#[test]
fn nonsense_is_harmless() {
    for kind in PolicyKind::ALL {
        let mut policy = make(kind);
        let version = |index| Version::high(ExpertId { layer: 0, index });
        let candidates = [0, 1, 2].map(|index| Candidate { version: version(index), last_use: index.into() });
        candidates.iter().for_each(|own| policy.on_insert(own.version, Now { token: 0, layer: 0 }));
        for token in 0..40 {
            let now = Now { token, layer: 0 };
            for scores in [&[f32::NAN, f32::INFINITY, -1.0, 0.0][..], &[][..], &[0.0; 2][..]] {
                policy.on_scores(0, scores, now);
            }
            for weight in [f32::NAN, f32::INFINITY, -3.0, 0.0] {
                policy.on_use(version(1).expert, Use::by_one(true, Some(Precision::High), weight), now);
            }
            let position = policy.victim(version(9), &candidates, now);
            assert!(position < candidates.len(), "{kind}");
            policy.on_insert(candidates[position].version, now);
        }
    }
}

proptest! {
    /// MIN is optimal where all misses cost the same and slots are asked for one by one.
    #[test]
    fn no_policy_beats_belady(indices in prop::collection::vec(0u16..8, 0..200), n_slots in 1u32..7) {
        let trace = trace(&indices);
        let least = trace.misses(Box::new(Belady::new(trace.future(), 1.0)), n_slots, true);
        for kind in PolicyKind::ALL {
            for with_scores in [false, true] {
                let misses = trace.misses(make(kind), n_slots, with_scores);
                prop_assert!(misses >= least, "{} misses {}, Belady {}", kind, misses, least);
            }
        }
    }
}
