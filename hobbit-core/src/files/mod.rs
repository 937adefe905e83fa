//! Rules for the user's files.
//!
//! * [`outputs`]: no file that the run reads, and none of another kind, is overwritten;
//! * [`mod@replace`]: files are written whole or not at all;
//! * [`sole`]: one process writes a partial file;
//! * [`capped`]: files are read up to a limit;
//! * [`state`]: a replaced or changed file is noticed.
//!
//! Links under names that we make up are not followed.

pub mod capped;
pub mod outputs;
pub mod replace;
pub mod sole;
pub mod state;

pub use outputs::{BASE_MAGIC, PATH_TABLE_MAGIC, TRACE_MAGIC};
pub use outputs::{Input, Kind, Output, OutputError, SEQUENCE_MAGIC, check, create, overwrite, try_overwriting};
pub use replace::{new_beside, replace, try_replacing};
pub use state::FileState;

use std::path::{Path, PathBuf};

/// `path` with `suffix` after its whole name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Directory of the file at `path`, which need not exist.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
