//! `hobbit-cli` as its users meet it: the real binary, in a fresh directory, with a clean environment.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

struct Cli {
    dir: tempfile::TempDir,
    command: Command,
}

/// The binary with these arguments. Nothing of the caller's environment can change what it does.
fn cli(args: &[&str]) -> Cli {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hobbit-cli"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("LLAMA_ARG_") || text.starts_with("HOBBIT_") {
            command.env_remove(&name);
        }
    }
    command.current_dir(dir.path()).args(args).stdin(Stdio::null());
    Cli { dir, command }
}

/// The same on the demo model: greedy, and on one thread, since tests run side by side.
fn demo(args: &[&str]) -> Cli {
    let mut cli = cli(&["--temp", "0", "-t", "1", "-c", "256"]);
    cli.command.arg("-m").arg(demo_model()).args(args);
    cli
}

fn demo_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo.gguf")
}

struct Ran {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Cli {
    fn run(mut self) -> Ran {
        let output = self.command.output().unwrap();
        ran(output)
    }

    fn spawn(mut self) -> (Child, tempfile::TempDir) {
        let child = self.command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        (child, self.dir)
    }

    fn type_in(mut self, text: &str) -> Ran {
        self.command.stdin(Stdio::piped());
        let (mut child, _dir) = self.spawn();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        ran(child.wait_with_output().unwrap())
    }
}

fn ran(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).expect("everything printed is UTF-8");
    Ran { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

impl Ran {
    fn expect(self, status: i32) -> Self {
        assert_eq!(self.status, Some(status), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }
}

#[test]
fn help_names_every_spelling_and_shows_examples() {
    let help = cli(&["--help"]).run().expect(0).stdout;
    for part in ["-m, --model", "-ngl", "-no-cnv", "--mem-budget", "--expert-cache", "LLAMA_ARG_MODEL", "Examples:"] {
        assert!(help.contains(part), "{part} is missing in:\n{help}");
    }
    for headline in ["Model:", "Sampling:", "Conversation:", "Memory and I/O", "Devices:"] {
        assert!(help.contains(headline), "{headline}");
    }
    assert_eq!(cli(&["-h"]).run().expect(0).stdout, help);
}

#[test]
fn version() {
    let printed = cli(&["--version"]).run().expect(0).stdout;
    assert!(printed.starts_with(concat!("hobbit-cli ", env!("CARGO_PKG_VERSION"))), "{printed}");
    assert_eq!(printed, concat!("hobbit-cli ", env!("HOBBIT_VERSION"), "\n"));
}

#[test]
fn wrong_usage_exits_with_2_and_says_what_is_wrong() {
    for (args, part) in [
        (&["--frobnicate"][..], "'--frobnicate'"),
        (&["-frob"], "unknown flag '-frob'"),
        (&["-ngl=99"], "write '-ngl 99'"),
        (&["--lora", "x"], "'--lora' is a llama.cpp flag"),
        (&["--prompt-cache", "x"], "'--prompt-cache' is a llama.cpp flag"),
        (&["-sm", "row"], "its slots hold whole matrices"),
        (&["-otd", "exps=CPU"], "'-otd' is a llama.cpp flag"),
        (&["-n"], "a value is required after '-n'"),
        (&["-n", "many"], "invalid value 'many'"),
        (&["--mem-budget", "lots"], "'lots'"),
        (&["stray"], "'stray'"),
        (&["-t", "513"], "expected a number up to 512"),
        (&["--slots", "odd"], "even, shallow-first, shallow-first:LAYERS, by-penalty"),
    ] {
        let ran = cli(args).run().expect(2);
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(part), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn by_penalty_without_a_profile_is_wrong_usage_and_told_what_to_do() {
    let ran = demo(&["-p", "x", "-n", "1", "--slots", "by-penalty"]).run().expect(2);
    for part in
        ["--slots by-penalty", "there is no profile", "--trace", "hobbit-sim calibrate", "--profile", "--slots even"]
    {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert_eq!(ran.stdout, "");
}

/// Record, calibrate, and run with what was fitted; then a profile that does not belong here.
#[test]
fn a_profile_is_made_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).into_os_string().into_string().unwrap();
    let (trace, profile, stats) = (path("a.trace"), path("a.json"), path("stats.json"));
    let usual = ["-p", "In the beginning", "-n", "24", "--expert-cache", "50%"];
    let recorded = demo(&[&usual[..], &["--trace", &trace]].concat()).run().expect(0);
    assert!(!recorded.stderr.contains("slots of a layer"), "even is not worth a line: {}", recorded.stderr);
    let sim =
        Command::new(env!("CARGO_BIN_EXE_hobbit-sim")).args(["calibrate", &trace, "-o", &profile]).output().unwrap();
    ran(sim).expect(0);
    let flags = ["--profile", &profile, "--policy", "hobbit", "--slots", "by-penalty", "--stats-json", &stats];
    let fitted = demo(&[&usual[..], &flags].concat()).run().expect(0);
    assert_eq!(fitted.stdout, recorded.stdout);
    let told = format!("hobbit: profile {profile}: weights of hobbit, what each layer's misses cost\n");
    assert!(fitted.stderr.contains(&told), "{}", fitted.stderr);
    assert!(fitted.stderr.contains("hobbit: slots of a layer: by-penalty: "), "{}", fitted.stderr);
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&stats).unwrap()).unwrap();
    let caching = &json["caching"];
    assert_eq!((&caching["slots"], &caching["policy"]), (&"by-penalty".into(), &"hobbit".into()));
    assert_eq!(
        (&caching["profile"]["file"], &caching["profile"]["penalties"]),
        (&profile.as_str().into(), &true.into())
    );
    assert_eq!(caching["slots_by_layer"][0]["cache"], "the host");
    let slots = json["layers"].as_array().unwrap().iter().map(|layer| layer["slots"].as_u64().unwrap());
    assert_eq!(slots.clone().sum::<u64>(), 24);
    assert_eq!(caching["slots_by_layer"][0]["most"].as_u64(), slots.max());

    let text = std::fs::read_to_string(&profile).unwrap();
    let refused = |text: &str, parts: &[&str]| {
        std::fs::write(&profile, text).unwrap();
        let ran = demo(&["-p", "x", "-n", "1", "--profile", &profile]).run().expect(1);
        for part in [&[profile.as_str(), "hobbit-sim calibrate"], parts].concat() {
            assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
        }
    };
    refused(&text[..text.len() / 2], &["EOF while parsing"]);
    refused(&text.replace("\"n_expert\": 8", "\"n_expert\": 9"), &["slots are not ascending from 0 to 9"]);
    refused(&text.replace("\"architecture\": \"", "\"architecture\": \"not-"), &["general.architecture is not-"]);
    let shifted = text.replace("\"layer\": 5", "\"layer\": 6");
    refused(&shifted, &["demo.gguf", "layer 6 of 8 experts, expected layer 5 of 8 experts"]);
    let ran = demo(&["-p", "x", "-n", "1", "--profile", &path("nowhere.json")]).run().expect(1);
    assert!(ran.stderr.contains("nowhere.json: cannot read this profile"), "{}", ran.stderr);
}

#[test]
fn devices_are_listed_without_a_model() {
    let text = cli(&["-m", "nowhere.gguf", "--list-devices"]).run().expect(0);
    let (headline, devices) = text.stdout.split_once('\n').unwrap();
    assert_eq!((headline, text.stderr.as_str()), ("Available devices:", ""));
    let json = cli(&["--list-devices", "--stats-json", "-"]).run().expect(0).stdout;
    let json: Value = serde_json::from_str(&json).unwrap();
    let found = json["devices"].as_array().unwrap();
    if found.is_empty() {
        assert_eq!(devices, "  (none)\n");
    }
    for device in found {
        let (name, description) = (device["name"].as_str().unwrap(), device["description"].as_str().unwrap());
        assert!(devices.contains(&format!("  {name}: {description} (")), "{devices}");
        assert!(name != "CPU" && name != "HOBBIT", "{json}");
    }
    let verbose = cli(&["--list-devices", "-v"]).run().expect(0).stdout;
    assert_eq!(verbose.matches("pinned host memory: ").count(), found.len(), "{verbose}");
}

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let ran = demo(&["-p", "x", "-n", "1", "-dev", "Warp9"]).run().expect(1);
    assert!(ran.stderr.contains("error: --device: there is no device named 'Warp9' (there "), "{}", ran.stderr);
    let ran = demo(&["-p", "x", "-n", "1", "-dev", "CPU"]).run().expect(1);
    assert!(ran.stderr.contains("error: --device: 'CPU' is the CPU, "), "{}", ran.stderr);
    demo(&["-p", "x", "-n", "1", "-dev", "none"]).run().expect(0);
}

#[test]
fn an_rpc_server_that_is_not_there_is_an_error_not_an_abort() {
    // Bound and closed: nobody else is given this port meanwhile.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("127.0.0.1:{port}");
    for args in [&["--rpc", &endpoint, "--list-devices"][..], &["--rpc", &endpoint, "-p", "x", "-n", "1"]] {
        let ran = demo(args).run().expect(1);
        let unreachable = format!("error: --rpc: cannot connect to {endpoint}: ");
        let told = ran.stderr.contains(&unreachable) || ran.stderr.contains("rebuild with --features rpc");
        assert!(told, "{}", ran.stderr);
    }
    let ran = cli(&["--rpc", "nowhere", "--list-devices"]).run().expect(1);
    assert!(ran.stderr.contains("'nowhere' is no endpoint: it has no port; give HOST:PORT"), "{}", ran.stderr);
}

#[test]
fn layers_without_a_device_are_noted() {
    let ran = demo(&["-p", "x", "-n", "1", "-dev", "none", "-ngl", "99"]).run().expect(0);
    assert!(ran.stderr.contains("note: -ngl has no effect: "), "{}", ran.stderr);
}

#[test]
fn a_missing_model_is_named() {
    let ran = cli(&["-m", "nowhere.gguf", "-p", "x"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: nowhere.gguf: "), "{}", ran.stderr);
    let mut absent = cli(&[]);
    absent.command.env("HOBBIT_DEMO_MODEL", "absent.gguf");
    assert!(absent.run().expect(1).stderr.starts_with("error: absent.gguf: "));
}

#[test]
fn a_file_that_is_no_model_is_named() {
    let other = cli(&["-m", "text.gguf", "-p", "x"]);
    std::fs::write(other.dir.path().join("text.gguf"), "this is not a model").unwrap();
    let ran = other.run().expect(1);
    assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains("text.gguf"), "{}", ran.stderr);
}

#[test]
fn missing_prompt_files_and_bad_settings_fail_before_the_model_loads() {
    let ran = demo(&["-f", "none.txt"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: none.txt: cannot read this file"), "{}", ran.stderr);
    let ran = demo(&["-p", "x", "--samplers", "bogus"]).run().expect(1);
    assert!(ran.stderr.contains("unknown sampler 'bogus'"), "{}", ran.stderr);
    let ran = demo(&["-p", "x", "-j", "{not json"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: --json-schema: "), "{}", ran.stderr);
}

#[test]
fn without_a_model_the_demo_speaks() {
    let ran = cli(&["--temp", "0", "-t", "1", "-n", "8"]).run().expect(0);
    assert!(ran.stderr.contains("running the demo model"), "{}", ran.stderr);
    assert!(ran.stdout.trim_start().starts_with("In the beginning God created the"), "{}", ran.stdout);
}

#[test]
fn greedy_completion_is_deterministic() {
    let run = |extra: &[&str]| demo(&[&["-p", "In the beginning", "-n", "16"], extra].concat()).run().expect(0);
    let first = run(&[]);
    assert!(first.stdout.trim_start().starts_with("In the beginning"), "{}", first.stdout);
    assert_eq!(run(&["-s", "5"]).stdout, first.stdout);
    assert!(first.stderr.contains("llama_perf_context_print:        eval time = "), "{}", first.stderr);
    assert!(first.stderr.contains("hobbit: "));
    // Only the continuation.
    let alone = run(&["--no-display-prompt"]).stdout;
    assert!(first.stdout.ends_with(&alone) && alone.len() < first.stdout.len(), "{alone:?}");
}

#[test]
fn quiet_runs_print_nothing_but_the_text() {
    let ran = demo(&["-p", "In the beginning", "-n", "4", "--quiet"]).run().expect(0);
    assert_eq!(ran.stderr, "");
    let ran = demo(&["-p", "In the beginning", "-n", "4", "--no-perf"]).run().expect(0);
    assert!(!ran.stderr.contains("llama_perf"), "{}", ran.stderr);
}

#[test]
fn prompts_from_files_and_environment_are_the_same_prompt() {
    let typed = demo(&["-p", "a\\tb", "-n", "4"]).run().expect(0).stdout;
    let from_file = demo(&["-f", "prompt.txt", "-n", "4"]);
    std::fs::write(from_file.dir.path().join("prompt.txt"), "a\tb\n").unwrap();
    assert_eq!(from_file.run().expect(0).stdout, typed);
    let mut by_environment = cli(&["--temp", "0", "-c", "256", "-p", "a\tb"]);
    by_environment.command.env("LLAMA_ARG_MODEL", demo_model());
    by_environment.command.env("LLAMA_ARG_N_PREDICT", "4").env("LLAMA_ARG_THREADS", "1");
    assert_eq!(by_environment.run().expect(0).stdout, typed);
}

#[test]
fn text_that_looks_like_flags_is_a_prompt() {
    let ran = demo(&["-p", "-ngl --help", "-n", "1"]).run().expect(0);
    assert!(ran.stdout.trim_start().starts_with("-ngl --help"), "{}", ran.stdout);
}

#[test]
fn utf_8_goes_through_whole() {
    let ran = demo(&["-p", "Grüße, 世界 😀", "-n", "24", "--temp", "2", "-s", "1"]).run().expect(0);
    assert!(ran.stdout.trim_start().starts_with("Grüße, 世界 😀"), "{}", ran.stdout);
}

#[test]
fn stats_json_has_counts_and_rates() {
    let cli = demo(&["-p", "In the beginning", "-n", "8", "--ignore-eos", "--stats-json", "stats.json"]);
    let path = cli.dir.path().join("stats.json");
    let Cli { dir, mut command } = cli;
    ran(command.output().unwrap()).expect(0);
    let stats: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    drop(dir);
    assert_eq!(stats["stop"], "length");
    assert_eq!(stats["timings"]["sample_count"], 8);
    assert!(stats["model"]["n_expert"].as_u64().unwrap() > 0);
    for phase in ["prompt", "decode", "total"] {
        let phase = &stats[phase];
        let needed = phase["hits"].as_u64().unwrap() + phase["misses"].as_u64().unwrap();
        assert!(phase["tokens"].as_u64().unwrap() > 0 && needed > 0, "{stats:#}");
        assert!((0.0..=1.0).contains(&phase["hit_rate"].as_f64().unwrap()));
    }
    assert!(stats["peak_rss_bytes"].as_u64().unwrap() > 0);
    assert!(stats["plan"]["budget"].as_u64().unwrap() > 0);
    // On the standard output nothing else follows the text.
    let printed = demo(&["-p", "a", "-n", "1", "--no-display-prompt", "--stats-json", "-"]).run().expect(0).stdout;
    let json = &printed[printed.find('{').unwrap()..];
    assert!(serde_json::from_str::<Value>(json).is_ok(), "{printed}");
}

#[test]
fn reverse_prompts_stop_and_are_shown() {
    let whole = demo(&["-p", "In the beginning", "-n", "24", "--no-display-prompt"]).run().expect(0).stdout;
    // The last two words cut across tokens, wherever those end.
    let words: Vec<&str> = whole.split_whitespace().collect();
    let stop = words.windows(2).map(|pair| pair.join(" ")).find(|stop| whole.contains(stop)).unwrap();
    let args = ["-p", "In the beginning", "-n", "24", "--no-display-prompt", "-r", &stop];
    let stopped = demo(&args).run().expect(0).stdout;
    let end = whole.find(&stop).unwrap() + stop.len();
    assert_eq!(stopped.trim_end_matches('\n'), &whole[..end]);
}

#[test]
fn conversations_read_turns_from_a_pipe() {
    let talk = demo(&["-cnv", "--chat-template", "chatml", "-n", "4", "-sys", "Be brief."]);
    let ran = talk.type_in("hello\n/regen\nsecond \\\nline\n/clear\n/regen\n/exit\nnever read\n").expect(0);
    assert!(ran.stderr.contains("there is no answer to replace"), "{}", ran.stderr);
    assert!(ran.stderr.contains("the conversation is forgotten"), "{}", ran.stderr);
    let once = demo(&["-cnv", "--chat-template", "chatml", "-n", "4", "-st", "-p", "hello"]).run().expect(0);
    assert!(once.stdout.starts_with("> hello\n"), "{}", once.stdout);
}

#[test]
fn a_conversation_beyond_the_context_forgets_its_oldest_turns() {
    let args = ["-cnv", "--chat-template", "chatml", "-n", "400", "--ignore-eos", "-sys", "Be brief."];
    let shifting = demo(&[&args[..], &["--context-shift"]].concat()).type_in("hello\nsecond\nthird\n").expect(0);
    assert!(shifting.stderr.contains("oldest messages are forgotten"), "{}", shifting.stderr);
    assert!(!shifting.stderr.contains("error"), "{}", shifting.stderr);
    let full = demo(&args).type_in("hello\nsecond\n").expect(1);
    assert!(full.stderr.contains("error: the conversation has "), "{}", full.stderr);
}

#[test]
fn what_the_context_cannot_hold_is_refused_before_it_is_shown() {
    let long = "In the beginning God created the heaven. ".repeat(100);
    for extra in [&[][..], &["--context-shift"]] {
        let ran = demo(&[&["-p", &long], extra].concat()).run().expect(1);
        assert_eq!(ran.stdout, "");
        assert!(ran.stderr.contains("error: the prompt has ") && ran.stderr.contains("holds 256; give -c "));
        let talk = [&["-cnv", "--chat-template", "chatml", "-n", "4", "--quiet"], extra].concat();
        let ran = demo(&talk).type_in(&format!("{long}\nshort\n")).expect(1);
        assert!(ran.stderr.starts_with("error: the message has ") && ran.stderr.lines().count() == 1, "{}", ran.stderr);
        assert!(!ran.stdout.is_empty(), "the short message is answered");
        let ran = demo(&[&talk[..], &["-st", "-p", &long]].concat()).run().expect(1);
        assert_eq!(ran.stdout, "");
    }
    // The advice helps.
    let refused = demo(&["-p", &long]).run().expect(1).stderr;
    let advice = refused.split("give -c ").nth(1).unwrap().split(' ').next().unwrap();
    demo(&["-p", &long, "-n", "1", "-c", advice]).run().expect(0);
}

#[test]
fn stats_json_that_cannot_be_written_fails_at_the_start() {
    let ran = demo(&["-p", "a", "--stats-json", "absent/stats.json"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: absent/stats.json: cannot write the statistics"), "{}", ran.stderr);
    assert_eq!(ran.stdout, "");
}

#[test]
fn interactive_completion_takes_turns() {
    let ran = demo(&["-i", "-p", "In the", "-n", "2", "--in-prefix", " "]).type_in("beginning\n").expect(0);
    assert!(ran.stdout.trim_start().starts_with("In the"), "{}", ran.stdout);
    let ran = demo(&["-if", "-n", "2"]).type_in("").expect(0);
    assert_eq!(ran.stdout, "");
}

#[test]
fn the_log_file_holds_what_stderr_shows() {
    let cli = demo(&["-p", "a", "-n", "1", "--log-file", "log.txt"]);
    let path = cli.dir.path().join("log.txt");
    let Cli { dir, mut command } = cli;
    let ran = ran(command.output().unwrap()).expect(0);
    assert_eq!(std::fs::read_to_string(path).unwrap(), ran.stderr);
    drop(dir);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_completion_with_130_and_its_timings() {
    // Without end: context shift, no EOS.
    let (mut child, _dir) = demo(&["-p", "In the beginning", "-n", "-1", "--ignore-eos", "--context-shift"]).spawn();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0u8; 32];
    stdout.read_exact(&mut first).unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "INT", &id]).status().unwrap().success());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{stderr}");
    reader.join().unwrap().unwrap();
    assert!(stderr.contains("llama_perf_context_print"), "{stderr}");
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let args = ["-p", "In the beginning", "-n", "-1", "--ignore-eos", "--context-shift", "--stats-json", "stats.json"];
    let (mut child, dir) = demo(&args).spawn();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut byte = [0u8; 1];
    stdout.read_exact(&mut byte).unwrap();
    drop(stdout);
    let mut stderr = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        stderr.push_str(&line.unwrap());
        stderr.push('\n');
    }
    assert_eq!(child.wait().unwrap().code(), Some(0), "{stderr}");
    assert!(!stderr.contains("error"), "{stderr}");
    let stats: Value = serde_json::from_slice(&std::fs::read(dir.path().join("stats.json")).unwrap()).unwrap();
    assert!(stats["prompt"]["tokens"].as_u64().unwrap() > 0, "{stats:#}");
}

#[test]
fn a_path_table_is_taken_from_a_file() {
    use hobbit::predict::{PathLimits, PathTableBuilder, PredictShape};
    let dir = tempfile::tempdir().unwrap();
    let [table, stats] = ["a.paths", "stats.json"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
    let mut builder =
        PathTableBuilder::new(PredictShape::new((0..6).map(|layer| (layer, 8)), 2), PathLimits::default());
    (0..6).for_each(|layer| builder.observe(layer, [1, 2]));
    hobbit::profile::write_path_table(table.as_ref(), &builder.build()).unwrap();
    let run = ["-no-cnv", "-p", "In the beginning", "-n", "8", "--expert-cache", "25%"];
    let plain = demo(&run).run().expect(0).stdout;
    let ahead = ["--predictor", "path-table", "--prefetch", "on", "--path-table", &table, "--stats-json", &stats];
    assert_eq!(demo(&[&run[..], &ahead].concat()).run().expect(0).stdout, plain);
    let stats: Value = serde_json::from_str(&std::fs::read_to_string(&stats).unwrap()).unwrap();
    let text = stats.to_string();
    assert!(text.contains("\"recall\":[{\"distance\":1"), "{text}");

    let refused = |args: &[&str], parts: &[&str]| {
        let told = demo(&[&run[..], args].concat()).run().expect(1).stderr;
        assert!(parts.iter().all(|part| told.contains(part)), "{parts:?} are not in: {told}");
    };
    refused(&ahead[..2], &["demo.gguf", "needs a table", "--path-table"]);
    refused(&["--path-table", &table], &["--predictor path-table, found --predictor none"]);
    std::fs::write(&table, "hbPT and more").unwrap();
    refused(&ahead, &["a.paths", "path table of version", "profile the model again"]);
}
