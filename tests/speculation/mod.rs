//! Speculative decoding: the text is the one without, whatever is drafted, and nothing of a rejected draft stays.
//!
//! A batch of several tokens has other last bits than a single token where its products are other kernels'. The texts
//! here are ones in which that chooses no other token.

mod followers;

use std::path::{Path, PathBuf};

use hobbit::engine::{DraftRequest, NoSpeculation};
use hobbit::options::{DraftOptions, DraftSource, FlashAttn, KvType, SpeculationOptions};
use hobbit::{
    BatchToken, CachingOptions, Model, ModelOptions, Sampler, SamplingOptions, Session, SessionOptions, StopReason,
    Token,
};
use hobbit_core::cache::CacheState;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use hobbit_core::speculation::GateReport;
use hobbit_synth::{self as synth, Format, Spec};

use crate::fixture::cli::{cli, demo_model};
use crate::fixture::{bundled, demo_in_f32, predictable};

fn settings() -> SessionOptions {
    let (type_k, type_v) = (KvType::F32, KvType::F32);
    SessionOptions {
        n_ctx: 512,
        n_batch: 256,
        n_outputs_max: 9,
        threads: Some(1),
        type_k,
        type_v,
        flash_attn: FlashAttn::Off,
        ..SessionOptions::default()
    }
}

fn lookup() -> SpeculationOptions {
    SpeculationOptions { sources: vec![DraftSource::NgramCache], fixed: true, ..SpeculationOptions::default() }
}

fn drafted_by(path: &Path) -> SpeculationOptions {
    let draft = Some(DraftOptions { path: path.to_owned(), ..DraftOptions::default() });
    SpeculationOptions { sources: vec![DraftSource::DraftSimple], draft, ..lookup() }
}

fn greedy() -> SamplingOptions {
    SamplingOptions { temp: 0.0, ..SamplingOptions::default() }
}

fn seeded(seed: u32) -> SamplingOptions {
    SamplingOptions { seed, temp: 0.7, ..SamplingOptions::default() }
}

fn open(path: &Path, expert_cache: ExpertCache) -> Model {
    Model::open(path, &ModelOptions { expert_cache, ..ModelOptions::default() }).unwrap()
}

/// The first tokens of a bundled text.
fn text(model: &Model, name: &str, n: usize) -> Vec<Token> {
    let text = std::fs::read(bundled(name)).unwrap();
    let mut tokens = model.tokenize(&text[..4096], true, false).unwrap();
    tokens.truncate(n);
    tokens
}

fn session(model: &Model, settings: &SessionOptions, speculation: Option<&SpeculationOptions>) -> Session {
    let mut session = model.session(settings).unwrap();
    if let Some(options) = speculation {
        session.speculate(options).unwrap();
    }
    session
}

/// Generates at most `n` tokens after `prompt`.
fn generate(
    session: &mut Session,
    sampling: &SamplingOptions,
    prompt: &[Token],
    n: usize,
) -> (Vec<Token>, Option<StopReason>) {
    let model = session.model().clone();
    let mut sampler = Sampler::new(&model, sampling).unwrap();
    session.feed(prompt).unwrap();
    let mut generation = session.generate(&mut sampler, Some(n));
    let tokens = generation.by_ref().map(Result::unwrap).collect();
    (tokens, generation.stop_reason())
}

fn report(session: &Session) -> GateReport {
    session.stats().speculation.unwrap()
}

#[test]
fn lookup_changes_no_text() {
    for cache in [ExpertCache::Auto, ExpertCache::Percent(25.0)] {
        let model = open(demo_in_f32(), cache);
        let prompt = text(&model, "demo-heldout-code.txt", 200);
        for sampling in [greedy(), seeded(7), seeded(8)] {
            let run = |speculation: Option<&SpeculationOptions>| {
                let mut session = session(&model, &settings(), speculation);
                let found = generate(&mut session, &sampling, &prompt, 100);
                (found, session)
            };
            let (expected, plain) = run(None);
            assert_eq!(plain.stats().speculation, None);
            let (found, drafting) = run(Some(&lookup()));
            assert_eq!(found, expected, "{cache:?}, temperature {}", sampling.temp);
            let report = report(&drafting);
            assert!(report.drafted > 0, "{report:?}");
            assert!(sampling.temp > 0.0 || report.accepted > 0, "{report:?}");
            assert!(report.steps + report.accepted + 1 >= found.0.len() as u64, "{report:?}");
            // The same tokens were evaluated, and nothing else is left of the drafts.
            assert_eq!(drafting.n_past(), plain.n_past());
            assert_eq!(drafting.stats().decode.tokens, plain.stats().decode.tokens);
        }
    }
}

#[test]
fn every_lookup_drafts_without_harm() {
    let model = open(demo_in_f32(), ExpertCache::Auto);
    // A text that repeats itself is continued by all of them.
    let piece = text(&model, "demo-heldout-code.txt", 100);
    let prompt = piece.repeat(4);
    let expected = generate(&mut session(&model, &settings(), None), &greedy(), &prompt, 60);
    for source in DraftSource::ALL.into_iter().filter(|source| source.name().starts_with("ngram")) {
        let options = SpeculationOptions { sources: vec![source], ..lookup() };
        let mut session = session(&model, &settings(), Some(&options));
        assert_eq!(generate(&mut session, &greedy(), &prompt, 60), expected, "{source}");
    }
}

#[test]
fn a_model_is_its_own_perfect_draft() {
    let model = open(demo_in_f32(), ExpertCache::Percent(50.0));
    let prompt = text(&model, "demo-heldout-code.txt", 100);
    for sampling in [greedy(), seeded(3)] {
        let expected = generate(&mut session(&model, &settings(), None), &sampling, &prompt, 80);
        let mut drafting = session(&model, &settings(), Some(&drafted_by(demo_in_f32())));
        assert_eq!(generate(&mut drafting, &sampling, &prompt, 80), expected);
        let report = report(&drafting);
        assert!(report.drafted > 0, "{report:?}");
        if sampling.temp == 0.0 {
            assert_eq!(report.accepted, report.drafted, "{report:?}");
        }
    }
}

#[test]
fn a_draft_with_other_tokens_is_refused() {
    let model = open(demo_in_f32(), ExpertCache::Auto);
    let error = model.session(&settings()).unwrap().speculate(&drafted_by(&bundled("fine.gguf"))).unwrap_err();
    assert!(error.to_string().contains("fine.gguf: the draft model's vocabulary is not the target's"), "{error}");
    let none = SpeculationOptions { draft: None, ..drafted_by(demo_in_f32()) };
    let error = model.session(&settings()).unwrap().speculate(&none).unwrap_err();
    assert!(error.to_string().contains("needs a draft model"), "{error}");
    let missing = SpeculationOptions { lookup_static: Some("no/such.cache".into()), ..lookup() };
    let error = model.session(&settings()).unwrap().speculate(&missing).unwrap_err();
    assert!(error.to_string().contains("Couldn't read static lookup cache"), "{error}");
}

#[test]
fn a_recurrent_state_has_no_drafts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mamba.gguf");
    synth::write(&path, &Spec::tiny("jamba")).unwrap();
    let mut session = open(&path, ExpertCache::Percent(50.0)).session(&settings()).unwrap();
    assert_eq!(session.no_speculation(), Some(NoSpeculation::Recurrent));
    assert!(session.speculate(&lookup()).is_err());
}

/// llama.cpp keeps the states before the last tokens of a batch.
#[test]
fn a_recurrent_state_goes_back_where_llama_cpp_can() {
    let dir = tempfile::tempdir().unwrap();
    let archs =
        ["qwen35moe", "qwen4exp", "lfm2moe", "nemotron_h_moe", "kimi-k3", "bailingmoe3", "glm5-next", "deepseek4"];
    let draft = dir.path().join("draft.gguf");
    synth::write(&draft, &Spec { seed: 4, ..Spec::tiny("qwen3moe") }).unwrap();
    let sampling = SamplingOptions { ignore_eos: true, ..greedy() };
    for arch in archs {
        let path = dir.path().join(format!("{arch}.gguf"));
        let types = vec![Format::F32];
        synth::write(&path, &Spec { seed: 3, types, ..Spec::tiny(arch) }).unwrap();
        let model = open(&path, ExpertCache::Percent(50.0));
        let prompt: Vec<Token> = (0..50).map(|at| 3 + at * at % 23 % 40).collect();
        let speculation = SpeculationOptions { n_max: 4, ..drafted_by(&draft) };
        let settings = SessionOptions { rollback: 4, ..settings() };
        let expected = generate(&mut session(&model, &self::settings(), None), &sampling, &prompt, 40);
        let mut drafting = session(&model, &settings, Some(&speculation));
        assert_eq!(drafting.no_speculation(), None, "{arch}");
        assert_eq!(generate(&mut drafting, &sampling, &prompt, 40), expected, "{arch}");
        let report = report(&drafting);
        assert!(report.drafted > report.accepted, "{arch}: {report:?}");
    }
}

/// A model whose last layers are for multi-token prediction, and prompt and settings for it.
fn predicting((arch, mtp): (&str, u32), dir: &Path) -> (PathBuf, Vec<Token>, SessionOptions, SpeculationOptions) {
    let path = dir.join(format!("{arch}.gguf"));
    synth::write(&path, &Spec { seed: 3, types: vec![Format::F32], mtp, ..Spec::tiny(arch) }).unwrap();
    let prompt = (0..50).map(|at| 3 + at * at % 23 % 40).collect();
    let settings = SessionOptions { rollback: 3, ..settings() };
    (path, prompt, settings, SpeculationOptions { sources: vec![DraftSource::DraftMtp], n_max: 3, ..lookup() })
}

fn open_mtp(path: &Path, mtp: bool, passthrough: bool) -> Model {
    let expert_cache = if passthrough { ExpertCache::Auto } else { ExpertCache::Percent(50.0) };
    Model::open(path, &ModelOptions { mtp, passthrough, expert_cache, ..ModelOptions::default() }).unwrap()
}

/// Random weights: nearly all drafts are rejected.
#[test]
fn layers_for_multi_token_prediction_draft_without_harm() {
    let dir = tempfile::tempdir().unwrap();
    let archs = "qwen35moe glm4moe deepseek2 deepseek32 deepseek4 mimo2 nemotron_h_moe hy_v3 step35 glm-dsa cohere2moe \
                 qwen4exp bailingmoe3";
    // The second layer drafts the second token.
    let several = [("mimo2", 2), ("step35", 3)];
    let sampling = SamplingOptions { ignore_eos: true, ..greedy() };
    for arch in archs.split(' ').map(|arch| (arch, 1)).chain(several) {
        let (path, prompt, settings, speculation) = predicting(arch, dir.path());
        let arch = format!("{arch:?}");
        let plain = open_mtp(&path, false, false);
        let expected = generate(&mut session(&plain, &settings, None), &sampling, &prompt, 40);
        for passthrough in [false, true] {
            let model = open_mtp(&path, true, passthrough);
            let mut drafting = session(&model, &settings, Some(&speculation));
            assert_eq!(model.run_mode().is_passthrough(), passthrough);
            assert_eq!(generate(&mut drafting, &sampling, &prompt, 40), expected, "{arch}, passthrough {passthrough}");
            let report = report(&drafting);
            assert!(report.drafted > report.accepted, "{arch}: {report:?}");
            assert!(report.steps_with_drafts + 1 >= report.steps, "{arch}: {report:?}");
        }
    }
}

/// The second context goes back with the first, and starts over where it cannot follow.
#[test]
fn layers_for_multi_token_prediction_follow_the_text() {
    let dir = tempfile::tempdir().unwrap();
    let sampling = SamplingOptions { ignore_eos: true, ..greedy() };
    for arch in ["glm4moe", "qwen35moe"] {
        let path = predictable(dir.path(), arch);
        let prompt: Vec<Token> = (0..50).map(|at| 3 + at * at % 23 % 40).collect();
        let run = |mtp: bool| {
            let settings = SessionOptions { rollback: 3, n_seq_max: 2, n_outputs_max: 8, ..settings() };
            let options = SpeculationOptions { sources: vec![DraftSource::DraftMtp], n_max: 3, ..lookup() };
            let model = open_mtp(&path, mtp, false);
            let mut session = session(&model, &settings, mtp.then_some(&options));
            let mut sampler = Sampler::new(&model, &sampling).unwrap();
            session.feed(&prompt).unwrap();
            let mut found = Vec::new();
            for n in 1..6 {
                found.extend(session.generate(&mut sampler, None).take(n).map(Result::unwrap));
                assert_eq!(session.n_past(), prompt.len() + found.len());
            }
            session.feed(&prompt[..7]).unwrap();
            found.extend(session.generate(&mut sampler, Some(30)).map(Result::unwrap));
            let state = session.sequences_mut().state(0).unwrap();
            let text: Vec<Token> = vec![5; session.sequences().tokens(0).len()];
            session.reset();
            session.feed(&prompt[20..]).unwrap();
            found.extend(session.generate(&mut sampler, Some(20)).map(Result::unwrap));
            session.sequences_mut().copy(0, 1).unwrap();
            session.restore(&text, &state, Vec::new()).unwrap();
            session.feed(&prompt[..3]).unwrap();
            found.extend(session.generate(&mut sampler, Some(30)).map(Result::unwrap));
            (found, session.stats().speculation, session.description().plan.fixed)
        };
        let ((expected, none, before), (found, report, after)) = (run(false), run(true));
        assert_eq!((&found, none), (&expected, None), "{arch}");
        let report = report.unwrap();
        assert!(report.accepted * 2 > report.drafted, "{arch}: {report:?}");
        assert!(report.steps * 3 < found.len() as u64 * 2, "{arch}: {report:?}");
        assert!(after.weights > before.weights && after.kv > before.kv && after.compute == before.compute, "{arch}");
    }
}

#[test]
fn a_model_without_layers_for_multi_token_prediction_is_refused() {
    let options = ModelOptions { mtp: true, ..ModelOptions::default() };
    let dir = tempfile::tempdir().unwrap();
    let error = Model::open(demo_in_f32(), &options).err().unwrap().to_string();
    let expected = "draft-mtp needs layers for multi-token prediction: the model has none that llama.cpp can run";
    assert!(error.contains(expected), "{error}");
    let recurrent = open_mtp(&predicting(("qwen3next", 1), dir.path()).0, true, false);
    assert_eq!(recurrent.session(&settings()).unwrap().no_speculation(), Some(NoSpeculation::Recurrent));
    let model = open(demo_in_f32(), ExpertCache::Auto);
    let mtp = SpeculationOptions { sources: vec![DraftSource::DraftMtp], ..lookup() };
    let error = model.session(&settings()).unwrap().speculate(&mtp).unwrap_err().to_string();
    assert!(error.contains("opened without these layers"), "{error}");
}

/// Each token of the text is one use, whatever the batches were: rejected drafts are none.
#[test]
fn policies_see_the_tokens_of_the_text_alone() {
    let dir = tempfile::tempdir().unwrap();
    let run = |speculation: Option<&SpeculationOptions>| {
        let state = dir.path().join(if speculation.is_some() { "drafted" } else { "plain" });
        // It counts uses over the whole run.
        let caching = CachingOptions { policy: PolicyKind::EdgeMoe, ..CachingOptions::default() };
        let options = ModelOptions {
            expert_cache: ExpertCache::Percent(50.0),
            caching,
            cache_state: Some(state.clone()),
            ..ModelOptions::default()
        };
        let model = Model::open(demo_in_f32(), &options).unwrap();
        let prompt = text(&model, "demo-heldout-code.txt", 200);
        let mut session = session(&model, &settings(), speculation);
        let found = generate(&mut session, &greedy(), &prompt, 60);
        let speculation = session.stats().speculation;
        drop((session, model));
        let saved = CacheState::from_bytes(&std::fs::read(state).unwrap()).unwrap();
        assert_eq!(saved.caches.len(), 1);
        (found, saved.caches[0].statistics.clone(), speculation)
    };
    let (plain, drafting) = (run(None), run(Some(&lookup())));
    assert_eq!(drafting.0, plain.0);
    assert!(plain.1.iter().any(|byte| *byte > 0) && drafting.1 == plain.1);
    assert!(drafting.2.is_some_and(|report| report.accepted > 0 && report.accepted < report.drafted));
}

/// A consumer may stop anywhere: the context is then what it is without speculation.
#[test]
fn a_generation_that_is_left_leaves_no_draft() {
    let model = open(demo_in_f32(), ExpertCache::Percent(50.0));
    let prompt = text(&model, "demo-heldout-code.txt", 200);
    let run = |speculation: Option<&SpeculationOptions>| {
        let mut session = session(&model, &settings(), speculation);
        let mut sampler = Sampler::new(&model, &greedy()).unwrap();
        session.feed(&prompt).unwrap();
        let mut found = Vec::new();
        for n in 1..12 {
            found.extend(session.generate(&mut sampler, None).take(n).map(Result::unwrap));
            assert_eq!(session.n_past(), prompt.len() + found.len());
            if n == 5 {
                let interrupt = session.interrupt_handle();
                let mut generation = session.generate(&mut sampler, None);
                found.extend(generation.next().map(Result::unwrap));
                interrupt.set();
                assert!(generation.next().is_none());
                assert_eq!(generation.stop_reason(), Some(StopReason::Interrupted));
                interrupt.clear();
            }
        }
        session.feed(&prompt[..7]).unwrap();
        found.extend(session.generate(&mut sampler, Some(30)).map(Result::unwrap));
        session.truncate(150).unwrap();
        session.feed(&prompt[150..]).unwrap();
        found.extend(session.generate(&mut sampler, Some(30)).map(Result::unwrap));
        (found, session.n_past())
    };
    let expected = run(None);
    for source in DraftSource::ALL.into_iter().filter(|source| !source.follows()) {
        let options = SpeculationOptions { sources: vec![source], ..drafted_by(demo_in_f32()) };
        assert_eq!(run(Some(&options)), expected, "{source}");
    }
}

#[test]
fn a_full_context_ends_or_shifts_at_the_same_token() {
    let model = open(demo_in_f32(), ExpertCache::Auto);
    let prompt = text(&model, "demo-heldout-code.txt", 200);
    for context_shift in [false, true] {
        let settings = SessionOptions { n_ctx: 256, context_shift, ..settings() };
        let run = |speculation: Option<&SpeculationOptions>| {
            let mut session = session(&model, &settings, speculation);
            let found = generate(&mut session, &greedy(), &prompt, 200);
            (found, session.n_past())
        };
        let expected = run(None);
        let reason = if context_shift { StopReason::Length } else { StopReason::ContextFull };
        assert_eq!(expected.0.1, Some(reason));
        assert_eq!(run(Some(&lookup())), expected);
        assert_eq!(run(Some(&drafted_by(demo_in_f32()))), expected);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = predictable(dir.path(), "glm4moe");
    let settings = SessionOptions { n_ctx: 256, context_shift: true, ..settings() };
    let sampling = SamplingOptions { ignore_eos: true, ..greedy() };
    let prompt: Vec<Token> = (0..200).map(|at| 3 + at * at % 23 % 40).collect();
    let run = |mtp: bool| {
        let options = SpeculationOptions { sources: vec![DraftSource::DraftMtp], n_max: 3, ..lookup() };
        let mut session = session(&open_mtp(&path, mtp, false), &settings, mtp.then_some(&options));
        (generate(&mut session, &sampling, &prompt, 200), session.stats().speculation)
    };
    let (expected, (found, report)) = (run(false).0, run(true));
    assert_eq!(found, expected);
    assert!(report.as_ref().is_some_and(|report| report.accepted * 2 > report.drafted), "{report:?}");
}

#[test]
fn a_grammar_allows_what_it_allows_without() {
    let model = open(demo_in_f32(), ExpertCache::Auto);
    let prompt = text(&model, "demo-heldout-code.txt", 200);
    let grammar = Some("root ::= (\"ab\" | \"ac\" | [d-f] \" \")+".to_owned());
    for sampling in [greedy(), seeded(5)] {
        let sampling = SamplingOptions { grammar: grammar.clone(), ..sampling };
        let expected = generate(&mut session(&model, &settings(), None), &sampling, &prompt, 60);
        let mut drafting = session(&model, &settings(), Some(&drafted_by(demo_in_f32())));
        assert_eq!(generate(&mut drafting, &sampling, &prompt, 60), expected);
        let report = report(&drafting);
        assert!(report.drafted > report.accepted, "the draft knows no grammar: {report:?}");
    }
}

/// Two texts in one step, as a server has them.
#[test]
fn sequences_are_drafted_for_at_once() {
    const N: usize = 40;
    let model = open(demo_in_f32(), ExpertCache::Percent(50.0));
    let prompts = ["demo-heldout-code.txt", "demo-heldout-prose.txt"].map(|name| text(&model, name, 150));
    let settings = SessionOptions { n_ctx: 1024, n_seq_max: 2, n_outputs_max: 18, ..settings() };
    let run = |speculation: Option<&SpeculationOptions>| {
        let mut session = session(&model, &settings, speculation);
        let mut samplers = [(); 2].map(|()| Sampler::new(&model, &greedy()).unwrap());
        let mut texts: Vec<Vec<Token>> = prompts.to_vec();
        for (sequence, prompt) in prompts.iter().enumerate() {
            let entry = |(at, token): (usize, &Token)| BatchToken {
                token: *token,
                position: at as i32,
                sequence: sequence as i32,
                logits: at + 1 == prompt.len(),
            };
            session.evaluate(&prompt.iter().enumerate().map(entry).collect::<Vec<_>>()).unwrap();
            session.sequences_mut().evaluated_piece(sequence as i32, None).unwrap();
            let token = session.sample(sequence as i32, &mut samplers[sequence]).unwrap();
            session.sequences_mut().set_pending(sequence as i32, token);
            texts[sequence].push(token);
        }
        while texts.iter().zip(&prompts).any(|(text, prompt)| text.len() < prompt.len() + N) {
            session.draft(&[0, 1].map(|sequence| DraftRequest { sequence, n_max: 7, n_min: 0 })).unwrap();
            session.advance(&[0, 1]).unwrap();
            for (sequence, text) in (0..).zip(&mut texts) {
                while session.sequences_mut().take(sequence) {
                    assert_eq!(session.sequences().tokens(sequence), text);
                    let token = session.sample(sequence, &mut samplers[sequence as usize]).unwrap();
                    session.sequences_mut().set_pending(sequence, token);
                    text.push(token);
                }
                session.settle(sequence).unwrap();
            }
        }
        texts.iter_mut().zip(&prompts).for_each(|(text, prompt)| text.truncate(prompt.len() + N));
        (texts, session.stats().speculation)
    };
    let (expected, _) = run(None);
    for options in [lookup(), drafted_by(demo_in_f32())] {
        let (found, report) = run(Some(&options));
        assert_eq!(found, expected);
        assert!(report.as_ref().is_some_and(|report| report.accepted > 0), "{report:?}");
    }
}

#[test]
fn the_program_stops_where_it_stops_without() {
    let dir = tempfile::tempdir().unwrap();
    let run = |more: &[&str]| {
        let stats = dir.path().join("stats.json");
        let (model, file) = (demo_in_f32(), dir.path().join("prompt.txt"));
        std::fs::write(&file, &std::fs::read(bundled("demo-heldout-code.txt")).unwrap()[..900]).unwrap();
        let (model, file, stats_file) = (model.to_str().unwrap(), file.to_str().unwrap(), stats.to_str().unwrap());
        let usual = "-c 512 -n 60 -no-cnv -t 1 -ctk f32 -ctv f32 -fa off".split(' ').collect::<Vec<_>>();
        let files = ["-m", model, "-f", file, "--stats-json", stats_file];
        let ran = cli(&[&files[..], &usual, more].concat()).run().expect(0);
        let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(stats).unwrap()).unwrap();
        (ran.stdout, stats["stop"].clone(), stats["speculation"].clone(), ran.stderr)
    };
    for more in
        [&["--temp", "0"][..], &["-s", "3"], &["--temp", "0", "-r", "."], &["--temp", "0", "--expert-cache", "25%"]]
    {
        let expected = run(more);
        let found = run(&[more, &["--spec-type", "ngram-cache", "--draft-max", "6", "--draft-fixed"]].concat());
        assert_eq!((&found.0, &found.1), (&expected.0, &expected.1), "{more:?}");
        assert_eq!(expected.2, serde_json::Value::Null);
        assert!(found.2["steps"].as_u64().is_some_and(|n| n > 0), "{}", found.2);
        assert!(found.3.contains(" drafts"), "{}", found.3);
    }
    let of_none = cli(&["-m", demo_in_f32().to_str().unwrap(), "--spec-type", "draft-mtp", "-p", "a"]).run().expect(1);
    assert!(of_none.stderr.contains("draft-mtp needs layers"), "{}", of_none.stderr);
    let (demo, budget) = (demo_model(), ["--mem-budget", "40M", "-p", "a", "-n", "1"]);
    let demo = demo.to_str().unwrap();
    let refused = cli(&[&["-m", demo, "-md", demo, "-c", "512"][..], &budget].concat()).run().expect(1).stderr;
    assert!(refused.contains("beside a draft model that takes ") && refused.contains("too small"), "{refused}");
    let of_model = run(&["--temp", "0", "-md", demo_in_f32().to_str().unwrap(), "--draft-fixed"]);
    assert_eq!(of_model.0, run(&["--temp", "0"]).0);
    assert_eq!(of_model.2["accepted"], of_model.2["drafted"]);
}
