//! `hobbit-perplexity`, the binary in a fresh directory.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cli::rig::{Ran, program, ran};
use serde_json::Value;

/// Perplexities after each chunk: `[1]12.3456,[2]…`.
fn chunks(ran: &Ran) -> Vec<f64> {
    let line = ran.stdout.lines().find(|line| line.starts_with("[1]")).expect("a line of chunks");
    let number = |(i, entry): (usize, &str)| {
        let rest = entry.strip_prefix(&format!("[{}]", i + 1)).expect("chunks are numbered");
        assert_eq!(rest.split_once('.').expect("a decimal point").1.len(), 4, "{line}");
        rest.parse().expect("a number")
    };
    line.trim_end_matches(',').split(',').enumerate().map(number).collect()
}

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> &Self {
        std::fs::write(self.path(name), bytes).unwrap();
        self
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = program(env!("CARGO_BIN_EXE_hobbit-perplexity"));
        command.current_dir(self.dir.path()).args(args);
        command
    }

    /// The binary with these arguments alone.
    fn bare(&self, args: &[&str]) -> Ran {
        ran(self.command(args).output().unwrap())
    }

    /// The same on the demo model and on one thread, since tests run side by side.
    fn run(&self, args: &[&str]) -> Ran {
        let model = demo("demo.gguf");
        self.bare(&[&["-t", "1", "-m", model.to_str().unwrap()], args].concat())
    }

    /// The same on the bundled text, in chunks of 64 tokens.
    fn on_prose(&self, args: &[&str]) -> Ran {
        let text = demo("demo-heldout-prose.txt");
        self.run(&[&["-f", text.to_str().unwrap(), "-c", "64"], args].concat())
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }
}

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(name)
}

/// The text between two others.
fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let rest = text.split_once(before).unwrap_or_else(|| panic!("{before:?} in\n{text}")).1;
    rest.split_once(after).unwrap_or_else(|| panic!("{after:?} in\n{rest}")).0
}

#[test]
fn help_and_wrong_usage() {
    let help = Bench::new().bare(&["--help"]).expect(0).stdout;
    for part in ["--kl-divergence-base", "--save-all-logits", "--ppl-stride", "-ub", "[default: 512]", "Examples:"] {
        assert!(help.contains(part), "{part} is missing in:\n{help}");
    }
    for (args, part) in [
        (&["-c", "1"][..], "invalid value '1'"),
        (&["-f", "x", "--hellaswag"], "does not have: score tasks with lm-eval through hobbit-server"),
    ] {
        let ran = Bench::new().bare(args).expect(2);
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(part), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn errors_are_one_line() {
    let bench = Bench::new();
    bench.write("latin1.txt", b"caf\xe9").write("prose.txt", "one\ntwo\n");
    for (args, parts) in [
        (
            &["-p", "In the beginning", "-c", "64"][..],
            &["you need at least 128 tokens to evaluate perplexity with a context of 64", "tokenizes to only 4 tokens"]
                [..],
        ),
        (&["-f", "none.txt"], &["none.txt: cannot read this file"]),
        (&["-f", "latin1.txt"], &["latin1.txt: not UTF-8 text (at byte 3)"]),
        (&[], &["no text: give a file with -f"]),
        (&["--kl-divergence"], &["--kl-divergence-base FNAME"]),
        (&["--kl-divergence", "--kl-divergence-base", "none"], &["none: cannot read this base file"]),
        (
            &["--kl-divergence", "--kl-divergence-base", "prose.txt"],
            &["prose.txt: this does not look like a file containing log"],
        ),
        (&["-p", "x", "--json", "absent/x.json"], &["absent/x.json: cannot write"]),
    ] {
        let ran = bench.run(&[args, &["--quiet"]].concat()).expect(1);
        assert_eq!(ran.stdout, "", "{args:?}");
        let error = ran.stderr.lines().last().unwrap_or_default();
        assert!(error.starts_with("error: "), "{args:?}: {}", ran.stderr);
        assert!(parts.iter().all(|part| error.contains(part)), "{args:?}: {error}");
    }
}

#[test]
fn perplexity_prints_llama_perplexitys_lines() {
    let bench = Bench::new();
    let ran = bench.on_prose(&["--chunks", "5", "-b", "128", "--json", "result.json"]).expect(0);
    let lines = "perplexity: calculating perplexity over 5 chunks, n_ctx=64, batch_size=128, n_seq=2";
    assert!(ran.stderr.lines().any(|line| line == lines), "{}", ran.stderr);
    assert!(ran.stderr.contains(" seconds per pass - ETA ") && ran.stdout.contains(" minutes\n[1]"), "{}", ran.stdout);
    let after = chunks(&ran);
    assert_eq!(after.len(), 5);
    let ppl: f64 = between(&ran.stderr, "Final estimate: PPL = ", " +/- ").parse().unwrap();
    assert_eq!(Some(&ppl), after.last());
    let json = bench.json("result.json");
    assert!((json["result"]["ppl"].as_f64().unwrap() - ppl).abs() < 1e-4);
    // Of 64 tokens the 31 that follow the 33rd.
    assert_eq!(json["result"]["n_tokens_scored"], 5 * 31);
    assert_eq!((json["measure"].as_str(), json["stop"].as_str()), (Some("perplexity"), Some("end")));
    assert_eq!((&json["n_ctx"], &json["n_seq"]), (&Value::from(128), &Value::from(2)));
    assert!(json["total"]["hits"].as_u64().unwrap() > 0, "{json:#}");
    assert!(ran.stderr.contains("hobbit: experts: hit rate "), "{}", ran.stderr);
}

#[test]
fn a_bare_run_measures_the_demo_model_on_its_text() {
    let ran = Bench::new().bare(&["-t", "1", "--chunks", "1", "-b", "512"]).expect(0);
    assert!(ran.stderr.contains("running the demo model"), "{}", ran.stderr);
    let ppl = chunks(&ran)[0];
    assert!((1.0..100.0).contains(&ppl), "a trained model on English: {ppl}");
}

#[test]
fn lines_for_plots() {
    let ran = Bench::new().on_prose(&["--chunks", "2", "-b", "64", "--ppl-output-type", "1"]).expect(0);
    let rows: Vec<Vec<f64>> = ran
        .stdout
        .lines()
        .filter(|line| line.starts_with("  "))
        .map(|line| line.split_whitespace().map(|number| number.parse().unwrap()).collect())
        .collect();
    assert_eq!((rows.len(), rows[1][0]), (2, 64.0), "{}", ran.stdout);
    for row in &rows {
        assert!((row[1].ln() - row[2]).abs() < 1e-4 && row[3] > 0.0, "{row:?}");
    }
}

#[test]
fn the_size_of_batches_and_of_the_cache_changes_nothing_but_rounding() {
    let bench = Bench::new();
    let whole = chunks(&bench.on_prose(&["--chunks", "3"]).expect(0));
    for args in [&["-b", "64", "-ub", "7"][..], &["-b", "1", "-ub", "1"], &["-ub", "1", "--expert-cache", "25%"]] {
        let found = chunks(&bench.on_prose(&[&["--chunks", "3"], args].concat()).expect(0));
        assert_eq!(found.len(), 3);
        for (a, b) in found.iter().zip(&whole) {
            assert!((a / b - 1.0).abs() < 0.01, "{args:?}: {found:?} and {whole:?}");
        }
    }
}

#[test]
fn single_tokens_decode_through_the_cache() {
    let bench = Bench::new();
    let args = ["--chunks", "2", "-ub", "1", "--expert-cache", "25%", "--json", "result.json"];
    bench.on_prose(&args).expect(0);
    let json = bench.json("result.json");
    assert_eq!((json["decode"]["tokens"].as_u64(), json["prompt"]["tokens"].as_u64()), (Some(128), Some(0)));
    assert!(json["decode"]["misses"].as_u64().unwrap() > 0, "{json:#}");
}

#[test]
fn a_model_does_not_diverge_from_its_own_base() {
    let bench = Bench::new();
    let made = bench.on_prose(&["--chunks", "6", "--save-all-logits", "base"]).expect(0);
    assert!(made.stderr.contains("perplexity: saving all logits to base"), "{}", made.stderr);
    let bytes = std::fs::read(bench.path("base")).unwrap();
    let number = |at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let (n_ctx, n_vocab, n_chunk) = (number(8), number(12), number(16));
    assert_eq!((&bytes[..8], n_ctx, n_chunk), (&b"_logits_"[..], 64, 6));
    assert_eq!(bytes.len(), 20 + 4 * n_ctx * n_chunk + 2 * (n_vocab.next_multiple_of(2) + 4) * 31 * n_chunk);

    // With the text it is checked, and the base's own context is used.
    let text = demo("demo-heldout-prose.txt");
    let same = ["--kl-divergence", "--kl-divergence-base", "base", "-f", text.to_str().unwrap(), "--json", "kl.json"];
    let ran = bench.run(&same).expect(0);
    let header = concat!(
        "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence",
        "              Δp RMS            Same top p\n"
    );
    assert!(ran.stdout.contains(header), "{}", ran.stdout);
    let numbered =
        ran.stdout.lines().filter(|line| line.split_whitespace().next().is_some_and(|n| n.parse::<u32>().is_ok()));
    assert_eq!(numbered.filter(|line| line.matches('±').count() == 5).count(), 6, "{}", ran.stdout);
    let final_ppl: f64 = between(&made.stderr, "Final estimate: PPL = ", " ").parse().unwrap();
    let mean: f64 = between(&ran.stdout, "Mean PPL(Q)                   :", "±").trim().parse().unwrap();
    assert!((mean - final_ppl).abs() < 1e-3, "{mean} and {final_ppl}");
    for row in ["Mean    KLD: ", "Median  KLD: ", "99.9%   KLD: ", "RMS Δp    : ", "Same top p: "] {
        assert!(ran.stdout.lines().any(|line| line.starts_with(row)), "{row}\n{}", ran.stdout);
    }
    let json = bench.json("kl.json");
    assert!(json["result"]["means"]["kld"]["value"].as_f64().unwrap().abs() < 1e-5, "{json:#}");
    assert_eq!(json["result"]["n_tokens_scored"], 6 * 31);
    let after_chunk = json["result"]["ppl_after_chunk"].as_array().unwrap();
    assert_eq!((after_chunk.len(), after_chunk.last()), (6, Some(&json["result"]["means"]["ppl"]["value"])));

    // One expert instead of two is another model.
    let other = ["--kl-divergence", "--kl-divergence-base", "base", "--override-kv", "llama.expert_used_count=int:1"];
    let ran = bench.run(&other).expect(0);
    let kld: f64 = between(&ran.stdout, "Mean    KLD:", "±").trim().parse().unwrap();
    assert!(kld > 0.01, "{kld}");
}

#[test]
fn a_base_that_does_not_fit_is_refused() {
    let bench = Bench::new();
    bench.on_prose(&["--chunks", "2", "--kl-divergence-base", "base"]).expect(0);
    let good = std::fs::read(bench.path("base")).unwrap();
    bench.write("cut", &good[..good.len() - 1]);
    let mut other = good.clone();
    other[12..16].copy_from_slice(&5000i32.to_le_bytes());
    bench.write("vocabulary", other);
    let code = demo("demo-heldout-code.txt");
    for (args, parts) in [
        (&["--kl-divergence-base", "cut"][..], &["cut: cut off", "--chunks 1"][..]),
        (&["--kl-divergence-base", "vocabulary"], &["inconsistent vocabulary (5000 vs 4096)"]),
        (&["--kl-divergence-base", "base", "-c", "32"], &["base has been computed with 64", "Increase it with -c"]),
        (
            &["--kl-divergence-base", "base", "-f", code.to_str().unwrap()],
            &["computed on another text: token 1 of 128"],
        ),
    ] {
        let ran = bench.run(&[&["--kl-divergence", "--quiet"], args].concat()).expect(1);
        assert!(parts.iter().all(|part| ran.stderr.contains(part)), "{args:?}: {}", ran.stderr);
    }
    bench.run(&["--kl-divergence", "--kl-divergence-base", "cut", "--chunks", "1"]).expect(0);
}

#[test]
fn strides_score_what_windows_end_with() {
    let bench = Bench::new();
    let text = demo("demo-heldout-prose.txt");
    let args = ["-f", text.to_str().unwrap(), "-c", "192", "--ppl-stride", "128", "--chunks", "2", "--json", "s.json"];
    let ran = bench.run(&args).expect(0);
    assert!(
        ran.stderr.contains("Will perform strided perplexity calculation -> adjusting context size from 192 to 256")
    );
    assert_eq!(chunks(&ran).len(), 2);
    assert_eq!(bench.json("s.json")["result"]["n_tokens_scored"], 256);
}

#[test]
fn a_signal_ends_in_order_and_leaves_no_base() {
    let (signal, status) = ("TERM", 143);
    use std::io::{BufRead, BufReader, Read};
    let bench = Bench::new();
    let (model, text) = (demo("demo.gguf"), demo("demo-heldout-prose.txt"));
    let flags = ["-t", "1", "-c", "64", "-ub", "1", "--save-all-logits", "base", "--json", "result.json"];
    let mut command = bench.command(&flags);
    command.arg("-m").arg(model).arg("-f").arg(text).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The first line is printed after the first pass; hundreds follow.
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
    let rest = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    rest.join().unwrap().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(status), "{stderr}");
    let json = bench.json("result.json");
    assert_eq!((&json["stop"], &json["result"]), (&Value::from("interrupted"), &Value::Null));
    let ran = bench.run(&["--kl-divergence", "--kl-divergence-base", "base"]).expect(1);
    assert!(ran.stderr.contains("or the run that made it did not end"), "{}", ran.stderr);
}
