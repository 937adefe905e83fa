//! Vertex AI's predictions.

use std::process::Command;

use serde_json::{Value, json};

use crate::rig::Server;

const MODE: (&str, &str) = ("AIP_MODE", "PREDICTION");
const PORT: (&str, &str) = ("AIP_HTTP_PORT", "0");

fn chat(text: &str) -> Value {
    json!({
        "@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": text}],
        "max_tokens": 8, "cache_prompt": false,
    })
}

#[test]
fn every_instance_is_answered_as_its_endpoint_would() {
    // The port is of the variable.
    let server = Server::start_in(&[MODE, PORT], &["--port", "1"]);
    let mut plain = chat("What is the best book?");
    plain.as_object_mut().unwrap().shift_remove("@requestFormat");
    let expected = server.post("/v1/chat/completions", &plain).ok();
    let mut streamed = chat("What is the best book?");
    streamed["stream"] = json!(true);
    let body = json!({
        "instances": [
            streamed,
            {"@requestFormat": "/completion", "prompt": "One", "n_predict": 4},
            {"@requestFormat": "completions", "prompt": "One", "max_tokens": 4},
            {"@requestFormat": "props"},
            {"@requestFormat": "predict", "instances": []},
            {"@requestFormat": "completion"},
            {"prompt": "One"},
            "One",
        ],
        "parameters": {},
    });
    let answer = server.post("/predict", &body).ok();
    let predictions = answer["predictions"].as_array().unwrap();
    assert_eq!(predictions.len(), 8);
    assert_eq!(predictions[0]["choices"][0]["message"], expected["choices"][0]["message"]);
    assert_eq!(predictions[1]["tokens_predicted"], 4);
    assert_eq!(predictions[2]["object"], "text_completion");
    assert_eq!(predictions[3]["total_slots"], 2);
    for (at, message) in [
        (4, "no handler registered for @requestFormat: predict"),
        (5, "\"prompt\" is required"),
        (6, "each instance must include a string @requestFormat"),
        (7, "each instance must be a JSON object"),
    ] {
        let error = &predictions[at]["error"];
        assert_eq!((&error["code"], &error["message"]), (&json!(400), &json!(message)));
        assert_eq!(error["type"], "invalid_request_error");
    }
}

#[test]
fn what_is_no_list_of_instances_is_refused() {
    let server = Server::start_in(&[MODE, PORT], &[]);
    for body in [json!({}), json!({"instances": {}})] {
        let message = server.post("/predict", &body).error(400, "invalid_request_error");
        assert_eq!(message, "request body must include an array field named instances");
    }
    let many = json!({"instances": vec![Value::Null; 129]});
    let message = server.post("/predict", &many).error(400, "invalid_request_error");
    assert_eq!(message, "instances array exceeds maximum size of 128");
    assert_eq!(server.post("/predict", &json!({"instances": []})).ok(), json!({"predictions": []}));
}

#[test]
fn paths_are_of_the_variables() {
    let variables = [MODE, PORT, ("AIP_PREDICT_ROUTE", "/v1/endpoints/1:predict"), ("AIP_HEALTH_ROUTE", "/")];
    let server = Server::start_in(&variables, &["--api-key", "secret"]);
    // Health is asked for without a key, and is no page.
    assert_eq!(server.get("/").ok(), json!({"status": "ok"}));
    assert_eq!(server.get("/health").ok(), json!({"status": "ok"}));
    let body = json!({"instances": [chat("Hello")]});
    server.post("/v1/endpoints/1:predict", &body).error(401, "authentication_error");
    let server = server.with_key("secret");
    let answer = server.post("/v1/endpoints/1:predict", &body).ok();
    assert_eq!(answer["predictions"][0]["usage"]["completion_tokens"], 8);
    server.post("/predict", &body).error(404, "not_found_error");
}

#[test]
fn without_the_mode_there_is_no_such_path() {
    let server = Server::start_in(&[("AIP_PREDICT_ROUTE", "/predict")], &[]);
    server.post("/predict", &json!({"instances": []})).error(404, "not_found_error");
}

#[test]
fn the_path_of_another_endpoint_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hobbit-server"));
    let output = command.envs([MODE, PORT, ("AIP_PREDICT_ROUTE", "/completion")]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("AIP_PREDICT_ROUTE=/completion: another endpoint has this path"), "{said}");
}
