//! Slots of models whose state cannot be rewound: prompts that share a beginning with what a slot has read.

use hobbit_synth::{self as synth, Spec};
use serde_json::{Value, json};

use super::rig::{Server, with};
use crate::fixture::write;

const SYSTEM: &str = "You are brief and polite, and you know all that was said before this day.";

fn chat(turns: &[(&str, &str)], slot: usize) -> Value {
    let system = [("system", SYSTEM)];
    let messages: Vec<Value> =
        system.iter().chain(turns).map(|(role, content)| json!({"role": role, "content": content})).collect();
    json!({"messages": messages, "max_tokens": 4, "ignore_eos": true, "id_slot": slot})
}

/// Prompt tokens that were reused and evaluated.
fn read(server: &Server, body: &Value) -> (u64, u64) {
    let answer = server.post("/v1/chat/completions", body).ok();
    let of = |field: &str| answer["timings"][field].as_u64().unwrap();
    (of("cache_n"), of("prompt_n"))
}

#[test]
fn prompts_go_on_where_they_part_from_the_slot() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for arch in ["lfm2moe", "nemotron_h_moe"] {
        synth::write(&path, &Spec::tiny(arch)).unwrap();
        let flags = ["-m", path.to_str().unwrap(), "--slot-save-path", dir.path().to_str().unwrap()];
        let server = Server::start(&flags);
        let first = chat(&[("user", "Tell me what the old world was like.")], 0);
        let (known, n_first) = read(&server, &first);
        assert_eq!(known, 0);
        // The same again; a second turn, whose answer was not the model's.
        let (known, evaluated) = read(&server, &first);
        assert!(evaluated <= 2 && known + evaluated == n_first, "{arch}: {known} {evaluated}");
        let turns = [("user", "Tell me what the old world was like."), ("assistant", "Little."), ("user", "And now?")];
        let second = chat(&turns, 0);
        let (known, _) = read(&server, &second);
        assert!(known >= n_first - 6, "{arch}: {known} of {n_first}");
        // Another slot begins with the system prompt.
        let (known, evaluated) = read(&server, &chat(&[("user", "How many men build a house?")], 1));
        assert!(known > 16 && evaluated < n_first - 16, "{arch}: {known} {evaluated}");
        // A file keeps the checkpoints.
        server.post("/slots/0?action=save", &json!({"filename": "slot"})).ok();
        for slot in [0, 1] {
            server.post(&format!("/slots/{slot}?action=erase"), &json!({})).ok();
        }
        server.post("/slots/1?action=restore", &json!({"filename": "slot"})).ok();
        let (_, evaluated) = read(&server, &with(second.clone(), json!({"id_slot": 1})));
        assert!(evaluated <= 2, "{arch}: {evaluated}");
        drop(server);
        // Without checkpoints all of it is read again.
        let server = Server::start(&[&flags[..], &["--ctx-checkpoints", "0"]].concat());
        assert_eq!(read(&server, &first), (0, n_first));
        assert_eq!(read(&server, &first), (0, n_first));
    }
}

/// The window has forgotten the system prompt: another slot begins with a checkpoint behind it, and writes as it
/// would alone.
#[test]
fn a_window_goes_on_from_another_slots_checkpoint() {
    for arch in ["gpt-oss", "mimo2", "deepseek4"] {
        for cells in ["--kv-unified", "--no-kv-unified"] {
            check_window(arch, cells);
        }
    }
}

fn check_window(arch: &str, cells: &str) {
    let dir = tempfile::tempdir().unwrap();
    // Sums over other cells of the context are rounded otherwise. With all experts in use that changes no route.
    let tiny = Spec::tiny(arch);
    let path = write(dir.path(), &Spec { topk: tiny.experts, ..tiny });
    let window = format!("{arch}.attention.sliding_window=int:32");
    let start = || Server::start(&["-m", path.to_str().unwrap(), "--override-kv", &window, cells]);
    let logprob = |server: &Server, mut body: Value| {
        body["logprobs"] = true.into();
        let answer = server.post("/v1/chat/completions", &body).ok();
        answer["choices"][0]["logprobs"]["content"][0]["logprob"].as_f64().unwrap()
    };
    let other = |slot| chat(&[("user", "How many men build a house in a year and a day?")], slot);
    let alone = logprob(&start(), other(0));
    let server = start();
    let long = "Tell me what the old world was like, and what it was not. ".repeat(6);
    let (known, n) = read(&server, &chat(&[("user", &long)], 0));
    assert!(known == 0 && n > 64, "{arch}: {n}");
    let (known, evaluated) = read(&server, &other(1));
    assert!(known > 16, "{arch}: {known} {evaluated}");
    let found = logprob(&server, other(1));
    assert!((found - alone).abs() < 0.01, "{arch} {cells}: {found}, alone {alone}");
    // The first slot has lost nothing.
    let (_, evaluated) = read(&server, &chat(&[("user", &long)], 0));
    assert!(evaluated <= 2, "{arch}: {evaluated}");
}
