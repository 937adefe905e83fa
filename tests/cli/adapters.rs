//! LoRA adapters and control vectors.

use std::path::{Path, PathBuf};

use super::files;
use super::rig::*;

const PROMPT: [&str; 5] = ["-p", "In the beginning", "-n", "16", "-no-cnv"];

fn text(flags: &[&str]) -> String {
    demo(&[&PROMPT, flags].concat()).run().expect(0).stdout
}

fn of_attention(dir: &Path) -> PathBuf {
    files::lora(&demo_model(), dir.join("attention.gguf"), 4, |name| {
        name.contains("attn_q.") || name.contains("attn_v.")
    })
}

fn of_experts(dir: &Path) -> PathBuf {
    files::lora(&demo_model(), dir.join("experts.gguf"), 4, |name| name.contains("ffn_up_exps"))
}

fn scaled(path: &Path, scale: &str) -> String {
    format!("{}:{scale}", path.display())
}

#[test]
fn an_adapter_applies_with_its_scale() {
    let dir = tempfile::tempdir().unwrap();
    let lora = of_attention(dir.path());
    let name = lora.to_str().unwrap();
    let plain = text(&[]);
    assert_eq!(text(&["--lora-scaled", &scaled(&lora, "0")]), plain);
    let changed = text(&["--lora", name]);
    assert_ne!(changed, plain);
    assert_eq!(text(&["--lora-scaled", &scaled(&lora, "1")]), changed);
    // Opposite scales cancel; a small cache changes nothing.
    let half = scaled(&lora, "-1");
    assert_eq!(text(&["--lora", name, "--lora-scaled", &half]), plain);
    assert_eq!(text(&["--lora", name, "--expert-cache", "50%"]), changed);
}

#[test]
fn experts_are_changed_only_where_llama_cpp_has_them() {
    let dir = tempfile::tempdir().unwrap();
    let lora = of_experts(dir.path());
    let strong = scaled(&lora, "30");
    assert_ne!(text(&["--lora-scaled", &strong]), text(&[]));
    let ran = demo(&[&PROMPT[..], &["--lora-scaled", &strong, "--expert-cache", "50%"]].concat()).run().expect(1);
    for part in ["experts.gguf", "blk.0.ffn_up_exps.weight", "merge it into the model"] {
        assert!(ran.stderr.contains(part), "{}", ran.stderr);
    }
}

#[test]
fn control_vectors_change_their_layers() {
    let dir = tempfile::tempdir().unwrap();
    let vector = files::control_vector(&demo_model(), dir.path().join("vector.gguf"), 1..=2);
    let strong = scaled(&vector, "40");
    let (plain, changed) = (text(&[]), text(&["--control-vector-scaled", &strong]));
    assert_ne!(changed, plain);
    assert_eq!(text(&["--control-vector-scaled", &strong, "--expert-cache", "50%"]), changed);
    assert_eq!(text(&["--control-vector-scaled", &strong, "--control-vector-layer-range", "3", "9"]), plain);
    assert_ne!(text(&["--control-vector-scaled", &strong, "--control-vector-layer-range", "2", "-1"]), plain);
}

#[test]
fn unusable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = demo_model();
    let fine = model.with_file_name("fine.gguf");
    let other = files::lora(&fine, dir.path().join("other.gguf"), 2, |name| name.contains("attn_q."));
    let poisoned = of_attention(dir.path());
    files::set_first(&poisoned, "blk.0.attn_v.weight.lora_b", f32::NAN);
    for (flags, status, part) in [
        (["--lora", "missing.gguf"], 1, "missing.gguf"),
        (["--lora", model.to_str().unwrap()], 1, "expected 'adapter'"),
        (["--lora", other.to_str().unwrap()], 1, "other.gguf: this file cannot be used as a LoRA adapter"),
        (["--control-vector", other.to_str().unwrap()], 1, "is no direction of a layer"),
        (["--lora", poisoned.to_str().unwrap()], 1, "blk.0.attn_v.weight.lora_b is not finite"),
        (["--lora-scaled", "x.gguf"], 2, "expected FNAME:SCALE"),
        (["--lora-scaled", "x.gguf:1e38"], 2, "expected a number from -100 to 100"),
        (["--control-vector-scaled", "x.gguf:-1e10"], 2, "expected a number from -100 to 100"),
    ] {
        let ran = demo(&[&PROMPT[..], &flags].concat()).run().expect(status);
        assert!(ran.stderr.contains(part), "{flags:?}: {}", ran.stderr);
    }
    let ran = demo(&[&PROMPT[..], &["--control-vector-layer-range", "4", "2"]].concat()).run().expect(2);
    assert!(ran.stderr.contains("layer 4 is behind layer 2"), "{}", ran.stderr);
}
