//! Machines, and models of known models' shapes with fewer weights.

use clap::ValueEnum;
use hobbit_synth::{Format, Spec};
use lagging_device::Options;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Machine {
    #[value(name = "rtx-4090")]
    Rtx4090,
    /// Fate's high-end PC
    #[value(name = "rtx-3090")]
    Rtx3090,
    #[value(name = "rtx-3060")]
    Rtx3060,
    /// Fate's low-end PC
    #[value(name = "gtx-1080-ti")]
    Gtx1080Ti,
    #[value(name = "orin")]
    Orin,
    /// HOBBIT's Orin
    #[value(name = "orin-32")]
    Orin32,
}

/// Part of the device's memory that experts get. The rest is for ordinary weights, context, buffers and head-room, and
/// on an Orin for the system.
const EXPERT_PART: f64 = 0.72;

impl Machine {
    pub fn options(self) -> Options {
        match self {
            Self::Rtx4090 => Options::rtx_4090(),
            Self::Rtx3090 => Options::rtx_3090(),
            Self::Rtx3060 => Options::rtx_3060(),
            Self::Gtx1080Ti => Options::gtx_1080_ti(),
            Self::Orin => Options::orin_64gb(),
            Self::Orin32 => Options::orin_32gb(),
        }
    }

    /// Percent of experts of so many bytes that are in the device's memory, a multiple of 5.
    pub fn percent(self, expert_bytes: f64) -> u32 {
        let percent = 100.0 * EXPERT_PART * self.options().memory as f64 / expert_bytes;
        ((percent / 5.0) as u32 * 5).clamp(5, 100)
    }

    /// Rows of the table, by hobbit's flags. Rows without `--cpu-helper` and `--preset` have the helper. The shape's
    /// bound follows `--max-loss`.
    pub fn rows(self) -> &'static [&'static str] {
        if self.options().unified {
            return &["", "--low auto", "--low q2_k", "--preset hobbit", "--cache-bias 0.2"];
        }
        &[
            LRU,
            CLASS_LRU,
            EXACT,
            "",
            "--low auto --cpu-helper off",
            "--low auto",
            "--preset hobbit --precision exact",
            "--preset hobbit",
            "--cache-bias 0.1 --cpu-helper off",
            "--cache-bias 0.2 --cpu-helper off",
            "--max-loss --cpu-helper off",
            "--max-loss",
            "--max-loss --low q2_k --cpu-helper off",
            "--max-loss --low q2_k",
            "--preset edgemoe",
            "--preset fate",
            "--preset smoe",
            "--preset swapmoe",
        ]
    }
}

/// The row that others are compared with.
pub const EXACT: &str = "--cpu-helper off";

/// llama.cpp's first expert cache (`--moe-cache-mib`): LRU; every miss is copied.
pub const LRU: &str = "--policy lru --predictor none --prefetch off --cpu-helper off";

/// llama.cpp's expert cache: exact, no predictor, no prefetches, and the CPU computes a part of the misses.
pub const CLASS_LRU: &str = "--policy classlru --predictor none --prefetch off";

/// A model, made smaller.
pub struct Shape {
    pub name: &'static str,
    pub title: &'static str,
    pub spec: Spec,
    /// Layers, width and hidden width of the full model.
    pub full: [u32; 3],
    /// Percent of the experts in a discrete GPU's memory, where the machine's memory does not decide.
    pub percent: Option<u32>,
    /// A trained model of this repository, which tells what approximations lose; else one of random weights.
    pub bundled: Option<&'static str>,
    pub text: &'static str,
}

impl Shape {
    /// The factor by which each layer's bytes are divided.
    pub fn factor(&self) -> f64 {
        f64::from(self.full[1]) * f64::from(self.full[2]) / (f64::from(self.spec.embd) * f64::from(self.spec.ff))
    }

    /// The factor by which layers are divided.
    pub fn depth(&self) -> f64 {
        f64::from(self.full[0]) / f64::from(self.spec.layers)
    }

    /// The loss bound. What a model of random weights loses is noise, and no mix would be below 1 % of it.
    pub fn max_loss(&self) -> &'static str {
        if self.bundled.is_some() { "--max-loss 1%" } else { "--max-loss 10%" }
    }

    pub fn title(&self) -> String {
        match self.bundled {
            Some(_) => self.title.to_owned(),
            None => format!("{} {}", self.title, self.spec.types[0].name().to_uppercase()),
        }
    }
}

/// Sizes are from the models' published configurations. Heads and vocabularies are such that attention and output have
/// the full model's part of the bytes, too. Where the architecture wants heads as wide together as the embedding, the
/// output has what attention lacks.
pub fn shapes() -> Vec<Shape> {
    let mixtral = |name, type_| Shape {
        name,
        title: "Mixtral-8x7B",
        spec: Spec {
            layers: 32,
            embd: 256,
            ff: 1024,
            vocab: 2288,
            // As of `mixtral-8x7b`: demands by T1 and T2 are the paper's.
            router_spread: 1.6,
            types: vec![type_],
            ..Spec::tiny("llama")
        },
        full: [32, 4096, 14_336],
        percent: None,
        bundled: None,
        text: "demo-heldout-prose.txt",
    };
    let random = || mixtral("", Format::Q8_0);
    vec![
        mixtral("mixtral-f16", Format::F16),
        mixtral("mixtral-q8", Format::Q8_0),
        mixtral("mixtral-q4", Format::Q4_K),
        Shape {
            name: "phi-moe",
            title: "Phi-3.5-MoE",
            spec: Spec { layers: 32, ff: 512, experts: 16, vocab: 2560, router_spread: 1.6, ..Spec::tiny("phimoe") },
            full: [32, 4096, 6400],
            ..random()
        },
        Shape {
            name: "qwen1.5-moe",
            title: "Qwen1.5-MoE-A2.7B",
            spec: Spec {
                layers: 24,
                experts: 60,
                topk: 4,
                // One shared expert, four times as wide as the others.
                shared: Some(4),
                kv_heads: Some(4),
                vocab: 38_816,
                ..Spec::tiny("qwen2moe")
            },
            full: [24, 2048, 1408],
            ..random()
        },
        Shape {
            name: "deepseek-moe",
            title: "DeepSeekMoE-16B",
            spec: Spec {
                layers: 28,
                experts: 64,
                topk: 6,
                shared: Some(2),
                dense_lead: Some(1),
                ff_dense: Some(2048),
                kv_heads: Some(4),
                vocab: 31_648,
                ..Spec::tiny("deepseek")
            },
            full: [28, 2048, 1408],
            ..random()
        },
        Shape {
            name: "qwen3-30b",
            title: "Qwen3-30B-A3B",
            spec: Spec {
                layers: 12,
                experts: 128,
                topk: 8,
                heads: 10,
                kv_heads: Some(2),
                head_dim: Some(128),
                vocab: 12_672,
                ..Spec::tiny("qwen3moe")
            },
            full: [48, 2048, 768],
            ..random()
        },
        Shape {
            name: "gpt-oss-120b",
            title: "gpt-oss-120b",
            spec: Spec {
                layers: 18,
                embd: 288,
                ff: 288,
                experts: 128,
                topk: 4,
                heads: 6,
                kv_heads: Some(1),
                head_dim: Some(64),
                vocab: 10_048,
                ..Spec::tiny("gpt-oss")
            },
            full: [36, 2880, 2880],
            ..random()
        },
        Shape {
            name: "fine",
            title: "The bundled fine-grained model, scaled to Qwen3-30B-A3B",
            spec: Spec { experts: 32, topk: 4, ..Spec::tiny("deepseek") },
            full: [48, 2048, 768],
            percent: Some(25),
            bundled: Some("fine.gguf"),
            text: "fine-heldout-dialogue.txt",
        },
        Shape {
            name: "deep",
            title: "The bundled model of 14 layers, scaled to Qwen3-30B-A3B",
            spec: Spec { layers: 14, experts: 32, topk: 4, ..Spec::tiny("deepseek") },
            full: [48, 2048, 768],
            percent: Some(25),
            bundled: Some("deep.gguf"),
            text: "fine-heldout-dialogue.txt",
        },
    ]
}
