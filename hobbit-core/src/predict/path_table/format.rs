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
use crate::cursor::Cursor;
use crate::files;

const VERSION: u32 = 1;

/// Why bytes are not a path table of this model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathTableError {
    #[error("not a path table: it begins with {found:02x?}, expected {expected:02x?}")]
    NotATable { found: Vec<u8>, expected: [u8; 4] },
    #[error("path table of version {found}, expected {expected}; profile the model again with this build")]
    Version { found: u32, expected: u32 },
    #[error("path table: {found} bytes, expected at most {limit}; profile the model again with fewer pairs")]
    TooLong { found: u64, limit: u64 },
    #[error("path table: it is damaged, profile the model again")]
    Damaged,
    #[error("path table: {what}: found {found}, expected {expected}; it was made of another model, profile this one")]
    Shape { what: String, found: usize, expected: usize },
}

impl PathTable {
    pub const MAGIC: [u8; 4] = files::PATH_TABLE_MAGIC;

    /// The table's bytes, as a file or a pack may have them.
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
        let mut reader = Cursor(&bytes[PathTable::MAGIC.len()..]);
        let version = reader.u32().ok_or(PathTableError::Damaged)?;
        if version != VERSION {
            return Err(PathTableError::Version { found: version, expected: VERSION });
        }
        let (before, checksum) = bytes.split_last_chunk().ok_or(PathTableError::Damaged)?;
        let body = before.get(PathTable::MAGIC.len() + size_of::<u32>()..).ok_or(PathTableError::Damaged)?;
        if xxh3_64(before) != u64::from_le_bytes(*checksum) {
            return Err(PathTableError::Damaged);
        }
        read_layers(Cursor(body)).map(|layers| Self { layers }).ok_or(PathTableError::Damaged)
    }
}

fn check_len(found: u64) -> Result<(), PathTableError> {
    if found <= PathTable::BYTES_MAX {
        Ok(())
    } else {
        Err(PathTableError::TooLong { found, limit: PathTable::BYTES_MAX })
    }
}

/// `None` for numbers that no table has, or too few or too many bytes.
fn read_layers(mut reader: Cursor<'_>) -> Option<Vec<LayerTable>> {
    let mut layers: Vec<LayerTable> = Vec::new();
    for _ in 0..reader.u16()? {
        let layer = read_layer(&mut reader, layers.last())?;
        layers.push(layer);
    }
    reader.end(layers)
}

fn read_layer(reader: &mut Cursor<'_>, before: Option<&LayerTable>) -> Option<LayerTable> {
    let [layer, n_expert, k, n_rows] = [reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?];
    let [tokens, n_pairs] = [reader.u32()?, reader.u32()?];
    let n_before = before.map_or(0, |before| before.popularity.len());
    let is_sound = before.is_none_or(|before| layer > before.layer) && k <= n_expert && usize::from(n_rows) == n_before;
    let popularity = (0..n_expert).map(|_| reader.u32()).collect::<Option<Vec<u32>>>()?;
    let rows = (0..n_rows).map(|_| read_row(reader, n_expert)).collect::<Option<Vec<Row>>>()?;
    // No memory is reserved by an announced count: each pair is read first.
    let mut pairs: Vec<(u64, Row)> = Vec::new();
    for _ in 0..n_pairs {
        pairs.push((reader.u64()?, read_row(reader, n_expert)?));
    }
    let is_sound = is_sound && popularity.iter().all(|uses| *uses <= tokens) && pairs.is_sorted_by(|a, b| a.0 < b.0);
    is_sound.then_some(LayerTable { layer, k, tokens, popularity, rows, pairs })
}

fn read_row(reader: &mut Cursor<'_>, n_expert: u16) -> Option<Row> {
    let tokens = reader.u32()?;
    let n_next = reader.u16()?;
    let next = (0..n_next).map(|_| Some((reader.u16()?, reader.u32()?))).collect::<Option<Vec<(u16, u32)>>>()?;
    let mut experts: Vec<u16> = next.iter().map(|(expert, _)| *expert).collect();
    experts.sort_unstable();
    let are_experts = experts.is_sorted_by(|a, b| a < b) && experts.last().is_none_or(|last| *last < n_expert);
    let are_uses = next.iter().all(|(_, uses)| (1..=tokens).contains(uses)) && next.is_sorted_by(|a, b| a.1 >= b.1);
    (are_experts && are_uses).then_some(Row { tokens, next })
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
