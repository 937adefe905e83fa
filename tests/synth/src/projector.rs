//! Random projectors: the encoders of images and sound that llama.cpp's mtmd loads beside a model (`--mmproj`). Each
//! has one layer and runs in milliseconds.

use std::path::Path;

use hobbit_core::gguf::Value;

use super::file::{Small, write_small};
use super::format::Format;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Projector {
    /// Gemma 3: images of 4 tokens, which see each other.
    Gemma3,
    /// Qwen2-VL: images of any size, for models with M-RoPE.
    Qwen2vl,
    /// Qwen3-VL, without the embeddings of inner layers (deepstack): images of any size, for models with M-RoPE.
    Qwen3vl,
    /// InternVL: one tile of 4 tokens for a small image; for a larger one up to 12, and one of the whole.
    Internvl,
    /// Qwen2-Audio: sound, 750 tokens for 30 seconds.
    Qwen2a,
}

/// Width of the encoder.
const EMBD: u64 = 64;
/// Width of its hidden layer.
const FF: u64 = 128;
/// Side of a patch, in pixels.
const PATCH: u64 = 16;

impl Projector {
    fn keys(self, width: u32) -> Vec<(String, Value)> {
        let (kind, part) = match self {
            Self::Gemma3 => ("gemma3", "vision"),
            Self::Qwen2vl => ("qwen2vl_merger", "vision"),
            Self::Qwen3vl => ("qwen3vl_merger", "vision"),
            Self::Internvl => ("internvl", "vision"),
            Self::Qwen2a => ("qwen2a", "audio"),
        };
        let mut keys: Vec<(String, Value)> = vec![
            ("general.architecture".into(), "clip".into()),
            ("general.type".into(), "mmproj".into()),
            ("clip.projector_type".into(), kind.into()),
            (format!("clip.has_{part}_encoder"), true.into()),
            ("clip.use_gelu".into(), true.into()),
        ];
        let mut own: Vec<(&str, Value)> = vec![
            ("embedding_length", (EMBD as u32).into()),
            ("feed_forward_length", (FF as u32).into()),
            ("block_count", 1u32.into()),
            ("projection_dim", width.into()),
            ("attention.head_count", 4u32.into()),
            ("attention.layer_norm_epsilon", 1e-6f32.into()),
        ];
        match self {
            Self::Qwen2a => own.push(("num_mel_bins", 80u32.into())),
            _ => own.extend([
                ("image_size", (4 * PATCH as u32).into()),
                ("patch_size", (PATCH as u32).into()),
                ("projector.scale_factor", 2u32.into()),
                ("image_mean", Value::array([0.5f32; 3])),
                ("image_std", Value::array([0.5f32; 3])),
            ]),
        }
        keys.extend(own.into_iter().map(|(key, value)| (format!("clip.{part}.{key}"), value)));
        keys
    }

    /// Names and shapes. Of one dimension: biases, and norms if the name has `ln` or `norm`.
    fn tensors(self, width: u64) -> Vec<(String, Vec<u64>)> {
        let mut all: Vec<(String, Vec<u64>)> = Vec::new();
        let mut add = |name: &str, dims: &[u64]| all.push((name.to_owned(), dims.to_vec()));
        let part = if self == Self::Qwen2a { "a" } else { "v" };
        match self {
            Self::Gemma3 => {
                add("v.patch_embd.weight", &[PATCH, PATCH, 3, EMBD]);
                add("v.patch_embd.bias", &[EMBD]);
                add("v.position_embd.weight", &[EMBD, 16]);
                add("mm.input_projection.weight", &[width, EMBD]);
                add("mm.soft_emb_norm.weight", &[EMBD]);
            }
            Self::Qwen2vl | Self::Qwen3vl => {
                add("v.patch_embd.weight", &[PATCH, PATCH, 3, EMBD]);
                add("v.patch_embd.weight.1", &[PATCH, PATCH, 3, EMBD]);
                if self == Self::Qwen3vl {
                    add("v.patch_embd.bias", &[EMBD]);
                    add("v.position_embd.weight", &[EMBD, 16]);
                }
                add("mm.0.weight", &[4 * EMBD, 4 * EMBD]);
                add("mm.0.bias", &[4 * EMBD]);
                add("mm.2.weight", &[4 * EMBD, width]);
                add("mm.2.bias", &[width]);
            }
            Self::Internvl => {
                add("v.class_embd", &[EMBD]);
                add("v.patch_embd.weight", &[PATCH, PATCH, 3, EMBD]);
                add("v.patch_embd.bias", &[EMBD]);
                add("v.position_embd.weight", &[EMBD, 17]);
                add("mm.model.mlp.0.weight", &[4 * EMBD]);
                add("mm.model.mlp.0.bias", &[4 * EMBD]);
                add("mm.model.mlp.1.weight", &[4 * EMBD, FF]);
                add("mm.model.mlp.1.bias", &[FF]);
                add("mm.model.mlp.3.weight", &[FF, width]);
                add("mm.model.mlp.3.bias", &[width]);
            }
            Self::Qwen2a => {
                add("a.conv1d.1.weight", &[3, 80, EMBD]);
                add("a.conv1d.1.bias", &[1, EMBD]);
                add("a.conv1d.2.weight", &[3, EMBD, EMBD]);
                add("a.conv1d.2.bias", &[1, EMBD]);
                add("a.position_embd.weight", &[EMBD, 1500]);
                add("mm.a.fc.weight", &[EMBD, width]);
                add("mm.a.fc.bias", &[width]);
            }
        }
        for norm in ["blk.0.ln1", "blk.0.ln2", "post_ln"] {
            add(&format!("{part}.{norm}.weight"), &[EMBD]);
            add(&format!("{part}.{norm}.bias"), &[EMBD]);
        }
        let attention: &[(&str, u64)] = match self {
            Self::Qwen3vl => &[("attn_qkv", 3 * EMBD), ("attn_out", EMBD)],
            _ => &[("attn_q", EMBD), ("attn_k", EMBD), ("attn_v", EMBD), ("attn_out", EMBD)],
        };
        for (name, n) in attention {
            add(&format!("{part}.blk.0.{name}.weight"), &[EMBD, *n]);
            if !(self == Self::Qwen2a && *name == "attn_k") {
                add(&format!("{part}.blk.0.{name}.bias"), &[*n]);
            }
        }
        add(&format!("{part}.blk.0.ffn_up.weight"), &[EMBD, FF]);
        add(&format!("{part}.blk.0.ffn_up.bias"), &[FF]);
        add(&format!("{part}.blk.0.ffn_down.weight"), &[FF, EMBD]);
        add(&format!("{part}.blk.0.ffn_down.bias"), &[EMBD]);
        all
    }

    /// Writes a projector for models with embeddings of `width` numbers.
    pub fn write(self, path: &Path, width: u32, seed: u64) -> anyhow::Result<()> {
        // As real projectors have them: mtmd convolves with kernels of 16 bits.
        let format =
            |name: &str| if name.contains("conv1d") && name.ends_with("weight") { Format::F16 } else { Format::F32 };
        let spread = |name: &str, dims: &[u64]| {
            let inputs: u64 = if dims.len() > 2 { dims[..dims.len() - 1].iter().product() } else { dims[0] };
            match (name.ends_with("bias"), dims.len()) {
                (true, _) => (0.0, 0.05),
                (false, 1) => (1.0, 0.05),
                _ if name.contains("position") => (0.0, 0.1),
                _ => (0.0, 1.0 / (inputs as f32).sqrt()),
            }
        };
        let tensors = self.tensors(width.into()).into_iter();
        let tensors =
            tensors.map(|(name, dims)| Small { format: format(&name), spread: spread(&name, &dims), name, dims });
        write_small(path, self.keys(width), tensors.collect(), seed)
    }
}
