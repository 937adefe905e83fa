//! Why a table was refused.

/// Why bytes are no path table, or not one of this model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathTableError {
    /// Something else.
    #[error(
        "not a path table: it begins with {found:02x?}, expected {expected:02x?}; make one with `gguf-tools profile --path-table FILE`"
    )]
    NotATable {
        /// The first bytes; fewer where there are no more.
        found: Vec<u8>,
        /// What a table begins with.
        expected: [u8; 4],
    },
    /// A table of another version of the format.
    #[error("path table of version {found}, expected {expected}; profile the model again with this build")]
    Version {
        /// Its version.
        found: u32,
        /// The version that can be read.
        expected: u32,
    },
    /// Larger than any table.
    #[error(
        "path table: {found} bytes, expected at most {limit}; profile the model again with fewer pairs, or this is no table"
    )]
    TooLong {
        /// Bytes there are.
        found: u64,
        /// The most that are read or written.
        limit: u64,
    },
    /// It ends too early, or has bytes behind its end.
    #[error("path table: {found} bytes, expected {expected}; it is damaged, profile the model again")]
    Length {
        /// Bytes there are.
        found: usize,
        /// How many it should be: at least so many where it is cut off.
        expected: usize,
    },
    /// Its bytes are not those that were written.
    #[error("path table: checksum {found:016x}, expected {expected:016x}; it is damaged, profile the model again")]
    Checksum {
        /// xxh3-64 of the bytes.
        found: u64,
        /// What was written.
        expected: u64,
    },
    /// Whole, but impossible.
    #[error("path table, layer {layer}: {what} is {found}, expected {expected}; profile the model again")]
    Malformed {
        /// Block number.
        layer: u16,
        /// Which number.
        what: &'static str,
        /// What it is.
        found: u64,
        /// What it should be.
        expected: String,
    },
    /// Made of another model.
    #[error("path table: {what}: found {found}, expected {expected}; it was made of another model, profile this one")]
    Shape {
        /// Which number.
        what: String,
        /// The table's.
        found: usize,
        /// The model's.
        expected: usize,
    },
}
