//! hobbit-server with a projector.

use std::collections::BTreeMap;
use std::sync::Mutex;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use hobbit_synth::{Projector as Kind, Spec};

use crate::fixture::media::*;
use crate::http::rig::{Server, least_mib, with};

const CHAT: &str = "/v1/chat/completions";

fn serve(files: &Files) -> Server {
    let (model, projector) = (files.model.to_str().unwrap(), files.projector.path.to_str().unwrap());
    Server::start(&["-m", model, "--mmproj", projector])
}

fn url(kind: &str, bytes: &[u8]) -> String {
    format!("data:image/{kind};base64,{}", STANDARD.encode(bytes))
}

fn asking(part: Value) -> Value {
    json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}], "max_tokens": 6})
}

fn image(bytes: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": url("png", bytes)}})
}

#[test]
fn images_in_all_endpoints() {
    let server = serve(&files("qwen3vlmoe", Kind::Qwen2vl));
    assert_eq!(server.get("/props").ok()["modalities"], json!({"vision": true, "video": false, "audio": false}));
    let (one, other) = (png(130, 70, None), png(70, 130, None));
    let ask = |bytes: &[u8]| {
        let mut body = asking(image(bytes));
        body["logprobs"] = true.into();
        server.post(CHAT, &body).ok()
    };
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let first = ask(&one);
    let n = first["usage"]["prompt_tokens"].as_u64().unwrap();
    // The same image is not evaluated again, another one is.
    let again = ask(&one);
    assert_eq!((text(&again), cached(&again)), (text(&first), n - 1));
    let differs = ask(&other);
    assert!(cached(&differs) < n / 2, "{differs}");
    // A model of random weights may write the same text, but not with the same probabilities.
    assert_ne!(differs["choices"][0]["logprobs"], first["choices"][0]["logprobs"]);
    let back = ask(&one);
    assert_eq!(text(&back), text(&first));

    let source = json!({"type": "base64", "media_type": "image/png", "data": STANDARD.encode(&one)});
    let content = json!([{"type": "text", "text": "See"}, {"type": "image", "source": source}]);
    let body = json!({"max_tokens": 6, "messages": [{"role": "user", "content": content}]});
    assert_eq!(server.post("/v1/messages", &body).ok()["content"][0]["text"], text(&first));
    let content =
        json!([{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": url("png", &one)}]);
    let body = json!({"max_output_tokens": 6, "input": [{"role": "user", "content": content}]});
    assert_eq!(server.post("/v1/responses", &body).ok()["output"][0]["content"][0]["text"], text(&first));
    // Two requests at once, and a stream.
    let events: Vec<_> = server.stream(CHAT, &asking(image(&other))).collect();
    assert!(events.len() > 2);
    let counted = server.post("/v1/messages/count_tokens", &body).status;
    assert!(counted == 200 || counted == 400);
}

#[test]
fn hostile_media_get_400() {
    let server = serve(&files("qwen3moe", Kind::Gemma3));
    for (bytes, part) in hostile() {
        let message = server.post(CHAT, &asking(image(&bytes))).refused();
        assert!(message.contains(part), "{message}");
    }
    for (at, value) in (0..jpeg().len()).step_by(37).zip([0, 0xff].into_iter().cycle()) {
        let mut bytes = jpeg();
        bytes[at] = value;
        let status = server.post(CHAT, &asking(image(&bytes))).status;
        assert!(status == 200 || status == 400, "{status}");
    }
    let with_url = |url: &str| asking(json!({"type": "image_url", "image_url": {"url": url}}));
    for url in ["http://127.0.0.1:1/x.png", "file:///etc/passwd", "data:image/png;base64,???", "x"] {
        server.post(CHAT, &with_url(url)).refused();
    }
    let sound = json!({"type": "input_audio", "input_audio": {"data": STANDARD.encode(wav(None)), "format": "wav"}});
    assert!(server.post(CHAT, &asking(sound)).refused().contains("sound"));
    // A marker of llama.cpp's is a text.
    server.post(CHAT, &asking(json!({"type": "text", "text": MARKER}))).ok();
    server.post(CHAT, &asking(image(&jpeg()))).ok();
}

/// An image of 10 KiB and 1,024 tokens: one is too long for a slot of 512, three are too large for the memory.
#[test]
fn images_are_refused_before_all_are_read() {
    let files = files("qwen3vlmoe", Kind::Qwen2vl);
    let (model, projector) = (files.model.to_str().unwrap(), files.projector.path.to_str().unwrap());
    let image = json!({"type": "image_url", "image_url": {"url": url("jpeg", &grey(1024, 1024, &[]))}});
    let asking = |n: usize| json!({"messages": [{"role": "user", "content": vec![&image; n]}], "max_tokens": 1});
    let count = format!("{CHAT}/input_tokens");

    let server = serve(&files);
    for path in [CHAT, &count] {
        server.post(path, &asking(1)).error(400, "exceed_context_size_error");
    }
    drop(server);

    let server = Server::start(&["-m", model, "--mmproj", projector, "-np", "1", "-c", "8192"]);
    server.post(CHAT, &asking(1)).ok();
    server.post(&count, &asking(2)).ok();
    let before = server.peak_bytes();
    for path in [CHAT, &count] {
        let message = server.post(path, &asking(32)).error(413, "invalid_request_error");
        assert!(message.contains("--max-body"), "{message}");
    }
    let source = json!({"type": "base64", "media_type": "image/jpeg", "data": STANDARD.encode(grey(1024, 1024, &[]))});
    let content = vec![json!({"type": "image", "source": source}); 32];
    let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": content}]});
    assert_eq!(server.post("/v1/messages/count_tokens", &body).status, 413);
    // Pixels of 32 such images take 384 MiB as numbers.
    let more = server.peak_bytes() - before;
    assert!(more < 96 << 20, "{} MiB", more >> 20);
    // The template alone reads none.
    server.post("/apply-template", &asking(32)).ok();
}

#[test]
fn sound_in_messages() {
    let files = files("qwen3moe", Kind::Qwen2a);
    let (model, projector) = (files.model.to_str().unwrap(), files.projector.path.to_str().unwrap());
    let server = Server::start(&["-m", model, "--mmproj", projector, "-c", "2048"]);
    assert_eq!(server.get("/props").ok()["modalities"], json!({"vision": false, "video": false, "audio": true}));
    let ask = |bytes: &[u8]| {
        let data = STANDARD.encode(bytes);
        server.post(CHAT, &asking(json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}))).ok()
    };
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let first = ask(&wav(None));
    let n = first["usage"]["prompt_tokens"].as_u64().unwrap();
    // 30 seconds.
    assert!(n > 750, "{first}");
    let again = ask(&wav(None));
    assert_eq!((text(&again), cached(&again)), (text(&first), n - 1));
    let mut other = wav(None);
    other[44..].iter_mut().step_by(2).for_each(|byte| *byte ^= 0x55);
    assert!(cached(&ask(&other)) < n / 2);
    server.post(CHAT, &asking(image(&jpeg()))).refused();
    // The fault is the sound's, and later requests are answered.
    let ask = |bytes: &[u8]| {
        let data = STANDARD.encode(bytes);
        server.post(CHAT, &asking(json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})))
    };
    for sample in [f32::NAN, 1e38] {
        let message = ask(&wav_of(&[sample; 1600])).refused();
        assert!(message.contains("a sample of"), "{message}");
    }
    assert_eq!(text(&ask(&wav(None)).ok()), text(&first));
}

/// A recurrent state cannot be rewound: a conversation goes on from checkpoints behind its images.
#[test]
fn conversations_about_an_image_go_on_from_checkpoints() {
    let server = serve(&files("qwen35moe", Kind::Qwen2vl));
    let see = |bytes: &[u8]| json!([{"type": "text", "text": "See"}, image(bytes), {"type": "text", "text": "Well?"}]);
    let ask = |messages: Value| {
        let body = json!({"messages": messages, "max_tokens": 4, "ignore_eos": true, "id_slot": 0});
        let answer = server.post(CHAT, &body).ok();
        let of = |field: &str| answer["timings"][field].as_u64().unwrap();
        (answer["choices"][0]["message"]["content"].clone(), of("cache_n"), of("prompt_n"))
    };
    let (one, other) = (png(130, 70, None), png(70, 130, None));
    let first = json!([{"role": "user", "content": see(&one)}]);
    let (text, known, n) = ask(first.clone());
    assert_eq!(known, 0);
    let (again, known, evaluated) = ask(first);
    assert!(again == text && evaluated <= 2 && known + evaluated == n, "{known} {evaluated} {n}");
    // A second turn, whose answer was not the model's: from the answer's header on, behind the image.
    let second = |bytes: &[u8]| {
        json!([{"role": "user", "content": see(bytes)}, {"role": "assistant", "content": "Little."},
            {"role": "user", "content": "And now?"}])
    };
    let (text, known, _) = ask(second(&one));
    assert!(known >= n - 6, "{known} of {n}");
    let (differs, known, _) = ask(second(&other));
    assert!(known < n - 6, "{known}");
    assert_ne!(differs, text);
    assert_eq!(ask(second(&one)).0, text);
}

/// Sixteen slots with long prompts, candidates, scored prompts, images, and slots that are saved and restored.
#[test]
fn a_mix_of_all_requests_keeps_to_the_memory_budget() {
    // Without a projector nothing is reserved for images.
    let cases = [(300, 4, true), (60_000, 4, true), (60_000, 60, true), (300, 4, false), (60_000, 4, false)];
    for (vocab, more, has_images) in cases.into_iter().chain([(60_000, 60, false)]) {
        let spec = Spec { layers: 4, experts: 32, topk: 2, embd: 128, ff: 512, vocab, ..Spec::tiny("qwen3vlmoe") };
        let files = files_of(&spec, Kind::Qwen2vl);
        let (model, projector) = (files.model.to_str().unwrap(), files.projector.path.to_str().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let flags = ["-m", model, "-np", "16", "--kv-unified", "-c", "4096", "--max-body", "1M"];
        let media: &[&str] = if has_images { &["--mmproj", projector] } else { &[] };
        let flags = [&flags[..], media, &["--slot-save-path", dir.path().to_str().unwrap()]].concat();
        let mib = least_mib(&flags) + more;
        let server = Server::start(&[&flags[..], &["--mem-budget", &format!("{mib}M")]].concat());
        let prompt = |n: usize| (0..n).map(|at| 5 + at * 7 % 200).collect::<Vec<_>>();
        let text = json!({"type": "text", "text": "Read this. ".repeat(40)});
        let images = [image(&png(130, 70, None)), image(&black((2000, 1500), (8, 2, false)))];
        let parts = if has_images { images } else { [text.clone(), text] };
        let ask = |at: usize, round: usize| match at % 6 {
            0 => ("/completion", json!({"prompt": prompt(900), "n_predict": 8, "n_probs": 300})),
            1 => ("/completion", json!({"prompt": prompt(20 + at), "n_predict": 40, "n_probs": 100})),
            2 => ("/v1/completions", json!({"prompt": prompt(250), "max_tokens": 4, "echo": true, "logprobs": 5})),
            3 => (CHAT, with(asking(parts[round % 2].clone()), json!({"logprobs": true, "top_logprobs": 20}))),
            4 => ("/slots/3?action=save", json!({"filename": format!("slot{at}")})),
            _ => ("/slots/4?action=restore", json!({"filename": "slot4"})),
        };
        let counts: Mutex<BTreeMap<(String, u16), usize>> = Mutex::default();
        std::thread::scope(|scope| {
            for at in 0..24 {
                let (server, counts, ask) = (&server, &counts, &ask);
                scope.spawn(move || {
                    for round in 0..3 {
                        let (path, body) = ask(at, round);
                        let status = server.post(path, &with(body, json!({"ignore_eos": true}))).status;
                        *counts.lock().unwrap().entry((path.to_owned(), status)).or_default() += 1;
                    }
                });
            }
        });
        let counts = counts.into_inner().unwrap();
        for path in ["/completion", "/v1/completions", CHAT] {
            assert!(counts.contains_key(&(path.to_owned(), 200)), "{vocab} tokens: {counts:?}");
        }
        // Memory that others hold, or a context that is full: later. The larger image may take more than there is.
        let are_known = counts.keys().all(|(path, status)| match status {
            200 | 503 => true,
            413 => path == CHAT,
            400 => path.starts_with("/slots"),
            // The slot to save holds an image.
            501 => has_images && path == "/slots/3?action=save",
            _ => false,
        });
        assert!(are_known, "{vocab} tokens: {counts:?}");
        let peak = server.peak_bytes();
        assert!(peak <= mib << 20, "{vocab} tokens: {} KiB resident, {mib} MiB allowed: {counts:?}", peak >> 10);
    }
}

/// Experts lose slots and have them back while other requests are evaluated: within the budget.
#[test]
fn images_come_while_others_generate() {
    let files = files_of(
        &Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff: 512, ..Spec::tiny("qwen3vlmoe") },
        Kind::Qwen2vl,
    );
    let (model, projector) = (files.model.to_str().unwrap(), files.projector.path.to_str().unwrap());
    let flags = ["-m", model, "--mmproj", projector, "-c", "2048"];
    let mib = least_mib(&flags);
    let budget = format!("{}M", mib + 40);
    let server = Server::start(&[&flags[..], &["--mem-budget", &budget]].concat());
    let story = json!({"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 200, "ignore_eos": true});
    std::thread::scope(|scope| {
        scope.spawn(|| server.post(CHAT, &story).ok());
        for _ in 0..4 {
            server.post(CHAT, &asking(image(&png(70, 130, None)))).ok();
            server.post(CHAT, &asking(image(&png(130, 70, None)))).ok();
        }
    });
    let peak = server.peak_bytes();
    assert!(peak <= (mib + 40) << 20, "{peak} bytes resident, {budget} allowed");
}
