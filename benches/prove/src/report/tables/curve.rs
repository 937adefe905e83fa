//! Speed against the share of experts in memory.

use super::super::figures::{bytes_per_token, decode_ts, hit_rate, in_memory, roofline_share, roofline_ts};
use super::super::group::Study;
use super::super::number::{self, UNKNOWN, bytes, digits, percent};
use super::super::read::Entry;
use super::super::table::{Table, bold};
use super::{found, found_of, limit, of_study, ratio_of};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["curve"]);
    let heading = [
        "model",
        "engine",
        "test",
        "experts in memory",
        "limit",
        "decode, t/s",
        "llama.cpp, t/s",
        "ratio",
        "hits",
        "read per token",
        "roofline, t/s",
        "of the roofline",
    ];
    let mut table = of_study(&study, "curve", "Decode speed by the share of experts in memory", &heading, 3);
    table.note =
        "llama.cpp has the same limit as hobbit in the same row. The roofline is the speed if only reading took time.";
    let mut cases: Vec<_> = study.hobbit().map(|case| (case, case.median(in_memory))).collect();
    let order = study.distinct(|case| (case.model.clone(), case.variant, case.test));
    let nth = |case: &super::Case| {
        order
            .iter()
            .position(|(model, variant, test)| (model, *variant, *test) == (&case.model, case.variant, case.test))
    };
    cases.sort_by(|(a, share_a), (b, share_b)| {
        let by_share = share_a.unwrap_or(f64::INFINITY).total_cmp(&share_b.unwrap_or(f64::INFINITY));
        nth(a).cmp(&nth(b)).then(by_share)
    });
    for (case, share) in cases {
        let baseline = study.baseline(case);
        let show =
            |figure: fn(&_) -> Option<f64>, how: fn(f64) -> String| case.median(figure).map_or(UNKNOWN.into(), how);
        table.rows.push(vec![
            case.model.clone().into(),
            case.name().into(),
            case.test.to_string().into(),
            share.map_or(UNKNOWN.into(), percent).into(),
            limit(case.limit).into(),
            bold(found(case, case.spread(decode_ts), digits)),
            found_of(baseline, decode_ts).into(),
            ratio_of(Some(case), baseline, decode_ts).map_or(UNKNOWN.into(), number::ratio).into(),
            show(hit_rate, percent).into(),
            show(bytes_per_token, bytes).into(),
            show(roofline_ts, digits).into(),
            show(roofline_share, percent).into(),
        ]);
    }
    table
}
