//! Where the bundled demo model is.

use std::path::{Path, PathBuf};

/// Variable with another path of the demo model.
pub const VARIABLE: &str = "HOBBIT_DEMO_MODEL";

const FILE: &str = "models/demo.gguf";

/// The first candidate that exists for a program in the file `executable`; `None` if there is none. A `named` one, from
/// [`VARIABLE`], admits no other. `is_release`: look in no directory of the machine that built the program.
///
/// # Errors
/// The named model does not exist.
pub fn find(
    named: Option<PathBuf>,
    executable: Option<PathBuf>,
    is_release: bool,
    exists: impl Fn(&Path) -> bool,
) -> Result<Option<PathBuf>, String> {
    if let Some(named) = named {
        return if exists(&named) {
            Ok(Some(named))
        } else {
            Err(format!("{}: the demo model that {VARIABLE} names does not exist", named.display()))
        };
    }
    let beside = executable.iter().flat_map(|file| file.ancestors().skip(1)).map(|dir| dir.join(FILE));
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|root| root.join(FILE));
    let source = checkout.filter(|_| !is_release);
    Ok(beside.chain(source).chain([PathBuf::from(FILE)]).find(|path| exists(path)))
}

/// The demo model of this process.
///
/// # Errors
/// As [`find`].
pub fn of_this_process(is_release: bool) -> Result<Option<PathBuf>, String> {
    find(std::env::var_os(VARIABLE).map(PathBuf::from), std::env::current_exe().ok(), is_release, Path::is_file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(named: Option<&str>, exists: impl Fn(&Path) -> bool) -> Result<Option<PathBuf>, String> {
        find(named.map(PathBuf::from), Some("/opt/hobbit/bin/hobbit-cli".into()), false, exists)
    }

    #[test]
    fn nearest_to_the_program_wins() {
        let found = search(None, |path| path.starts_with("/opt"));
        assert_eq!(found, Ok(Some("/opt/hobbit/bin/models/demo.gguf".into())));
        let found = search(None, |path| path == Path::new("/opt/hobbit/models/demo.gguf"));
        assert_eq!(found, Ok(Some("/opt/hobbit/models/demo.gguf".into())));
        let found = search(None, |path| path.is_relative());
        assert_eq!(found, Ok(Some("models/demo.gguf".into())));
        assert_eq!(search(None, |_| false), Ok(None));
    }

    #[test]
    fn a_named_file_is_the_only_candidate() {
        assert_eq!(search(Some("x.gguf"), |_| true), Ok(Some("x.gguf".into())));
        assert!(search(Some("x.gguf"), |path| path != Path::new("x.gguf")).unwrap_err().contains("x.gguf"));
    }
}
