//! Requests in `/metrics`, `/slots` and `/experts` while the server works on them.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::rig::{Server, until, with};

/// A prompt that is one evaluation, so that nothing is published between its begin and its end.
#[test]
fn a_prompt_is_seen_while_it_is_read() {
    let flags = "-np 1 -c 4096 -b 4096 -ub 4096 --expert-cache 50% --metrics";
    let server = Server::start(&flags.split(' ').collect::<Vec<_>>());
    let body = json!({"prompt": "The river runs. ".repeat(400), "n_predict": 1, "cache_prompt": false});
    let is_seen = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_seen.load(Ordering::Relaxed) {
                server.post("/completion", &body).ok();
            }
        });
        until("metrics count the request", || {
            let text = server.get("/metrics").body;
            text.as_str().unwrap().contains("\nllamacpp:requests_processing 1\n")
        });
        until("the prompt's layers count", || {
            let prompt = server.get("/experts").ok()["slots"][0]["prompt"].clone();
            let (total, processed) = (prompt["total"].as_u64(), prompt["processed"].as_u64());
            total.zip(processed).is_some_and(|(total, processed)| {
                0 < processed && processed < total && prompt["seconds_left"].as_f64().unwrap() > 0.0
            })
        });
        until("the slot's do", || {
            let slot = server.get("/slots").ok()[0].clone();
            let (all, processed) = (&slot["n_prompt_tokens"], &slot["n_prompt_tokens_processed"]);
            slot["is_processing"] == true && processed.as_u64() > Some(0) && processed.as_u64() < all.as_u64()
        });
        is_seen.store(true, Ordering::Relaxed);
    });
    let body = with(body, json!({"return_progress": true}));
    until("a stream tells of a part of its piece", || {
        let events: Vec<_> = server.stream("/completion", &body).collect();
        let mut told = events.iter().map(|event| &event.data["prompt_progress"]);
        told.any(|now| now["processed"].as_u64() > Some(0) && now["processed"].as_u64() < now["total"].as_u64())
    });
}
