//! A plan for people.

use std::fmt;

use hobbit::profile::PlanOutcome;
use hobbit::units::{Bytes, Percent};

use super::Report;

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { plan, curves, even_kl, learned } = self;
        writeln!(f, "layer  experts of all    KL alone: measured at so many experts")?;
        for (own, curve) in plan.layers.iter().zip(*curves) {
            let points: Vec<String> = curve.points.iter().map(|(n, kl)| format!("{n}: {kl:.2e}")).collect();
            let expected = curve.kl(own.experts);
            writeln!(f, "{:>5}  {:>7} {:>6}    {expected:.2e}; {}", own.layer, own.experts, own.of, points.join(", "))?;
        }
        if let Some(learned) = learned {
            writeln!(f, "\nlearned from configurations; rank correlation on others: {learned:.3}")?;
        }
        writeln!(f, "\n{:<10} {:>10} {:>12} {:>12} {:>12}", "", "KL", "perplexity", "slots", "a token")?;
        for (name, outcome) in [("predicted", &plan.predicted), ("measured", &plan.measured)] {
            let Some(PlanOutcome { kl, slot_bytes, token_seconds, perplexity_increase }) = outcome else { continue };
            let perplexity = perplexity_increase.map_or_else(String::new, |by| format!("{:+.2}", Percent(by)));
            let (bytes, token) = (Bytes(*slot_bytes).to_string(), format!("{:.2} ms", 1e3 * token_seconds));
            writeln!(f, "{name:<10} {kl:>10.2e} {perplexity:>12} {bytes:>12} {token:>12}")?;
        }
        writeln!(
            f,
            "equal slots in all layers: KL {even_kl:.2e} predicted\n\
             predicted: every layer keeps its most wanted experts of the whole text; measured: decoded with what was in memory, which \
             changed meanwhile"
        )
    }
}
