//! `hobbit-sim calibrate`: HOBBIT's weights and thresholds, and what each layer's misses cost, from traces.

use std::io::{self, IsTerminal, Write};

use anyhow::Result;

use super::args::FitArgs;
use crate::output::write_whole;
use hobbit_core::files::Kind;
use hobbit_core::route::Thresholds;
use hobbit_core::sim::{FitGoal, fit};
use hobbit_core::tuned::{LayerPenalty, TunedPolicy};

pub fn run(args: &FitArgs, out: &mut dyn Write) -> Result<()> {
    let thresholds = match (args.t1, args.t2) {
        (Some(t1), Some(t2)) => Some(Thresholds::new(t1, t2)?),
        _ => None,
    };
    super::check_output(&args.output, Kind::Json, &args.files)?;
    let recordings: Vec<_> = args.files.iter().map(|file| super::open(file, args.low_bytes)).collect::<Result<_>>()?;
    let goal = FitGoal {
        policy: args.policy,
        budget: args.budget,
        slots: args.slots,
        low_percent: args.low_share,
        shares: args.shares,
        thresholds,
    };
    let shows = io::stderr().is_terminal();
    let fitted = fit(&recordings, &goal, &mut |n| {
        if shows {
            let _ = write!(io::stderr(), "\r{n} replays");
        }
        true
    });
    if shows {
        let _ = write!(io::stderr(), "\r                    \r");
    }
    let fitted = fitted?;
    write_whole(&args.output, fitted.to_json())?;
    let [lru, lfu, lhu, fld] = fitted.weights;
    writeln!(out, "{}: weights lru {lru}, lfu {lfu}, lhu {lhu}, fld {fld}", fitted.policy)?;
    if let (Some(t1), Some(t2)) = (fitted.t1, fitted.t2) {
        writeln!(out, "thresholds: T1 {t1:.3}, T2 {t2:.3}")?;
    }
    writeln!(
        out,
        "penalty per token: {:.3}, {:.3} under LRU ({} tokens, {} replays)",
        fitted.penalty, fitted.penalty_lru, fitted.tuned_on.tokens, fitted.replays
    )?;
    writeln!(out, "penalty by layer with half of its experts: {}", by_layer(&fitted))?;
    writeln!(out, "written to {}: for --profile", args.output.display())?;
    Ok(())
}

/// Penalty per token of each layer, were half of it in memory: who gets more slots than others by it.
fn by_layer(fitted: &TunedPolicy) -> String {
    let half = |layer: &LayerPenalty| layer.at(f64::from(layer.n_expert) / 2.0);
    let words = fitted.layers.iter().filter_map(half).map(|penalty| format!("{penalty:.3}"));
    words.collect::<Vec<_>>().join(" ")
}
