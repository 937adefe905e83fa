//! What programs may do to files of the user's: what they write over, how they replace, how much they read.
//!
//! * [`outputs`]: nothing is written over a file that the run reads, or over one of another kind. Every program and every
//!   writer asks here;
//! * [`mod@replace`]: files that are written whole or not at all;
//! * `sole`: partial files that only one process writes;
//! * [`capped`]: files that are read whole, up to a limit;
//! * [`state`]: by which a file is known again.
//!
//! No name that we make up is followed if it is a link.

pub mod capped;
pub mod outputs;
pub mod replace;
pub mod sole;
pub mod state;

pub use outputs::{BASE_MAGIC, PATH_TABLE_MAGIC, TRACE_MAGIC};
pub use outputs::{Input, Kind, Output, OutputError, SEQUENCE_MAGIC, check, create, overwrite, try_overwriting};
pub use replace::{replace, try_replacing};
pub use state::FileState;

use std::path::{Path, PathBuf};

/// `path` with `suffix` after its whole name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Where the file at `path` is, or will be.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
