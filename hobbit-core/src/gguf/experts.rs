//! Finds a model's experts by tensor names alone, so that all architectures work whose experts llama.cpp keeps in
//! `ffn_*_exps` tensors.

use super::{GgmlType, Gguf, GgufError, TensorInfo};
use crate::expert::{Extent, SliceKind};

/// A model's expert weights, by layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertMap {
    /// Layers with experts, ascending; empty for a dense model.
    pub layers: Vec<LayerExperts>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerExperts {
    /// Block number.
    pub layer: u16,
    pub n_expert: u32,
    /// At least `up` (or `gate_up`) and `down`, sorted by [`SliceKind`].
    pub tensors: Vec<ExpertTensor>,
}

/// One matrix (gate, up or down) of all experts of a layer, `[ne0, ne1, n_expert]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertTensor {
    pub kind: SliceKind,
    pub name: String,
    pub dtype: GgmlType,
    /// Row length in elements.
    pub ne0: u64,
    /// Rows per expert.
    pub ne1: u64,
    pub n_expert: u32,
    /// Index into [`Gguf::files`].
    pub file: u32,
    /// First byte of expert 0, from the start of the file.
    pub offset: u64,
    /// Bytes per expert; experts follow each other without gaps.
    pub slice_bytes: u64,
}

impl ExpertTensor {
    /// The bytes of expert `index`.
    ///
    /// # Panics
    /// If `index` is not below `n_expert`.
    pub fn extent(&self, index: u16) -> Extent {
        assert!(u32::from(index) < self.n_expert, "expert {index} of {} in {}", self.n_expert, self.name);
        let offset = self.offset + u64::from(index) * self.slice_bytes;
        Extent { file: self.file, offset, len: self.slice_bytes }
    }
}

impl LayerExperts {
    pub fn tensor(&self, kind: SliceKind) -> Option<&ExpertTensor> {
        self.tensors.iter().find(|t| t.kind == kind)
    }

    pub fn expert_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.slice_bytes).sum()
    }

    /// Bytes of all experts of the layer.
    pub fn bytes(&self) -> u64 {
        self.expert_bytes() * u64::from(self.n_expert)
    }
}

impl ExpertMap {
    /// A model without experts.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The experts of block `layer`, if it has any.
    pub fn layer(&self, layer: u16) -> Option<&LayerExperts> {
        self.layers.binary_search_by_key(&layer, |l| l.layer).ok().map(|i| &self.layers[i])
    }

    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(LayerExperts::bytes).sum()
    }

    /// Expert bytes of a token that uses `n_used` experts of each layer.
    pub fn bytes_per_token(&self, n_used: impl Fn(u16) -> u32) -> u64 {
        self.layers.iter().map(|l| l.expert_bytes() * u64::from(n_used(l.layer).min(l.n_expert))).sum()
    }
}

/// Layer and kind if `name` is an expert weight: `blk.<l>.ffn_(gate|gate_up|up|down)_exps.weight`.
pub(crate) fn parse_name(name: &str) -> Option<(u16, SliceKind)> {
    let (layer, stem) = name.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
    let canonical = layer == "0" || (!layer.starts_with('0') && layer.bytes().all(|b| b.is_ascii_digit()));
    let kind = SliceKind::ALL.into_iter().find(|k| k.tensor_stem() == stem)?;
    if canonical { Some((layer.parse().ok()?, kind)) } else { None }
}

/// Whether `name` is a weight of one expert alone, `blk.<l>.ffn_(gate|up|down).<expert>.weight`: the format of files
/// from before April 2024.
fn is_of_one_expert(name: &str) -> bool {
    let stem = || name.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.').map(|(_, stem)| stem);
    let number = |stem: &str| {
        let number = ["ffn_gate.", "ffn_up.", "ffn_down."].iter().find_map(|kind| stem.strip_prefix(kind))?;
        number.parse::<u16>().ok()
    };
    stem().and_then(number).is_some()
}

impl Gguf {
    /// The model's experts. A layer's expert tensors must be complete, and their shapes must fit each other and
    /// `<architecture>.expert_count`.
    pub fn experts(&self) -> Result<ExpertMap, GgufError> {
        if let Some(info) = self.tensors.iter().find(|info| is_of_one_expert(&info.name)) {
            let reason = format!(
                "each expert has tensors of its own ('{}'), as in files from before April 2024, which llama.cpp no \
                 longer reads; fetch a newer file of the model, or convert it again from the original weights",
                info.name
            );
            return Err(GgufError::refused(&self.files[info.extent.file as usize].path, reason));
        }
        let mut all = Vec::new();
        for info in &self.tensors {
            if let Some((layer, kind)) = parse_name(&info.name) {
                all.push((layer, self.expert_tensor(kind, info)?));
            }
        }
        all.sort_by_key(|(layer, tensor)| (*layer, tensor.kind));
        let mut map = ExpertMap::default();
        for (layer, tensor) in all {
            match map.layers.last_mut() {
                Some(last) if last.layer == layer => last.tensors.push(tensor),
                _ => map.layers.push(LayerExperts { layer, n_expert: tensor.n_expert, tensors: vec![tensor] }),
            }
        }
        let expert_count = self.metadata.get_u64(&format!("{}.expert_count", self.architecture()));
        for layer in &map.layers {
            self.check_layer(layer, expert_count)?;
        }
        Ok(map)
    }

    fn expert_tensor(&self, kind: SliceKind, info: &TensorInfo) -> Result<ExpertTensor, GgufError> {
        let fault =
            |what, expected: &str| self.expert_fault(info, what, format!("{:?}", info.dims), expected.to_owned());
        let &[ne0, ne1, n_expert] = info.dims.as_slice() else {
            return Err(fault("shape", "three dimensions"));
        };
        if ne0 == 0 || ne1 == 0 {
            return Err(fault("shape", "no empty dimension"));
        }
        // An expert's index has 16 bits.
        let n_expert = u32::try_from(n_expert).ok().filter(|n| (1..=u32::from(u16::MAX)).contains(n));
        let n_expert = n_expert.ok_or_else(|| fault("number of experts", "1 to 65535 as third dimension"))?;
        let slice_bytes = info.extent.len / u64::from(n_expert);
        let (file, offset) = (info.extent.file, info.extent.offset);
        Ok(ExpertTensor {
            kind,
            name: info.name.clone(),
            dtype: info.dtype,
            ne0,
            ne1,
            n_expert,
            file,
            offset,
            slice_bytes,
        })
    }

    fn check_layer(&self, layer: &LayerExperts, expert_count: Option<u64>) -> Result<(), GgufError> {
        let first = &layer.tensors[0];
        let fault = |tensor: &ExpertTensor, what, found: String, expected: String| {
            let info = self.tensor(&tensor.name).expect("the map was made from these tensors");
            Err(self.expert_fault(info, what, found, expected))
        };
        let shape = |t: &ExpertTensor| format!("[{}, {}, {}]", t.ne0, t.ne1, t.n_expert);
        for t in &layer.tensors {
            if t.n_expert != layer.n_expert {
                let expected = format!("{} as in '{}'", layer.n_expert, first.name);
                return fault(t, "number of experts", t.n_expert.to_string(), expected);
            }
            if let Some(n) = expert_count.filter(|n| *n != u64::from(t.n_expert)) {
                let expected = format!("{n} as in key '{}.expert_count'", self.architecture());
                return fault(t, "number of experts", t.n_expert.to_string(), expected);
            }
        }
        let (gate, gate_up) = (layer.tensor(SliceKind::Gate), layer.tensor(SliceKind::GateUp));
        let (up, down) = (layer.tensor(SliceKind::Up), layer.tensor(SliceKind::Down));
        let Some(down) = down else {
            return fault(first, "layer", "no ffn_down_exps".to_owned(), "one beside it".to_owned());
        };
        if up.is_none() == gate_up.is_none() || (gate.is_some() && gate_up.is_some()) {
            let kinds: Vec<_> = layer.tensors.iter().map(|t| t.kind.tensor_stem()).collect();
            return fault(first, "layer", kinds.join(" + "), "ffn_up_exps or ffn_gate_up_exps beside down".to_owned());
        }
        for t in [gate, up, gate_up].into_iter().flatten() {
            // [n_embd, n_ff] against down's [n_ff, n_embd]; twice n_ff where gate and up are one.
            let doubled = t.kind == SliceKind::GateUp || (t.kind == SliceKind::Up && gate.is_none());
            let rows_fit = (t.ne1 == down.ne0 && t.kind != SliceKind::GateUp)
                || (doubled && down.ne0.checked_mul(2) == Some(t.ne1));
            if t.ne0 != down.ne1 || !rows_fit {
                return fault(t, "shape", shape(t), format!("one that fits '{}' {}", down.name, shape(down)));
            }
        }
        Ok(())
    }

    fn expert_fault(&self, info: &TensorInfo, what: &'static str, found: String, expected: String) -> GgufError {
        let path = self.files[info.extent.file as usize].path.clone();
        let remedy = "the model was converted wrongly, fetch or convert it again";
        GgufError::Malformed { path, what: format!("tensor '{}': {what}", info.name), found, expected, remedy }
    }
}
