//! `--mem-budget` is kept: the real binary's largest resident set stays within what it was given.

use std::path::Path;

use hobbit::engine::draft_bytes;
use hobbit::options::{DraftOptions, ScaledFile};
use hobbit::{Model, ModelOptions, OpenError, SessionOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::{Budget, ExpertCache, PlanError};
use hobbit_core::stats::peak_rss_bytes;
use hobbit_core::store::slot_stride;
use hobbit_synth::{Format, Spec, architectures};
use serde_json::Value;

use crate::fixture;
use crate::fixture::cli::{self, Ran};

/// 102 MiB of experts: 8 layers of 32, each of three slices of 136 KiB.
fn spec() -> Spec {
    Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff: 512, ..Spec::tiny("qwen3moe") }
}

/// About 250 tokens.
const PROMPT: &str = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of \
    foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the \
    season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us.";

struct Measured {
    peak_rss_bytes: u64,
    /// Experts that can be resident at once.
    n_slots: u64,
    hits: u64,
    misses: u64,
}

/// Runs to the end and reads the statistics.
fn measure(model: &Path, args: &[&str]) -> Measured {
    let stats = model.with_extension("json");
    let stats_path = stats.to_str().expect("a UTF-8 temporary directory");
    let usual = ["-p", PROMPT, "-n", "16", "--ignore-eos", "-c", "1024", "--stats-json", stats_path];
    assert!(!cli::run(model, &[&usual, args].concat()).expect(0).stdout.is_empty(), "{args:?}: no text");
    let json = cli::json(&stats);
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("no number in {json:#}"));
    let stats = json.get("stats").unwrap_or(&json);
    let layers = stats["layers"].as_array().unwrap_or_else(|| panic!("no layers in {json:#}"));
    Measured {
        peak_rss_bytes: number(&stats["peak_rss_bytes"]),
        n_slots: layers.iter().map(|layer| number(&layer["slots"])).sum(),
        hits: layers.iter().map(|layer| number(&layer["hits"])).sum(),
        misses: layers.iter().map(|layer| number(&layer["misses"])).sum(),
    }
}

/// The smallest budget, as the message for a budget that is too small states it.
fn stated_minimum(model: &Path, flags: &[&str]) -> String {
    let run = cli::run(model, &[&["-p", PROMPT, "-c", "1024", "--mem-budget", "1M"], flags].concat());
    run.is_refused(&["too small", "at least", "give --mem-budget"]).unwrap();
    advised(&run)
}

/// The budget that a message advises.
fn advised(run: &Ran) -> String {
    let (_, rest) = run.stderr.split_once("give --mem-budget ").expect("it was refused for its budget");
    rest.chars().take_while(char::is_ascii_alphanumeric).collect()
}

/// The budget that a message advises is accepted, and not much less would be: whatever hobbit chooses by itself (a
/// longer context, rearranged experts) gives way.
#[test]
fn the_advised_budget_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    let of = |arch| Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff: 512, ..Spec::tiny(arch) };
    let short = |arch, format| Spec { layers: 4, types: vec![format], ..of(arch) };
    let long = |arch| Spec { ctx: 65536, ..of(arch) };
    let mut specs = vec![short("olmoe", Format::Q4_0), short("gpt-oss", Format::Mxfp4), long("olmoe"), long("llama")];
    specs.extend(["qwen3moe", "deepseek2", "gemma4", "qwen3next", "kimi-linear"].map(long));
    for (i, spec) in specs.into_iter().enumerate() {
        let dir = dir.path().join(i.to_string());
        std::fs::create_dir(&dir).unwrap();
        let model = fixture::write(&dir, &spec);
        let run = |budget: &str| cli::run(&model, &["-c", "0", "-n", "1", "--mem-budget", budget]);
        let refused = run("1M");
        refused.is_refused(&["too small", "give --mem-budget "]).unwrap();
        let advised = advised(&refused);
        run(&advised).expect(0);
        let less = bytes(&advised) / 10 * 9;
        run(&less.to_string()).is_refused(&["too small"]).unwrap();
    }
}

fn bytes(size: &str) -> u64 {
    let mib = size.strip_suffix("MiB").unwrap_or_else(|| panic!("'{size}' is no number of MiB"));
    mib.parse::<u64>().unwrap() << 20
}

/// Bytes of memory that all experts would take, and their number.
fn experts(model: &Path) -> (u64, u64) {
    let map = Gguf::open(model).unwrap().experts().unwrap();
    let memory = |layer: &hobbit_core::gguf::LayerExperts| -> u64 {
        layer.tensors.iter().map(|tensor| slot_stride(tensor.slice_bytes)).sum::<u64>() * u64::from(layer.n_expert)
    };
    (map.layers.iter().map(memory).sum(), map.layers.iter().map(|layer| u64::from(layer.n_expert)).sum())
}

#[test]
fn budgets_and_cache_sizes_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture::write(dir.path(), &spec());
    let (expert_bytes, n_experts) = experts(&model);
    let minimum = bytes(&stated_minimum(&model, &[]));
    let within = |budget: u64| {
        let measured = measure(&model, &["--mem-budget", &budget.to_string()]);
        let peak = measured.peak_rss_bytes;
        assert!(0 < peak && peak <= budget, "{peak} bytes resident, {budget} allowed");
        measured
    };
    let least = within(minimum);
    assert!(least.misses > least.hits, "{} hits, {} misses", least.hits, least.misses);
    let is_share = |measured: &Measured, range: std::ops::RangeInclusive<u64>| {
        let share = measured.n_slots * 100 / n_experts;
        assert!(range.contains(&share), "{} slots for {n_experts} experts", measured.n_slots);
    };
    let quarter = within(minimum + expert_bytes / 4);
    is_share(&quarter, 15..=30);
    assert!(quarter.hits > 0 && quarter.misses > 0, "{} hits, {} misses", quarter.hits, quarter.misses);
    is_share(&measure(&model, &["--expert-cache", "50%"]), 45..=50);
    let both = ["-c", "1024", "--mem-budget", &minimum.to_string(), "--expert-cache", "100%"];
    cli::run(&model, &both).is_refused(&["does not fit", "--expert-cache", "--mem-budget"]).unwrap();
}

/// Experts are rearranged in buffers of their own.
#[test]
fn budgets_count_rearranging() {
    let dir = tempfile::tempdir().unwrap();
    let typed = Spec { types: vec![Format::Q4_0], down_types: vec![Format::Q4_0], ff: 1024, ..spec() };
    let model = fixture::write(dir.path(), &typed);
    let (expert_bytes, _) = experts(&model);
    let minimum = bytes(&stated_minimum(&model, &["--repack", "on"]));
    for budget in [minimum, minimum + expert_bytes / 4, minimum + expert_bytes / 2] {
        let measured = measure(&model, &["--mem-budget", &budget.to_string(), "--repack", "on"]);
        let peak = measured.peak_rss_bytes;
        assert!(peak <= budget, "{peak} bytes resident, {budget} allowed");
        // Under Wine a program takes 25 MiB more by itself, and the largest budget holds the whole model.
        let is_whole = cfg!(windows) && measured.n_slots == 0;
        assert!(measured.misses > 0 || is_whole, "no miss with {budget} bytes, of at least {minimum}");
    }
}

/// Routers of 15 MiB, and as many again would be kept by a policy that copied them; tables of 1.5 MiB beside experts of
/// 51 MiB: a tenth of the least budget.
#[test]
fn budgets_count_routers_and_tables() {
    let dir = tempfile::tempdir().unwrap();
    let wide = Spec { layers: 30, experts: 128, topk: 8, embd: 1024, ff: 32, heads: 8, ..Spec::tiny("qwen3moe") };
    let model = fixture::write(dir.path(), &wide);
    let minimum = stated_minimum(&model, &[]);
    for budget in [bytes(&minimum), bytes(&minimum) + (40 << 20)] {
        for policy in ["learned", "lru"] {
            let measured = measure(&model, &["--mem-budget", &budget.to_string(), "--policy", policy]);
            let peak = measured.peak_rss_bytes;
            assert!(peak <= budget, "--policy {policy}: {peak} bytes resident, {budget} allowed");
        }
    }
}

/// Embeddings of 80 MiB per layer and per token, which stay in the file.
#[test]
fn budgets_do_not_count_tables_that_are_read_by_row() {
    let dir = tempfile::tempdir().unwrap();
    let spec = |per_layer_embd| {
        let (vocab, layers, experts) = (1 << 16, 4, 16);
        let spec = Spec { vocab, layers, experts, per_layer_embd, ff: 64, ..Spec::tiny("gemma4") };
        Spec { dense_type: Some(Format::Q8_0), ..spec }
    };
    let [with, without] = [256, 0].map(|per_layer_embd| {
        let dir = dir.path().join(per_layer_embd.to_string());
        std::fs::create_dir(&dir).unwrap();
        fixture::write(&dir, &spec(per_layer_embd))
    });
    let tables: u64 = Gguf::open(&with).unwrap().row_tables().map(|table| table.extent.len).sum();
    assert!(tables > 80 << 20, "{tables}");
    // A flag of the cache's: llama.cpp by itself would need less for the small one.
    let [minimum, base] = [&with, &without].map(|model| bytes(&stated_minimum(model, &["--io", "buffered"])));
    assert!(minimum < base + (16 << 20), "{minimum} bytes with the tables, {base} without");
    let measured = measure(&with, &["--mem-budget", &minimum.to_string()]);
    assert!(measured.peak_rss_bytes <= minimum, "{} bytes resident, {minimum} allowed", measured.peak_rss_bytes);
}

const MIB: u64 = 1 << 20;

/// Options of a model at the seam, with the session that [`settings`] describes.
fn within(budget: u64) -> ModelOptions {
    ModelOptions {
        budget: Budget::Bytes(budget),
        overcommit: true,
        passthrough: false,
        expert_cache: ExpertCache::Bytes(0),
        expects: settings(),
        ..ModelOptions::default()
    }
}

fn settings() -> SessionOptions {
    SessionOptions { n_ctx: 256, n_ubatch: 64, n_batch: 64, n_outputs_max: 1, warmup: false, ..Default::default() }
}

/// The smallest budget that the refusal names.
#[track_caller]
fn minimum<T>(opened: Result<T, OpenError>) -> u64 {
    match opened {
        Err(OpenError::Plan(PlanError::TooSmall { minimum, .. })) => minimum,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was opened"),
    }
}

/// A budget that is too small is refused from the headers alone: ordinary weights, contexts, drafts, adapters and what
/// is reserved or lent take no memory before they fit.
#[test]
fn models_that_cannot_fit_are_not_loaded() {
    if !fixture::in_own_process("budget::models_that_cannot_fit_are_not_loaded") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, spec: Spec| {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        fixture::write(&dir, &spec)
    };
    let wide = |arch| Spec { layers: 4, embd: 4096, ff: 32, heads: 8, experts: 16, topk: 4, ..Spec::tiny(arch) };
    let (large, small) = (write("large", wide("qwen3moe")), write("small", Spec::tiny("qwen3moe")));
    let dense = write("dense", Spec { experts: 2, topk: 1, dense_lead: Some(4), ..wide("deepseek2") });
    let ordinary = |path: &Path| {
        let gguf = Gguf::open(path).unwrap();
        gguf.tensor_bytes() - gguf.experts().unwrap().layers.iter().map(|layer| layer.bytes()).sum::<u64>()
    };
    let budget = 150 * MIB;
    for path in [&large, &dense] {
        assert!(ordinary(path) > 160 * MIB, "{}", ordinary(path));
        assert!(minimum(Model::open(path, &within(budget))) > ordinary(path));
    }
    let long = SessionOptions { n_ctx: 1 << 19, ..settings() };
    let kv = 300 * MIB;
    assert!(minimum(Model::open(&small, &ModelOptions { expects: long.clone(), ..within(budget) })) > kv);
    let draft = DraftOptions { path: large.clone(), ..DraftOptions::default() };
    let beside = draft_bytes(&draft, &settings()).unwrap();
    assert!(beside > ordinary(&large));
    assert!(minimum(Model::open(&small, &ModelOptions { reserved_bytes: beside, ..within(budget) })) > beside);
    assert!(minimum(Model::open(&small, &ModelOptions { lent_bytes: 200 * MIB, ..within(budget) })) > 200 * MIB);
    let lora = fixture::adapters::lora(&large, dir.path().join("lora.gguf"), 128, |name| name.ends_with("_q.weight"));
    let adapter = Gguf::open(&lora).unwrap().tensor_bytes();
    let mut options = within(ordinary(&large) + 60 * MIB);
    let alone = minimum(Model::open(&large, &within(budget)));
    options.adapters.lora.push(ScaledFile { path: lora, scale: 1.0 });
    assert!(minimum(Model::open(&large, &options)) > alone + adapter / 2, "{alone} and {adapter}");
    // Another session than the model's options told of, and options that tell of none.
    for expects in [settings(), SessionOptions::default()] {
        let model = Model::open(&small, &ModelOptions { expects, ..within(budget) }).unwrap();
        assert!(minimum(model.session(&long)) > kv);
        model.session(&settings()).unwrap();
    }
    let peak = peak_rss_bytes();
    assert!((1..150 * MIB).contains(&peak), "{} MiB resident", peak / MIB);
}

/// The check of headers refuses no budget that is enough.
#[test]
fn enough_is_not_refused_before_loading() {
    if !fixture::in_own_process("budget::enough_is_not_refused_before_loading") {
        return;
    }
    for arch in architectures() {
        let dir = tempfile::tempdir().unwrap();
        let path = fixture::write(dir.path(), &Spec { vocab: 4096, ..Spec::tiny(arch) });
        for (n_seq_max, n_ctx) in [(1, 256), (3, 1536)] {
            let settings = SessionOptions { n_seq_max, n_ctx, ..settings() };
            let options = |budget| ModelOptions { expects: settings.clone(), ..within(budget) };
            let session = Model::open(&path, &options(1 << 40)).unwrap().session(&settings).unwrap();
            let found = fixture::least_budget(&session.description().plan);
            drop(session);
            let model = Model::open(&path, &options(found));
            model.unwrap_or_else(|error| panic!("{arch}: {found} are needed: {error}"));
            // Resident pages differ from run to run.
            assert!(minimum(Model::open(&path, &options(MIB))) >= found - MIB, "{arch}: {found} are needed");
        }
    }
}
