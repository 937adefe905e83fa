//! `hobbit-bench` on the demo model.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::cli::rig::{Ran, program, ran};
use crate::fixture::not_run;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text() -> String {
    root().join("models/demo-heldout-prose.txt").display().to_string()
}

fn demo() -> String {
    root().join("models/demo.gguf").display().to_string()
}

fn bench(args: &[&str]) -> Ran {
    ran(program(env!("CARGO_BIN_EXE_hobbit-bench")).args(args).output().unwrap())
}

/// The output of `-o jsonl`.
fn records_of(ran: &Ran) -> Vec<Value> {
    ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Flags of a small run on one thread, since tests run side by side.
const SMALL: [&str; 6] = ["-t", "1", "-r", "2", "-o", "jsonl"];

#[test]
fn both_engines_have_the_same_logits_on_a_text_at_any_cache_size() {
    let (text, args) = (text(), ["-p", "16", "-n", "8", "-d", "4", "--expert-cache", "25%,100%", "--baseline"]);
    let ran =
        bench(&[&SMALL[..], &args, &["--prompt-file", &text, "--label", "l", "--variant", "v"]].concat()).expect(0);
    let records = records_of(&ran);
    assert_eq!(records.len(), 8, "two cache sizes, two tests, two engines");
    for record in &records {
        assert_eq!(record["hobbit_outcome"], "ok");
        assert_eq!((&record["hobbit_label"], &record["hobbit_variant"]), (&"l".into(), &"v".into()));
        let compared = record["hobbit_logits_compared"].as_u64().unwrap();
        // Two runs of two repetitions each.
        assert_eq!(compared, if record["n_prompt"] == 16 { 4 } else { 32 });
        assert_eq!(record["hobbit_logits_equal"], compared);
        assert_eq!(record["samples_ns"].as_array().unwrap().len(), 4);
        assert!(record["avg_ts"].as_f64().unwrap() > 0.0);
        assert!(record["hobbit_peak_rss"].as_u64().unwrap() > 1 << 20);
        assert_eq!(record["model_n_params"], records[0]["model_n_params"]);
        assert_eq!(record["hobbit_text"], "demo-heldout-prose.txt");
    }
    let engines: Vec<&str> = records.iter().map(|record| record["hobbit_engine"].as_str().unwrap()).collect();
    assert_eq!(engines[..2], ["hobbit", "llama.cpp"]);
    let single = &records[2];
    assert_eq!((single["n_gen"].as_u64(), single["n_depth"].as_u64()), (Some(8), Some(4)));
    assert_eq!(single["hobbit_steps_ns"].as_array().unwrap().len(), 32);
    assert!(single["hobbit_misses"].as_u64().unwrap() > 0 && single["hobbit_bytes"].as_u64().unwrap() > 0);
    assert_eq!((&single["hobbit_policy"], &single["hobbit_precision"]), (&"learned".into(), &"exact".into()));
}

#[test]
fn the_first_token_is_timed_without_a_warm_up() {
    let ran =
        bench(&[&SMALL[..], &["-p", "0", "-n", "0", "-pg", "8,2", "--no-warmup", "--no-roofline"]].concat()).expect(0);
    let record = &records_of(&ran)[0];
    let (load, first) = (record["hobbit_load_ns"].as_u64().unwrap(), record["hobbit_first_token_ns"].as_u64().unwrap());
    assert!(load > 0 && first > load);
    assert!(record["hobbit_prompt_ts"].as_f64().unwrap() > 0.0 && record["hobbit_decode_ts"].as_f64().unwrap() > 0.0);
    assert_eq!(record["hobbit_text"], "random");
    let series = record["hobbit_series"].as_array().unwrap();
    assert_eq!(series.last().unwrap()["tokens"], 20, "two repetitions of ten");
    assert!(series.iter().all(|moment| moment["rss"].as_u64().unwrap() > 0));
}

#[test]
fn every_format() {
    let run =
        |format| bench(&["-t", "1", "-r", "1", "-p", "4", "-n", "0", "--no-roofline", "-o", format]).expect(0).stdout;
    let json: Vec<Value> = serde_json::from_str(&run("json")).unwrap();
    assert_eq!(json[0]["n_prompt"], 4);
    assert_eq!(run("csv").lines().count(), 2);
    assert!(run("sql").contains("INSERT INTO llama_bench"));
    assert!(run("md").contains("pp4 |"));
    assert_eq!(run("none"), "");
    let both =
        bench(&["-t", "1", "-r", "1", "-p", "4", "-n", "0", "--no-roofline", "-o", "none", "-oe", "csv"]).expect(0);
    assert!(both.stdout.is_empty() && both.stderr.contains("build_commit,build_number"));
}

#[test]
fn mistakes_and_failed_cases_have_their_exit_status() {
    for (args, part) in [
        (&["--policy", "best"][..], "best"),
        (&["-p", "x"], "-p: 'x'"),
        (&["-p", "0", "-n", "0"], "nothing to test"),
        (&["--mmproj", "x"], "'--mmproj' is a llama.cpp flag"),
        (&["--precision", "exact", "--t1", "0.5"], "contradicts"),
    ] {
        let ran = bench(args).expect(2);
        assert!(ran.stderr.contains(part), "{args:?}: {}", ran.stderr);
    }
    // A case that fails is a record, and the others run.
    let small = ["-p", "4", "-n", "0", "--no-roofline", "--mem-budget", "1MiB,1GiB"];
    let records = records_of(&bench(&[&SMALL[..], &small].concat()).expect(1));
    let outcome = records[0]["hobbit_outcome"].as_str().unwrap();
    assert!(outcome.starts_with("failed: ") && outcome.contains("is too small"), "{outcome}");
    assert_eq!(records[1]["hobbit_outcome"], "ok");
}

#[test]
fn missing_files_are_named_before_anything_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.txt").display().to_string();
    fs::write(&empty, "").unwrap();
    let (demo, text) = (demo(), text());
    let both = format!("{demo},none.gguf");
    for (args, part) in [
        (&["-m", "none.gguf"][..], "none.gguf: cannot open this model"),
        (&["-m", &both, "-o", "json"], "none.gguf: cannot open this model"),
        (&["-m", &text], "demo-heldout-prose.txt: not a GGUF file"),
        (&["-m", &demo, "--prompt-file", "none.txt", "-o", "csv"], "--prompt-file: none.txt: cannot read this file"),
        (&["-m", &demo, "--prompt-file", &empty, "-o", "sql"], "empty.txt: this file is empty"),
        (&["-m", &demo, "--low", "none.gguf"], "none.gguf"),
    ] {
        let ran = bench(args).expect(1);
        assert!(ran.stderr.contains(part), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{args:?}");
    }
}

#[test]
fn llama_cpp_gets_the_threads_that_it_is_fastest_with() {
    let small = [&SMALL[..], &["-p", "4", "-n", "2", "--baseline-only"]].concat();
    let records = records_of(&bench(&[&small[..], &["--baseline-threads", "1,2"]].concat()).expect(0));
    for record in &records {
        let tried: Vec<(i64, f64)> = record["hobbit_threads_tried"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| (one["threads"].as_i64().unwrap(), one["tokens_per_second"].as_f64().unwrap()))
            .collect();
        assert_eq!((tried[0].0, tried[1].0), (1, 2));
        let best = if tried[1].1 > tried[0].1 { 2 } else { 1 };
        assert_eq!(record["n_threads"], best, "{tried:?}");
    }
}

/// Control groups of a process, where memory has them.
fn groups(process: u32) -> Vec<PathBuf> {
    let mounts = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];
    let dirs = mounts.iter().filter_map(|mount| fs::read_dir(mount).ok()).flatten().flatten().map(|dir| dir.path());
    let own = format!("hobbit-bench-{process}-");
    dirs.filter(|dir| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&own))).collect()
}

/// SIGTERM: what runs is ended, and its control group goes with it, as after a Ctrl-C.
#[test]
fn a_termination_leaves_no_control_group() {
    use std::io::{BufRead, BufReader};
    let mut command = Command::new(env!("CARGO_BIN_EXE_hobbit-bench"));
    command.args(["-v", "-p", "0", "-n", "64", "-r", "100000", "-t", "1", "--limit", "160MiB", "--no-roofline"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    // A line of the log: the engine runs in its group.
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    if first.contains("--limit") {
        child.wait().unwrap();
        eprintln!("NOT TESTED, control groups: {first}");
        return;
    }
    assert_eq!(groups(child.id()).len(), 1, "{first}");
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let status = child.wait().unwrap();
    assert!(!status.success() && status.code().is_some(), "it ended by itself: {status}");
    assert_eq!(groups(child.id()), [] as [PathBuf; 0]);
}

/// Under a limit, where the machine lets this process make control groups: as root.
#[test]
fn limits() {
    let text = text();
    let args = ["-p", "0", "-n", "4", "--limit", "160MiB", "--prompt-file", &text, "--no-roofline"];
    let ran = bench(&[&SMALL[..], &args].concat());
    // Where a group can be made by hand, it must be made.
    let by_hand = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(|mount| {
        let dir = Path::new(mount).join(format!("hobbit-test-{}", std::process::id()));
        let is_made = fs::create_dir(&dir).is_ok()
            && ["memory.limit_in_bytes", "memory.max"].iter().any(|file| dir.join(file).exists());
        let _ = fs::remove_dir(&dir);
        is_made
    });
    match ran.status {
        Some(0) => {
            let record = &records_of(&ran)[0];
            assert_eq!((&record["hobbit_limit"], &record["hobbit_outcome"]), (&(160u64 << 20).into(), &"ok".into()));
            let budget = record["hobbit_budget"].as_u64().unwrap();
            assert!(budget <= 160 << 20 && record["hobbit_peak_rss"].as_u64().unwrap() <= budget);
            assert!(record["hobbit_cgroup_peak"].as_u64().is_none_or(|peak| peak <= 160 << 20));
        }
        _ => {
            assert!(ran.stderr.contains("--limit"), "{}", ran.stderr);
            assert!(!by_hand.contains(&true), "{}", ran.stderr);
            not_run::not_run("bench: --limit", "this process may not make control groups (root may)");
        }
    }
}
