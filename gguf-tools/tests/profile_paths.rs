//! `profile --path-table` as a user runs it, and what the engine makes of the table: from a file, and from a pack.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gguf_tools::synth::{self, Spec};
use hobbit::options::Prefetch;
use hobbit::{BatchToken, CachingOptions, Model, ModelOptions, SessionOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::Pack;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::predict::{PredictShape, PredictorKind};
use hobbit_core::profile::read_path_table;

/// Tokens and length of a piece, as numbers and words.
const N_TOKENS: (usize, &str) = (1024, "1024");
const CONTEXT: (usize, &str) = (256, "256");

fn tool(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gguf-tools")).args(args).output().unwrap()
}

fn words(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn succeed(args: &[&str]) -> Output {
    let out = tool(args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", words(&out.stderr));
    out
}

/// Fails, and says all of `parts`.
fn refused(args: &[&str], parts: &[&str]) {
    let out = tool(args);
    assert_eq!(out.status.code(), Some(1), "{args:?}");
    for part in parts {
        assert!(words(&out.stderr).contains(part), "'{part}' is not in:\n{}", words(&out.stderr));
    }
}

fn word(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(name)
}

/// The demo model's table on held-out prose.
fn profiled(to: &Path) {
    let (model, text) = (bundled("demo.gguf"), bundled("demo-heldout-prose.txt"));
    let flags = ["--no-widths", "--threads", "1", "--mem-budget", "4GiB", "--tokens", N_TOKENS.1];
    let more = ["--context", CONTEXT.1, "--path-table", word(to)];
    let out = succeed(&[&["profile", word(&model), "--text", word(&text)], &flags[..], &more[..]].concat());
    assert!(words(&out.stderr).contains("in 6 layers, of 1024 tokens"), "{}", words(&out.stderr));
}

fn options() -> ModelOptions {
    ModelOptions { budget: Budget::Bytes(4 << 30), ..ModelOptions::default() }
}

fn session(model: &Model) -> hobbit::Session {
    let n = CONTEXT.0 as u32;
    let options = SessionOptions { n_ctx: n, n_batch: n, n_ubatch: n, threads: Some(1), ..Default::default() };
    model.session(&options).unwrap()
}

/// As the engine looks ahead with a table: from this file, or from the model itself.
fn looking_ahead(table: Option<&Path>) -> ModelOptions {
    let caching =
        CachingOptions { predictor: PredictorKind::PathTable, prefetch: Prefetch::On, ..CachingOptions::default() };
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
    let text = std::fs::read_to_string(bundled("demo-heldout-prose.txt")).unwrap();
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
fn a_profiled_table_predicts_from_a_file_and_from_a_pack() {
    hobbit::set_log(|_, _| ());
    let dir = tempfile::tempdir().unwrap();
    let [table, pack, again] = ["a.paths", "pack.gguf", "again.gguf"].map(|name| dir.path().join(name));
    profiled(&table);
    let demo = bundled("demo.gguf");

    let (expected, nobody) = decode(
        &demo,
        &ModelOptions {
            caching: CachingOptions { predictor: PredictorKind::None, ..CachingOptions::default() },
            ..looking_ahead(None)
        },
    );
    assert_eq!(nobody, None);
    let (logits, recall) = decode(&demo, &looking_ahead(Some(&table)));
    assert!(logits == expected, "a predictor decides what is read, not what comes out");
    // Two of eight experts by chance: a quarter.
    assert!(recall.unwrap() > 0.35, "{recall:?}");

    succeed(&["pack", word(&demo), "-o", word(&pack), "--path-table", word(&table)]);
    succeed(&["verify", word(&pack)]);
    assert_eq!(Pack::open(&pack).unwrap().path_table().unwrap().unwrap(), read_path_table(&table).unwrap());
    let shown = succeed(&["inspect", word(&pack)]);
    for part in ["path table: ", "in 6 layers, of 1024 tokens", "hobbit.paths"] {
        assert!(words(&shown.stdout).contains(part), "'{part}' is not in:\n{}", words(&shown.stdout));
    }
    let json: serde_json::Value = serde_json::from_slice(&succeed(&["inspect", "--json", word(&pack)]).stdout).unwrap();
    assert_eq!(json["path_table"]["bytes"].as_u64(), Some(std::fs::metadata(&table).unwrap().len()));
    assert_eq!(decode(&pack, &looking_ahead(None)), (expected, recall), "from the pack");
    succeed(&["unpack", word(&pack), "-o", word(&again)]);
    assert!(std::fs::read(&again).unwrap() == std::fs::read(&demo).unwrap());
}

/// What a run recorded counts as what the profile saw: the same text in the same batches.
#[test]
fn a_trace_makes_the_same_table() {
    hobbit::set_log(|_, _| ());
    let dir = tempfile::tempdir().unwrap();
    let [table, trace, counted] = ["a.paths", "a.trace", "b.paths"].map(|name| dir.path().join(name));
    profiled(&table);
    let demo = bundled("demo.gguf");
    let model = Model::open(&demo, &ModelOptions { trace: Some(trace.clone()), ..options() }).unwrap();
    let text = std::fs::read_to_string(bundled("demo-heldout-prose.txt")).unwrap();
    let tokens = model.tokenize(&text, false, false).unwrap();
    let mut session = session(&model);
    for window in tokens[..N_TOKENS.0].chunks(CONTEXT.0) {
        session.reset();
        let entry = |(position, &token)| BatchToken { token, position, sequence: 0, logits: true };
        session.evaluate(&(0..).zip(window).map(entry).collect::<Vec<_>>()).unwrap();
    }
    // The trace is complete once nobody has the model.
    drop((session, model));
    let count = ["profile", word(&demo), "--from-trace", word(&trace), "--path-table", word(&counted)];
    succeed(&count);
    assert_eq!(read_path_table(&counted).unwrap(), read_path_table(&table).unwrap());

    let other = Spec { layers: 3, experts: 4, vocab: 300, heads: 2, ..Spec::tiny("qwen3moe") };
    let other = synth::write(&dir.path().join("other.gguf"), &other).unwrap().files.remove(0);
    let of_other = ["profile", word(&other), "--from-trace", word(&trace), "--path-table", word(&counted)];
    refused(&of_other, &["a.trace: recorded of demo.gguf", "not those of", "other.gguf"]);
    let pack = dir.path().join("pack.gguf");
    refused(&["pack", word(&other), "-o", word(&pack), "--path-table", word(&table)], &["other.gguf: path table"]);
    let over_the_table = tool(&["pack", word(&other), "-o", word(&counted), "--force"]);
    assert_eq!(over_the_table.status.code(), Some(2), "{}", words(&over_the_table.stderr));
    assert_eq!(read_path_table(&counted).unwrap(), read_path_table(&table).unwrap());
    assert_eq!(tool(&count[..4]).status.code(), Some(2), "a trace, and nothing to write");
    assert_eq!(tool(&["profile", word(&demo), "--path-table", word(&counted)]).status.code(), Some(2), "no text");
    assert_eq!(tool(&[&count[..], &["--text", "some.txt"]].concat()).status.code(), Some(2), "a trace and a text");
}

#[test]
fn a_table_that_cannot_be_used_is_refused_with_a_remedy() {
    hobbit::set_log(|_, _| ());
    let dir = tempfile::tempdir().unwrap();
    let [table, pack] = ["a.paths", "pack.gguf"].map(|name| dir.path().join(name));
    profiled(&table);
    let demo = bundled("demo.gguf");
    let fault = |model: &Path, table: Option<&Path>| match Model::open(model, &looking_ahead(table)) {
        Ok(_) => panic!("{} was opened", model.display()),
        Err(error) => hobbit_programs::exit::in_words(&error.into()),
    };
    let message = fault(&demo, None);
    assert!(message.contains("demo.gguf: the path-table predictor needs a table"), "{message}");
    assert!(message.contains("gguf-tools profile --path-table"), "{message}");
    let message = fault(&demo, Some(&dir.path().join("none.paths")));
    assert!(message.contains("none.paths: cannot read"), "{message}");

    let other = Spec { layers: 3, experts: 4, vocab: 300, heads: 2, ..Spec::tiny("qwen3moe") };
    let other = synth::write(&dir.path().join("other.gguf"), &other).unwrap().files.remove(0);
    let message = fault(&other, Some(&table));
    assert!(message.contains("a.paths: path table: number of layers with experts: found 6, expected 3"), "{message}");
    let gguf = Gguf::open(&demo).unwrap();
    assert!(
        read_path_table(&table)
            .unwrap()
            .check_shape(&PredictShape::of_header(&gguf, &gguf.experts().unwrap(), None))
            .is_ok()
    );

    succeed(&["pack", word(&demo), "-o", word(&pack), "--path-table", word(&table)]);
    let inside = Pack::open(&pack).unwrap().raw.tensor("hobbit.paths").unwrap().extent;
    for (file, at) in [(&table, 100), (&pack, inside.offset as usize + 100)] {
        let mut bytes = std::fs::read(file).unwrap();
        bytes[at] ^= 0x40;
        std::fs::write(file, bytes).unwrap();
    }
    let message = fault(&demo, Some(&table));
    assert!(message.contains("a.paths: path table") && message.contains("profile the model again"), "{message}");
    let message = fault(&pack, None);
    assert!(
        message.contains("pack.gguf: tensor 'hobbit.paths'") && message.contains("with --path-table FILE"),
        "{message}"
    );
    let out = tool(&["verify", word(&pack)]);
    assert_eq!(out.status.code(), Some(1));
    assert!(words(&out.stdout).contains("tensor 'hobbit.paths': path table"), "{}", words(&out.stdout));
    // Without the predictor nobody looks.
    assert!(Model::open(&pack, &options()).is_ok());
}

#[test]
fn the_model_and_the_text_are_not_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let model = synth::write(&dir.path().join("model.gguf"), &Spec::tiny("qwen3moe")).unwrap().files.remove(0);
    let text = dir.path().join("text");
    std::fs::write(&text, "{ a text that begins as JSON does }").unwrap();
    let before = std::fs::read(&model).unwrap();
    for (flag, file, part) in [
        ("--path-table", &model, "the file of the model"),
        ("--output", &model, "the file of the model"),
        ("--output", &text, "the file of --text"),
        ("--path-table", &text, "the file of --text"),
    ] {
        let out = tool(&["profile", word(&model), "--text", word(&text), flag, word(file)]);
        assert_eq!(out.status.code(), Some(2), "{}", words(&out.stderr));
        assert!(words(&out.stderr).contains(part) && words(&out.stderr).contains(flag), "{}", words(&out.stderr));
    }
    assert!(std::fs::read(&model).unwrap() == before);
}
