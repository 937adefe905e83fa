//! `/v1/completions`.

use serde_json::{Value, json};

use super::rig::{Event, Server};

const PATH: &str = "/v1/completions";

#[test]
fn a_stream_says_what_an_answer_says() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "The river runs", "max_tokens": 24, "logprobs": 2, "cache_prompt": false});
    let whole = server.post(PATH, &body).ok();
    assert_eq!(whole["object"], "text_completion");
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 24);
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    let text: String = events.iter().filter_map(|event| event.data.pointer("/choices/0/text")?.as_str()).collect();
    assert_eq!(text, choice["text"].as_str().unwrap());
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done.data, Value::Null);
    assert_eq!(last.data["usage"]["completion_tokens"], 24);
    assert_eq!(last.data["choices"][0]["finish_reason"], "length");
}

#[test]
fn several_prompts_are_several_choices() {
    let server = Server::start(&[]);
    let whole = server.post(PATH, &json!({"prompt": ["One", "Two", "One"], "max_tokens": 8})).ok();
    let texts: Vec<&str> = (0..3).map(|at| whole["choices"][at]["text"].as_str().unwrap()).collect();
    assert_eq!(texts[0], texts[2]);
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    let stopped = server.post(PATH, &json!({"prompt": "One", "max_tokens": 8, "stop": texts[0].split_at(3).1})).ok();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["text"], texts[0][..3]);
}

#[test]
fn candidates_are_bounded_by_what_they_take() {
    let server = Server::start(&[]);
    let all = json!({"prompt": "One", "n_predict": 1, "n_probs": 1 << 30});
    let whole = server.post("/completion", &all).ok();
    assert!(whole["completion_probabilities"][0]["top_logprobs"].as_array().unwrap().len() > 1000);
    for body in [
        json!({"prompt": "One", "logprobs": 1 << 30}),
        json!({"prompt": "One", "logprobs": 1 << 30, "max_tokens": 400}),
    ] {
        let error = server.post(PATH, &body).error(400, "invalid_request_error");
        assert!(error.contains("ask for fewer"), "{error}");
    }
    server.post(PATH, &json!({"prompt": "One", "logprobs": 5, "max_tokens": 4})).ok();
}

#[test]
fn what_cannot_be_continued_is_said() {
    let server = Server::start(&[]);
    for (body, expected) in [
        (json!({}), "\"prompt\" is required"),
        (json!({"prompt": "x", "echo": true}), "Only no echo is supported"),
        (json!({"prompt": "x", "suffix": "y"}), "Unsupported param: suffix"),
    ] {
        assert_eq!(server.post(PATH, &body).error(400, "invalid_request_error"), expected);
    }
}
