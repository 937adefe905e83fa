//! The targets, and how they fared.

use serde::Serialize;

use super::contestant::Contestant;
use super::runs::{Finished, Settings};
use super::total::Total;

const MIB: f64 = (1 << 20) as f64;
/// A pack must not be slower than two plain files, as far as runs of the same thing agree.
const PACK_SLOWER_MAX: f64 = 0.03;
/// What policy, prefetch and warm start must give together.
const AHEAD_MIN: f64 = 1.25;
/// What none of them may cost alone.
const SLOWER_MAX: f64 = 0.02;

/// What was promised and what came.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    pub promise: String,
    pub found: String,
    pub is_kept: bool,
}

/// Every target whose contestants took part.
pub fn verdicts(settings: &Settings, finished: &[Finished]) -> Vec<Verdict> {
    let total = |contestant| Some(Total::of(contestant, finished)).filter(|total| total.runs > 0);
    let (stock, exact) = (total(Contestant::Stock), total(Contestant::Exact));
    let (dynamic, pack) = (total(Contestant::Dynamic), total(Contestant::PackDynamic));
    let pack_exact = total(Contestant::PackExact);
    let mut verdicts = Vec::new();
    let mut verdict =
        |promise: String, found: String, is_kept: bool| verdicts.push(Verdict { promise, found, is_kept });

    if [&stock, &exact, &pack_exact].into_iter().flatten().count() > 1 {
        let (n_same, n_common) = equal_logits(finished);
        verdict("exact: equal logits".into(), format!("{n_same} of {n_common} evaluations"), n_same == n_common);
    }
    if let (Some(stock), Some(exact), Some(targets)) = (&stock, &exact, settings.targets) {
        if settings.limit.is_some() {
            let ratio = exact.decode.speed() / stock.decode.speed();
            let promise = format!("decode at least {}x llama.cpp", targets.decode_ratio);
            verdict(promise, format!("{ratio:.2}x"), ratio >= targets.decode_ratio);
        } else {
            // All tokens cost the same here; the median forgets what else the machine did.
            let overhead = exact.decode_median() / stock.decode_median() - 1.0;
            let promise = format!("decode overhead (median token) below {:.0}%", 100.0 * targets.resident_overhead);
            verdict(promise, format!("{:.1}%", 100.0 * overhead), overhead < targets.resident_overhead);
        }
        let ratio = exact.prompt.speed() / stock.prompt.speed();
        let promise = format!("prompt at least {}x llama.cpp", targets.prompt_ratio);
        // With everything resident both do the same work; the overhead allowed to decoding is allowed here too.
        let least = if settings.limit.is_some() { 1.0 } else { 1.0 / (1.0 + targets.resident_overhead) };
        verdict(promise, format!("{ratio:.3}x"), ratio >= targets.prompt_ratio * least);
    }
    let speed = |total: &Total| total.decode.speed();
    let best_dynamic = [&dynamic, &pack].into_iter().flatten().map(speed).max_by(f64::total_cmp);
    if let (Some(best), Some(exact), Some(targets)) = (best_dynamic, &exact, settings.targets) {
        let ratio = best / exact.decode.speed();
        let promise = format!("dynamic: decode at least {}x exact", targets.dynamic_ratio);
        verdict(promise, format!("{ratio:.2}x"), ratio >= targets.dynamic_ratio);
    }
    let wanted = settings.targets.and_then(|targets| targets.dynamic_stock_ratio);
    if let (Some(best), Some(stock), Some(wanted)) = (best_dynamic, &stock, wanted) {
        let ratio = best / stock.decode.speed();
        verdict(format!("dynamic: decode at least {wanted}x llama.cpp"), format!("{ratio:.2}x"), ratio >= wanted);
    }
    for (what, packed, plain) in [("exact", &pack_exact, &exact), ("dynamic", &pack, &dynamic)] {
        if let (Some(packed), Some(plain)) = (packed, plain) {
            let ratio = packed.decode.speed() / plain.decode.speed();
            let promise = format!("{what}: pack not slower than plain files (within {:.0}%)", 100.0 * PACK_SLOWER_MAX);
            verdict(promise, format!("{ratio:.2}x"), ratio >= 1.0 - PACK_SLOWER_MAX);
        }
    }
    let ahead = [Contestant::Exact, Contestant::ExactPrefetch].into_iter().filter_map(total).map(|total| speed(&total));
    if let (Some(off), Some(on)) = (total(Contestant::ExactLru), ahead.max_by(f64::total_cmp)) {
        let ratio = on / off.decode.speed();
        let promise = format!("policy and prefetch: decode at least {AHEAD_MIN}x LRU without prefetch");
        verdict(promise, format!("{ratio:.2}x"), ratio >= AHEAD_MIN);
    }
    for (off, switched) in [
        (Contestant::ExactLru, &[Contestant::ExactLruPrefetch, Contestant::ExactPrefetch, Contestant::ExactWarm][..]),
        (
            Contestant::DynamicLru,
            &[Contestant::DynamicLruPrefetch, Contestant::DynamicPrefetch, Contestant::Dynamic][..],
        ),
    ] {
        let Some(base) = total(off) else { continue };
        for (name, total) in switched.iter().filter_map(|&on| Some((on.name(), total(on)?))) {
            let ratio = total.decode.speed() / base.decode.speed();
            let promise = format!("{name}: not slower than {} (within {:.0}%)", off.name(), 100.0 * SLOWER_MAX);
            verdict(promise, format!("{ratio:.2}x"), ratio >= 1.0 - SLOWER_MAX);
        }
    }
    let share = exact.as_ref().and_then(Total::roofline_share);
    if let (Some(share), Some(targets)) = (share, settings.targets) {
        let promise = format!("decode at {:.0}% of the roofline", 100.0 * targets.roofline_share);
        verdict(promise, format!("{:.0}%", 100.0 * share), share >= targets.roofline_share);
    }
    let hobbit = Contestant::ALL.into_iter().filter(|one| one.is_hobbit()).filter_map(total);
    if let (Some(limit), Some(peak)) = (settings.limit, hobbit.map(|total| total.peak_rss_bytes).max()) {
        let found = format!("{:.0} MiB of {:.0} MiB", peak as f64 / MIB, limit as f64 / MIB);
        verdict("peak RSS within the budget".into(), found, peak <= limit);
    }
    verdicts
}

/// (equal, compared) evaluations of those that are exact: each run against the first, as far as both went.
fn equal_logits(finished: &[Finished]) -> (usize, usize) {
    let runs = finished.iter().filter_map(|finished| finished.run.as_ref());
    let mut runs = runs.filter(|run| run.contestant.is_exact());
    let Some(first) = runs.next() else { return (0, 0) };
    runs.flat_map(|run| run.logits_hash.iter().zip(&first.logits_hash))
        .fold((0, 0), |(same, all), (a, b)| (same + usize::from(a == b), all + 1))
}
