//! Command lines on files, from words to what is printed.

use std::ffi::OsString;
use std::path::Path;

use super::{in_words, run};
use crate::trace::{Header, Layer, LayerRecord, ModelDescription, Phase, Prediction, TraceWriter};

/// A run of two layers whose first experts are used most.
fn trace(path: &Path, n_tokens: u16) {
    let layer =
        |layer| Layer { layer, n_expert: 8, n_used: 2, bytes_high: 1 << 20, bytes_low: 0, slots_high: 3, slots_low: 0 };
    let model =
        ModelDescription { name: "toy".into(), architecture: "toymoe".into(), layers: vec![layer(0), layer(2)] };
    let mut writer = TraceWriter::new(Vec::new(), &Header { model, ..Header::default() }).unwrap();
    writer.sequence().unwrap();
    for token in 0..n_tokens {
        for layer in [0, 2] {
            let mut record = LayerRecord::new(layer, 2);
            let chosen = [token % 3, 3 + (token * 7 + layer) % 5];
            record.push_token(&chosen, &[0.75, 0.25], None, 0);
            record.predictions.push(Prediction { distance: 1, expert: chosen[0], score: 0.75 });
            record.compute_seconds = 0.001;
            writer.layer(&record).unwrap();
        }
        writer.batch(Phase::Decode, 1, 0.004).unwrap();
    }
    std::fs::write(path, writer.finish().unwrap()).unwrap();
}

fn hobbit_sim(words: &[&str]) -> anyhow::Result<(u8, String)> {
    let mut out = Vec::new();
    let status = run(std::iter::once("hobbit-sim").chain(words.iter().copied()).map(OsString::from), &mut out)?;
    Ok((status, String::from_utf8(out).unwrap()))
}

fn path(directory: &tempfile::TempDir, name: &str) -> String {
    directory.path().join(name).into_os_string().into_string().unwrap()
}

#[test]
fn show_prints_json_lines() {
    let directory = tempfile::tempdir().unwrap();
    let file = path(&directory, "a.trace");
    trace(Path::new(&file), 3);
    let (status, text) = hobbit_sim(&["show", &file]).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<&str> = lines.iter().map(|line| line["record"].as_str().unwrap()).collect();
    assert_eq!(status, 0);
    assert_eq!(kinds[..5], ["header", "sequence", "layer", "layer", "batch"]);
    assert_eq!(lines.len(), 2 + 3 * 3);
    assert_eq!(lines[0]["header"]["model"]["name"], "toy");
    assert_eq!(lines[2]["chosen"], serde_json::json!([0, 3]));
    assert_eq!(hobbit_sim(&["show", &file, "--header"]).unwrap().1.lines().count(), 1);
}

#[test]
fn replay_compares_with_lru_and_the_optimum() {
    let directory = tempfile::tempdir().unwrap();
    let file = path(&directory, "a.trace");
    trace(Path::new(&file), 60);
    let words = ["replay", &file, "--policy", "lfu", "--budget", "25%,4slots", "--predictor", "none,oracle"];
    let (_, text) = hobbit_sim(&words).unwrap();
    assert!(text.lines().nth(1).unwrap().starts_with("budget  predictor  policy"), "{text}");
    assert_eq!(text.lines().count(), 2 + 2 * (2 * 2 + 1), "{text}");
    let (_, json) = hobbit_sim(&[&words[..], &["--json"]].concat()).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let rows = json[0]["replays"].as_array().unwrap();
    for row in rows {
        let is = |key: &str, word: &str| row[key] == word;
        assert!(!is("policy", "lru") || row["penalty_to_lru"] == 1.0);
        assert!(!is("policy", "belady") || row["penalty_to_belady"] == 1.0);
        assert!(!is("predictor", "none") || row["penalty_to_belady"].as_f64().unwrap() >= 1.0);
        assert_eq!(row["outcome"]["decode"]["tokens"], 60);
    }
    assert_eq!(hobbit_sim(&words).unwrap().1, text, "equal commands print the same");
}

#[test]
fn calibrate_and_report_write_whole_files() {
    let directory = tempfile::tempdir().unwrap();
    let (file, fitted, page) = (path(&directory, "a.trace"), path(&directory, "a.json"), path(&directory, "a.html"));
    trace(Path::new(&file), 40);
    let (_, text) =
        hobbit_sim(&["calibrate", &file, "-o", &fitted, "--low-bytes", "25%", "--shares", "50/50/0"]).unwrap();
    assert!(text.contains("thresholds: T1"), "{text}");
    let found: crate::sim::FittedPolicy = serde_json::from_str(&std::fs::read_to_string(&fitted).unwrap()).unwrap();
    assert_eq!((found.format.as_str(), found.policy.as_str()), ("hobbit-policy", "hobbit"));
    assert!(found.penalty <= found.penalty_lru && found.t1.is_some());

    hobbit_sim(&["report", &file, "-o", &page, "--policy", "lru,lfu", "--budget", "25%,50%"]).unwrap();
    let html = std::fs::read_to_string(&page).unwrap();
    for part in ["Hit rate by slots", "Miss penalty by budget", "Recall of previous", "Who is used", "<svg", "</html>"]
    {
        assert!(html.contains(part), "{part}");
    }
    assert!(!html.contains("http") && !html.contains("src="), "self-contained");
    let mut names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.html", "a.json", "a.trace"]);
}

#[test]
fn failures_name_the_file_and_wrong_usage_is_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let file = path(&directory, "a.trace");
    let failure = |words: &[&str]| in_words(&hobbit_sim(words).unwrap_err());
    assert!(failure(&["show", &file]).starts_with(&format!("{file}: cannot open this trace: ")));
    std::fs::write(&file, "GGUF").unwrap();
    assert!(failure(&["replay", &file]).contains("not a trace"));
    trace(Path::new(&file), 0);
    assert!(failure(&["replay", &file]).contains("no complete batch"));
    trace(Path::new(&file), 2);
    assert!(failure(&["replay", &file, "--precision", "dynamic"]).contains("--low-bytes"));
    assert!(failure(&["replay", &file, "--t1", "0.9", "--t2", "0.5"]).contains("--t1 0.9 is above"));
    for words in [
        &["replay"][..],
        &["fly"],
        &["replay", &file, "--policy", "magic"],
        &["replay", &file, "--budget", "lots"],
        &["replay", &file, "--layer-ms", "1"],
        &["calibrate", &file],
    ] {
        assert_eq!(hobbit_sim(words).unwrap().0, 2, "{words:?}");
    }
    assert_eq!(hobbit_sim(&["--help"]).unwrap().0, 0);
}

#[test]
fn a_trace_that_was_cut_off_is_used_as_far_as_it_goes() {
    let directory = tempfile::tempdir().unwrap();
    let file = path(&directory, "a.trace");
    trace(Path::new(&file), 10);
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 3]).unwrap();
    let (_, json) = hobbit_sim(&["replay", &file, "--policy", "lru", "--json"]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json[0]["tokens"], 9);
}
