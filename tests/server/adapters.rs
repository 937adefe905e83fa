//! LoRA adapters: `/lora-adapters`, and requests that say by how much.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::files;
use crate::rig::Server;

fn adapter(dir: &Path) -> PathBuf {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo.gguf");
    files::lora(&model, dir.join("attention.gguf"), 4, |name| name.contains("attn_q.") || name.contains("attn_v."))
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
fn requests_say_how_much_of_an_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let path = adapter(dir.path());
    let (plain, server) = (Server::start(&[]), Server::start(&["--lora-scaled", &format!("{}:2", path.display())]));
    assert_eq!(plain.get("/lora-adapters").ok(), json!([]));
    let there = server.get("/lora-adapters").ok();
    assert_eq!((&there[0]["id"], &there[0]["scale"]), (&json!(0), &json!(2.0)));
    assert_eq!(there[0]["path"], path.to_str().unwrap());
    let off = text(&plain, None);
    let whole = text(&server, None);
    assert_ne!(whole, off);
    // What one request has left in its slot is no use to another.
    for _ in 0..2 {
        assert_eq!(text(&server, Some(json!([{"id": 0, "scale": 0.0}]))), off);
        assert_eq!(text(&server, Some(json!([]))), off, "who is not named is off");
        assert_eq!(text(&server, Some(json!([{"id": 0, "scale": 2.0}]))), whole);
    }
    let settings = server.post("/completion", &body(None)).ok();
    assert_eq!(settings["generation_settings"]["lora"], json!([{"id": 0, "scale": 2.0}]));
    let error =
        server.post("/completion", &body(Some(json!([{"id": 1, "scale": 1.0}])))).error(400, "invalid_request_error");
    assert!(error.contains("Invalid adapter id"), "{error}");
    plain.post("/completion", &body(Some(json!([{"id": 0}])))).error(400, "invalid_request_error");
    // And for all who say nothing.
    assert_eq!(server.post("/lora-adapters", &json!([{"id": 0, "scale": 0.0}])).ok(), json!({"success": true}));
    assert_eq!(text(&server, None), off);
    assert_eq!(server.get("/lora-adapters").ok()[0]["scale"], 0.0);
    server.post("/lora-adapters", &json!({"id": 0})).error(400, "invalid_request_error");
    let unapplied = Server::start(&["--lora", path.to_str().unwrap(), "--lora-init-without-apply"]);
    assert_eq!(text(&unapplied, None), off);
}

#[test]
fn at_the_same_time_each_has_its_own() {
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

#[test]
fn saved_slots_are_of_their_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let path = adapter(dir.path());
    let flags = ["--lora", path.to_str().unwrap(), "--slot-save-path", dir.path().to_str().unwrap()];
    let server = Server::start(&flags);
    let mut asked = body(None);
    asked["id_slot"] = json!(0);
    server.post("/completion", &asked).ok();
    server.post("/slots/0?action=save", &json!({"filename": "slot"})).ok();
    server.post("/slots/0?action=restore", &json!({"filename": "slot"})).ok();
    server.post("/lora-adapters", &json!([{"id": 0, "scale": 0.5}])).ok();
    let error =
        server.post("/slots/0?action=restore", &json!({"filename": "slot"})).error(400, "invalid_request_error");
    assert!(error.contains("of another model"), "{error}");
}
