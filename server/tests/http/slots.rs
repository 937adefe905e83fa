//! Slots: clients that go, requests beside each other, shared context, and files.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use hobbit_synth::Spec;
use serde_json::{Value, json};

use super::rig::{Server, least_mib, until, with};
use crate::fixture::{demo_in_f32, write};

/// Links, pipes and inodes are Unix's.
#[cfg(unix)]
#[test]
fn a_saved_slot_replaces_only_a_saved_slot() {
    use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
    use std::process::Command;

    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf"), at("model")).unwrap();
    fs::create_dir(at("directory")).unwrap();
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let others =
        [("trace", "HOBBITTR\x02\0\0\0"), ("state", "HOBBITCS\x01\0\0\0"), ("notes", "precious"), ("empty", "")];
    others.iter().for_each(|(name, content)| fs::write(at(name), content).unwrap());
    symlink(at("slot"), at("link")).unwrap();
    symlink(at("nothing"), at("dangling")).unwrap();
    fs::hard_link(at("model"), at("second name")).unwrap();
    let paths = ["model", "log", ""].map(|name| at(name).to_str().unwrap().to_owned());
    let server = Server::start(&["-m", &paths[0], "--log-file", &paths[1], "--slot-save-path", &paths[2]]);
    server.post("/completion", &json!({"prompt": "In the", "n_predict": 2, "id_slot": 0})).ok();
    let save = |name: &str| server.post("/slots/0?action=save", &json!({"filename": name}));
    save("slot").ok();

    let before: Vec<_> = ["model", "log", "slot"].map(|name| fs::read(at(name)).unwrap()).into();
    let inode = |name: &str| fs::symlink_metadata(at(name)).unwrap().ino();
    let names =
        ["model", "log", "second name", "link", "dangling", "pipe", "directory", "trace", "state", "notes", "empty"];
    let inodes = names.map(inode);
    for name in names {
        let error = save(name).refused();
        assert!(error.starts_with("Unable to save slot: ") && error.contains("another name"), "{name}: {error}");
    }
    assert_eq!(names.map(inode), inodes, "each file is kept");
    assert!(fs::read(at("model")).unwrap() == before[0] && fs::read(at("slot")).unwrap() == before[2]);
    assert!(!before[1].is_empty() && fs::read(at("log")).unwrap().starts_with(&before[1]));
    others.iter().for_each(|(name, content)| assert_eq!(fs::read_to_string(at(name)).unwrap(), *content));
    assert!(fs::symlink_metadata(at("pipe")).unwrap().file_type().is_fifo() && !at("nothing").exists());

    // An earlier slot is replaced whole: a reader of the old file keeps it.
    let mut reader = fs::File::open(at("slot")).unwrap();
    let (old, count) = (inode("slot"), fs::read_dir(dir.path()).unwrap().count());
    server.post("/completion", &json!({"prompt": "In the beginning was", "n_predict": 2, "id_slot": 0})).ok();
    save("slot").ok();
    assert!(inode("slot") != old && fs::read(at("slot")).unwrap() != before[2]);
    let mut kept = Vec::new();
    reader.read_to_end(&mut kept).unwrap();
    assert!(kept == before[2]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), count, "nothing else is left");
    server.post("/slots/1?action=restore", &json!({"filename": "slot"})).ok();
}

#[test]
fn a_slot_that_cannot_shift_ends_its_text() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), &Spec::tiny("granitemoe"));
    let flags = ["-c", "256", "-np", "1", "--context-shift", "-m", model.to_str().unwrap()];
    for (is_rotated, n_predicted) in [("true", 300), ("false", 256)] {
        let key = format!("granitemoe.rope.scaling.finetuned=bool:{is_rotated}");
        let server = Server::start(&[&flags[..], &["--override-kv", &key]].concat());
        for _ in 0..2 {
            let body = json!({"prompt": "In", "n_predict": 300, "ignore_eos": true, "cache_prompt": false});
            let answer = server.post("/completion", &body).ok();
            let n = answer["tokens_predicted"].as_u64().unwrap() + answer["tokens_evaluated"].as_u64().unwrap();
            assert!(n.abs_diff(n_predicted) < 8 && answer["truncated"] == true, "{is_rotated}: {answer}");
        }
    }
}

/// A request for text without an end.
fn endless(prompt: &str) -> Value {
    json!({"prompt": prompt, "n_predict": -1, "ignore_eos": true, "cache_prompt": false})
}

/// Requests within their share of the context never fail for those that take all of it, which end with `limit`.
#[test]
fn unlimited_requests_give_way_to_small_ones() {
    let server = Server::start(&["-np", "4", "-c", "512", "--kv-unified"]);
    let small = |n: usize, n_predict: usize| {
        let prompt = format!("Number {n} is a small request that asks for little.");
        server.post("/completion", &json!({"prompt": prompt, "n_predict": n_predict, "ignore_eos": true}))
    };
    std::thread::scope(|scope| {
        let ask = |prompt: &'static str| {
            let server = &server;
            scope.spawn(move || server.post("/completion", &endless(prompt)).ok())
        };
        let unlimited = [ask("In the beginning God created"), ask("And the earth was without form")];
        // Together the small ones never take more than their two shares.
        let steady = scope.spawn(|| {
            for n in 0..1000 {
                if unlimited.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                    break;
                }
                assert_eq!(small(n, 80).ok()["tokens_predicted"], 80);
            }
            unlimited.map(|own| own.join().unwrap())
        });
        for n in 1000..2000 {
            if steady.is_finished() {
                break;
            }
            assert_eq!(small(n, 8).ok()["tokens_predicted"], 8);
        }
        for answer in steady.join().unwrap() {
            assert_eq!((&answer["stop_type"], &answer["truncated"]), (&json!("limit"), &json!(true)), "{answer}");
            let n = answer["tokens_predicted"].as_u64().unwrap();
            assert!(n > 512 / 4, "{n} tokens: within its share a request is not cut");
        }
    });
}

/// The most probable first token of an answer, and how probable it is.
fn first(server: &Server, body: &Value) -> (i64, f64) {
    let answer = server.post("/completion", body).ok();
    let first = &answer["completion_probabilities"][0];
    (first["id"].as_i64().unwrap(), first["logprob"].as_f64().unwrap())
}

#[test]
fn moved_tokens_stay_for_other_slots() {
    let server = Server::start(&[]);
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout-prose.txt")).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    let tokens =
        |text: String| server.post("/tokenize", &json!({"content": text})).ok()["tokens"].as_array().unwrap().clone();
    let [start, left_out, kept, question] =
        [0..20, 20..50, 50..90, 90..100].map(|range| tokens(words[range].join(" ")));
    let whole = [&start[..], &left_out, &kept].concat();
    let ask = |prompt: &[Value], slot: u32, reuse: u32| {
        let body = json!({"prompt": prompt, "n_predict": 1, "n_probs": 1, "id_slot": slot});
        with(body, json!({"n_cache_reuse": reuse}))
    };
    // One slot holds all of it; another begins alike and goes on with a later part.
    first(&server, &ask(&whole, 0, 0));
    first(&server, &ask(&[&start[..], &kept, &question].concat(), 1, 8));
    let after = [&whole[..], &question].concat();
    let (token, probability) = first(&server, &ask(&after, 0, 0));
    let mut alone = ask(&after, 1, 0);
    alone["cache_prompt"] = json!(false);
    let (expected, of_it) = first(&server, &alone);
    assert!(token == expected && (probability - of_it).abs() < 0.02, "{token} {probability}, not {expected} {of_it}");
}

#[test]
fn a_vanished_client_frees_its_slot() {
    let server = Server::start(&["--ignore-eos"]);
    let chat = |text: &str, n: i32| json!({"messages": [{"role": "user", "content": text}], "max_tokens": n});
    let mut first = server.stream("/v1/chat/completions", &chat("One", -1));
    let mut second = server.stream("/v1/responses", &json!({"input": "Two", "max_output_tokens": 400}));
    assert!(first.next().is_some() && second.next().is_some());
    drop(first);
    drop(second);
    server.wait_for_busy(0);
    server.post("/v1/chat/completions", &chat("x", 1)).ok();
}

/// Begins to save slot 0. The answer is not read yet.
fn begin_save(server: &Server, name: &str) -> TcpStream {
    let body = json!({"filename": name}).to_string();
    let head = "POST /slots/0?action=save HTTP/1.1\r\nHost: localhost\r\n";
    let mut stream = server.connect();
    stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    stream
}

/// Whether a part of the answer has come.
fn is_answered(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let n = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    n.is_ok_and(|n| n > 0)
}

/// The status of the answer.
fn status(mut stream: TcpStream) -> String {
    let mut line = [0; 12];
    stream.read_exact(&mut line).unwrap();
    String::from_utf8_lossy(&line).trim_start_matches("HTTP/1.1 ").to_owned()
}

/// Begins as many saves of slot 0, which is busy, as may wait.
fn fill_queue(server: &Server, n_max: usize, name: &str) -> Vec<TcpStream> {
    let mut saves: Vec<TcpStream> = (0..=n_max).map(|at| begin_save(server, &format!("{name}{at}"))).collect();
    until("one save more than may wait is refused", || saves.iter().any(is_answered));
    let refused = saves.remove(saves.iter().position(is_answered).unwrap());
    assert_eq!(status(refused), "503");
    saves
}

/// A long text in a slot.
fn long(slot: usize) -> Value {
    with(endless("In the beginning"), json!({"n_predict": 20_000, "id_slot": slot}))
}

#[test]
fn a_stream_goes_on_between_operations_on_another_slot() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let flags = ["-c", "256", "--context-shift", "--max-waiting", "100", "--slot-save-path", path];
    let server = Server::start(&flags);
    let are_saved = AtomicBool::new(false);
    // When each token of the stream came.
    let tokens: Vec<SystemTime> = std::thread::scope(|scope| {
        let stream = scope.spawn(|| {
            let times = server.stream("/completion", &long(1)).map(|_| SystemTime::now());
            times.take_while(|_| !are_saved.load(Ordering::Relaxed)).collect()
        });
        let held = server.stream("/completion", &long(0));
        server.wait_for_busy(2);
        let saves = fill_queue(&server, 100, "slot");
        drop(held);
        let answers: Vec<String> = saves.into_iter().map(status).collect();
        are_saved.store(true, Ordering::Relaxed);
        assert!(answers.iter().all(|status| status == "200"), "{answers:?}");
        stream.join().unwrap()
    });
    let files = fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().modified().unwrap());
    let mut saved: Vec<SystemTime> = files.collect();
    saved.sort();
    assert_eq!(saved.len(), 100);
    let n = tokens.iter().filter(|time| saved[0] < **time && **time < saved[99]).count();
    assert!(n > 25, "{n} tokens came while 100 files were written");
}

#[test]
fn operations_of_vanished_clients_are_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let server = Server::start(&["--context-shift", "--max-waiting", "4", "--slot-save-path", path]);
    let held = server.stream("/completion", &long(0));
    server.wait_for_busy(1);
    let saves = fill_queue(&server, 4, "vanished");
    drop(saves);
    for _ in 0..4 {
        server.logged("the client left");
    }
    drop(held);
    server.wait_for_busy(0);
    server.post("/slots/0?action=save", &json!({"filename": "kept"})).ok();
    let names = fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["kept"]);
}

/// A slot of 1,000 tokens has a state of 63 MiB, which experts lend while it is written or read.
#[test]
fn a_saved_state_keeps_to_the_memory_budget() {
    let dir = tempfile::tempdir().unwrap();
    // 204 MiB of experts, more than any of the budgets below leaves them.
    let spec = Spec { layers: 8, experts: 64, topk: 4, ff: 512, kv_heads: Some(4), ..Spec::tiny("qwen3moe") };
    let model = write(dir.path(), &Spec { head_dim: Some(256), ..spec });
    let (model, path) = (model.to_str().unwrap(), dir.path().to_str().unwrap());
    let kv = ["-t", "1", "-np", "1", "-c", "1024", "-ctk", "f32", "-ctv", "f32", "-fa", "off"];
    let flags = [&kv[..], &["-m", model, "--max-body", "100K", "--slot-save-path", path]].concat();
    let least = least_mib(&flags);
    let start = |more: u64| {
        let budget = format!("{}M", least + more);
        Server::start(&[&flags[..], &["--mem-budget", &budget]].concat())
    };
    let prompt: Vec<usize> = (0..1000).map(|n| 5 + n * 7 % 400).collect();
    let body = json!({"prompt": prompt, "n_predict": 8, "ignore_eos": true, "id_slot": 0});
    let ask = |server: &Server| server.post("/completion", &body).ok()["timings"]["cache_n"].as_u64().unwrap();
    let act =
        |server: &Server, action: &str| server.post(&format!("/slots/0?action={action}"), &json!({"filename": "slot"}));

    let server = start(80);
    assert_eq!(ask(&server), 0);
    let n = act(&server, "save").ok()["n_written"].as_u64().unwrap();
    assert!(n > 60 << 20, "{n} bytes");
    act(&server, "erase").ok();
    act(&server, "restore").ok();
    assert!(ask(&server) > 990);
    let peak = server.peak_bytes();
    assert!(peak <= (least + 80) << 20, "{peak} bytes resident, {} MiB allowed", least + 80);
    drop(server);

    let server = start(8);
    ask(&server);
    let message = act(&server, "save").error(503, "unavailable_error");
    assert!(message.contains("Unable to save slot") && message.contains("--mem-budget"), "{message}");
    assert!(ask(&server) > 990, "the slot has kept its tokens");
    let message = act(&server, "restore").error(503, "unavailable_error");
    assert!(message.contains("Unable to restore slot"), "{message}");
    assert_eq!(ask(&server), 0);
}

/// The continuation of a text, from a stream.
fn go_on(server: &Server, text: &str) -> String {
    let body = json!({"prompt": text, "max_tokens": 40, "cache_prompt": false});
    let mut whole = String::new();
    for event in server.stream("/v1/completions", &body) {
        assert!(event.data.get("error").is_none(), "{event:?}");
        whole += event.data.pointer("/choices/0/text").and_then(Value::as_str).unwrap_or_default();
    }
    whole
}

#[test]
fn streams_do_not_mix() {
    let server = Server::start(&["--ignore-eos"]);
    let texts = ["The river", "A letter to", "def main():"];
    let alone: Vec<String> = texts.iter().map(|text| go_on(&server, text)).collect();
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);
    // Three at once for two slots: one waits.
    let beside: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = texts.iter().map(|text| scope.spawn(|| go_on(&server, text))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // A batch of two may round otherwise than one, but every text begins as it does alone.
    for (alone, beside) in alone.iter().zip(&beside) {
        let same = alone.bytes().zip(beside.bytes()).take_while(|(a, b)| a == b).count();
        assert!(same >= 8, "alone: {alone:?}\nbeside: {beside:?}");
    }
}

/// Batches that the server has evaluated, of prompts and of generated tokens.
fn n_batches(server: &Server) -> u64 {
    let metrics = server.get("/metrics").ok();
    let lines = metrics.as_str().unwrap().lines();
    let count = lines.into_iter().find_map(|line| line.strip_prefix("llamacpp:n_decode_total "));
    count.expect("it is counted").parse().unwrap()
}

#[test]
fn waiting_prompts_are_read_in_one_batch() {
    let model = demo_in_f32().to_str().unwrap();
    let server = Server::start(&["-m", model, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--metrics"]);
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout-prose.txt")).unwrap();
    // One on each side of the number of rows from which fused attention sums in another order.
    let prompts = [&text[..600], &text[600..700]];
    let n_predict = 16;
    let ask = |prompt: Value| {
        let body = json!({"prompt": prompt, "n_predict": n_predict, "ignore_eos": true, "cache_prompt": false});
        let before = n_batches(&server);
        let answer = server.post("/completion", &body).ok();
        (answer, n_batches(&server) - before)
    };
    let alone = prompts.map(|prompt| {
        let (answer, n) = ask(json!(prompt));
        assert_eq!(n, n_predict, "a prompt, whose batch yields the first token, and the other tokens");
        answer["content"].clone()
    });
    // The first may begin before the second has come; then it takes more batches.
    let together = (0..100).any(|_| {
        let (answers, n) = ask(json!(prompts));
        let texts: Vec<Value> = answers.as_array().unwrap().iter().map(|answer| answer["content"].clone()).collect();
        assert_eq!(texts, alone);
        n == n_predict
    });
    assert!(together, "both prompts in one batch");
}
