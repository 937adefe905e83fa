//! Architectures whose layers all have ordinary attention, as data, and the groups of tensors that others share.

use super::arch::{
    AT_LEAST_ONE, Arch, Dim::*, Key, KeyValue::*, ONE, OPTIONAL, Role::*, Row, Scope, Scope::*, USUALLY_ONE, row,
};

#[rustfmt::skip]
pub(super) mod groups {
    use super::*;

    pub const MODEL: &[Row] = &[
        row(Model, "token_embd.weight", &[Embd, Vocab], Embedding),
        row(Model, "output_norm.weight", &[Embd], Norm),
        row(Model, "output.weight", &[Embd, Vocab], Output),
    ];
    pub const MODEL_BIAS: &[Row] = &[
        row(Model, "output_norm.bias", &[Embd], Bias),
        row(Model, "output.bias", &[Vocab], Bias),
    ];
    pub const ATTENTION: &[Row] = &[
        row(Layer, "attn_norm.weight", &[Embd], Norm),
        row(Layer, "attn_q.weight", &[Embd, Q], Matrix),
        row(Layer, "attn_k.weight", &[Embd, Kv], Matrix),
        row(Layer, "attn_v.weight", &[Embd, Kv], Matrix),
        row(Layer, "attn_output.weight", &[Q, Embd], Residual),
    ];
    pub const ATTENTION_FUSED: &[Row] = &[
        row(Layer, "attn_norm.weight", &[Embd], Norm),
        row(Layer, "attn_qkv.weight", &[Embd, Qkv], Matrix),
        row(Layer, "attn_output.weight", &[Q, Embd], Residual),
    ];
    pub const ATTENTION_LATENT: &[Row] = &[
        row(Layer, "attn_norm.weight", &[Embd], Norm),
        row(Layer, "attn_q_a.weight", &[Embd, LoraQ], Matrix),
        row(Layer, "attn_q_a_norm.weight", &[LoraQ], Norm),
        row(Layer, "attn_q_b.weight", &[LoraQ, MlaQ], Matrix),
        row(Layer, "attn_kv_a_mqa.weight", &[Embd, LatentKv], Matrix),
        row(Layer, "attn_kv_a_norm.weight", &[LoraKv], Norm),
        row(Layer, "attn_k_b.weight", &[MlaPlain, LoraKv, Heads], Matrix),
        row(Layer, "attn_v_b.weight", &[LoraKv, MlaPlain, Heads], Matrix),
        row(Layer, "attn_output.weight", &[MlaV, Embd], Residual),
    ];
    pub const QKV_BIAS: &[Row] = &[
        row(Layer, "attn_q.bias", &[Q], Bias),
        row(Layer, "attn_k.bias", &[Kv], Bias),
        row(Layer, "attn_v.bias", &[Kv], Bias),
    ];
    pub const OUTPUT_BIAS: &[Row] = &[row(Layer, "attn_output.bias", &[Embd], Bias)];
    pub const NORM_BIAS: &[Row] = &[
        row(Layer, "attn_norm.bias", &[Embd], Bias),
        row(Layer, "ffn_norm.bias", &[Embd], Bias),
    ];
    /// Queries and keys normalised head by head.
    pub const HEAD_NORMS: &[Row] = &[
        row(Layer, "attn_q_norm.weight", &[HeadWidth], Norm),
        row(Layer, "attn_k_norm.weight", &[HeadWidth], Norm),
    ];
    /// Queries and keys normalised over all heads at once.
    pub const WIDE_NORMS: &[Row] = &[
        row(Layer, "attn_q_norm.weight", &[Q], Norm),
        row(Layer, "attn_k_norm.weight", &[Kv], Norm),
    ];
    pub const SINKS: &[Row] = &[row(Layer, "attn_sinks.weight", &[Heads], Bias)];
    pub const ATTENTION_GATE: &[Row] = &[row(Layer, "attn_gate.weight", &[Embd, Q], Matrix)];
    pub const FFN_NORM: &[Row] = &[row(Layer, "ffn_norm.weight", &[Embd], Norm)];
    pub const POST_ATTENTION_NORM: &[Row] = &[row(Layer, "post_attention_norm.weight", &[Embd], Norm)];
    pub const POST_FFN_NORM: &[Row] = &[row(Layer, "post_ffw_norm.weight", &[Embd], Norm)];
    pub const ATTENTION_OUT_NORM: &[Row] = &[row(Layer, "attn_output_norm.weight", &[Embd], Norm)];
    pub const LAYER_OUT_NORM: &[Row] = &[row(Layer, "layer_output_norm.weight", &[Embd], Norm)];
    pub const DENSE: &[Row] = &[
        row(Scope::Dense, "ffn_gate.weight", &[Embd, FfDense], Matrix),
        row(Scope::Dense, "ffn_up.weight", &[Embd, FfDense], Matrix),
        row(Scope::Dense, "ffn_down.weight", &[FfDense, Embd], Residual),
    ];
    pub const EXPERTS: &[Row] = &[
        row(Moe, "ffn_gate_inp.weight", &[Embd, Experts], Router),
        row(MoeSplit, "ffn_gate_exps.weight", &[Embd, FfExpert, Experts], ExpertIn),
        row(MoeSplit, "ffn_up_exps.weight", &[Embd, FfExpert, Experts], ExpertIn),
        row(MoeFused, "ffn_gate_up_exps.weight", &[Embd, FfGateUp, Experts], ExpertIn),
        row(Moe, "ffn_down_exps.weight", &[FfExpert, Embd, Experts], ExpertDown),
        row(MoeScaledSplit, "ffn_gate_exps.scale", &[Experts], Norm),
        row(MoeScaledSplit, "ffn_up_exps.scale", &[Experts], Norm),
        row(MoeScaled, "ffn_down_exps.scale", &[Experts], Norm),
    ];
    pub const EXPERT_BIAS: &[Row] = &[
        row(Moe, "ffn_gate_inp.bias", &[Experts], Bias),
        row(Moe, "ffn_gate_exps.bias", &[FfExpert, Experts], Bias),
        row(Moe, "ffn_up_exps.bias", &[FfExpert, Experts], Bias),
        row(Moe, "ffn_down_exps.bias", &[Embd, Experts], Bias),
    ];
    /// Added to the router's scores for the choice only (DeepSeek-V3).
    pub const SELECTION_BIAS: &[Row] = &[row(Moe, "exp_probs_b.bias", &[Experts], Bias)];
    pub const SHARED: &[Row] = &[
        row(MoeShared, "ffn_gate_shexp.weight", &[Embd, FfShared], Matrix),
        row(MoeShared, "ffn_up_shexp.weight", &[Embd, FfShared], Matrix),
        row(MoeShared, "ffn_down_shexp.weight", &[FfShared, Embd], Residual),
    ];
    pub const SHARED_GATE: &[Row] = &[row(MoeShared, "ffn_gate_inp_shexp.weight", &[Embd], SmallMatrix)];
    /// Arctic: a dense network as wide as the embedding beside the experts.
    pub const ARCTIC_BESIDE: &[Row] = &[
        row(Layer, "ffn_gate.weight", &[Embd, Embd], Matrix),
        row(Layer, "ffn_up.weight", &[Embd, Embd], Matrix),
        row(Layer, "ffn_down.weight", &[Embd, Embd], Residual),
        row(Layer, "ffn_norm_exps.weight", &[Embd], Norm),
    ];
    /// Grove MoE: small experts shared by groups of experts.
    pub const CHUNK_EXPERTS: &[Row] = &[
        row(Moe, "ffn_gate_chexps.weight", &[Embd, HeadWidth, ChunkExperts], Matrix),
        row(Moe, "ffn_up_chexps.weight", &[Embd, HeadWidth, ChunkExperts], Matrix),
        row(Moe, "ffn_down_chexps.weight", &[HeadWidth, Embd, ChunkExperts], Residual),
    ];
    /// Gemma 4: a dense network beside the experts, with norms around each.
    pub const GEMMA_BESIDE: &[Row] = &[
        row(Layer, "ffn_gate.weight", &[Embd, FfDense], Matrix),
        row(Layer, "ffn_up.weight", &[Embd, FfDense], Matrix),
        row(Layer, "ffn_down.weight", &[FfDense, Embd], Residual),
        row(Layer, "ffn_gate_inp.scale", &[Embd], Norm),
        row(Layer, "pre_ffw_norm_2.weight", &[Embd], Norm),
        row(Layer, "post_ffw_norm_1.weight", &[Embd], Norm),
        row(Layer, "post_ffw_norm_2.weight", &[Embd], Norm),
    ];
    /// The wiring of a layer of multi-token prediction: it reads a hidden state beside a token.
    pub const NEXTN: &[Row] = &[
        row(Mtp, "nextn.eh_proj.weight", &[Times(2, &Embd), Embd], Matrix),
        row(Mtp, "nextn.enorm.weight", &[Embd], Norm),
        row(Mtp, "nextn.hnorm.weight", &[Embd], Norm),
        row(Mtp, "nextn.shared_head_norm.weight", &[Embd], Norm),
    ];
    pub const PER_LAYER_EMBEDDINGS: &[Row] = &[
        row(Model, "per_layer_token_embd.weight", &[AllPerLayer, Vocab], Embedding),
        row(Model, "per_layer_model_proj.weight", &[Embd, AllPerLayer], Matrix),
        row(Model, "per_layer_proj_norm.weight", &[PerLayer], Norm),
        row(LayerInput, "inp_gate.weight", &[Embd, PerLayer], Matrix),
        row(LayerInput, "proj.weight", &[PerLayer, Embd], Residual),
        row(LayerInput, "post_norm.weight", &[Embd], Norm),
    ];
    /// One set of rotation factors for the layers without a window.
    pub const ROPE_FACTORS: &[Row] = &[row(Model, "rope_freqs.weight", &[Rope], Norm)];
}
use groups::*;

pub(super) const LATENT_KEYS: &[Key] = &[
    ("attention.head_count_kv", Int(1)),
    ("attention.q_lora_rank", Size(LoraQ)),
    ("attention.kv_lora_rank", Size(LoraKv)),
    ("attention.key_length", Size(LatentKv)),
    ("attention.value_length", Size(LoraKv)),
    ("attention.key_length_mla", Size(MlaHead)),
    ("attention.value_length_mla", Size(MlaPlain)),
    ("rope.dimension_count", Size(Rope)),
    ("expert_weights_scale", Float(1.0)),
    ("expert_weights_norm", Bool(true)),
];

pub(super) const GRANITE_KEYS: &[Key] = &[
    ("logit_scale", Float(1.0)),
    ("residual_scale", Float(0.8)),
    ("embedding_scale", Float(1.5)),
    ("attention.scale", Float(0.125)),
];

pub(super) const SOFTMAX: u32 = 1;
pub(super) const SIGMOID: u32 = 2;

#[rustfmt::skip]
pub(super) const ARCHS: &[Arch] = &[
    Arch { name: "llama", tensors: &[MODEL, ATTENTION, FFN_NORM, EXPERTS],
        ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "phimoe", tensors: &[MODEL, MODEL_BIAS, ATTENTION, QKV_BIAS, OUTPUT_BIAS, FFN_NORM, NORM_BIAS,
        EXPERTS],
        keys: &[("attention.sliding_window", Int(131_072))],
        ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "qwen2moe", tensors: &[MODEL, ATTENTION, QKV_BIAS, FFN_NORM, EXPERTS, SHARED_GATE, SHARED],
        shared: AT_LEAST_ONE, ..Arch::PLAIN },
    Arch { name: "qwen3moe", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, EXPERTS], ..Arch::PLAIN },
    Arch { name: "qwen3vlmoe", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, EXPERTS],
        keys: &[("rope.dimension_sections", RopeSections)], ..Arch::PLAIN },
    Arch { name: "olmoe", tensors: &[MODEL, ATTENTION, WIDE_NORMS, FFN_NORM, EXPERTS],
        multi_head: true, ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "deepseek", tensors: &[MODEL, ATTENTION, FFN_NORM, DENSE, EXPERTS, SHARED],
        keys: &[("expert_weights_scale", Float(1.0))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), ..Arch::PLAIN },
    Arch { name: "deepseek2", tensors: &[MODEL, ATTENTION_LATENT, FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, SHARED,
        NEXTN],
        keys: LATENT_KEYS,
        shared: AT_LEAST_ONE, dense_lead: Some(1), fused: true, gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "mistral4", tensors: &[MODEL, ATTENTION_LATENT, FFN_NORM, DENSE, EXPERTS, SHARED],
        keys: LATENT_KEYS,
        shared: AT_LEAST_ONE, dense_lead: Some(0), fused: true, gating: SOFTMAX, ..Arch::PLAIN },
    Arch { name: "gpt-oss", tensors: &[MODEL, ATTENTION, QKV_BIAS, OUTPUT_BIAS, SINKS, POST_ATTENTION_NORM, EXPERTS,
        EXPERT_BIAS],
        keys: &[("attention.sliding_window", Int(128)), ("rope.dimension_count", Size(HeadWidth))], ..Arch::PLAIN },
    Arch { name: "granitemoe", tensors: &[MODEL, ATTENTION, FFN_NORM, EXPERTS, SHARED],
        keys: GRANITE_KEYS, shared: OPTIONAL, ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "dbrx", tensors: &[MODEL, ATTENTION_FUSED, ATTENTION_OUT_NORM, EXPERTS],
        keys: &[("attention.clamp_kqv", Float(8.0))], ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "grok", tensors: &[MODEL, ATTENTION, ATTENTION_OUT_NORM, FFN_NORM, EXPERTS, LAYER_OUT_NORM],
        keys: &[("logit_scale", Float(1.0)), ("embedding_scale", Float(1.0)), ("attention.output_scale", Float(0.125))],
        ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "arctic", tensors: &[MODEL, ATTENTION, FFN_NORM, ARCTIC_BESIDE, EXPERTS],
        ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "llama4", tensors: &[MODEL, ATTENTION, FFN_NORM, DENSE, EXPERTS, SHARED],
        shared: ONE, interleaved: true, ..Arch::PLAIN },
    Arch { name: "ernie4_5-moe", tensors: &[MODEL, ATTENTION, FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, SHARED],
        keys: &[("interleave_moe_layer_step", Int(1))],
        shared: USUALLY_ONE, dense_lead: Some(1), ..Arch::PLAIN },
    Arch { name: "hunyuan-moe", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, EXPERTS, SHARED],
        shared: AT_LEAST_ONE, ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "bailingmoe", tensors: &[MODEL, ATTENTION, FFN_NORM, EXPERTS, SHARED],
        keys: &[("rope.dimension_count", Size(HeadWidth)), ("expert_weights_norm", Bool(true))],
        shared: AT_LEAST_ONE, ..Arch::PLAIN },
    Arch { name: "bailingmoe2", tensors: &[MODEL, ATTENTION_FUSED, HEAD_NORMS, FFN_NORM, DENSE, EXPERTS,
        SELECTION_BIAS, SHARED],
        keys: &[("expert_weights_norm", Bool(true)), ("expert_shared_feed_forward_length", Size(FfExpert))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "dots1", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, SHARED],
        keys: &[("expert_weights_norm", Bool(true)), ("expert_weights_scale", Float(1.5))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), multi_head: true, gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "glm4moe", tensors: &[MODEL, ATTENTION, QKV_BIAS, HEAD_NORMS, POST_ATTENTION_NORM, DENSE, EXPERTS,
        SELECTION_BIAS, SHARED, NEXTN],
        keys: &[("expert_weights_norm", Bool(true)), ("expert_weights_scale", Float(1.0))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "minimax-m2", tensors: &[MODEL, ATTENTION, WIDE_NORMS, FFN_NORM, EXPERTS, SELECTION_BIAS],
        keys: &[("rope.dimension_count", Size(Rope))],
        ff_is_expert: true, gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "smallthinker", tensors: &[MODEL, ATTENTION, FFN_NORM, EXPERTS],
        keys: &[("attention.sliding_window", Int(4096))], gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "mimo2", tensors: &[MODEL, ATTENTION_FUSED, SINKS, FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, NEXTN],
        keys: &[("attention.sliding_window", Int(128)), ("rope.freq_base_swa", Float(10_000.0)),
                ("attention.sliding_window_pattern", WindowExceptEvery(2))],
        dense_lead: Some(1), mtp_dense: true, gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "exaone-moe", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS,
        SHARED],
        keys: &[("attention.sliding_window", Int(128)), ("expert_weights_norm", Bool(true)),
            ("expert_weights_scale", Float(1.0))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "afmoe", tensors: &[MODEL, ATTENTION, POST_ATTENTION_NORM, HEAD_NORMS, ATTENTION_GATE, FFN_NORM,
        POST_FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, SHARED],
        keys: &[("attention.sliding_window", Int(128)), ("expert_weights_norm", Bool(true)),
            ("expert_weights_scale", Float(1.0))],
        shared: USUALLY_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "laguna", tensors: &[MODEL, ATTENTION, HEAD_NORMS, ATTENTION_GATE, FFN_NORM, DENSE, EXPERTS,
        SELECTION_BIAS, SHARED],
        keys: &[("expert_weights_norm", Bool(true)), ("expert_weights_scale", Float(1.0))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "mellum", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, EXPERTS], ..Arch::PLAIN },
    Arch { name: "cohere2moe", tensors: &[MODEL, ATTENTION, DENSE, EXPERTS, SHARED, NEXTN],
        keys: &[("attention.sliding_window", Int(128)), ("logit_scale", Float(1.0)),
            ("expert_weights_norm", Bool(true))],
        shared: OPTIONAL, dense_lead: Some(1), fused: true, gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "hy_v3", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, DENSE, EXPERTS, SHARED, NEXTN],
        keys: &[("expert_weights_norm", Bool(true)), ("expert_weights_scale", Float(1.0))],
        shared: AT_LEAST_ONE, dense_lead: Some(1), fused: true, gating: SIGMOID, ..Arch::PLAIN },
    Arch { name: "granite_swa", tensors: &[MODEL, ATTENTION, SINKS, FFN_NORM, EXPERTS],
        keys: &[("logit_scale", Float(1.0)), ("attention.scale", Float(0.125)), ("attention.sliding_window", Int(128)),
                ("attention.sliding_window_pattern", WindowExceptEvery(2))],
        fused: true, ff_is_expert: true, ..Arch::PLAIN },
    Arch { name: "grovemoe", tensors: &[MODEL, ATTENTION, HEAD_NORMS, FFN_NORM, EXPERTS, CHUNK_EXPERTS],
        keys: &[("expert_chunk_feed_forward_length", Size(HeadWidth)), ("expert_group_scale", Float(0.05)),
            ("experts_per_group", Int(2))],
        ..Arch::PLAIN },
    Arch { name: "gemma4", tensors: &[MODEL, ROPE_FACTORS, ATTENTION, HEAD_NORMS, POST_ATTENTION_NORM, FFN_NORM,
        POST_FFN_NORM, GEMMA_BESIDE, PER_LAYER_EMBEDDINGS, EXPERTS],
        keys: &[("attention.sliding_window", Int(128)), ("attention.sliding_window_pattern", WindowExceptEvery(2)),
                ("attention.key_length_swa", Size(HeadWidth)), ("attention.value_length_swa", Size(HeadWidth)),
                ("embedding_length_per_layer_input", Size(PerLayer)), ("final_logit_softcapping", Float(30.0))],
        fused: true, ..Arch::PLAIN },
];
