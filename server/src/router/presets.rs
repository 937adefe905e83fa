//! `--models-preset`: flags of single models, in an INI file. A section has a model's name, a key is a flag without its
//! dashes, as in llama-server. `[*]` is for all models.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use configparser::ini::{Ini, IniDefault};

use super::list::{self, Entry};
use crate::settings::check_model;
use hobbit_programs::args::{self, server::ServerArgs};
use hobbit_programs::argv::Grammar;

/// Flags of the router, and those that it gives to its models itself.
pub const OWN: &[&str] = &[
    "models-dir",
    "models-preset",
    "models-max",
    "models-autoload",
    "model-wait",
    "models-pull",
    "sleep-idle-seconds",
    "hf-repo",
    "hf-file",
    "hf-token",
    "model-url",
    "offline",
    "host",
    "port",
    "socket-on-stdin",
    "alias",
    "tags",
    "api-key",
    "api-key-file",
    "allowed-hosts",
    "cors-origins",
    "threads-http",
    "ssl-key-file",
    "ssl-cert-file",
    "log-file",
    "log-format",
    "mem-budget",
    "quiet",
    "ui",
    "verbosity",
];

/// The section for all models.
const ALL: &str = "*";

/// Longest file.
const BYTES_MAX: u64 = 1 << 20;

/// Sections of a file. Each is checked at the start, in about a millisecond.
const SECTIONS_MAX: usize = 1000;

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
    // A `;` or `#` in a value may be its own: see `value_of`.
    rules.enable_inline_comments = false;
    let text = hobbit_core::files::read_text(path, BYTES_MAX)?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text).to_owned();
    let sections = Ini::new_from_defaults(rules).read(text).map_err(anyhow::Error::msg)?;
    if sections.len() > SECTIONS_MAX {
        bail!("{} sections, at most {SECTIONS_MAX} are read: give flags of all models in [*]", sections.len());
    }
    let grammar = args::grammar(&args::server::command());
    let preset = |(name, settings): (String, _)| {
        let preset = preset(&name, BTreeMap::from_iter(settings), &grammar);
        Ok((name.clone(), preset.with_context(|| format!("section [{name}]"))?))
    };
    sections.into_iter().map(preset).collect()
}

/// A value without the comment after it, which begins with a `;` or `#` that follows a space. Quotes around a value keep
/// everything between them.
fn value_of(text: &str) -> &str {
    let is_end = |rest: &str| rest.trim().is_empty() || rest.trim_start().starts_with([';', '#']);
    let quoted = |quote| text.strip_prefix(quote)?.split_once(quote).filter(|(_, rest)| is_end(rest));
    if let Some((value, _)) = quoted('"').or_else(|| quoted('\'')) {
        return value;
    }
    let comment = text.match_indices([';', '#']).find(|(at, _)| text[..*at].ends_with([' ', '\t']) || *at == 0);
    comment.map_or(text, |(at, _)| text[..at].trim_end())
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
        for word in grammar.setting(&key, value.as_deref().map(value_of))?.words {
            let text = word.to_str().unwrap_or_default();
            let (flag, value) = text.split_once('=').unwrap_or((text, ""));
            match flag.trim_start_matches('-') {
                "model" if name != ALL => preset.file = Some(value.into()),
                flag if flag == "model" || OWN.contains(&flag) => bail!("'{key}' is no setting of this section"),
                _ => preset.words.push(word),
            }
        }
    }
    if let Some(file) = &preset.file {
        check_model(file)?;
    }
    Ok(preset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_end_values_after_a_space_and_outside_quotes() {
        for (text, value) in [
            ("top_k;top_p;temperature", "top_k;top_p;temperature"),
            ("top_k;top_p ; both", "top_k;top_p"),
            ("768 ; every model's", "768"),
            ("a#b\t# c", "a#b"),
            ("; nothing", ""),
            ("\"{{ a }} ; # b\" ; c", "{{ a }} ; # b"),
            ("'a \"b\" # c'", "a \"b\" # c"),
            ("\"a\" + \"b\" # c", "\"a\" + \"b\""),
            ("\"open # c", "\"open"),
        ] {
            assert_eq!(value_of(text), value, "{text}");
        }
    }

    #[test]
    fn files_are_read_whatever_wrote_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("models.ini");
        let template = "chat-template = '{{ 1 }} ; # 2'";
        let text = format!("{}[a]\r\nsamplers = top_k;top_p;temperature\r\n{template}\r\n", '\u{feff}');
        std::fs::write(&path, text).unwrap();
        let words = ["--samplers=top_k;top_p;temperature", "--chat-template={{ 1 }} ; # 2"].map(OsString::from);
        let mut found = Presets::read(&path, &[]).unwrap().of("a");
        found.sort_by_key(|word| *word != words[0]);
        assert_eq!(found, words);
        // Checking thousands takes long: refused at once, with a message.
        let many: String = (0..=SECTIONS_MAX).map(|n| format!("[m{n}]\nc = 256\n")).collect();
        std::fs::write(&path, many).unwrap();
        let error = format!("{:#}", Presets::read(&path, &[]).unwrap_err());
        assert!(error.contains("1001 sections, at most 1000") && error.contains("models.ini"), "{error}");
    }
}
