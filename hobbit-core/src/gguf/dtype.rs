//! Tensor types: block and byte sizes as in llama.cpp's `type_traits` (ggml.c) and `enum ggml_type` (ggml.h).

use std::fmt;

/// Type of a tensor's elements. Only ids of current llama.cpp can be constructed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub struct GgmlType(u32);

struct Traits {
    id: u32,
    name: &'static str,
    block_size: u64,
    type_size: u64,
}

const fn traits(id: u32, name: &'static str, block_size: u64, type_size: u64) -> Traits {
    Traits { id, name, block_size, type_size }
}

/// Ascending by id. Sizes: elements per block, bytes per block.
const TABLE: &[Traits] = &[
    traits(0, "f32", 1, 4),
    traits(1, "f16", 1, 2),
    traits(2, "q4_0", 32, 18),
    traits(3, "q4_1", 32, 20),
    traits(6, "q5_0", 32, 22),
    traits(7, "q5_1", 32, 24),
    traits(8, "q8_0", 32, 34),
    traits(9, "q8_1", 32, 36),
    traits(10, "q2_K", 256, 84),
    traits(11, "q3_K", 256, 110),
    traits(12, "q4_K", 256, 144),
    traits(13, "q5_K", 256, 176),
    traits(14, "q6_K", 256, 210),
    traits(15, "q8_K", 256, 292),
    traits(16, "iq2_xxs", 256, 66),
    traits(17, "iq2_xs", 256, 74),
    traits(18, "iq3_xxs", 256, 98),
    traits(19, "iq1_s", 256, 50),
    traits(20, "iq4_nl", 32, 18),
    traits(21, "iq3_s", 256, 110),
    traits(22, "iq2_s", 256, 82),
    traits(23, "iq4_xs", 256, 136),
    traits(24, "i8", 1, 1),
    traits(25, "i16", 1, 2),
    traits(26, "i32", 1, 4),
    traits(27, "i64", 1, 8),
    traits(28, "f64", 1, 8),
    traits(29, "iq1_m", 256, 56),
    traits(30, "bf16", 1, 2),
    traits(34, "tq1_0", 256, 54),
    traits(35, "tq2_0", 256, 66),
    traits(39, "mxfp4", 32, 17),
    traits(40, "nvfp4", 64, 36),
    traits(41, "q1_0", 128, 18),
    traits(42, "q2_0", 64, 18),
];

/// Types that only the fork ik_llama.cpp has. Their files are common, and their extension is the same.
const FORK: &[(u32, &str)] = &[
    (133, "Q6_0"),
    (134, "IQ1_BN"),
    (135, "IQ2_BN"),
    (136, "Q8_K64"),
    (137, "IQ2_K"),
    (138, "IQ3_K"),
    (139, "IQ4_K"),
    (140, "IQ5_K"),
    (141, "IQ6_K"),
    (144, "IQ4_KS"),
    (145, "IQ2_KS"),
    (146, "IQ4_KSS"),
    (151, "Q8_KV"),
    (152, "IQ5_KS"),
    (153, "IQ2_KT"),
    (154, "IQ3_KT"),
    (155, "IQ4_KT"),
    (156, "IQ3_KS"),
    (157, "IQ2_KL"),
    (158, "IQ1_KT"),
];

/// Added to a type's id in that fork if its rows are interleaved.
const FORK_ROWS: u32 = 200;

impl GgmlType {
    /// 32-bit float.
    pub const F32: Self = Self(0);
    /// 16-bit float.
    pub const F16: Self = Self(1);
    /// 4 bits, one f16 scale per 32 elements.
    pub const Q4_0: Self = Self(2);
    /// 4 bits, a scale and a minimum, both f16, per 32 elements.
    pub const Q4_1: Self = Self(3);
    /// 8 bits, one f16 scale per 32 elements.
    pub const Q8_0: Self = Self(8);
    /// 4 bits that name one of 16 values, one f16 scale per 32 elements.
    pub const IQ4_NL: Self = Self(20);
    /// Signed bytes; packs keep records in it.
    pub const I8: Self = Self(24);
    /// 32-bit integers.
    pub const I32: Self = Self(26);
    /// 64-bit integers.
    pub const I64: Self = Self(27);
    /// 16-bit brain float.
    pub const BF16: Self = Self(30);
    /// 4-bit floats, one exponent per 32 elements.
    pub const MXFP4: Self = Self(39);

    /// The type with this id in `enum ggml_type`; `None` if unknown or removed.
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.binary_search_by_key(&id, |t| t.id).ok().map(|_| Self(id))
    }

    /// The type with this name, in any case: `"q8_0"`, `"Q4_K"`.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|t| t.name.eq_ignore_ascii_case(name)).map(|t| Self(t.id))
    }

    /// Every type, ascending by id.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|t| Self(t.id))
    }

    /// Id in `enum ggml_type`, as stored in files.
    pub const fn id(self) -> u32 {
        self.0
    }

    /// Name as llama.cpp writes it.
    pub fn name(self) -> &'static str {
        self.traits().name
    }

    /// Elements per block.
    pub fn block_size(self) -> u64 {
        self.traits().block_size
    }

    /// Bytes per block.
    pub fn type_size(self) -> u64 {
        self.traits().type_size
    }

    /// More than one element per block.
    pub fn is_quantized(self) -> bool {
        self.traits().block_size > 1
    }

    /// Bytes of a row of `ne0` elements; `None` if `ne0` is no whole number of blocks or the size overflows.
    pub fn row_bytes(self, ne0: u64) -> Option<u64> {
        let &Traits { block_size, type_size, .. } = self.traits();
        if ne0.is_multiple_of(block_size) { (ne0 / block_size).checked_mul(type_size) } else { None }
    }

    /// Bytes of a tensor of shape `dims` (fastest first); `None` as for [`GgmlType::row_bytes`].
    pub fn tensor_bytes(self, dims: &[u64]) -> Option<u64> {
        let (ne0, rest) = dims.split_first()?;
        rest.iter().try_fold(self.row_bytes(*ne0)?, |bytes, ne| bytes.checked_mul(*ne))
    }

    /// Why an id is not in the table: the type's name, and what to use instead.
    pub(super) fn describe_missing(id: u32) -> (String, &'static str) {
        let name_of = |id: u32| FORK.iter().find(|(known, _)| *known == id).map(|(_, name)| *name);
        // Types with interleaved rows have the plain type's id plus 200.
        let fork = name_of(id).map(str::to_owned).or_else(|| {
            let plain = id.checked_sub(FORK_ROWS).filter(|id| *id < FORK_ROWS)?;
            let name = name_of(plain).or_else(|| Self::from_id(plain).map(Self::name))?;
            Some(format!("{} with interleaved rows", name.to_uppercase()))
        });
        if let Some(name) = fork {
            let remedy = "fetch a quantisation for llama.cpp instead, such as Q4_K_M or IQ4_XS";
            return (format!("{name} of ik_llama.cpp"), remedy);
        }
        let (found, remedy) = match id {
            4 | 5 => ("removed Q4_2/Q4_3", "quantise the model again"),
            31..=33 => ("removed Q4_0_4_4/4_8/8_8", "use the Q4_0 file, it is repacked at run time"),
            36..=38 => ("removed IQ4_NL_4_4/4_8/8_8", "use the IQ4_NL file, it is repacked at run time"),
            _ => ("unknown", "the file is damaged or newer than this build, update or use another quantisation"),
        };
        (found.to_owned(), remedy)
    }

    fn traits(self) -> &'static Traits {
        let i = TABLE.binary_search_by_key(&self.0, |t| t.id).expect("constructors admit only ids of the table");
        &TABLE[i]
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<GgmlType> for &'static str {
    fn from(dtype: GgmlType) -> Self {
        dtype.name()
    }
}

impl TryFrom<String> for GgmlType {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        Self::from_name(&name).ok_or_else(|| format!("unknown type '{name}'"))
    }
}

impl fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_names_are_unique() {
        assert!(TABLE.windows(2).all(|w| w[0].id < w[1].id));
        for t in TABLE {
            assert_eq!(GgmlType::from_name(t.name), Some(GgmlType(t.id)));
            assert_eq!(GgmlType::from_name(&t.name.to_uppercase()), Some(GgmlType(t.id)));
            assert_eq!(GgmlType::from_id(t.id).map(GgmlType::name), Some(t.name));
        }
        assert_eq!(TABLE.len(), 43 - 8, "GGML_TYPE_COUNT less the removed ids");
    }

    #[test]
    fn removed_and_future_ids_are_refused() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(GgmlType::from_id(id), None, "{id}");
        }
        assert_eq!(GgmlType::from_name("q9_9"), None);
    }

    #[test]
    fn types_of_ik_llama_cpp_are_named() {
        let of = |id: u32| GgmlType::describe_missing(id);
        for (id, name) in [(137, "IQ2_K"), (139, "IQ4_K"), (144, "IQ4_KS"), (202, "Q4_0 with"), (339, "IQ4_K with")] {
            let (found, remedy) = of(id);
            assert!(found.starts_with(name) && found.ends_with("of ik_llama.cpp"), "{id}: {found}");
            assert!(remedy.contains("Q4_K_M"), "{remedy}");
            assert_eq!(GgmlType::from_id(id), None);
        }
        for id in [4, 31, 36, 43, 132, 399, 1000] {
            assert!(!of(id).0.contains("ik_llama"), "{id}");
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        let q4_k = GgmlType::from_name("q4_k").unwrap();
        assert_eq!(q4_k.row_bytes(4096), Some(4096 / 256 * 144));
        assert_eq!(q4_k.row_bytes(0), Some(0));
        assert_eq!(q4_k.row_bytes(255), None);
        assert_eq!(GgmlType::Q8_0.row_bytes(64), Some(68));
        assert_eq!(GgmlType::F32.row_bytes(u64::MAX), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[4, 3, 2]), Some(96));
        assert_eq!(GgmlType::F32.tensor_bytes(&[1 << 40, 1 << 40]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[u64::MAX / 8, 0]), Some(0));
    }
}
