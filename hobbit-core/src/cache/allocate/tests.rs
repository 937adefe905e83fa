//! Literal tables, and what holds for all of them.

use super::*;
use proptest::prelude::*;

/// Slots that each layer needs, from the shallowest on.
fn in_need(members: &[u32], needs: u32) -> Vec<LayerDemand> {
    let layer = |(depth, &members)| LayerDemand { depth, members, needs };
    (0..).zip(members).map(layer).collect()
}

fn members(members: &[u32]) -> Vec<LayerDemand> {
    in_need(members, 0)
}

#[test]
fn even_is_even() {
    assert_eq!(allocate(Allocation::Even, 10, &members(&[8, 8, 8])), [4, 3, 3]);
    assert_eq!(allocate(Allocation::Even, 10, &members(&[2, 8, 8])), [2, 4, 4]);
    assert_eq!(allocate(Allocation::Even, 99, &members(&[0, 8])), [0, 8]);
    assert!(allocate(Allocation::Even, 9, &[]).is_empty());
}

#[test]
fn shallow_layers_are_filled_first() {
    let shares = |layers, n_slots| allocate(Allocation::ShallowFirst { layers }, n_slots, &members(&[8, 8, 8, 8]));
    assert_eq!(shares(2, 21), [8, 8, 3, 2]);
    assert_eq!(shares(2, 11), [8, 3, 0, 0]);
    assert_eq!(shares(0, 6), [2, 2, 1, 1]);
    assert_eq!(shares(9, 17), [8, 8, 1, 0]);
    assert_eq!(shares(1, 99), [8, 8, 8, 8]);
    // Depth counts layers of the whole model.
    let demands = &in_need(&[8; 5], 0)[2..];
    assert_eq!(allocate(Allocation::ShallowFirst { layers: 3 }, 12, demands), [8, 2, 2]);
    assert_eq!(allocate(Allocation::ShallowFirst { layers: 2 }, 12, demands), [4, 4, 4]);
}

#[test]
fn every_layer_gets_what_a_token_uses_first() {
    let shares = |n_slots| allocate(Allocation::Even, n_slots, &in_need(&[8, 8, 8, 1], 2));
    assert_eq!([5, 7, 9, 20].map(shares), [[2, 1, 1, 1], [2, 2, 2, 1], [3, 3, 2, 1], [7, 6, 6, 1]]);
}

#[test]
fn shallow_layers_are_whole_before_others_have_what_a_token_uses() {
    let shares = |n_slots| allocate(Allocation::ShallowFirst { layers: 2 }, n_slots, &in_need(&[8; 4], 2));
    assert_eq!([7, 15, 16, 19].map(shares), [[7, 0, 0, 0], [8, 7, 0, 0], [8, 8, 0, 0], [8, 8, 2, 1]]);
}

#[test]
fn words_round_trip() {
    for kind in [Allocation::Even, Allocation::ShallowFirst { layers: 7 }] {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    assert_eq!("shallow-first".parse(), Ok(Allocation::ShallowFirst { layers: 4 }));
    for word in ["", "shallow", "shallow-first:", "shallow-first:x", "even:2"] {
        let error = word.parse::<Allocation>().unwrap_err().to_string();
        let expected = "(expected one of: even, shallow-first, shallow-first:LAYERS)";
        assert_eq!(error, format!("unknown slot allocation '{word}' {expected}"));
    }
}

fn demands() -> impl Strategy<Value = Vec<LayerDemand>> {
    let demand = |(depth, members, needs)| LayerDemand { depth, members, needs };
    prop::collection::vec((0u16..9, 0u32..12, 0u32..6).prop_map(demand), 0..7)
}

proptest! {
    #[test]
    fn every_slot_that_can_be_used_is(demands in demands(), n_slots in 0u32..90, layers in 0u16..9) {
        for kind in [Allocation::Even, Allocation::ShallowFirst { layers }] {
            let shares = allocate(kind, n_slots, &demands);
            prop_assert!(shares.iter().zip(&demands).all(|(share, demand)| *share <= demand.members));
            let usable: u32 = demands.iter().map(|demand| demand.members).sum();
            prop_assert_eq!(shares.iter().sum::<u32>(), usable.min(n_slots));
            let needs: Vec<u32> = demands.iter().map(|demand| demand.needs.min(demand.members)).collect();
            if kind == Allocation::Even && needs.iter().sum::<u32>() <= n_slots {
                prop_assert!(shares.iter().zip(&needs).all(|(share, needs)| share >= needs), "{:?}", shares);
            }
            let members: Vec<u32> = demands.iter().map(|demand| demand.members).collect();
            let equal = even(n_slots, &members);
            if kind == Allocation::Even && equal.iter().zip(&needs).all(|(share, needs)| share >= needs) {
                prop_assert_eq!(shares, equal, "what is there already changes nothing");
            }
        }
    }
}
