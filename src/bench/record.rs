//! The record of a case: llama-bench's columns, and hobbit's.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::host::Host;
use hobbit::stats::KernelTrial;

/// One test of one engine: a row of a table, an object of JSON. Keys, types and order of the first part are
/// llama-bench's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Commit of llama.cpp.
    pub build_commit: String,
    pub build_number: i32,
    pub cpu_info: String,
    pub gpu_info: String,
    pub backends: String,
    /// As given.
    pub model_filename: String,
    /// llama.cpp's description of the model.
    pub model_type: String,
    /// Bytes of all tensors.
    pub model_size: u64,
    pub model_n_params: u64,
    /// Tokens submitted at once.
    pub n_batch: u32,
    /// Tokens computed at once.
    pub n_ubatch: u32,
    pub n_threads: i32,
    /// Always `0x0`: threads are not bound.
    pub cpu_mask: String,
    /// Always false.
    pub cpu_strict: bool,
    /// llama-bench's default.
    pub poll: u32,
    pub type_k: String,
    pub type_v: String,
    /// Layers on devices; -1 chooses.
    pub n_gpu_layers: i32,
    /// Layers whose experts stay on the CPU.
    pub n_cpu_moe: u32,
    pub split_mode: String,
    /// The device used alone.
    pub main_gpu: u32,
    pub no_kv_offload: bool,
    /// -1 auto, 0 off, 1 on.
    pub flash_attn: i32,
    pub devices: String,
    pub tensor_split: String,
    /// `-ot`, or `none`.
    pub tensor_buft_overrides: String,
    /// How ordinary weights are loaded.
    pub load_mode: String,
    /// Always `auto`.
    pub lazy_mode: String,
    /// Always false.
    pub embeddings: bool,
    /// Always 0.
    pub no_op_offload: u32,
    /// Always false.
    pub no_host: bool,
    pub repack: bool,
    /// Always 0.
    pub fit_target: u64,
    /// Always 0.
    pub fit_min_ctx: u32,
    pub n_prompt: u32,
    pub n_gen: u32,
    /// Tokens in the context before, not timed.
    pub n_depth: u32,
    /// When it began, ISO 8601.
    pub test_time: String,
    /// Mean time of a repetition.
    pub avg_ns: u64,
    pub stddev_ns: u64,
    /// Mean tokens per second.
    pub avg_ts: f64,
    pub stddev_ts: f64,
    /// `hobbit` or `llama.cpp`.
    pub hobbit_engine: String,
    pub hobbit_engine_version: String,
    /// The study this belongs to.
    pub hobbit_label: String,
    /// The case within the study.
    pub hobbit_variant: String,
    /// `random`, or the name of the text.
    pub hobbit_text: String,
    /// Names the directory of results.
    pub hobbit_machine: String,
    pub hobbit_limit: Option<u64>,
    /// Bytes that hobbit planned with.
    pub hobbit_budget: Option<u64>,
    pub hobbit_expert_cache: Option<u64>,
    pub hobbit_expert_bytes: Option<u64>,
    /// Experts that can be resident.
    pub hobbit_n_slots: Option<u64>,
    pub hobbit_n_experts: Option<u64>,
    pub hobbit_n_expert: Option<u32>,
    pub hobbit_n_expert_used: Option<u32>,
    /// `exact` or `dynamic`.
    pub hobbit_precision: Option<String>,
    pub hobbit_policy: Option<String>,
    pub hobbit_predictor: Option<String>,
    pub hobbit_prefetch: Option<String>,
    /// Which kernels may multiply in batches.
    pub hobbit_kernels: Option<String>,
    /// Tokens of hobbit's widest ubatch; 0: all have `n_ubatch`.
    #[serde(default)]
    pub hobbit_ubatch_max: u32,
    /// hobbit's own flags of the case.
    pub hobbit_flags: String,
    /// Experts found resident in the measured repetitions.
    pub hobbit_hits: Option<u64>,
    /// Experts that were not resident.
    pub hobbit_misses: Option<u64>,
    pub hobbit_bytes: Option<u64>,
    /// Bytes that the kernel read for the process.
    pub hobbit_disk_bytes: Option<u64>,
    pub hobbit_decode_hits: Option<u64>,
    pub hobbit_decode_misses: Option<u64>,
    pub hobbit_decode_bytes: Option<u64>,
    pub hobbit_decode_stall_ns: Option<u64>,
    /// Time that the computation waited for reads.
    pub hobbit_stall_ns: Option<u64>,
    pub hobbit_io_busy_ns: Option<u64>,
    /// Bytes per second of random reads of the model's slices, measured just before.
    pub hobbit_bandwidth: Option<f64>,
    /// Tokens per second if only reading took time.
    pub hobbit_roofline_ts: Option<f64>,
    /// Decode speed as a share of the roofline.
    pub hobbit_roofline_share: Option<f64>,
    /// Share of single tokens' time that fully overlapped reading and computing would take.
    pub hobbit_efficiency: Option<f64>,
    /// From the start of the process to an open context.
    pub hobbit_load_ns: Option<u64>,
    /// From the start of the process to the first logits; only without warm-up.
    pub hobbit_first_token_ns: Option<u64>,
    pub hobbit_prompt_ts: Option<f64>,
    pub hobbit_decode_ts: Option<f64>,
    pub hobbit_decode_median_ns: Option<u64>,
    /// Tokens drafted in the measured repetitions.
    pub hobbit_drafted: Option<u64>,
    /// Those of them that the text took.
    pub hobbit_accepted: Option<u64>,
    pub hobbit_peak_rss: Option<u64>,
    /// Largest use of the control group, page cache included.
    pub hobbit_cgroup_peak: Option<u64>,
    pub hobbit_limit_hits: Option<u64>,
    /// Evaluations that this engine and the baseline both made.
    pub hobbit_logits_compared: Option<u64>,
    /// Compared evaluations with identical bits.
    pub hobbit_logits_equal: Option<u64>,
    /// `ok`, `killed` (by the limit) or `failed: ` and why.
    pub hobbit_outcome: String,
    /// Values that do not fit a table.
    #[serde(flatten)]
    pub more: More,
}

/// The first key of [`More`]: keys before it are columns.
pub const FIRST_LIST: &str = "samples_ns";

/// Lists: in JSON only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct More {
    pub samples_ns: Vec<u64>,
    pub samples_ts: Vec<f64>,
    /// Time of each repetition's prompt.
    pub hobbit_prompt_ns: Vec<u64>,
    /// Time of each repetition's single tokens.
    pub hobbit_decode_ns: Vec<u64>,
    /// Time of every single token, in order.
    pub hobbit_steps_ns: Vec<u64>,
    pub hobbit_series: Vec<Moment>,
    /// Cost of stopping after every router for a single token in plain llama.cpp, if it follows recorded routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hobbit_stops_ns: Option<i64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hobbit_kernel_trials: Vec<KernelTrial>,
    /// How single tokens met `--target-latency`: a [`LatencyReport`](hobbit::stats::LatencyReport). A JSON value,
    /// because fractional numbers do not survive flattening.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hobbit_target_latency: Option<Value>,
    pub hobbit_host: Host,
}

/// The process at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Moment {
    /// Time since the process started.
    pub t_ns: u64,
    pub rss: u64,
    /// Anonymous part of the resident set.
    pub anon: u64,
    /// Bytes allocated by malloc; `None` if unknown.
    pub heap: Option<u64>,
    pub fds: u32,
    /// Tokens evaluated so far.
    pub tokens: u64,
}

/// Tokens per second; `None` if nothing was evaluated.
pub fn speed(tokens: u64, ns: u64) -> Option<f64> {
    (tokens > 0 && ns > 0).then(|| tokens as f64 * 1e9 / ns as f64)
}
