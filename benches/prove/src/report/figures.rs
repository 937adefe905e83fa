//! What a record says, as figures that tables and plots use. Every figure is a finite number or `None`.

use super::read::Entry;
use hobbit_programs::bench::record::{Moment, Record};

/// A figure of a record.
pub type Measure = fn(&Record) -> Option<f64>;

/// Whether it ran to its end.
pub fn is_ok(record: &Record) -> bool {
    record.hobbit_outcome == "ok"
}

fn positive(value: f64) -> Option<f64> {
    (value.is_finite() && value > 0.0).then_some(value)
}

fn quotient(value: f64, by: f64) -> Option<f64> {
    Some(value / by).filter(|_| by > 0.0).filter(|quotient| quotient.is_finite())
}

/// Tokens per second of single tokens.
pub fn decode_ts(record: &Record) -> Option<f64> {
    let alone = (record.n_prompt == 0 && record.n_gen > 0).then_some(record.avg_ts);
    record.hobbit_decode_ts.or(alone).and_then(positive)
}

/// Tokens per second of the prompt.
pub fn prompt_ts(record: &Record) -> Option<f64> {
    let alone = (record.n_gen == 0 && record.n_prompt > 0).then_some(record.avg_ts);
    record.hobbit_prompt_ts.or(alone).and_then(positive)
}

/// Seconds that the prompt takes, on average.
pub fn prefill_s(record: &Record) -> Option<f64> {
    quotient(f64::from(record.n_prompt), prompt_ts(record)?).and_then(positive)
}

/// Milliseconds of the median single token.
pub fn median_ms(record: &Record) -> Option<f64> {
    positive(record.hobbit_decode_median_ns? as f64 / 1e6)
}

/// Milliseconds of a single token on average.
pub fn mean_ms(record: &Record) -> Option<f64> {
    quotient(1e3, decode_ts(record)?)
}

/// Seconds from the start of the process to its end.
pub fn whole_s(record: &Record) -> Option<f64> {
    positive(record.hobbit_whole_ns? as f64 / 1e9)
}

/// The limit as a share of the model's bytes.
pub fn of_model(record: &Record) -> Option<f64> {
    quotient(record.hobbit_limit? as f64, record.model_size as f64).and_then(positive)
}

/// Seconds until the context is open.
pub fn load_s(record: &Record) -> Option<f64> {
    positive(record.hobbit_load_ns? as f64 / 1e9)
}

/// Seconds until the first logits.
pub fn first_token_s(record: &Record) -> Option<f64> {
    positive(record.hobbit_first_token_ns? as f64 / 1e9)
}

/// Largest resident set in bytes.
pub fn peak_rss(record: &Record) -> Option<f64> {
    positive(record.hobbit_peak_rss? as f64)
}

/// Largest use of the control group in bytes.
pub fn cgroup_peak(record: &Record) -> Option<f64> {
    positive(record.hobbit_cgroup_peak? as f64)
}

/// The share of all experts that has room in memory.
pub fn in_memory(record: &Record) -> Option<f64> {
    let of = |some: Option<u64>, all: Option<u64>| quotient(some? as f64, all? as f64);
    let share = of(record.hobbit_expert_cache, record.hobbit_expert_bytes);
    share.or_else(|| of(record.hobbit_n_slots, record.hobbit_n_experts)).map(|share| share.min(1.0))
}

/// How much of something happened while what was counted: single tokens where they were counted apart, all of them elsewhere.
struct Measured {
    tokens: f64,
    ns: f64,
    hits: Option<u64>,
    misses: Option<u64>,
    bytes: Option<u64>,
    stall_ns: Option<u64>,
}

fn measured(record: &Record) -> Measured {
    let sum = |ns: &[u64]| ns.iter().map(|ns| *ns as f64).sum::<f64>();
    let (all_ns, decode_ns) = (&record.more.samples_ns, &record.more.hobbit_decode_ns);
    let is_apart = record.hobbit_decode_bytes.is_some() && record.n_gen > 0 && sum(decode_ns) > 0.0;
    let of = |apart, all| if is_apart { apart } else { all };
    let (n_tokens, ns) = if is_apart {
        (record.n_gen.into(), decode_ns)
    } else {
        (f64::from(record.n_prompt) + f64::from(record.n_gen), all_ns)
    };
    Measured {
        tokens: n_tokens * ns.len() as f64,
        ns: sum(ns),
        hits: of(record.hobbit_decode_hits, record.hobbit_hits),
        misses: of(record.hobbit_decode_misses, record.hobbit_misses),
        bytes: of(record.hobbit_decode_bytes, record.hobbit_bytes),
        stall_ns: of(record.hobbit_decode_stall_ns, record.hobbit_stall_ns),
    }
}

fn per_token(record: &Record, part: fn(&Measured) -> Option<f64>) -> Option<f64> {
    let of = measured(record);
    quotient(part(&of)?, of.tokens)
}

/// Uses of experts that were in memory, as a share.
pub fn hit_rate(record: &Record) -> Option<f64> {
    let of = measured(record);
    let (hits, misses) = (of.hits? as f64, of.misses? as f64);
    quotient(hits, hits + misses)
}

/// Bytes read for a token.
pub fn bytes_per_token(record: &Record) -> Option<f64> {
    per_token(record, |of| Some(of.bytes? as f64))
}

/// Milliseconds in which a token waits for reads.
pub fn stall_ms(record: &Record) -> Option<f64> {
    per_token(record, |of| Some(of.stall_ns? as f64 / 1e6))
}

/// Milliseconds of a token.
pub fn token_ms(record: &Record) -> Option<f64> {
    per_token(record, |of| Some(of.ns / 1e6)).and_then(positive)
}

/// Of the time, the part in which tokens wait for reads.
pub fn stall_share(record: &Record) -> Option<f64> {
    quotient(stall_ms(record)?, token_ms(record)?)
}

/// Misses of a token.
pub fn misses_per_token(record: &Record) -> Option<f64> {
    per_token(record, |of| Some(of.misses? as f64))
}

/// Hits of a token.
pub fn hits_per_token(record: &Record) -> Option<f64> {
    per_token(record, |of| Some(of.hits? as f64))
}

/// Tokens per second if only reading took time.
pub fn roofline_ts(record: &Record) -> Option<f64> {
    record.hobbit_roofline_ts.and_then(positive)
}

/// Decode speed as a share of that.
pub fn roofline_share(record: &Record) -> Option<f64> {
    record.hobbit_roofline_share.and_then(positive)
}

/// Share of the time of single tokens that reading and multiplying at once would have taken.
pub fn efficiency(record: &Record) -> Option<f64> {
    record.hobbit_efficiency.and_then(positive)
}

/// Tokens per second of single tokens, of several repetitions without the first.
pub fn later_decode_ts(record: &Record) -> Option<f64> {
    let all = &record.more.hobbit_decode_ns;
    let later = if all.len() > 1 { &all[1..] } else { all };
    let ns: f64 = later.iter().map(|ns| *ns as f64).sum();
    quotient(f64::from(record.n_gen) * later.len() as f64 * 1e9, ns).and_then(positive)
}

/// Milliseconds that one single token in a hundred exceeds, of several repetitions without the first.
pub fn last_percentile_ms(record: &Record) -> Option<f64> {
    let steps = &record.more.hobbit_steps_ns;
    let first = steps.len().checked_div(record.more.hobbit_decode_ns.len().max(1))?;
    let mut later = if first < steps.len() { steps[first..].to_vec() } else { steps.clone() };
    later.sort_unstable();
    let at = (later.len() * 99 / 100).min(later.len().checked_sub(1)?);
    positive(later[at] as f64 / 1e6)
}

/// The first tenth of the single tokens, for [`tenth_ts`].
pub const FIRST: usize = 0;
/// The tenth in the middle.
pub const MIDDLE: usize = 9;
/// The last.
pub const LAST: usize = 18;

/// Tokens per second of a tenth of the single tokens that begins after so many twentieths.
pub fn tenth_ts(record: &Record, after: usize) -> Option<f64> {
    let steps = &record.more.hobbit_steps_ns;
    let (from, to) = (steps.len() * after / 20, steps.len() * (after + 2) / 20);
    let ns: f64 = steps.get(from..to)?.iter().map(|ns| *ns as f64).sum();
    quotient((to - from) as f64 * 1e9, ns).and_then(positive)
}

/// The process when a tenth of the tokens was evaluated, and when all were.
pub fn warm_and_end(record: &Record) -> Option<(Moment, Moment)> {
    let series = &record.more.hobbit_series;
    let all = series.iter().map(|moment| moment.tokens).max()?;
    let at = |tokens: u64| series.iter().find(|moment| moment.tokens >= tokens).copied();
    // Without tokens nothing was decoded, and nothing was warm.
    (all > 0).then(|| at(all.div_ceil(10)).zip(at(all))).flatten()
}

/// What a file of a model is called, and on which machine where there are several.
pub fn model(record: &Record, among: &[Entry]) -> String {
    let file = record.model_filename.rsplit(['/', '\\']).next().unwrap_or_default();
    let stem = file.strip_suffix(".gguf").unwrap_or(file);
    let stem = if stem.is_empty() { &record.model_type } else { stem };
    let machine = &record.hobbit_machine;
    match among.iter().all(|other| other.record.hobbit_machine == *machine) {
        true => stem.to_owned(),
        false => format!("{stem} on {machine}"),
    }
}
