//! The bundled model that runs when none is named.

use std::path::{Path, PathBuf};

/// Variable with another path of the demo model.
pub const VARIABLE: &str = "HOBBIT_DEMO_MODEL";
/// Begins a text that the demo model can continue.
pub const PROMPT: &str = "In the beginning God created the";
/// Tokens it generates when no number is given.
pub const PREDICT: i32 = 64;

/// A text beside the demo model that it has never seen.
pub const TEXT: &str = "demo-heldout-prose.txt";

const FILE: &str = "models/demo.gguf";

/// The first candidate that exists for a program in the file `executable`. A `named` one, from [`VARIABLE`], admits no
/// other.
pub fn find(
    named: Option<PathBuf>,
    executable: Option<PathBuf>,
    exists: impl Fn(&Path) -> bool,
) -> Result<PathBuf, String> {
    if let Some(named) = named {
        return if exists(&named) {
            Ok(named)
        } else {
            Err(format!("{}: the demo model that {VARIABLE} names does not exist", named.display()))
        };
    }
    let beside = executable.iter().flat_map(|file| file.ancestors().skip(1)).map(|dir| dir.join(FILE));
    // Releases have the model beside the program, and no path of the machine that built them.
    let is_release = cfg!(feature = "dynamic-backends");
    let source = (!is_release).then(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE));
    beside.chain(source).chain([PathBuf::from(FILE)]).find(|path| exists(path)).ok_or_else(|| {
        format!(
            "no model given: give a file with -m FNAME, or let hobbit fetch one of the Hub, for example -hf \
             ggml-org/gpt-oss-20b-GGUF; {VARIABLE} may name hobbit's demo model"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(named: Option<&str>, exists: impl Fn(&Path) -> bool) -> Result<PathBuf, String> {
        find(named.map(PathBuf::from), Some("/opt/hobbit/bin/hobbit-cli".into()), exists)
    }

    #[test]
    fn nearest_to_the_program_wins() {
        let found = search(None, |path| path.starts_with("/opt"));
        assert_eq!(found, Ok("/opt/hobbit/bin/models/demo.gguf".into()));
        let found = search(None, |path| path == Path::new("/opt/hobbit/models/demo.gguf"));
        assert_eq!(found, Ok("/opt/hobbit/models/demo.gguf".into()));
        let found = search(None, |path| path.is_relative());
        assert_eq!(found, Ok("models/demo.gguf".into()));
    }

    #[test]
    fn a_named_file_is_the_only_candidate() {
        assert_eq!(search(Some("x.gguf"), |_| true), Ok("x.gguf".into()));
        assert!(search(Some("x.gguf"), |path| path != Path::new("x.gguf")).unwrap_err().contains("x.gguf"));
    }

    #[test]
    fn the_error_names_the_remedy() {
        let error = search(None, |_| false).unwrap_err();
        assert!(error.contains("-m FNAME") && error.contains(VARIABLE), "{error}");
    }
}
