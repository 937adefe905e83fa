//! `plan` as a user runs it: on a model with random weights, on the demo model, and where it must refuse.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gguf_tools::synth::{self, Spec};
use hobbit_core::profile::VirtualPlan;

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(name)
}

fn tool(model: &Path, text: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gguf-tools"));
    command.arg("plan").arg(model).arg("--text").arg(text).args(["--threads", "1", "--mem-budget", "4GiB"]);
    command.args(args).output().unwrap()
}

fn words(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn plan(model: &Path, text: &Path, args: &[&str]) -> VirtualPlan {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan.json");
    let out = tool(model, text, &[args, &["--json", "-o", file.to_str().unwrap()]].concat());
    assert!(out.status.success(), "{}", words(&out.stderr));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), words(&out.stdout));
    VirtualPlan::read(&file).unwrap()
}

/// A small model with random weights, 16 experts of which 2 are used, and a text for it.
fn random(dir: &Path) -> (PathBuf, PathBuf) {
    let spec = Spec { layers: 3, experts: 16, topk: 2, seed: 5, ..Spec::tiny("qwen3moe") };
    let model = synth::write(&dir.join("random.gguf"), &spec).unwrap().files.remove(0);
    let text = dir.join("text.txt");
    std::fs::write(&text, "In the beginning was the word, and nobody read it twice. ".repeat(8)).unwrap();
    (model, text)
}

#[test]
fn a_plan_keeps_to_its_budget_and_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path());
    let short = ["--tokens", "128", "--context", "128", "--points", "3"];
    let half = plan(&model, &text, &[&short[..], &["--budget", "50%"]].concat());
    let slots: u32 = half.layers.iter().map(|layer| layer.slots()).sum();
    assert!(slots > 3 * 3 && slots <= 24, "{:?}", half.layers);
    assert!(half.layers.iter().all(|layer| (2..=16).contains(&layer.experts)), "{:?}", half.layers);
    let (predicted, measured) = (half.predicted.unwrap(), half.measured.unwrap());
    assert_eq!(predicted.slot_bytes, measured.slot_bytes);
    assert!(predicted.kl > 0.0 && measured.kl > 0.0, "{predicted:?} {measured:?}");
    assert!(measured.perplexity_increase.is_some_and(f64::is_finite));
    assert!(half.norms.len() == 3 && half.norms.iter().flat_map(|layer| &layer.norms).all(|norm| *norm > 0.0));

    // With every expert present nothing is lost.
    let all = plan(&model, &text, &[&short[..], &["--budget", "100%"]].concat());
    assert!(all.layers.iter().all(|layer| layer.experts == layer.of), "{:?}", all.layers);
    assert!(all.predicted.unwrap().kl == 0.0 && all.measured.unwrap().kl < 1e-3 * measured.kl, "{:?}", all.measured);
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path());
    let refused = |args: &[&str]| {
        let out = tool(&model, &text, args);
        (out.status.code(), words(&out.stderr).to_owned())
    };
    let short = ["--tokens", "64", "--context", "64", "--points", "1"];
    let (code, said) = refused(&[&short[..], &["--budget", "1%"]].concat());
    assert!(code == Some(1) && said.contains("--budget 1%: too small") && said.contains("slots"), "{said}");
    let (code, said) = refused(&[&short[..], &["--budget", "auto"]].concat());
    assert!(code == Some(1) && said.contains("give a size"), "{said}");
    let (code, said) = refused(&[&short[..], &["--budget", "50%", "-o", text.to_str().unwrap()]].concat());
    assert!(code == Some(2) && said.contains("--text"), "{code:?} {said}");
    let dense = synth::write(&dir.path().join("dense.gguf"), &Spec { experts: 0, topk: 0, ..Spec::tiny("llama") });
    if let Ok(dense) = dense {
        let out = tool(&dense.files[0], &text, &["--budget", "50%"]);
        assert!(
            out.status.code() == Some(1) && words(&out.stderr).contains("nothing to plan"),
            "{}",
            words(&out.stderr)
        );
    }
}

#[test]
fn the_demo_models_layers_are_not_alike() {
    let (model, text) = (demo("demo.gguf"), demo("demo-heldout-prose.txt"));
    let args = ["--tokens", "512", "--context", "256", "--points", "3", "--budget", "60%"];
    let plan = plan(&model, &text, &args);
    let measured = plan.measured.unwrap();
    assert!(measured.kl > 0.0 && measured.kl < 1.0, "{measured:?}");
    let out = tool(&model, &text, &args);
    assert!(words(&out.stdout).contains("predicted") && words(&out.stdout).contains("measured"));
}
