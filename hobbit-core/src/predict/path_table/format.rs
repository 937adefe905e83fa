//! A path table as bytes, for packs and profiles.
//!
//! Little-endian, without gaps:
//!
//! | what | bytes |
//! |---|---|
//! | `hbPT` | 4 |
//! | version, 1 | 4 |
//! | number of layers | 2 |
//! | by layer: block number, experts, experts used, experts of the layer before (0: the first layer) | 2 each |
//! | tokens, number of pairs | 4 each |
//! | uses by expert | 4 each |
//! | by expert of the layer before: a row | |
//! | by pair of expert sets, ascending: key (8), and a row | |
//! | xxh3-64 of everything before | 8 |
//!
//! A row is its tokens (4), the number of experts (2), and for each of them, the most used first, expert (2) and uses
//! (4). A key is xxh3-64 of the number of experts two layers before and of the experts two layers and one layer
//! before, ascending, 2 bytes each.

use xxhash_rust::xxh3::xxh3_64;

use super::{LayerTable, PathTable, Row};
use crate::files;

const VERSION: u32 = 1;
const CHECKSUM_BYTES: usize = 8;

/// Why bytes are not a path table of this model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathTableError {
    #[error(
        "not a path table: it begins with {found:02x?}, expected {expected:02x?}; make one with `gguf-tools profile`"
    )]
    NotATable { found: Vec<u8>, expected: [u8; 4] },
    #[error("path table of version {found}, expected {expected}; profile the model again with this build")]
    Version { found: u32, expected: u32 },
    #[error("path table: {found} bytes, expected at most {limit}; profile the model again with fewer pairs")]
    TooLong { found: u64, limit: u64 },
    #[error("path table: {found} bytes, expected {expected}; it is damaged, profile the model again")]
    Length {
        found: usize,
        /// At least, if the file is truncated.
        expected: usize,
    },
    #[error("path table: checksum {found:016x}, expected {expected:016x}; it is damaged, profile the model again")]
    Checksum { found: u64, expected: u64 },
    #[error("path table, layer {layer}: {what} is {found}, expected {expected}; profile the model again")]
    Malformed { layer: u16, what: &'static str, found: u64, expected: String },
    #[error("path table: {what}: found {found}, expected {expected}; it was made of another model, profile this one")]
    Shape { what: String, found: usize, expected: usize },
}

impl PathTable {
    pub const MAGIC: [u8; 4] = files::PATH_TABLE_MAGIC;

    /// The table's bytes, as a file or a pack may have them.
    ///
    /// # Errors
    /// [`PathTableError::TooLong`], for limits far beyond the default ones.
    pub fn encode(&self) -> Result<Vec<u8>, PathTableError> {
        let bytes = self.to_bytes();
        check_len(bytes.len() as u64).map(|()| bytes)
    }

    /// The table's bytes, however many.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(PathTable::MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.layers.len() as u16).to_le_bytes());
        for layer in &self.layers {
            for number in [layer.layer, layer.popularity.len() as u16, layer.k, layer.rows.len() as u16] {
                bytes.extend(number.to_le_bytes());
            }
            bytes.extend(layer.tokens.to_le_bytes());
            bytes.extend((layer.pairs.len() as u32).to_le_bytes());
            layer.popularity.iter().for_each(|uses| bytes.extend(uses.to_le_bytes()));
            layer.rows.iter().for_each(|row| row.write(&mut bytes));
            for (key, row) in &layer.pairs {
                bytes.extend(key.to_le_bytes());
                row.write(&mut bytes);
            }
        }
        let checksum = xxh3_64(&bytes);
        bytes.extend(checksum.to_le_bytes());
        bytes
    }

    /// Reads the output of [`PathTable::to_bytes`]. Safe for hostile bytes: everything is checked, and no more memory
    /// is taken than a few times their number.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PathTableError> {
        if !bytes.starts_with(&PathTable::MAGIC) {
            let found = bytes[..bytes.len().min(PathTable::MAGIC.len())].to_vec();
            return Err(PathTableError::NotATable { found, expected: PathTable::MAGIC });
        }
        check_len(bytes.len() as u64)?;
        let mut reader = Reader { bytes, at: PathTable::MAGIC.len() };
        let version = reader.u32()?;
        if version != VERSION {
            return Err(PathTableError::Version { found: version, expected: VERSION });
        }
        let n_layers = reader.u16()?;
        let mut layers: Vec<LayerTable> = Vec::new();
        for _ in 0..n_layers {
            let layer = read_layer(&mut reader, layers.last())?;
            layers.push(layer);
        }
        let end = reader.at;
        let expected = reader.u64()?;
        if reader.at != bytes.len() {
            return Err(PathTableError::Length { found: bytes.len(), expected: end + CHECKSUM_BYTES });
        }
        let found = xxh3_64(&bytes[..end]);
        if found != expected {
            return Err(PathTableError::Checksum { found, expected });
        }
        Ok(Self { layers })
    }
}

fn check_len(found: u64) -> Result<(), PathTableError> {
    match found <= PathTable::BYTES_MAX {
        true => Ok(()),
        false => Err(PathTableError::TooLong { found, limit: PathTable::BYTES_MAX }),
    }
}

fn read_layer(reader: &mut Reader, before: Option<&LayerTable>) -> Result<LayerTable, PathTableError> {
    let layer = reader.u16()?;
    let malformed = |what, found: u64, expected: String| PathTableError::Malformed { layer, what, found, expected };
    let [n_expert, k, n_rows] = [reader.u16()?, reader.u16()?, reader.u16()?];
    let [tokens, n_pairs] = [reader.u32()?, reader.u32()?];
    if let Some(before) = before
        && layer <= before.layer
    {
        return Err(malformed("the block number", layer.into(), format!("more than {}", before.layer)));
    }
    if k > n_expert {
        return Err(malformed("the number of experts used", k.into(), format!("at most {n_expert}")));
    }
    let n_before = before.map_or(0, |before| before.popularity.len());
    if usize::from(n_rows) != n_before {
        return Err(malformed("the number of experts before", n_rows.into(), n_before.to_string()));
    }
    let popularity = (0..n_expert).map(|_| reader.u32()).collect::<Result<Vec<u32>, _>>()?;
    if let Some(&uses) = popularity.iter().find(|uses| **uses > tokens) {
        return Err(malformed("a number of uses", uses.into(), format!("at most {tokens}")));
    }
    let rows = (0..n_rows).map(|_| read_row(reader, layer, n_expert)).collect::<Result<Vec<Row>, _>>()?;
    // No memory is reserved by an announced count: each pair is read first.
    let mut pairs: Vec<(u64, Row)> = Vec::new();
    for _ in 0..n_pairs {
        let key = reader.u64()?;
        if let Some((last, _)) = pairs.last()
            && key <= *last
        {
            return Err(malformed("a key", key, format!("more than {last}")));
        }
        pairs.push((key, read_row(reader, layer, n_expert)?));
    }
    Ok(LayerTable { layer, k, tokens, popularity, rows, pairs })
}

fn read_row(reader: &mut Reader, layer: u16, n_expert: u16) -> Result<Row, PathTableError> {
    let malformed = |what, found: u64, expected: String| PathTableError::Malformed { layer, what, found, expected };
    let tokens = reader.u32()?;
    let n_next = reader.u16()?;
    let mut next: Vec<(u16, u32)> = Vec::new();
    let mut uses_max = tokens;
    for _ in 0..n_next {
        let (expert, uses) = (reader.u16()?, reader.u32()?);
        if expert >= n_expert {
            return Err(malformed("an expert", expert.into(), format!("less than {n_expert}")));
        }
        if !(1..=uses_max).contains(&uses) {
            return Err(malformed("a number of uses", uses.into(), format!("1 to {uses_max}")));
        }
        uses_max = uses;
        next.push((expert, uses));
    }
    let mut experts: Vec<u16> = next.iter().map(|(expert, _)| *expert).collect();
    experts.sort_unstable();
    match experts.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => Err(malformed("an expert", twice[0].into(), "each expert once in a row".into())),
        None => Ok(Row { tokens, next }),
    }
}

impl Row {
    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.tokens.to_le_bytes());
        bytes.extend((self.next.len() as u16).to_le_bytes());
        for (expert, uses) in &self.next {
            bytes.extend(expert.to_le_bytes());
            bytes.extend(uses.to_le_bytes());
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    /// At most the number of bytes.
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], PathTableError> {
        let Some((taken, _)) = self.bytes[self.at..].split_first_chunk::<N>() else {
            return Err(PathTableError::Length { found: self.bytes.len(), expected: self.at + N });
        };
        self.at += N;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, PathTableError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, PathTableError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, PathTableError> {
        self.take().map(u64::from_le_bytes)
    }
}
