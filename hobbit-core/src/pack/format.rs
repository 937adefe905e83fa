//! Names of the format and its index row. docs/PACK.md describes it byte by byte.

use std::fmt;
use std::str::FromStr;

use super::SliceTypes;
use crate::expert::{ExpertId, Extent, Precision, Version};

/// Version of the format, `hobbit.pack.version`.
pub const VERSION: u32 = 1;

/// Version of packs of bit planes. Readers of version 1 refuse them.
pub(crate) const VERSION_BIT_PLANES: u32 = 2;

/// Maximum number of experts, over all layers, and of their versions.
pub(super) const VERSIONS_MAX: u64 = 1 << 20;

pub(super) mod key {
    pub const VERSION: &str = "hobbit.pack.version";
    pub const KIND: &str = "hobbit.pack.kind";
    pub(crate) const HIGH: &str = "hobbit.pack.high";
    pub(crate) const LOW: &str = "hobbit.pack.low";
    pub(crate) const PLANES: &str = "hobbit.pack.nested";
    pub(crate) const SOURCE_NAME: &str = "hobbit.source.name";
    pub(crate) const SOURCE_SIZE: &str = "hobbit.source.size";
    pub(crate) const SOURCE_SHA256: &str = "hobbit.source.sha256";
    pub(crate) const SOURCE_FINGERPRINT: &str = "hobbit.source.fingerprint";
    pub(crate) const PLAIN_SHA256: &str = "hobbit.plain.sha256";
    pub const T1: &str = "hobbit.t1";
    pub const T2: &str = "hobbit.t2";
    pub(crate) const NORMS: &str = "hobbit.expert_norms";
    pub(crate) const MIXES: &str = "hobbit.mixes";
}

/// Reserved prefix of keys and tensors.
pub(super) const PREFIX: &str = "hobbit.";
/// The plain source's header, as stored, without padding.
pub(super) const HEADER: &str = "hobbit.header";
/// One [`Row`] per version.
pub(super) const INDEX: &str = "hobbit.index";
/// xxh3-64 of each ordinary tensor, then of [`HEADER`], [`INDEX`], of nothing, and of the pack's own header.
pub(super) const CHECKSUMS: &str = "hobbit.checksums";
/// Bytes of the source outside of its tensors, in packs of earlier programs.
pub(super) const GAPS: &str = "hobbit.gaps";

/// Checksums that follow those of the ordinary tensors.
pub(super) const OWN_CHECKSUMS: usize = 4;

/// Name of the tensor with a layer's records of a precision; bit planes of both precisions are in one tensor.
pub(super) fn records_name(layer: u16, precision: Precision, bit_planes: bool) -> String {
    if bit_planes { format!("blk.{layer}.ffn_exps.nested") } else { format!("blk.{layer}.ffn_exps.{precision}") }
}

/// Whether a tensor name of a plain model collides with the format's own names.
pub(super) fn is_reserved(name: &str) -> bool {
    let ends = [".ffn_exps.high", ".ffn_exps.low", ".ffn_exps.nested"];
    name.starts_with(PREFIX) || ends.iter().any(|end| name.ends_with(end))
}

/// Whether a pack works without a plain model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PackKind {
    #[default]
    Full,
    /// Only low-precision experts, for use beside the model.
    Low,
}

impl PackKind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Low => "low",
        }
    }
}

/// A SHA-256 digest; written in lower-case hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sha256(pub [u8; 32]);

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Sha256 {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let nibble = |c: u8| char::from(c).to_digit(16).ok_or(());
            *byte = (nibble(pair[0])? << 4 | nibble(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

/// A row of the index: one version of an expert, with its record. Stored as 8 little-endian 64-bit words:
///
/// | word | content |
/// |---|---|
/// | 0 | layer |
/// | 1 | expert |
/// | 2 | precision: 0 high, 1 low |
/// | 3 | first byte of the record, from the start of the file |
/// | 4 | bytes of the record |
/// | 5 | types, 8 bits per slice kind, 255 for none |
/// | 6 | xxh3-64 of the record |
/// | 7 | 0 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub version: Version,
    pub types: SliceTypes,
    /// Location of the record; file 0 is the pack. In bit planes, the version's own ones only: a high version is read
    /// from the low version's record and its own, which follows it.
    pub record: Extent,
    pub checksum: u64,
}

pub(super) const ROW_BYTES: usize = 64;

impl Row {
    /// `None` if a type's id does not fit into 8 bits.
    pub(super) fn encode(&self) -> Option<[u8; ROW_BYTES]> {
        let ExpertId { layer, index } = self.version.expert;
        let words = [
            u64::from(layer),
            u64::from(index),
            self.version.precision.index() as u64,
            self.record.offset,
            self.record.len,
            self.types.to_word()?,
            self.checksum,
            0,
        ];
        words.map(u64::to_le_bytes).as_flattened().try_into().ok()
    }

    /// # Errors
    /// The invalid field, its value, and the expected value.
    pub(super) fn decode(bytes: &[u8; ROW_BYTES]) -> Result<Self, (&'static str, u64, &'static str)> {
        let (words, _) = bytes.as_chunks();
        let [layer, index, ordinal, offset, len, types, checksum, rest] =
            std::array::from_fn(|i| u64::from_le_bytes(words[i]));
        let short = |value, what| u16::try_from(value).map_err(|_| (what, value, "fewer than 65536"));
        let expert = ExpertId { layer: short(layer, "layer")?, index: short(index, "expert")? };
        let precision = Precision::ALL.into_iter().find(|precision| precision.index() as u64 == ordinal);
        let precision = precision.ok_or(("precision", ordinal, "0 or 1"))?;
        let types = SliceTypes::from_word(types).ok_or(("types", types, "ids of known ggml types"))?;
        if rest != 0 {
            return Err(("last word", rest, "0"));
        }
        let record = Extent { file: 0, offset, len };
        Ok(Self { version: Version { expert, precision }, types, record, checksum })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::SliceKind;
    use crate::gguf::GgmlType;

    #[test]
    fn rows_survive() {
        let row = Row {
            version: Version::low(ExpertId { layer: 3, index: 65535 }),
            record: Extent { file: 0, offset: 1 << 40, len: 8192 },
            types: SliceTypes::from_iter([(SliceKind::Up, GgmlType::Q8_0), (SliceKind::Down, GgmlType::F16)]),
            checksum: u64::MAX,
        };
        let bytes = row.encode().unwrap();
        assert_eq!(Row::decode(&bytes), Ok(row));
        for (word, what) in [(0, "layer"), (1, "expert"), (2, "precision"), (5, "types"), (7, "last word")] {
            let mut wild = bytes;
            wild[8 * word + 7] = 1;
            assert_eq!(Row::decode(&wild).unwrap_err().0, what);
        }
    }

    #[test]
    fn digests_are_read_and_written() {
        let digest = Sha256(std::array::from_fn(|i| (i * 37) as u8));
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for bad in ["", "00", &"g".repeat(64), &"0".repeat(63), &"é".repeat(32)] {
            assert!(bad.parse::<Sha256>().is_err(), "{bad}");
        }
    }
}
