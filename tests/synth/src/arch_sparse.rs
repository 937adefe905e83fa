//! Architectures with sparse attention, hashed routes, multi-token prediction or per-layer tables, as data.

use super::arch::Mixing::AttentionEvery;
use super::arch::Scope::{self, Every, FullAttention, Layer, Model, Moe, MoeAfter, MoeFirst, Mtp, Recurrent};
use super::arch::{AT_LEAST_ONE, Arch, Dim, Dim::*, Key, KeyValue::*, ONE, Role::*, Row, row};
use super::arch_table::groups::*;
use super::arch_table::{LATENT_KEYS, SIGMOID};

/// Width of an indexer's keys: llama.cpp rotates them in squares of 64 and more.
pub(super) const INDEX_WIDTH: u32 = 128;
const INDEX_HEADS: u32 = 2;
/// Residual streams of hyper-connections.
const STREAMS: u32 = 4;
/// Layers of DeepSeek V4 whose experts follow from the token.
const HASH_LAYERS: u32 = 2;

/// Layers of DeepSeek V4 that compress keys and values of four tokens into one, and of 128 tokens.
const BY_4: Scope = Every { of: 2, at: 1 };
const BY_128: Scope = Every { of: 4, at: 2 };

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
        row(BY_4, "attn_compressor_ape.weight", &[Times(2, &HeadWidth), Exactly(4)], Bias),
        row(BY_4, "attn_compressor_norm.weight", &[HeadWidth], Norm),
        row(BY_128, "attn_compressor_kv.weight", &[Embd, HeadWidth], Matrix),
        row(BY_128, "attn_compressor_gate.weight", &[Embd, HeadWidth], Matrix),
        row(BY_128, "attn_compressor_ape.weight", &[HeadWidth, Exactly(128)], Bias),
        row(BY_128, "attn_compressor_norm.weight", &[HeadWidth], Norm),
        row(BY_4, "indexer.proj.weight", &[Embd, Exactly(INDEX_HEADS)], Matrix),
        row(BY_4, "indexer.attn_q_b.weight", &[LoraQ, Exactly(INDEX_HEADS * INDEX_WIDTH)], Matrix),
        row(BY_4, "indexer_compressor_kv.weight", &[Embd, Exactly(2 * INDEX_WIDTH)], Matrix),
        row(BY_4, "indexer_compressor_gate.weight", &[Embd, Exactly(2 * INDEX_WIDTH)], Matrix),
        row(BY_4, "indexer_compressor_ape.weight", &[Exactly(2 * INDEX_WIDTH), Exactly(4)], Bias),
        row(BY_4, "indexer_compressor_norm.weight", &[Exactly(INDEX_WIDTH)], Norm),
    ];
    /// Hyper-connections: a matrix before and after each half of a layer.
    pub const STREAM_MIXES: &[Row] = &[
        row(Layer, "hc_attn_fn.weight", &[Times(STREAMS, &Embd), Exactly((2 + STREAMS) * STREAMS)], SmallMatrix),
        row(Layer, "hc_attn_base.weight", &[Exactly((2 + STREAMS) * STREAMS)], Bias),
        row(Layer, "hc_attn_scale.weight", &[Exactly(3)], Norm),
        row(Layer, "hc_ffn_fn.weight", &[Times(STREAMS, &Embd), Exactly((2 + STREAMS) * STREAMS)], SmallMatrix),
        row(Layer, "hc_ffn_base.weight", &[Exactly((2 + STREAMS) * STREAMS)], Bias),
        row(Layer, "hc_ffn_scale.weight", &[Exactly(3)], Norm),
    ];
    pub const ROUTES: &[Row] = &[
        row(MoeFirst(HASH_LAYERS), "ffn_gate_tid2eid.weight", &[Used, Vocab], Routes),
        row(MoeAfter(HASH_LAYERS), "exp_probs_b.bias", &[Experts], Bias),
    ];
}

#[rustfmt::skip]
mod qwen4exp {
    use super::*;

    const LINEAR: Scope = Recurrent;
    const ATTENDING: Scope = FullAttention;
    /// One layer adds embeddings of n-grams.
    const NGRAM_LAYER: u32 = 1;
    const NGRAMS: Scope = Every { of: 512, at: NGRAM_LAYER };
    const WIDE: Dim = Times(STREAMS, &Embd);

    pub const MODEL_PARTS: &[Row] = &[
        row(Model, "token_embd.weight", &[Embd, Vocab], Embedding),
        row(Model, "output.weight", &[Embd, Vocab], Output),
        row(Model, "output_hc_norm.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(Model, "output_hc_down.weight", &[WIDE, StreamRank], Matrix),
        row(Model, "output_hc_up.weight", &[StreamRank, WIDE], Matrix),
        row(Model, "per_layer_token_embd.weight", &[NGramWidth, NGramRows], NGrams),
    ];
    pub const STREAM_GATES: &[Row] = &[
        row(Layer, "hc_attn_norm.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(Layer, "hc_attn_down.weight", &[WIDE, StreamRank], Matrix),
        row(Layer, "hc_attn_up.weight", &[StreamRank, WIDE], Matrix),
        row(Layer, "hc_attn_inject.weight", &[WIDE, Exactly(STREAMS)], Matrix),
        row(Layer, "hc_ffn_norm.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(Layer, "hc_ffn_down.weight", &[WIDE, StreamRank], Matrix),
        row(Layer, "hc_ffn_up.weight", &[StreamRank, WIDE], Matrix),
        row(Layer, "hc_ffn_inject.weight", &[WIDE, Exactly(STREAMS)], Matrix),
    ];
    pub const ATTENTION: &[Row] = &[
        row(ATTENDING, "attn_q.weight", &[Embd, Times(2, &Q)], Matrix),
        row(ATTENDING, "attn_k.weight", &[Embd, Kv], Matrix),
        row(ATTENDING, "attn_v.weight", &[Embd, Kv], Matrix),
        row(ATTENDING, "attn_output.weight", &[Q, Embd], Residual),
        row(ATTENDING, "attn_q_norm.weight", &[HeadWidth], Norm),
        row(ATTENDING, "attn_k_norm.weight", &[HeadWidth], Norm),
        row(ATTENDING, "indexer.q_proj.weight", &[Embd, Times(INDEX_WIDTH, &IndexHeads)], Matrix),
        row(ATTENDING, "indexer.k_proj.weight", &[Embd, Exactly(INDEX_WIDTH)], Matrix),
        row(ATTENDING, "indexer.q_norm.weight", &[Exactly(INDEX_WIDTH)], Norm),
        row(ATTENDING, "indexer.k_norm.weight", &[Exactly(INDEX_WIDTH)], Norm),
    ];
    pub const DELTA_NET: &[Row] = &[
        row(LINEAR, "attn_qkv.weight", &[Embd, StateConv], Matrix),
        row(LINEAR, "attn_gate.weight", &[Embd, StateInner], Matrix),
        row(LINEAR, "ssm_conv1d.weight", &[Exactly(4), StateConv], SmallMatrix),
        row(LINEAR, "ssm_dt.bias", &[StateValues], Bias),
        row(LINEAR, "ssm_a", &[StateValues], Bias),
        row(LINEAR, "ssm_beta.weight", &[Embd, StateValues], Matrix),
        row(LINEAR, "ssm_alpha.weight", &[Embd, StateValues], Matrix),
        row(LINEAR, "ssm_norm.weight", &[StateWidth], Norm),
        row(LINEAR, "ssm_out.weight", &[StateInner, Embd], Residual),
    ];
    pub const NEXTN: &[Row] = &[
        row(Mtp, "nextn.eh_proj.weight", &[Times(2, &Embd), Embd], Matrix),
        row(Mtp, "nextn.enorm.weight", &[Embd], Norm),
        row(Mtp, "nextn.hnorm.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(Mtp, "nextn.hc_head_norm.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(Mtp, "nextn.hc_head_down.weight", &[WIDE, StreamRank], Matrix),
        row(Mtp, "nextn.hc_head_up.weight", &[StreamRank, WIDE], Matrix),
    ];
    pub const NGRAM_EMBEDDINGS: &[Row] = &[
        row(NGRAMS, "ple_key.weight", &[Embd, WIDE], Matrix),
        row(NGRAMS, "ple_value.weight", &[Embd, Embd], Matrix),
        row(NGRAMS, "ple_norm_key.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(NGRAMS, "ple_norm_query.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(NGRAMS, "ple_norm_conv.weight", &[Embd, Exactly(STREAMS)], Norm),
        row(NGRAMS, "ple_conv1d.weight", &[Exactly(4), WIDE], SmallMatrix),
    ];
    pub const KEYS: &[Key] = &[
        ("rope.dimension_count", Size(Rotated)),
        ("rope.dimension_sections", RopeSections),
        ("ssm.conv_kernel", Int(4)),
        ("ssm.inner_size", Size(StateInner)),
        ("ssm.state_size", Size(StateWidth)),
        ("ssm.time_step_rank", Size(StateValues)),
        ("ssm.group_count", Size(StateKeys)),
        ("full_attention_interval", Int(4)),
        ("hyper_connection.count", Int(STREAMS)),
        ("hyper_connection.low_rank", Size(StreamRank)),
        ("attention.indexer.head_count", Size(IndexHeads)),
        ("attention.indexer.key_length", Int(INDEX_WIDTH)),
        ("attention.indexer.top_k", Size(IndexBudget)),
        ("attention.compress_ratios", Turns(&[0, 0, 0, 4], 4)),
        ("ple.layers", List(&[NGRAM_LAYER])),
        ("ple.ngram_size", Size(NGram)),
        ("ple.heads_per_ngram", Size(NGramHeads)),
        ("ple.conv_kernel", Int(4)),
        ("ple.eos_token_id", Int(0)),
        ("embedding_length_per_layer_input", Size(NGramWidth)),
        ("ple.layer_multipliers", NGramFactors),
        ("ple.head_offsets", NGramOffsets),
        ("ple.head_vocab_sizes", NGramSizes),
    ];
}

#[rustfmt::skip]
mod groups {
    use super::*;

    /// Chooses the tokens that a layer attends to.
    const fn indexer(scope: Scope) -> [Row; 5] {
        [
            row(scope, "indexer.k_norm.weight", &[Exactly(INDEX_WIDTH)], Norm),
            row(scope, "indexer.k_norm.bias", &[Exactly(INDEX_WIDTH)], Bias),
            row(scope, "indexer.proj.weight", &[Embd, Exactly(INDEX_HEADS)], Matrix),
            row(scope, "indexer.attn_k.weight", &[Embd, Exactly(INDEX_WIDTH)], Matrix),
            row(scope, "indexer.attn_q_b.weight", &[LoraQ, Exactly(INDEX_HEADS * INDEX_WIDTH)], Matrix),
        ]
    }
    pub const INDEXER: &[Row] = &indexer(Layer);
    /// Every second layer attends to the tokens that the layer before it has chosen.
    pub const SHARED_INDEXER: &[Row] = &indexer(Every { of: 2, at: 0 });
    pub const KPOOL_INDEXER: &[Row] = &indexer(KPOOL_FULL);
    pub const KPOOL: &[Row] = &[
        row(KPOOL_FULL, "indexer_compressor_gate.weight", &[Embd, Exactly(INDEX_WIDTH)], Matrix),
        row(KPOOL_FULL, "indexer_compressor_ape.weight", &[Exactly(INDEX_WIDTH), Exactly(4)], Bias),
    ];
    /// MiniMax M3 chooses blocks of tokens, with a head for each head of keys.
    pub const BLOCK_INDEXER: &[Row] = &[
        row(Moe, "indexer.q_proj.weight", &[Embd, Times(INDEX_WIDTH, &KvHeads)], Matrix),
        row(Moe, "indexer.k_proj.weight", &[Embd, Exactly(INDEX_WIDTH)], Matrix),
        row(Moe, "indexer.q_norm.weight", &[Exactly(INDEX_WIDTH)], Norm),
        row(Moe, "indexer.k_norm.weight", &[Exactly(INDEX_WIDTH)], Norm),
    ];
    pub const HEAD_GATE: &[Row] = &[row(Layer, "attn_gate.weight", &[Embd, Heads], Matrix)];
    pub const LATENT_GATE: &[Row] = &[row(Layer, "attn_gate.weight", &[Embd, MlaV], Matrix)];
    /// Hunyuan 4: streams without a mix among themselves.
    pub const INDEPENDENT_STREAMS: &[Row] = &[
        row(Layer, "hc_attn_fn.weight", &[Times(STREAMS, &Embd), Exactly(2 * STREAMS)], SmallMatrix),
        row(Layer, "hc_attn_base.weight", &[Exactly(2 * STREAMS)], Bias),
        row(Layer, "hc_attn_scale.weight", &[Exactly(2)], Norm),
        row(Layer, "hc_ffn_fn.weight", &[Times(STREAMS, &Embd), Exactly(2 * STREAMS)], SmallMatrix),
        row(Layer, "hc_ffn_base.weight", &[Exactly(2 * STREAMS)], Bias),
        row(Layer, "hc_ffn_scale.weight", &[Exactly(2)], Norm),
    ];

    const LINEAR: Scope = Every { of: 2, at: 0 };
    const ATTENDING: Scope = Every { of: 2, at: 1 };
    const KPOOL_FULL: Scope = Every { of: 4, at: 1 };
    /// GLM-5.3: linear attention in every second layer, latent attention without rotation in the others.
    pub const LINEAR_AND_LATENT: &[Row] = &[
        row(Layer, "attn_norm.weight", &[Embd], Norm),
        row(LINEAR, "ssm_conv1d_q.weight", &[Exactly(4), Exactly(1), Q], SmallMatrix),
        row(LINEAR, "ssm_conv1d_k.weight", &[Exactly(4), Exactly(1), Q], SmallMatrix),
        row(LINEAR, "ssm_conv1d_v.weight", &[Exactly(4), Exactly(1), Q], SmallMatrix),
        row(LINEAR, "attn_q.weight", &[Embd, Q], Matrix),
        row(LINEAR, "attn_k.weight", &[Embd, Q], Matrix),
        row(LINEAR, "attn_v.weight", &[Embd, Q], Matrix),
        row(LINEAR, "ssm_f_a.weight", &[Embd, HeadWidth], Matrix),
        row(LINEAR, "ssm_f_b.weight", &[HeadWidth, Q], Matrix),
        row(LINEAR, "ssm_beta.weight", &[Embd, Heads], Matrix),
        row(LINEAR, "ssm_a", &[Heads], Bias),
        row(LINEAR, "ssm_dt.bias", &[Q], Bias),
        row(LINEAR, "ssm_g_a.weight", &[Embd, HeadWidth], Matrix),
        row(LINEAR, "ssm_g_b.weight", &[HeadWidth, Q], Matrix),
        row(LINEAR, "ssm_norm.weight", &[HeadWidth], Norm),
        row(ATTENDING, "attn_q_a.weight", &[Embd, LoraQ], Matrix),
        row(ATTENDING, "attn_q_a_norm.weight", &[LoraQ], Norm),
        row(ATTENDING, "attn_q_b.weight", &[LoraQ, Q], Matrix),
        row(ATTENDING, "attn_kv_a_mqa.weight", &[Embd, LoraKv], Matrix),
        row(ATTENDING, "attn_kv_a_norm.weight", &[LoraKv], Norm),
        row(ATTENDING, "attn_k_b.weight", &[HeadWidth, LoraKv, Heads], Matrix),
        row(ATTENDING, "attn_v_b.weight", &[LoraKv, HeadWidth, Heads], Matrix),
        row(Layer, "attn_output.weight", &[Q, Embd], Residual),
    ];
}
use groups::*;

/// The streams of hyper-connections become one before the output.
#[rustfmt::skip]
const STREAM_HEAD: &[Row] = &[
    row(Model, "output_hc_fn.weight", &[Times(STREAMS, &Embd), Exactly(STREAMS)], SmallMatrix),
    row(Model, "output_hc_base.weight", &[Exactly(STREAMS)], Bias),
    row(Model, "output_hc_scale.weight", &[Exactly(1)], Norm),
];

const DEEPSEEK4_KEYS: &[Key] = &[
    ("attention.head_count_kv", Int(1)),
    ("attention.q_lora_rank", Size(LoraQ)),
    ("attention.sliding_window", Int(16)),
    ("attention.indexer.head_count", Int(INDEX_HEADS)),
    ("attention.indexer.key_length", Int(INDEX_WIDTH)),
    ("attention.indexer.top_k", Int(4)),
    ("attention.output_group_count", Size(Heads)),
    ("attention.output_lora_rank", Int(32)),
    ("attention.compress_rope_freq_base", Float(160_000.0)),
    ("attention.compress_ratios", Turns(&[0, 4, 128, 4], 0)),
    ("rope.dimension_count", Size(Rope)),
    ("hyper_connection.count", Int(STREAMS)),
    ("hyper_connection.sinkhorn_iterations", Int(4)),
    ("hyper_connection.epsilon", Float(1e-6)),
    ("hash_layer_count", Int(HASH_LAYERS)),
    ("swiglu_clamp_exp", Float(7.0)),
    ("expert_weights_scale", Float(1.5)),
    ("expert_weights_norm", Bool(true)),
];

/// Joins two lists of keys.
const fn join<const N: usize>(first: &[Key], then: &[Key]) -> [Key; N] {
    assert!(N == first.len() + then.len());
    let mut all = [first[0]; N];
    let mut at = 0;
    while at < N {
        all[at] = if at < first.len() { first[at] } else { then[at - first.len()] };
        at += 1;
    }
    all
}

const INDEX_KEYS: &[Key] = &[
    ("attention.indexer.head_count", Int(INDEX_HEADS)),
    ("attention.indexer.key_length", Int(INDEX_WIDTH)),
    ("attention.indexer.top_k", Int(8)),
];
const SPARSE_KEYS: &[Key] = &join::<{ LATENT_KEYS.len() + INDEX_KEYS.len() }>(LATENT_KEYS, INDEX_KEYS);
const SHARING_KEYS: &[Key] = &join::<{ SPARSE_KEYS.len() + 5 }>(
    SPARSE_KEYS,
    &[
        ("attention.indexer.types", MainTurns(&[1, 0])),
        ("hyper_connection.count", Int(STREAMS)),
        ("hyper_connection.epsilon", Float(1e-6)),
        ("hyper_connection.magnitude", Float(1.0)),
        ("swiglu_clamp_exp", Float(7.0)),
    ],
);
const GLM5_NEXT_KEYS: &[Key] = &join::<{ INDEX_KEYS.len() + 17 }>(
    INDEX_KEYS,
    &[
        ("attention.head_count_kv", Turns(&[0, 1], 0)),
        ("attention.q_lora_rank", Size(LoraQ)),
        ("attention.kv_lora_rank", Size(LoraKv)),
        ("attention.key_length", Size(LoraKv)),
        ("attention.value_length", Size(LoraKv)),
        ("attention.key_length_mla", Size(HeadWidth)),
        ("attention.value_length_mla", Size(HeadWidth)),
        ("attention.indexer.kpool", Int(4)),
        ("attention.indexer.kpool_select_tail", Bool(true)),
        ("attention.indexer.types", MainTurns(&[1, 1, 1, 0])),
        ("rope.dimension_count", Int(0)),
        ("ssm.conv_kernel", Int(4)),
        ("kda.head_dim", Size(HeadWidth)),
        ("hyper_connection.count", Int(STREAMS)),
        ("hyper_connection.sinkhorn_iterations", Int(4)),
        ("hyper_connection.epsilon", Float(1e-6)),
        ("expert_weights_norm", Bool(true)),
    ],
);

const SQRT_SOFTPLUS: u32 = 4;

#[rustfmt::skip]
pub(super) const ARCHS: &[Arch] = &[
    Arch { name: "deepseek4", tensors: &[MODEL, STREAM_HEAD, deepseek4::ATTENTION, SINKS, deepseek4::COMPRESSORS,
        deepseek4::STREAM_MIXES, FFN_NORM, EXPERTS, deepseek4::ROUTES, SHARED, NEXTN],
        keys: DEEPSEEK4_KEYS, shared: AT_LEAST_ONE, gating: SQRT_SOFTPLUS, ..Arch::PLAIN },
    Arch { name: "step35", tensors: &[MODEL, ATTENTION, HEAD_NORMS, HEAD_GATE, FFN_NORM, DENSE, EXPERTS,
        SELECTION_BIAS, SHARED, NEXTN],
        keys: &[("attention.sliding_window", Int(16)), ("rope.freq_base_swa", Float(10_000.0)),
            ("attention.sliding_window_pattern", WindowExceptEvery(4)), ("swiglu_clamp_exp", Float(7.0)),
            ("expert_weights_norm", Bool(true)), ("expert_weights_scale", Float(1.5))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "deepseek32", tensors: &[MODEL, ATTENTION_LATENT, INDEXER, FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS,
        SHARED, NEXTN],
        keys: SPARSE_KEYS, shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "glm-dsa", tensors: &[MODEL, ATTENTION_LATENT, SHARED_INDEXER, FFN_NORM, DENSE, EXPERTS,
        SELECTION_BIAS, SHARED, NEXTN],
        keys: SHARING_KEYS, shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "glm5-next", tensors: &[MODEL, LINEAR_AND_LATENT, KPOOL_INDEXER, KPOOL, deepseek4::STREAM_MIXES,
        FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, SHARED],
        keys: GLM5_NEXT_KEYS, shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "minimax-m3", tensors: &[MODEL, ATTENTION, HEAD_NORMS, BLOCK_INDEXER, FFN_NORM, DENSE, EXPERTS,
        SELECTION_BIAS, SHARED],
        keys: &[("attention.indexer.head_count", Size(KvHeads)),
            ("attention.indexer.key_length", Int(INDEX_WIDTH)), ("attention.indexer.top_k", Int(2)),
            ("attention.indexer.block_size", Int(8)), ("attention.indexer.local_blocks", Int(1)),
            ("rope.dimension_count", Size(Rope)), ("expert_weights_norm", Bool(true)),
            ("expert_weights_scale", Float(1.5))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "hy_v4", tensors: &[MODEL, STREAM_HEAD, ATTENTION_LATENT, SINKS, LATENT_GATE, SHARED_INDEXER,
        INDEPENDENT_STREAMS, FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, SHARED],
        keys: SHARING_KEYS, shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "qwen4exp", tensors: &[qwen4exp::MODEL_PARTS, qwen4exp::STREAM_GATES, qwen4exp::ATTENTION,
        qwen4exp::DELTA_NET, qwen4exp::NGRAM_EMBEDDINGS, EXPERTS, SHARED_GATE, SHARED, qwen4exp::NEXTN],
        keys: qwen4exp::KEYS, shared: ONE, fused: true, mixing: AttentionEvery(4), ..Arch::PLAIN },
];
