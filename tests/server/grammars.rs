//! Grammars that cannot be followed.

use serde_json::{Value, json};

use super::rig::{Event, Server, with};

/// Every further x can be read in twice as many ways.
const DOUBLING: &str = "root ::= s\ns ::= \"x\" s \"b\"? | \"x\" s \"c\"? | \"x\"";

#[test]
fn a_grammar_that_grows_ambiguous_ends_its_own_request() {
    let server = Server::start(&["--ignore-eos"]);
    let plain = json!({"prompt": "The river runs", "n_predict": 200, "cache_prompt": false});
    let alone = server.post("/completion", &plain).ok();
    let mut other = server.stream("/completion", &plain);
    let first = other.next().unwrap();
    let body = json!({"prompt": "x", "n_predict": 100, "grammar": DOUBLING, "logit_bias": [["x", 100]]});
    let message = server.post("/completion", &body).error(400, "invalid_request_error");
    assert!(message.contains("too ambiguous to be followed"), "{message}");
    let events: Vec<Event> = server.stream("/completion", &body).collect();
    let error = &events.last().unwrap().data["error"];
    assert_eq!((&error["code"], &error["message"]), (&json!(400), &json!(message)));
    assert!(events.len() > 4, "{events:?}");
    let rest: Vec<Event> = other.collect();
    let done = &rest.last().unwrap().data;
    assert_eq!((&done["stop"], &done["tokens_predicted"]), (&json!(true), &json!(200)));
    let n_streamed = [first].iter().chain(&rest).filter(|event| event.data["stop"] == Value::Bool(false)).count();
    assert_eq!(n_streamed, 200);
    assert_eq!(alone["tokens_predicted"], 200);
    // One that begins in too many ways is not begun.
    let rules: String = (0..40).map(|n| format!("r{n} ::= r{m} \"a\"? | r{m} \"b\"?\n", m = n + 1)).collect();
    let grammar = json!({"grammar": format!("root ::= r0\n{rules}r40 ::= \"x\"")});
    let message = server.post("/completion", &with(plain, grammar)).error(400, "invalid_request_error");
    assert!(message.contains("begins in too many ways at once"), "{message}");
}
