//! The context that all slots share, where it is full.

use serde_json::{Value, json};

use super::rig::Server;

/// Asks for text without an end.
fn endless(prompt: &str) -> Value {
    json!({"prompt": prompt, "n_predict": -1, "ignore_eos": true, "cache_prompt": false})
}

/// Requests within their share of the context never pay for those that take all of it, which end as one that has filled
/// its own.
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
