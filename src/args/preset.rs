//! `--preset`: the flags that give a paper's settings; explicit flags override them.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
use clap::Args;

use super::precision::Low;
use crate::argv::Note;
use hobbit::options::{LowSource, Preset};
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{Pack, TypeChoice};

#[derive(Args, Debug)]
#[command(next_help_heading = "Papers as published (hobbit's own)")]
pub struct PresetArgs {
    /// Settings of a paper's system, for flags that are not given: hobbit (low versions by T1 and T2, stacked gate,
    /// weighted sum), edgemoe (path table, frequency over distance; give it a pack with expert-wise widths), fate
    /// (cross-layer gate, ARC, shallow layers first, a quarter of a prompt's experts low), smoe (experts in memory
    /// stand in for missing ones of little score, top scores read ahead) or swapmoe (experts in memory alone, exchanged
    /// in the background). A line at the start says which flags these are
    #[arg(long, value_name = "none|hobbit|edgemoe|fate|smoe|swapmoe", default_value_t, env = "HOBBIT_ARG_PRESET")]
    pub preset: Preset,
}

/// The preset's words, to be put before the typed ones.
#[derive(Debug, Default)]
pub struct PresetWords {
    preset: Preset,
    /// In clap's spelling, `--name=value`.
    pub words: Vec<OsString>,
}

impl PresetWords {
    /// The preset's flags that are not given otherwise. `typed` are words in clap's spelling; `variable` looks up an
    /// environment variable. A typed preset overrides variables; a preset from the environment yields to them.
    pub fn of<'a>(typed: &'a [OsString], command: &clap::Command, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let of_word =
            |long: &str, word: &'a OsString| word.to_str()?.strip_prefix("--")?.strip_prefix(long)?.strip_prefix('=');
        let value_of = |long: &str| typed.iter().rev().find_map(|word| of_word(long, word));
        let arg = |long: &str| command.get_arguments().find(|arg| arg.get_long() == Some(long));
        let from_environment = |long: &str| variable(arg(long)?.get_env()?.to_str()?);
        let is_typed = value_of("preset").is_some();
        let word = value_of("preset").map(OsString::from).or_else(|| from_environment("preset"));
        // clap refuses unknown presets.
        let Some(preset) = word.and_then(|word| word.to_str()?.parse::<Preset>().ok()) else {
            return Self::default();
        };
        let is_given = |long: &str| value_of(long).is_some() || !is_typed && from_environment(long).is_some();
        let is_exact = value_of("precision") == Some("exact");
        let words = flags(preset).into_iter().filter(|flag| arg(flag.long).is_some() && !is_given(flag.long));
        // Thresholds and substitutes have no effect in exact precision.
        let words = words.filter(|flag| !(flag.is_approximate && is_exact));
        Self { preset, words: words.map(|flag| format!("--{}={}", flag.long, flag.value).into()).collect() }
    }

    /// The note printed at the start; `None` without a preset.
    pub fn note(&self) -> Option<Note> {
        if self.preset == Preset::None {
            return None;
        }
        let set = if self.words.is_empty() { "nothing that is not given".to_owned() } else { self.shown() };
        Some(Note::Preset(format!("preset {}: {set}", self.preset)))
    }

    /// Explains a contradiction that involves one of the preset's flags; `None` if none is involved.
    pub fn share_in(&self, error: &str) -> Option<String> {
        let named = self.words.iter().filter_map(|word| word.to_str()).map(spelled);
        let named: Vec<String> = named.filter(|flag| error.contains(&format!("'{flag}'"))).collect();
        (!named.is_empty()).then(|| format!("'{}' is of '--preset {}'", named.join("' and '"), self.preset))
    }

    fn shown(&self) -> String {
        self.words.iter().filter_map(|word| word.to_str()).map(spelled).collect::<Vec<_>>().join(" ")
    }
}

/// `--name=value` as users type it.
fn spelled(word: &str) -> String {
    match word.split_once('=') {
        Some((name @ ("--overlap" | "--upgrade"), "off")) => name.replacen("--", "--no-", 1),
        Some((name, value)) => format!("{name} {value}"),
        None => word.to_owned(),
    }
}

/// One flag of a preset.
struct Flag {
    long: &'static str,
    value: String,
    /// Without effect in exact precision.
    is_approximate: bool,
}

fn flags(preset: Preset) -> Vec<Flag> {
    let Some(settings) = preset.settings() else { return Vec::new() };
    let flag = |long, value: &dyn ToString| Flag { long, value: value.to_string(), is_approximate: false };
    let no_exact = |long, value: &dyn ToString| Flag { is_approximate: true, ..flag(long, value) };
    let word = |on: bool| if on { "on" } else { "off" };
    let mut flags = vec![
        flag("policy", &settings.policy),
        flag("expert-slots", &settings.slots),
        flag("predictor", &settings.predictor),
        flag("prefetch-distance", &settings.distance),
        flag("prefetch", &settings.prefetch),
    ];
    if !settings.overlap {
        flags.push(flag("overlap", &word(false)));
    }
    flags.push(flag("cpu-helper", &settings.cpu_helper));
    if let Some((alpha, keep_top)) = settings.routing.substitute {
        flags.push(no_exact("substitute", &alpha));
        flags.push(no_exact("keep-top", &keep_top));
    }
    if settings.routing.virtual_experts {
        flags.push(no_exact("virtual-experts", &"auto"));
    }
    let Some(low) = settings.low else {
        // Papers that follow the router's choice use one precision at run time; the results of the others are
        // approximate anyway.
        flags.extend(settings.routing.is_off().then(|| flag("precision", &"exact")));
        return flags;
    };
    flags.extend([
        no_exact("low", &Low::AUTO),
        no_exact("low-share", &format!("{}%", low.low_share * 100.0)),
        no_exact("t1", &low.t1),
        no_exact("t2", &low.t2),
        no_exact("prefill-low", &format!("{}%", low.prefill_low * 100.0)),
        no_exact("upgrade", &word(false)),
    ]);
    flags
}

/// Source of low versions for `--low auto`: `None` if a pack has its own.
pub fn low_of(model: &Path, directory: Option<&Path>) -> Result<Option<LowSource>> {
    let gguf = Gguf::open(model)?;
    if Pack::is_pack(&gguf) && Pack::open(model)?.catalog.has_low() {
        return Ok(None);
    }
    let experts = gguf.experts()?;
    let types = TypeChoice::below(&experts).to_string().to_ascii_lowercase();
    Ok(Some(LowSource::Quantise { types, directory: directory.map(Path::to_owned) }))
}
