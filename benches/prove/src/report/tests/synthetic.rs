//! Made-up records: no figure here was measured.

use super::super::read::Entry;
use hobbit_programs::bench::record::{Moment, More, Record};
use hobbit_programs::measure::host::{DiskKind, Host};

pub use hobbit::units::{GIB, MIB};

/// One test of one engine that ended well: `[n_prompt, n_gen]`, twice.
pub fn record(label: &str, engine: &str, test: [u32; 2], decode_ts: f64) -> Record {
    let prompt_ts = 6.0 * decode_ts;
    let decode_ns = (f64::from(test[1]) * 1e9 / decode_ts) as u64;
    let prompt_ns = (f64::from(test[0]) * 1e9 / prompt_ts) as u64;
    let host = Host {
        machine: "synthetic".into(),
        cpu: "Synthetic processor".into(),
        cores: 2,
        ram_bytes: 24 * GIB,
        kernel: "0.0".into(),
        disk: DiskKind { kind: "none".into(), read_ahead_kib: Some(128), scheduler: Some("none".into()), model: None },
        os: String::new(),
        commit: "0123456789abcdef".into(),
        hobbit: "0.0.0".into(),
        llama_cpp_sys: "0.0.0".into(),
        system_info: String::new(),
    };
    Record {
        model_filename: "/somewhere/synthetic.gguf".into(),
        model_type: "synthetic".into(),
        model_size: 5 * GIB,
        n_prompt: test[0],
        n_gen: test[1],
        test_time: "2000-01-01T00:00:00Z".into(),
        avg_ns: decode_ns + prompt_ns,
        avg_ts: if test[1] == 0 { prompt_ts } else { decode_ts },
        hobbit_engine: engine.into(),
        hobbit_engine_version: "0".into(),
        hobbit_label: label.into(),
        hobbit_machine: "synthetic".into(),
        hobbit_limit: Some(2 * GIB),
        hobbit_prompt_ts: (test[0] > 0).then_some(prompt_ts),
        hobbit_decode_ts: (test[1] > 0).then_some(decode_ts),
        hobbit_decode_median_ns: (test[1] > 0).then_some((1e9 / decode_ts) as u64),
        hobbit_peak_rss: Some(GIB),
        hobbit_cgroup_peak: Some(2 * GIB),
        hobbit_outcome: "ok".into(),
        more: More {
            samples_ns: vec![prompt_ns + decode_ns; 2],
            hobbit_prompt_ns: vec![prompt_ns; 2],
            hobbit_decode_ns: vec![decode_ns; 2],
            hobbit_host: host,
            ..More::default()
        },
        ..Record::default()
    }
}

/// hobbit's own counters for a share of experts in memory.
pub fn with_cache(mut record: Record, share: f64) -> Record {
    let tokens = f64::from(record.n_gen) * 2.0;
    let misses = 256.0 * (1.0 - share);
    let token_ns = record.hobbit_decode_median_ns.unwrap_or(0) as f64;
    record.hobbit_expert_bytes = Some(4 * GIB);
    record.hobbit_expert_cache = Some((4.0 * GIB as f64 * share) as u64);
    record.hobbit_decode_hits = Some((tokens * (256.0 - misses)) as u64);
    record.hobbit_decode_misses = Some((tokens * misses) as u64);
    record.hobbit_decode_bytes = Some((tokens * misses * 3.0 * MIB as f64) as u64);
    record.hobbit_decode_stall_ns = Some((tokens * token_ns * 0.8 * (1.0 - share)) as u64);
    record.hobbit_roofline_ts = record.hobbit_decode_ts.map(|speed| speed * (1.1 + 4.0 * share * share));
    record.hobbit_roofline_share = Some(1.0 / (1.1 + 4.0 * share * share));
    record
}

/// The whole command, in seconds.
pub fn with_whole(record: Record, seconds: f64) -> Record {
    Record { hobbit_whole_ns: Some((seconds * 1e9) as u64), hobbit_warm: true, ..record }
}

/// `n_tokens` steps and a series whose memory grows by `growth` bytes a token after the first tenth.
pub fn with_series(mut record: Record, n_tokens: u64, growth: u64) -> Record {
    let step = record.hobbit_decode_median_ns.unwrap_or(0);
    record.more.hobbit_steps_ns = (0..n_tokens).map(|at| step + step / 20 * (at % 3)).collect();
    let moment = |tokens: u64| {
        let warm = tokens.min(n_tokens / 10);
        let rss = GIB + warm * 5 * MIB + growth * (tokens - warm);
        let heap = Some(64 * MIB + tokens * 2);
        Moment { t_ns: tokens * step, rss, anon: rss / 2, heap, fds: 17, threads: 4, tokens }
    };
    record.more.hobbit_series =
        (0..=n_tokens).step_by(usize::try_from(n_tokens / 100).unwrap_or(1).max(1)).map(moment).collect();
    record
}

/// A record of a file.
pub fn entry(record: Record) -> Entry {
    Entry { file: format!("{}.jsonl", record.hobbit_label), record }
}

fn named(mut record: Record, model: &str, variant: &str) -> Record {
    record.model_filename = format!("/somewhere/{model}.gguf");
    record.hobbit_variant = variant.into();
    record
}

/// Records of every study.
pub fn all() -> Vec<Entry> {
    let mut all = Vec::new();
    for (model, speed) in [("synthetic-qwen", 9.4), ("synthetic-mixtral", 3.5)] {
        for run in 0..2u32 {
            let noise = 1.0 + 0.03 * f64::from(run);
            let own = with_series(with_cache(record("peers", "hobbit", [16, 96], speed * noise), 0.3), 96, 0);
            let own = Record { hobbit_logits_compared: Some(96), hobbit_logits_equal: Some(96), ..own };
            all.push(named(own, model, ""));
            let stock = with_series(record("peers", "llama.cpp", [16, 96], 0.3 * noise), 96, 2 * MIB);
            all.push(named(stock, model, ""));
        }
        let peer = with_series(record("peers", "mistral.rs", [16, 96], 0.8), 96, MIB);
        all.push(named(Record { hobbit_text_equal: Some(91), hobbit_text_chars: Some(96), ..peer }, model, ""));
        let nothing = || named(Record { avg_ts: 0.0, ..record("peers", "candle", [16, 96], 1.0) }, model, "");
        let without = |outcome: &str| Record {
            hobbit_outcome: outcome.into(),
            hobbit_decode_ts: None,
            hobbit_prompt_ts: None,
            hobbit_engine: if outcome == "killed" { "candle".into() } else { "airllm".into() },
            ..nothing()
        };
        all.extend([without("killed"), without("failed: cannot load <this> type of tensor")]);
        for test in [[16, 32], [16, 128], [128, 32], [128, 128]] {
            all.push(named(with_cache(record("papers", "hobbit", test, speed), 0.3), model, ""));
            all.push(named(record("papers", "llama.cpp", test, 0.3), model, ""));
        }
        for percent in [10u32, 20, 30, 50, 75, 100] {
            let share = f64::from(percent) / 100.0;
            let limit = Some(GIB + GIB * 4 * u64::from(percent) / 100);
            let own = with_cache(record("curve", "hobbit", [0, 64], speed * (0.5 + share * 2.0)), share);
            all.push(named(Record { hobbit_limit: limit, ..own }, model, ""));
            let stock = record("curve", "llama.cpp", [0, 64], 0.2 + speed * share.powi(4) * 2.4);
            all.push(named(Record { hobbit_limit: limit, ..stock }, model, ""));
        }
    }
    for (variant, factor) in [("exact, LRU", 1.0), ("+policy", 1.15), ("+prefetch", 1.18), ("+dynamic precision", 1.9)]
    {
        all.push(named(
            with_cache(record("ablation", "hobbit", [0, 64], 8.0 * factor), 0.25 * factor),
            "synthetic-qwen",
            variant,
        ));
    }
    all.push(named(record("ablation", "llama.cpp", [0, 64], 0.3), "synthetic-qwen", ""));
    for depth in [0, 512, 2048, 8192] {
        let slower = 1.0 + f64::from(depth) / 10000.0;
        for (engine, speed) in [("hobbit", 9.0), ("llama.cpp", 0.3)] {
            for test in [[128, 0], [0, 32]] {
                let own = record("context", engine, test, speed / slower);
                all.push(named(Record { n_depth: depth, ..own }, "synthetic-qwen", ""));
            }
        }
    }
    for n_expert in [8u32, 16, 32, 64, 128] {
        for (engine, speed) in [("hobbit", 9.0), ("llama.cpp", 0.8)] {
            let own = record("experts", engine, [128, 32], speed / (1.0 + f64::from(n_expert) / 64.0));
            let n_expert_of = (engine == "hobbit").then_some(n_expert);
            all.push(named(Record { hobbit_n_expert: n_expert_of, ..own }, &format!("synthetic-{n_expert}e"), ""));
        }
    }
    for (engine, speed) in [("hobbit", 38.0), ("llama.cpp", 36.0)] {
        let own = Record { hobbit_limit: None, ..record("resident", engine, [0, 128], speed) };
        let equal = (engine == "hobbit").then_some(455);
        all.push(Record { hobbit_logits_compared: equal, hobbit_logits_equal: equal, ..own });
        let start = record("startup", engine, [1, 0], speed);
        let (load, first) =
            if engine == "hobbit" { (900_000_000, 1_100_000_000) } else { (1_200_000_000, 9_000_000_000) };
        all.push(Record { hobbit_load_ns: Some(load), hobbit_first_token_ns: Some(first), ..start });
    }
    for percent in [30u64, 60, 100, 130] {
        let share = percent as f64 / 100.0;
        for (engine, speed) in [("hobbit", 8.0 + 8.0 * share.min(1.0)), ("llama.cpp", 16.0 * share.min(1.0).powi(3))] {
            let own = record("fits", engine, [12, 32], speed);
            let whole = 1.0 + f64::from(own.n_gen) / speed;
            let limit = Some(5 * GIB * percent / 100);
            all.push(named(Record { hobbit_limit: limit, ..with_whole(own, whole) }, "synthetic-qwen", ""));
        }
    }
    for (engine, speeds) in [("hobbit", [17.0, 10.0]), ("llama.cpp", [17.0, 5.0])] {
        for (busy, speed) in [0, 1].into_iter().zip(speeds) {
            for test in [[128, 0], [0, 32]] {
                let own = Record { hobbit_busy: Some(busy), ..record("contended", engine, test, speed) };
                all.push(named(own, "synthetic-qwen", ""));
            }
        }
    }
    for (engine, variant, speed) in [("hobbit", "", 9.0), ("llama.cpp", "", 3.0), ("hobbit", "stacked gate", 9.5)] {
        all.push(named(record("routes", engine, [28, 128], speed), "synthetic-30b", variant));
    }
    for (variant, speed) in [("none", 9.0), ("stacked-gate", 9.5)] {
        let own = Record { hobbit_limit: None, ..with_cache(record("efficiency", "hobbit", [16, 48], speed), 0.5) };
        all.push(named(own, "synthetic-qwen", variant));
    }
    for variant in ["chat", "pressure"] {
        all.push(named(with_series(record("long", "hobbit", [0, 2000], 9.0), 2000, 100), "synthetic-qwen", variant));
    }
    all.into_iter().map(entry).collect()
}
