//! The answer of a run's process, and the record made from the runs of a case.

use std::ops::Add;

use serde::{Deserialize, Serialize};

use super::args::Who;
use super::case::{Source, Task};
use super::host::Host;
use super::record::{Moment, More, Record, speed};
use hobbit::stats::efficiency;

/// Results and costs of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Columns common to all runs of a case: descriptions of the engine and its devices.
    pub about: Record,
    pub load_ns: u64,
    pub first_token_ns: Option<u64>,
    pub reps: Vec<Rep>,
    /// Bytes that the kernel read in the measured repetitions.
    pub disk_bytes: u64,
    pub peak_rss: u64,
    /// Extra cost of a single token when recorded routes are followed.
    pub stops_ns: Option<i64>,
    /// Hashes of the logits after each evaluation.
    pub hashes: Vec<u64>,
    pub series: Vec<Moment>,
    /// Traffic of the measured repetitions: prompts, and single tokens.
    pub traffic: Option<[Traffic; 2]>,
    /// Tokens drafted in them, and those accepted.
    pub drafts: Option<[u64; 2]>,
}

/// One measured repetition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rep {
    pub prompt_ns: u64,
    pub steps_ns: Vec<u64>,
}

/// hobbit's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    pub hits: u64,
    pub misses: u64,
    pub bytes: u64,
    pub io_busy_ns: u64,
    pub stall_ns: u64,
}

impl Traffic {
    /// Joins each pair of counts with `join`, such as their sum or difference.
    pub fn with(self, other: Self, join: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            hits: join(self.hits, other.hits),
            misses: join(self.misses, other.misses),
            bytes: join(self.bytes, other.bytes),
            io_busy_ns: join(self.io_busy_ns, other.io_busy_ns),
            stall_ns: join(self.stall_ns, other.stall_ns),
        }
    }
}

/// The kernel's counts for a group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Largest use in bytes, page cache included; `None` if the kernel does not report it (v2 before 5.19).
    pub peak: Option<u64>,
    /// Times the limit was hit and memory had to be reclaimed.
    pub limit_hits: u64,
}

/// The outcome of a run, and its control group's counts. A failure is worded as in a record: `killed` by the limit,
/// or `failed: ` and why.
pub type Run = (Result<Answer, String>, Usage);

/// The answers of the runs that did not fail.
pub fn answers(runs: &[Run]) -> impl Iterator<Item = &Answer> {
    runs.iter().filter_map(|(outcome, _)| outcome.as_ref().ok())
}

/// The record of all runs of one engine. `bandwidth` is that of random reads, in bytes per second.
pub fn record(task: &Task, host: &Host, bandwidth: Option<f64>, runs: &[Run]) -> Record {
    let case = &task.case;
    let stock = task.who == Who::Stock;
    let answers: Vec<&Answer> = answers(runs).collect();
    let failed = runs.iter().find_map(|(outcome, _)| outcome.as_ref().err());
    let flag = |name: &str| {
        let value = case.words.iter().rev().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.map(str::to_owned)
    };
    let or = |name: &str, usual: &str| flag(name).unwrap_or_else(|| usual.to_owned());
    let number = |name: &str, usual: i32| flag(name).and_then(|text| text.parse().ok()).unwrap_or(usual);
    let trials = answers.first().map_or_else(Vec::new, |answer| answer.about.more.hobbit_kernel_trials.clone());
    let mut record = Record {
        build_commit: format!("b{}", ggml_build()),
        build_number: ggml_build(),
        model_filename: case.model.display().to_string(),
        n_batch: case.n_batch,
        n_ubatch: case.n_ubatch,
        hobbit_ubatch_max: if stock { 0 } else { case.n_ubatch_max },
        n_threads: case.threads,
        cpu_mask: "0x0".into(),
        poll: 50,
        type_k: case.type_k.clone(),
        type_v: case.type_v.clone(),
        n_gpu_layers: match flag("--n-gpu-layers").as_deref() {
            Some("all") => 999,
            _ => number("--n-gpu-layers", -1),
        },
        n_cpu_moe: number("--n-cpu-moe", 0).unsigned_abs(),
        split_mode: or("--split-mode", "layer"),
        main_gpu: number("--main-gpu", 0).unsigned_abs(),
        no_kv_offload: case.no_kv_offload,
        flash_attn: match &case.flash_attn[..] {
            "on" | "1" | "enabled" | "true" => 1,
            "off" | "0" | "disabled" | "false" => 0,
            _ => -1,
        },
        devices: or("--device", "auto").replace(',', "/"),
        tensor_split: or("--tensor-split", "0.00"),
        tensor_buft_overrides: or("--override-tensor", "none").replace(',', ";"),
        load_mode: if stock { task.load_mode.clone() } else { "none".into() },
        lazy_mode: "auto".into(),
        repack: stock && task.repack != "0",
        n_prompt: case.test.n_prompt,
        n_gen: case.test.n_gen,
        n_depth: case.test.n_depth,
        hobbit_engine: if stock { "llama.cpp" } else { "hobbit" }.into(),
        hobbit_engine_version: if stock { format!("b{}", ggml_build()) } else { host.hobbit.clone() },
        hobbit_text: match &task.source {
            Source::Random => "random".into(),
            Source::Text(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        },
        hobbit_machine: host.machine.clone(),
        hobbit_limit: case.limit,
        hobbit_flags: if stock { String::new() } else { case.words.join(" ") },
        hobbit_cgroup_peak: runs.iter().filter_map(|(_, usage)| usage.peak).max(),
        hobbit_limit_hits: case.limit.map(|_| runs.iter().map(|(_, usage)| usage.limit_hits).sum()),
        hobbit_bandwidth: bandwidth,
        hobbit_outcome: failed.map_or_else(|| "ok".into(), String::clone),
        more: More {
            hobbit_host: host.clone(),
            hobbit_stops_ns: answers.first().and_then(|answer| answer.stops_ns),
            hobbit_kernel_trials: trials,
            hobbit_target_latency: answers.last().and_then(|answer| answer.about.more.hobbit_target_latency.clone()),
            ..More::default()
        },
        ..answers.first().map(|answer| answer.about.clone()).unwrap_or_default()
    };
    if !answers.is_empty() {
        sum(&mut record, &answers);
    }
    record
}

fn sum(record: &mut Record, answers: &[&Answer]) {
    let reps: Vec<&Rep> = answers.iter().flat_map(|answer| &answer.reps).collect();
    let (n_prompt, n_gen) = (u64::from(record.n_prompt), u64::from(record.n_gen));
    let more = &mut record.more;
    more.hobbit_prompt_ns = reps.iter().map(|rep| rep.prompt_ns).collect();
    more.hobbit_decode_ns = reps.iter().map(|rep| rep.steps_ns.iter().sum()).collect();
    more.hobbit_steps_ns = reps.iter().flat_map(|rep| rep.steps_ns.iter().copied()).collect();
    more.samples_ns = more.hobbit_prompt_ns.iter().zip(&more.hobbit_decode_ns).map(|(a, b)| a + b).collect();
    more.samples_ts = more.samples_ns.iter().map(|ns| speed(n_prompt + n_gen, *ns).unwrap_or(0.0)).collect();
    let times: Vec<f64> = more.samples_ns.iter().map(|ns| *ns as f64).collect();
    record.avg_ns = mean(&times) as u64;
    record.stddev_ns = deviation(&times) as u64;
    record.avg_ts = mean(&more.samples_ts);
    record.stddev_ts = deviation(&more.samples_ts);
    let n = reps.len() as u64;
    record.hobbit_prompt_ts = speed(n * n_prompt, more.hobbit_prompt_ns.iter().sum());
    let decode_ns = more.hobbit_decode_ns.iter().sum();
    record.hobbit_decode_ts = speed(n * n_gen, decode_ns);
    let mut steps = more.hobbit_steps_ns.clone();
    steps.sort_unstable();
    record.hobbit_decode_median_ns = steps.get(steps.len() / 2).copied();

    record.hobbit_disk_bytes = Some(answers.iter().map(|answer| answer.disk_bytes).sum());
    record.hobbit_peak_rss = answers.iter().map(|answer| answer.peak_rss).max();
    record.hobbit_load_ns = middle(answers.iter().map(|answer| answer.load_ns).collect());
    record.hobbit_first_token_ns = middle(answers.iter().filter_map(|answer| answer.first_token_ns).collect());
    record.more.hobbit_series = answers.first().map(|answer| answer.series.clone()).unwrap_or_default();

    let drafts = |at: usize| answers.iter().filter_map(|answer| Some(answer.drafts?[at])).reduce(u64::add);
    (record.hobbit_drafted, record.hobbit_accepted) = (drafts(0), drafts(1));
    let traffic: Vec<[Traffic; 2]> = answers.iter().filter_map(|answer| answer.traffic).collect();
    if traffic.is_empty() {
        return;
    }
    let add = |sum: Traffic, one: Traffic| sum.with(one, u64::add);
    let decode = traffic.iter().map(|[_, decode]| *decode).fold(Traffic::default(), add);
    let both = traffic.into_iter().flatten().fold(Traffic::default(), add);
    record.hobbit_hits = Some(both.hits);
    record.hobbit_misses = Some(both.misses);
    record.hobbit_bytes = Some(both.bytes);
    record.hobbit_stall_ns = Some(both.stall_ns);
    record.hobbit_io_busy_ns = Some(both.io_busy_ns);
    record.hobbit_decode_hits = Some(decode.hits);
    record.hobbit_decode_misses = Some(decode.misses);
    record.hobbit_decode_bytes = Some(decode.bytes);
    record.hobbit_decode_stall_ns = Some(decode.stall_ns);
    // Without reads, the disk sets no limit.
    record.hobbit_roofline_ts = record
        .hobbit_bandwidth
        .filter(|_| decode.bytes > 0 && n_gen > 0)
        .map(|bandwidth| (n * n_gen) as f64 * bandwidth / decode.bytes as f64);
    record.hobbit_roofline_share =
        record.hobbit_decode_ts.zip(record.hobbit_roofline_ts).map(|(found, most)| found / most);
    let seconds = |ns: u64| ns as f64 / 1e9;
    record.hobbit_efficiency = record
        .hobbit_bandwidth
        .filter(|_| n_gen > 0)
        .and_then(|bandwidth| efficiency(seconds(decode_ns), seconds(decode.stall_ns), decode.bytes, bandwidth));
}

/// (compared, equal) evaluations of both engines: the n-th run of each evaluates the same text.
pub fn equal_logits(ours: &[Run], theirs: &[Run]) -> (u64, u64) {
    let pairs = answers(ours).zip(answers(theirs)).flat_map(|(a, b)| a.hashes.iter().zip(&b.hashes));
    pairs.fold((0, 0), |(all, same), (a, b)| (all + 1, same + u64::from(a == b)))
}

/// The linked build of llama.cpp; 0 without the engine.
pub fn ggml_build() -> i32 {
    #[cfg(feature = "engine")]
    return ggml_sys::LLAMA_BUILD_NUMBER;
    #[cfg(not(feature = "engine"))]
    0
}

/// The median; of an even number, the mean of the two middle values.
fn middle(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    let upper = *values.get(values.len() / 2)?;
    let lower = if values.len().is_multiple_of(2) { values[values.len() / 2 - 1] } else { upper };
    Some(lower + (upper - lower) / 2)
}

fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The sample standard deviation.
fn deviation(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::case::{Case, Test};
    use super::*;

    fn task(who: Who) -> Task {
        let case = Case {
            words: vec!["--policy=lru".into(), "--n-gpu-layers=3".into()],
            limit: Some(1 << 30),
            flash_attn: "on".into(),
            test: Test { n_prompt: 4, n_gen: 2, n_depth: 0 },
            ..Case::default()
        };
        Task { who, case, source: Source::Text("dir/text.txt".into()), load_mode: "mmap".into(), ..Task::default() }
    }

    fn answer(prompt_ns: u64, step_ns: u64, hashes: &[u64]) -> Run {
        let rep = Rep { prompt_ns, steps_ns: vec![step_ns, 3 * step_ns] };
        let decode = Traffic { hits: 1, misses: 3, bytes: 1000, io_busy_ns: 7, stall_ns: 5 };
        let answer = Answer {
            reps: vec![rep.clone(), rep],
            hashes: hashes.to_vec(),
            traffic: Some([decode, decode]),
            first_token_ns: Some(prompt_ns),
            ..Answer::default()
        };
        (Ok(answer), Usage { peak: Some(9), limit_hits: 2 })
    }

    fn recorded(who: Who, runs: &[Run]) -> Record {
        record(&task(who), &Host::default(), Some(1e6), runs)
    }

    #[test]
    fn runs_are_put_together() {
        let runs = [answer(2_000_000_000, 500_000_000, &[]), answer(4_000_000_000, 500_000_000, &[])];
        let record = recorded(Who::Hobbit, &runs);
        assert_eq!(record.more.samples_ns, [4_000_000_000, 4_000_000_000, 6_000_000_000, 6_000_000_000]);
        assert_eq!(record.avg_ns, 5_000_000_000);
        assert_eq!((record.hobbit_prompt_ts, record.hobbit_decode_ts), (Some(16.0 / 12.0), Some(1.0)));
        assert_eq!(record.hobbit_decode_median_ns, Some(1_500_000_000));
        assert_eq!(
            (record.hobbit_misses, record.hobbit_decode_misses, record.hobbit_bytes),
            (Some(12), Some(6), Some(4000))
        );
        // 8 tokens, 2000 bytes at a million a second.
        assert_eq!((record.hobbit_roofline_ts, record.hobbit_roofline_share), (Some(4000.0), Some(1.0 / 4000.0)));
        assert_eq!((record.hobbit_cgroup_peak, record.hobbit_limit_hits), (Some(9), Some(4)));
        assert_eq!((record.n_gpu_layers, record.flash_attn, &record.hobbit_text[..]), (3, 1, "text.txt"));
        assert_eq!(record.hobbit_flags, "--policy=lru --n-gpu-layers=3");
        assert_eq!(record.hobbit_outcome, "ok");
    }

    #[test]
    fn a_failed_run_is_recorded() {
        let runs = [answer(1, 1, &[]), (Err("killed".into()), Usage::default())];
        assert_eq!(recorded(Who::Stock, &runs).hobbit_outcome, "killed");
        let record = recorded(Who::Stock, &[(Err("failed: why".into()), Usage::default())]);
        assert_eq!((&record.hobbit_outcome[..], record.avg_ns, record.hobbit_decode_ts), ("failed: why", 0, None));
        assert_eq!((&record.hobbit_engine[..], &record.load_mode[..]), ("llama.cpp", "mmap"));
    }

    #[test]
    fn logits_are_compared_run_by_run() {
        let (a, b) =
            ([answer(1, 1, &[1, 2]), answer(1, 1, &[3, 4])], [answer(1, 1, &[1, 2, 9]), answer(1, 1, &[3, 5])]);
        assert_eq!(equal_logits(&a, &b), (4, 3));
        assert_eq!(equal_logits(&a, &[(Err("killed".into()), Usage::default())]), (0, 0));
    }
}
