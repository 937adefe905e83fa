//! Types of an expert's slices, and requested types.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::expert::SliceKind;
use crate::gguf::{ExpertClass, ExpertMap, ExpertTensor, GgmlType, LayerExperts};

/// The type of each slice of one version of an expert; `None` for kinds that the layer does not have. As JSON, an
/// object of tensor stems and ggml's names: `{"ffn_down_exps": "q3_K"}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "BTreeMap<String, String>", try_from = "BTreeMap<String, String>")]
pub struct SliceTypes([Option<GgmlType>; SliceKind::COUNT]);

/// Stands for "no such slice" in an index row; no ggml type will ever have this id.
const ABSENT: u8 = 0xff;

impl SliceTypes {
    pub fn get(&self, kind: SliceKind) -> Option<GgmlType> {
        self.0[kind.index()]
    }

    pub fn set(&mut self, kind: SliceKind, dtype: GgmlType) {
        self.0[kind.index()] = Some(dtype);
    }

    /// The present kinds with their types, in load order.
    pub fn iter(&self) -> impl Iterator<Item = (SliceKind, GgmlType)> {
        SliceKind::ALL.into_iter().filter_map(|kind| Some((kind, self.get(kind)?)))
    }

    /// The types that a layer's experts have.
    pub fn own(layer: &LayerExperts) -> Self {
        layer.tensors.iter().map(|t| (t.kind, t.dtype)).collect()
    }

    /// The types of a layer's experts lowered to `width`. Rows that are not whole blocks of it take a type with smaller
    /// blocks; slices that would not get smaller keep their type.
    pub fn lowered(layer: &LayerExperts, width: GgmlType) -> Self {
        let smaller = |t: &ExpertTensor| if is_lowered(t, width) { fitting(width, t.ne0) } else { t.dtype };
        layer.tensors.iter().map(|t| (t.kind, smaller(t))).collect()
    }

    /// The shape of a record with these types; `None` if a kind is missing or unexpected, or rows are not whole blocks.
    pub fn class(&self, layer: &LayerExperts) -> Option<ExpertClass> {
        if self.iter().count() != layer.tensors.len() {
            return None;
        }
        let slices: Option<Vec<_>> =
            layer.tensors.iter().map(|t| Some((t.kind, self.get(t.kind)?, t.ne0, t.ne1))).collect();
        ExpertClass::packed(slices?).filter(|class| i64::try_from(class.stride).is_ok())
    }

    /// Word of an index row: 8 bits per kind, the first in the lowest. `None` if an id has more bits.
    pub(super) fn to_word(self) -> Option<u64> {
        SliceKind::ALL.into_iter().try_fold(0, |word, kind| {
            let id = match self.get(kind) {
                Some(dtype) => u8::try_from(dtype.id()).ok().filter(|id| *id != ABSENT)?,
                None => ABSENT,
            };
            Some(word | u64::from(id) << (8 * kind.index()))
        })
    }

    /// Reads [`SliceTypes::to_word`]; `None` if a type is unknown or there are more bits than kinds.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let bytes = word.to_le_bytes();
        let mut types = Self::default();
        for kind in SliceKind::ALL {
            match bytes[kind.index()] {
                ABSENT => {}
                id => types.set(kind, GgmlType::from_id(u32::from(id))?),
            }
        }
        bytes[SliceKind::COUNT..].iter().all(|byte| *byte == 0).then_some(types)
    }
}

impl FromIterator<(SliceKind, GgmlType)> for SliceTypes {
    fn from_iter<I: IntoIterator<Item = (SliceKind, GgmlType)>>(iter: I) -> Self {
        let mut types = Self::default();
        iter.into_iter().for_each(|(kind, dtype)| types.set(kind, dtype));
        types
    }
}

impl From<SliceTypes> for BTreeMap<String, String> {
    fn from(types: SliceTypes) -> Self {
        types.iter().map(|(kind, dtype)| (kind.tensor_stem().to_owned(), dtype.name().to_owned())).collect()
    }
}

impl TryFrom<BTreeMap<String, String>> for SliceTypes {
    type Error = String;

    fn try_from(words: BTreeMap<String, String>) -> Result<Self, String> {
        let mut types = Self::default();
        for (stem, word) in words {
            let kind = SliceKind::ALL.into_iter().find(|kind| kind.tensor_stem() == stem);
            let kind = kind.ok_or_else(|| format!("unknown slice '{stem}'"))?;
            types.set(kind, GgmlType::try_from(word)?);
        }
        Ok(types)
    }
}

/// Requested types: one for all slices, with exceptions. Written `q2_k,down=q3_k`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeChoice {
    /// For slices without a type of their own.
    pub default: GgmlType,
    /// Exceptions.
    pub slices: SliceTypes,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TypeChoiceError {
    #[error("unknown type '{found}', expected a ggml type such as q2_k, q4_k, q8_0 or f16")]
    Type { found: String },
    #[error("unknown slice '{found}', expected gate, gate_up, up or down, as in q2_k,down=q3_k")]
    Slice { found: String },
    #[error("'{found}': expected TYPE, or TYPE,SLICE=TYPE as in q2_k,down=q3_k, each slice at most once")]
    Form { found: String },
}

/// Types of low versions, for slices whose usual type has too large blocks or saves nothing. They have 2 bits per
/// weight; Q2_0 has the smallest blocks.
const LOWEST: [&str; 2] = ["q2_K", "q2_0"];

impl TypeChoice {
    pub fn of(&self, kind: SliceKind) -> GgmlType {
        self.slices.get(kind).unwrap_or(self.default)
    }

    /// Types of low versions for these experts. HOBBIT's pairs are float16 with int4 and int8 with int2 (section 5.1),
    /// Fate's is int4 with int2 (section 4.5). Slices that would not get smaller, because their rows are no whole
    /// blocks of that type, have the first of `LOWEST` that fits.
    pub fn below(experts: &ExpertMap) -> Self {
        let tensors = || experts.layers.iter().flat_map(|layer| &layer.tensors);
        let usual = if tensors().all(|tensor| tensor.dtype.is_quantized()) { "q2_K" } else { "q4_0" };
        let usual = GgmlType::from_name(usual).expect("a type of ggml");
        let lowers = |kind, to: GgmlType| tensors().any(|tensor| tensor.kind == kind && is_lowered(tensor, to));
        let is_whole = |kind, to: GgmlType| {
            tensors().filter(|tensor| tensor.kind == kind).all(|tensor| to.row_bytes(tensor.ne0).is_some())
        };
        let of = |kind| {
            let others = LOWEST.iter().filter_map(|name| GgmlType::from_name(name));
            let mut others = others.filter(|to| is_whole(kind, *to) && lowers(kind, *to));
            if lowers(kind, usual) { usual } else { others.next().unwrap_or(usual) }
        };
        let present = SliceKind::ALL.into_iter().filter(|kind| tensors().any(|tensor| tensor.kind == *kind));
        let chosen: SliceTypes = present.map(|kind| (kind, of(kind))).collect();
        let default = chosen.iter().next().map_or(usual, |(_, first)| first);
        let slices = chosen.iter().filter(|(_, dtype)| *dtype != default).collect();
        Self { default, slices }
    }

    /// Whether any of these experts' slices gets smaller.
    pub fn lowers(&self, experts: &ExpertMap) -> bool {
        let mut tensors = experts.layers.iter().flat_map(|layer| &layer.tensors);
        tensors.any(|tensor| is_lowered(tensor, self.of(tensor.kind)))
    }
}

/// Whether a tensor gets smaller in `to`, or in the type that replaces it.
fn is_lowered(tensor: &ExpertTensor, to: GgmlType) -> bool {
    fitting(to, tensor.ne0).row_bytes(tensor.ne0) < tensor.dtype.row_bytes(tensor.ne0)
}

impl From<GgmlType> for TypeChoice {
    fn from(default: GgmlType) -> Self {
        Self { default, slices: SliceTypes::default() }
    }
}

/// `gate`, `gate_up`, `up` or `down`.
pub fn slice_name(kind: SliceKind) -> &'static str {
    kind.tensor_stem().trim_start_matches("ffn_").trim_end_matches("_exps")
}

impl FromStr for TypeChoice {
    type Err = TypeChoiceError;

    fn from_str(text: &str) -> Result<Self, TypeChoiceError> {
        let dtype =
            |word: &str| GgmlType::from_name(word).ok_or_else(|| TypeChoiceError::Type { found: word.to_owned() });
        let form = || TypeChoiceError::Form { found: text.to_owned() };
        let mut parts = text.split(',').map(str::trim);
        let mut choice = match parts.next() {
            Some(first) if !first.is_empty() && !first.contains('=') => Self::from(dtype(first)?),
            _ => return Err(form()),
        };
        for part in parts {
            let (slice, word) = part.split_once('=').ok_or_else(form)?;
            let kind = SliceKind::ALL.into_iter().find(|kind| slice_name(*kind) == slice.trim());
            let kind = kind.ok_or_else(|| TypeChoiceError::Slice { found: slice.trim().to_owned() })?;
            if choice.slices.get(kind).is_some() {
                return Err(form());
            }
            choice.slices.set(kind, dtype(word.trim())?);
        }
        Ok(choice)
    }
}

impl fmt::Display for TypeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.default.name())?;
        self.slices.iter().try_for_each(|(kind, dtype)| write!(f, ",{}={dtype}", slice_name(kind)))
    }
}

/// `wanted`, or llama-quantize's replacement where rows of `ne0` elements are not whole blocks of it
/// (`tensor_type_fallback` in llama-quant.cpp).
pub fn fitting(wanted: GgmlType, ne0: u64) -> GgmlType {
    if wanted.row_bytes(ne0).is_some() {
        return wanted;
    }
    let smaller_blocks = match wanted.name() {
        "tq1_0" | "tq2_0" => "q4_0",
        "iq2_xxs" | "iq2_xs" | "iq2_s" | "iq3_xxs" | "iq3_s" | "iq1_s" | "iq1_m" | "q2_K" | "q3_K" | "iq4_xs" => {
            "iq4_nl"
        }
        "q4_K" => "q5_0",
        "q5_K" => "q5_1",
        "q6_K" | "q8_K" => "q8_0",
        _ => "f16",
    };
    GgmlType::from_name(smaller_blocks).filter(|dtype| dtype.row_bytes(ne0).is_some()).unwrap_or(GgmlType::F16)
}

/// Short description of the types of many versions: `q8_0`, `q4_K,down=q6_K`, `q2_K/q4_K` where versions differ.
pub(super) fn describe<'a>(versions: impl Iterator<Item = &'a SliceTypes>) -> String {
    let mut counts: BTreeMap<SliceKind, BTreeMap<GgmlType, u64>> = BTreeMap::new();
    for (kind, dtype) in versions.flat_map(|types| types.iter().collect::<Vec<_>>()) {
        *counts.entry(kind).or_default().entry(dtype).or_default() += 1;
    }
    let words: Vec<(SliceKind, String)> = counts
        .into_iter()
        .map(|(kind, types)| {
            let mut types: Vec<_> = types.into_iter().collect();
            types.sort_by_key(|(dtype, n)| (std::cmp::Reverse(*n), *dtype));
            (kind, types.iter().map(|(dtype, _)| dtype.name()).collect::<Vec<_>>().join("/"))
        })
        .collect();
    let Some((_, first)) = words.first() else { return String::new() };
    let others = words.iter().filter(|(_, word)| word != first);
    others.fold(first.clone(), |text, (kind, word)| format!("{text},{}={word}", slice_name(*kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dtype(name: &str) -> GgmlType {
        GgmlType::from_name(name).unwrap()
    }

    #[test]
    fn choices_are_read_and_written() {
        let choice: TypeChoice = "q2_k, down=Q3_K".parse().unwrap();
        assert_eq!((choice.of(SliceKind::Gate), choice.of(SliceKind::Down)), (dtype("q2_K"), dtype("q3_K")));
        assert_eq!(choice.to_string(), "q2_K,down=q3_K");
        assert_eq!(choice.to_string().parse(), Ok(choice));
        for (text, part) in [
            ("", "expected TYPE"),
            ("q9_x", "unknown type 'q9_x'"),
            ("q2_k,q3_k", "SLICE=TYPE"),
            ("down=q3_k", "expected TYPE"),
            ("q2_k,side=q3_k", "unknown slice 'side'"),
            ("q2_k,up=q3_k,up=q4_k", "at most once"),
        ] {
            let message = text.parse::<TypeChoice>().unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn words_survive_and_wild_ones_are_refused() {
        let types = SliceTypes::from_iter([(SliceKind::Gate, GgmlType::F32), (SliceKind::Down, dtype("q2_K"))]);
        let word = types.to_word().unwrap();
        assert_eq!(word, 0x0aff_ff00);
        assert_eq!(SliceTypes::from_word(word), Some(types));
        for wild in [word | 1 << 32, word & !0xff | 4, word & !0xff | 0xfe, u64::MAX] {
            assert_eq!(SliceTypes::from_word(wild), None, "{wild:x}");
        }
        for dtype in GgmlType::all() {
            let types = SliceTypes::from_iter(SliceKind::ALL.map(|kind| (kind, dtype)));
            assert_eq!(types.to_word().and_then(SliceTypes::from_word), Some(types));
        }
    }

    #[test]
    fn short_rows_fall_back_as_in_llama_quantize() {
        for (wanted, ne0, expected) in [
            ("q2_K", 512, "q2_K"),
            ("q2_K", 96, "iq4_nl"),
            ("q4_K", 96, "q5_0"),
            ("q5_K", 96, "q5_1"),
            ("q6_K", 96, "q8_0"),
            ("q8_0", 96, "q8_0"),
            ("tq1_0", 32, "q4_0"),
            ("q2_K", 24, "f16"),
            ("q8_0", 24, "f16"),
        ] {
            assert_eq!(fitting(dtype(wanted), ne0).name(), expected, "{wanted} {ne0}");
        }
    }

    fn experts(slices: &[(&str, u64)]) -> ExpertMap {
        let kinds = [SliceKind::Gate, SliceKind::Down];
        let tensor = |(kind, &(name, ne0)): (SliceKind, &(&str, u64))| {
            let dtype = dtype(name);
            let slice_bytes = dtype.row_bytes(ne0).unwrap();
            let name = kind.tensor_stem().to_owned();
            ExpertTensor { kind, name, dtype, ne0, ne1: 1, n_expert: 1, file: 0, offset: 0, slice_bytes }
        };
        let tensors = kinds.into_iter().zip(slices).map(tensor).collect();
        ExpertMap { layers: vec![LayerExperts { layer: 0, n_expert: 1, tensors }] }
    }

    #[test]
    fn low_types_are_the_papers_pairs_where_rows_allow_it() {
        for (slices, expected) in [
            ([("f16", 256), ("f16", 512)], "q4_0"),
            ([("f32", 256), ("bf16", 256)], "q4_0"),
            ([("q8_0", 256), ("f16", 256)], "q4_0"),
            ([("q8_0", 256), ("q4_K", 512)], "q2_K"),
            ([("iq4_nl", 256), ("q8_0", 256)], "q2_K"),
            // Whole blocks of 256, or a type with smaller blocks that saves as much as iq4_nl does.
            ([("q8_0", 2880), ("q8_0", 1408)], "q2_K"),
            ([("mxfp4", 2880), ("mxfp4", 2880)], "q2_0"),
            ([("q4_K", 2048), ("q4_0", 1408)], "q2_K,down=q2_0"),
            ([("q4_0", 1408), ("q4_K", 2048)], "q2_0,down=q2_K"),
        ] {
            let experts = experts(&slices);
            let chosen = TypeChoice::below(&experts);
            assert_eq!(chosen.to_string(), expected, "{slices:?}");
            assert!(chosen.lowers(&experts), "{slices:?}");
        }
        let none = experts(&[("q2_0", 64), ("q2_0", 64)]);
        assert!(!TypeChoice::below(&none).lowers(&none));
        assert_eq!(TypeChoice::below(&ExpertMap { layers: Vec::new() }).to_string(), "q2_K");
    }

    #[test]
    fn descriptions_are_short() {
        let types =
            |gate, down| SliceTypes::from_iter([(SliceKind::Gate, dtype(gate)), (SliceKind::Down, dtype(down))]);
        assert_eq!(describe([types("q8_0", "q8_0")].iter()), "q8_0");
        let mixed = [types("q4_K", "q6_K"), types("q4_K", "q6_K"), types("q2_K", "q6_K")];
        assert_eq!(describe(mixed.iter()), "q4_K/q2_K,down=q6_K");
        assert_eq!(describe([].iter()), "");
    }
}
