//! From a [`Spec`] to everything about the file but the weights: keys and tensors.

use anyhow::{Context, ensure};
use hobbit_core::gguf::Value;

use super::arch::{Dim, Key, KeyValue, Role, Row, Scope};
use super::format::Format;
use super::qwen4exp::NGRAM_FACTORS;
use super::spec::{Sizes, Spec};
use super::vocab::{CHAT_TEMPLATE, Vocab};

#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub name: String,
    pub format: Format,
    pub dims: Vec<u64>,
    pub mean: f32,
    pub deviation: f32,
    pub bytes: u64,
    /// Experts that a table of routes chooses from; 0 for all other tensors.
    pub experts: u64,
}

/// Spread of the logits: a few likely tokens, none certain.
const LOGIT_SPREAD: f32 = 3.0;
/// How strongly all layers together change the residual stream, against an embedding of spread 1.
const RESIDUAL_GAIN: f32 = 3.0;

/// Embeddings that layers read beside their input. Layers for multi-token prediction have none.
const LAYERS_EMBEDDINGS: &str = "per_layer_token_embd.weight";

/// All tensors, in the order of the file.
pub(super) fn tensors(spec: &Spec, sizes: &Sizes) -> anyhow::Result<Vec<Tensor>> {
    let is_there = |row: &&Row| row.dims.iter().all(|dim| sizes.of(*dim) > 0);
    let rows = || sizes.arch.tensors.iter().copied().flatten().filter(is_there);
    let mut tensors = Vec::new();
    let is_left_out = |row: &&Row| spec.without.contains(&row.name) || spec.only_mtp && row.name == LAYERS_EMBEDDINGS;
    for row in rows().filter(|row| row.scope == Scope::Model && !is_left_out(row)) {
        tensors.push(tensor(spec, sizes, row, row.name.to_owned(), 0)?);
    }
    let mut moe_index = 0;
    for layer in 0..spec.layers + spec.mtp {
        let (moe, own) = (spec.is_moe_layer(layer, sizes), sizes.at(layer));
        let is_in_layer = |row: &&Row| occurs(row.scope, layer, spec, sizes) && !spec.without.contains(&row.name);
        for row in rows().filter(is_in_layer).filter(|_| layer >= spec.layers || !spec.only_mtp) {
            tensors.push(tensor(spec, &own, row, format!("blk.{layer}.{}", row.name), moe_index)?);
        }
        moe_index += usize::from(moe);
    }
    Ok(tensors)
}

fn occurs(scope: Scope, layer: u32, spec: &Spec, sizes: &Sizes) -> bool {
    let moe = spec.is_moe_layer(layer, sizes);
    match scope {
        Scope::Model => false,
        Scope::Layer => true,
        Scope::LayerInput => sizes.per_layer > 0,
        Scope::Dense => !moe,
        Scope::Moe => moe,
        Scope::MoeSplit => moe && !spec.fused,
        Scope::MoeFused => moe && spec.fused,
        Scope::MoeShared => moe && sizes.shared > 0,
        Scope::MoeScaled => moe && spec.expert_scales,
        Scope::MoeScaledSplit => moe && spec.expert_scales && !spec.fused,
        Scope::FullAttention => layer >= spec.layers || sizes.arch.mixing.is_attention(layer),
        Scope::Recurrent => layer < spec.layers && sizes.arch.mixing.is_recurrent(layer),
        Scope::MoeLatent => moe && sizes.latent > 0,
        Scope::MoeFirst(n) => moe && layer < n,
        Scope::MoeAfter(n) => moe && layer >= n,
        Scope::Every { of, at } => layer < spec.layers && layer % of == at,
        Scope::Mtp => layer >= spec.layers,
    }
}

fn tensor(spec: &Spec, sizes: &Sizes, row: &Row, name: String, moe_index: usize) -> anyhow::Result<Tensor> {
    let dims: Vec<u64> = row.dims.iter().map(|dim| sizes.of(*dim)).collect();
    let keep = 1.0 / (dims[0] as f32).sqrt();
    let residual = RESIDUAL_GAIN * keep / (spec.layers as f32).sqrt();
    let down_types = if spec.down_types.is_empty() { &spec.types } else { &spec.down_types };
    let dense_type = spec.dense_type.unwrap_or(spec.types[0]);
    let (wanted, mean, deviation) = match row.role {
        Role::Norm => (Format::F32, 1.0, 0.05),
        Role::Bias => (Format::F32, 0.0, 0.05),
        Role::Decay => (Format::F32, -1.0, 0.2),
        Role::TimeStep => (Format::F32, -3.0, 0.5),
        Role::Router => (Format::F32, 0.0, spec.router_spread * keep),
        Role::SmallMatrix => (Format::F32, 0.0, keep),
        Role::Embedding => (dense_type, 0.0, 1.0),
        Role::NGrams => (spec.qwen4exp.ngram_type.unwrap_or(dense_type), 0.0, 1.0),
        Role::Output => (dense_type, 0.0, LOGIT_SPREAD * keep),
        Role::Matrix => (dense_type, 0.0, keep),
        Role::Residual => (dense_type, 0.0, residual),
        Role::ExpertIn => (spec.types[moe_index % spec.types.len()], 0.0, keep),
        Role::ExpertDown => (down_types[moe_index % down_types.len()], 0.0, residual),
        Role::Routes => (Format::I32, 0.0, 0.0),
    };
    let expert = matches!(row.role, Role::ExpertIn | Role::ExpertDown);
    let (found, block) = (dims[0], wanted.block_weights());
    ensure!(
        !expert || found.is_multiple_of(block),
        "tensor '{name}': rows of {found} weights, expected a multiple of {block} for {wanted}; change --ff or \
         --embd, or take q8_0"
    );
    // As llama-quantize does: a row that does not divide into the wanted blocks takes the next simpler format.
    let format = [wanted, Format::Q8_0, Format::F16]
        .into_iter()
        .find(|format| dims[0].is_multiple_of(format.block_weights()))
        .expect("F16 takes any row");
    let bytes = dims.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim)).and_then(|n| format.bytes_of(n));
    let bytes = bytes.with_context(|| format!("tensor '{name}' is too large"))?;
    let experts = if row.role == Role::Routes { sizes.experts } else { 0 };
    Ok(Tensor { name, format, dims, mean, deviation, bytes, experts })
}

/// All keys, in the order of the file, without those of a split model.
pub(super) fn keys(spec: &Spec, sizes: &Sizes) -> Vec<(String, Value)> {
    let arch = sizes.arch;
    let mut own: Vec<(&str, Value)> = vec![
        ("vocab_size", spec.vocab.into()),
        ("context_length", spec.ctx.into()),
        ("embedding_length", spec.embd.into()),
        ("block_count", (spec.layers + spec.mtp).into()),
        ("feed_forward_length", (sizes.ff_dense as u32).into()),
        ("attention.head_count", spec.heads.into()),
        ("attention.head_count_kv", (sizes.kv_heads as u32).into()),
        ("attention.key_length", (sizes.head_dim as u32).into()),
        ("attention.value_length", (sizes.head_dim as u32).into()),
        ("attention.layer_norm_rms_epsilon", 1e-5f32.into()),
        ("attention.layer_norm_epsilon", 1e-5f32.into()),
        ("rope.freq_base", 10_000f32.into()),
        ("expert_count", spec.experts.into()),
        ("expert_used_count", spec.topk.into()),
        ("expert_feed_forward_length", spec.ff.into()),
    ];
    if sizes.shared > 0 {
        own.push(("expert_shared_count", (sizes.shared as u32).into()));
        own.push(("expert_shared_feed_forward_length", (sizes.ff_shared as u32).into()));
    }
    if arch.dense_lead.is_some() {
        own.push(("leading_dense_block_count", sizes.dense_lead.into()));
    }
    if arch.interleaved {
        own.push(("interleave_moe_layer_step", spec.moe_step.into()));
    }
    if let Some(key) = arch.latent.filter(|_| sizes.latent > 0) {
        own.push((key, (sizes.latent as u32).into()));
    }
    if spec.mtp > 0 {
        own.push(("nextn_predict_layers", spec.mtp.into()));
    }
    let gating = spec.gating.map_or(arch.gating, |gating| gating as u32);
    if gating > 0 {
        own.push(("expert_gating_func", gating.into()));
    }
    if let Some(groups) = spec.groups {
        own.push(("expert_group_count", groups.count.into()));
        own.push(("expert_group_used_count", groups.used.into()));
    }
    let uneven: &[Key] = if spec.uneven {
        &[
            ("expert_feed_forward_length", KeyValue::InLayers(Scope::Moe, Dim::FfExpert)),
            ("expert_used_count", KeyValue::InLayers(Scope::Moe, Dim::Used)),
        ]
    } else {
        &[]
    };
    for (key, value) in arch.keys.iter().chain(arch.state_keys).chain(uneven) {
        own.retain(|(known, _)| known != key);
        own.push((key, key_value(*value, spec, sizes)));
    }
    if spec.only_mtp {
        own.retain(|(key, _)| !key.starts_with("ple."));
    }
    let mut keys: Vec<(String, Value)> = vec![
        ("general.architecture".to_owned(), arch.name.into()),
        ("general.type".to_owned(), "model".into()),
        ("general.name".to_owned(), format!("synth {} {}x{}", arch.name, spec.experts, spec.types[0]).into()),
        ("general.quantization_version".to_owned(), 2u32.into()),
        ("general.file_type".to_owned(), spec.types[0].file_type().into()),
    ];
    keys.extend(own.into_iter().map(|(key, value)| (format!("{}.{key}", arch.name), value)));
    keys.extend(vocab_keys(spec.vocab));
    keys
}

fn key_value(value: KeyValue, spec: &Spec, sizes: &Sizes) -> Value {
    let ngrams = &sizes.qwen4exp;
    match value {
        KeyValue::Int(number) => number.into(),
        KeyValue::Float(number) => number.into(),
        KeyValue::Bool(flag) => flag.into(),
        KeyValue::Size(dim) => (sizes.of(dim) as u32).into(),
        KeyValue::WindowExceptEvery(n) => Value::array((1..=spec.layers + spec.mtp).map(|layer| layer % n != 0)),
        KeyValue::RopeSections => {
            let half = sizes.of(Dim::Rotated) as i32 / 2;
            let part = half / 3;
            Value::array([half - 2 * part, part, part, 0])
        }
        KeyValue::InLayers(scope, dim) => {
            let length = |layer| if occurs(scope, layer, spec, sizes) { sizes.at(layer).of(dim) as u32 } else { 0 };
            Value::array((0..spec.layers + spec.mtp).map(length))
        }
        KeyValue::Turns(turns, predicting) => {
            Value::array(in_turn(turns, spec).chain((0..spec.mtp).map(|_| predicting)))
        }
        KeyValue::MainTurns(turns) => Value::array(in_turn(turns, spec)),
        KeyValue::List(numbers) => Value::array(numbers.iter().copied()),
        KeyValue::NGramOffsets => Value::array((0..ngrams.heads()).map(|head| head * sizes.ngram_rows)),
        KeyValue::NGramSizes => Value::array((0..ngrams.heads()).map(|_| sizes.ngram_rows)),
        KeyValue::NGramFactors => Value::array(NGRAM_FACTORS[..ngrams.ngram as usize].iter().copied()),
    }
}

fn in_turn(turns: &'static [u32], spec: &Spec) -> impl Iterator<Item = u32> {
    turns.iter().copied().cycle().take(spec.layers as usize)
}

pub(super) fn vocab_keys(size: u32) -> Vec<(String, Value)> {
    let vocab = Vocab::new(size);
    let pairs: Vec<(&str, Value)> = vec![
        ("model", "gpt2".into()),
        ("pre", "gpt-2".into()),
        ("tokens", Value::array(vocab.tokens)),
        ("token_type", Value::array(vocab.types)),
        ("merges", Value::array(vocab.merges)),
        ("bos_token_id", vocab.end_of_text.into()),
        ("eos_token_id", vocab.im_end.into()),
        ("padding_token_id", vocab.pad.into()),
        ("add_bos_token", false.into()),
    ];
    let mut keys: Vec<_> = pairs.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
    keys.push(("tokenizer.chat_template".to_owned(), CHAT_TEMPLATE.into()));
    keys
}
