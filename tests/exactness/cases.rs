//! What is evaluated: models, context settings and cache sizes, as tables.

use std::path::PathBuf;

use gguf_tools::synth::{ExpertGroups, Format, Gating, Spec, architectures};
use hobbit::SessionOptions;
use hobbit::options::{FlashAttn, KvType};
use hobbit_core::cache::Allocation;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_core::store::IoMode;

use super::script::Script;

/// One model, evaluated once by stock llama.cpp and once per [`Variant`] by hobbit.
pub struct Case {
    /// For messages.
    pub name: String,
    pub model: Source,
    /// For both sides.
    pub options: SessionOptions,
    pub script: Script,
}

pub enum Source {
    Synth(Box<Spec>),
    File(PathBuf),
}

/// How hobbit runs a case.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub expert_cache: ExpertCache,
    pub io: IoMode,
    /// Seed by which answers of the store are put out of order.
    pub shuffle: Option<u64>,
    /// What the next layers are expected to use is read ahead, always.
    pub ahead: Option<PredictorKind>,
    /// How layers share the slots.
    pub slots: Allocation,
}

impl Variant {
    const fn of(expert_cache: ExpertCache) -> Self {
        Self { expert_cache, io: IoMode::Auto, shuffle: None, ahead: None, slots: Allocation::Even }
    }

    pub const ALL: Self = Self::of(ExpertCache::Percent(100.0));
    pub const QUARTER: Self = Self::of(ExpertCache::Percent(25.0));
    pub const HALF: Self = Self::of(ExpertCache::Percent(50.0));
    /// No cached expert and one staging slot.
    pub const ONE_SLOT: Self = Self::of(ExpertCache::Bytes(0));

    pub const SIZES: [Self; 3] = [Self::ALL, Self::QUARTER, Self::ONE_SLOT];
}

fn options() -> SessionOptions {
    SessionOptions { n_ctx: 512, threads: Some(1), ..SessionOptions::default() }
}

fn case(name: impl Into<String>, spec: Spec) -> Case {
    Case { name: name.into(), model: Source::Synth(Box::new(spec)), options: options(), script: Script::Single }
}

fn seeded(arch: &str, seed: u64) -> Spec {
    Spec { seed, ..Spec::tiny(arch) }
}

/// Every architecture that can be generated.
pub fn all_architectures() -> Vec<Case> {
    architectures().map(|arch| case(arch, seeded(arch, 1))).collect()
}

/// Types of expert weights: each kind of kernel, and layers of unequal types (a pool each).
pub fn expert_types() -> Vec<Case> {
    let typed = |arch: &str, types: &[Format], down_types: &[Format]| {
        let names = |types: &[Format]| types.iter().map(Format::to_string).collect::<Vec<_>>().join(",");
        let spec = Spec {
            types: types.to_vec(),
            down_types: down_types.to_vec(),
            dense_type: Some(Format::Q8_0),
            ..seeded(arch, 2)
        };
        case(format!("{arch} {} down {}", names(types), names(down_types)), spec)
    };
    vec![
        typed("qwen3moe", &[Format::Q8_0], &[Format::Q8_0]),
        typed("qwen3moe", &[Format::Q4_K], &[Format::Q6_K]),
        typed("llama", &[Format::Q4_K, Format::Q5_K], &[Format::Q6_K, Format::Q5_K, Format::Q4_K]),
        typed("llama", &[Format::Q2_K], &[Format::Q3_K]),
        typed("llama", &[Format::Q4_0], &[Format::Q4_1]),
        typed("llama", &[Format::Iq4Xs], &[Format::Iq4Nl]),
        typed("llama", &[Format::F16], &[Format::F32]),
        typed("llama", &[Format::Bf16], &[Format::Bf16]),
        typed("gpt-oss", &[Format::Mxfp4], &[Format::Mxfp4]),
        typed("gpt-oss", &[Format::Q4_K], &[Format::Q6_K]),
    ]
}

/// Types of expert weights of which some CPU rearranges some, beside others, with ordinary weights of such a type.
pub fn rearranged() -> Vec<Case> {
    let typed = |arch: &str, name: &str, types: &[Format], down: &[Format], dense: Format| {
        let spec =
            Spec { types: types.to_vec(), down_types: down.to_vec(), dense_type: Some(dense), ..seeded(arch, 5) };
        case(format!("{arch}, rearranged {name}"), spec)
    };
    let mut cases = vec![
        typed("gpt-oss", "mxfp4", &[Format::Mxfp4], &[Format::Mxfp4], Format::Q8_0),
        typed("qwen3moe", "q4_0", &[Format::Q4_0], &[Format::Q4_0], Format::Q4_0),
        typed("llama", "q4_0 and q4_1", &[Format::Q4_0], &[Format::Q4_1], Format::Iq4Nl),
        typed("qwen3moe", "q4_K and q6_K", &[Format::Q4_K, Format::Q5_K], &[Format::Q6_K], Format::Q4_K),
        typed("llama", "q2_K and iq4_nl", &[Format::Q2_K], &[Format::Iq4Nl], Format::Q8_0),
    ];
    let two_threads = typed("deepseek2", "on two threads", &[Format::Iq4Nl], &[Format::Mxfp4], Format::Q4_0);
    cases.push(Case { options: SessionOptions { threads: Some(2), ..options() }, ..two_threads });
    cases
}

/// How experts are chosen and how their tensors are stored.
pub fn layouts() -> Vec<Case> {
    let mut cases = vec![
        case("qwen3moe, 32 experts, 6 used", Spec { experts: 32, topk: 6, ff: 64, ..seeded("qwen3moe", 3) }),
        case("llama, all experts used", Spec { topk: 8, ..seeded("llama", 3) }),
        case("llama, one expert used", Spec { topk: 1, ..seeded("llama", 3) }),
        case(
            "llama, slices of odd length",
            Spec { embd: 96, ff: 32, heads: 3, kv_heads: Some(1), ..seeded("llama", 3) },
        ),
        case("llama4, every second layer", Spec { moe_step: 2, ..seeded("llama4", 3) }),
        case("llama4, one expert used", Spec { topk: 1, ..seeded("llama4", 3) }),
        case("llama, in three shards", Spec { shards: 3, ..seeded("llama", 3) }),
        case("deepseek2, in five shards", Spec { shards: 5, ..seeded("deepseek2", 3) }),
        case("deepseek2, softmax gate", Spec { gating: Some(Gating::Softmax), ..seeded("deepseek2", 3) }),
        case(
            "deepseek2, groups of experts",
            Spec { experts: 16, topk: 4, groups: Some(ExpertGroups { count: 4, used: 2 }), ..seeded("deepseek2", 3) },
        ),
        case("gpt-oss, 32 experts, 4 used", Spec { experts: 32, topk: 4, ff: 64, ..seeded("gpt-oss", 3) }),
        case("llama, scales per expert", Spec { expert_scales: true, ..seeded("llama", 3) }),
    ];
    for arch in ["deepseek2", "mistral4", "cohere2moe", "hy_v3", "granite_swa"] {
        cases.push(case(format!("{arch}, gate and up fused"), Spec { fused: true, ..seeded(arch, 3) }));
    }
    cases
}

/// Context settings that change graphs, kernels or batch widths.
pub fn settings() -> Vec<Case> {
    let with = |name: &str, arch: &str, options: SessionOptions| Case {
        options,
        ..case(format!("{arch}, {name}"), seeded(arch, 4))
    };
    let quantised =
        || SessionOptions { type_k: KvType::Q8_0, type_v: KvType::Q8_0, flash_attn: FlashAttn::On, ..options() };
    let mut cases = Vec::new();
    for arch in ["qwen3moe", "gpt-oss"] {
        cases.extend([
            with("flash attention on", arch, SessionOptions { flash_attn: FlashAttn::On, ..options() }),
            with("flash attention off", arch, SessionOptions { flash_attn: FlashAttn::Off, ..options() }),
            with("q8_0 KV cache", arch, quantised()),
            with("ubatch 16", arch, SessionOptions { n_ubatch: 16, ..options() }),
            with("ubatch 7 of batch 64", arch, SessionOptions { n_batch: 64, n_ubatch: 7, ..options() }),
            with("full window", arch, SessionOptions { swa_full: true, ..options() }),
        ]);
    }
    cases
}

/// Decode batches of 2 to 16 sequences.
pub fn many_sequences() -> Vec<Case> {
    ["llama", "deepseek2", "gpt-oss", "qwen3moe"]
        .into_iter()
        .map(|arch| Case {
            options: SessionOptions { n_seq_max: 16, n_ctx: 1024, ..options() },
            script: Script::ManySequences,
            ..case(format!("{arch}, many sequences"), seeded(arch, 6))
        })
        .collect()
}

/// Sequences of unequal length side by side.
pub fn two_sequences() -> Vec<Case> {
    ["llama", "deepseek2", "gpt-oss"]
        .into_iter()
        .map(|arch| Case {
            options: SessionOptions { n_seq_max: 2, n_ctx: 1024, ..options() },
            script: Script::TwoSequences,
            ..case(format!("{arch}, two sequences"), seeded(arch, 5))
        })
        .collect()
}

pub fn bundled() -> Vec<Case> {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models");
    let case = |name: &str| {
        let model = Source::File(models.join(name));
        Case { name: name.to_owned(), model, options: options(), script: Script::Single }
    };
    vec![case("demo.gguf"), case("fine.gguf")]
}

/// Few tokens: on a busy machine the threads wait for each other at every node of the graph.
pub fn two_threads() -> Vec<Case> {
    let on_two_threads = |arch: &str| Case {
        options: SessionOptions { threads: Some(2), ..options() },
        script: Script::Brief,
        ..case(format!("{arch}, two threads"), seeded(arch, 7))
    };
    vec![on_two_threads("qwen3moe"), on_two_threads("gpt-oss")]
}

/// One case for tests of what lies below the products.
pub fn plain() -> Vec<Case> {
    vec![case("qwen3moe", Spec { types: vec![Format::Q4_K], down_types: vec![Format::Q6_K], ..seeded("qwen3moe", 6) })]
}
