//! A profile for people.

use std::fmt;

use hobbit_common::advice::spelled;
use hobbit_core::pack::slice_name;
use hobbit_core::profile::{Bounded, ChosenThresholds, Mixes, Profile, SliceTypes, Width, in_percent};
use hobbit_core::units::{Bytes, Percent};

/// Experts shown at either end.
const SHOWN: usize = 5;

/// Displays as tables.
pub struct Table<'a>(pub &'a Profile);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Profile { model, text, thresholds, mixes, widths, .. } = self.0;
        writeln!(
            f,
            "{}: {}, {} experts in {} layers, {} used per token and layer",
            model.file, model.architecture, model.n_experts, model.n_layers, model.n_expert_used
        )?;
        writeln!(
            f,
            "{}: {} tokens in pieces of {}, perplexity {:.4}",
            text.file, text.tokens, text.context, text.perplexity
        )?;
        if let Some(tuned) = thresholds {
            show_thresholds(f, tuned)?;
        }
        mixes.iter().try_for_each(|mixes| show_mixes(f, mixes))?;
        widths.iter().try_for_each(|width| show_width(f, width))?;
        self.0.bounded.iter().try_for_each(|bounded| {
            let Bounded { max_loss, lowered, perplexity_increase, runs } = bounded;
            let (max, increase) = (in_percent(*max_loss), Percent(*perplexity_increase));
            let runs: Vec<String> = runs.iter().map(|(n, loss)| format!("{n}: {:+.2}", Percent(*loss))).collect();
            let runs = runs.join(", ");
            writeln!(
                f,
                "\npack --bounds --max-loss {max}%: {lowered} experts lowered, perplexity {increase:+.2} ({runs})"
            )
        })
    }
}

fn show_thresholds(f: &mut fmt::Formatter<'_>, tuned: &ChosenThresholds) -> fmt::Result {
    let [high, low, skip] = [tuned.shares.high, tuned.shares.low, tuned.shares.skip].map(|share| 100.0 * share);
    writeln!(f, "\nthresholds for {}: --t1 {:.4} --t2 {:.4}", tuned.goal, tuned.t1, tuned.t2)?;
    writeln!(f, "of all uses, if none were in memory: {high:.1} % high, {low:.1} % low, {skip:.1} % skipped")
}

fn show_mixes(f: &mut fmt::Formatter<'_>, mixes: &Mixes) -> fmt::Result {
    let Mixes { text, tokens, expert_cache, exact_bytes_per_token, .. } = mixes;
    writeln!(
        f,
        "\nmixes, judged on {tokens} tokens held out of {text} with --expert-cache {expert_cache}; exact reads {} per \
            token",
        Bytes(*exact_bytes_per_token as u64)
    )?;
    writeln!(f, "{:>12}{:>8}  {:<22}flags", "per token", "", "perplexity")?;
    for own in &mixes.mixes {
        let share = own.bytes_per_token / exact_bytes_per_token.max(1.0);
        let loss = format!("{:+.2} +- {:.2}", Percent(own.loss), Percent(own.error));
        let (bytes, words) = (Bytes(own.bytes_per_token as u64), own.mix.words(spelled));
        writeln!(f, "{bytes:>12}{:>8}  {loss:<22}{words}", format!("{:.0}", Percent(share)))?;
    }
    Ok(())
}

fn show_width(f: &mut fmt::Formatter<'_>, width: &Width) -> fmt::Result {
    writeln!(
        f,
        "\nevery expert at {}: KL {:.3e}, perplexity {:+.2}; scale {:.3}",
        width.dtype,
        width.kl,
        Percent(width.perplexity_increase),
        width.scale
    )?;
    writeln!(f, "{:>6}{:>12}{:>12}{:>12}{:>12}  types", "layer", "KL", "least", "median", "most")?;
    for layer in &width.layers {
        let mut sorted = layer.experts.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |i: usize| sorted.get(i).copied().unwrap_or(0.0);
        let (least, median, most) = (at(0), at(sorted.len() / 2), at(sorted.len().saturating_sub(1)));
        let types = describe(&layer.types);
        writeln!(f, "{:>6}{:>12.3e}{least:>12.3e}{median:>12.3e}{most:>12.3e}  {types}", layer.layer, layer.kl)?;
    }
    let n_measured: usize = width.layers.iter().map(|layer| layer.measured.len()).sum();
    let n_experts: usize = width.layers.iter().map(|layer| layer.experts.len()).sum();
    writeln!(f, "{n_measured} of {n_experts} experts were lowered alone (*), the others are predicted")?;
    let mut experts: Vec<(f64, u16, usize)> = (width.layers.iter())
        .flat_map(|layer| layer.experts.iter().enumerate().map(|(expert, &kl)| (kl, layer.layer, expert)))
        .collect();
    experts.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let is_measured = |layer: u16, expert: usize| {
        let own = width.layers.iter().find(|own| own.layer == layer);
        own.is_some_and(|own| own.measured.iter().any(|measured| usize::from(*measured) == expert))
    };
    let one = |&(kl, layer, expert): &(f64, u16, usize)| {
        format!("{layer}:{expert} {kl:.2e}{}", if is_measured(layer, expert) { "*" } else { "" })
    };
    let line = |experts: &[(f64, u16, usize)]| experts.iter().map(one).collect::<Vec<_>>().join(", ");
    let n = SHOWN.min(experts.len() / 2);
    writeln!(f, "most sensitive (layer:expert KL): {}", line(&experts[..n]))?;
    writeln!(f, "most robust: {}", line(&experts[experts.len() - n..]))
}

/// `down:q3_K gate:q2_K`, or one name where all are equal.
fn describe(types: &SliceTypes) -> String {
    let named: Vec<_> = types.iter().collect();
    match named.first() {
        Some((_, first)) if named.iter().all(|(_, dtype)| dtype == first) => first.name().to_owned(),
        _ => named.iter().map(|(kind, dtype)| format!("{}:{dtype}", slice_name(*kind))).collect::<Vec<_>>().join(" "),
    }
}
