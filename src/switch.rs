//! Values of flags that are on or off: bare, `--no-…`, `=on`, or from the environment.

use std::ffi::OsString;
use std::str::FromStr;

use hobbit::options::Repack;

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

impl From<Tri> for Repack {
    fn from(tri: Tri) -> Self {
        match tri {
            Tri::Auto => Self::Auto,
            Tri::On => Self::On,
            Tri::Off => Self::Off,
        }
    }
}

impl Tri {
    /// Value name that marks such flags in the command.
    pub const NAME: &str = "on|off|auto";
}

/// Whether `word` is a value that a [`Tri`] flag may take from the next argument.
pub fn is_tri_word(word: &str) -> bool {
    word.parse::<Tri>().is_ok()
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
        .filter(|arg| arg.get_value_names().is_some_and(|names| names == [Switch::NAME] || names == [Tri::NAME]))
        .filter_map(|arg| {
            let positive = arg.get_env()?.to_str()?;
            let negative = positive.replacen("_ARG_", "_ARG_NO_", 1);
            is_set(&negative).then(|| arg.get_long().map(|long| format!("--{long}=off").into()))?
        })
        .collect()
}
