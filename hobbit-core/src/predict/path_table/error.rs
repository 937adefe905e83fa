//! Why a table was refused.

/// Why bytes are no path table, or not one of this model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathTableError {
    /// Something else.
    #[error(
        "not a path table: it begins with {found:02x?}, expected {expected:02x?}; make one with `gguf-tools profile`"
    )]
    NotATable { found: Vec<u8>, expected: [u8; 4] },
    /// A table of another version of the format.
    #[error("path table of version {found}, expected {expected}; profile the model again with this build")]
    Version { found: u32, expected: u32 },
    /// Larger than any table.
    #[error(
        "path table: {found} bytes, expected at most {limit}; profile the model again with fewer pairs, or this is no table"
    )]
    TooLong { found: u64, limit: u64 },
    /// It ends too early, or has bytes behind its end.
    #[error("path table: {found} bytes, expected {expected}; it is damaged, profile the model again")]
    Length {
        found: usize,
        /// How many it should be: at least so many where it is cut off.
        expected: usize,
    },
    /// Its bytes are not those that were written.
    #[error("path table: checksum {found:016x}, expected {expected:016x}; it is damaged, profile the model again")]
    Checksum { found: u64, expected: u64 },
    /// Whole, but impossible.
    #[error("path table, layer {layer}: {what} is {found}, expected {expected}; profile the model again")]
    Malformed { layer: u16, what: &'static str, found: u64, expected: String },
    /// Made of another model.
    #[error("path table: {what}: found {found}, expected {expected}; it was made of another model, profile this one")]
    Shape { what: String, found: usize, expected: usize },
}
