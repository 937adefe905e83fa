//! Random drafts that read a model's hidden states: EAGLE3, DFlash and DSpark.

use std::path::Path;

use hobbit_core::gguf::Value;

use super::file::{Small, write_small};
use super::format::Format;
use super::model::vocab_keys;
use super::spec::Spec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafter {
    /// One layer, which reads three of the model's.
    Eagle3,
    /// Two layers, which guess a block of tokens at once.
    Dflash,
    /// As `Dflash`, with a chain over the guesses.
    Dspark,
}

const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
/// Tokens of a block.
const BLOCK: u32 = 8;
/// Width of the chain.
const RANK: u64 = 16;

impl Drafter {
    fn keys(self, target: &Spec, layers: &[u32]) -> Vec<(String, Value)> {
        let is_eagle = self == Self::Eagle3;
        let arch = if is_eagle { "eagle3" } else { "dflash" };
        let mut own: Vec<(&str, Value)> = vec![
            ("vocab_size", target.vocab.into()),
            ("context_length", target.ctx.into()),
            ("embedding_length", target.embd.into()),
            ("block_count", (self.n_layers() as u32).into()),
            ("feed_forward_length", (2 * target.embd).into()),
            ("attention.head_count", (HEADS as u32).into()),
            ("attention.head_count_kv", (KV_HEADS as u32).into()),
            ("attention.layer_norm_rms_epsilon", 1e-5f32.into()),
            ("rope.freq_base", 10_000f32.into()),
            ("target_layers", Value::array(layers.iter().map(|layer| *layer as i32))),
        ];
        if is_eagle {
            own.push(("target_hidden_size", target.embd.into()));
        } else {
            own.push(("block_size", BLOCK.into()));
        }
        let mut keys: Vec<(String, Value)> = vec![("general.architecture".into(), arch.into())];
        keys.extend(own.into_iter().map(|(key, value)| (format!("{arch}.{key}"), value)));
        keys.extend(vocab_keys(target.vocab));
        if !is_eagle {
            keys.push(("tokenizer.ggml.mask_token_id".into(), 5u32.into()));
        }
        keys
    }

    fn n_layers(self) -> u64 {
        if self == Self::Eagle3 { 1 } else { 2 }
    }

    fn tensors(self, target: &Spec, n_read: u64, own_embeddings: bool) -> Vec<(String, Vec<u64>)> {
        let (embd, vocab) = (u64::from(target.embd), u64::from(target.vocab));
        let (width, ff) = (embd / HEADS, 2 * embd);
        let mut all = Vec::new();
        let mut add = |name: &str, dims: &[u64]| all.push((name.to_owned(), dims.to_vec()));
        add("fc.weight", &[n_read * embd, embd]);
        add("output_norm.weight", &[embd]);
        if own_embeddings {
            add("token_embd.weight", &[embd, vocab]);
            add("output.weight", &[embd, vocab]);
        }
        let is_eagle = self == Self::Eagle3;
        // EAGLE3's attention reads a token's embedding beside the hidden states.
        let read = if is_eagle { 2 * embd } else { embd };
        for layer in 0..self.n_layers() {
            let mut of_layer = |name: &str, dims: &[u64]| add(&format!("blk.{layer}.{name}.weight"), dims);
            of_layer("attn_norm", &[embd]);
            of_layer("attn_q", &[read, embd]);
            of_layer("attn_k", &[read, KV_HEADS * width]);
            of_layer("attn_v", &[read, KV_HEADS * width]);
            of_layer("attn_output", &[embd, embd]);
            if is_eagle {
                of_layer("attn_norm_2", &[embd]);
            } else {
                of_layer("attn_q_norm", &[width]);
                of_layer("attn_k_norm", &[width]);
            }
            of_layer("ffn_norm", &[embd]);
            of_layer("ffn_gate", &[embd, ff]);
            of_layer("ffn_up", &[embd, ff]);
            of_layer("ffn_down", &[ff, embd]);
        }
        if !is_eagle {
            add("enc.output_norm.weight", &[embd]);
        }
        if self == Self::Dspark {
            add("markov_w1.weight", &[RANK, vocab]);
            add("markov_w2.weight", &[RANK, vocab]);
        }
        all
    }

    /// Writes a draft for `target` that reads the inputs of these layers; without embeddings of its own it uses the
    /// target's.
    pub fn write(self, path: &Path, target: &Spec, layers: &[u32], own_embeddings: bool) -> anyhow::Result<()> {
        let spread = |name: &str, dims: &[u64]| match dims.len() {
            1 => (1.0, 0.05),
            _ if name.starts_with("token_embd") => (0.0, 1.0),
            _ => (0.0, 1.0 / (dims[0] as f32).sqrt()),
        };
        let tensors = self.tensors(target, layers.len() as u64, own_embeddings).into_iter();
        let tensors =
            tensors.map(|(name, dims)| Small { format: Format::F32, spread: spread(&name, &dims), name, dims });
        write_small(path, self.keys(target, layers), tensors.collect(), target.seed + 1)
    }
}
