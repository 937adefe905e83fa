//! llama.cpp's command line in clap's spelling.
//!
//! llama.cpp has flags such as `-ngl` and `-no-cnv`, takes any word after a flag as its value, and reads `--top_k` as
//! `--top-k`. Here each flag becomes `--long=value`, so that clap cannot mistake a value for a flag. Values are never
//! rewritten. Switches are bare, `--no-…`, `=on`, or from the environment.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::iter::Peekable;
use std::str::FromStr;

use hobbit::options::Repack;

use super::args::table;
use super::unsupported::{self, Verdict};

/// Flags that clap adds to commands without their own.
const CLAPS: [&str; 4] = ["-h", "--help", "-V", "--version"];

/// Every spelling of the flag `--long`.
fn spellings_of(arg: &clap::Arg, long: &str) -> Vec<(String, Takes)> {
    let is_named = |name| arg.get_value_names().is_some_and(|names| names == [name]);
    let takes = if is_named(Switch::NAME) {
        Takes::Switch(true)
    } else if is_named(Tri::NAME) {
        Takes::TriWord
    } else if is_named(REPACK) {
        Takes::RepackWord
    } else if is_named(PAIR) {
        Takes::Pair
    } else if arg.get_action().takes_values() {
        Takes::Value
    } else {
        Takes::Nothing
    };
    let mut all = vec![(format!("--{long}"), takes)];
    all.extend(arg.get_short().map(|letter| (format!("-{letter}"), takes)));
    all.extend(matches!(takes, Takes::Switch(_)).then(|| (format!("--no-{long}"), Takes::Switch(false))));
    let of_table = table::spellings(long);
    all.extend(of_table.map(|(spelling, off)| (spelling.to_owned(), if off { Takes::Switch(false) } else { takes })));
    all
}

/// Value name of `--repack`: a [`Tri`] with one more word.
pub const REPACK: &str = "on|off|auto|ordinary";

/// Parses it.
pub fn repack(word: &str) -> Result<Repack, String> {
    match (word, word.parse()) {
        ("ordinary", _) => Ok(Repack::Ordinary),
        (_, Ok(Tri::Auto)) => Ok(Repack::Auto),
        (_, Ok(Tri::On)) => Ok(Repack::On),
        (_, Ok(Tri::Off)) => Ok(Repack::Off),
        (_, Err(_)) => Err("expected on, off, auto or ordinary".to_owned()),
    }
}

/// Value name of a flag with two values; clap receives them as one word with a comma.
pub const PAIR: &str = "START END";

/// The values after a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    /// The next word, always.
    Value,
    /// The next two words, always.
    Pair,
    /// The next word if it is on, off or auto.
    TriWord,
    /// The next word if it is one of [`REPACK`].
    RepackWord,
    /// Nothing; the flag switches this way.
    Switch(bool),
    /// Nothing.
    Nothing,
}

/// All known spellings.
#[derive(Debug)]
pub struct Grammar {
    flags: HashMap<String, (String, Takes)>,
    /// A hint at another program that has a flag.
    elsewhere: fn(&str) -> Option<String>,
}

impl Grammar {
    /// The flags of `command`, with llama.cpp's spellings. `elsewhere` knows those of other programs.
    pub fn of(command: &clap::Command, elsewhere: fn(&str) -> Option<String>) -> Self {
        let mut flags = HashMap::new();
        // A flag's own name takes precedence over another flag's spelling.
        let longs: HashSet<&str> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        let is_own = |spelling: &str| spelling.strip_prefix("--").is_some_and(|name| longs.contains(name));
        for arg in command.get_arguments() {
            let Some(long) = arg.get_long() else { continue };
            for (spelling, takes) in spellings_of(arg, long) {
                if spelling.strip_prefix("--") == Some(long) || !is_own(&spelling) {
                    flags.insert(spelling, (long.to_owned(), takes));
                }
            }
        }
        Self { flags, elsewhere }
    }

    /// Whether the command has a flag of this spelling.
    pub fn has(&self, spelling: &str) -> bool {
        self.flags.contains_key(spelling)
    }

    /// The setting `key = value` of a file, whose key is a flag without its dashes; a switch needs no value.
    pub fn setting(&self, key: &str, value: Option<&str>) -> Result<Line, UsageError> {
        let spellings = [format!("--{}", key.replace('_', "-")), format!("-{key}")];
        let Some((long, takes)) = spellings.iter().find_map(|spelling| self.flags.get(spelling)) else {
            let [long, _] = spellings;
            return normalise([long.into()], self);
        };
        let value = match (takes, value.map(Switch::from_str)) {
            (Takes::Switch(is_on), None) => Some(if *is_on { "on" } else { "off" }),
            (Takes::Switch(false), Some(Ok(Switch(is_negated)))) => Some(if is_negated { "off" } else { "on" }),
            _ => value,
        };
        let value = value.map_or_else(String::new, |value| format!("={value}"));
        Ok(Line { words: vec![format!("--{long}{value}").into()], ..Line::default() })
    }
}

/// A command line in clap's spelling, with the meaning that llama.cpp gives the original.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Words without the program's name.
    pub words: Vec<OsString>,
    /// Flags that were dropped.
    pub notes: Vec<Note>,
    /// Help is asked for as `-h`.
    pub is_brief: bool,
}

/// A notice about an accepted command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Note {
    /// A llama.cpp flag was accepted and has no effect.
    #[error("{flag} has no effect: {why}")]
    NoEffect {
        /// As typed.
        flag: String,
        /// The reason.
        why: &'static str,
    },
    /// The flags set by a preset.
    #[error("{0}")]
    Preset(String),
}

/// Usage errors that clap cannot detect; missing and unexpected values are left to clap.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    #[error("'{flag}' is a flag of llama.cpp or ik_llama.cpp that hobbit does not have: {why}")]
    Unsupported { flag: String, why: &'static str },
    #[error("unknown flag '{flag}'{hint}")]
    Unknown { flag: String, hint: String },
    #[error("'{0}' is no flag; to run this model, give -m {0}")]
    Model(String),
    #[error("'{0}' is a command of gguf-tools: gguf-tools {0} --help explains it")]
    Tool(String),
    #[error(
        "unexpected argument '{0}': there are no subcommands; hobbit-cli -hf USER/REPO downloads and chats, \
         hobbit-server -hf USER/REPO serves"
    )]
    Subcommand(String),
}

/// Commands of gguf-tools that users of other programs look for here.
const TOOLS: [&str; 5] = ["pull", "list", "rm", "inspect", "verify"];
/// Commands of other programs that run a model.
const COMMANDS: [&str; 6] = ["run", "chat", "serve", "start", "load", "launch"];

/// Rewrites the words after the program's name.
pub fn normalise(args: impl IntoIterator<Item = OsString>, grammar: &Grammar) -> Result<Line, UsageError> {
    let mut line = Line::default();
    let mut rest = args.into_iter().peekable();
    while let Some(word) = rest.next() {
        // A word that is not UTF-8 can only be a stray value: clap reports it.
        let Some(typed) = word.to_str().filter(|text| text.len() > 1 && text.starts_with('-')) else {
            if let Some(model) = word.to_str().filter(|word| word.ends_with(".gguf")) {
                return Err(UsageError::Model(model.to_owned()));
            }
            if let Some(tool) = word.to_str().filter(|word| line.words.is_empty() && TOOLS.contains(word)) {
                return Err(UsageError::Tool(tool.to_owned()));
            }
            if let Some(word) = word.to_str().filter(|word| line.words.is_empty() && COMMANDS.contains(word)) {
                return Err(UsageError::Subcommand(word.to_owned()));
            }
            line.words.push(word);
            continue;
        };
        line.is_brief |= typed == "-h";
        let (name, inline) = split(typed);
        if let Some((long, takes)) = grammar.flags.get(&name) {
            line.words.push(join(&word, long, *takes, inline, &mut rest));
        } else if let Some(flag) = unsupported::find(&name) {
            let values = if inline.is_some() { 0 } else { flag.values };
            rest.by_ref().take(values).for_each(drop);
            match flag.verdict {
                Verdict::Refused(why) => return Err(UsageError::Unsupported { flag: name, why }),
                Verdict::NoEffect(why) => line.notes.push(Note::NoEffect { flag: name, why }),
                Verdict::Implied => {}
            }
        } else if CLAPS.contains(&typed) {
            line.words.push(word);
        } else if name.starts_with("--") {
            if let Some(hint) = (grammar.elsewhere)(&name) {
                return Err(UsageError::Unknown { hint, flag: name });
            }
            // clap suggests similar flags.
            line.words.push(word);
        } else {
            let hint = (grammar.elsewhere)(&name).unwrap_or_else(|| hint(&name, grammar));
            return Err(UsageError::Unknown { hint, flag: name });
        }
    }
    Ok(line)
}

/// Splits `--top_k=5` into `--top-k` and `5`. Flags with one dash have no such form.
fn split(typed: &str) -> (String, Option<&str>) {
    if !typed.starts_with("--") {
        return (typed.to_owned(), None);
    }
    let (name, inline) = typed.split_once('=').map_or((typed, None), |(name, value)| (name, Some(value)));
    (name.replace('_', "-"), inline)
}

/// The flag as one word for clap, with a value taken from `rest` where it belongs to the flag.
fn join(
    typed: &OsStr,
    long: &str,
    takes: Takes,
    inline: Option<&str>,
    rest: &mut Peekable<impl Iterator<Item = OsString>>,
) -> OsString {
    let value: Option<OsString> = match (takes, inline) {
        (Takes::Switch(false), Some(_)) => return typed.to_owned(),
        (_, Some(inline)) => Some(inline.into()),
        (Takes::Nothing, None) => None,
        (Takes::Value, None) => rest.next(),
        (Takes::Pair, None) => {
            let pair: Vec<OsString> = rest.by_ref().take(2).collect();
            (!pair.is_empty()).then(|| pair.join(OsStr::new(",")))
        }
        (Takes::TriWord, None) => rest.next_if(|next| next.to_str().is_some_and(|word| word.parse::<Tri>().is_ok())),
        (Takes::RepackWord, None) => rest.next_if(|next| next.to_str().is_some_and(|word| repack(word).is_ok())),
        (Takes::Switch(on), None) => Some(if on { "on" } else { "off" }.into()),
    };
    let mut word = OsString::from(format!("--{long}"));
    if let Some(value) = value {
        word.push("=");
        word.push(value);
    }
    word
}

/// A suggestion for an unknown flag with one dash.
fn hint(name: &str, grammar: &Grammar) -> String {
    let known = |flag: &str| grammar.flags.contains_key(flag);
    if let Some((flag, value)) = name.split_once('=').filter(|(flag, _)| known(flag)) {
        return format!("; write '{flag} {value}'");
    }
    let letter: String = name.chars().take(2).collect();
    let value = &name[letter.len()..];
    let is_glued = known(&letter) && value.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    match (known(&format!("-{name}")), is_glued) {
        // `-t1` is as close to `-t 1` as to `--t1`.
        (true, true) => format!("; did you mean '{letter} {value}' or '-{name}'?"),
        (true, false) => format!("; did you mean '-{name}'?"),
        (false, true) => format!("; write '{letter} {value}'"),
        (false, false) => String::new(),
    }
}

/// On or off, in llama.cpp's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

/// On, off, or chosen automatically.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tri {
    Auto,
    On,
    Off,
}

impl Switch {
    /// Value name that marks such flags in the command.
    pub const NAME: &str = "on|off";
}

impl Tri {
    /// Value name that marks such flags in the command.
    pub const NAME: &str = "on|off|auto";
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "on" | "enabled" | "true" | "1" => Ok(Self(true)),
            "off" | "disabled" | "false" | "0" => Ok(Self(false)),
            _ => Err("expected on or off".to_owned()),
        }
    }
}

impl FromStr for Tri {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "auto" | "-1" => Ok(Self::Auto),
            _ => match word.parse() {
                Ok(Switch(true)) => Ok(Self::On),
                Ok(Switch(false)) => Ok(Self::Off),
                Err(_) => Err("expected on, off or auto".to_owned()),
            },
        }
    }
}

/// llama.cpp's rule that `LLAMA_ARG_NO_X`, with any value, switches off what `LLAMA_ARG_X` would set:
/// the words to put before the command line.
pub fn negated_by_environment(command: &clap::Command, is_set: impl Fn(&str) -> bool) -> Vec<OsString> {
    command
        .get_arguments()
        .filter(|arg| {
            arg.get_value_names()
                .is_some_and(|names| [Switch::NAME, Tri::NAME, REPACK].iter().any(|name| names == [*name]))
        })
        .filter_map(|arg| {
            let positive = arg.get_env()?.to_str()?;
            let negative = positive.replacen("_ARG_", "_ARG_NO_", 1);
            is_set(&negative).then(|| arg.get_long().map(|long| format!("--{long}=off").into()))?
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flag_is_both_here_and_unsupported() {
        let own = Grammar::of(&crate::args::command(), |_| None);
        for spelling in own.flags.keys() {
            assert!(unsupported::find(spelling).is_none(), "{spelling}");
        }
        #[cfg(feature = "engine")]
        {
            let commands =
                [crate::perplexity::args::command, crate::bench::args::command, crate::args::server::command];
            let others = commands.map(|command| Grammar::of(&command(), |_| None));
            for (long, spelling) in
                table::SPELLINGS.iter().flat_map(|row| table::spellings(row.0).map(|(spelling, _)| (row.0, spelling)))
            {
                let mut found = others.iter().chain([&own]).filter_map(|grammar| grammar.flags.get(spelling));
                assert!(found.any(|(target, _)| target == long), "{spelling}");
            }
        }
    }
}
