//! `instructions.json`: what was counted, and with what.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use crate::counts::Counts;

/// Versions that counts depend on besides hobbit's code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tools {
    /// `rustc --version`.
    pub compiler: String,
    /// Architecture and operating system that the benches were compiled for.
    pub target: String,
    /// Features of the processor that the compiler was allowed to use.
    pub cpu_features: String,
    /// `valgrind --version`.
    pub valgrind: String,
    /// The system's C library.
    pub libc: String,
}

/// The file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// With what it was counted.
    pub recorded_with: Tools,
    /// Instructions by name of the bench.
    pub instructions: Counts,
}

impl Tools {
    /// This machine's. Features are those that this very program was compiled for: the benches were, too.
    ///
    /// # Errors
    /// A tool that cannot be asked for its version.
    pub fn here() -> anyhow::Result<Self> {
        let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
        Ok(Self {
            compiler: first_line(&rustc, &["--version"])?,
            target: format!("{} {}", std::env::consts::ARCH, std::env::consts::OS),
            cpu_features: cpu_features(),
            valgrind: first_line("valgrind", &["--version"])?,
            libc: first_line("getconf", &["GNU_LIBC_VERSION"])?,
        })
    }

    /// Words on each difference that may change counts: what was recorded, what is here.
    pub fn differences(&self, here: &Self) -> Vec<String> {
        let pairs = [
            ("compiler", &self.compiler, &here.compiler),
            ("target", &self.target, &here.target),
            ("CPU features", &self.cpu_features, &here.cpu_features),
            ("valgrind", &self.valgrind, &here.valgrind),
            ("C library", &self.libc, &here.libc),
        ];
        let differ = pairs.into_iter().filter(|(_, recorded, here)| recorded != here);
        differ.map(|(what, recorded, here)| format!("{what}: recorded with {recorded}, this is {here}")).collect()
    }
}

impl Recorded {
    /// # Errors
    /// Names the file, and `--record` as the remedy.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let remedy = || format!("{}: not a recording; make one with benches/guard/check.sh --record", path.display());
        let text = std::fs::read_to_string(path).with_context(remedy)?;
        serde_json::from_str(&text).with_context(remedy)
    }

    /// # Errors
    /// Names the file.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
    }
}

fn first_line(program: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(args).output().with_context(|| format!("{program} cannot be run"))?;
    ensure!(output.status.success(), "{program} {}: {}", args.join(" "), output.status);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().next().map(|line| line.trim().to_owned()).with_context(|| format!("{program} says nothing"))
}

/// Those that change how hobbit is compiled, and differ between machines of a kind.
fn cpu_features() -> String {
    let features = [
        ("sse4.2", cfg!(target_feature = "sse4.2")),
        ("avx2", cfg!(target_feature = "avx2")),
        ("fma", cfg!(target_feature = "fma")),
        ("bmi2", cfg!(target_feature = "bmi2")),
        ("f16c", cfg!(target_feature = "f16c")),
        ("avx512f", cfg!(target_feature = "avx512f")),
        ("neon", cfg!(target_feature = "neon")),
    ];
    let names: Vec<&str> = features.into_iter().filter(|(_, is_on)| *is_on).map(|(name, _)| name).collect();
    names.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named() {
        let recorded = Tools { compiler: "rustc 1.95.0".into(), target: "x86_64 linux".into(), ..Tools::default() };
        assert!(recorded.differences(&recorded).is_empty());
        let here = Tools { compiler: "rustc 1.96.0".into(), ..recorded.clone() };
        assert_eq!(recorded.differences(&here), ["compiler: recorded with rustc 1.95.0, this is rustc 1.96.0"]);
    }

    #[test]
    fn a_recording_without_a_field_names_the_file_and_the_remedy() {
        let error = Recorded::read(Path::new("Cargo.toml")).unwrap_err().to_string();
        assert_eq!(error, "Cargo.toml: not a recording; make one with benches/guard/check.sh --record");
    }
}
