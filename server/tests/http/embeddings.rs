//! `/v1/embeddings` and `/embedding`.

use serde_json::{Value, json};

use super::rig::Server;
use crate::fixture::process::{demo_model, program};

const PATH: &str = "/v1/embeddings";

fn row(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|own| own.as_f64().unwrap()).collect()
}

fn length(row: &[f64]) -> f64 {
    row.iter().map(|value| value * value).sum::<f64>().sqrt()
}

#[test]
fn rows_are_of_length_one() {
    let server = Server::start(&["--embeddings", "--pooling", "last"]);
    let parts = json!({"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]});
    let body = json!({"input": ["hello world", "another", parts, [12, 34]], "model": "mine"});
    let all = server.post(PATH, &body).ok();
    assert_eq!((&all["object"], &all["model"]), (&json!("list"), &json!("mine")));
    let data = all["data"].as_array().unwrap();
    let rows: Vec<Vec<f64>> = data.iter().map(|own| row(&own["embedding"])).collect();
    assert!(data.iter().enumerate().all(|(at, own)| own["index"] == at));
    assert!(rows.iter().all(|row| (length(row) - 1.0).abs() < 1e-5));
    assert_ne!(rows[0], rows[1]);
    let close = rows[0].iter().zip(&rows[2]).all(|(a, b)| (a - b).abs() < 1e-4);
    assert!(close, "one text, in one part or two");
    let encoded = server.post(PATH, &json!({"input": "hello world", "encoding_format": "base64"})).ok();
    let n_bytes = encoded["data"][0]["embedding"].as_str().unwrap().trim_end_matches('=').len() * 3 / 4;
    assert_eq!(n_bytes, rows[0].len() * 4);
    let native = server.post("/embedding", &json!({"content": "hello world"})).ok();
    assert!((length(&row(&native[0]["embedding"][0])) - 1.0).abs() < 1e-5);
    let short = row(&server.post(PATH, &json!({"input": "hello world", "dimensions": 8})).ok()["data"][0]["embedding"]);
    assert_eq!(short.len(), 8);
    let scale = rows[0][0] / short[0];
    assert!((length(&short) - 1.0).abs() < 1e-5);
    assert!(short.iter().zip(&rows[0]).all(|(own, whole)| (own * scale - whole).abs() < 1e-5), "the first eight");
    let message = server.post(PATH, &json!({"input": "x", "dimensions": 1 << 20})).refused();
    assert!(message.contains("'dimensions'"), "{message}");
    for body in [json!({}), json!({"input": []}), json!({"input": "x", "encoding_format": "y"})] {
        server.post(PATH, &body).refused();
    }
    server.post("/v1/chat/completions", &json!({"messages": []})).error(501, "not_supported_error");
}

#[test]
fn other_poolings() {
    let server = Server::start(&["--embeddings", "--pooling", "none"]);
    let native = server.post("/embeddings", &json!({"input": [12, 34, 56]})).ok();
    assert_eq!(native[0]["embedding"].as_array().unwrap().len(), 3);
    server.post(PATH, &json!({"input": "x"})).refused();
    let mut ranker = program(env!("CARGO_BIN_EXE_hobbit-server"));
    let refused =
        ranker.arg("-m").arg(demo_model()).args(["--port", "0", "--embeddings", "--pooling", "rank"]).output();
    let refused = refused.unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(1) && message.contains("no head that ranks"), "{message}");
    Server::start(&[]).post(PATH, &json!({"input": "x"})).error(501, "not_supported_error");
}
