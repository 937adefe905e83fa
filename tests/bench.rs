//! `hobbit-bench` on the demo model.

use std::fs;
use std::path::Path;

use hobbit_synth::Spec;
use serde_json::Value;

use crate::fixture::cli::{BENCH, Ran, check_refusals, program, ran};
use crate::fixture::{self, bundled, not_run};

fn text() -> String {
    bundled("demo-heldout-prose.txt").display().to_string()
}

fn bench(args: &[&str]) -> Ran {
    ran(program(BENCH).args(args).output().unwrap())
}

/// The output of `-o jsonl`.
fn records_of(ran: &Ran) -> Vec<Value> {
    ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Flags of a small run on one thread, since tests run side by side.
const SMALL: [&str; 6] = ["-t", "1", "-r", "2", "-o", "jsonl"];

#[test]
fn both_engines_have_the_same_logits() {
    let (text, args) = (text(), ["-p", "16", "-n", "8", "-d", "4", "--expert-cache", "25%,100%", "--baseline"]);
    let records = records_of(&bench(&[&SMALL[..], &args, &["--prompt-file", &text]].concat()).expect(0));
    assert_eq!(records.len(), 8, "two cache sizes, two tests, two engines");
    for record in &records {
        assert_eq!(record["hobbit_outcome"], "ok");
        let compared = record["hobbit_logits_compared"].as_u64().unwrap();
        // Two runs of two repetitions each.
        assert_eq!(compared, if record["n_prompt"] == 16 { 4 } else { 32 });
        assert_eq!(record["hobbit_logits_equal"], compared);
        assert_eq!(record["samples_ns"].as_array().unwrap().len(), 4);
        assert!(record["avg_ts"].as_f64().unwrap() > 0.0 && record["hobbit_peak_rss"].as_u64().unwrap() > 1 << 20);
    }
    let engines: Vec<&str> = records.iter().map(|record| record["hobbit_engine"].as_str().unwrap()).collect();
    assert_eq!(engines[..2], ["hobbit", "llama.cpp"]);
    let single = &records[2];
    assert_eq!((single["n_gen"].as_u64(), single["n_depth"].as_u64()), (Some(8), Some(4)));
    assert_eq!(single["hobbit_steps_ns"].as_array().unwrap().len(), 32);
    assert!(single["hobbit_misses"].as_u64().unwrap() > 0 && single["hobbit_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn drafts_are_counted_where_the_model_goes_on_by_itself() {
    let text = text();
    let args = ["--prompt-file", &text, "-p", "0", "-n", "0", "-pg", "200,24", "--spec-type", "none,ngram-cache"];
    let args = [&args[..], &["--draft-fixed", "--draft-max", "4"]].concat();
    let records = records_of(&bench(&[&SMALL[..], &args].concat()).expect(0));
    let counts: Vec<[Option<u64>; 2]> =
        records.iter().map(|one| ["hobbit_drafted", "hobbit_accepted"].map(|name| one[name].as_u64())).collect();
    assert_eq!((counts.len(), counts[0]), (2, [None, None]));
    assert!(counts[1][0] > Some(0) && counts[1][1] <= counts[1][0], "{counts:?}");
    for record in &records {
        assert_eq!(record["hobbit_steps_ns"].as_array().unwrap().len(), 48, "two repetitions");
        assert!(record["hobbit_decode_ts"].as_f64().unwrap() > 0.0);
    }
    let ran = bench(&[&args[..], &["-t", "1", "-r", "1"]].concat()).expect(0);
    assert!(ran.stdout.contains(" drafts |") && ran.stdout.lines().nth(3).unwrap().contains('/'), "{}", ran.stdout);
    let wrong = bench(&["--spec-type", "ngram-cache", "--prompt-file", &text, "--baseline"]).expect(2).stderr;
    assert!(wrong.contains("leave out --baseline"), "{wrong}");
    let wrong = bench(&["--spec-type", "ngram-cache"]).expect(2).stderr;
    assert!(wrong.contains("give --prompt-file"), "{wrong}");
}

#[test]
fn the_first_token_is_timed_without_a_warm_up() {
    let args = ["-p", "0", "-n", "0", "-pg", "8,2", "--no-warmup", "--no-roofline"];
    let record = &records_of(&bench(&[&SMALL[..], &args].concat()).expect(0))[0];
    let (load, first) = (record["hobbit_load_ns"].as_u64().unwrap(), record["hobbit_first_token_ns"].as_u64().unwrap());
    assert!(load > 0 && first > load);
    let series = record["hobbit_series"].as_array().unwrap();
    assert_eq!(series.last().unwrap()["tokens"], 20, "two repetitions of ten");
}

#[test]
fn mistakes_come_first_and_failures_are_records() {
    let (demo, text) = (bundled("demo.gguf").display().to_string(), text());
    let both = format!("{demo},none.gguf");
    let empty = if cfg!(windows) { "NUL" } else { "/dev/null" };
    let rows: &[(&[&str], i32, &str)] = &[
        (&["--policy", "best"], 2, "best"),
        (&["--mmproj-url", "x"], 2, "'--mmproj-url' is a flag of llama.cpp"),
        (&["-m", &both, "-o", "json"], 1, "none.gguf: cannot open this model"),
        (&["-m", &text], 1, "demo-heldout-prose.txt: not a GGUF file"),
        (&["-m", &demo, "--prompt-file", "none.txt"], 1, "--prompt-file: none.txt: cannot read this file"),
        (&["-m", &demo, "--prompt-file", empty], 1, empty),
        (&["-m", &demo, "--low", "none.gguf"], 1, "none.gguf"),
    ];
    check_refusals(bench, rows);
    let args = ["-p", "4", "-n", "0", "--no-roofline", "--mem-budget", "1MiB,1GiB"];
    let records = records_of(&bench(&[&SMALL[..], &args].concat()).expect(1));
    let outcome = records[0]["hobbit_outcome"].as_str().unwrap();
    assert!(outcome.starts_with("failed: ") && outcome.contains("is too small"), "{outcome}");
    assert_eq!(records[1]["hobbit_outcome"], "ok", "the others run");
}

/// Control groups of a process, where memory has them.
#[cfg(unix)]
fn groups(process: u32) -> Vec<std::path::PathBuf> {
    let mounts = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];
    let dirs = mounts.iter().filter_map(|mount| fs::read_dir(mount).ok()).flatten().flatten().map(|dir| dir.path());
    let own = format!("hobbit-bench-{process}-");
    dirs.filter(|dir| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&own))).collect()
}

/// SIGTERM: what runs is ended, and its control group goes with it, as after a Ctrl-C.
#[cfg(unix)]
#[test]
fn a_termination_leaves_no_control_group() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    use crate::fixture::cli::send;

    let mut command = program(BENCH);
    command.args(["-v", "-p", "0", "-n", "64", "-r", "100000", "-t", "1", "--limit", "160MiB", "--no-roofline"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    // A line of the log: the engine runs in its group.
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    if first.contains("--limit") {
        child.wait().unwrap();
        return not_run::not_run("bench: control groups", first);
    }
    assert_eq!(groups(child.id()).len(), 1, "{first}");
    send(&child, "TERM");
    let status = child.wait().unwrap();
    assert!(!status.success() && status.code().is_some(), "it ended by itself: {status}");
    assert_eq!(groups(child.id()), [] as [std::path::PathBuf; 0]);
}

/// Under a limit, where the machine lets this process make control groups: as root.
#[test]
fn a_limit_is_kept() {
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

/// Costs decide how wide a prompt's batches are; tokens follow it as they do another.
#[test]
fn prompts_are_as_wide_as_costs_decide() {
    let args = ["-p", "0", "-n", "0", "-pg", "600,2", "-ub", "64,auto", "--expert-cache", "25%", "--no-roofline"];
    let records = records_of(&bench(&[&SMALL[..], &args].concat()).expect(0));
    let widths = |record: &Value| (record["n_ubatch"].as_u64(), record["hobbit_ubatch_max"].as_u64());
    assert_eq!(records.iter().map(widths).collect::<Vec<_>>(), [(Some(64), Some(0)), (Some(512), Some(16_384))]);
    assert!(records.iter().all(|record| record["hobbit_outcome"] == "ok"));
}

/// A model that fits while tokens decode, and with a whole ubatch's activations does not, is left to llama.cpp.
#[test]
fn prompts_give_their_memory_back_under_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    // 52 MiB of experts, and 100 MiB of activations of 512 tokens.
    let spec = Spec { layers: 2, experts: 8, topk: 2, embd: 128, ff: 8192, ..Spec::tiny("qwen3moe") };
    let model = fixture::write(dir.path(), &spec).display().to_string();
    let args =
        ["-m", &model, "-t", "2", "-p", "0", "-n", "0", "-pg", "300,20", "-r", "2", "--baseline", "--order", "AB"];
    let limit = ["--limit", "160MiB", "--no-roofline", "-o", "jsonl"];
    let ran = bench(&[&args[..], &limit].concat());
    if ran.status != Some(0) {
        assert!(ran.stderr.contains("--limit"), "{}", ran.stderr);
        return not_run::not_run("bench: --limit", "this process may not make control groups (root may)");
    }
    let records = records_of(&ran);
    let number = |key: &str| records[0][key].as_u64().unwrap();
    assert_eq!((&records[0]["hobbit_outcome"], number("hobbit_expert_cache")), (&"ok".into(), 0), "{}", records[0]);
    assert_eq!((number("hobbit_logits_compared"), number("hobbit_logits_equal")), (42, 42));
    assert!(number("hobbit_cgroup_peak") <= 160 << 20);
    let at_the_end =
        |record: &Value| record["hobbit_series"].as_array().unwrap().last().unwrap()["anon"].as_u64().unwrap();
    let [ours, llama_cpps] = [0, 1].map(|engine| at_the_end(&records[engine]));
    // 60 MiB of activations were touched.
    assert!(ours + (30 << 20) < llama_cpps, "{ours} and {llama_cpps} bytes");
}
