//! `--models-preset`: flags of single models, in an INI file. A section has a model's name, a key is a flag without its
//! dashes, as in llama-server. `[*]` is for all models.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use configparser::ini::{Ini, IniDefault};

use super::list::{self, Entry};
use super::process::OWN;
use crate::args::{self, server::ServerArgs};
use crate::argv::Grammar;
use crate::server::settings::check_model;

/// The section for all models.
const ALL: &str = "*";

/// Longest file.
const BYTES_MAX: u64 = 1 << 20;

/// Flags by model.
#[derive(Debug, Default)]
pub struct Presets(BTreeMap<String, Preset>);

#[derive(Debug, Default)]
struct Preset {
    /// In clap's spelling.
    words: Vec<OsString>,
    /// The model's file, if the section names one.
    file: Option<PathBuf>,
}

impl Presets {
    /// Reads a file. `flags` are those of all models, which come after a preset's.
    ///
    /// # Errors
    /// A section that a model's process would refuse.
    pub fn read(path: &Path, flags: &[OsString]) -> Result<Self> {
        let all = read(path).with_context(|| format!("--models-preset {}", path.display()))?;
        let presets = Self(all);
        for name in presets.0.keys() {
            let words = presets.of(name).into_iter().chain(flags.iter().cloned());
            if let Err(error) = args::parse_as::<ServerArgs>(args::server::command(), words) {
                let (path, error) = (path.display(), error.to_string());
                let reason = error.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
                bail!("--models-preset {path}: section [{name}]: {reason}");
            }
        }
        Ok(presets)
    }

    /// Adds models that sections name to those that were found.
    pub fn add_to(&self, all: &mut BTreeMap<String, Entry>) {
        for (name, preset) in &self.0 {
            if let Some(entry) = preset.file.as_deref().and_then(list::model_at) {
                all.insert(name.clone(), Entry { name: name.clone(), ..entry });
            }
        }
    }

    /// Sections for models that there are not.
    pub fn idle<'a>(&'a self, all: &'a BTreeMap<String, Entry>) -> impl Iterator<Item = &'a str> {
        self.0.keys().map(String::as_str).filter(|name| *name != ALL && !name.is_empty() && !all.contains_key(*name))
    }

    /// The flags of a model.
    pub fn of(&self, name: &str) -> Vec<OsString> {
        let sections = [ALL, name].into_iter().filter_map(|section| self.0.get(section));
        sections.flat_map(|preset| preset.words.clone()).collect()
    }
}

fn read(path: &Path) -> Result<BTreeMap<String, Preset>> {
    let mut rules = IniDefault::default();
    (rules.default_section, rules.case_sensitive, rules.delimiters) = (String::new(), true, vec!['=']);
    let text = hobbit_core::files::read_text(path, BYTES_MAX)?;
    let sections = Ini::new_from_defaults(rules).read(text).map_err(anyhow::Error::msg)?;
    let grammar = Grammar::of(&args::server::command());
    let preset = |(name, settings): (String, _)| {
        let preset = preset(&name, BTreeMap::from_iter(settings), &grammar);
        Ok((name.clone(), preset.with_context(|| format!("section [{name}]"))?))
    };
    sections.into_iter().map(preset).collect()
}

/// The section `name` of a file.
fn preset(name: &str, settings: BTreeMap<String, Option<String>>, grammar: &Grammar) -> Result<Preset> {
    let mut preset = Preset::default();
    for (key, value) in settings {
        if name.is_empty() && key == "version" {
            continue;
        }
        if name.is_empty() {
            bail!("'{key}' stands before the first section");
        }
        for word in grammar.setting(&key, value.as_deref())?.words {
            let text = word.to_str().unwrap_or_default();
            let (flag, value) = text.split_once('=').unwrap_or((text, ""));
            match flag.trim_start_matches('-') {
                "model" if name != ALL => preset.file = Some(value.into()),
                own if own == "model" || OWN.contains(&own) => bail!("'{key}' is no setting of this section"),
                _ => preset.words.push(word),
            }
        }
    }
    if let Some(file) = &preset.file {
        check_model(file)?;
    }
    Ok(preset)
}
