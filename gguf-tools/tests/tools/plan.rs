//! `plan`: on a model with random weights, on the demo model, and where it must refuse.

use hobbit_core::profile::VirtualPlan;

use crate::*;

fn args<'a>(model: &'a Path, text: &'a Path, args: &[&'a str]) -> Vec<&'a str> {
    let usual = ["plan", word(model), "--text", word(text), "--threads", "1", "--mem-budget", "4GiB"];
    [&usual[..], args].concat()
}

fn plan(model: &Path, text: &Path, more: &[&str]) -> VirtualPlan {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan.json");
    let ran = succeed(&args(model, text, &[more, &["--json", "-o", word(&file)]].concat()));
    assert_eq!(fs::read_to_string(&file).unwrap(), ran.out);
    VirtualPlan::read(&file).unwrap()
}

/// A model of which 2 of 16 experts are used, and a text for it.
fn random_16(dir: &Path) -> (PathBuf, PathBuf) {
    random(dir, &Spec { layers: 3, experts: 16, topk: 2, seed: 5, ..Spec::tiny("qwen3moe") })
}

#[test]
fn a_plan_keeps_to_its_budget_and_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random_16(dir.path());
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
fn budgets_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random_16(dir.path());
    let short = ["--tokens", "64", "--context", "64", "--points", "1", "--budget"];
    let with = |more: &[&'static str]| [&short[..], more].concat();
    refused(1, &args(&model, &text, &with(&["1%"])), "--budget 1%: too small");
    refused(1, &args(&model, &text, &with(&["auto"])), "give a size");
    refused(2, &[&args(&model, &text, &with(&["50%"]))[..], &["-o", word(&text)]].concat(), "--text");
}

#[test]
fn the_demo_models_layers_are_not_alike() {
    let (model, text) = (bundled("demo.gguf"), bundled("demo-heldout-prose.txt"));
    let more = ["--tokens", "512", "--context", "256", "--points", "3", "--budget", "60%"];
    let shown = succeed(&args(&model, &text, &more)).out;
    assert_contains(&shown, &["predicted", "measured"]);
    let measured = plan(&model, &text, &more).measured.unwrap();
    assert!(measured.kl > 0.0 && measured.kl < 1.0, "{measured:?}");
}
