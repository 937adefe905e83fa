use super::*;
use proptest::prelude::*;

const SCORES: [f32; 8] = [0.30, 0.25, 0.15, 0.10, 0.08, 0.07, 0.04, 0.01];

/// Reroutes one token that uses the best `n_used` experts of [`SCORES`], by these rules and with these experts present.
fn of(rules: Rerouting, n_used: usize, present: &[u16]) -> (Vec<u16>, Vec<f32>, RerouteCounts) {
    let mut ids: Vec<u16> = (0..n_used as u16).collect();
    let sum: f32 = SCORES[..n_used].iter().sum();
    let mut weights: Vec<f32> = SCORES[..n_used].iter().map(|score| score / sum).collect();
    let choice = Choice { ids: &mut ids, weights: &mut weights, n_used, weighing: Weighing::Normalised };
    let scores = TokenScores { selection: &SCORES, weights: &SCORES };
    let outcome = reroute(&rules, choice, &[scores], &|index| present.contains(&index));
    (ids, weights, outcome)
}

fn bias(bias: f32, keep_top: usize) -> Rerouting {
    Rerouting { bias, keep_top, ..Rerouting::default() }
}

fn substitute(substitute: f32, substitute_max: Option<usize>) -> Rerouting {
    Rerouting { substitute, substitute_max, ..Rerouting::default() }
}

#[test]
fn every_rule_by_a_table() {
    let only_present = Rerouting { only_present: true, keep_top: 2, ..Rerouting::default() };
    for (rules, present, expected) in [
        // The range is 0.29: a lead of 0.029 takes 0.10 below 0.08, not below 0.07.
        (bias(0.1, 1), &[0, 1, 2, 4][..], [0, 1, 2, 4]),
        (bias(0.1, 1), &[0, 1, 2, 5], [0, 1, 2, 3]),
        (bias(0.11, 1), &[0, 1, 2, 5], [0, 1, 2, 5]),
        // The lowest missing one goes first, to the best that is present.
        (bias(0.3, 1), &[0, 1, 4, 5], [0, 1, 5, 4]),
        (bias(1.0, 1), &[4, 5, 6, 7], [0, 6, 5, 4]),
        (bias(1.0, 2), &[4, 5, 6, 7], [0, 1, 5, 4]),
        (bias(1.0, 0), &[4, 5, 6], [0, 6, 5, 4]),
        // S' is 0.08: below 0.10 (1 + 0.25) nothing gives way, above 0.06 something may stand in.
        (substitute(0.26, None), &[0, 1, 2, 5], [0, 1, 2, 5]),
        (substitute(0.24, None), &[0, 1, 2, 5], [0, 1, 2, 3]),
        (substitute(0.26, None), &[0, 1, 2, 6], [0, 1, 2, 3]),
        (substitute(0.9, None), &[0, 1, 4, 5], [0, 1, 5, 4]),
        (substitute(0.9, Some(1)), &[0, 1, 4, 5], [0, 1, 2, 4]),
        (substitute(0.9, None), &[0, 1, 2, 3, 4], [0, 1, 2, 3]),
        (only_present, &[7, 6, 5, 4], [7, 6, 5, 4]),
        // Fewer than a token uses: the best that is missing is read.
        (only_present, &[7, 6, 1], [0, 1, 7, 6]),
        (Rerouting::default(), &[], [0, 1, 2, 3]),
    ] {
        let (ids, _, outcome) = of(rules, 4, present);
        assert_eq!(ids, expected, "{rules:?} {present:?}");
        let exchanged = ids.iter().zip(0..).filter(|(id, rank)| **id != *rank).count();
        assert_eq!((outcome.uses, outcome.refused), (exchanged as u64, 0), "{rules:?} {present:?}");
    }
}

#[test]
fn weights_follow_the_scores_and_keep_their_sum() {
    let (_, weights, outcome) = of(bias(1.0, 1), 2, &[2]);
    // 0.30 and 0.15 of what was 0.30 and 0.25.
    assert!((weights[0] - 2.0 / 3.0).abs() < 1e-6 && (weights[1] - 1.0 / 3.0).abs() < 1e-6, "{weights:?}");
    assert!((outcome.given_up - 0.10 / 0.55).abs() < 1e-6);
}

#[test]
fn weights_are_normalised_only_where_the_model_does() {
    let weigh = |weighing, rules: Rerouting| {
        let (mut ids, mut weights) = ([0, 1], [0.30, 0.25]);
        let choice = Choice { ids: &mut ids, weights: &mut weights, n_used: 2, weighing };
        let scores = TokenScores { selection: &SCORES, weights: &SCORES };
        reroute(&rules, choice, &[scores], &|index| index == 0 || index == 2);
        weights
    };
    let only_present = Rerouting { only_present: true, ..Rerouting::default() };
    assert_eq!(weigh(Weighing::Each, bias(1.0, 1)), [0.30, 0.15]);
    assert_eq!(weigh(Weighing::OfAll, bias(1.0, 1)), [0.30, 0.15]);
    assert_eq!(weigh(Weighing::Each, only_present), [0.30, 0.15]);
    let [first, second] = weigh(Weighing::OfAll, only_present);
    assert!((first - 2.0 / 3.0).abs() < 1e-6 && (second - 1.0 / 3.0).abs() < 1e-6, "shares of what is not masked");
}

#[test]
fn scores_that_do_not_explain_a_choice_leave_it_alone() {
    for (selection, ids) in [
        (vec![0.1, 0.2, 0.3, 0.4], [0, 1]),
        (vec![0.4, f32::NAN, 0.2, 0.1], [0, 2]),
        (vec![0.4, 0.3], [0, 2]),
        (vec![0.4, f32::NEG_INFINITY, f32::NEG_INFINITY], [0, 1]),
        (vec![0.4, 0.4, 0.1], [0, 0]),
    ] {
        let (mut changed, mut weights) = (ids, [0.5, 0.5]);
        let choice = Choice { ids: &mut changed, weights: &mut weights, n_used: 2, weighing: Weighing::Each };
        let scores = TokenScores { selection: &selection, weights: &selection };
        let outcome = reroute(&bias(9.0, 0), choice, &[scores], &|index| index > 1);
        assert_eq!((outcome.refused, changed, weights), (1, ids, [0.5, 0.5]), "{selection:?}");
        let choice = Choice { ids: &mut changed, weights: &mut weights, n_used: 2, weighing: Weighing::Each };
        let outcome = reroute(&bias(9.0, 0), choice, &[scores], &|_| true);
        assert_eq!((outcome, changed, weights), (RerouteCounts::default(), ids, [0.5, 0.5]), "nothing is missing");
    }
}

#[test]
fn an_expert_that_another_token_needs_counts_as_present() {
    // The second token's best is 2, which the first may have for its second best; nothing else is present.
    let other = [0.02, 0.03, 0.4, 0.1, 0.1, 0.1, 0.1, 0.15];
    let (mut ids, mut weights) = ([0, 1, 2, 7], [0.5; 4]);
    let choice = Choice { ids: &mut ids, weights: &mut weights, n_used: 2, weighing: Weighing::Normalised };
    let scores = [&SCORES, &other].map(|scores| TokenScores { selection: scores, weights: scores });
    let outcome = reroute(&bias(0.9, 1), choice, &scores, &|_| false);
    assert_eq!(ids, [0, 2, 2, 0], "and 0 is what the first one uses");
    assert_eq!(outcome.uses, 2);
}

#[test]
fn groups_that_are_masked_stay_out() {
    let selection = [0.4, 0.3, f32::NEG_INFINITY, 0.1];
    let (mut ids, mut weights) = ([0, 1], [0.5, 0.5]);
    let choice = Choice { ids: &mut ids, weights: &mut weights, n_used: 2, weighing: Weighing::Each };
    let scores = TokenScores { selection: &selection, weights: &[0.4, 0.3, 0.9, 0.1] };
    reroute(&bias(9.0, 0), choice, &[scores], &|index| index == 2);
    assert_eq!(ids, [0, 1]);
}

#[test]
fn who_reads_ahead_is_told() {
    let told = |rules: Rerouting, present: &[u16]| {
        let mut scores = SCORES;
        rules.lower_missing(&mut scores, 2, &|index| present.contains(&index));
        scores
    };
    assert_eq!(told(Rerouting::default(), &[]), SCORES);
    let lambda = told(bias(0.5, 1), &[2]);
    assert_eq!((lambda[0], lambda[2]), (0.30, 0.15), "the first stays, and what is there");
    assert!((lambda[1] - 0.105).abs() < 1e-6 && lambda[3..] == [0.0; 5]);
    // S' is 0.15: above 0.2 there is 0.25.
    assert_eq!(told(substitute(0.33, None), &[3])[..5], [0.30, 0.25, 0.0, 0.10, 0.0]);
    let only_present = Rerouting { only_present: true, ..Rerouting::default() };
    assert_eq!(told(only_present, &[1])[..2], [0.0, 0.25]);
}

/// Tokens with scores of all experts, and the choice that these make.
fn tokens(n_expert: usize, n_used: usize) -> impl Strategy<Value = (Vec<Vec<f32>>, Vec<u16>, Vec<f32>)> {
    let scores = prop::collection::vec(prop::collection::vec(0.001f32..1.0, n_expert), 1..5);
    scores.prop_map(move |scores| {
        let best = |scores: &Vec<f32>| by_score(scores, 0..n_expert as u16)[..n_used].to_vec();
        let ids: Vec<u16> = scores.iter().flat_map(best).collect();
        let of_token = |(token, ids): (usize, &[u16])| {
            let raw: Vec<f32> = ids.iter().map(|&id| scores[token][usize::from(id)]).collect();
            let sum: f32 = raw.iter().sum();
            raw.into_iter().map(move |weight| weight / sum).collect::<Vec<_>>()
        };
        let weights = ids.chunks(n_used).enumerate().flat_map(of_token).collect();
        (scores, ids, weights)
    })
}

fn rules() -> impl Strategy<Value = Rerouting> {
    let strengths = (0.0f32..1.0, 0usize..3, 0.0f32..1.0, prop::option::of(0usize..3), any::<bool>(), 0u8..8);
    strengths.prop_map(|(bias, keep_top, substitute, substitute_max, only_present, on)| Rerouting {
        spares_flat: false,
        bias: if on & 1 > 0 { bias } else { 0.0 },
        keep_top,
        substitute: if on & 2 > 0 { substitute } else { 0.0 },
        substitute_max,
        only_present: on & 4 > 0 && only_present,
    })
}

proptest! {
    #[test]
    fn choices_stay_whole((scores, ids, weights) in tokens(12, 3), rules in rules(), present in 0u16..4096) {
        let is_present = |index: u16| present & (1 << index) > 0;
        let (mut new_ids, mut new_weights) = (ids.clone(), weights.clone());
        let choice =
            Choice { ids: &mut new_ids, weights: &mut new_weights, n_used: 3, weighing: Weighing::Normalised };
        let views: Vec<_> = scores.iter().map(|s| TokenScores { selection: s, weights: s }).collect();
        let outcome = reroute(&rules, choice, &views, &is_present);
        prop_assert_eq!(outcome.refused, 0);
        for (token, now) in new_ids.chunks(3).enumerate() {
            let before = &ids[token * 3..][..3];
            let order = by_score(&scores[token], before.iter().copied());
            prop_assert!((1..3).all(|rank| !now[..rank].contains(&now[rank])), "an expert twice");
            let others: Vec<u16> = [&ids, &new_ids]
                .iter()
                .flat_map(|ids| ids.chunks(3).enumerate().filter(|(other, _)| *other != token).flat_map(|(_, ids)| ids))
                .copied()
                .collect();
            for (new, old) in now.iter().zip(before).filter(|(new, old)| new != old) {
                prop_assert!(is_present(*new) || others.contains(new), "{} is not there", new);
                prop_assert!(!is_present(*old), "{} was there", old);
            }
            let n_kept = if rules.only_present { 0 } else { rules.keep_top.min(3) };
            prop_assert!(order[..n_kept].iter().all(|index| now.contains(index)), "the best stay");
            let sum = |weights: &[f32]| weights[token * 3..][..3].iter().sum::<f32>();
            prop_assert!((sum(&weights) - sum(&new_weights)).abs() < 1e-5);
        }
        if rules.is_off() || present == 4095 {
            prop_assert_eq!(&new_ids, &ids);
            let bits = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&new_weights), bits(&weights));
        }
    }

    /// λ alone, of one token: the top k of the scores with the lead added, but for the kept ones.
    #[test]
    fn a_lead_is_a_top_k((scores, ids, weights) in tokens(12, 4), lambda in 0.01f32..1.0, present in 0u16..4096) {
        let is_present = |index: u16| present & (1 << index) > 0;
        let (mut now, mut weights) = (ids[..4].to_vec(), weights[..4].to_vec());
        let choice = Choice { ids: &mut now, weights: &mut weights, n_used: 4, weighing: Weighing::Normalised };
        reroute(&bias(lambda, 1), choice, &[TokenScores { selection: &scores[0], weights: &scores[0] }], &is_present);
        let [low, high] = [f32::min, f32::max].map(|pick| scores[0].iter().copied().reduce(pick).unwrap());
        let mut led: Vec<f64> = (0..12u16)
            .map(|index| {
                let lead = f64::from(lambda * (high - low)) * f64::from(u8::from(is_present(index)));
                f64::from(scores[0][usize::from(index)]) + lead
            })
            .collect();
        let first = by_score(&scores[0], 0..12)[0];
        led[usize::from(first)] = f64::INFINITY;
        let mut order: Vec<u16> = (0..12).collect();
        order.sort_by(|a, b| led[usize::from(*b)].total_cmp(&led[usize::from(*a)]));
        let gap = led[usize::from(order[3])] - led[usize::from(order[4])];
        now.sort_unstable();
        order.truncate(4);
        order.sort_unstable();
        prop_assert!(now == order || gap < 1e-6, "{now:?} {order:?}");
    }
}
