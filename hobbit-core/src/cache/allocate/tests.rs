//! Literal tables, and what holds for all of them.

use super::*;
use proptest::prelude::*;

fn demand(members: u32, penalty: f64, hits: &[f64]) -> LayerDemand {
    LayerDemand { members, penalty, hits: hits.to_vec(), ..LayerDemand::default() }
}

/// From the shallowest on, each in need of so many.
fn in_need(members: &[u32], needs: u32) -> Vec<LayerDemand> {
    let layer = |(depth, &members)| LayerDemand { depth, needs, ..demand(members, 1.0, &[]) };
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
    let shares = |kind, n_slots| allocate(kind, n_slots, &in_need(&[8, 8, 8, 1], 2));
    let shallow = Allocation::ShallowFirst { layers: 1 };
    assert_eq!([5, 7, 9, 20].map(|n| shares(shallow, n)), [[2, 1, 1, 1], [2, 2, 2, 1], [4, 2, 2, 1], [8, 6, 5, 1]]);
    let mut demands = in_need(&[8, 8, 8, 1], 2);
    demands[2].penalty = 100.0;
    let penal = |n_slots| allocate(Allocation::ByPenalty, n_slots, &demands);
    assert_eq!([5, 7, 9, 20].map(penal), [[2, 1, 1, 1], [2, 2, 2, 1], [2, 2, 4, 1], [6, 5, 8, 1]]);
}

/// A gain that only several slots bring is spread over them, but not over those that a token needs anyway.
#[test]
fn gains_are_spread_over_the_slots_beyond_a_tokens_needs() {
    let cycle = demand(4, 1.0, &[0.0, 0.0, 0.0, 0.9]); // LRU on a cycle of three
    let tenths = |share| marginal_gains(&cycle, share).iter().map(|gain| (gain * 10.0).round()).collect::<Vec<_>>();
    assert_eq!([tenths(0), tenths(2)], [vec![3.0, 3.0, 3.0, 0.0], vec![9.0, 0.0]]);
    let steady = demand(4, 1.0, &[0.0, 0.2, 0.4, 0.6]);
    assert_eq!(allocate(Allocation::ByPenalty, 3, &[steady, cycle.clone()]), [0, 3]);
    let cycle = LayerDemand { needs: 2, ..cycle };
    let other = LayerDemand { needs: 2, ..demand(4, 1.6, &[0.0, 0.25, 0.5, 0.75, 1.0]) };
    assert_eq!(allocate(Allocation::ByPenalty, 5, &[other.clone(), cycle.clone()]), [2, 3]);
    assert_eq!(allocate(Allocation::ByPenalty, 5, &[cycle, other]), [3, 2]);
}

#[test]
fn slots_go_where_they_save_most() {
    let steep = [0.0, 0.6, 0.8, 0.9];
    let flat = [0.0, 0.1, 0.2, 0.3];
    let shares = |n_slots, penalty| {
        allocate(Allocation::ByPenalty, n_slots, &[demand(3, 1.0, &steep), demand(3, penalty, &flat)])
    };
    // Gains: 0.6, 0.2, 0.1 against 0.1 each, and three times that.
    assert_eq!([1, 2, 3, 4, 5].map(|n_slots| shares(n_slots, 1.0)), [[1, 0], [2, 0], [2, 1], [2, 2], [3, 2]]);
    assert_eq!([1, 2, 3, 4, 5].map(|n_slots| shares(n_slots, 3.0)), [[1, 0], [1, 1], [1, 2], [1, 3], [2, 3]]);
    assert_eq!(shares(99, 1.0), [3, 3]);
}

#[test]
fn without_a_measured_curve_penalties_alone_decide_and_none_starves() {
    let shares =
        |penalties: [f64; 3]| allocate(Allocation::ByPenalty, 12, &penalties.map(|penalty| demand(8, penalty, &[])));
    assert_eq!(shares([1.0; 3]), [4, 4, 4]);
    assert_eq!(shares([2.0, 1.0, 1.0]), [6, 3, 3]);
    assert_eq!(shares([0.0; 3]), [4, 4, 4]);
    assert_eq!(shares([f64::NAN, -1.0, 0.0]), [4, 4, 4], "nonsense counts for nothing");
}

#[test]
fn words_round_trip() {
    for kind in [Allocation::Even, Allocation::ShallowFirst { layers: 7 }, Allocation::ByPenalty] {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    assert_eq!("shallow-first".parse(), Ok(Allocation::ShallowFirst { layers: 4 }));
    for word in ["", "shallow", "shallow-first:", "shallow-first:x", "even:2"] {
        let error = word.parse::<Allocation>().unwrap_err().to_string();
        let expected = "(expected one of: even, shallow-first, shallow-first:LAYERS, by-penalty)";
        assert_eq!(error, format!("unknown slot allocation '{word}' {expected}"));
    }
}

fn demands() -> impl Strategy<Value = Vec<LayerDemand>> {
    let layer = (0u16..9, 0u32..12, 0u32..6, -1.0f64..5.0, prop::collection::vec(0.0f64..1.0, 0..14));
    let demand = |(depth, members, needs, penalty, hits)| LayerDemand { depth, members, needs, penalty, hits };
    prop::collection::vec(layer.prop_map(demand), 0..7)
}

proptest! {
    #[test]
    fn every_slot_that_can_be_used_is(demands in demands(), n_slots in 0u32..90, layers in 0u16..9) {
        for kind in [Allocation::Even, Allocation::ShallowFirst { layers }, Allocation::ByPenalty] {
            let shares = allocate(kind, n_slots, &demands);
            prop_assert!(shares.iter().zip(&demands).all(|(share, demand)| *share <= demand.members));
            let usable: u32 = demands.iter().map(|demand| demand.members).sum();
            prop_assert_eq!(shares.iter().sum::<u32>(), usable.min(n_slots));
            let needs: Vec<u32> = demands.iter().map(|demand| demand.needs.min(demand.members)).collect();
            if needs.iter().sum::<u32>() <= n_slots {
                prop_assert!(shares.iter().zip(&needs).all(|(share, needs)| share >= needs), "{:?}", shares);
            }
            let members: Vec<u32> = demands.iter().map(|demand| demand.members).collect();
            let equal = even(n_slots, &members);
            if kind == Allocation::Even && equal.iter().zip(&needs).all(|(share, needs)| share >= needs) {
                prop_assert_eq!(shares, equal, "what is there already changes nothing");
            }
        }
    }

    /// Against every division of the slots between two layers with concave curves.
    #[test]
    fn greedy_saves_the_most(
        curves in prop::array::uniform2(prop::collection::vec(0.0f64..1.0, 6)),
        n_slots in 0u32..12,
    ) {
        let demands = curves.map(|mut gains| {
            gains.sort_by(|a, b| b.total_cmp(a));
            let sums = gains.iter().scan(0.0, |sum, gain| { *sum += gain; Some(*sum) });
            demand(6, 1.0, &std::iter::once(0.0).chain(sums).collect::<Vec<_>>())
        });
        let saved = |shares: [u32; 2]| demands[0].hits[shares[0] as usize] + demands[1].hits[shares[1] as usize];
        let chosen = allocate(Allocation::ByPenalty, n_slots, &demands);
        let best = (0..=n_slots.min(6)).map(|first| [first, (n_slots - first).min(6)]).map(saved).fold(0.0, f64::max);
        prop_assert!(saved([chosen[0], chosen[1]]) >= best - 1e-9);
    }
}
