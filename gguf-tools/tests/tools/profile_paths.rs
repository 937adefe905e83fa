//! `profile --path-table`, and predictions from its table.

use hobbit::options::Prefetch;
use hobbit::{CachingOptions, Model, ModelOptions, SessionOptions};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::predict::PredictorKind;

use crate::*;

/// Tokens and length of a piece, as numbers and words.
const N_TOKENS: (usize, &str) = (1024, "1024");
const CONTEXT: (usize, &str) = (256, "256");

fn demo() -> PathBuf {
    bundled("demo.gguf")
}

fn prose() -> PathBuf {
    bundled("demo-heldout-prose.txt")
}

/// The demo model's table on held-out prose.
fn profiled(to: &Path) {
    let (model, text) = (demo(), prose());
    let flags = ["--no-widths", "--threads", "1", "--mem-budget", "4GiB", "--tokens", N_TOKENS.1];
    let more = ["--context", CONTEXT.1, "--path-table", word(to)];
    let ran = succeed(&[&["profile", word(&model), "--text", word(&text)], &flags[..], &more[..]].concat());
    assert_contains(&ran.err, &["in 6 layers, of 1024 tokens"]);
}

fn options() -> ModelOptions {
    ModelOptions { budget: Budget::Bytes(4 << 30), ..ModelOptions::default() }
}

fn session(model: &Model) -> hobbit::Session {
    let n = CONTEXT.0 as u32;
    let options = SessionOptions { n_ctx: n, n_batch: n, n_ubatch: n, threads: Some(1), ..Default::default() };
    model.session(&options).unwrap()
}

/// Prefetches by a table: of this file, or of the model itself.
fn looking_ahead(table: Option<&Path>) -> ModelOptions {
    let caching = CachingOptions {
        predictor: Some(PredictorKind::PathTable),
        prefetch: Prefetch::On,
        ..CachingOptions::default()
    };
    ModelOptions {
        caching,
        path_table: table.map(Path::to_owned),
        expert_cache: ExpertCache::Percent(25.0),
        ..options()
    }
}

/// Logits of prose behind what was profiled, token by token, and the recall of predictions of the next layer.
fn decode(model: &Path, options: &ModelOptions) -> (Vec<f32>, Option<f64>) {
    let model = Model::open(model, options).unwrap_or_else(|error| panic!("{error}"));
    let mut session = session(&model);
    let text = fs::read_to_string(prose()).unwrap();
    let tokens = model.tokenize(&text, false, false).unwrap();
    let mut logits = Vec::new();
    for token in &tokens[2 * N_TOKENS.0..][..160] {
        session.feed(&[*token]).unwrap();
        logits.extend_from_slice(session.logits(0).unwrap());
    }
    let report = session.stats().prefetch;
    (logits, report.and_then(|report| report.recall.first()?.recall))
}

#[test]
fn a_profiled_table_predicts() {
    hobbit::set_log(|_, _| ());
    let dir = tempfile::tempdir().unwrap();
    let table = dir.path().join("a.paths");
    profiled(&table);
    let demo = demo();

    let caching = CachingOptions { predictor: Some(PredictorKind::None), ..CachingOptions::default() };
    let (expected, none) = decode(&demo, &ModelOptions { caching, ..looking_ahead(None) });
    assert_eq!(none, None);
    let (logits, recall) = decode(&demo, &looking_ahead(Some(&table)));
    assert!(logits == expected, "a predictor decides what is read, not what comes out");
    // Two of eight experts by chance: a quarter.
    assert!(recall.unwrap() > 0.35, "{recall:?}");
}

#[test]
fn a_table_that_cannot_be_used_is_refused_with_a_remedy() {
    hobbit::set_log(|_, _| ());
    let dir = tempfile::tempdir().unwrap();
    let [table, none] = ["a.paths", "none.paths"].map(|name| dir.path().join(name));
    profiled(&table);
    let (demo, other) = (demo(), synthesise(&dir.path().join("other.gguf"), &small_spec()));
    let fault = |model: &Path, table: Option<&Path>, parts: &[&str]| {
        let Err(error) = Model::open(model, &looking_ahead(table)) else { panic!("{}", model.display()) };
        assert_contains(&hobbit_common::exit::in_words(&error.into()), parts);
    };
    let parts = ["demo.gguf: the path-table predictor needs a table", "gguf-tools profile --path-table"];
    fault(&demo, None, &parts);
    fault(&demo, Some(&none), &["none.paths: cannot read"]);
    let parts = ["a.paths: path table: number of layers with experts: found 6, expected 3"];
    fault(&other, Some(&table), &parts);

    refused(2, &["profile", word(&demo), "--path-table", word(&none)], "--text");
    let mut bytes = fs::read(&table).unwrap();
    bytes[100] ^= 0x40;
    fs::write(&table, bytes).unwrap();
    fault(&demo, Some(&table), &["a.paths: path table", "profile the model again"]);
}

#[test]
fn the_model_and_the_text_are_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path(), &Spec::tiny("qwen3moe"));
    fs::write(&text, "{ a text that begins as JSON does }").unwrap();
    let before = fs::read(&model).unwrap();
    for (flag, file, part) in [
        ("--path-table", &model, "the file of the model"),
        ("--output", &model, "the file of the model"),
        ("--output", &text, "the file of --text"),
        ("--path-table", &text, "the file of --text"),
    ] {
        refused(2, &["profile", word(&model), "--text", word(&text), flag, word(file)], part);
    }
    assert!(fs::read(&model).unwrap() == before);
}
