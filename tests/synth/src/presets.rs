//! Known shapes: those of the benchmarks, and published models at full size. `synth --preset` writes them; `inspect
//! --forecast --shape` examines what would be written. Sizes are from the models' published configurations.

use anyhow::Context;

use super::format::Format;
use super::qwen4exp::Qwen4Exp;
use super::spec::{ExpertGroups, Spec};

/// HOBBIT (section 3.2) counts 67 % high, 30 % low and 3 % skipped for Mixtral-8x7B at those thresholds. This shape
/// gives 66.8, 30.0 and 3.2 %, measured on prose with 8 layers (at a spread of 2: 66, 29 and 5 %).
const MIXTRAL_ROUTER_SPREAD: f32 = 1.6;

type Preset = (&'static str, fn() -> Spec);

pub fn presets() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

#[rustfmt::skip]
const PRESETS: &[Preset] = &[
    // The weight distribution of such a router is not published: use the default spread, which asks for 34 % high and
    // 41 % low and skips 25 %. Shares at T1 and T2 are not comparable between top-2 and top-8.
    ("qwen3moe-bench", || bench("qwen3moe", 768, 64, 8)),
    ("mixtral-bench", || Spec { router_spread: MIXTRAL_ROUTER_SPREAD, ..bench("llama", 7168, 8, 2) }),
    ("phimoe-bench", || Spec { router_spread: MIXTRAL_ROUTER_SPREAD, ..bench("phimoe", 3200, 16, 2) }),
    ("deepseek-bench", || Spec {
        layers: 10, shared: Some(2), dense_lead: Some(1), ff_dense: Some(10_944), ..bench("deepseek", 1408, 64, 6) }),
    ("mixtral-8x7b", || k_quant(Spec {
        layers: 32, embd: 4096, heads: 32, kv_heads: Some(8), vocab: 32_000, router_spread: MIXTRAL_ROUTER_SPREAD,
        ..bench("llama", 14_336, 8, 2) })),
    ("mixtral-8x22b", || k_quant(Spec {
        layers: 56, embd: 6144, heads: 48, kv_heads: Some(8), vocab: 32_768, ..bench("llama", 16_384, 8, 2) })),
    ("qwen3-30b-a3b", || k_quant(Spec {
        layers: 48, heads: 32, head_dim: Some(128), vocab: 151_936, ..bench("qwen3moe", 768, 128, 8) })),
    ("qwen3-235b", || k_quant(Spec {
        layers: 94, embd: 4096, heads: 64, head_dim: Some(128), vocab: 151_936, ..bench("qwen3moe", 1536, 128, 8) })),
    // Rows of 1408 weights are not whole blocks of a K-quant: use the next simpler types.
    ("glm-4.5-air", || Spec { down_types: vec![Format::Q8_0, Format::Q5_0], ..k_quant(Spec {
        layers: 46, embd: 4096, heads: 96, kv_heads: Some(8), head_dim: Some(128), vocab: 151_552,
        ff_dense: Some(10_944),
        ..bench("glm4moe", 1408, 128, 8) }) }),
    ("gpt-oss-20b", || Spec {
        layers: 24, embd: 2880, heads: 64, kv_heads: Some(8), head_dim: Some(64), vocab: 201_088,
        ..bench("gpt-oss", 2880, 32, 4) }),
    ("gpt-oss-120b", || Spec {
        layers: 36, embd: 2880, heads: 64, kv_heads: Some(8), head_dim: Some(64), vocab: 201_088,
        ..bench("gpt-oss", 2880, 128, 4) }),
    ("minimax-m2", || k_quant(Spec {
        layers: 62, embd: 3072, heads: 48, kv_heads: Some(8), head_dim: Some(128), vocab: 200_064,
        ..bench("minimax-m2", 1536, 256, 8) })),
    ("deepseek-v3", || k_quant(Spec {
        heads: 128, dense_lead: Some(3), groups: Some(ExpertGroups { count: 8, used: 4 }), vocab: 129_280,
        ..deepseek(256) })),
    ("kimi-k2", || k_quant(Spec { heads: 64, vocab: 163_840, ..deepseek(384) })),
    ("qwen3.8-flash-next", || Spec {
        layers: 48, embd: 2560, heads: 24, kv_heads: Some(2), head_dim: Some(256), vocab: 248_320, ctx: 262_144,
        qwen4exp: FLASH_NEXT,
        types: vec![Format::Q4_K], down_types: FLASH_NEXT_DOWN.to_vec(), dense_type: Some(Format::Q8_0),
        ..bench("qwen4exp", 640, 512, 10) }),
];

/// Sizes from the `config.json` of Qwen/Qwen3.8-Flash-Next and from its GGUFs' keys, as copies of both show them. The
/// layer of multi-token prediction is left out: it is published as a file of its own.
///
/// Derived: the rows of a head of the n-gram table. Published are a base of 20,000,000 and the rule that each of the 16
/// heads takes the next prime (320,001,446 rows, padded to 320,001,536). Here all heads have a sixteenth of the padded
/// number.
const FLASH_NEXT: Qwen4Exp = Qwen4Exp {
    key_heads: 16,
    value_heads: 48,
    state_width: Some(128),
    rotated: Some(64),
    stream_rank: 320,
    index_heads: 4,
    index_budget: 2048,
    ngram: 3,
    ngram_heads: 8,
    ngram_rows: Some(320_001_536 / 16),
    ngram_type: Some(Format::Iq4Nl),
};

/// Types as in unsloth's UD-Q4_K_XL. Readers of that file list 41.3 GiB of Q4_K, 25.2 of Q5_1, 9.0 of Q8_0, 1.1 of Q5_K
/// and 26.8 of IQ4_NL, the table. Derived from these sums: five of 48 layers have a down of Q8_0 (which layers is a
/// guess), all matrices beside experts are Q8_0, and one layer's gate and up are Q5_K, which is left out here.
const FLASH_NEXT_DOWN: [Format; 10] = {
    let mut types = [Format::Q5_1; 10];
    types[0] = Format::Q8_0;
    types
};

fn bench(arch: &str, ff: u32, experts: u32, topk: u32) -> Spec {
    Spec {
        layers: 16,
        embd: 2048,
        ff,
        experts,
        topk,
        heads: 16,
        kv_heads: Some(4),
        vocab: 4096,
        ctx: 32_768,
        ..Spec::tiny(arch)
    }
}

/// The common part of DeepSeek-V3 and Kimi K2.
fn deepseek(experts: u32) -> Spec {
    Spec {
        layers: 61,
        embd: 7168,
        kv_heads: None,
        head_dim: Some(128),
        lora_q: Some(1536),
        lora_kv: Some(512),
        ff_dense: Some(18_432),
        ..bench("deepseek2", 2048, experts, 8)
    }
}

/// Types as in Q4_K_M: about half of the down matrices are Q6_K.
fn k_quant(spec: Spec) -> Spec {
    Spec {
        types: vec![Format::Q4_K],
        down_types: vec![Format::Q6_K, Format::Q4_K],
        dense_type: Some(Format::Q4_K),
        ..spec
    }
}

impl Spec {
    /// A known shape, one of [`presets`]. Those of the benchmarks are Q8_0: `qwen3moe-bench` (4.96 GiB) and
    /// `mixtral-bench` (5.75 GiB); `phimoe-bench` (16 experts, top-2) and `deepseek-bench` (DeepSeekMoE: 64 fine
    /// experts, top-6, two shared ones, a dense first layer). The others are published models in their published
    /// types: gpt-oss MXFP4, Qwen3.8-Flash-Next as UD-Q4_K_XL, all others as Q4_K_M.
    pub fn preset(name: &str) -> anyhow::Result<Spec> {
        let found = PRESETS.iter().find(|(known, _)| *known == name);
        let known = || presets().collect::<Vec<_>>().join(", ");
        found
            .map(|(_, spec)| spec())
            .with_context(|| format!("'{name}' is no known shape: expected one of {}", known()))
    }
}
