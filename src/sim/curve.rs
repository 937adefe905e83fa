//! `hobbit-sim curve`: how often experts are found, by the share of a layer's experts that have slots.

use std::io::Write;

use anyhow::Result;

use super::args::CurveArgs;
use super::table;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::forecast::{Locality, SHARES};
use hobbit_core::sim::Eviction;
use hobbit_core::units::Percent;

pub fn run(args: &CurveArgs, out: &mut dyn Write) -> Result<()> {
    let policies = [Eviction::Policy(PolicyKind::Lru), Eviction::Policy(PolicyKind::default()), Eviction::Belady];
    let mut all = Vec::new();
    for (file, n_before) in args.files.iter().zip(0..) {
        let recording = super::open(file, None)?;
        let curves = policies.map(|policy| Locality::of(&recording, policy));
        let [lru, own, optimum] = curves;
        let curves = [lru?, own?, optimum?];
        let points = SHARES.map(|share| (share, curves.each_ref().map(|curve| curve.hit(share))));
        if args.json {
            let point = |(share, hits): &(f64, [f64; 3])| {
                let named = policies.iter().zip(hits).map(|(policy, hit)| (policy.to_string(), (*hit).into()));
                let mut row: serde_json::Map<String, serde_json::Value> = named.collect();
                row.insert("share".to_owned(), (*share).into());
                row
            };
            all.push(serde_json::json!({ "file": file, "points": points.iter().map(point).collect::<Vec<_>>() }));
            continue;
        }
        let gap = if n_before > 0 { "\n" } else { "" };
        let heading: Vec<String> = std::iter::once("slots".to_owned()).chain(policies.map(|p| p.to_string())).collect();
        let rows = points.iter().map(|(share, hits)| {
            let cells = std::iter::once(format!("{:.0}", Percent(*share)));
            cells.chain(hits.iter().map(|hit| format!("{hit:.4}"))).collect()
        });
        let heading: Vec<&str> = heading.iter().map(String::as_str).collect();
        write!(out, "{gap}{}\n{}", super::replay::about(&recording), table(&heading, &rows.collect::<Vec<_>>(), 1))?;
    }
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}
