//! Judges how a build of llama.cpp treats AMX. `amx.cmake` decides and leaves a record in CMakeCache.txt; if it did not
//! run (another CMAKE_PROJECT_INCLUDE, hobbit as another package's dependency), the built libraries are searched.
//!
//! Part of the build script, and of its test.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

/// The record of `amx.cmake`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// HOBBIT_AMX at that time: `auto`, `on` or `off`.
    pub asked: String,
    /// Whether any part of the build would have AMX.
    pub wanted: bool,
    /// `kept`, `left-out` or `unknown-to-compiler`.
    pub answer: String,
    /// Name and version of the C++ compiler.
    pub compiler: String,
}

impl Record {
    /// Reads it from the text of a CMakeCache.txt. `None` if the script did not run.
    pub fn parse(cache: &str) -> Option<Record> {
        let value = |name: &str| {
            cache.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(":INTERNAL=")?.to_owned()))
        };
        Some(Record {
            answer: value("HOBBIT_AMX")?,
            asked: value("HOBBIT_AMX_ASKED")?,
            wanted: value("HOBBIT_AMX_WANTED")? == "ON",
            compiler: value("HOBBIT_AMX_COMPILER")?,
        })
    }
}

/// A compiler's result for `probe.cpp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// It does not know AMX.
    Unknown,
    /// Tile configurations reach the processor as they were stored.
    Right,
    /// Stores are dropped, or the probe could not be judged.
    Wrong,
}

/// Message of the build script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advice {
    Nothing,
    Warn(String),
    /// Programs of this build would crash, or are not what was asked for.
    Fail(String),
}

/// Message about a build with `record` whose libraries have AMX or not, when HOBBIT_AMX is `asked` now. `remedy`
/// rebuilds llama.cpp; `script` is the path of `amx.cmake`.
pub fn advice(
    record: Option<&Record>,
    asked: &str,
    has_amx: bool,
    probe: impl FnOnce() -> Probe,
    remedy: &str,
    script: &str,
) -> Advice {
    let Some(record) = record else {
        if !has_amx || asked == "on" {
            return Advice::Nothing;
        }
        if asked == "off" {
            return Advice::Fail(format!(
                "HOBBIT_AMX=off, but llama.cpp was built with AMX and without {script}: set \
                 CMAKE_PROJECT_INCLUDE={script}, then `{remedy}` and build again"
            ));
        }
        return match probe() {
            Probe::Right | Probe::Unknown => Advice::Nothing,
            Probe::Wrong => Advice::Fail(format!(
                "llama.cpp was built with AMX, which this C++ compiler miscompiles: prompts would end with SIGSEGV. \
                 Set CMAKE_PROJECT_INCLUDE={script} (or CFLAGS and CXXFLAGS to '-mno-amx-tile -mno-amx-int8 \
                 -mno-amx-bf16'), then `{remedy}` and build again; HOBBIT_AMX=on keeps it"
            )),
        };
    };
    if asked != record.asked {
        return Advice::Fail(format!(
            "HOBBIT_AMX is {asked}, but llama.cpp was built when it was {}: `{remedy}` and build again",
            record.asked
        ));
    }
    if record.answer == "left-out" && has_amx {
        return Advice::Fail(format!(
            "AMX was to be left out of llama.cpp and is in it all the same (compiler: {}): set CFLAGS and CXXFLAGS to \
             '-mno-amx-tile -mno-amx-int8 -mno-amx-bf16', then `{remedy}` and build again",
            record.compiler
        ));
    }
    if record.answer == "left-out" && record.wanted {
        let why = if record.asked == "off" { "HOBBIT_AMX=off" } else { "it miscompiles tile configurations" };
        return Advice::Warn(format!("llama.cpp is built without AMX by {} ({why})", record.compiler));
    }
    Advice::Nothing
}

/// Whether any library in `directories` has ggml's AMX products in it.
pub fn is_in_libraries(directories: &[&Path]) -> bool {
    directories.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten().flatten().any(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.contains("ggml-cpu")
            && fs::read(entry.path()).is_ok_and(|bytes| contains(&bytes, b"ggml_backend_amx_mul_mat"))
    })
}

/// Compiles `probe.cpp` by `compiler` (a command with its flags), twice, to `object`, and looks for the mark.
pub fn probe(compiler: impl Fn() -> Command, source: &Path, object: &Path) -> io::Result<Probe> {
    let compile = |definition: Option<&str>| -> io::Result<Option<bool>> {
        let mut command = compiler();
        command.args(definition).args(["-O3", "-g0", "-fno-lto", "-mamx-tile", "-c"]).arg(source).arg("-o").arg(object);
        if !command.output()?.status.success() {
            return Ok(None);
        }
        let bytes = fs::read(object)?;
        fs::remove_file(object)?;
        Ok(Some(contains(&bytes, &0x5a5b_5c5d_u32.to_le_bytes())))
    };
    Ok(match (compile(Some("-DHOBBIT_AMX_CONTROL"))?, compile(None)?) {
        (None, _) => Probe::Unknown,
        (Some(true), Some(true)) => Probe::Right,
        _ => Probe::Wrong,
    })
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}
