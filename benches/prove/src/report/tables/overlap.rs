//! How near reading and multiplying come to not waiting for each other: on recorded routes, and on slower disks.

use super::{Row, cell, found_of, limit, logits, of_study, ratio_of};
use crate::report::figures::{
    bytes_per_token, decode_ts, efficiency, hit_rate, in_memory, last_percentile_ms, later_decode_ts,
};
use crate::report::group::{Case, Study};
use crate::report::number::{self, UNKNOWN, bytes, percent, shown};
use crate::report::read::Entry;
use crate::report::table::{Table, bold};

/// The shape of a real model on a real model's routes.
pub fn routes(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["routes"]);
    let row = |case: &Case| {
        // With everything in memory, the later repetitions: of these nothing is cold any more.
        let mut whole =
            study.hobbit().filter(|other| other.place.limit.is_none() && other.place.model == case.place.model);
        let whole = whole.next().and_then(|whole| whole.median(later_decode_ts));
        let later = case.median(later_decode_ts);
        let baseline = study.baseline(case).filter(|other| other.variant == case.variant);
        let faster = ratio_of(Some(case), baseline, decode_ts);
        [
            cell("model", case.place.model.as_str()),
            cell("limit", limit(case.place.limit)),
            cell("variant", case.variant),
            cell("experts in memory", shown(case.median(in_memory), percent)),
            cell("decode, t/s", bold(found_of(Some(case), decode_ts))),
            cell("later repetitions, t/s", shown(later, number::digits)),
            cell("of everything in memory", shown(later.zip(whole).map(|(own, whole)| own / whole), percent)),
            cell("llama.cpp, t/s", found_of(baseline, decode_ts)),
            cell("ratio", shown(faster, number::ratio)),
            cell("99th of 100 tokens, ms", shown(case.median(last_percentile_ms), number::digits)),
            cell("hits", shown(case.median(hit_rate), percent)),
            cell("read per token", shown(case.median(bytes_per_token), bytes)),
            cell("at once", shown(case.median(efficiency), percent)),
            cell("logits with the same bits", logits(case).unwrap_or(UNKNOWN.into())),
        ]
        .concat()
    };
    Table {
        title: "A real model's routes",
        note: "Experts and weights of every token are those of a recording of the real model, on both sides. What is predicted of later \
               layers comes from it too, at a recall of 80 % where nothing else is said. \"At once\" is the time that reading \
               and multiplying would take without ever waiting for each other, as a share of what was measured.",
        n_words: 3,
        ..of_study(&study, study.hobbit().map(row))
    }
}

/// Shares of the experts in memory, disks, and looking ahead.
pub fn overlap(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["efficiency"]);
    let room = |case: &Case| case.median(in_memory).map(|share| (share * 100.0).round() as u64);
    let plain = || study.hobbit().filter(|case| case.variant == "none");
    let row = |case: &Case| {
        let is_same = |other: &&Case| other.variant != "none" && other.place == case.place && room(other) == room(case);
        let ahead = study.hobbit().find(is_same);
        let heading = |what: &str| format!("looking ahead, {what}");
        let disk = case.place.disk.map_or("as it is".into(), |speed| format!("{:.1} GB/s", speed as f64 / 1e9));
        let row: Row = [
            cell("model", case.place.model.as_str()),
            cell("experts in memory", shown(case.median(in_memory), percent)),
            cell("disk", disk),
            cell("decode, t/s", bold(found_of(Some(case), decode_ts))),
            cell("at once", shown(case.median(efficiency), percent)),
            cell("hits", shown(case.median(hit_rate), percent)),
            cell("read per token", shown(case.median(bytes_per_token), bytes)),
            cell(&heading("t/s"), found_of(ahead, decode_ts)),
            cell(&heading("ratio"), bold(shown(ratio_of(ahead, Some(case), decode_ts), number::ratio))),
            cell(&heading("at once"), shown(ahead.and_then(|ahead| ahead.median(efficiency)), percent)),
            cell(&heading("read per token"), shown(ahead.and_then(|ahead| ahead.median(bytes_per_token)), bytes)),
        ]
        .concat();
        row
    };
    Table {
        title: "Reading while multiplying",
        note: "Exact, no limit of memory but the share of the experts; slower disks are the same one behind a control group's limit. \
               \"At once\" is the time that reading and multiplying would take without ever waiting for each other, as a share of \
               what was measured. Looking ahead is `--predictor stacked-gate`.",
        n_words: 3,
        ..of_study(&study, plain().map(row))
    }
}
