//! Architectures with sparse attention, hashed routes, multi-token prediction or per-layer tables, as data.

use super::arch::{
    AT_LEAST_ONE, Arch,
    Dim::*,
    Key,
    KeyValue::*,
    Role::*,
    Row,
    Scope::{Every, Layer, Model, MoeAfter, MoeFirst},
    row,
};
use super::arch_table::groups::*;

/// Width of an indexer's keys: llama.cpp rotates them in squares of 64 and more.
const INDEX_WIDTH: u64 = 128;
const INDEX_HEADS: u64 = 2;
/// Residual streams of hyper-connections.
const STREAMS: u64 = 4;
/// Layers of DeepSeek V4 whose experts follow from the token.
const HASH_LAYERS: u32 = 2;

/// Layers of DeepSeek V4 that compress keys and values of four tokens into one, and of 128 tokens.
const BY_4: super::arch::Scope = Every { of: 2, at: 1 };
const BY_128: super::arch::Scope = Every { of: 4, at: 2 };

#[rustfmt::skip]
mod deepseek4 {
    use super::*;

    pub const ATTENTION: &[Row] = &[
        row(Layer, "attn_norm.weight", &[Embd], Norm),
        row(Layer, "attn_q_a.weight", &[Embd, LoraQ], Matrix),
        row(Layer, "attn_q_a_norm.weight", &[LoraQ], Norm),
        row(Layer, "attn_q_b.weight", &[LoraQ, Q], Matrix),
        row(Layer, "attn_kv.weight", &[Embd, HeadWidth], Matrix),
        row(Layer, "attn_kv_a_norm.weight", &[HeadWidth], Norm),
        row(Layer, "attn_output_a.weight", &[HeadWidth, Times(32, &Heads)], Matrix),
        row(Layer, "attn_output_b.weight", &[Times(32, &Heads), Embd], Residual),
    ];
    pub const COMPRESSORS: &[Row] = &[
        row(BY_4, "attn_compressor_kv.weight", &[Embd, Times(2, &HeadWidth)], Matrix),
        row(BY_4, "attn_compressor_gate.weight", &[Embd, Times(2, &HeadWidth)], Matrix),
        row(BY_4, "attn_compressor_ape.weight", &[Times(2, &HeadWidth), Fixed(4)], Bias),
        row(BY_4, "attn_compressor_norm.weight", &[HeadWidth], Norm),
        row(BY_128, "attn_compressor_kv.weight", &[Embd, HeadWidth], Matrix),
        row(BY_128, "attn_compressor_gate.weight", &[Embd, HeadWidth], Matrix),
        row(BY_128, "attn_compressor_ape.weight", &[HeadWidth, Fixed(128)], Bias),
        row(BY_128, "attn_compressor_norm.weight", &[HeadWidth], Norm),
        row(BY_4, "indexer.proj.weight", &[Embd, Fixed(INDEX_HEADS)], Matrix),
        row(BY_4, "indexer.attn_q_b.weight", &[LoraQ, Fixed(INDEX_HEADS * INDEX_WIDTH)], Matrix),
        row(BY_4, "indexer_compressor_kv.weight", &[Embd, Fixed(2 * INDEX_WIDTH)], Matrix),
        row(BY_4, "indexer_compressor_gate.weight", &[Embd, Fixed(2 * INDEX_WIDTH)], Matrix),
        row(BY_4, "indexer_compressor_ape.weight", &[Fixed(2 * INDEX_WIDTH), Fixed(4)], Bias),
        row(BY_4, "indexer_compressor_norm.weight", &[Fixed(INDEX_WIDTH)], Norm),
    ];
    /// Hyper-connections: a matrix before and after each half of a layer.
    pub const STREAM_MIXES: &[Row] = &[
        row(Layer, "hc_attn_fn.weight", &[Times(STREAMS, &Embd), Fixed((2 + STREAMS) * STREAMS)], SmallMatrix),
        row(Layer, "hc_attn_base.weight", &[Fixed((2 + STREAMS) * STREAMS)], Bias),
        row(Layer, "hc_attn_scale.weight", &[Fixed(3)], Norm),
        row(Layer, "hc_ffn_fn.weight", &[Times(STREAMS, &Embd), Fixed((2 + STREAMS) * STREAMS)], SmallMatrix),
        row(Layer, "hc_ffn_base.weight", &[Fixed((2 + STREAMS) * STREAMS)], Bias),
        row(Layer, "hc_ffn_scale.weight", &[Fixed(3)], Norm),
    ];
    pub const ROUTES: &[Row] = &[
        row(MoeFirst(HASH_LAYERS), "ffn_gate_tid2eid.weight", &[Used, Vocab], Routes),
        row(MoeAfter(HASH_LAYERS), "exp_probs_b.bias", &[Experts], Bias),
    ];
}

/// The streams of hyper-connections become one before the output.
#[rustfmt::skip]
const STREAM_HEAD: &[Row] = &[
    row(Model, "output_hc_fn.weight", &[Times(STREAMS, &Embd), Fixed(STREAMS)], SmallMatrix),
    row(Model, "output_hc_base.weight", &[Fixed(STREAMS)], Bias),
    row(Model, "output_hc_scale.weight", &[Fixed(1)], Norm),
];

const DEEPSEEK4_KEYS: &[Key] = &[
    ("attention.head_count_kv", Int(1)),
    ("attention.q_lora_rank", Size(LoraQ)),
    ("attention.sliding_window", Int(16)),
    ("attention.indexer.head_count", Int(INDEX_HEADS as u32)),
    ("attention.indexer.key_length", Int(INDEX_WIDTH as u32)),
    ("attention.indexer.top_k", Int(4)),
    ("attention.output_group_count", Size(Heads)),
    ("attention.output_lora_rank", Int(32)),
    ("attention.compress_rope_freq_base", Float(160_000.0)),
    ("attention.compress_ratios", Turns(&[0, 4, 128, 4])),
    ("rope.dimension_count", Size(Rope)),
    ("hyper_connection.count", Int(STREAMS as u32)),
    ("hyper_connection.sinkhorn_iterations", Int(4)),
    ("hyper_connection.epsilon", Float(1e-6)),
    ("hash_layer_count", Int(HASH_LAYERS)),
    ("swiglu_clamp_exp", Float(7.0)),
    ("expert_weights_scale", Float(1.5)),
    ("expert_weights_norm", Bool(true)),
];

const SQRT_SOFTPLUS: u32 = 4;

#[rustfmt::skip]
pub(super) const ARCHS: &[Arch] = &[
    Arch { name: "deepseek4", tensors: &[MODEL, STREAM_HEAD, deepseek4::ATTENTION, SINKS, deepseek4::COMPRESSORS,
        deepseek4::STREAM_MIXES, FFN_NORM, EXPERTS, deepseek4::ROUTES, SHARED, NEXTN],
        keys: DEEPSEEK4_KEYS, shared: AT_LEAST_ONE, gating: SQRT_SOFTPLUS, ..Arch::PLAIN },
];
