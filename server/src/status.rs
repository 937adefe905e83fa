//! State of the server for status requests while the engine works: slots, and counts since the start, also as
//! Prometheus reads them.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use hobbit_core::route::DECODE_TOKENS_MAX;

use super::job::Generate;
use super::lock;
use super::timings::{Timings, Traffic};

/// Written by the engine thread, read by requests.
#[derive(Debug, Default)]
pub struct Status(Mutex<State>);

/// A snapshot of the server's state.
#[derive(Clone, Debug, Default)]
pub struct State {
    pub slots: Vec<SlotState>,
    pub n_waiting: usize,
    pub totals: Totals,
    /// Counts since the metrics were last read.
    pub since: Totals,
}

/// A slot's state as `/slots` shows it.
#[derive(Clone, Debug, Default)]
pub struct SlotState {
    pub id: usize,
    pub is_processing: bool,
    pub n_ctx: usize,
    /// Tokens that the slot holds.
    pub n_past: usize,
    /// The current request, or the last one.
    pub run: Option<LastRun>,
}

/// Summary of a slot's last request.
#[derive(Clone, Debug)]
pub struct LastRun {
    pub job: u64,
    pub n_prompt: usize,
    /// Counts so far, without durations.
    pub counts: Timings,
    /// Prompt tokens being evaluated.
    pub n_reading: usize,
    pub began: Instant,
    pub has_new_line: bool,
    pub generate: Option<Arc<Generate>>,
}

impl LastRun {
    /// Prompt tokens processed so far; `share` is the evaluated part of those that are being evaluated.
    pub fn n_processed_with(&self, share: f64) -> usize {
        self.counts.n_prompt + (self.n_reading as f64 * share) as usize
    }

    /// Estimated seconds until the prompt is evaluated; `None` if it is, or without an estimate.
    pub fn seconds_left(&self, share: f64) -> Option<f64> {
        let done = self.n_processed_with(share);
        let left = self.n_prompt.saturating_sub(self.counts.n_cached + done);
        (left > 0 && done > 0).then(|| self.began.elapsed().as_secs_f64() * left as f64 / done as f64)
    }
}

/// Counts of requests, tokens and traffic.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub prompt_seconds: f64,
    pub predicted_tokens: u64,
    pub predicted_seconds: f64,
    pub n_decode: u64,
    /// Streams of all decoding steps.
    pub n_busy: u64,
    /// Decoding steps of all generating slots.
    pub steps: u64,
    pub step_seconds: f64,
    pub n_tokens_max: u64,
    pub requests: u64,
    pub traffic: Traffic,
    pub drafts: Drafts,
}

/// Counts of drafted tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drafts {
    pub tokens: u64,
    pub accepted: u64,
    /// Steps of a slot with drafts.
    pub steps: u64,
    /// Accepted tokens by their place in the draft.
    pub by_place: [u64; DECODE_TOKENS_MAX],
}

impl Drafts {
    /// Adds a step of a slot.
    pub fn add(&mut self, n: usize, n_accepted: usize) {
        self.tokens += n as u64;
        self.accepted += n_accepted as u64;
        self.steps += u64::from(n > 0);
        self.by_place[..n_accepted].iter_mut().for_each(|count| *count += 1);
    }
}

impl Status {
    /// A copy of the state.
    pub fn get(&self) -> State {
        lock(&self.0).clone()
    }

    /// Whether any slot works on a request.
    pub fn is_processing(&self) -> bool {
        lock(&self.0).slots.iter().any(|slot| slot.is_processing)
    }

    /// A copy of the state; resets the counts since the last call.
    pub fn take(&self) -> State {
        let mut state = lock(&self.0);
        let copy = state.clone();
        state.since = Totals::default();
        copy
    }

    /// Adds to the counts.
    pub fn count(&self, add: impl Fn(&mut Totals)) {
        let state = &mut *lock(&self.0);
        add(&mut state.totals);
        add(&mut state.since);
    }

    /// Replaces the state of all slots.
    pub fn set(&self, slots: Vec<SlotState>, n_waiting: usize) {
        let most = slots.iter().map(|slot| slot.n_past as u64).max().unwrap_or(0);
        let state = &mut *lock(&self.0);
        (state.slots, state.n_waiting) = (slots, n_waiting);
        state.totals.n_tokens_max = state.totals.n_tokens_max.max(most);
    }
}

/// The text of `/metrics`: llama-server's figures, and hobbit's own. `cache_bytes`: capacity of the expert cache.
pub fn metrics(state: &State, cache_bytes: u64) -> String {
    let (all, since) = (&state.totals, &state.since);
    let (traffic, recent) = (&all.traffic, &since.traffic);
    let ratio = |of: f64, all: f64| if all > 0.0 { of / all } else { 0.0 };
    let busy = state.slots.iter().filter(|slot| slot.is_processing).count();
    let counters = [
        ("llamacpp:prompt_tokens_total", "Number of prompt tokens processed.", all.prompt_tokens as f64),
        ("llamacpp:prompt_tokens_cached_total", "Number of cached prompt tokens.", all.cached_tokens as f64),
        ("llamacpp:prompt_seconds_total", "Prompt process time", all.prompt_seconds),
        ("llamacpp:tokens_predicted_total", "Number of generation tokens processed.", all.predicted_tokens as f64),
        ("llamacpp:tokens_predicted_seconds_total", "Predict process time", all.predicted_seconds),
        ("llamacpp:n_decode_total", "Total number of llama_decode() calls", all.n_decode as f64),
        ("llamacpp:n_tokens_max", "Largest observed n_tokens.", all.n_tokens_max as f64),
        ("llamacpp:spec_decode_num_draft_tokens_total", "Draft tokens generated.", all.drafts.tokens as f64),
        ("llamacpp:spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", all.drafts.accepted as f64),
        ("llamacpp:spec_decode_num_drafts_total", "Drafts verified.", all.drafts.steps as f64),
        ("hobbit:steps_total", "Decoding steps of all generating slots.", all.steps as f64),
        ("hobbit:step_streams_total", "Generating slots, summed over steps.", all.n_busy as f64),
        ("hobbit:step_seconds_total", "Time of steps.", all.step_seconds),
        ("hobbit:requests_total", "Requests that were begun.", all.requests as f64),
        ("hobbit:expert_hits_total", "Experts found in memory by generated tokens.", traffic.hits),
        ("hobbit:expert_misses_total", "Experts read for generated tokens.", traffic.misses),
        ("hobbit:expert_bytes_read_total", "Bytes read for generated tokens.", traffic.bytes_read),
        (
            "hobbit:read_seconds_total",
            "Time in which generated tokens' reads were under way.",
            traffic.io_busy_ms / 1e3,
        ),
        ("hobbit:stall_seconds_total", "Time in which generated tokens waited for reads.", traffic.io_wait_ms / 1e3),
    ];
    let prompt_rate = ratio(since.prompt_tokens as f64, since.prompt_seconds);
    let predicted_rate = ratio(since.predicted_tokens as f64, since.predicted_seconds);
    let busy_slots = ratio(all.n_busy as f64, all.n_decode as f64);
    let bytes_per_token = ratio(recent.bytes_read, since.predicted_tokens as f64);
    let hit_rate = ratio(recent.hits, recent.hits + recent.misses);
    let gauges = [
        ("llamacpp:prompt_tokens_seconds", "Average prompt throughput in tokens/s.", prompt_rate),
        ("llamacpp:predicted_tokens_seconds", "Average generation throughput in tokens/s.", predicted_rate),
        ("llamacpp:requests_processing", "Number of requests processing.", busy as f64),
        ("llamacpp:requests_deferred", "Number of requests deferred.", state.n_waiting as f64),
        ("llamacpp:n_busy_slots_per_decode", "Average number of busy slots per llama_decode() call", busy_slots),
        ("hobbit:bytes_per_token", "Bytes read per token since the last request for metrics.", bytes_per_token),
        ("hobbit:expert_hit_rate", "Hit rate since the last request for metrics.", hit_rate),
        ("hobbit:expert_cache_bytes", "Bytes of host memory that experts may fill.", cache_bytes as f64),
    ];
    let kinds = [("counter", &counters[..]), ("gauge", &gauges)];
    let rows = kinds.iter().flat_map(|(kind, rows)| rows.iter().map(move |row| (kind, row)));
    let rows =
        rows.map(|(kind, (name, help, value))| format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n"));
    rows.chain([by_place(&all.drafts)]).collect()
}

/// Accepted drafts by their place; nothing without any.
fn by_place(drafts: &Drafts) -> String {
    let name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total";
    let n = drafts.by_place.iter().take_while(|count| **count > 0).count();
    let rows = drafts.by_place[..n].iter().enumerate();
    let rows: String = rows.map(|(place, count)| format!("{name}{{position=\"{place}\"}} {count}\n")).collect();
    if rows.is_empty() { rows } else { format!("# HELP {name} Draft tokens accepted.\n# TYPE {name} counter\n{rows}") }
}
