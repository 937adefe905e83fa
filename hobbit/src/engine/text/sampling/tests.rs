//! Lazy grammars, reasoning budgets and probabilities, on the demo model.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::path::Path;
use std::sync::OnceLock;

use super::*;
use crate::engine::session::Session;
use hobbit_core::options::{
    DryOptions, GrammarKind, GrammarTrigger, ModelOptions, ReasoningBudget, SamplerKind, SessionOptions,
};

const PROMPT: &str = "And the LORD output unto";

pub(super) fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
        Model::open(&path, &ModelOptions::default()).unwrap()
    })
}

fn tokens_of(text: &str) -> Vec<Token> {
    model().tokenize(text, false, true).unwrap()
}

fn text_of(tokens: &[Token]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|&token| model().piece(token, true)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn session(prompt: &str) -> Session {
    let options = SessionOptions { n_ctx: 256, warmup: false, ..SessionOptions::default() };
    let mut session = model().session(&options).unwrap();
    session.feed(&model().tokenize(prompt, true, false).unwrap()).unwrap();
    session
}

fn generate(options: &SamplingOptions, n: usize) -> Result<Vec<Token>, EvalError> {
    let mut sampler = Sampler::new(model(), options)?;
    session(PROMPT).generate(&mut sampler, Some(n)).collect()
}

/// The model's greedy output, always the same.
fn plain(n: usize) -> Vec<Token> {
    generate(&SamplingOptions::greedy(), n).unwrap()
}

fn reasoning_with(tokens: Option<u32>) -> SamplingOptions {
    let reasoning = ReasoningBudget {
        tokens,
        message: " So.".to_owned(),
        start: "<think>".to_owned(),
        ends: vec!["</think>".to_owned(), "</done>".to_owned()],
        control: false,
    };
    SamplingOptions { reasoning, generation_prompt: "<think>".to_owned(), ..SamplingOptions::greedy() }
}

#[test]
fn reasoning_ends_with_its_budget() {
    let end = [tokens_of(" So."), tokens_of("</think>")].concat();
    let plain = plain(24);
    for budget in [0, 1, 5] {
        let output = generate(&reasoning_with(Some(budget as u32)), budget + end.len() + 2).unwrap();
        assert_eq!(output[..budget], plain[..budget], "budget {budget}");
        assert_eq!(output[budget..budget + end.len()], end, "budget {budget}: {:?}", text_of(&output));
    }
    assert_eq!(generate(&reasoning_with(None), 24).unwrap(), plain, "without a budget nothing changes");
    let elsewhere = SamplingOptions { generation_prompt: String::new(), ..reasoning_with(Some(0)) };
    assert_eq!(generate(&elsewhere, 24).unwrap(), plain, "nor where the model does not reason");
    let without_tags = SamplingOptions { reasoning: ReasoningBudget::default(), ..reasoning_with(Some(0)) };
    assert_eq!(generate(&without_tags, 24).unwrap(), plain, "nor without tags");
}

#[test]
fn reasoning_is_ended_from_outside_and_begins_again() {
    let mut options = reasoning_with(None);
    options.reasoning.control = true;
    let mut sampler = Sampler::new(model(), &options).unwrap();
    let end = [tokens_of(" So."), tokens_of("</think>")].concat();
    for _ in 0..2 {
        let mut session = session(PROMPT);
        assert!(sampler.is_reasoning());
        session.generate(&mut sampler, Some(3)).for_each(drop);
        assert!(sampler.is_reasoning() && sampler.end_reasoning());
        let output: Vec<Token> = session.generate(&mut sampler, Some(end.len())).map(Result::unwrap).collect();
        assert_eq!(output, end);
        assert!(!sampler.is_reasoning() && !sampler.end_reasoning());
        sampler.reset();
    }
}

/// A grammar that begins with the text of `trigger` and continues with an exclamation.
fn exclaims(trigger: &str) -> SamplingOptions {
    SamplingOptions {
        grammar: Some(format!("root ::= {trigger:?} \"!!!\" [a-z]+")),
        grammar_lazy: true,
        grammar_triggers: vec![GrammarTrigger::Word(trigger.to_owned())],
        ..SamplingOptions::greedy()
    }
}

/// The model's output up to the token `at`, and its next few tokens as text.
fn trigger(at: usize) -> (Vec<Token>, String) {
    let plain = plain(at + 3);
    (plain[..at].to_vec(), text_of(&plain[at..]))
}

#[test]
fn a_lazy_grammar_begins_at_its_trigger() {
    let (before, trigger) = trigger(4);
    let output = text_of(&generate(&exclaims(&trigger), 24).unwrap());
    let expected = text_of(&before) + &trigger + "!!!";
    assert!(output.starts_with(&expected), "{output:?} does not begin with {expected:?}");
    assert_eq!(generate(&exclaims("<tool_call>"), 24).unwrap(), plain(24), "without its trigger it does nothing");

    let pattern = GrammarTrigger::Pattern(format!("({})", grammar::escaped(&trigger)));
    let options = SamplingOptions { grammar_triggers: vec![pattern], ..exclaims(&trigger) };
    assert!(text_of(&generate(&options, 24).unwrap()).starts_with(&expected));
    let first = plain(1)[0];
    let options = SamplingOptions {
        grammar: Some(format!("root ::= {:?} \"!!!\" [a-z]+", text_of(&[first]))),
        grammar_triggers: vec![GrammarTrigger::Token(first)],
        ..exclaims("")
    };
    let output = text_of(&generate(&options, 8).unwrap());
    assert!(output.starts_with(&(text_of(&[first]) + "!!!")), "{output:?}");
}

#[test]
fn a_lazy_grammar_is_inactive_during_reasoning() {
    let (_, trigger) = trigger(1);
    let end = [tokens_of(" So."), tokens_of("</think>")].concat();
    let thinks = |budget| {
        let reasoning = reasoning_with(Some(budget));
        SamplingOptions {
            reasoning: reasoning.reasoning,
            generation_prompt: "<think>".to_owned(),
            ..exclaims(&trigger)
        }
    };
    let output = generate(&thinks(8), 8 + end.len()).unwrap();
    assert_eq!(output[..8], plain(8));
    assert_eq!(output[8..], end);
    // The end of the reasoning may be the trigger.
    let options = SamplingOptions {
        grammar: Some("root ::= \"</think>\" \"!!!\" [a-z]+".to_owned()),
        grammar_triggers: vec![GrammarTrigger::Word("</think>".to_owned())],
        ..thinks(2)
    };
    let output = text_of(&generate(&options, 2 + end.len() + 8).unwrap());
    assert!(output.contains(" So.</think>!!!"), "{output:?}");
}

/// The tokens of each character by itself.
fn spelt(text: &str) -> Vec<Token> {
    let all = (0..model().n_vocab() as Token).filter(|token| !model().is_eog(*token));
    let pieces: Vec<(Token, Vec<u8>)> = all.map(|token| (token, model().piece(token, true))).collect();
    let token_of = |byte: u8| pieces.iter().find(|(_, piece)| piece[..] == [byte]).expect("a token of each byte").0;
    text.bytes().map(token_of).collect()
}

#[test]
fn the_end_of_reasoning_is_found_by_its_text() {
    let spelt = spelt("</think>");
    assert_ne!(spelt, tokens_of("</think>"));
    let mut options = exclaims("<tool_call>");
    options.reasoning = reasoning_with(Some(100)).reasoning;
    options.generation_prompt = "<think>".to_owned();
    let mut sampler = Sampler::new(model(), &options).unwrap();
    assert!(sampler.is_reasoning());
    for token in spelt {
        sampler.accept_generated(token).unwrap();
    }
    assert!(!sampler.is_reasoning());
    for token in tokens_of("<tool_call>") {
        sampler.accept_generated(token).unwrap();
    }
    assert!(sampler.grammar.as_ref().is_some_and(|grammar| !grammar.waits()), "the grammar begins");
}

#[test]
fn a_trigger_of_one_token_is_found_in_others() {
    let words = plain(24).into_iter().map(|token| text_of(&[token]));
    let word = words.into_iter().find(|text| text.len() > 2 && tokens_of(text).len() == 1).unwrap();
    let options = SamplingOptions { preserved_tokens: vec![word.clone()], ..exclaims(&word) };
    for tokens in [tokens_of(&word), spelt(&word)] {
        let mut sampler = Sampler::new(model(), &options).unwrap();
        for token in tokens {
            sampler.accept_generated(token).unwrap();
        }
        assert!(sampler.grammar.as_ref().is_some_and(|grammar| !grammar.waits()), "{word:?}");
    }
}

#[test]
fn a_token_across_the_end_of_the_trigger_is_left_out() {
    let first = text_of(&plain(1));
    let trigger = &first[..first.len() - 1];
    assert!(trigger.len() > 1);
    let pattern = GrammarTrigger::Pattern(grammar::escaped(trigger));
    let options = SamplingOptions { grammar_triggers: vec![pattern], ..exclaims(trigger) };
    let output = text_of(&generate(&options, 24).unwrap());
    let after = output.split_once(trigger).map(|(_, after)| after);
    assert!(after.is_none_or(|after| after.is_empty() || after.starts_with('!')), "{output:?}");
    assert!(!output.starts_with(&first), "{output:?}");
}

/// Whether the grammar of a string with this pattern describes a JSON text.
fn describes(pattern: &str, text: &str) -> bool {
    let schema = serde_json::json!({"type": "string", "pattern": pattern}).to_string();
    let options = SamplingOptions {
        grammar: Some(Sampler::json_schema_to_grammar(&schema).unwrap()),
        ..SamplingOptions::greedy()
    };
    let mut sampler = Sampler::new(model(), &options).unwrap();
    let end = (0..model().n_vocab() as Token).find(|token| model().is_eog(*token)).unwrap();
    spelt(text).into_iter().all(|token| sampler.accept_generated(token).is_ok())
        && sampler.grammar.as_mut().unwrap().allows(model(), end).unwrap()
}

#[test]
fn patterns_are_followed_and_strings_stay_json() {
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("^.$", &[r#""a""#, r#""\"""#, r#""\\""#], &[r#"""""#, "\"\n\"", r#""ab""#, r#""\""#]),
        ("^[^x]{2}$", &[r#""ab""#, r#""\"\\""#], &[r#""""""#, r#""xa""#, r#""\a""#]),
        (r"^\d+$", &[r#""12""#], &[r#""1a""#, r#""""#]),
        (r"\d", &[r#""a1b""#, r#""1""#, r#""\n1""#], &[r#""ab""#]),
        (r"^a\/b\!$", &[r#""a/b!""#], &[r#""a\/b""#, r#""ab""#]),
        ("^a|b$", &[r#""ax""#, r#""xb""#], &[r#""xax""#]),
        ("^\"$", &[r#""\"""#], &[r#"""""#]),
        (r"^[\w.-]+@[\w-]+\.(com|org)$", &[r#""a.b-c@d.org""#], &[r#""a b@d.org""#, r#""a@d.net""#]),
    ];
    for (pattern, inside, outside) in cases {
        for text in *inside {
            assert!(serde_json::from_str::<String>(text).is_ok() && describes(pattern, text), "{pattern}: {text}");
        }
        for text in *outside {
            assert!(!describes(pattern, text), "{pattern}: {text}");
        }
    }
    let refused = Sampler::json_schema_to_grammar(r#"{"type": "string", "pattern": "^(?=a)b$"}"#).unwrap_err();
    assert!(refused.to_string().contains("the pattern '^(?=a)b$'"), "{refused}");
    let schema = |n: u32| format!(r#"{{"type": "array", "items": {{"type": "integer"}}, "maxItems": {n}}}"#);
    let refused = Sampler::json_schema_to_grammar(&schema(2000)).unwrap_err();
    assert!(refused.to_string().contains("maxItems 2000"), "{refused}");
    let grammar = Some(Sampler::json_schema_to_grammar(&schema(1999)).unwrap());
    assert!(Sampler::new(model(), &SamplingOptions { grammar, ..SamplingOptions::greedy() }).is_ok());
}

#[test]
fn a_trigger_is_found_after_any_length() {
    let options = exclaims("<tool_call>");
    let mut sampler = Sampler::new(model(), &options).unwrap();
    let words = tokens_of(" and it came to pass in those days");
    let n_bytes = text_of(&words).len();
    for _ in 0..grammar::SEARCHED_BYTES_MAX * 8 / n_bytes {
        for &token in &words {
            sampler.accept_generated(token).unwrap();
        }
    }
    for token in tokens_of("<tool_call>") {
        sampler.accept_generated(token).unwrap();
    }
    let mut session = session(PROMPT);
    let output: Vec<Token> = session.generate(&mut sampler, Some(3)).map(Result::unwrap).collect();
    assert!(text_of(&output).starts_with("!"), "{:?}", text_of(&output));
}

#[test]
fn long_white_space_does_not_overflow_the_stack() {
    let pattern = GrammarTrigger::Pattern("^\\s+to$".to_owned());
    let options = SamplingOptions { grammar_triggers: vec![pattern], ..exclaims("<tool_call>") };
    // The standard library gives a thread this much stack.
    let run = move || {
        let mut sampler = Sampler::new(model(), &options).unwrap();
        for token in tokens_of(" ").repeat(6000) {
            sampler.accept_generated(token).unwrap();
        }
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(run).unwrap().join().unwrap();
}

#[test]
fn a_templates_grammar_continues_after_the_generation_prompt() {
    let options = |kind, prompt: &str| SamplingOptions {
        grammar: Some("root ::= \"said:\" [0-9]+".to_owned()),
        grammar_kind: kind,
        generation_prompt: prompt.to_owned(),
        ..SamplingOptions::greedy()
    };
    let output = text_of(&generate(&options(GrammarKind::Template, "said:"), 6).unwrap());
    assert!(!output.is_empty() && output.bytes().all(|byte| byte.is_ascii_digit()), "{output:?}");
    let output = text_of(&generate(&options(GrammarKind::User, "said:"), 8).unwrap());
    assert!(output.starts_with("said:"), "{output:?}");
    let doubling = SamplingOptions {
        grammar: Some(DOUBLING.to_owned()),
        grammar_kind: GrammarKind::Template,
        generation_prompt: "x".repeat(60),
        ..SamplingOptions::greedy()
    };
    let error = Sampler::new(model(), &doubling).err().expect("too many ways").to_string();
    assert!(error.contains("too ambiguous to be followed"), "{error}");
    let error = Sampler::new(model(), &options(GrammarKind::Template, "other")).err().expect("another prompt");
    assert!(error.to_string().contains("the generation prompt"), "{error}");
}

#[test]
fn lazy_grammars_without_a_valid_trigger_are_refused() {
    let refusal = |triggers: &[GrammarTrigger]| {
        let options = SamplingOptions { grammar_triggers: triggers.to_vec(), ..exclaims("x") };
        Sampler::new(model(), &options).err().expect("a refusal").to_string()
    };
    assert!(refusal(&[]).contains("has no trigger"));
    assert!(refusal(&[GrammarTrigger::Pattern("(".to_owned())]).contains("trigger's pattern"));
    assert!(refusal(&[GrammarTrigger::Pattern("\0".to_owned())]).contains("NUL"));
    let one = text_of(&plain(1));
    assert!(refusal(&[GrammarTrigger::Word(one)]).contains("preserved tokens"));
}

#[test]
fn probabilities_of_a_choice() {
    let options = SamplingOptions { keep_logits: true, ..SamplingOptions::greedy() };
    let mut sampler = Sampler::new(model(), &options).unwrap();
    assert_eq!(sampler.probabilities(1, false), None);
    let mut session = session(PROMPT);
    let logits = session.logits(tokens_of(PROMPT).len() - 1 + usize::from(model().adds_bos())).unwrap().to_vec();
    let token = session.sample(0, &mut sampler).unwrap();
    let before = sampler.probabilities(3, false).unwrap();
    assert_eq!(before.top.len(), 3);
    assert_eq!(before.top[0], (token, before.chosen));
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let expected = (f64::from(logits[token as usize]).exp() / sum).ln() as f32;
    assert!((before.chosen - expected).abs() < 1e-4, "{} {expected}", before.chosen);
    let after = sampler.probabilities(3, true).unwrap();
    assert_eq!((after.chosen, after.top), (0.0, vec![(token, 0.0)]), "the chain has left one");

    let seeded = SamplingOptions { seed: 7, top_k: 5, ..SamplingOptions::default() };
    let mut sampler = Sampler::new(model(), &seeded).unwrap();
    let token = session.sample(0, &mut sampler).unwrap();
    let after = sampler.probabilities(99, true).unwrap();
    assert!(after.top.len() <= 5 && after.top.contains(&(token, after.chosen)));
    let sum: f32 = after.top.iter().map(|(_, log)| log.exp()).sum();
    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
    assert_eq!(sampler.probabilities(1, false), None, "logits are not kept unless asked for");
}

/// Every further x doubles the number of parses.
const DOUBLING: &str = "root ::= s\ns ::= \"x\" s \"b\"? | \"x\" s \"c\"? | \"x\"";

/// How many x a grammar follows, at most 1,000, and the error that ended it.
fn n_followed(sampler: &mut Sampler) -> (usize, Option<String>) {
    let x = (0..model().n_vocab() as Token).find(|token| model().piece(*token, true) == b"x").unwrap();
    for n in 0..1000 {
        if let Err(error) = sampler.accept_generated(x) {
            return (n, Some(error.to_string()));
        }
    }
    (1000, None)
}

#[test]
fn ambiguous_grammars_are_followed_within_the_limit() {
    let with = |grammar: &str| SamplingOptions { grammar: Some(grammar.to_owned()), ..SamplingOptions::greedy() };
    let mut sampler = Sampler::new(model(), &with(DOUBLING)).unwrap();
    for _ in 0..2 {
        let (n, why) = n_followed(&mut sampler);
        assert!((8..32).contains(&n), "{n}");
        let why = why.unwrap();
        assert!(why.contains("too ambiguous to be followed"), "{why}");
        sampler.reset();
    }
    // In the last one, there are as many parses as x, and llama.cpp compares each pair.
    for plain in [
        "root ::= [a-z ]*",
        "root ::= (\"x\"*)*",
        "root ::= a\na ::= \"x\" a | \"y\"",
        "root ::= (\"x\"? \"y\"?)*",
        "root ::= a*\na ::= \"x\" | \"x\" a*",
    ] {
        assert_eq!(n_followed(&mut Sampler::new(model(), &with(plain)).unwrap()), (1000, None), "{plain}");
    }
    // Every rule doubles the number of parses, before any text.
    let rules: String = (0..40).map(|n| format!("r{n} ::= r{m} \"a\"? | r{m} \"b\"?\n", m = n + 1)).collect();
    let error = Sampler::new(model(), &with(&format!("root ::= r0\n{rules}r40 ::= \"x\""))).err().unwrap().to_string();
    assert!(error.contains("begins in too many ways at once"), "{error}");
    // Endless nesting, doubled by every rule.
    let twice: String = (0..60).map(|n| format!("r{n} ::= r{m} | r{m}\n", m = n + 1)).collect();
    let deep: String = (0..40_000).map(|n| format!("r{n} ::= r{}\n", n + 1)).collect();
    for rules in [format!("{twice}r60 ::= \"x\"*"), format!("{deep}r40000 ::= \"x\"*")] {
        let mut sampler = Sampler::new(model(), &with(&format!("root ::= r0\n{rules}"))).unwrap();
        assert_eq!(n_followed(&mut sampler), (1000, None));
    }
    let own = Sampler::new(model(), &with("root ::= \"x\" a\na ::= a \"y\"")).err().unwrap().to_string();
    assert!(own.contains("a rule begins with itself"), "{own}");
}

#[test]
fn json_schemas() {
    let grammar =
        Sampler::json_schema_to_grammar(r#"{"type": "object", "properties": {"n": {"type": "integer"}}}"#).unwrap();
    assert!(grammar.contains("root ::="), "{grammar}");
    for (schema, expected) in [
        ("", "the schema is not JSON"),
        ("{\"type\": ", "the schema is not JSON"),
        ("{\"type\": \"nonsense\"}", "llama.cpp cannot turn this JSON schema into a grammar"),
    ] {
        let message = Sampler::json_schema_to_grammar(schema).unwrap_err().to_string();
        assert!(message.contains(expected), "{schema}: {message}");
    }
    for endless in [
        r##"{"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]}"##.to_owned(),
        format!(r#"{{"properties": {{"{}": {{}}}}, "additionalProperties": true}}"#, "n".repeat(50_000)),
    ] {
        assert!(Sampler::json_schema_to_grammar(&endless).is_err());
    }
    // A chain of references at the limit.
    let chain: Vec<String> = (0..500)
        .map(|n| format!(r##""d{n}": {{"type": "array", "items": {{"$ref": "#/$defs/d{}"}}}}"##, n + 1))
        .collect();
    let chain =
        format!(r##"{{"$defs": {{{}, "d500": {{"type": "string"}}}}, "$ref": "#/$defs/d0"}}"##, chain.join(", "));
    // The last is an array of strings; a string has no rule of its own.
    assert!(Sampler::json_schema_to_grammar(&chain).unwrap().contains("ref-defs-d499 ::= "));
    let deep = "[".repeat(100_000);
    assert!(Sampler::json_schema_to_grammar(&deep).is_err());
}

/// Texts that begin within tokens, that take several tokens, and that are cut.
#[test]
fn repetitions_end_where_llama_cpp_ends_them() {
    let own = |breakers: &[&str]| DryOptions {
        multiplier: 0.8,
        penalty_last_n: 256,
        sequence_breakers: breakers.iter().map(|&text| text.to_owned()).collect(),
        ..DryOptions::default()
    };
    let text =
        "And the LORD said unto them, Go: and they said unto them, Go; and the LORD said unto the LORD".repeat(3);
    let tokens = tokens_of(&text);
    let penalties = |mut sampler: Raw| {
        let mut all = Vec::new();
        for token in &tokens {
            assert!(sampler.accept(*token));
            let ids = 0..model().n_vocab() as Token;
            let mut data: Vec<_> = ids.map(|id| llama_token_data { id, logit: 0.0, p: 0.0 }).collect();
            let (data, size) = (data.as_mut_ptr(), data.len());
            let mut array = llama_token_data_array { data, size, selected: -1, sorted: false };
            sampler.apply(&mut array).unwrap();
            // SAFETY: DRY changes logits in place.
            let data = unsafe { slice::from_raw_parts(array.data, array.size) };
            all.extend(data.iter().filter(|token| token.logit != 0.0).map(|token| (token.id, token.logit.to_bits())));
        }
        all
    };
    let long = "said unto them, Go; and the LORD said unto the LORD";
    let mut different = BTreeSet::new();
    for breakers in [&[][..], &["\n", ":", "\"", "*"], &["them, G"], &["nto the", " LORD s"], &[long, "Go"], &[""]] {
        let dry = own(breakers);
        let made = SamplingOptions { dry: dry.clone(), ..SamplingOptions::default() };
        let ours = Raw::new(chain::new_link(model(), &made, SamplerKind::Dry).unwrap(), "dry").unwrap();
        let texts: Vec<_> = breakers.iter().map(|text| CString::new(*text).unwrap()).collect();
        let mut texts: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        // SAFETY: the vocabulary is live; the texts are copied.
        let theirs = unsafe {
            llama::llama_sampler_init_dry(
                model().shared.raw.vocab(),
                dry.multiplier,
                dry.base,
                dry.allowed_length,
                dry.penalty_last_n,
                texts.as_mut_ptr(),
                texts.len(),
            )
        };
        let ours = penalties(ours);
        assert!(!ours.is_empty());
        assert_eq!(ours, penalties(Raw::new(theirs, "dry").unwrap()), "{breakers:?}");
        different.insert(ours);
    }
    assert!(different.len() >= 4, "breakers change penalties");
}

/// llama.cpp asserts that there are candidates; a failed assertion would end the process.
#[test]
fn a_failed_assertion_of_a_sampler_is_an_error() {
    // SAFETY: a constructor that takes plain values.
    let mut typical = Raw::new(unsafe { llama::llama_sampler_init_typical(0.5, 1) }, "typical").unwrap();
    let mut none = llama_token_data_array { data: ptr::null_mut(), size: 0, selected: -1, sorted: false };
    let error = typical.apply(&mut none).unwrap_err();
    assert!(matches!(&error, SamplerError::Settings(reason) if reason.contains("cur_p->size > 0")), "{error}");
    let mut some = [1.0, 2.0].map(|logit| llama_token_data { id: 0, logit, p: 0.0 });
    let mut array = llama_token_data_array { data: some.as_mut_ptr(), size: some.len(), selected: -1, sorted: false };
    typical.apply(&mut array).unwrap();
}

#[test]
fn softmax_of_logits() {
    let logits = [1.0_f32.ln(), 2.0_f32.ln(), f32::NEG_INFINITY, 1.0_f32.ln()];
    let found = Probabilities::of_logits(&logits, 3, 2);
    assert!((found.chosen - 0.25_f32.ln()).abs() < 1e-6);
    assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 0]);
    assert!((found.top[0].1 - 0.5_f32.ln()).abs() < 1e-6);
    assert_eq!(Probabilities::of_logits(&logits, 2, 0), Probabilities { chosen: f32::NEG_INFINITY, top: vec![] });
    assert_eq!(Probabilities::of_logits(&logits, 0, 99).top.len(), 4);
}

#[test]
fn candidates_without_a_chance_are_left_out() {
    let candidates = [(7, 0.25), (3, 0.75), (1, 0.0)].map(|(id, p)| llama_token_data { id, logit: 0.0, p });
    let found = of_candidates(&candidates, 7, 5);
    assert_eq!(found, Probabilities { chosen: 0.25_f32.ln(), top: vec![(3, 0.75_f32.ln()), (7, 0.25_f32.ln())] });
    assert_eq!(of_candidates(&candidates, 9, 5).chosen, f32::NEG_INFINITY);
}
