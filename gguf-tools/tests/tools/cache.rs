//! `pull`, `list` and `rm`, with a Hub of the test's own.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::server::{Reply, Server};
use crate::{Ran, run_command};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf");

/// A Hub that has the demo model as `a/b`.
fn hub() -> Server {
    let bytes = std::fs::read(DEMO).unwrap();
    Server::new(move |request| {
        if request.path.starts_with("/api/models/a/b/revision/main") {
            let file = json!({"rfilename": "demo-Q8_0.gguf", "size": bytes.len(), "blobId": "d".repeat(40)});
            return Reply::new(200, json!({"sha": COMMIT, "siblings": [file]}).to_string());
        }
        match request.path == format!("/a/b/resolve/{COMMIT}/demo-Q8_0.gguf") {
            true => Reply::file(request, &bytes, "\"1\""),
            false => Reply::new(404, "no"),
        }
    })
}

fn tool(hub: &Server, home: &Path, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gguf-tools"));
    for name in ["MODEL_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"]
    {
        command.env_remove(name);
    }
    run_command(command.args(args).env("HF_ENDPOINT", hub.url("")).env("HF_HOME", home))
}

#[test]
fn models_are_pulled_after_a_forecast_listed_and_removed() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let run = |args: &[&str]| tool(&hub, home.path(), args);
    let empty = run(&["list"]);
    assert_eq!((empty.code, empty.out.as_str()), (Some(0), ""));
    let nothing = run(&["rm", "a/b"]);
    assert!(nothing.code == Some(1) && nothing.err.ends_with("; nothing is downloaded\n"), "{}", nothing.err);
    let pulled = run(&["pull", "a/b"]);
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    let file = pulled.out.lines().last().unwrap();
    assert_eq!(std::fs::read(file).unwrap(), std::fs::read(DEMO).unwrap());
    assert!(pulled.out.contains(" t/s\n") && pulled.out.contains("GiB"), "{}", pulled.out);
    // The beginning for the forecast, then the file.
    let asked: Vec<_> = hub.seen().into_iter().filter(|request| request.path.starts_with("/a/b/resolve/")).collect();
    assert_eq!(asked.iter().map(|own| own.header("range")).collect::<Vec<_>>(), [Some("bytes=0-25165823"), None]);
    // Again: nothing is missing.
    assert_eq!(run(&["pull", "a/b:Q8_0"]).code, Some(0));
    assert!(hub.seen().iter().all(|request| request.path.starts_with("/api/")));
    let size = std::fs::metadata(DEMO).unwrap().len();
    let listed = run(&["list"]).out;
    assert!(listed.starts_with("a/b:Q8_0  ") && listed.contains("12.01 MiB") && listed.contains(" ago"), "{listed}");
    let json: Value = serde_json::from_str(&run(&["list", "--json"]).out).unwrap();
    assert_eq!((&json[0]["name"], &json[0]["bytes"]), (&json!("a/b:Q8_0"), &json!(size)));
    assert!(json[0]["used"].as_u64().unwrap() > 0 && json[0]["files"] == json!([file]));
    let wrong = run(&["rm", "a/b"]);
    assert!(wrong.code == Some(1) && wrong.err.contains("there are: a/b:Q8_0"), "{}", wrong.err);
    assert_eq!(run(&["rm", "a/b:Q8_0"]).out, "removed a/b:Q8_0 (12.01 MiB)\n");
    assert_eq!(run(&["list"]).out, "");
    let missing = run(&["pull", "a/none"]);
    assert!(missing.code == Some(1) && missing.err.contains("404"), "{}", missing.err);
    assert_eq!(run(&["pull", "../none"]).code, Some(1));
}
