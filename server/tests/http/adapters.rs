//! LoRA adapters: `/lora-adapters`, and scales of requests.

use std::path::{Path, PathBuf};

use hobbit_synth::Spec;
use serde_json::{Value, json};

use super::rig::{Server, with};
use crate::fixture::adapters as files;
use crate::fixture::process::demo_model;
use crate::fixture::write;

fn adapter(dir: &Path) -> PathBuf {
    files::lora(&demo_model(), dir.join("attention.gguf"), 4, |name| {
        name.contains("attn_q.") || name.contains("attn_v.")
    })
}

fn body(lora: Option<Value>) -> Value {
    let mut body = json!({"prompt": "In the beginning God created", "n_predict": 16});
    body["lora"] = lora.unwrap_or(Value::Null);
    body
}

fn text(server: &Server, lora: Option<Value>) -> String {
    server.post("/completion", &body(lora)).ok()["content"].as_str().unwrap().to_owned()
}

#[test]
fn requests_scale_adapters() {
    let dir = tempfile::tempdir().unwrap();
    let path = adapter(dir.path());
    let slots = ["--slot-save-path", dir.path().to_str().unwrap()];
    let scaled = ["--lora-scaled", &format!("{}:2", path.display())];
    let (plain, server) = (Server::start(&[]), Server::start(&[slots, scaled].concat()));
    assert_eq!(plain.get("/lora-adapters").ok(), json!([]));
    let there = server.get("/lora-adapters").ok();
    assert_eq!((&there[0]["id"], &there[0]["scale"]), (&json!(0), &json!(2.0)));
    assert_eq!(there[0]["path"], path.to_str().unwrap());
    let off = text(&plain, None);
    let whole = text(&server, None);
    assert_ne!(whole, off);
    // Tokens evaluated with another scale are not reused.
    for _ in 0..2 {
        assert_eq!(text(&server, Some(json!([{"id": 0, "scale": 0.0}]))), off);
        assert_eq!(text(&server, Some(json!([]))), off, "adapters not listed are off");
        assert_eq!(text(&server, Some(json!([{"id": 0, "scale": 2.0}]))), whole);
    }
    let settings = server.post("/completion", &body(None)).ok();
    assert_eq!(settings["generation_settings"]["lora"], json!([{"id": 0, "scale": 2.0}]));
    let error = server.post("/completion", &body(Some(json!([{"id": 1, "scale": 1.0}])))).refused();
    assert!(error.contains("Invalid adapter id"), "{error}");
    plain.post("/completion", &body(Some(json!([{"id": 0}])))).refused();
    for scale in [1e38, 1e10, -101.0] {
        let lora = json!([{"id": 0, "scale": scale}]);
        let error = server.post("/completion", &body(Some(lora.clone()))).refused();
        assert!(error.contains("from -100 to 100"), "{error}");
        server.post("/lora-adapters", &lora).refused();
    }
    // A saved slot keeps its scale.
    server.post("/completion", &with(body(None), json!({"id_slot": 0}))).ok();
    let slot = |action: &str| server.post(&format!("/slots/0?action={action}"), &json!({"filename": "slot"}));
    slot("save").ok();
    slot("restore").ok();
    // The default for requests that name no scale.
    assert_eq!(server.post("/lora-adapters", &json!([{"id": 0, "scale": 0.0}])).ok(), json!({"success": true}));
    assert_eq!(text(&server, None), off);
    assert_eq!(server.get("/lora-adapters").ok()[0]["scale"], 0.0);
    let error = slot("restore").refused();
    assert!(error.contains("of another model"), "{error}");
    server.post("/lora-adapters", &json!({"id": 0})).refused();
    let unapplied = Server::start(&["--lora", path.to_str().unwrap(), "--lora-init-without-apply"]);
    assert_eq!(text(&unapplied, None), off);
}

#[test]
fn concurrent_requests_keep_their_own_scale() {
    let dir = tempfile::tempdir().unwrap();
    let path = adapter(dir.path());
    // Experts out of memory: every step goes through slots.
    let server = Server::start(&["--lora", path.to_str().unwrap(), "--expert-cache", "50%"]);
    let lora = |scale: f64| Some(json!([{"id": 0, "scale": scale}]));
    let alone = [text(&server, lora(1.0)), text(&server, lora(-1.0))];
    assert_ne!(alone[0], alone[1]);
    let together = std::thread::scope(|scope| {
        let ask = |scale: f64| {
            let server = &server;
            scope.spawn(move || text(server, Some(json!([{"id": 0, "scale": scale}]))))
        };
        let asked: Vec<_> = [1.0, -1.0, 1.0, -1.0].into_iter().map(ask).collect();
        asked.into_iter().map(|own| own.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(together, [&alone[0], &alone[1], &alone[0], &alone[1]].map(String::clone));
}

/// The adapter of [`files::overflow`] overflows at this token.
const POISON: u64 = 400;

/// Asks slot `slot` to continue a prompt by `n_predict` tokens, with the adapter or without.
fn ask(slot: usize, prompt: &[u64], n_predict: usize, scale: f64) -> Value {
    json!({
        "prompt": prompt, "n_predict": n_predict, "id_slot": slot, "ignore_eos": true,
        "return_tokens": true, "cache_prompt": false,
        "lora": [{"id": 0, "scale": scale}], "logit_bias": [[POISON, false]],
    })
}

/// Keys and values that are not finite stay in a cache that all slots share, until they are cleared with their data.
#[test]
fn a_request_that_overflows_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), &Spec::tiny("llama"));
    let lora = files::overflow(&model, dir.path().join("overflow.gguf"), POISON);
    let (model, lora) = (model.to_str().unwrap(), lora.to_str().unwrap());
    for attention in ["off", "on"] {
        let server = Server::start(&["-m", model, "--lora", lora, "-fa", attention, "-np", "3", "-c", "3072"]);
        let healthy: Vec<u64> = (10..40).collect();
        // The adapter adds nothing to a healthy text: its scale alone decides what shares a batch.
        let texts = |n_predict: usize| {
            let text = |slot| server.post("/completion", &ask(slot, &healthy, n_predict, 1.0)).ok()["tokens"].clone();
            [text(0), text(1), text(2)]
        };
        let before = texts(24);
        let poisoned: Vec<u64> = healthy.iter().copied().chain([POISON]).chain(50..80).collect();
        // In its prompt; and as the first token that it generates, whose evaluation the healthy one shares.
        let mut late = ask(1, &healthy, 8, 1.0);
        late["logit_bias"] = json!([[POISON, 1000.0]]);
        let mut other_scale = late.clone();
        other_scale["lora"][0]["scale"] = json!(0.5);
        for poison in [ask(1, &poisoned, 8, 0.5), ask(1, &poisoned, 8, 1.0), late, other_scale] {
            let mut events = server.stream("/completion", &ask(0, &healthy, 800, 1.0));
            let mut tokens = vec![events.next().unwrap()];
            let error = server.post("/completion", &poison).error(500, "server_error");
            let causes = ["scale of a LoRA adapter", "control vector", "damaged weights"];
            let places = causes.map(|cause| error.find(cause).unwrap_or_else(|| panic!("{cause}: {error}")));
            assert!(places.is_sorted(), "{error}");
            tokens.extend(events);
            let tokens: Vec<&Value> =
                tokens.iter().flat_map(|event| event.data["tokens"].as_array().unwrap()).collect();
            // Its cells may lie elsewhere now, and greedy choices that are close may differ by the last bits.
            assert_eq!(tokens.len(), 800, "-fa {attention}: {poison}");
            assert_eq!(json!(tokens[..24]), before[0], "-fa {attention}: {poison}");
            assert_eq!(texts(24), before, "-fa {attention}: {poison}");
        }
    }
}

#[test]
fn a_control_vector_that_overflows_fails_requests_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let vector = files::control_vector(&demo_model(), dir.path().join("vector.gguf"), 1..=2);
    for layer in 1..=2 {
        files::set_first(&vector, &format!("direction.{layer}"), 3e38);
    }
    let server = Server::start(&["--control-vector", vector.to_str().unwrap()]);
    for _ in 0..3 {
        let error = server.post("/completion", &body(None)).error(500, "server_error");
        assert!(error.contains("control vector"), "{error}");
    }
    server.wait_for_busy(0);
}
