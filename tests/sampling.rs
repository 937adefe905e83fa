//! Samplers and grammars on the demo model.

use std::collections::HashSet;
use std::sync::OnceLock;

use hobbit::options::{DryOptions, MirostatOptions, SamplerKind, XtcOptions};
use hobbit::{
    EvalError, Model, ModelOptions, Sampler, SamplerError, SamplingOptions, Session, SessionOptions, StopReason, Token,
};

use crate::fixture::cli::demo_model;

const PROMPT: &str = "And the LORD said unto";

fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| Model::open(&demo_model(), &ModelOptions::default()).unwrap())
}

/// A session that has read `prompt`.
fn session(prompt: &str) -> Session {
    let options = SessionOptions { n_ctx: 256, warmup: false, ..SessionOptions::default() };
    let mut session = model().session(&options).unwrap();
    session.feed(&model().tokenize(prompt, true, false).unwrap()).unwrap();
    session
}

struct Output {
    tokens: Vec<Token>,
    text: String,
    stop: StopReason,
}

fn generate_with(sampler: &mut Sampler, n_predict: usize) -> Result<Output, EvalError> {
    let mut session = session(PROMPT);
    let mut generation = session.generate(sampler, Some(n_predict));
    let tokens = generation.by_ref().collect::<Result<Vec<_>, _>>()?;
    let stop = generation.stop_reason().expect("the iterator has ended");
    let bytes: Vec<u8> = tokens.iter().flat_map(|&token| model().piece(token, false)).collect();
    Ok(Output { tokens, text: String::from_utf8_lossy(&bytes).into_owned(), stop })
}

fn generate(options: &SamplingOptions, n_predict: usize) -> Output {
    generate_with(&mut Sampler::new(model(), options).unwrap(), n_predict).unwrap()
}

fn seeded(seed: u32) -> SamplingOptions {
    SamplingOptions { seed, ..SamplingOptions::default() }
}

fn one_token(token: &str) -> Token {
    let tokens = model().tokenize(token, false, false).unwrap();
    assert_eq!(tokens.len(), 1, "{token:?} is one token of the demo model");
    tokens[0]
}

#[test]
fn the_chain_is_llama_cpps() {
    let describe = |options: &SamplingOptions| Sampler::new(model(), options).unwrap().describe();
    // As llama-completion prints it for its defaults.
    assert_eq!(
        describe(&SamplingOptions::default()),
        "logits -> ?penalties -> ?dry -> ?top-n-sigma -> top-k -> ?typical -> top-p -> min-p -> ?xtc -> temp-ext \
         -> dist"
    );
    let everything = SamplingOptions {
        repeat_penalty: 1.1,
        typical_p: 0.9,
        top_n_sigma: 1.0,
        dry: DryOptions { multiplier: 0.8, ..DryOptions::default() },
        xtc: XtcOptions { probability: 0.5, threshold: 0.1 },
        logit_bias: vec![(0, -1.0)],
        ..seeded(1)
    };
    assert_eq!(
        describe(&everything),
        "logits -> logit-bias -> penalties -> dry -> top-n-sigma -> top-k -> typical -> top-p -> min-p -> xtc -> \
         temp-ext -> dist"
    );
    let mirostat = |version| MirostatOptions { version, ..MirostatOptions::default() };
    assert_eq!(describe(&SamplingOptions { mirostat: mirostat(1), ..seeded(1) }), "logits -> temp -> mirostat");
    assert_eq!(describe(&SamplingOptions { mirostat: mirostat(2), ..seeded(1) }), "logits -> temp -> mirostat-v2");
    let adaptive = SamplingOptions {
        samplers: vec![SamplerKind::AdaptiveP, SamplerKind::MinP],
        adaptive_target: 0.5,
        ..seeded(1)
    };
    assert_eq!(describe(&adaptive), "logits -> min-p -> adaptive-p");

    // Every one of them generates, and the same again after a reset.
    for options in [
        everything,
        adaptive,
        SamplingOptions { mirostat: mirostat(1), ..seeded(1) },
        SamplingOptions { mirostat: mirostat(2), ..seeded(1) },
        SamplingOptions { grammar: Some(r#"root ::= ("yes" | "no") "!"+"#.to_owned()), ..seeded(5) },
    ] {
        let mut sampler = Sampler::new(model(), &options).unwrap();
        let first = generate_with(&mut sampler, 8).unwrap();
        sampler.reset();
        assert_eq!(generate_with(&mut sampler, 8).unwrap().tokens, first.tokens, "{options:?}");
    }
}

#[test]
fn seeds_decide() {
    let texts: HashSet<String> = (1..=6)
        .map(|seed| {
            let once = generate(&seeded(seed), 24);
            assert_eq!(generate(&seeded(seed), 24).tokens, once.tokens, "seed {seed}");
            once.text
        })
        .collect();
    assert!(texts.len() >= 5, "six seeds gave {} texts", texts.len());
    // Temperature 0 is greedy with any seed and any chain.
    let greedy = generate(&SamplingOptions::greedy(), 24);
    assert_eq!((greedy.tokens.len(), greedy.stop), (24, StopReason::Length));
    assert_eq!(generate(&SamplingOptions { temp: 0.0, ..seeded(3) }, 24).tokens, greedy.tokens);
    // An undetermined seed is drawn and reported, and determines the text.
    let mut drawn = Sampler::new(model(), &SamplingOptions::default()).unwrap();
    let seed = drawn.seed();
    let text = generate_with(&mut drawn, 24).unwrap().text;
    assert_eq!(generate(&seeded(seed), 24).text, text);
    let (ms, tokens) = drawn.perf();
    assert!(ms >= 0.0 && tokens == 24, "{tokens} tokens");
}

#[test]
fn a_grammar_is_obeyed() {
    let yes_or_no = Some(r#"root ::= "yes" | "no""#.to_owned());
    let greedy = SamplingOptions { grammar: yes_or_no.clone(), ..SamplingOptions::greedy() };
    for options in [greedy.clone(), SamplingOptions { grammar: yes_or_no, ..seeded(1) }] {
        let output = generate(&options, 16);
        assert!(output.text == "yes" || output.text == "no", "{:?}", output.text);
        assert!(matches!(output.stop, StopReason::Eog(_)), "{:?}", output.stop);
    }
    // So hot, letters are about equally likely: the grammar leaves the choice to the chain.
    let mut letters = HashSet::new();
    for seed in 1..=6 {
        let grammar = Some("root ::= [a-z]".to_owned());
        let output = generate(&SamplingOptions { grammar, temp: 100.0, top_k: 0, min_p: 0.0, ..seeded(seed) }, 16);
        assert!(output.text.len() == 1 && output.text.as_bytes()[0].is_ascii_lowercase(), "{:?}", output.text);
        letters.insert(output.text);
    }
    assert!(letters.len() > 2, "{letters:?}");

    // A grammar that has ended while generation must not: an error, not an abort.
    let endless = SamplingOptions { ignore_eos: true, ..greedy };
    let mut sampler = Sampler::new(model(), &endless).unwrap();
    let error = generate_with(&mut sampler, 16).err().expect("no token can follow");
    assert!(matches!(error, EvalError::Sampler(SamplerError::Grammar(_))), "{error}");
    // The sampler is as good as new after a reset.
    sampler.reset();
    assert!(matches!(generate_with(&mut sampler, 16), Err(EvalError::Sampler(SamplerError::Grammar(_)))));

    for bad in ["root ::= (", "start ::= \"a\"", "root ::= root \"a\"", "%llguidance {}", "root ::= \"a\0\""] {
        let options = SamplingOptions { grammar: Some(bad.into()), ..seeded(1) };
        let error = Sampler::new(model(), &options).err().expect("a broken grammar");
        assert!(matches!(error, SamplerError::Grammar(_)), "{bad:?}: {error}");
    }
}

#[test]
fn a_json_schema_is_obeyed() {
    let schema = r#"{
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["king", "prophet"]},
            "years": {"type": "integer", "minimum": 1, "maximum": 969}
        },
        "required": ["name", "kind", "years"],
        "additionalProperties": false
    }"#;
    let grammar = Sampler::json_schema_to_grammar(schema).unwrap();
    for seed in 1..=3 {
        let output = generate(&SamplingOptions { grammar: Some(grammar.clone()), ..seeded(seed) }, 200);
        assert!(matches!(output.stop, StopReason::Eog(_)), "{:?} after {:?}", output.stop, output.text);
        let value: serde_json::Value = serde_json::from_str(&output.text).expect(&output.text);
        assert!(value["name"].is_string(), "{value}");
        assert!(value["kind"] == "king" || value["kind"] == "prophet", "{value}");
        assert!((1..=969).contains(&value["years"].as_i64().unwrap()), "{value}");
        assert_eq!(value.as_object().unwrap().len(), 3, "{value}");
    }
}

#[test]
fn logit_bias_forces_and_excludes() {
    let forced = one_token("k");
    let greedy = SamplingOptions::greedy;
    let output = generate(&SamplingOptions { logit_bias: vec![(forced, 1e6)], ..greedy() }, 4);
    assert_eq!((output.tokens, output.text.as_str()), (vec![forced; 4], "kkkk"));

    let first = generate(&greedy(), 1).tokens[0];
    let excluded = vec![(first, f32::NEG_INFINITY)];
    assert_ne!(generate(&SamplingOptions { logit_bias: excluded, ..greedy() }, 1).tokens[0], first);

    let nothing_left = (0..model().n_vocab() as Token).map(|token| (token, f32::NEG_INFINITY)).collect();
    for options in [greedy(), seeded(1)] {
        let options = SamplingOptions { logit_bias: Clone::clone(&nothing_left), ..options };
        let error = generate_with(&mut Sampler::new(model(), &options).unwrap(), 1).err().expect("no token is left");
        assert!(matches!(error, EvalError::Sampler(SamplerError::Settings(_))), "{error}");
    }
}

#[test]
fn ignore_eos_goes_on() {
    let eog: Vec<Token> = (0..model().n_vocab() as Token).filter(|&token| model().is_eog(token)).collect();
    assert!(!eog.is_empty());
    let logit_bias: Vec<_> = eog.iter().map(|&token| (token, 1e6)).collect();
    let ends = SamplingOptions { logit_bias, ..SamplingOptions::greedy() };
    let output = generate(&ends, 8);
    assert!(output.tokens.is_empty());
    assert!(matches!(output.stop, StopReason::Eog(token) if eog.contains(&token)), "{:?}", output.stop);

    let output = generate(&SamplingOptions { ignore_eos: true, ..ends }, 8);
    assert_eq!((output.tokens.len(), output.stop), (8, StopReason::Length));
}

#[test]
fn penalties_see_the_prompt() {
    let first = generate(&SamplingOptions::greedy(), 1).tokens[0];
    let options = SamplingOptions {
        samplers: vec![SamplerKind::Penalties, SamplerKind::Temperature],
        presence_penalty: 1e6,
        ..SamplingOptions::greedy()
    };
    assert_eq!(generate(&options, 1).tokens, [first]);
    let mut sampler = Sampler::new(model(), &options).unwrap();
    sampler.accept(first);
    assert_ne!(generate_with(&mut sampler, 1).unwrap().tokens, [first]);
    let output = generate(&options, 32);
    let distinct: HashSet<Token> = output.tokens.iter().copied().collect();
    assert_eq!(distinct.len(), output.tokens.len(), "no token twice: {:?}", output.text);
}

#[test]
fn a_sampler_is_bound_to_its_model() {
    let other = Model::open(&demo_model(), &ModelOptions::default()).unwrap();
    let mut sampler = Sampler::new(&other, &SamplingOptions::greedy()).unwrap();
    // The sampler keeps its model alive.
    drop(other);
    let error = generate_with(&mut sampler, 1).err().expect("another model");
    assert!(matches!(error, EvalError::Sampler(SamplerError::Settings(_))), "{error}");
    sampler.reset();
}
