//! Forecasts against measured runs: `benches/results/*/prove/*.jsonl`.
//!
//! `cargo test --release -p gguf-tools --test main forecasts -- --nocapture` prints the ratios of forecast to measured.

use std::collections::BTreeMap;

use hobbit_core::forecast::{
    Cpu, EXPERT_SECONDS, Expectation, Host, Locality, Products, Shape, Start, Task, rooms, run,
};
use hobbit_core::gguf::{GgmlType, Gguf};
use serde_json::Value;

use crate::{Path, Spec, fs, synth};

/// Maximum decoded tokens of a run to simulate.
const DECODED_MAX: u32 = 2048;

/// The models of the records as `benches/prove.sh` made them, and whether their routes are those of a trained model.
fn model(name: &str) -> Option<(Spec, bool)> {
    let eight = |preset| Spec { layers: 8, ..Spec::preset(preset).unwrap() };
    let spec = match name {
        "mixtral.gguf" => eight("mixtral-bench"),
        "phimoe.gguf" => eight("phimoe-bench"),
        "qwen3moe.gguf" => eight("qwen3moe-bench"),
        // With fewer flags than the preset has now.
        "deepseek.gguf" => Spec { layers: 6, shared: None, ff_dense: None, ..Spec::preset("deepseek-bench").unwrap() },
        "qwen3-30b.gguf" => {
            let spec = Spec::preset("qwen3-30b-a3b").unwrap();
            return Some((Spec { topk: 6, ..spec }, true));
        }
        // The demo model, widened.
        "demo-wide.gguf" => {
            let sizes = Spec { layers: 6, embd: 256, ff: 8192, vocab: 4096, ..Spec::tiny("llama") };
            return Some((sizes, true));
        }
        name => {
            let n: u32 = name.strip_prefix("experts-")?.strip_suffix(".gguf")?.parse().ok()?;
            Spec { layers: 4, experts: n, topk: n / 8, ff: 49_152 / n, ..Spec::preset("qwen3moe-bench").unwrap() }
        }
    };
    Some((spec, false))
}

fn shape_of(spec: &Spec) -> Shape {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("header.gguf");
    fs::write(&path, synth::header(spec).unwrap()).unwrap();
    Shape::of(&Gguf::open_partial(&path).unwrap()).unwrap()
}

/// One measured run.
struct Record {
    machine: String,
    json: Value,
}

impl Record {
    fn number(&self, key: &str) -> Option<f64> {
        self.json[key].as_f64()
    }

    fn text(&self, key: &str) -> &str {
        self.json[key].as_str().unwrap_or("")
    }

    fn tokens(&self, key: &str) -> u32 {
        self.json[key].as_u64().unwrap_or(0) as u32
    }

    /// Exact, by hobbit with its defaults, alone on the machine.
    fn counts(&self) -> bool {
        self.text("hobbit_engine") == "hobbit"
            && self.text("hobbit_outcome") == "ok"
            && self.text("hobbit_precision") == "exact"
            && ["learned", "foresight"].contains(&self.text("hobbit_policy"))
            && self.number("hobbit_busy").unwrap_or(0.0) == 0.0
            && !self.text("hobbit_variant").contains("pressure")
    }

    /// It begins cold, as a forecast does: of three repetitions and more most are warm.
    fn is_cold(&self) -> bool {
        self.json["hobbit_decode_ns"].as_array().is_some_and(|repetitions| repetitions.len() < 3)
    }

    fn misses(&self) -> Option<f64> {
        let (hits, misses) = (self.number("hobbit_decode_hits")?, self.number("hobbit_decode_misses")?);
        (hits + misses > 0.0).then(|| misses / (hits + misses))
    }
}

fn records() -> Vec<Record> {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/results");
    let mut records = Vec::new();
    for host in fs::read_dir(results).unwrap() {
        let host = host.unwrap();
        for file in fs::read_dir(host.path().join("prove")).into_iter().flatten() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "jsonl") {
                continue;
            }
            let machine = host.file_name().to_string_lossy().into_owned();
            for line in fs::read_to_string(&path).unwrap().lines() {
                records.push(Record { machine: machine.clone(), json: serde_json::from_str(line).unwrap() });
            }
        }
    }
    records
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Speed of products with everything resident, by machine and type of the experts: `--cpu auto` measures it.
fn processors(records: &[Record]) -> BTreeMap<String, Cpu> {
    let mut found: BTreeMap<(String, GgmlType), Vec<f64>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.counts() && record.misses() == Some(0.0)) {
        let Some((spec, _)) = model(record.text("model_filename")) else { continue };
        let Some(speed) = record.number("hobbit_decode_ts") else { continue };
        let shape = shape_of(&spec);
        let uses: u64 = shape.layers.len() as u64 * u64::from(shape.n_expert_used);
        let bytes: u64 = shape.per_token.experts.values().chain(shape.per_token.ordinary.values()).sum();
        let rate = bytes as f64 / (1.0 / speed - uses as f64 * EXPERT_SECONDS);
        let dtype = *shape.per_token.experts.keys().next().unwrap();
        found.entry((record.machine.clone(), dtype)).or_default().push(rate);
    }
    let mut processors: BTreeMap<String, Cpu> = BTreeMap::new();
    for ((machine, dtype), mut rates) in found {
        let median = median(&mut rates);
        let cpu = processors.entry(machine).or_default();
        cpu.memory = cpu.memory.max(median);
        cpu.by_type.insert(dtype, median);
    }
    processors
}

#[test]
fn forecasts_come_near_measured_runs() {
    let records = records();
    let processors = processors(&records);
    let mut ratios: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.counts() && record.is_cold()) {
        let name = record.text("model_filename");
        let Some(((spec, is_trained), cpu)) = model(name).zip(processors.get(&record.machine)) else { continue };
        let (Some(speed), Some(missed)) = (record.number("hobbit_decode_ts"), record.misses()) else { continue };
        let disk = record.number("hobbit_bandwidth");
        let Some((disk, memory)) = disk.zip(record.json["hobbit_limit"].as_u64()) else { continue };
        let shape = shape_of(&spec);
        let size = shape.tensor_bytes as f64 / record.number("model_size").unwrap();
        assert!((0.97..1.03).contains(&size), "{name}: {size} of the recorded size");
        let (prompt, decoded) = (record.tokens("n_prompt") + record.tokens("n_depth"), record.tokens("n_gen"));
        if decoded < 2 {
            continue;
        }
        let host = Host { memory, disk, cpu: cpu.clone(), device: None };
        let n_ctx = u64::from(prompt + decoded).next_multiple_of(256);
        let (locality, all) = if is_trained {
            (Expectation::of(shape.n_expert()).expected, "decode, trained routes")
        } else {
            (Expectation::untrained(shape.n_expert()).expected, "decode, random weights")
        };
        let room = rooms(&shape, &host, &Task { n_ctx, n_prompt: prompt.max(1) }).unwrap();
        let products = Products::of(&shape, &host, &room, prompt.into());
        let own = Locality::new([(room.share(&shape), 1.0 - missed)]);
        let start = Start::Cold { n_prompt: prompt, n_decoded: decoded.min(DECODED_MAX) };
        let whole = run(&shape, &room, &locality, &products, disk, start);
        let timed = run(&shape, &room, &own, &products, disk, Start::Warm);
        let share = record.number("hobbit_n_slots").unwrap() / record.number("hobbit_n_experts").unwrap();
        for (what, ratio) in [
            ("slots, by the plan", room.share(&shape) / share),
            ("decode, with the run's own misses", 1.0 / timed.seconds / speed),
            (all, 1.0 / whole.seconds / speed),
        ] {
            ratios.entry(what).or_default().push(ratio);
        }
    }
    for (what, ratios) in &mut ratios {
        let (median, n) = (median(ratios), ratios.len());
        println!("{what}: {n} runs, forecast to measured {median:.2}, {:.2} to {:.2}", ratios[0], ratios[n - 1]);
    }
    let timing = ratios.get_mut("decode, with the run's own misses").unwrap();
    assert!(timing.len() >= 20, "the records lack runs: {}", timing.len());
    let median = median(timing);
    assert!((0.8..=1.2).contains(&median), "{median}");
}
