//! Texts that llama.cpp's pre-tokenizers read by recursion, on threads with little stack.

use serde_json::json;

use super::rig::Server;

#[test]
fn long_runs_end_no_server() {
    let server = Server::start(&["--override-kv", "tokenizer.ggml.pre=str:gpt-4o"]);
    for unit in [" ", "\n", "-", "汉"] {
        // They are read, and are too long for the context.
        let text = unit.repeat(20_000);
        let chat = json!({"messages": [{"role": "user", "content": format!("{text}.")}]});
        server.post("/v1/chat/completions", &chat).error(400, "exceed_context_size_error");
        server.post("/tokenize", &json!({"content": text})).ok();
    }
    let text = "a".repeat(100_000);
    for (path, body) in [
        ("/tokenize", json!({"content": text})),
        ("/completion", json!({"prompt": text})),
        ("/completion", json!({"prompt": "x", "logit_bias": [[text, 1]]})),
        ("/v1/messages", json!({"max_tokens": 1, "messages": [{"role": "user", "content": text}]})),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{path}: {}", answer.body);
        assert!(answer.body.to_string().contains("divide them"), "{path}: {}", answer.body);
    }
    let tool = json!({"type": "function", "function": {"name": " ".repeat(100_000), "parameters": {}}});
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "tools": [tool]});
    let error = server.post("/v1/chat/completions", &chat).error(400, "invalid_request_error");
    assert!(error.contains("longer than 512 bytes"), "{error}");
    server.post("/completion", &json!({"prompt": "x", "n_predict": 1})).ok();
}
