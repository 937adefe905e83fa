//! Forecasts against every measured run that says what is needed: `benches/results/*/prove/*.jsonl`.
//!
//! `cargo test --release -p gguf-tools --test all forecast_records -- --nocapture` prints the table of docs/FORECAST.md.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use gguf_tools::synth::{self, Format, Spec};
use hobbit_core::forecast::{
    Cpu, EXPERT_SECONDS, Expectation, FirstToken, Host, Locality, Products, Shape, Start, TRAINED, Task, rooms, run,
};
use hobbit_core::gguf::{GgmlType, Gguf};
use serde_json::Value;

/// Decoded tokens that are simulated of a run, at the most.
const DECODED_MAX: u32 = 2048;

/// The models of the records as `benches/prove.sh` made them; whether their routes are a trained model's.
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
    study: String,
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

    /// Exact, by hobbit with what it does by default, alone on the machine.
    fn counts(&self) -> bool {
        self.text("hobbit_engine") == "hobbit"
            && self.text("hobbit_outcome") == "ok"
            && self.text("hobbit_precision") == "exact"
            && ["learned", "foresight"].contains(&self.text("hobbit_policy"))
            && self.number("hobbit_busy").unwrap_or(0.0) == 0.0
            && !self.text("hobbit_variant").contains("pressure")
    }

    /// It begins cold and ends with the answer, as what is forecast does: of three repetitions and more most are warm.
    fn is_cold(&self) -> bool {
        self.json["hobbit_decode_ns"].as_array().is_some_and(|repetitions| repetitions.len() < 3)
    }

    /// Tokens per second of the second half's median token: the slots are full by then.
    fn late(&self) -> f64 {
        let steps: Vec<f64> =
            self.json["hobbit_steps_ns"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
        let mut late = steps[steps.len() / 2..].to_vec();
        late.sort_by(f64::total_cmp);
        1e9 / late[late.len() / 2]
    }

    fn misses(&self) -> Option<f64> {
        let (hits, misses) = (self.number("hobbit_decode_hits")?, self.number("hobbit_decode_misses")?);
        (hits + misses > 0.0).then(|| misses / (hits + misses))
    }
}

fn records() -> Vec<Record> {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/results");
    let mut files: Vec<_> = fs::read_dir(results)
        .unwrap()
        .flat_map(|host| fs::read_dir(host.unwrap().path().join("prove")).into_iter().flatten())
        .map(|file| file.unwrap().path())
        .filter(|file| file.extension().is_some_and(|extension| extension == "jsonl"))
        .collect();
    files.sort();
    let mut records = Vec::new();
    for file in files {
        let study = file.file_stem().unwrap().to_string_lossy().into_owned();
        let machine = file.ancestors().nth(2).unwrap().file_name().unwrap().to_string_lossy().into_owned();
        for line in fs::read_to_string(&file).unwrap().lines() {
            let json = serde_json::from_str(line).unwrap();
            records.push(Record { study: study.clone(), machine: machine.clone(), json });
        }
    }
    records
}

/// What products reached where nothing was missing, by machine and type of the experts: what `--cpu auto` measures there.
fn processors(records: &[Record]) -> BTreeMap<String, Cpu> {
    let mut found: BTreeMap<(String, GgmlType), Vec<f64>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.counts() && record.misses() == Some(0.0)) {
        let Some((spec, _)) = model(record.text("model_filename")) else { continue };
        let Some(speed) = record.number("hobbit_decode_ts") else { continue };
        let shape = shape_of(&spec);
        let uses: u64 = shape.layers.len() as u64 * u64::from(shape.n_expert_used);
        let bytes: u64 = shape.experts_per_token.values().chain(shape.ordinary_per_token.values()).sum();
        let rate = bytes as f64 / (1.0 / speed - uses as f64 * EXPERT_SECONDS);
        let dtype = *shape.experts_per_token.keys().next().unwrap();
        found.entry((record.machine.clone(), dtype)).or_default().push(rate);
    }
    let mut processors: BTreeMap<String, Cpu> = BTreeMap::new();
    for ((machine, dtype), mut rates) in found {
        rates.sort_by(f64::total_cmp);
        let median = rates[rates.len() / 2];
        println!("{machine}: {dtype} at {:.1} GB/s ({} runs with everything resident)", median / 1e9, rates.len());
        let cpu = processors.entry(machine).or_default();
        cpu.memory = cpu.memory.max(median);
        cpu.by_type.insert(dtype, median);
    }
    processors
}

/// Of several ratios.
#[derive(Default)]
struct Errors(Vec<f64>);

impl Errors {
    fn line(&mut self, what: &str) -> String {
        self.0.sort_by(f64::total_cmp);
        let n = self.0.len();
        if n == 0 {
            return format!("{what}: none");
        }
        let within = self.0.iter().filter(|ratio| within(**ratio)).count();
        format!(
            "{what}: {n} runs, forecast to measured {:.2} in the median, {:.2} to {:.2}; {within} within 20 %",
            self.0[n / 2],
            self.0[0],
            self.0[n - 1]
        )
    }
}

fn within(ratio: f64) -> bool {
    (0.8..=1.2).contains(&ratio)
}

#[test]
fn forecasts_come_near_what_was_measured() {
    let records = records();
    let processors = processors(&records);
    let mut errors: BTreeMap<&str, Errors> = BTreeMap::new();
    println!(
        "| study | model | memory, GiB | prompt + decoded | experts in slots, GiB | forecast | found | forecast | decode, t/s | forecast to it, with its own misses | forecast to it | second half, t/s | forecast to it |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for record in records.iter().filter(|record| record.counts() && record.is_cold()) {
        let name = record.text("model_filename");
        let Some(((spec, is_trained), cpu)) = model(name).zip(processors.get(&record.machine)) else { continue };
        let (Some(speed), Some(missed)) = (record.number("hobbit_decode_ts"), record.misses()) else { continue };
        let (Some(disk), Some(memory)) = (record.number("hobbit_bandwidth"), record.json["hobbit_limit"].as_u64())
        else {
            continue;
        };
        let shape = shape_of(&spec);
        let size = record.number("model_size").unwrap();
        let ratio = shape.tensor_bytes as f64 / size;
        assert!((0.97..1.03).contains(&ratio), "{name}: {} bytes, the record has {size}", shape.tensor_bytes);
        let (prompt, decoded) = (record.tokens("n_prompt") + record.tokens("n_depth"), record.tokens("n_gen"));
        let host = Host { memory, disk, cpu: cpu.clone(), device: None };
        let n_ctx = u64::from(prompt + decoded).next_multiple_of(256);
        let locality = match is_trained {
            true => Expectation::of(shape.n_expert()).expected,
            false => Expectation::untrained(shape.n_expert()).expected,
        };
        let room = rooms(&shape, &host, &Task { n_ctx, n_prompt: prompt.max(1) }).unwrap();
        let mut add = |what, ratio| errors.entry(what).or_default().0.push(ratio);
        if let Some(prompt_speed) = record.number("hobbit_prompt_ts").filter(|_| record.tokens("n_prompt") > 1) {
            let task = Task { n_ctx, n_prompt: record.tokens("n_prompt") };
            // Others evaluate the prompt once before they are timed.
            let is_cold = record.study == "startup";
            let first = FirstToken::of(&shape, &host, &task, &room, &locality, is_cold);
            let ratio = f64::from(task.n_prompt) / first.prompt_seconds / prompt_speed;
            add(if is_cold { "8 prompts, cold" } else { "7 prompts" }, ratio);
        }
        if decoded < 2 {
            continue;
        }
        let products = Products::of(&shape, &host, &room, &locality, prompt.into());
        let start = Start::Cold { n_prompt: prompt, n_decoded: decoded.min(DECODED_MAX) };
        let whole = run(&shape, &room.slots, &locality, &products, disk, start);
        let warm = run(&shape, &room.slots, &locality, &products, disk, Start::Warm);
        let share = record.number("hobbit_n_slots").unwrap() / record.number("hobbit_n_experts").unwrap();
        let own = Locality::new([(room.share(&shape), 1.0 - missed)]);
        let timed = run(&shape, &room.slots, &own, &products, disk, Start::Warm);
        let late = record.late();
        let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
        let ahead = if record.text("hobbit_predictor") == "none" { "" } else { ", reading ahead" };
        println!(
            "| {}{ahead} | {} | {:.2} | {prompt} + {decoded} | {:.2} | {:.2} | {:.1} % | {:.1} % | {speed:.2} | {:.2} | {:.2} | {late:.2} | {:.2} |",
            record.study,
            name.trim_end_matches(".gguf"),
            gib(memory as f64),
            gib(record.number("hobbit_expert_cache").unwrap()),
            gib(room.share(&shape) * shape.expert_bytes as f64),
            100.0 * (1.0 - missed),
            100.0 * whole.hit_rate,
            1.0 / timed.seconds / speed,
            1.0 / whole.seconds / speed,
            1.0 / warm.seconds / late,
        );
        add("1 slots, by the plan", room.share(&shape) / share);
        add("2 decode, with the run's own misses", 1.0 / timed.seconds / speed);
        let (all, half) = match is_trained {
            true => ("3 decode, trained routes", "4 decode, trained routes, second half"),
            false => ("5 decode, random weights", "6 decode, random weights, second half"),
        };
        // The runs of one recorded model's routes, had only the other model been recorded.
        if name == "qwen3-30b.gguf" {
            let other = TRAINED.iter().find(|known| known.name == "gpt-oss-120b").unwrap().locality();
            let warm = run(&shape, &room.slots, &other, &products, disk, Start::Warm);
            add("4b Qwen3-30B's routes from gpt-oss's curve, second half", 1.0 / warm.seconds / late);
        }
        // What a curve was made of says nothing about it.
        if record.study == "curve" && name == "mixtral.gguf" {
            continue;
        }
        add(all, 1.0 / whole.seconds / speed);
        add(half, 1.0 / warm.seconds / late);
    }
    for (what, errors) in &mut errors {
        println!("{}", errors.line(what.split_once(' ').unwrap().1));
    }
    let timing = &errors["2 decode, with the run's own misses"].0;
    assert!(timing.len() >= 20, "the records lack what is needed: {}", timing.len());
    let median = timing[timing.len() / 2];
    assert!(within(median), "{median}");
}

/// The test's own models are the ones that there are.
#[test]
fn formats_of_the_records_are_known() {
    assert_eq!(model("qwen3-30b.gguf").unwrap().0.types, [Format::Q4_K]);
    assert!(model("other.gguf").is_none());
}
