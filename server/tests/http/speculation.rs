//! Drafts in the steps of slots: answers are what they are without.

use hobbit_synth::Spec;
use serde_json::{Value, json};

use super::rig::{Event, Server, with};
use crate::fixture::{demo_in_f32, predictable, write};

fn model() -> &'static str {
    demo_in_f32().to_str().unwrap()
}

fn start(np: &str, more: &[&str]) -> Server {
    let usual = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--draft-fixed", "--metrics", "-np", np];
    let ours = if more.contains(&"-m") { [].as_slice() } else { &["-m", model()] };
    Server::start(&[&usual[..], ours, more].concat())
}

fn prompt() -> String {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout-prose.txt")).unwrap();
    text[..900].to_owned()
}

fn ask(more: Value) -> Value {
    with(json!({"prompt": prompt(), "n_predict": 48, "cache_prompt": false, "return_tokens": true}), more)
}

/// An answer without what differs between two runs.
fn essence(mut answer: Value) -> Value {
    for name in ["timings", "generation_settings", "id_slot"] {
        answer.as_object_mut().unwrap().remove(name);
    }
    answer
}

fn drafted(answer: &Value) -> (u64, u64) {
    let of = |name: &str| answer["timings"][name].as_u64().unwrap_or(0);
    (of("draft_n"), of("draft_n_accepted"))
}

#[test]
fn answers_are_what_they_are_without_drafts() {
    let plain = start("1", &[]);
    let drafters = [
        start("1", &["--spec-type", "ngram-simple"]),
        start("1", &["--spec-type", "ngram-cache"]),
        start("1", &["-md", model()]),
    ];
    let whole = plain.post("/completion", &ask(json!({}))).ok();
    let text = whole["content"].as_str().unwrap();
    let at = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop: String = text[at..].chars().take(3).collect();
    let mut n_drafted = [0; 3];
    for more in [
        json!({}),
        json!({"seed": 3, "temperature": 0.8}),
        json!({"stop": [stop]}),
        json!({"n_probs": 3}),
        json!({"n_probs": 2, "post_sampling_probs": true, "seed": 3, "temperature": 0.5}),
        json!({"n_predict": 1}),
        json!({"n_predict": -1, "ignore_eos": true}),
        json!({"grammar": "root ::= [a-z \\n]+"}),
        json!({"speculative.n_max": 2}),
    ] {
        let body = ask(more);
        let expected = essence(plain.post("/completion", &body).ok());
        let streamed: Vec<Event> = plain.stream("/completion", &body).collect();
        for (server, n) in drafters.iter().zip(&mut n_drafted) {
            let answer = server.post("/completion", &body).ok();
            *n += drafted(&answer).0;
            assert_same(&essence(answer), &expected);
            let events: Vec<Event> = server.stream("/completion", &body).collect();
            assert_eq!(events.len(), streamed.len(), "each token is an event of its own");
            for (event, other) in events.iter().zip(&streamed) {
                assert_eq!(event.data["tokens"], other.data["tokens"]);
                assert_eq!(event.data["content"], other.data["content"]);
            }
        }
    }
    assert!(n_drafted.iter().all(|n| *n > 0), "{n_drafted:?}");
}

/// Compares answers; their probabilities by their first digits, as steps of one token and of several round otherwise.
#[track_caller]
fn assert_same(found: &Value, expected: &Value) {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            assert!(found.keys().eq(expected.keys()));
            found.iter().for_each(|(key, value)| assert_same(value, &expected[key]));
        }
        (Value::Array(found), Value::Array(expected)) => {
            assert_eq!(found.len(), expected.len());
            found.iter().zip(expected).for_each(|(found, expected)| assert_same(found, expected));
        }
        (Value::Number(found), Value::Number(expected)) if found.is_f64() => {
            let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((found - expected).abs() < 1e-3, "{found} {expected}");
        }
        _ => assert_eq!(found, expected),
    }
}

#[test]
fn a_model_drafts_for_itself_and_requests_may_decline() {
    let server = start("2", &["-md", model()]);
    let answer = server.post("/completion", &ask(json!({}))).ok();
    let (n, accepted) = drafted(&answer);
    assert!(n > 0 && accepted == n, "{answer}");
    assert_eq!(answer["timings"]["predicted_n"], 48);
    assert_eq!(answer["generation_settings"]["speculative.types"], "draft-simple");
    let few = server.post("/completion", &ask(json!({"speculative.n_max": 1}))).ok();
    assert!(drafted(&few).0 <= 24, "{few}");
    let none = server.post("/completion", &ask(json!({"speculative.n_max": 0}))).ok();
    assert!(none["timings"].get("draft_n").is_none(), "{none}");
    assert_eq!(none["content"], answer["content"]);
    server.post("/completion", &ask(json!({"speculative.n_max": -1}))).refused();
    for name in ["speculative.type", "speculative.types"] {
        let none = server.post("/completion", &ask(json!({name: "none"}))).ok();
        assert_eq!((drafted(&none), &none["content"]), ((0, 0), &answer["content"]));
        let error = server.post("/completion", &ask(json!({name: "ngram-mod"}))).refused();
        assert!(error.contains(&format!("'{name}'")) && error.contains("draft-simple"), "{error}");
    }
    let error = server.post("/completion", &ask(json!({"speculative.p_min": 0.5}))).refused();
    assert!(error.contains("'speculative.p_min'"), "{error}");
    let own = json!({"speculative.n_min": 5, "speculative.n_max": 5, "speculative.p_min": 0.0, "n_predict": 20,
        "ignore_eos": true, "speculative.types": "draft-simple"});
    let fives = server.post("/completion", &ask(own)).ok();
    assert!(drafted(&fives).0 > 0 && drafted(&fives).0.is_multiple_of(5), "{fives}");
    assert_eq!(fives["generation_settings"]["speculative.n_min"], 5);

    assert!(server.get("/slots").ok().as_array().unwrap().iter().all(|slot| slot["speculative"] == true));
    let metrics = server.get("/metrics").ok();
    let metrics = metrics.as_str().unwrap();
    let of = |name: &str| -> u64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("llamacpp:spec_decode_num_{name} ")));
        line.unwrap().parse().unwrap()
    };
    let total = n + drafted(&few).0 + drafted(&fives).0;
    let accepted = accepted + drafted(&few).1 + drafted(&fives).1;
    assert_eq!((of("draft_tokens_total"), of("accepted_tokens_total")), (total, accepted));
    assert_eq!(of("accepted_tokens_per_pos_total{position=\"0\"}"), of("drafts_total"));

    // Later turns, slots that copy a beginning, and files go on from the same text.
    let again = with(ask(json!({"id_slot": 1})), json!({"cache_prompt": true}));
    assert_eq!(server.post("/completion", &again).ok()["content"], answer["content"]);
    let second = format!("{}{} And", prompt(), answer["content"].as_str().unwrap());
    let turn = |slot: usize, n_max: usize| {
        let more = json!({"prompt": second, "id_slot": slot, "speculative.n_max": n_max, "cache_prompt": true});
        server.post("/completion", &ask(more)).ok()
    };
    let (with_drafts, without) = (turn(1, 8), turn(0, 0));
    assert_eq!(with_drafts["content"], without["content"]);
    assert!(with_drafts["timings"]["cache_n"].as_u64().unwrap() > 40, "{with_drafts}");
}

#[test]
fn slots_draft_beside_each_other() {
    let server = start("2", &["-md", model()]);
    let texts = [prompt(), "The river runs through the old".to_owned()];
    let body = |text: &str| ask(json!({"prompt": text, "ignore_eos": true}));
    let alone: Vec<Value> = texts.iter().map(|text| server.post("/completion", &body(text)).ok()).collect();
    let beside: Vec<Value> = std::thread::scope(|scope| {
        let ask = |text: &String| server.post("/completion", &body(text)).ok();
        let threads: Vec<_> = texts.iter().map(|text| scope.spawn(move || ask(text))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (alone, beside) in alone.iter().zip(&beside) {
        assert_eq!(alone["content"], beside["content"]);
        assert!(drafted(beside).0 > 0, "{beside}");
    }
}

/// Two slots, the copy of a beginning, and later turns, drafted for by the model's own layers.
#[test]
fn a_models_own_layers_draft_for_all_slots() {
    let dir = tempfile::tempdir().unwrap();
    let path = predictable(dir.path(), "glm4moe");
    let flags = ["-m", path.to_str().unwrap(), "-c", "2048", "--expert-cache", "50%"];
    let (plain, drafting) = (start("2", &flags), start("2", &[&flags[..], &["--spec-type", "draft-mtp"]].concat()));
    let ask = |prompt: &str, slot: usize| {
        let more = json!({"prompt": prompt, "n_predict": 40, "ignore_eos": true, "id_slot": slot, "temperature": 0});
        with(ask(more), json!({"cache_prompt": true}))
    };
    let answers = |server: &Server| -> Vec<Value> {
        let texts = ["In the beginning of all", "The river runs through"];
        let mut answers: Vec<Value> = std::thread::scope(|scope| {
            let of = |slot: usize| server.post("/completion", &ask(texts[slot], slot)).ok();
            let threads: Vec<_> = (0..2).map(|slot| scope.spawn(move || of(slot))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let later = format!("{}{} and more", texts[0], answers[0]["content"].as_str().unwrap());
        answers.extend([1, 0].map(|slot| server.post("/completion", &ask(&later, slot)).ok()));
        answers
    };
    for (found, expected) in answers(&drafting).into_iter().zip(answers(&plain)) {
        let (n, accepted) = drafted(&found);
        assert!(n > 0 && accepted * 2 > n, "{found}");
        assert_eq!(found["tokens"], expected["tokens"]);
    }
}

/// Streams that end early leave no draft in their slots, and a full context ends or shifts where it did.
#[test]
fn slots_are_left_as_without_drafts() {
    for shift in ["--no-context-shift", "--context-shift"] {
        let flags = ["-c", "256", shift];
        let (plain, drafting) = (start("1", &flags), start("1", &[&flags[..], &["-md", model()]].concat()));
        let endless = json!({"prompt": "In the beginning", "n_predict": 300, "ignore_eos": true});
        let mut answers = Vec::new();
        for server in [&plain, &drafting] {
            let mut stream = server.stream("/completion", &endless);
            assert!(stream.by_ref().take(3).count() == 3);
            drop(stream);
            server.wait_for_busy(0);
            answers.push(server.post("/completion", &endless).ok());
        }
        for name in ["content", "tokens_predicted", "tokens_evaluated", "tokens_cached", "truncated", "stop_type"] {
            assert_eq!(answers[1][name], answers[0][name], "{name}, {shift}");
        }
    }
}

#[test]
fn a_saved_slot_goes_on_as_without_drafts() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--slot-save-path", dir.path().to_str().unwrap()];
    let (plain, drafting) = (start("2", &flags), start("2", &[&flags[..], &["-md", model()]].concat()));
    let mut answers = Vec::new();
    for server in [&plain, &drafting] {
        let first = server.post("/completion", &ask(json!({"id_slot": 0}))).ok();
        let file = json!({"filename": "slot"});
        let saved = server.post("/slots/0?action=save", &file).ok();
        let restored = server.post("/slots/1?action=restore", &file).ok();
        let prompt = format!("{}{} And", prompt(), first["content"].as_str().unwrap());
        let next = json!({"prompt": prompt, "id_slot": 1, "cache_prompt": true});
        let second = server.post("/completion", &ask(next)).ok();
        assert_eq!(drafted(&second).0 > 0, std::ptr::eq(server, &drafting), "{second}");
        assert!(second["timings"]["cache_n"].as_u64().unwrap() > 40, "{second}");
        answers.push([saved["n_saved"].clone(), restored["n_restored"].clone(), second["content"].clone()]);
    }
    assert_eq!(answers[1], answers[0]);
}

/// A text ends at its first line beyond the limit, whatever is drafted after that.
#[test]
fn a_time_limit_ends_a_text_where_it_does_without_drafts() {
    let limited = json!({"t_max_predict_ms": 1, "ignore_eos": true, "grammar": "root ::= ([a-z ]{20} \"\\n\")+"});
    let answers = [start("1", &[]), start("1", &["-md", model()])].map(|server| {
        let answer = server.post("/completion", &ask(limited.clone())).ok();
        assert_eq!(answer["content"].as_str().unwrap().matches('\n').count(), 1, "{answer}");
        assert_eq!(answer["stop_type"], "limit");
        essence(answer)
    });
    assert_same(&answers[1], &answers[0]);
}

/// Several slots attend plainly by default, so that texts do not depend on each other, unless it takes much memory.
#[test]
fn a_long_context_says_what_texts_depend_on() {
    let start = |flags: &[&str]| Server::start(&[&["-m", model(), "-np", "2"], flags].concat()).log.clone();
    let long = ["-c", "20480", "-b", "2048", "-ub", "2048"];
    let told = "concurrent requests may slightly change each other's output; -fa off prevents it (";
    assert!(start(&long).contains(told));
    assert!(!start(&["-c", "1024"]).contains(told));
    assert!(!start(&[&long[..], &["-fa", "on"]].concat()).contains(told));
}

#[test]
fn a_recurrent_model_answers_without_drafts() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &Spec::tiny("jamba"));
    let server = start("1", &["-m", path.to_str().unwrap(), "--spec-type", "ngram-cache"]);
    let answer = server.post("/completion", &json!({"prompt": "In the", "n_predict": 8, "ignore_eos": true})).ok();
    assert_eq!(answer["tokens_predicted"], 8);
    assert_eq!(answer["generation_settings"]["speculative.types"], "none");
    assert_eq!(server.get("/slots").ok()[0]["speculative"], false);
}
