//! `hobbit-perplexity`, the binary in a fresh directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::fixture::bundled;
use crate::fixture::cli::{PERPLEXITY, Ran, check_refusals, demo_model, json, program, ran};

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

struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// On the demo model and on one thread, since tests run side by side.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = program(PERPLEXITY);
        command.current_dir(self.0.path()).args(["-t", "1", "-m"]).arg(demo_model()).args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        ran(self.command(args).output().unwrap())
    }

    /// Runs on the bundled text, in chunks of 64 tokens.
    fn on_prose(&self, args: &[&str]) -> Ran {
        self.run(&[&["-f", &text("prose"), "-c", "64"], args].concat())
    }

    fn json(&self, name: &str) -> Value {
        json(&self.path(name))
    }
}

fn text(kind: &str) -> String {
    bundled(&format!("demo-heldout-{kind}.txt")).display().to_string()
}

/// The text between two others.
fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let rest = text.split_once(before).unwrap_or_else(|| panic!("{before:?} in\n{text}")).1;
    rest.split_once(after).unwrap_or_else(|| panic!("{after:?} in\n{rest}")).0
}

#[test]
fn errors_are_one_line() {
    let bench = Bench::new();
    fs::write(bench.path("latin1.txt"), b"caf\xe9").unwrap();
    let short = ["-p", "In the beginning", "-c", "64"];
    let not_a_base = ["--kl-divergence", "--kl-divergence-base", "latin1.txt"];
    let rows: &[(&[&str], i32, &str)] = &[
        (&["-c", "1"], 2, "invalid value '1'"),
        (&["-f", "x", "--ppl-stride", "8"], 2, "chunks do not overlap"),
        (&["-f", "x", "--hellaswag"], 2, "score tasks with lm-eval through hobbit-server"),
        (&short, 1, "you need at least 128 tokens to evaluate perplexity with a context of 64"),
        (&["-f", "none.txt"], 1, "none.txt: cannot read this file"),
        (&["-f", "latin1.txt"], 1, "latin1.txt: not UTF-8 text (at byte 3)"),
        (&[], 1, "no text: give a file with -f"),
        (&["--kl-divergence"], 1, "--kl-divergence-base FNAME"),
        (&not_a_base, 1, "latin1.txt: this does not look like a file containing log"),
        (&["-p", "x", "--json", "absent/x.json"], 1, "absent/x.json: cannot write"),
    ];
    check_refusals(|args| bench.run(&[args, &["--quiet"]].concat()), rows);
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
fn sizes_of_batches_and_caches_only_change_rounding() {
    let bench = Bench::new();
    let whole = chunks(&bench.on_prose(&["--chunks", "3"]).expect(0));
    let through_the_cache = ["-ub", "1", "--expert-cache", "25%", "--json", "single.json"];
    for args in [&["-b", "64", "-ub", "7"][..], &["-b", "1", "-ub", "1"], &through_the_cache] {
        let found = chunks(&bench.on_prose(&[&["--chunks", "3"], args].concat()).expect(0));
        assert_eq!(found.len(), 3);
        for (a, b) in found.iter().zip(&whole) {
            assert!((a / b - 1.0).abs() < 0.01, "{args:?}: {found:?} and {whole:?}");
        }
    }
    let single = bench.json("single.json");
    assert_eq!((single["decode"]["tokens"].as_u64(), single["prompt"]["tokens"].as_u64()), (Some(192), Some(0)));
    assert!(single["decode"]["misses"].as_u64().unwrap() > 0, "{single:#}");
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
    let text = text("prose");
    let same = ["--kl-divergence", "--kl-divergence-base", "base", "-f", &text, "--json", "kl.json"];
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
    fs::write(bench.path("cut"), &good[..good.len() - 1]).unwrap();
    let mut other = good.clone();
    other[12..16].copy_from_slice(&5000i32.to_le_bytes());
    fs::write(bench.path("vocabulary"), other).unwrap();
    let code = text("code");
    let rows: &[(&[&str], i32, &str)] = &[
        (&["cut"], 1, "cut: cut off"),
        (&["vocabulary"], 1, "inconsistent vocabulary (5000 vs 4096)"),
        (&["base", "-c", "32"], 1, "base has been computed with 64"),
        (&["base", "-f", &code], 1, "computed on another text: token 1 of 128"),
    ];
    let diverge = |args: &[&str]| bench.run(&[&["--kl-divergence", "--quiet", "--kl-divergence-base"], args].concat());
    check_refusals(diverge, rows);
    diverge(&["cut", "--chunks", "1"]).expect(0);
}

/// SIGTERM.
#[cfg(unix)]
#[test]
fn a_signal_ends_in_order_and_leaves_no_base() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    use crate::fixture::cli::send;

    let bench = Bench::new();
    let text = text("prose");
    let flags = ["-c", "64", "-ub", "1", "--save-all-logits", "base", "--json", "result.json", "-f", &text];
    let mut child = bench.command(&flags).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // The first line is printed after the first pass; hundreds follow.
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    send(&child, "TERM");
    std::io::copy(&mut stdout, &mut std::io::sink()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let json = bench.json("result.json");
    assert_eq!((&json["stop"], &json["result"]), (&Value::from("interrupted"), &Value::Null));
    let ran = bench.run(&["--kl-divergence", "--kl-divergence-base", "base"]).expect(1);
    ran.says(&["or the run that made it did not end"]);
}
