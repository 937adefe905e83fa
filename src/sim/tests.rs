//! Tests of command lines on files, from arguments to output.

use std::ffi::OsString;
use std::path::Path;

use super::run;
use crate::exit::{Answered, in_words};
use hobbit_core::trace::{Header, Layer, LayerRecord, ModelDescription, Phase, Prediction, TraceWriter};

/// A trace of two layers whose first experts are used most.
fn trace(path: &Path, n_tokens: u16) {
    let layer = |layer| Layer { layer, n_expert: 8, n_used: 2, bytes_high: 1 << 20, slots_high: 3, ..Layer::default() };
    let model =
        ModelDescription { name: "toy".into(), architecture: "toymoe".into(), layers: vec![layer(0), layer(2)] };
    let mut header = Header { model, ..Header::default() };
    (header.settings.predictor, header.settings.distance) = ("stacked-gate".into(), 1);
    let mut writer = TraceWriter::new(Vec::new(), &header).unwrap();
    writer.sequence().unwrap();
    for token in 0..n_tokens {
        for layer in [0, 2] {
            let mut record = LayerRecord::new(layer, 2);
            let chosen = [token % 3, 3 + (token * 7 + layer) % 5];
            record.push_token(&chosen, &[0.75, 0.25], None, 0);
            // The prediction is right about the first expert of the next layer, and about the second only in third
            // place.
            if layer == 0 {
                let second = 3 + (token * 7 + 2) % 5;
                for (expert, score) in [(chosen[0], 0.75), ((chosen[0] + 1) % 3, 0.125), (second, 0.0625)] {
                    record.predictions.push(Prediction { token: 0, distance: 1, expert, score });
                }
            }
            record.compute_seconds = 0.001;
            writer.layer(&record).unwrap();
        }
        writer.batch(Phase::Decode, 1, 0.004).unwrap();
    }
    std::fs::write(path, writer.finish().unwrap()).unwrap();
}

fn hobbit_sim(words: &[&str]) -> anyhow::Result<(u8, String)> {
    let mut out = Vec::new();
    let status = run(std::iter::once("hobbit-sim").chain(words.iter().copied()).map(OsString::from), &mut out);
    let status = status.or_else(|error| error.downcast().map(|Answered(status)| status))?;
    Ok((status, String::from_utf8(out).unwrap()))
}

fn path(directory: &tempfile::TempDir, name: &str) -> String {
    directory.path().join(name).into_os_string().into_string().unwrap()
}

/// A directory with a trace of 60 tokens and one of 90.
fn traces() -> (tempfile::TempDir, String, String) {
    let directory = tempfile::tempdir().unwrap();
    let (file, other) = (path(&directory, "a.trace"), path(&directory, "b.trace"));
    trace(Path::new(&file), 60);
    trace(Path::new(&other), 90);
    (directory, file, other)
}

fn json(words: &[&str]) -> serde_json::Value {
    serde_json::from_str(&hobbit_sim(&[words, &["--json"]].concat()).unwrap().1).unwrap()
}

fn rows(words: &[&str]) -> Vec<serde_json::Value> {
    json(&[&["replay"], words].concat())[0]["replays"].as_array().unwrap().clone()
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
    let (_directory, file, _) = traces();
    let words = ["replay", &file, "--policy", "lfu", "--budget", "25%,4slots", "--predictor", "none,oracle"];
    let (_, text) = hobbit_sim(&words).unwrap();
    assert!(text.lines().nth(1).unwrap().starts_with("budget  predictor  policy"), "{text}");
    assert_eq!(text.lines().count(), 2 + 2 * (2 * 2 + 1), "{text}");
    for row in rows(&words[1..]) {
        let is = |key: &str, word: &str| row[key] == word;
        assert!(!is("policy", "lru") || row["penalty_to_lru"] == 1.0);
        assert!(!is("policy", "belady") || row["penalty_to_belady"] == 1.0);
        assert!(!is("predictor", "none") || row["penalty_to_belady"].as_f64().unwrap() >= 1.0);
        assert_eq!(row["outcome"]["decode"]["tokens"], 60);
    }
    assert_eq!(hobbit_sim(&words).unwrap().1, text, "equal commands print the same");
}

#[test]
fn baselines_of_the_papers() {
    let (_directory, file, other) = traces();
    let rows = |words: &[&str]| rows(&[&[&file, "--budget", "4slots"], words].concat());
    let penalty = |rows: &[serde_json::Value], policy: &str| {
        rows.iter().find(|row| row["policy"] == policy).unwrap()["outcome"]["decode"]["penalty"].as_f64().unwrap()
    };
    let even = rows(&["--policy", "lfu,lfu-model"]);
    assert_eq!(penalty(&even, "lfu"), penalty(&even, "lfu-model"), "one sequence is the run");
    let global = rows(&["--policy", "edgemoe", "--slots", "global"]);
    assert!(penalty(&global, "belady") <= penalty(&global, "edgemoe"));
    assert_eq!(rows(&["--policy", "edgemoe", "--allocation", "global"]), global, "the older name");
    let dropped = rows(&["--policy", "lru", "--drop", "0.9"]);
    assert_eq!(dropped[0]["routing"], "missing below 0.9 left out", "{dropped:?}");
    let read = rows(&["--policy", "lru", "--predictor", "path-table", "--calibration", &other, "--prefetch", "all"]);
    assert!(read[0]["outcome"]["prefetch"]["useful"].as_u64().unwrap() > 0, "{}", read[0]);
    let error = hobbit_sim(&["replay", &file, "--predictor", "path-table"]).unwrap_err().to_string();
    assert!(error.contains("--calibration FILES"), "{error}");
}

#[test]
fn calibrate_prints_flags() {
    let (_directory, file, _) = traces();
    let (_, text) = hobbit_sim(&["calibrate", &file, "--low-bytes", "25%", "--shares", "50/50/0"]).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    assert_eq!([words[0], words[1], words[2]], ["--policy", "hobbit", "--policy-weights"], "{text}");
    assert!(words[3].parse::<hobbit_core::cache::policy::Weights>().is_ok() && words[4] == "--t1", "{text}");
    let penalty = |at: usize| words[at].trim_end_matches(',').parse::<f64>().unwrap();
    assert_eq!((words[8], words[13]), ("penalty", "under"), "{text}");
    assert!(penalty(11) <= penalty(12), "{text}");
}

#[test]
fn recall_of_predictors() {
    let (_directory, file, other) = traces();
    let json = json(&["recall", &file, "--calibration", &other]);
    let row = |predictor: &str| {
        let rows = json[0]["predictors"].as_array().unwrap();
        rows.iter().find(|row| row["predictor"] == predictor && row["distance"] == 1).unwrap()
    };
    let figures = |row: &serde_json::Value| ["recall", "precision", "experts"].map(|key| row[key].as_f64().unwrap());
    assert_eq!(figures(row("oracle")), [1.0, 1.0, 2.0]);
    assert_eq!(figures(row("stacked-gate")), [0.5, 0.5, 2.0]);
    // A quarter of eight experts equals the number that a token uses.
    assert_eq!(figures(row("cross-layer")), [0.5, 0.5, 2.0]);
    assert!(figures(row("path-table"))[0] > 0.5, "{}", row("path-table"));
    assert_eq!(row("oracle")["layers"].as_array().unwrap().len(), 1, "the first layer has no prediction");
    let (_, text) = hobbit_sim(&["recall", &file]).unwrap();
    let line =
        |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"));
    assert_eq!(
        line("stacked-gate").split_whitespace().collect::<Vec<_>>(),
        ["stacked-gate", "1", "2.00", "50.0", "50.0", "-", "50.0"]
    );
    assert!(!text.contains("path-table"), "without a calibration there is no table: {text}");
}

#[test]
fn failures_name_the_file() {
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
    assert!(failure(&["replay", &file, "--t1", "0.9", "--t2", "0.5"]).contains("T1 = 0.9 is above"));
    for words in [
        &["replay"][..],
        &["fly"],
        &["replay", &file, "--policy", "magic"],
        &["replay", &file, "--budget", "lots"],
        &["replay", &file, "--layer-ms", "1"],
        &["calibrate"],
    ] {
        assert_eq!(hobbit_sim(words).unwrap().0, 2, "{words:?}");
    }
    assert_eq!(hobbit_sim(&["--help"]).unwrap().0, 0);
}

#[test]
fn a_truncated_trace_is_used_as_far_as_it_goes() {
    let directory = tempfile::tempdir().unwrap();
    let file = path(&directory, "a.trace");
    trace(Path::new(&file), 10);
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 3]).unwrap();
    assert_eq!(json(&["replay", &file, "--policy", "lru"])[0]["tokens"], 9);
}

#[test]
fn results_are_not_written_over_traces_or_other_files() {
    let directory = tempfile::tempdir().unwrap();
    let (file, notes) = (path(&directory, "a.trace"), path(&directory, "notes"));
    trace(Path::new(&file), 4);
    std::fs::write(&notes, "precious").unwrap();
    let before = std::fs::read(&file).unwrap();
    for (output, part) in [(&file, "the file of a trace"), (&notes, "exists and is no")] {
        let error = hobbit_sim(&["import", &file, "-o", output]).unwrap_err();
        assert!(error.is::<hobbit_core::files::OutputError>(), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(std::fs::read(&file).unwrap() == before && std::fs::read(&notes).unwrap() == b"precious");
}
