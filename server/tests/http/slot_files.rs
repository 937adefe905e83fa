//! Files of slots with any content: a checksum is no signature.

use std::fs;
use std::path::PathBuf;

use hobbit_synth::{Format, Spec};
use serde_json::{Value, json};

use super::rig::{Answer, Server};

/// The text that slot `at` continues a prompt with, evaluated anew.
fn continued(server: &Server, at: usize, prompt: &str) -> Value {
    let body = json!({"prompt": prompt, "n_predict": 4, "id_slot": at, "cache_prompt": false, "ignore_eos": true});
    server.post("/completion", &body).ok()["content"].clone()
}

/// A slot file of a server, which may be changed: the checksum follows.
struct SlotFile {
    path: PathBuf,
    saved: Vec<u8>,
    n_tokens: usize,
    /// First byte of the state, and of the checkpoints behind it.
    state: usize,
    checkpoints: usize,
}

impl SlotFile {
    /// Saves slot 0.
    fn of(server: &Server, path: PathBuf) -> Self {
        server.post("/slots/0?action=save", &json!({"filename": "slot"})).ok();
        let saved = fs::read(&path).unwrap();
        let number = |at: usize| u64::from_le_bytes(saved[at..at + 8].try_into().unwrap()) as usize;
        let (n_tokens, state) = (number(16), 40 + 4 * number(16));
        Self { path, n_tokens, state, checkpoints: state + number(24), saved }
    }

    /// Restores slot 0 from the file with `bytes` at each of these places.
    fn restore(&self, server: &Server, places: impl IntoIterator<Item = usize>, bytes: &[u8]) -> Answer {
        let mut changed = self.saved.clone();
        places.into_iter().for_each(|at| changed[at..at + bytes.len()].copy_from_slice(bytes));
        let sum = xxhash_rust::xxh3::xxh3_64(&changed[40..]).to_le_bytes();
        changed[32..40].copy_from_slice(&sum);
        fs::write(&self.path, &changed).unwrap();
        server.post("/slots/0?action=restore", &json!({"filename": "slot"}))
    }
}

/// A checksum is no signature: a file may hold any positions and numbers. All slots share their cells.
#[test]
fn a_changed_slot_file_spoils_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot");
    for attention in ["off", "on"] {
        let server = Server::start(&["-fa", attention, "--slot-save-path", dir.path().to_str().unwrap()]);
        let prompts = ["In the", "And God said, Let there be light"];
        let expected = [continued(&server, 0, prompts[0]), continued(&server, 1, prompts[1])];
        let file = SlotFile::of(&server, path.clone());
        // Numbers of streams and cells, three words for each cell, and seven before the first key.
        let (cells, end) = (file.state + 8, file.checkpoints);
        let last_cell = cells + 12 * file.n_tokens;
        let key = last_cell + 28;
        let restore = |at: usize, word: &[u8]| {
            let answer = file.restore(&server, [at], word);
            if answer.status != 200 {
                let message = answer.refused();
                assert!(message.contains("Unable to restore slot"), "byte {at}: {message}");
            }
        };
        let check = |what: &str| {
            for at in [1, 0, 1] {
                assert_eq!(continued(&server, at, prompts[at]), expected[at], "-fa {attention}, {what}");
            }
        };
        restore(40, &[]);
        assert_eq!(continued(&server, 1, prompts[1]), expected[1]);
        for at in (cells..last_cell).step_by(4) {
            for word in [-1, i32::MIN, -7, 5, i32::MAX] {
                restore(at, &word.to_le_bytes());
                check(&format!("{word} at byte {at}"));
            }
        }
        // NaN and infinity, in 16 bits, among the keys and the values.
        for at in [key, key + 64, end - 2, end - 200] {
            for number in [0x7e00_u16, 0x7c00, 0xfc00] {
                restore(at, &number.to_le_bytes());
                check(&format!("{number:x} at byte {at}"));
            }
        }
    }
}

/// Numbers may be finite and so large that some tokens overflow: a prompt that meets them is read anew, once.
#[test]
fn a_damaged_state_only_takes_time() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--slot-save-path", dir.path().to_str().unwrap()];
    let server = Server::start(&flags);
    let ask = |slot: usize, prompt: &str| {
        let body = json!({"prompt": prompt, "n_predict": 4, "id_slot": slot, "ignore_eos": true});
        let answer = server.post("/completion", &body).ok();
        (answer["content"].clone(), answer["timings"]["cache_n"].as_u64().unwrap())
    };
    let (text, more) = ("In the beginning God created", "In the beginning God created the heaven and the earth.");
    let other = ask(1, "And God said").0;
    let expected = continued(&server, 0, more);
    ask(0, text);
    let file = SlotFile::of(&server, dir.path().join("slot"));
    let key = file.state + 8 + 12 * file.n_tokens + 28;
    let (mut n_restored, mut n_again) = (0, 0);
    for at in (key..key + 64 * 100).step_by(64) {
        // A key of such numbers gives a score of one infinity or the other, by the token that asks.
        let answer = file.restore(&server, (at..at + 32).step_by(4), &3e38_f32.to_le_bytes());
        if answer.status != 200 {
            assert!(answer.refused().contains("Unable to restore slot"));
            continue;
        }
        n_restored += 1;
        let (found, n_cached) = ask(0, more);
        if n_cached == 0 {
            n_again += 1;
            assert_eq!(found, expected, "read anew");
        }
        assert_eq!(ask(1, "And God said").0, other);
    }
    assert!(n_restored > 0 && n_again > 0, "{n_restored} restored, {n_again} read anew");
}

/// Checkpoints in a file are held to the same rule as the state before them.
#[test]
fn a_changed_checkpoint_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for arch in ["lfm2moe", "qwen3next", "gpt-oss"] {
        // A product that quantises its input may take a NaN for a number.
        let spec = Spec { types: vec![Format::F32], dense_type: Some(Format::F32), ..Spec::tiny(arch) };
        hobbit_synth::write(&path, &spec).unwrap();
        let window = format!("{arch}.attention.sliding_window=int:32");
        let flags = ["-m", path.to_str().unwrap(), "--slot-save-path", dir.path().to_str().unwrap()];
        let server = Server::start(&[&flags[..], &["--override-kv", &window]].concat());
        let message = "Tell me what the people of the old world knew about the stars above them.";
        let messages = json!([{"role": "system", "content": message}, {"role": "user", "content": message}]);
        let chat = json!({"messages": messages, "max_tokens": 4, "ignore_eos": true, "id_slot": 0});
        let ask = || server.post("/v1/chat/completions", &chat).ok()["choices"][0]["message"]["content"].clone();
        let expected = ask();
        let file = SlotFile::of(&server, dir.path().join("slot"));
        assert!(file.checkpoints < file.saved.len(), "{arch} has checkpoints");
        file.restore(&server, [], &[]).ok();
        assert_eq!(ask(), expected, "{arch}: from the file as it was");
        // Numbers of 32 or 16 bits, in the last checkpoint.
        let end = file.saved.len() - 1024;
        for word in [0x7fc0_7fc0_u32, 0x7f80_7c00] {
            let message = file.restore(&server, (end - 64..end).step_by(4), &word.to_le_bytes()).refused();
            assert!(message.contains("not finite"), "{arch} {word:x}: {message}");
            assert_eq!(ask(), expected, "{arch} {word:x}");
        }
    }
}
