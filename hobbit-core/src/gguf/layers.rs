//! Facts about a model's layers (llama.cpp's blocks) from its header: which of them run, how many experts a token uses
//! in each, and the memory of a context.
//!
//! Keys that llama.cpp reads by layer are one number for all layers, or an array with a number for each.

use std::ops::Range;

use super::{Gguf, TensorInfo, VirtualGguf};

/// Tensors that make keys. If some layers have one, the other layers keep no tokens: they are recurrent, or have no
/// attention.
const KEYS: [&str; 2] = ["attn_k.weight", "attn_kv_a_mqa.weight"];

/// Beginnings of the names of recurrent layers' tensors.
const RECURRENT: [&str; 2] = ["ssm_", "shortconv."];

/// Architectures for which llama.cpp has a graph of the layers for multi-token prediction (`graph_mtp`).
#[rustfmt::skip]
const MTP_ARCHITECTURES: [&str; 15] = [
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "hy_v3", "mimo2",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "step35",
];

/// Numbers of positions whose keys a layer of qwen4exp pools, by layer.
const QWEN4EXP_RATIOS: &str = "attention.compress_ratios";

/// Layer and rest of the name of a layer's tensor.
fn layer_of(name: &str) -> Option<(u64, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let is_number = layer.bytes().all(|byte| byte.is_ascii_digit());
    Some((layer.parse().ok().filter(|_| is_number)?, rest))
}

impl Gguf {
    fn number(&self, name: &str) -> Option<u64> {
        self.metadata.get_u64(&format!("{}.{name}", self.architecture()))
    }

    fn numbers(&self, name: &str) -> Option<Vec<u64>> {
        self.metadata.get_u64_arr(&format!("{}.{name}", self.architecture()))
    }

    /// Number of the layers that run when a token is decoded. Layers behind them are for multi-token prediction.
    /// `u64::MAX` if the header does not tell.
    pub fn n_layers_run(&self) -> u64 {
        let Some(all) = self.number("block_count") else { return u64::MAX };
        let run = all.saturating_sub(self.number("nextn_predict_layers").unwrap_or(0));
        // llama.cpp takes deepseek4's last layers for ordinary ones if they lack this tensor.
        let is_ordinary =
            self.architecture() == "deepseek4" && self.tensor(&format!("blk.{run}.nextn.eh_proj.weight")).is_none();
        if is_ordinary { all } else { run }
    }

    /// The layers for multi-token prediction, if the file has them and llama.cpp can run them.
    pub fn mtp_layers(&self) -> Option<Range<u64>> {
        let first = self.n_layers_run();
        let has_graph = MTP_ARCHITECTURES.contains(&self.architecture());
        let is_there = has_graph && self.tensor(&format!("blk.{first}.nextn.eh_proj.weight")).is_some();
        let layers = first..self.number("block_count").unwrap_or(first);
        (is_there && !(self.others_pool(&layers) && self.runs())).then_some(layers)
    }

    /// Whether some layers of qwen4exp pool their keys, and those for multi-token prediction, `layers`, do not.
    /// llama.cpp's graph of the latter then has an input without a value.
    fn others_pool(&self, layers: &Range<u64>) -> bool {
        let ratios = self.numbers(QWEN4EXP_RATIOS).unwrap_or_default();
        let predicting = ratios.iter().skip(usize::try_from(layers.start).unwrap_or(usize::MAX));
        self.architecture() == "qwen4exp"
            && ratios.iter().any(|ratio| *ratio > 0)
            && predicting.into_iter().any(|ratio| *ratio == 0)
    }

    /// The tensor without which llama.cpp takes the file for layers of multi-token prediction alone, and needs no other;
    /// `None` if the file has it, or declares no such layers.
    pub fn lacks_layers(&self) -> Option<&'static str> {
        let arch = self.architecture();
        let name = if arch == "qwen4exp" { "blk.0.hc_attn_norm.weight" } else { "blk.0.attn_norm.weight" };
        let declares = MTP_ARCHITECTURES.contains(&arch) && self.number("nextn_predict_layers").is_some_and(|n| n > 0);
        (declares && self.tensor(name).is_none()).then_some(name)
    }

    /// Whether the file has layers that run.
    fn runs(&self) -> bool {
        let first = self.n_layers_run();
        self.tensors.iter().any(|tensor| layer_of(&tensor.name).is_some_and(|(layer, _)| layer < first))
    }

    /// Whether the file has a model's layers for multi-token prediction, and not those that run.
    pub fn is_mtp_head(&self) -> bool {
        self.mtp_layers().is_some() && !self.runs()
    }

    /// The file as llama.cpp can run its layers for multi-token prediction, where it cannot as it is.
    pub fn mtp_head_mended(&self) -> Option<VirtualGguf> {
        if !self.others_pool(&self.mtp_layers()?) {
            return None;
        }
        // These layers do not pool: without the key, none does.
        let key = format!("{}.{QWEN4EXP_RATIOS}", self.architecture());
        let mut file = self.virtual_file();
        let at = file.header.windows(key.len()).position(|bytes| bytes == key.as_bytes())?;
        file.header[at + key.len() - 1] = b'-';
        Some(file)
    }

    pub fn tensors_from(&self, first: u64) -> impl Iterator<Item = &TensorInfo> {
        let is_behind = move |name: &str| layer_of(name).is_some_and(|(layer, _)| layer >= first);
        self.tensors.iter().filter(move |tensor| is_behind(&tensor.name))
    }

    /// Number of experts that a token uses in `layer`; 0 if the header does not tell.
    pub fn n_expert_used(&self, layer: u16) -> u32 {
        const KEY: &str = "expert_used_count";
        let by_layer = || self.numbers(KEY)?.get(usize::from(layer)).copied();
        let n = self.number(KEY).or_else(by_layer).unwrap_or(0);
        u32::try_from(n).unwrap_or(u32::MAX)
    }

    /// The most experts that a token uses in any layer; 0 if the header does not tell.
    pub fn n_expert_used_max(&self) -> u32 {
        let layers = self.numbers("expert_used_count").map_or(1, |by_layer| by_layer.len());
        (0..layers).map(|layer| self.n_expert_used(layer as u16)).max().unwrap_or(0)
    }

    /// Numbers of keys and values that one token of a context takes in all layers. Sliding windows would take less.
    pub fn kv_elements(&self) -> u64 {
        let n_head = self.number("attention.head_count").unwrap_or(0);
        let head = self.number("embedding_length").unwrap_or(0) / n_head.max(1);
        let k = self.number("attention.key_length").unwrap_or(head);
        // llama.cpp keeps only the keys of compressed attention.
        let is_compressed = self.number("attention.key_length_mla").is_some();
        let v = if is_compressed { 0 } else { self.number("attention.value_length").unwrap_or(head) };
        let n_layers = self.n_layers_run();
        let heads = match self.numbers("attention.head_count_kv") {
            Some(by_layer) => {
                let end = usize::try_from(n_layers).unwrap_or(usize::MAX).min(by_layer.len());
                by_layer[..end].iter().copied().fold(0, u64::saturating_add)
            }
            None => {
                let with_keys = self.count_layers(|rest| KEYS.contains(&rest));
                let n_layers =
                    if with_keys > 0 { with_keys } else { self.number("block_count").map_or(0, |_| n_layers) };
                self.number("attention.head_count_kv").unwrap_or(n_head).saturating_mul(n_layers)
            }
        };
        heads.saturating_mul(k.saturating_add(v))
    }

    /// Numbers of the state that recurrent layers keep of one sequence, whatever its length. An upper estimate; source:
    /// llama.cpp `llama_hparams::n_embd_r` and `n_embd_s`.
    pub fn state_elements(&self) -> u64 {
        let number = |name: &str| self.number(name).unwrap_or(0);
        let n_head = number("attention.head_count");
        let square = |width: u64| width.saturating_mul(width).saturating_mul(n_head);
        let (inner, state) = (number("ssm.inner_size"), number("ssm.state_size"));
        let groups = number("ssm.group_count").saturating_mul(2).saturating_mul(state);
        let of_scan = inner.saturating_mul(state).saturating_add(square(number("kda.head_dim")));
        let width =
            inner.saturating_add(groups).saturating_add(n_head.saturating_mul(3 * number("kda.head_dim").min(1 << 32)));
        let of_convolution = width.saturating_mul(number("ssm.conv_kernel"));
        let of_short = number("embedding_length").saturating_mul(number("shortconv.l_cache"));
        let by_layer = of_scan.saturating_add(of_convolution).saturating_add(of_short);
        let n_layers = self.count_layers(|rest| RECURRENT.iter().any(|known| rest.starts_with(known)));
        by_layer.saturating_mul(n_layers)
    }

    /// Number of layers that run and have a tensor that `is_such` accepts, by the name behind the layer's number.
    fn count_layers(&self, is_such: impl Fn(&str) -> bool) -> u64 {
        let of_tensors = self.tensors.iter().filter_map(|tensor| layer_of(&tensor.name));
        let mut layers: Vec<u64> = of_tensors.filter(|(_, rest)| is_such(rest)).map(|(layer, _)| layer).collect();
        layers.sort_unstable();
        layers.dedup();
        layers.retain(|layer| *layer < self.n_layers_run());
        layers.len() as u64
    }
}
