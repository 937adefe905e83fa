//! `/v1/completions` as OpenAI has it: prompts that are repeated with their tokens' probabilities, suffixes, and the
//! best of several answers.

use serde_json::{Value, json};

use super::rig::{Event, Server, with};

const PATH: &str = "/v1/completions";

/// A prompt of more tokens than are scored at once.
const PROMPT: &str = "And God said, Let there be light: and there was light. And God saw the light, that it was good: \
                      and God divided the light from the darkness. And God called the light Day, and the darkness he \
                      called Night. And the evening and the morning were the first day.";

fn list<'a>(choice: &'a Value, name: &str) -> &'a [Value] {
    choice["logprobs"][name].as_array().unwrap_or_else(|| panic!("{name} of {choice}"))
}

/// Largest difference of logarithms that were computed in batches of other widths, or in other cells of the context:
/// last bits may change the choice of an expert.
const NEAR: f64 = 0.1;

fn near((a, b): (&Value, &Value)) -> bool {
    (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < NEAR
}

/// The greatest of a token's candidates.
fn greatest(top: &Value) -> f64 {
    top.as_object().unwrap().values().map(|log| log.as_f64().unwrap()).fold(f64::NEG_INFINITY, f64::max)
}

#[test]
fn prompts_are_scored_token_by_token() {
    let server = Server::start(&[]);
    let tokens = server.post("/tokenize", &json!({"content": PROMPT, "add_special": true})).ok()["tokens"].clone();
    let tokens = tokens.as_array().unwrap();
    assert!(tokens.len() > 40, "{}", tokens.len());
    let body = json!({"prompt": PROMPT, "max_tokens": 0, "echo": true, "logprobs": 2});
    let whole = server.post(PATH, &body).ok();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(PROMPT), &json!("length")));
    let logs = list(choice, "token_logprobs");
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(list(choice, name).len(), tokens.len(), "{name}");
    }
    assert!(logs[0].is_null() && list(choice, "top_logprobs")[0].is_null(), "the first token has no probability");
    assert_eq!(choice["logprobs"]["content"], json!([]), "no token was generated");
    // The first token is the model's own for the beginning.
    for (token, offset) in list(choice, "tokens").iter().zip(list(choice, "text_offset")).skip(1) {
        let rest: String = PROMPT.chars().skip(offset.as_u64().unwrap() as usize).collect();
        assert!(rest.starts_with(token.as_str().unwrap()), "{token} at {offset}");
    }
    // A generation after each beginning of the prompt computes the same in another way.
    for at in [1, 2, 16, 31, 32, 33, tokens.len() - 1] {
        let ask = json!({"prompt": tokens[..at], "n_predict": 1, "n_probs": 4096, "cache_prompt": false});
        let answer = server.post("/completion", &ask).ok();
        let all = answer["completion_probabilities"][0]["top_logprobs"].as_array().unwrap();
        let alone = all.iter().find(|own| own["id"] == tokens[at]).unwrap()["logprob"].as_f64().unwrap();
        let scored = logs[at].as_f64().unwrap();
        assert!((scored - alone).abs() < NEAR, "token {at}: {scored} in the prompt, {alone} alone");
        let best = all[0]["logprob"].as_f64().unwrap();
        assert!((greatest(&list(choice, "top_logprobs")[at]) - best).abs() < NEAR, "token {at}");
    }
    // Neither a slot that has read the prompt before nor a prompt of tokens changes the result.
    let again = server.post(PATH, &with(body.clone(), json!({"prompt": tokens}))).ok();
    assert_eq!(again["choices"][0]["logprobs"]["token_logprobs"], json!(logs));
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[test]
fn texts_follow_repeated_prompts() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "The river runs", "max_tokens": 8, "echo": true, "logprobs": 1});
    let whole = server.post(PATH, &body).ok()["choices"][0].clone();
    let plain = server.post(PATH, &with(body.clone(), json!({"echo": false, "cache_prompt": false}))).ok();
    let plain = &plain["choices"][0];
    assert_eq!(whole["text"], format!("The river runs{}", plain["text"].as_str().unwrap()));
    assert_eq!(list(plain, "tokens").len(), 8);
    let logs = list(&whole, "token_logprobs");
    let tail = &logs[logs.len() - 8..];
    // Rows of logits may be computed together or alone.
    assert!(tail.iter().zip(list(plain, "token_logprobs")).all(near));
    // Temperature 0 takes the most probable token, to the last bit.
    let top = list(&whole, "top_logprobs");
    assert!(top[top.len() - 8..].iter().zip(tail).all(|(top, log)| greatest(top) == log.as_f64().unwrap()));
    // A reader that has the answer as a prompt finds the same tokens likely.
    let read = json!({"prompt": whole["text"], "max_tokens": 0, "echo": true, "logprobs": 1});
    let read = server.post(PATH, &read).ok()["choices"][0].clone();
    if list(&read, "tokens") == list(&whole, "tokens") {
        assert!(list(&read, "token_logprobs").iter().zip(logs).skip(1).all(near));
    }
    let none = server.post(PATH, &with(body.clone(), json!({"logprobs": null}))).ok();
    assert_eq!((&none["choices"][0]["text"], &none["choices"][0]["logprobs"]), (&whole["text"], &Value::Null));
    let chosen = server.post(PATH, &with(body.clone(), json!({"logprobs": 0}))).ok();
    assert_eq!(chosen["choices"][0]["logprobs"]["token_logprobs"], whole["logprobs"]["token_logprobs"]);
    assert_eq!(chosen["choices"][0]["logprobs"]["top_logprobs"], Value::Null);

    let events: Vec<Event> = server.stream(PATH, &body).collect();
    let part = |name: &str| -> Vec<Value> {
        let path = format!("/choices/0/logprobs/{name}");
        events.iter().filter_map(|event| event.data.pointer(&path)?.as_array().cloned()).flatten().collect()
    };
    let text: String = events.iter().filter_map(|event| event.data.pointer("/choices/0/text")?.as_str()).collect();
    assert_eq!(whole["text"], text);
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset", "content"] {
        assert_eq!(part(name), list(&whole, name), "{name}");
    }
    let several =
        server.post(PATH, &json!({"prompt": ["One two", "Three"], "max_tokens": 0, "echo": true, "n": 2})).ok();
    let texts: Vec<&Value> = several["choices"].as_array().unwrap().iter().map(|own| &own["text"]).collect();
    assert_eq!(texts, ["One two", "One two", "Three", "Three"]);
}

/// Several prompts share the rows of logits, while another request generates.
#[test]
fn prompts_are_scored_beside_others() {
    let server = Server::start(&["-np", "4", "-c", "2048"]);
    let body = json!({"prompt": PROMPT, "max_tokens": 0, "echo": true, "logprobs": 1});
    let alone = server.post(PATH, &body).ok()["choices"][0].clone();
    let mut stream = server.stream(PATH, &json!({"prompt": "The river runs", "max_tokens": 200, "ignore_eos": true}));
    stream.next().unwrap();
    let together = server.post(PATH, &with(body, json!({"prompt": [PROMPT, "One", PROMPT, PROMPT, "One"]}))).ok();
    for at in [0, 2, 3] {
        let choice = &together["choices"][at];
        assert_eq!(list(choice, "tokens"), list(&alone, "tokens"));
        assert!(list(choice, "token_logprobs").iter().zip(list(&alone, "token_logprobs")).skip(1).all(near));
    }
    assert!(stream.all(|event| event.data.get("error").is_none()));
}

#[test]
fn the_best_of_several_answers_comes_first() {
    let server = Server::start(&["-np", "4", "-c", "2048"]);
    let body = json!({"prompt": "The river runs", "max_tokens": 6, "temperature": 1.5, "seed": 3, "logprobs": 1});
    let mean = |choice: &Value| {
        let logs: Vec<f64> = list(choice, "token_logprobs").iter().map(|log| log.as_f64().unwrap()).collect();
        logs.iter().sum::<f64>() / logs.len() as f64
    };
    let all = server.post(PATH, &with(body.clone(), json!({"n": 4}))).ok();
    let all = all["choices"].as_array().unwrap();
    let best = server.post(PATH, &with(body.clone(), json!({"best_of": 4, "n": 2}))).ok();
    let [first, second] = &best["choices"].as_array().unwrap()[..] else { panic!("{best}") };
    assert_eq!((&first["index"], &second["index"]), (&json!(0), &json!(1)));
    let greatest = all.iter().map(mean).fold(f64::NEG_INFINITY, f64::max);
    assert!((mean(first) - greatest).abs() < NEAR && mean(first) >= mean(second), "{best} of {all:?}");
    assert_eq!(best["usage"]["completion_tokens"], 24, "all answers were generated");
    let hidden = server.post(PATH, &with(body.clone(), json!({"best_of": 4, "logprobs": null}))).ok();
    assert_eq!((&hidden["choices"][0]["text"], &hidden["choices"][0]["logprobs"]), (&first["text"], &Value::Null));
    for (more, part) in [
        (json!({"best_of": 1, "n": 2}), "'best_of'"),
        (json!({"best_of": 5}), "'best_of'"),
        (json!({"best_of": 2, "stream": true}), "'best_of'"),
        (json!({"suffix": "x"}), "'suffix'"),
        (json!({"suffix": 7}), "'suffix'"),
        (json!({"suffix": "x", "echo": true}), "'echo'"),
        (json!({"echo": "yes"}), "'echo'"),
        (json!({"prompt": vec!["a"; 100], "n": 2, "echo": true, "logprobs": 1000}), "ask for fewer"),
    ] {
        let message = server.post(PATH, &with(body.clone(), more)).refused();
        assert!(message.contains(part), "{part}: {message}");
    }
    let long = json!({"prompt": "a b ".repeat(2000), "echo": true, "logprobs": 1, "max_tokens": 0});
    server.post(PATH, &long).error(400, "exceed_context_size_error");
}

#[test]
fn suffixes_need_tokens_for_infilling() {
    let fim = ["pre", "suf", "mid"].map(|kind| format!("tokenizer.ggml.fim_{kind}_token_id"));
    let given: Vec<String> = fim.iter().zip(300..).map(|(key, token)| format!("{key}=int:{token}")).collect();
    let flags: Vec<&str> = given.iter().flat_map(|given| ["--override-kv", given.as_str()]).collect();
    let server = Server::start(&flags);
    let body = json!({"prompt": "In the beginning", "suffix": " and the earth.", "max_tokens": 6});
    let own = server.post(PATH, &body).ok();
    let infill = json!({"input_prefix": "In the beginning", "input_suffix": " and the earth.", "n_predict": 6});
    assert_eq!(own["choices"][0]["text"], server.post("/infill", &infill).ok()["content"]);
    let two = server.post(PATH, &with(body.clone(), json!({"prompt": ["In the beginning", "And"]}))).ok();
    assert_eq!(two["choices"][0]["text"], own["choices"][0]["text"]);
    for prompt in [json!([1, 2]), json!([]), json!(["a", [1]])] {
        server.post(PATH, &with(body.clone(), json!({"prompt": prompt}))).refused();
    }
    let empty = server.post(PATH, &with(body, json!({"suffix": ""}))).ok();
    assert_ne!(empty["choices"][0]["text"], own["choices"][0]["text"]);
}

/// Tokenizer facts in the form lm-eval reads.
#[test]
fn the_tokenizer_is_described_as_vllm_does() {
    let server = Server::start(&[]);
    let info = server.get("/tokenizer_info").ok();
    assert_eq!(info["eos_token"], server.get("/props").ok()["eos_token"]);
    let tokens = server.post("/tokenize", &json!({"prompt": "The river", "add_special_tokens": false})).ok();
    assert_eq!(tokens, server.post("/tokenize", &json!({"content": "The river"})).ok());
    let special = server.post("/tokenize", &json!({"prompt": "The river"})).ok();
    assert_eq!(special, server.post("/tokenize", &json!({"content": "The river", "add_special": true})).ok());
    assert_eq!(server.post("/detokenize", &tokens).ok()["prompt"], "The river");
}

#[test]
fn models_are_found_by_name() {
    let server = Server::start(&["--alias", "org/small,tiny"]);
    let all = server.get("/v1/models").ok();
    for name in ["tiny", "org/small"] {
        assert_eq!(server.get(&format!("/v1/models/{name}")).ok(), all["data"][0]);
    }
    let message = server.get("/v1/models/large").error(404, "not_found_error");
    assert!(message.contains("'large'"), "{message}");
}

/// Lines of JSON, as Ollama's clients read them.
#[test]
fn ollamas_clients_are_answered() {
    let server = Server::start(&[]);
    let options = json!({"num_predict": 12, "num_ctx": 64});
    let body = json!({"model": "any", "messages": [{"role": "user", "content": "Well?"}], "options": options});
    let whole = server.post("/api/chat", &with(body.clone(), json!({"stream": false}))).ok();
    let openai = json!({"messages": body["messages"], "max_tokens": 12});
    let expected = server.post("/v1/chat/completions", &openai).ok();
    assert_eq!(whole["message"]["content"], expected["choices"][0]["message"]["content"]);
    let ends = (&whole["done"], &whole["done_reason"], &whole["eval_count"]);
    assert_eq!(ends, (&json!(true), &json!("length"), &json!(12)));
    let Value::String(lines) = server.post("/api/chat", &body).ok() else { panic!("several lines") };
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(whole["message"]["content"], text);
    assert!(lines.iter().rev().skip(1).all(|line| line["done"] == false) && lines.last().unwrap()["done"] == true);
    let said = server.post("/api/generate", &json!({"prompt": "Well?", "stream": false, "options": options})).ok();
    assert_eq!(said["response"], whole["message"]["content"]);
    assert_eq!(server.post("/api/generate", &json!({"model": "any"})).ok()["done_reason"], "load");
    for path in ["/api/tags", "/api/ps"] {
        assert_eq!(server.get(path).ok()["models"][0]["name"], "demo.gguf");
    }
    let shown = server.post("/api/show", &json!({"model": "any"})).ok();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("completion")), "{shown}");
    assert!(server.get("/api/version").ok()["version"].is_string());
    for (path, body) in [("/api/generate", json!({"prompt": "x", "raw": true})), ("/api/chat", json!({"messages": 7}))]
    {
        let answer = server.post(path, &body);
        assert_eq!((answer.status, answer.body["error"].is_string()), (400, true), "{}", answer.body);
    }
    for wrong in [json!({}), json!(true), json!(["5m"]), json!("soon"), json!("5 parsecs")] {
        let refused = server.post("/api/generate", &json!({"prompt": "x", "keep_alive": wrong}));
        assert_eq!(refused.status, 400, "{wrong}: {}", refused.body);
        assert!(refused.body["error"].as_str().unwrap().contains("'keep_alive'"), "{}", refused.body);
    }
    for right in [json!(-1), json!("-1"), json!("-1m"), json!("1h30m"), json!("300ms"), json!(60.5)] {
        server.post("/api/generate", &json!({"keep_alive": right})).ok();
    }
    let stays = server.post("/api/generate", &json!({"keep_alive": 0}));
    assert!(stays.body["error"].as_str().unwrap().contains("'keep_alive'"), "{}", stays.body);
    assert_eq!(server.post("/api/embed", &json!({"input": "x"})).status, 501);
}
