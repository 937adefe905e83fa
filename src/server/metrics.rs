//! Figures for Prometheus: llama-server's names, and hobbit's own.

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::status::State;

/// A metric's kind, name, what it says, and its value.
type Row = (&'static str, &'static str, &'static str, f64);

/// The text of `/metrics`. `cache_bytes`: what the expert cache may fill.
pub fn text(state: &State, cache_bytes: u64) -> String {
    let (all, since) = (&state.totals, &state.since);
    let rate = |n: u64, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
    let busy = state.slots.iter().filter(|slot| slot.is_processing).count();
    let rows: [Row; 23] = [
        ("counter", "llamacpp:prompt_tokens_total", "Number of prompt tokens processed.", all.prompt_tokens as f64),
        (
            "counter",
            "llamacpp:prompt_tokens_cached_total",
            "Number of prompt tokens taken from the cache.",
            all.cached_tokens as f64,
        ),
        ("counter", "llamacpp:prompt_seconds_total", "Prompt process time", all.prompt_seconds),
        (
            "counter",
            "llamacpp:tokens_predicted_total",
            "Number of generation tokens processed.",
            all.predicted_tokens as f64,
        ),
        ("counter", "llamacpp:tokens_predicted_seconds_total", "Predict process time", all.predicted_seconds),
        ("counter", "llamacpp:n_decode_total", "Total number of llama_decode() calls", all.n_decode as f64),
        ("counter", "llamacpp:n_tokens_max", "Largest observed n_tokens.", all.n_tokens_max as f64),
        // There are no drafts here; who reads llama-server's figures looks for them.
        ("counter", "llamacpp:spec_decode_num_draft_tokens_total", "Draft tokens generated.", 0.0),
        ("counter", "llamacpp:spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", 0.0),
        ("counter", "llamacpp:spec_decode_num_drafts_total", "Drafts verified.", 0.0),
        (
            "gauge",
            "llamacpp:prompt_tokens_seconds",
            "Average prompt throughput in tokens/s.",
            rate(since.prompt_tokens, since.prompt_seconds),
        ),
        (
            "gauge",
            "llamacpp:predicted_tokens_seconds",
            "Average generation throughput in tokens/s.",
            rate(since.predicted_tokens, since.predicted_seconds),
        ),
        ("gauge", "llamacpp:requests_processing", "Number of requests processing.", busy as f64),
        ("gauge", "llamacpp:requests_deferred", "Number of requests deferred.", state.n_waiting as f64),
        (
            "gauge",
            "llamacpp:n_busy_slots_per_decode",
            "Average number of busy slots per llama_decode() call",
            if all.n_decode > 0 { all.n_busy as f64 / all.n_decode as f64 } else { 0.0 },
        ),
        ("counter", "hobbit:requests_total", "Requests that were begun.", all.requests as f64),
        ("counter", "hobbit:expert_hits_total", "Experts found in memory by generated tokens.", all.hits),
        ("counter", "hobbit:expert_misses_total", "Experts that were not.", all.misses),
        ("counter", "hobbit:expert_bytes_read_total", "Bytes read for generated tokens.", all.bytes_read),
        (
            "counter",
            "hobbit:stall_seconds_total",
            "Time in which generated tokens waited for reads.",
            all.io_wait_seconds,
        ),
        (
            "gauge",
            "hobbit:bytes_per_token",
            "Bytes read for each token generated since the last look.",
            if since.predicted_tokens > 0 { since.bytes_read / since.predicted_tokens as f64 } else { 0.0 },
        ),
        (
            "gauge",
            "hobbit:expert_hit_rate",
            "Share of experts found in memory since the last look.",
            if since.hits + since.misses > 0.0 { since.hits / (since.hits + since.misses) } else { 0.0 },
        ),
        ("gauge", "hobbit:expert_cache_bytes", "Bytes of host memory that experts may fill.", cache_bytes as f64),
    ];
    let mut text = String::new();
    for (kind, name, help, value) in rows {
        text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n"));
    }
    let mut process = String::new();
    if encode(&mut process, &Registry::default()).is_ok() {
        text.push_str(process.trim_end_matches("# EOF\n"));
    }
    text
}
