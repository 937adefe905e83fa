//! LoRA adapters and control vectors.

use std::path::Path;

use crate::fixture::adapters::{control_vector, lora, set_first};
use crate::fixture::bundled;
use crate::fixture::cli::*;

const PROMPT: [&str; 5] = ["-p", "In the beginning", "-n", "16", "-no-cnv"];

fn text(flags: &[&str]) -> String {
    demo(&[&PROMPT, flags].concat()).run().expect(0).stdout
}

fn scaled(path: &Path, scale: &str) -> String {
    format!("{}:{scale}", path.display())
}

#[test]
fn adapters_and_vectors_apply_with_their_scale() {
    let dir = tempfile::tempdir().unwrap();
    let is_attention = |name: &str| name.contains("attn_q.") || name.contains("attn_v.");
    let adapter = lora(&demo_model(), dir.path().join("attention.gguf"), 4, is_attention);
    let name = adapter.to_str().unwrap();
    let plain = text(&[]);
    assert_eq!(text(&["--lora-scaled", &scaled(&adapter, "0")]), plain);
    let changed = text(&["--lora", name]);
    assert_ne!(changed, plain);
    assert_eq!(text(&["--lora", name, "--lora-scaled", &scaled(&adapter, "-1")]), plain, "opposite scales cancel");
    assert_eq!(text(&["--lora", name, "--expert-cache", "50%"]), changed);

    let vector = control_vector(&demo_model(), dir.path().join("vector.gguf"), 1..=2);
    let strong = ["--control-vector-scaled", &scaled(&vector, "40")];
    let changed = text(&strong);
    assert_ne!(changed, plain);
    assert_eq!(text(&[&strong[..], &["--expert-cache", "50%"]].concat()), changed);
    let of_layers = |from, to| text(&[&strong[..], &["--control-vector-layer-range", from, to]].concat());
    assert_eq!(of_layers("3", "9"), plain);
    assert_ne!(of_layers("2", "-1"), plain);

    // Experts are changed only where llama.cpp has them.
    let experts = lora(&demo_model(), dir.path().join("experts.gguf"), 4, |name| name.contains("ffn_up_exps"));
    let strong = ["--lora-scaled", &scaled(&experts, "30")];
    assert_ne!(text(&strong), plain);
    let ran = demo(&[&PROMPT[..], &strong, &["--expert-cache", "50%"]].concat()).run().expect(1);
    ran.says(&["experts.gguf", "blk.0.ffn_up_exps.weight", "merge it into the model"]);
}

#[test]
fn unusable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (model, fine) = (demo_model(), bundled("fine.gguf"));
    let other = lora(&fine, dir.path().join("other.gguf"), 2, |name| name.contains("attn_q."));
    let poisoned = lora(&model, dir.path().join("poisoned.gguf"), 4, |name| name.contains("attn_v."));
    set_first(&poisoned, "blk.0.attn_v.weight.lora_b", f32::NAN);
    let [model, other, poisoned] = [&model, &other, &poisoned].map(|path| path.to_str().unwrap());
    let rows: &[(&[&str], i32, &str)] = &[
        (&["--lora", "missing.gguf"], 1, "missing.gguf"),
        (&["--lora", model], 1, "expected 'adapter'"),
        (&["--lora", other], 1, "other.gguf: this file cannot be used as a LoRA adapter"),
        (&["--control-vector", other], 1, "is no direction of a layer"),
        (&["--lora", poisoned], 1, "blk.0.attn_v.weight.lora_b is not finite"),
        (&["--lora-scaled", "x.gguf"], 2, "expected FNAME:SCALE"),
        (&["--lora-scaled", "x.gguf:1e38"], 2, "expected a number from -100 to 100"),
    ];
    check_refusals(|flags| demo(&[&PROMPT, flags].concat()).run(), rows);
}
