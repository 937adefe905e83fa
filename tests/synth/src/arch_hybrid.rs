//! Architectures with recurrent layers beside attention, or with experts of a latent input, as data.

use super::arch::{
    AT_LEAST_ONE, Arch, Dim::*, Key, KeyValue::*, Mixing::*, ONE, Role::*, Row, SSM_GROUPS, SSM_STATE, Scope::*,
    USUALLY_ONE, row,
};
use super::arch_table::{GRANITE_KEYS, SIGMOID, groups::*};

#[rustfmt::skip]
mod hybrid {
    use super::*;

    /// LFM2: llama.cpp keeps the name that its first converter gave the last norm.
    pub const MODEL_LFM2: &[Row] = &[
        row(Model, "token_embd.weight", &[Embd, Vocab], Embedding),
        row(Model, "token_embd_norm.weight", &[Embd], Norm),
        row(Model, "output.weight", &[Embd, Vocab], Output),
    ];
    pub const NORM: &[Row] = &[row(Layer, "attn_norm.weight", &[Embd], Norm)];
    pub const KEYS_VALUES: &[Row] = &[
        row(FullAttention, "attn_k.weight", &[Embd, Kv], Matrix),
        row(FullAttention, "attn_v.weight", &[Embd, Kv], Matrix),
        row(FullAttention, "attn_output.weight", &[Q, Embd], Residual),
    ];
    pub const QUERIES: &[Row] = &[row(FullAttention, "attn_q.weight", &[Embd, Q], Matrix)];
    pub const GATED_QUERIES: &[Row] = &[row(FullAttention, "attn_q.weight", &[Embd, Times(2, &Q)], Matrix)];
    pub const SOME_HEAD_NORMS: &[Row] = &[
        row(FullAttention, "attn_q_norm.weight", &[HeadWidth], Norm),
        row(FullAttention, "attn_k_norm.weight", &[HeadWidth], Norm),
    ];
    pub const SHORT_CONVOLUTION: &[Row] = &[
        row(Recurrent, "shortconv.conv.weight", &[Exactly(3), Embd], SmallMatrix),
        row(Recurrent, "shortconv.in_proj.weight", &[Embd, Times(3, &Embd)], Matrix),
        row(Recurrent, "shortconv.out_proj.weight", &[Embd, Embd], Residual),
    ];
    pub const MAMBA_2: &[Row] = &[
        row(Recurrent, "ssm_in.weight", &[Embd, SsmIn], Matrix),
        row(Recurrent, "ssm_conv1d.weight", &[Exactly(4), SsmConv], SmallMatrix),
        row(Recurrent, "ssm_conv1d.bias", &[SsmConv], Bias),
        row(Recurrent, "ssm_dt.bias", &[SsmHeads], TimeStep),
        row(Recurrent, "ssm_a", &[Exactly(1), SsmHeads], Decay),
        row(Recurrent, "ssm_d", &[Exactly(1), SsmHeads], Norm),
        row(Recurrent, "ssm_norm.weight", &[Embd, Exactly(SSM_GROUPS)], Norm),
        row(Recurrent, "ssm_out.weight", &[SsmInner, Embd], Residual),
    ];
    pub const MAMBA: &[Row] = &[
        row(Recurrent, "ssm_in.weight", &[Embd, Times(2, &SsmInner)], Matrix),
        row(Recurrent, "ssm_conv1d.weight", &[Exactly(4), SsmInner], SmallMatrix),
        row(Recurrent, "ssm_conv1d.bias", &[SsmInner], Bias),
        // The time step's rank, and two states.
        row(Recurrent, "ssm_x.weight", &[SsmInner, Exactly(32 + 2 * 16)], Matrix),
        row(Recurrent, "ssm_dt_norm.weight", &[Exactly(32)], Norm),
        row(Recurrent, "ssm_dt.weight", &[Exactly(32), SsmInner], Matrix),
        row(Recurrent, "ssm_dt.bias", &[SsmInner], TimeStep),
        row(Recurrent, "ssm_b_norm.weight", &[Exactly(16)], Norm),
        row(Recurrent, "ssm_c_norm.weight", &[Exactly(16)], Norm),
        row(Recurrent, "ssm_a", &[Exactly(16), SsmInner], Decay),
        row(Recurrent, "ssm_d", &[SsmInner], Norm),
        row(Recurrent, "ssm_out.weight", &[SsmInner, Embd], Residual),
    ];
    /// Gated delta net, with as many heads as attention has.
    pub const DELTA_NET: &[Row] = &[
        row(Recurrent, "attn_qkv.weight", &[Embd, Qkv], Matrix),
        row(Recurrent, "attn_gate.weight", &[Embd, Q], Matrix),
        row(Recurrent, "ssm_conv1d.weight", &[Exactly(4), Qkv], SmallMatrix),
        row(Recurrent, "ssm_dt.bias", &[Heads], TimeStep),
        row(Recurrent, "ssm_a", &[Heads], Decay),
        row(Recurrent, "ssm_norm.weight", &[HeadWidth], Norm),
        row(Recurrent, "ssm_out.weight", &[Q, Embd], Residual),
    ];
    pub const DELTA_NET_FUSED: &[Row] = &[row(Recurrent, "ssm_ba.weight", &[Embd, Times(2, &Heads)], Matrix)];
    pub const DELTA_NET_SPLIT: &[Row] = &[
        row(Recurrent, "ssm_beta.weight", &[Embd, Heads], Matrix),
        row(Recurrent, "ssm_alpha.weight", &[Embd, Heads], Matrix),
    ];
    /// Kimi Delta Attention, without the rate of decay and the gates.
    pub const KIMI_DELTA: &[Row] = &[
        row(Recurrent, "ssm_conv1d_q.weight", &[Exactly(4), Exactly(1), Q], SmallMatrix),
        row(Recurrent, "ssm_conv1d_k.weight", &[Exactly(4), Exactly(1), Q], SmallMatrix),
        row(Recurrent, "ssm_conv1d_v.weight", &[Exactly(4), Exactly(1), Q], SmallMatrix),
        row(Recurrent, "attn_q.weight", &[Embd, Q], Matrix),
        row(Recurrent, "attn_k.weight", &[Embd, Q], Matrix),
        row(Recurrent, "attn_v.weight", &[Embd, Q], Matrix),
        row(Recurrent, "ssm_beta.weight", &[Embd, Heads], Matrix),
        row(Recurrent, "ssm_dt.bias", &[Q], TimeStep),
        row(Recurrent, "ssm_norm.weight", &[HeadWidth], Norm),
        row(Recurrent, "attn_output.weight", &[Q, Embd], Residual),
    ];
    pub const KIMI_LINEAR_GATES: &[Row] = &[
        row(Recurrent, "ssm_a", &[Exactly(1), Heads], Decay),
        row(Recurrent, "ssm_f_a.weight", &[Embd, HeadWidth], Matrix),
        row(Recurrent, "ssm_f_b.weight", &[HeadWidth, Q], Matrix),
        row(Recurrent, "ssm_g_a.weight", &[Embd, HeadWidth], Matrix),
        row(Recurrent, "ssm_g_b.weight", &[HeadWidth, Q], Matrix),
    ];
    pub const BAILING_GATES: &[Row] = &[
        // Factor of the gate's argument, above 0.
        row(Recurrent, "ssm_a", &[Exactly(1), Heads], Norm),
        row(Recurrent, "ssm_f_a.weight", &[Embd, Q], Matrix),
        row(Recurrent, "ssm_g_a.weight", &[Embd, Q], Matrix),
        row(FullAttention, "attn_gate.weight", &[Embd, Heads], Matrix),
    ];
    pub const KIMI_K3_GATES: &[Row] = &[
        row(Recurrent, "ssm_a", &[Heads], Decay),
        row(Recurrent, "ssm_f_a.weight", &[Embd, HeadWidth], Matrix),
        row(Recurrent, "ssm_f_b.weight", &[HeadWidth, Q], Matrix),
        row(Recurrent, "ssm_g.weight", &[Embd, Q], Matrix),
        row(FullAttention, "attn_gate.weight", &[Embd, Q], Matrix),
    ];
    /// Residuals of earlier blocks, weighed by attention.
    pub const KIMI_K3_RESIDUALS: &[Row] = &[
        row(Model, "output_res_score.weight", &[Embd], SmallMatrix),
        row(Layer, "attn_res_score.weight", &[Embd], SmallMatrix),
        row(Layer, "ffn_res_score.weight", &[Embd], SmallMatrix),
    ];
    /// Latent attention without its queries.
    pub const LATENT: &[Row] = &[
        row(FullAttention, "attn_kv_a_mqa.weight", &[Embd, LatentKv], Matrix),
        row(FullAttention, "attn_kv_a_norm.weight", &[LoraKv], Norm),
        row(FullAttention, "attn_k_b.weight", &[MlaPlain, LoraKv, Heads], Matrix),
        row(FullAttention, "attn_v_b.weight", &[LoraKv, MlaPlain, Heads], Matrix),
        row(FullAttention, "attn_output.weight", &[MlaV, Embd], Residual),
    ];
    pub const LATENT_QUERIES: &[Row] = &[row(FullAttention, "attn_q.weight", &[Embd, MlaQ], Matrix)];
    pub const COMPRESSED_QUERIES: &[Row] = &[
        row(FullAttention, "attn_q_a.weight", &[Embd, LoraQ], Matrix),
        row(FullAttention, "attn_q_a_norm.weight", &[LoraQ], Norm),
        row(FullAttention, "attn_q_b.weight", &[LoraQ, MlaQ], Matrix),
    ];
    pub const LIGHTNING: &[Row] = &[
        row(Recurrent, "attn_norm_2.weight", &[Q], Norm),
        row(Recurrent, "attn_qkv.weight", &[Embd, Qkv], Matrix),
        row(Recurrent, "attn_gate.weight", &[Embd, Q], Matrix),
        row(Recurrent, "attn_output.weight", &[Q, Embd], Residual),
    ];
    /// Nemotron-H: no gate, neither in experts nor in shared ones.
    pub const UNGATED_EXPERTS: &[Row] = &[
        row(Moe, "ffn_gate_inp.weight", &[Embd, Experts], Router),
        row(MoeLatent, "ffn_latent_down.weight", &[Embd, ExpertEmbd], Matrix),
        row(MoeLatent, "ffn_latent_up.weight", &[ExpertEmbd, Embd], Matrix),
        row(Moe, "ffn_up_exps.weight", &[ExpertEmbd, FfExpert, Experts], ExpertIn),
        row(Moe, "ffn_down_exps.weight", &[FfExpert, ExpertEmbd, Experts], ExpertDown),
        row(MoeShared, "ffn_up_shexp.weight", &[Embd, FfShared], Matrix),
        row(MoeShared, "ffn_down_shexp.weight", &[FfShared, Embd], Residual),
    ];
    pub const BAILING_NEXTN: &[Row] = &[
        row(Mtp, "nextn.eh_proj.weight", &[Times(2, &Embd), Embd], Matrix),
        row(Mtp, "nextn.enorm.weight", &[Embd], Norm),
        row(Mtp, "nextn.hnorm.weight", &[Embd], Norm),
        row(Mtp, "layer_output_norm.weight", &[Embd], Norm),
    ];
    pub const NEXTN_NORM: &[Row] = &[row(Mtp, "post_attention_norm.weight", &[Embd], Norm)];
    pub const LATENT_EXPERTS: &[Row] = &[
        row(Moe, "ffn_gate_inp.weight", &[Embd, Experts], Router),
        row(MoeLatent, "ffn_routed_down.weight", &[Embd, ExpertEmbd], Matrix),
        row(MoeLatent, "ffn_routed_norm.weight", &[ExpertEmbd], Norm),
        row(MoeLatent, "ffn_routed_up.weight", &[ExpertEmbd, Embd], Residual),
        row(Moe, "ffn_gate_exps.weight", &[ExpertEmbd, FfExpert, Experts], ExpertIn),
        row(Moe, "ffn_up_exps.weight", &[ExpertEmbd, FfExpert, Experts], ExpertIn),
        row(Moe, "ffn_down_exps.weight", &[FfExpert, ExpertEmbd, Experts], ExpertDown),
    ];
}
use hybrid::*;

/// The header's sign of a recurrent layer: no keys and values.
const SOME_KV_HEADS: Key = ("attention.head_count_kv", InLayers(FullAttention, KvHeads));
const CONVOLVED: Key = ("ssm.conv_kernel", Int(4));

/// Attention beside Mamba 2 does not rotate.
const MAMBA_2_KEYS: &[Key] = &[
    ("rope.scaling.finetuned", Bool(false)),
    CONVOLVED,
    SOME_KV_HEADS,
    ("ssm.inner_size", Size(SsmInner)),
    ("ssm.state_size", Int(SSM_STATE)),
    ("ssm.time_step_rank", Size(SsmHeads)),
    ("ssm.group_count", Int(SSM_GROUPS)),
];

const DELTA_NET_KEYS: &[Key] = &[
    CONVOLVED,
    ("ssm.inner_size", Size(Q)),
    ("ssm.state_size", Size(HeadWidth)),
    ("ssm.time_step_rank", Size(Heads)),
    ("ssm.group_count", Size(KvHeads)),
    ("full_attention_interval", Int(4)),
];

/// Kimi Delta Attention beside latent attention, whose keys are one head.
const KIMI_DELTA_KEYS: &[Key] = &[
    CONVOLVED,
    ("kda.head_dim", Size(HeadWidth)),
    ("attention.head_count_kv", InLayers(FullAttention, Exactly(1))),
    ("attention.kv_lora_rank", Size(LoraKv)),
    ("attention.key_length", Size(LatentKv)),
    ("attention.value_length", Size(LoraKv)),
    ("attention.key_length_mla", Size(MlaHead)),
    ("attention.value_length_mla", Size(MlaPlain)),
    ("rope.dimension_count", Size(Rope)),
    ("expert_weights_scale", Float(1.5)),
    ("expert_weights_norm", Bool(true)),
];

#[rustfmt::skip]
pub(super) const ARCHS: &[Arch] = &[
    Arch { name: "lfm2moe", tensors: &[MODEL_LFM2, NORM, QUERIES, KEYS_VALUES, SOME_HEAD_NORMS, SHORT_CONVOLUTION,
        FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS],
        keys: &[("shortconv.l_cache", Int(3))], state_keys: &[SOME_KV_HEADS],
        dense_lead: Some(1), gating: SIGMOID, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "granitehybrid", tensors: &[MODEL, NORM, QUERIES, KEYS_VALUES, MAMBA_2, FFN_NORM, EXPERTS, SHARED],
        keys: GRANITE_KEYS, state_keys: MAMBA_2_KEYS,
        shared: USUALLY_ONE, ff_is_expert: true, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "qwen3next", tensors: &[MODEL, NORM, GATED_QUERIES, KEYS_VALUES, SOME_HEAD_NORMS, DELTA_NET,
        DELTA_NET_FUSED, POST_ATTENTION_NORM, EXPERTS, SHARED_GATE, SHARED, NEXTN],
        state_keys: DELTA_NET_KEYS, shared: ONE, fused: true, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "qwen35moe", tensors: &[MODEL, NORM, GATED_QUERIES, KEYS_VALUES, SOME_HEAD_NORMS, DELTA_NET,
        DELTA_NET_SPLIT, POST_ATTENTION_NORM, EXPERTS, SHARED_GATE, SHARED, NEXTN],
        keys: &[("rope.dimension_sections", RopeSections)],
        state_keys: DELTA_NET_KEYS, shared: ONE, fused: true, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "nemotron_h_moe", tensors: &[MODEL, NORM, QUERIES, KEYS_VALUES, MAMBA_2, UNGATED_EXPERTS,
        SELECTION_BIAS, NEXTN, NEXTN_NORM],
        keys: &[("feed_forward_length", InLayers(Moe, FfExpert)), ("expert_weights_norm", Bool(true)),
            ("expert_weights_scale", Float(2.5))],
        state_keys: MAMBA_2_KEYS,
        shared: AT_LEAST_ONE, mixing: InTurn, latent: Some("moe_latent_size"), ..Arch::PLAIN },
    Arch { name: "jamba", tensors: &[MODEL, NORM, QUERIES, KEYS_VALUES, MAMBA, FFN_NORM, DENSE, EXPERTS],
        keys: &[("ssm.inner_size", Size(SsmInner)), ("ssm.state_size", Int(16)), ("ssm.time_step_rank", Int(32))],
        state_keys: &[CONVOLVED, SOME_KV_HEADS],
        interleaved: true, ff_is_expert: true, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "kimi-linear", tensors: &[MODEL, NORM, KIMI_DELTA, KIMI_LINEAR_GATES, LATENT_QUERIES, LATENT,
        FFN_NORM, DENSE, EXPERTS, SELECTION_BIAS, SHARED],
        state_keys: KIMI_DELTA_KEYS,
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "minimax-01", tensors: &[MODEL, NORM, QUERIES, KEYS_VALUES, LIGHTNING, FFN_NORM, EXPERTS],
        keys: &[("residual_scale", Float(3.5)), ("rope.dimension_count", Size(Rope))],
        state_keys: &[("full_attention_interval", Int(4))],
        multi_head: true, ff_is_expert: true, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "bailingmoe3", tensors: &[MODEL, NORM, KIMI_DELTA, BAILING_GATES, COMPRESSED_QUERIES, LATENT, FFN_NORM,
        DENSE, EXPERTS, SELECTION_BIAS, SHARED, BAILING_NEXTN],
        keys: &[("attention.q_lora_rank", Size(LoraQ)), ("kda.gate_lower_bound", Float(-5.0))],
        state_keys: KIMI_DELTA_KEYS,
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, mixing: AttentionEvery(4), ..Arch::PLAIN },
    Arch { name: "kimi-k3", tensors: &[MODEL, KIMI_K3_RESIDUALS, NORM, KIMI_DELTA, KIMI_K3_GATES, COMPRESSED_QUERIES,
        LATENT, FFN_NORM, DENSE, LATENT_EXPERTS, SELECTION_BIAS, SHARED],
        keys: &[("attention.q_lora_rank", Size(LoraQ)), ("kda.gate_lower_bound", Float(-5.0)),
            ("attn_res.block_size", Int(2)), ("activation.situ_beta", Float(4.0)),
            ("activation.situ_linear_beta", Float(4.0))],
        state_keys: KIMI_DELTA_KEYS,
        shared: AT_LEAST_ONE, dense_lead: Some(1), gating: SIGMOID, mixing: AttentionEvery(4),
        latent: Some("expert_latent_length"), ..Arch::PLAIN },
];
