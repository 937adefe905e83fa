//! The types of an expert's slices at a width.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::expert::SliceKind;
use crate::gguf::{ExpertClass, GgmlType, LayerExperts};
use crate::pack::fitting;

/// The type of each slice of an expert, by [`SliceKind::index`]; `None` for kinds that the layer has not. As JSON an object
/// of tensor stems and ggml's names: `{"ffn_down_exps": "q3_K"}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "BTreeMap<String, String>", try_from = "BTreeMap<String, String>")]
pub struct SliceTypes(pub [Option<GgmlType>; SliceKind::COUNT]);

impl SliceTypes {
    /// The types that a layer's experts have.
    pub fn own(layer: &LayerExperts) -> Self {
        Self::by(layer, |_, own, _| own)
    }

    /// The types of a layer's experts lowered to `width`: rows that are no whole blocks of it take a type of smaller
    /// blocks, and what would not get smaller stays as it is.
    pub fn lowered(layer: &LayerExperts, width: GgmlType) -> Self {
        Self::by(layer, |_, own, ne0| {
            let lower = fitting(width, ne0);
            if lower.row_bytes(ne0) < own.row_bytes(ne0) { lower } else { own }
        })
    }

    fn by(layer: &LayerExperts, choose: impl Fn(SliceKind, GgmlType, u64) -> GgmlType) -> Self {
        let mut types = Self::default();
        for tensor in &layer.tensors {
            types.0[tensor.kind.index()] = Some(choose(tensor.kind, tensor.dtype, tensor.ne0));
        }
        types
    }

    /// The type of this slice.
    pub fn get(&self, kind: SliceKind) -> Option<GgmlType> {
        self.0[kind.index()]
    }

    /// Bytes of an expert's record in a pack: each slice begins at a block border. `None` unless the layer has exactly
    /// these slices and its rows are whole blocks.
    pub fn record_bytes(&self, layer: &LayerExperts) -> Option<u64> {
        if self.0.iter().flatten().count() != layer.tensors.len() {
            return None;
        }
        let slices: Option<Vec<_>> =
            layer.tensors.iter().map(|t| Some((t.kind, self.get(t.kind)?, t.ne0, t.ne1))).collect();
        Some(ExpertClass::packed(slices?)?.stride)
    }
}

impl From<SliceTypes> for BTreeMap<String, String> {
    fn from(types: SliceTypes) -> Self {
        let there = SliceKind::ALL.into_iter().filter_map(|kind| Some((kind, types.get(kind)?)));
        there.map(|(kind, dtype)| (kind.tensor_stem().to_owned(), dtype.name().to_owned())).collect()
    }
}

impl TryFrom<BTreeMap<String, String>> for SliceTypes {
    type Error = String;

    fn try_from(words: BTreeMap<String, String>) -> Result<Self, String> {
        let mut types = Self::default();
        for (stem, word) in words {
            let kind = SliceKind::ALL.into_iter().find(|kind| kind.tensor_stem() == stem);
            let kind = kind.ok_or_else(|| format!("unknown slice '{stem}'"))?;
            types.0[kind.index()] = Some(GgmlType::from_name(&word).ok_or_else(|| format!("unknown type '{word}'"))?);
        }
        Ok(types)
    }
}

/// A type by ggml's name.
pub(super) mod name {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::gguf::GgmlType;

    pub fn serialize<S: Serializer>(dtype: &GgmlType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(dtype.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<GgmlType, D::Error> {
        let word = String::deserialize(deserializer)?;
        GgmlType::from_name(&word).ok_or_else(|| serde::de::Error::custom(format!("unknown type '{word}'")))
    }
}
