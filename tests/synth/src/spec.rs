//! Specification of a model to generate: the public builder, its limits, and the derived sizes.

use anyhow::{Context, bail};

use super::arch::{Arch, Dim, Mixing, SSM_GROUPS, SSM_STATE, Scope};
use super::arch_sparse::INDEX_WIDTH;
use super::format::Format;
use super::qwen4exp::Qwen4Exp;
use super::{arch_hybrid, arch_sparse, arch_table};

/// How a router turns scores into weights; llama.cpp's `expert_gating_func`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Over all experts.
    Softmax = 1,
    /// Per score.
    Sigmoid = 2,
    /// Over the chosen experts.
    SoftmaxAfterTopK = 3,
}

/// Groups of experts: the router first chooses `used` of `count` groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups; divides the number of experts.
    pub count: u32,
    /// Groups that may be chosen from, fewer than `count`.
    pub used: u32,
}

/// A model to generate. Start from [`Spec::tiny`] or [`Spec::preset`] and change fields; [`super::write`] checks.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// `general.architecture`, one of [`architectures`].
    pub arch: String,
    pub layers: u32,
    /// Width of the residual stream.
    pub embd: u32,
    /// Width of one expert's hidden layer.
    pub ff: u32,
    /// Width of a dense layer's hidden layer; `None`: that of all experts used together.
    pub ff_dense: Option<u32>,
    pub experts: u32,
    pub topk: u32,
    /// Shared experts; `None`: as usual for the architecture.
    pub shared: Option<u32>,
    /// Leading layers without experts; `None`: as usual for the architecture.
    pub dense_lead: Option<u32>,
    /// Layers of multi-token prediction after the others (`nextn_predict_layers`).
    pub mtp: u32,
    /// The file has the layers for multi-token prediction, and no others.
    pub only_mtp: bool,
    /// Only every n-th layer has experts (Llama 4).
    pub moe_step: u32,
    /// Router's gate; `None`: as usual for the architecture.
    pub gating: Option<Gating>,
    /// Expert groups (DeepSeek-V2/V3, Ling).
    pub groups: Option<ExpertGroups>,
    /// Standard deviation of a router's scores over experts, above 0: how unequal the experts of a token are.
    pub router_spread: f32,
    /// One `ffn_gate_up_exps` in place of gate and up.
    pub fused: bool,
    /// A scale per expert (`ffn_*_exps.scale`).
    pub expert_scales: bool,
    /// Tensors that the file lacks, by their names without the layer: `ffn_gate_exps.scale`. llama.cpp refuses the
    /// file if it needs them.
    pub without: Vec<&'static str>,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; `None`: half of `heads`, or all where that is odd or the architecture wants it.
    pub kv_heads: Option<u32>,
    /// Width of a head; `None`: `embd / heads`.
    pub head_dim: Option<u32>,
    /// Rank of compressed queries; `None`: about half of `embd`.
    pub lora_q: Option<u32>,
    /// Rank of compressed keys and values; `None`: about half of `embd`.
    pub lora_kv: Option<u32>,
    /// Width of the experts' input where they see a projection (Nemotron-H, Kimi K3), 0 for none; `None`: about half of
    /// `embd`.
    pub latent: Option<u32>,
    /// Every second layer with experts has them of half the width and uses half as many (Nemotron-H Puzzle).
    pub uneven: bool,
    /// Width of the embeddings per layer (Gemma 4), or 0 for none.
    pub per_layer_embd: u32,
    /// Sizes that only `qwen4exp` has.
    pub qwen4exp: Qwen4Exp,
    /// Tokens in the vocabulary, at least [`super::vocab::TOKENS_MIN`].
    pub vocab: u32,
    /// Context length in tokens that the model claims.
    pub ctx: u32,
    /// Format of the experts' gate and up; several are taken in turn by the MoE layers.
    pub types: Vec<Format>,
    /// Format of the experts' down; empty: as `types`.
    pub down_types: Vec<Format>,
    /// Format of all other matrices; `None`: the first of `types`.
    pub dense_type: Option<Format>,
    /// The same seed gives the same bytes.
    pub seed: u64,
    /// Files to divide the model into.
    pub shards: u32,
}

pub fn architectures() -> impl Iterator<Item = &'static str> {
    archs().map(|arch| arch.name)
}

/// The names in [`architectures`] whose layers are not all ordinary attention with experts of the same input.
pub fn recent_architectures() -> impl Iterator<Item = &'static str> {
    arch_hybrid::ARCHS.iter().chain(arch_sparse::ARCHS).map(|arch| arch.name)
}

fn archs() -> impl Iterator<Item = &'static Arch> {
    arch_table::ARCHS.iter().chain(arch_hybrid::ARCHS).chain(arch_sparse::ARCHS)
}

/// Default [`Spec::router_spread`]: clear enough that tokens use different experts, soft enough that more than one
/// expert counts. The bundled demo model, whose routers are trained, is close: at HOBBIT's thresholds (T1 0.6, T2
/// 0.9) 60 % of its uses ask for high precision, 33 % for low and 6 % are skipped.
const ROUTER_SPREAD: f32 = 2.0;
/// Greatest [`Spec::router_spread`]: one expert has all the weight long before this value.
const ROUTER_SPREAD_MAX: f32 = 1000.0;
impl Spec {
    /// A model of a few MB: 4 layers of 8 experts of 256 x 256, two used per token, Q8_0 (gpt-oss: MXFP4).
    pub fn tiny(arch: &str) -> Spec {
        let gpt_oss = arch == "gpt-oss";
        Spec {
            arch: arch.to_owned(),
            layers: 4,
            embd: 256,
            ff: 256,
            ff_dense: None,
            experts: 8,
            topk: 2,
            shared: None,
            dense_lead: None,
            mtp: 0,
            only_mtp: false,
            moe_step: 1,
            gating: None,
            groups: None,
            router_spread: ROUTER_SPREAD,
            fused: false,
            expert_scales: false,
            without: Vec::new(),
            heads: 4,
            kv_heads: None,
            head_dim: None,
            lora_q: None,
            lora_kv: None,
            latent: None,
            uneven: false,
            per_layer_embd: 0,
            qwen4exp: Qwen4Exp::default(),
            vocab: 512,
            ctx: 4096,
            types: vec![if gpt_oss { Format::Mxfp4 } else { Format::Q8_0 }],
            down_types: Vec::new(),
            dense_type: gpt_oss.then_some(Format::Q8_0),
            seed: 0,
            shards: 1,
        }
    }

    /// Checks all fields and derives the sizes left open.
    pub(super) fn sizes(&self) -> anyhow::Result<Sizes> {
        let arch = archs().find(|arch| arch.name == self.arch).with_context(|| {
            let known: Vec<_> = architectures().collect();
            format!("--arch '{}': expected one of {}", self.arch, known.join(", "))
        })?;
        let fault = |flag: &'static str, found: String, expected: String| {
            bail!("{flag} {found}: expected {expected} ({})", arch.name)
        };
        // llama.cpp: LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS; the others keep every product inside 64 bits.
        let has_mtp = arch.tensors.iter().copied().flatten().any(|row| row.scope == Scope::Mtp);
        let limits = [
            ("--layers", self.layers, arch.mixing.period(), 512),
            ("--embd", self.embd, 32, 1 << 17),
            ("--ff", self.ff, 32, 1 << 18),
            ("--experts", self.experts, 2, 512),
            ("--topk", self.topk, 1, self.experts),
            ("--heads", self.heads, 1, 1024),
            ("--vocab", self.vocab, super::vocab::TOKENS_MIN, super::vocab::TOKENS_MAX),
            ("--ctx", self.ctx, 1, 1 << 24),
            ("--mtp", self.mtp, 0, if has_mtp { 8 } else { 0 }),
            ("--moe-step", self.moe_step, 1, if arch.interleaved { self.layers } else { 1 }),
            ("--split", self.shards, 1, 9999),
        ];
        for (flag, found, least, most) in limits {
            if !(least..=most).contains(&found) {
                return fault(flag, found.to_string(), format!("{least} to {most}"));
            }
        }
        for (flag, width) in [("--embd", self.embd), ("--ff", self.ff)] {
            if !width.is_multiple_of(32) {
                return fault(flag, width.to_string(), "a multiple of 32".to_owned());
            }
        }
        if !(self.router_spread > 0.0 && self.router_spread <= ROUTER_SPREAD_MAX) {
            let wanted = format!("a number above 0 and up to {ROUTER_SPREAD_MAX}");
            return fault("--router-spread", self.router_spread.to_string(), wanted);
        }
        let halved = !arch.multi_head && self.heads.is_multiple_of(2);
        let kv_heads = self.kv_heads.unwrap_or(if halved { self.heads / 2 } else { self.heads });
        if kv_heads == 0 || !self.heads.is_multiple_of(kv_heads) || arch.multi_head && kv_heads != self.heads {
            let wanted = if arch.multi_head { "as many as --heads" } else { "a divisor of --heads" };
            return fault("--kv-heads", kv_heads.to_string(), wanted.to_owned());
        }
        let head_dim = self.head_dim.unwrap_or(self.embd / self.heads);
        if head_dim == 0 || !head_dim.is_multiple_of(32) || head_dim > 1024 {
            return fault("--head-dim", head_dim.to_string(), "a multiple of 32 up to 1024".to_owned());
        }
        let dense_lead = self.dense_lead.unwrap_or(arch.dense_lead.unwrap_or(0)).min(self.layers);
        if dense_lead > 0 && arch.dense_lead.is_none() {
            return fault("--dense-lead", dense_lead.to_string(), "0".to_owned());
        }
        let (least, usual, most) = arch.shared;
        let shared = self.shared.unwrap_or(usual);
        if !(least..=most).contains(&shared) {
            return fault("--shared", shared.to_string(), format!("{least} to {most}"));
        }
        if self.fused && !arch.fused {
            let able: Vec<_> = archs().filter(|arch| arch.fused).map(|arch| arch.name).collect();
            return fault("--fused", "given".to_owned(), format!("one of {}", able.join(", ")));
        }
        if let Some(ExpertGroups { count, used }) = self.groups
            && (count < 2 || !self.experts.is_multiple_of(count) || count >= self.experts || used == 0 || used >= count)
        {
            let wanted = "N/K: N groups that divide --experts, 0 < K < N".to_owned();
            return fault("--groups", format!("{count}/{used}"), wanted);
        }
        let has_per_layer = arch.tensors.iter().copied().flatten().any(|row| row.dims.contains(&Dim::PerLayer));
        if self.per_layer_embd > 0 && !has_per_layer || self.per_layer_embd > 4096 {
            let wanted = if has_per_layer { "0 to 4096" } else { "0" };
            return fault("--per-layer-embd", self.per_layer_embd.to_string(), wanted.to_owned());
        }
        if arch.name == "deepseek2" && matches!(self.layers, 26 | 27) {
            // llama.cpp takes such models for DeepSeek-V2-Lite, whose queries are not compressed.
            return fault("--layers", self.layers.to_string(), "not 26 or 27".to_owned());
        }
        let rank = (self.embd / 2).next_multiple_of(32);
        let (lora_q, lora_kv) = (self.lora_q.unwrap_or(rank), self.lora_kv.unwrap_or(rank));
        for (flag, rank) in [("--lora-q", lora_q), ("--lora-kv", lora_kv)] {
            if !rank.is_multiple_of(32) || !(32..=1 << 17).contains(&rank) {
                return fault(flag, rank.to_string(), "a multiple of 32 from 32 to 131072".to_owned());
            }
        }
        let latent = self.latent.unwrap_or(if arch.latent.is_some() { rank } else { 0 });
        if !latent.is_multiple_of(32) || latent > if arch.latent.is_some() { 1 << 17 } else { 0 } {
            let wanted = if arch.latent.is_some() { "a multiple of 32 up to 131072" } else { "0" };
            return fault("--latent", latent.to_string(), wanted.to_owned());
        }
        if self.uneven && arch.mixing != Mixing::InTurn {
            return fault("--uneven", "given".to_owned(), "nemotron_h_moe".to_owned());
        }
        if self.types.is_empty() {
            return fault("--type", "none".to_owned(), "at least one type".to_owned());
        }
        let ff_dense = match self.ff_dense {
            _ if arch.ff_is_expert => self.ff,
            Some(width) => width,
            None => self.ff.saturating_mul(self.topk),
        };
        if ff_dense == 0 || !ff_dense.is_multiple_of(32) || ff_dense > 1 << 22 {
            return fault("--ff-dense", ff_dense.to_string(), "a multiple of 32 up to 4194304".to_owned());
        }
        let (own, is_qwen4exp) = (&self.qwen4exp, arch.name == "qwen4exp");
        let sizes = Sizes {
            arch,
            embd: self.embd.into(),
            ff: self.ff.into(),
            ff_dense: ff_dense.into(),
            experts: self.experts.into(),
            topk: self.topk.into(),
            heads: self.heads.into(),
            vocab: self.vocab.into(),
            kv_heads: kv_heads.into(),
            head_dim: head_dim.into(),
            lora_q: lora_q.into(),
            lora_kv: lora_kv.into(),
            latent: latent.into(),
            uneven: self.uneven,
            per_layer: self.per_layer_embd.into(),
            layers: self.layers.into(),
            shared: shared.into(),
            ff_shared: u64::from(shared) * u64::from(self.ff),
            dense_lead,
            qwen4exp: *own,
            state_width: own.state_width.unwrap_or(head_dim).into(),
            rotated: own.rotated.unwrap_or(if is_qwen4exp { head_dim.min(INDEX_WIDTH) } else { head_dim }).into(),
            ngram_rows: own.ngram_rows.map_or(2 * u64::from(self.vocab), u64::from),
        };
        if is_qwen4exp {
            own.check(&sizes)?;
        }
        Ok(sizes)
    }

    pub(super) fn is_moe_layer(&self, layer: u32, sizes: &Sizes) -> bool {
        match sizes.arch.mixing {
            Mixing::InTurn => layer % 2 == 1 || layer >= self.layers,
            _ if layer >= self.layers && sizes.arch.mtp_dense => false,
            _ => layer >= sizes.dense_lead && (layer + 1).is_multiple_of(self.moe_step),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub arch: &'static Arch,
    pub embd: u64,
    pub ff: u64,
    pub ff_dense: u64,
    pub experts: u64,
    pub topk: u64,
    pub heads: u64,
    pub vocab: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub lora_q: u64,
    pub lora_kv: u64,
    pub latent: u64,
    pub uneven: bool,
    pub per_layer: u64,
    pub layers: u64,
    pub shared: u64,
    pub ff_shared: u64,
    pub dense_lead: u32,
    pub qwen4exp: Qwen4Exp,
    pub state_width: u64,
    pub rotated: u64,
    /// Rows of each head.
    pub ngram_rows: u64,
}

impl Sizes {
    pub(super) fn at(&self, layer: u32) -> Sizes {
        let mut sizes = self.clone();
        if self.uneven && layer % 4 == 3 {
            (sizes.ff, sizes.topk) = (self.ff / 2, self.topk.div_ceil(2));
        }
        sizes
    }

    pub(super) fn of(&self, dim: Dim) -> u64 {
        let (rope, own) = (self.head_dim / 2, &self.qwen4exp);
        let (ssm_inner, ssm_heads) = (2 * self.embd, 2 * self.embd / 64);
        let ssm_conv = ssm_inner + 2 * u64::from(SSM_GROUPS * SSM_STATE);
        match dim {
            Dim::Embd => self.embd,
            Dim::Vocab => self.vocab,
            Dim::Heads => self.heads,
            Dim::HeadWidth | Dim::MlaPlain => self.head_dim,
            Dim::Q | Dim::MlaV => self.heads * self.head_dim,
            Dim::Kv => self.kv_heads * self.head_dim,
            Dim::Qkv => (self.heads + 2 * self.kv_heads) * self.head_dim,
            Dim::Experts => self.experts,
            Dim::FfExpert => self.ff,
            Dim::FfGateUp => 2 * self.ff,
            Dim::FfDense => self.ff_dense,
            Dim::FfShared => self.ff_shared,
            Dim::LoraQ => self.lora_q,
            Dim::LoraKv => self.lora_kv,
            Dim::LatentKv => self.lora_kv + rope,
            Dim::Rope => rope,
            Dim::MlaHead => self.head_dim + rope,
            Dim::MlaQ => self.heads * (self.head_dim + rope),
            Dim::PerLayer => self.per_layer,
            Dim::AllPerLayer => self.per_layer * self.layers,
            Dim::ChunkExperts => self.experts / 2,
            Dim::Exactly(length) => length.into(),
            Dim::KvHeads => self.kv_heads,
            Dim::Times(times, dim) => u64::from(times) * self.of(*dim),
            Dim::ExpertEmbd if self.latent > 0 => self.latent,
            Dim::ExpertEmbd => self.embd,
            Dim::SsmInner => ssm_inner,
            Dim::SsmHeads => ssm_heads,
            Dim::SsmConv => ssm_conv,
            Dim::SsmIn => ssm_inner + ssm_conv + ssm_heads,
            Dim::Used => self.topk,
            Dim::StateKeys => own.key_heads.into(),
            Dim::StateValues => own.value_heads.into(),
            Dim::StateWidth => self.state_width,
            Dim::StateInner => u64::from(own.value_heads) * self.state_width,
            Dim::StateConv => (2 * u64::from(own.key_heads) + u64::from(own.value_heads)) * self.state_width,
            Dim::Rotated => self.rotated,
            Dim::StreamRank => own.stream_rank.into(),
            Dim::IndexHeads => own.index_heads.into(),
            Dim::IndexBudget => own.index_budget.into(),
            Dim::NGram => own.ngram.into(),
            Dim::NGramHeads => own.ngram_heads.into(),
            Dim::NGramWidth => self.embd / own.heads().max(1),
            Dim::NGramRows => own.heads() * self.ngram_rows,
        }
    }
}
