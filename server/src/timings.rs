//! Durations of a request, and the reads behind its tokens.

use hobbit::stats::PhaseStats;

/// Duration of a request, and the cache hits and misses of its tokens. The cost of a shared batch is divided evenly
/// among its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    pub n_cached: usize,
    pub n_prompt: usize,
    pub prompt_ms: f64,
    pub n_predicted: usize,
    pub predicted_ms: f64,
    pub traffic: Traffic,
    pub n_drafted: usize,
    /// Drafts that the text took.
    pub n_accepted: usize,
}

/// Traffic of a request's generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    pub tokens: f64,
    pub hits: f64,
    pub misses: f64,
    pub bytes_read: f64,
    pub io_wait_ms: f64,
    /// Time in which at least one read was under way.
    pub io_busy_ms: f64,
}

impl Traffic {
    /// Traffic between two states of a session's counters, without a count of tokens.
    pub fn between(before: &PhaseStats, now: &PhaseStats) -> Self {
        Self {
            tokens: 0.0,
            hits: (now.hits - before.hits) as f64,
            misses: (now.misses - before.misses) as f64,
            bytes_read: (now.bytes_read - before.bytes_read) as f64,
            io_wait_ms: (now.io_wait_seconds - before.io_wait_seconds) * 1e3,
            io_busy_ms: (now.io_busy_seconds - before.io_busy_seconds) * 1e3,
        }
    }

    /// Adds a share of a step's traffic; the wait for reads counts in full.
    pub fn add(&mut self, step: &Self, share: f64) {
        self.tokens += step.tokens * share;
        self.hits += step.hits * share;
        self.misses += step.misses * share;
        self.bytes_read += step.bytes_read * share;
        self.io_wait_ms += step.io_wait_ms;
        self.io_busy_ms += step.io_busy_ms;
    }
}

impl Timings {
    /// Prompt tokens evaluated or reused.
    pub fn n_done(&self) -> usize {
        self.n_cached + self.n_prompt
    }

    /// llama-server's fields and ours; all values are nonnegative numbers.
    pub fn json(&self) -> serde_json::Value {
        let per = |n: usize, ms: f64| if n > 0 { ms / n as f64 } else { 0.0 };
        let rate = |n: usize, ms: f64| if ms > 0.0 { n as f64 * 1e3 / ms } else { 0.0 };
        // The prompt's evaluation yields the first token.
        let n_steps = self.n_predicted.saturating_sub(1);
        let traffic = &self.traffic;
        let ratio = |of: f64, all: f64| if all > 0.0 { of / all } else { 0.0 };
        let mut value = serde_json::json!({
            "cache_n": self.n_cached,
            "prompt_n": self.n_prompt,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": per(self.n_prompt, self.prompt_ms),
            "prompt_per_second": rate(self.n_prompt, self.prompt_ms),
            "predicted_n": self.n_predicted,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": per(n_steps, self.predicted_ms),
            "predicted_per_second": rate(n_steps, self.predicted_ms),
            "hit_rate": ratio(traffic.hits, traffic.hits + traffic.misses),
            "bytes_per_token": ratio(traffic.bytes_read, traffic.tokens),
            "io_wait_ms": traffic.io_wait_ms,
        });
        if self.n_drafted > 0 {
            value["draft_n"] = self.n_drafted.into();
            value["draft_n_accepted"] = self.n_accepted.into();
        }
        value
    }
}
