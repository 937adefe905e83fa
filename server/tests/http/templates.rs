//! Chat templates that loop, swell or crash fail the request that triggers it, and nothing else.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use super::rig::*;
use crate::fixture::templates::{ALONE, HOSTILE, hostile_model, model_with};

/// A template that does each of [`HOSTILE`] where a message asks for it.
fn on_demand() -> String {
    let mut template = "{%- set asked = messages[-1].content -%}".to_owned();
    for (name, hostile) in HOSTILE {
        template += &format!("{{%- if asked == '{name}' -%}}{hostile}{{%- endif -%}}");
    }
    template + "{%- for m in messages -%}{{ m.role }}: {{ m.content }}\n{% endfor -%}"
}

#[test]
fn a_template_that_explodes_fails_one_request() {
    let server = Server::start(&["--chat-template", &on_demand()]);
    let ask = |content: &str| {
        let messages = json!([{"role": "user", "content": content}]);
        server.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 1}))
    };
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((name, _)) = HOSTILE.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let message = ask(name).refused();
                    assert!(message.contains("cannot apply the chat template"), "{name}: {message}");
                    eprintln!("{name}: {}", &message[..message.len().min(200)]);
                    ask("Hi").ok();
                }
            });
        }
    });
}

#[cfg(unix)]
#[test]
fn the_process_for_templates_is_started_again() {
    let server = Server::start(&[]);
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    server.post("/v1/chat/completions", &body).ok();
    for _ in 0..3 {
        let own = server.processes("comm", "hobbit-template");
        assert_eq!(own.len(), 1, "there is one, also after another was killed");
        server.signal("KILL", own[0]);
        until("it ends", || !is_running(own[0]));
        server.post("/v1/chat/completions", &body).ok();
    }
}

#[test]
fn slow_schemas_and_templates_do_not_delay_other_requests() {
    let server = Server::start(&["--chat-template", &on_demand()]);
    let ask = |content: &str, more| {
        let messages = json!([{"role": "user", "content": content}]);
        server.post("/v1/chat/completions", &with(json!({"messages": messages, "max_tokens": 1}), more))
    };
    std::thread::scope(|scope| {
        let slow = || scope.spawn(|| ask("loops in loops", json!({})).refused());
        // Each takes its whole time of two seconds, one after another.
        let slow: Vec<_> = std::iter::repeat_with(slow).take(6).collect();
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let form = json!({"type": "json_schema", "json_schema": {"schema": schema}});
        for _ in 0..3 {
            ask("Hi", json!({})).ok();
            ask("Hi", json!({"response_format": form})).ok();
            server.post("/tokenize", &json!({"content": "Hi"})).ok();
            server.post("/completion", &json!({"prompt": "Hi", "n_predict": 1})).ok();
        }
        assert!(!slow.iter().all(|own| own.is_finished()), "the others were served meanwhile");
        for own in slow {
            assert!(own.join().unwrap().contains("it runs for more than 2 s"));
        }
    });
}

#[test]
fn one_client_does_not_take_the_turns_of_others() {
    let server = Server::start(&["--max-body", "64M"]);
    // Any of the fields may be left out: the grammar takes a second or two, and is too long.
    let properties: serde_json::Map<_, _> = (0..250).map(|n| (format!("p{n}"), json!({"type": "integer"}))).collect();
    let object = json!({"type": "object", "properties": properties});
    let objects: serde_json::Map<_, _> = (0..50).map(|n| (format!("o{n}"), object.clone())).collect();
    let schema = json!({"type": "object", "properties": objects});
    let slow = json!({"prompt": "Hi", "n_predict": 1, "json_schema": schema});
    let [hostile, other] = ["127.0.0.2", "127.0.0.1"].map(|address| address.parse().unwrap());
    let (sender, answers) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| sender.send(server.post_from(hostile, "/completion", &slow)).unwrap());
        }
        // Refused: as many as one client may have wait.
        let (refused, retries) = answers.iter().find(|(answer, _)| answer.status == 503).unwrap();
        let message = refused.error(503, "unavailable_error");
        assert!(retries && message.contains("8 such schemas and templates of this client wait"), "{message}");
        let form = json!({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}});
        let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "response_format": form});
        server.post("/v1/chat/completions", &chat).ok();
        server.post("/completion", &json!({"prompt": "Hi", "n_predict": 1})).ok();
        server.post("/tokenize", &json!({"content": "Hi"})).ok();
        let is_done = answers.try_iter().filter(|(answer, _)| answer.status == 400).count() >= 8;
        assert!(!is_done, "others were served meanwhile");
        server.post_from(other, "/completion", &slow).0.refused();
        let n_before = answers.try_iter().filter(|(answer, _)| answer.status == 400).count();
        assert!(n_before < 6, "{n_before} of the first client's were served before the other client's");
    });
}

#[test]
fn a_hostile_template_of_a_model_is_refused_at_the_start() {
    for name in ALONE {
        let (_dir, model) = hostile_model(name);
        let args = ["-m", model.to_str().unwrap(), "-t", "1", "-c", "64", "--port", "0"];
        let refused = Command::new(env!("CARGO_BIN_EXE_hobbit-server")).args(args).output().unwrap();
        let log = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{name}: {log}");
        let part = "qwen3moe.gguf: the model's chat template cannot be used; --chat-template chatml";
        assert!(log.contains(part), "{name}: {log}");
    }
}

/// A format for which llama.cpp follows no schema (Kimi-K2's).
const SECTIONS: &str = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}\
                        {% if false %}<|tool_calls_section_begin|><|tool_call_begin|>{% endif %}\
                        {% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}";

#[test]
fn a_schema_is_followed_where_llama_cpp_has_no_grammar() {
    // The format allows reasoning before the answer.
    let server = Server::start(&["--chat-template", SECTIONS, "--reasoning-budget", "0"]);
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]});
    // White space is random, and may be long.
    let ask = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 512});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    for more in [json!({"response_format": format}), json!({"json_schema": schema})] {
        let answer = server.post("/v1/chat/completions", &with(ask.clone(), more)).ok();
        let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let value: serde_json::Value = serde_json::from_str(content).unwrap_or_else(|_| panic!("{content}"));
        assert!(value["a"] == "x" || value["a"] == "y", "{content}");
    }
    let pattern = json!({"type": "string", "pattern": "^(?=a)b$"});
    let refused = server.post("/v1/chat/completions", &with(ask, json!({"json_schema": pattern}))).refused();
    assert!(refused.contains("the pattern '^(?=a)b$'"), "{refused}");
}

#[test]
fn answers_without_the_templates_form_are_returned() {
    let channels = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}\
                    {% if false %}<|channel|>{% endif %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let server = Server::start(&["--chat-template", channels]);
    let ask = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8});
    let answer = server.post("/v1/chat/completions", &ask).ok();
    let choice = &answer["choices"][0];
    assert!(!choice["message"]["content"].as_str().unwrap().is_empty(), "{choice}");
    assert_eq!(choice["finish_reason"], "length");
    server.logged("returned as content");
    let events = server.stream("/v1/chat/completions", &with(ask, json!({"stream": true})));
    let content = |event: Event| Some(event.data["choices"][0]["delta"]["content"].as_str()?.to_owned());
    let text: String = events.filter_map(content).collect();
    assert_eq!(text, choice["message"]["content"].as_str().unwrap());
}

#[test]
fn a_misspelt_template_is_refused_at_the_start() {
    let server = env!("CARGO_BIN_EXE_hobbit-server");
    let (_dir, model) = model_with("{% for m in messages %}{{ m.content }}{% endfor %}");
    let args = ["-m", model.to_str().unwrap(), "-t", "1", "-c", "64", "--port", "0", "--chat-template", "chatlm"];
    let refused = Command::new(server).args(args).output().unwrap();
    let log = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{log}");
    assert!(log.contains("does not write the user's message"), "{log}");
}
