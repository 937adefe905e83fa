//! Shape of a model for a forecast, from its header alone.

use std::collections::{BTreeMap, HashSet};

use crate::cache::policy::{PolicyKind, table_bytes};
use crate::expert::Precision;
use crate::gguf::{ExpertClass, ExpertMap, GgmlType, Gguf, GgufError, TensorInfo};
use crate::plan::{FixedCosts, PoolSpec, StagingWish};

const PROCESS_BYTES: u64 = 40 << 20;
/// Memory of a token of the vocabulary: its text and the tokenizer's data; in bytes.
const VOCABULARY_BYTES: u64 = 400;
pub(super) const UBATCH_TOKENS: u64 = 512;
/// Maximum bytes of gathered rows for products.
const GATHER_BYTES_MAX: u64 = 16 << 20;
/// Limits above any model: layers with experts, experts of a layer, and uses of experts per token. llama.cpp accepts
/// 512 of each of the first two. They are needed because a file without its weights may claim anything.
const LAYERS_MAX: u64 = 1024;
const EXPERTS_MAX: u64 = 1024;
const USES_MAX: u64 = 1 << 14;

/// Weights by element type, in bytes.
pub(crate) type TypeBytes = BTreeMap<GgmlType, u64>;

#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(
        "{0}: no experts: a dense model, which runs as fast as llama.cpp does where it fits, and no faster with hobbit"
    )]
    Dense(String),
    #[error("{model}: {found} {what}, at most {limit} expected; the header is damaged, fetch it again")]
    TooLarge { model: String, what: &'static str, found: u64, limit: u64 },
    #[error(
        "{model}: key '{key}' is missing, expected the number of experts that a token uses; convert the model again"
    )]
    Used { model: String, key: String },
}

#[derive(Clone, Debug, PartialEq)]
pub struct ExpertLayer {
    pub layer: u16,
    pub n_expert: u16,
    pub expert_bytes: u64,
    pub pool: usize,
}

/// Shape of a model for a forecast. Sizes are bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub name: String,
    pub architecture: String,
    pub n_parameters: u64,
    pub tensor_bytes: u64,
    /// Experts of layers that run.
    pub expert_bytes: u64,
    /// Their other weights, and those of no layer, without the tables that stay in the file.
    pub ordinary_bytes: u64,
    pub layers: Vec<ExpertLayer>,
    pub n_expert_used: u32,
    pub per_token: PerToken,
    pub pools: Vec<PoolSpec>,
    pub staging: StagingWish,
    /// Costs without a context.
    fixed: FixedCosts,
}

/// Weights that one token is multiplied with, and its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct PerToken {
    /// Number of these weights.
    pub n_parameters: u64,
    /// Bytes of experts, by type.
    pub experts: TypeBytes,
    /// Bytes of other weights, by type: all but the embeddings of other tokens.
    pub ordinary: TypeBytes,
    /// Keys and values of a token of the context, F16.
    pub kv_bytes: u64,
}

/// Weights beside experts that one token uses, by type, and their number.
fn ordinary(gguf: &Gguf) -> (TypeBytes, u64) {
    let (mut bytes, mut n_used) = (TypeBytes::new(), 0u64);
    let idle: HashSet<&str> = gguf.tensors_from(gguf.n_layers_run()).map(|tensor| &*tensor.name).collect();
    let is_table = |name: &str| gguf.row_tables().any(|table| table.name == name);
    for tensor in &gguf.tensors {
        let is_expert = crate::gguf::experts::parse_name(&tensor.name).is_some();
        if !is_expert && !idle.contains(&*tensor.name) && !is_table(&tensor.name) {
            *bytes.entry(tensor.dtype).or_default() += tensor.extent.len;
            n_used = n_used.saturating_add(elements(tensor));
        }
    }
    (bytes, n_used)
}

fn elements(tensor: &TensorInfo) -> u64 {
    tensor.dims.iter().fold(1, |product: u64, dim| product.saturating_mul(*dim))
}

/// A batch's activations in a layer, with what experts make of them, and the bytes of its buffers for gathered rows.
fn activations(experts: &ExpertMap, n_embd: u64, n_expert_used: u64) -> (u64, u64) {
    let slices = || experts.layers.iter().flat_map(|layer| &layer.tensors);
    let n_ff = slices().map(|tensor| tensor.ne0.min(tensor.ne1)).max().unwrap_or(0);
    let row = slices().map(|tensor| tensor.ne0.saturating_add(tensor.ne1).saturating_mul(4)).max().unwrap_or(0);
    let n_in = slices().map(|tensor| tensor.ne0).max().unwrap_or(0);
    let n_rows = UBATCH_TOKENS * n_expert_used;
    let gathered = n_rows.saturating_mul(row).min(GATHER_BYTES_MAX);
    let of_experts = n_expert_used.saturating_mul(n_embd.saturating_add(n_ff));
    let activations = UBATCH_TOKENS.saturating_mul(of_experts.saturating_add(n_embd.saturating_mul(8)));
    (activations, n_rows.saturating_mul(n_in).saturating_mul(5) / 4 + gathered)
}

impl Shape {
    /// Shape of a model whose header has been read; its tensors may be absent.
    pub fn of(gguf: &Gguf) -> Result<Self, ShapeError> {
        let name = gguf.metadata.get_str("general.name").unwrap_or("unnamed").to_owned();
        let mut experts = gguf.experts()?;
        experts.layers.retain(|layer| u64::from(layer.layer) < gguf.n_layers_run());
        if experts.is_empty() {
            return Err(ShapeError::Dense(name));
        }
        let architecture = gguf.architecture().to_owned();
        let number = |key: &str| gguf.metadata.get_u64(&format!("{architecture}.{key}"));
        let n_expert_used = gguf.n_expert_used_max();
        if n_expert_used == 0 {
            return Err(ShapeError::Used { model: name, key: format!("{architecture}.expert_used_count") });
        }

        let n_layers = experts.layers.len() as u64;
        let n_expert = experts.layers.iter().map(|layer| u64::from(layer.n_expert)).max().unwrap_or(0);
        for (what, found, limit) in [
            ("layers with experts", n_layers, LAYERS_MAX),
            ("experts in a layer", n_expert, EXPERTS_MAX),
            ("uses of experts per token", n_layers.saturating_mul(n_expert.min(n_expert_used.into())), USES_MAX),
        ] {
            if found > limit {
                return Err(ShapeError::TooLarge { model: name, what, found, limit });
            }
        }
        let mut pools: Vec<(ExpertClass, Vec<u16>)> = Vec::new();
        let mut layers = Vec::new();
        let (ordinary, n_parameters) = ordinary(gguf);
        let kv_bytes = gguf.kv_elements().saturating_mul(2);
        let mut per_token = PerToken { n_parameters, experts: TypeBytes::new(), ordinary, kv_bytes };
        for own in &experts.layers {
            let class = ExpertClass::windowed(&own.tensors);
            let pool = pools.iter().position(|(known, _)| *known == class).unwrap_or_else(|| {
                pools.push((class, Vec::new()));
                pools.len() - 1
            });
            let n_expert = own.n_expert as u16; // few, as was checked
            pools[pool].1.push(n_expert);
            layers.push(ExpertLayer { layer: own.layer, n_expert, expert_bytes: own.expert_bytes(), pool });
            let n_used = u64::from(gguf.n_expert_used(own.layer).min(own.n_expert));
            for tensor in &own.tensors {
                *per_token.experts.entry(tensor.dtype).or_default() += n_used * tensor.slice_bytes;
                let parameters = n_used.saturating_mul(tensor.ne0.saturating_mul(tensor.ne1));
                per_token.n_parameters = per_token.n_parameters.saturating_add(parameters);
            }
        }
        let n_kinds = pools.iter().map(|(class, _)| class.slices.len()).max().unwrap_or(0);
        let specs: Vec<PoolSpec> =
            pools.into_iter().map(|(class, n_versions)| PoolSpec::of(&class, Precision::High, n_versions)).collect();

        let n_embd = number("embedding_length").unwrap_or(0);
        let n_vocab = gguf.tensor("token_embd.weight").and_then(|tensor| tensor.dims.get(1).copied()).unwrap_or(0);
        let (activations, scratch_bytes) = activations(&experts, n_embd, u64::from(n_expert_used));
        let ordinary_bytes = per_token.ordinary.values().copied().fold(0, u64::saturating_add);
        let fixed = FixedCosts {
            weights: ordinary_bytes,
            // The state of recurrent layers, F32.
            kv: gguf.state_elements().saturating_mul(4),
            compute: activations.saturating_add(n_vocab).saturating_mul(4),
            runtime: n_vocab.saturating_mul(VOCABULARY_BYTES).saturating_add(PROCESS_BYTES + scratch_bytes),
            prediction: layers.iter().map(|layer| table_bytes(PolicyKind::default(), layer.n_expert)).sum(),
        };
        let slice_max = specs.iter().map(|spec| spec.slice_stride_max).max().unwrap_or(0);
        Ok(Self {
            n_parameters: gguf.tensors.iter().map(elements).fold(0, u64::saturating_add),
            tensor_bytes: gguf.tensor_bytes(),
            expert_bytes: experts.bytes(),
            ordinary_bytes,
            layers,
            n_expert_used,
            per_token,
            pools: specs,
            staging: StagingWish::of(slice_max, n_kinds),
            fixed,
            name,
            architecture,
        })
    }

    /// Estimated memory besides experts for a context of `n_ctx` tokens; the engine measures it.
    pub fn fixed_costs(&self, n_ctx: u64) -> FixedCosts {
        let kv = self.per_token.kv_bytes.saturating_mul(n_ctx).saturating_add(self.fixed.kv);
        FixedCosts { kv, ..self.fixed }
    }

    /// Experts of the first layer that has some: no known model has different numbers per layer.
    pub fn n_expert(&self) -> u16 {
        self.layers.first().map_or(0, |layer| layer.n_expert)
    }
}
