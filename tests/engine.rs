//! Sessions beside exact logits: observed routers, dense models, context shift.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use hobbit::engine::{NoShift, RouterChoice};
use hobbit::options::Repack;
use hobbit::{
    BatchToken, CachingOptions, EvalError, Model, ModelOptions, Sampler, SamplingOptions, SessionOptions, StopReason,
    Token,
};
use hobbit_core::gguf::{Gguf, HeaderBuilder};
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_synth::{self as synth, Format, Spec};

use crate::fixture::cli::demo_model;
use crate::fixture::script::bits;
use crate::fixture::{demo_tokens, write};

fn open(path: &Path, cache: ExpertCache) -> Model {
    Model::open(path, &ModelOptions { expert_cache: cache, ..ModelOptions::default() }).unwrap()
}

fn settings() -> SessionOptions {
    SessionOptions { n_ctx: 256, n_batch: 256, n_ubatch: 256, threads: Some(1), ..SessionOptions::default() }
}

#[test]
fn an_observer_sees_every_choice_and_changes_nothing() {
    let model = open(&demo_model(), ExpertCache::Percent(25.0));
    let tokens = demo_tokens(&model, 40);
    let run = |observe: bool| {
        let seen = Arc::new(Mutex::new(Vec::<RouterChoice>::new()));
        let sink = Arc::clone(&seen);
        let session = if observe {
            model.session_observed(&settings(), Box::new(move |choice| sink.lock().unwrap().push(choice)))
        } else {
            model.session(&settings())
        };
        let mut session = session.unwrap();
        session.feed(&tokens).unwrap();
        let logits = session.logits(tokens.len() - 1).unwrap().to_vec();
        drop(session);
        let choices = std::mem::take(&mut *seen.lock().unwrap());
        (logits, choices)
    };
    let (plain, nothing) = run(false);
    let (observed, choices) = run(true);
    assert!(nothing.is_empty());
    assert_eq!(plain, observed, "an observer must not change logits");
    let layers: Vec<u16> = choices.iter().map(|choice| choice.layer).collect();
    assert_eq!(layers, (0..model.info().n_layer as u16).collect::<Vec<_>>());
    for choice in &choices {
        // llama.cpp computes the last layer for the tokens whose logits are wanted only.
        assert!(choice.experts.len() == 2 * tokens.len() || choice.experts.len() == 2, "{}", choice.experts.len());
        assert_eq!(choice.experts.len(), choice.weights.len());
        for (experts, weights) in choice.experts.chunks(2).zip(choice.weights.chunks(2)) {
            assert!(experts.iter().all(|e| (0..8).contains(e)) && experts[0] != experts[1], "{experts:?}");
            assert!((weights[0] + weights[1] - 1.0).abs() < 1e-5 && weights[0] >= weights[1], "{weights:?}");
        }
    }
}

/// A prompt that shows its progress is evaluated a ubatch at a time: the same ubatches as llama.cpp cuts.
#[test]
fn progress_within_a_prompt_changes_nothing() {
    const N_UBATCH: usize = 8;
    let model = open(&demo_model(), ExpertCache::Percent(50.0));
    let settings = SessionOptions { n_batch: 32, n_ubatch: N_UBATCH as u32, ..settings() };
    for n_tokens in [1, 2, 8, 9, 10, 32, 33, 34, 73, 74] {
        let tokens = demo_tokens(&model, n_tokens);
        let mut whole = model.session(&settings).unwrap();
        whole.feed(&tokens).unwrap();
        let last_batch = (n_tokens - 1) % 32 + 1;
        let mut done = Vec::new();
        let mut pieces = model.session(&settings).unwrap();
        pieces.feed_with(&tokens, |n| done.push(n)).unwrap();
        let mut last_piece = last_batch;
        while last_piece > N_UBATCH + 1 {
            last_piece -= N_UBATCH;
        }
        let (expected, found) = (whole.logits(last_batch - 1).unwrap(), pieces.logits(last_piece - 1).unwrap());
        assert!(expected == found, "logits after {n_tokens} tokens");
        assert!(done.is_sorted() && done.last() == Some(&n_tokens), "{n_tokens}: {done:?}");
        assert_eq!(done.len() > 1, n_tokens > N_UBATCH + 1, "{n_tokens}: {done:?}");
        assert_eq!(whole.stats().prompt.tokens, pieces.stats().prompt.tokens, "{n_tokens}");
    }
}

#[test]
fn waiting_for_all_experts_first_changes_nothing() {
    let run = |overlap: bool| {
        // Misses would depend on how far reads ahead, and those that fill free slots, have come.
        let predictor = Some(PredictorKind::None);
        let caching = CachingOptions { overlap, predictor, fill: false, ..CachingOptions::default() };
        // A quarter is what one token uses: a prompt streams through staging besides.
        let expert_cache = ExpertCache::Percent(25.0);
        let model = Model::open(&demo_model(), &ModelOptions { caching, expert_cache, ..ModelOptions::default() });
        let model = model.unwrap();
        let (tokens, mut session) = (demo_tokens(&model, 48), model.session(&settings()).unwrap());
        let mut logits = Vec::new();
        for piece in [&tokens[..24]].into_iter().chain(tokens[24..].chunks(1)) {
            session.feed(piece).unwrap();
            logits.extend_from_slice(session.logits(piece.len() - 1).unwrap());
        }
        let misses = session.stats().decode.misses;
        assert!(misses > 0);
        (logits, misses)
    };
    let ((logits, misses), (expected, expected_misses)) = (run(true), run(false));
    assert!(logits == expected, "other logits");
    assert_eq!(misses, expected_misses);
}

#[test]
fn a_dense_model_runs_as_plain_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dense.gguf");
    let tiny = Spec::tiny("deepseek");
    synth::write(&path, &Spec { dense_lead: Some(tiny.layers), ..tiny }).unwrap();
    let model = open(&path, ExpertCache::Auto);
    assert!(!model.info().is_moe());
    let mut session = model.session(&settings()).unwrap();
    let io_choice = &session.description().io_choice;
    assert!(io_choice.contains("dense"), "{io_choice}");
    session.feed(&model.tokenize("some text", true, false).unwrap()).unwrap();
    let mut sampler = Sampler::new(&model, &SamplingOptions { ignore_eos: true, ..SamplingOptions::greedy() }).unwrap();
    assert_eq!(session.generate(&mut sampler, Some(8)).filter(Result::is_ok).count(), 8);
    assert_eq!(session.stats().total().misses, 0);
}

#[test]
fn a_full_context_ends_or_shifts() {
    let model = open(&demo_model(), ExpertCache::Percent(50.0));
    let prompt = demo_tokens(&model, 20);
    let greedy = SamplingOptions { ignore_eos: true, ..SamplingOptions::greedy() };
    for context_shift in [false, true] {
        let options = SessionOptions { n_ctx: 64, n_batch: 64, context_shift, ..settings() };
        let mut session = model.session(&options).unwrap();
        let n_ctx = session.context().n_ctx() as usize;
        session.feed(&prompt).unwrap();
        let mut sampler = Sampler::new(&model, &greedy).unwrap();
        let mut generation = session.generate(&mut sampler, Some(3 * n_ctx));
        let count = generation.by_ref().map(Result::unwrap).count();
        let stop = generation.stop_reason();
        drop(generation);
        if context_shift {
            assert_eq!((count, stop), (3 * n_ctx, Some(StopReason::Length)));
            continue;
        }
        // The last token is sampled from the last place but never evaluated.
        assert_eq!((count, stop), (n_ctx - prompt.len() + 1, Some(StopReason::ContextFull)));
        session.reset();
        assert!(matches!(session.feed(&vec![prompt[0]; n_ctx + 1]), Err(EvalError::ContextFull { .. })));
    }
}

/// A full context shifts in every architecture, with the bits of llama.cpp by itself, or says why it cannot.
#[test]
fn contexts_of_all_architectures_shift_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let run = |path: &Path, passthrough: bool| -> Result<Vec<Vec<u32>>, NoShift> {
        let expert_cache = if passthrough { ExpertCache::Auto } else { ExpertCache::Percent(25.0) };
        let options = ModelOptions { passthrough, expert_cache, repack: Repack::Off, ..ModelOptions::default() };
        let model = Model::open(path, &options).unwrap();
        let mut session = model.session(&SessionOptions { context_shift: true, ..settings() }).unwrap();
        if let Some(reason) = session.sequences().no_shift() {
            return Err(reason);
        }
        let tokens: Vec<Token> = (0..400).map(|at| at * 7919 % 251).collect();
        let mut last = |piece: &[Token]| {
            session.feed(piece).unwrap();
            bits(session.logits(piece.len() - 1).unwrap())
        };
        let found = tokens.chunks(50).map(&mut last).collect();
        assert!(session.n_past() <= 256, "{} tokens in a context of 256", session.n_past());
        Ok(found)
    };
    for arch in synth::architectures() {
        let path = write(dir.path(), &Spec::tiny(arch));
        let reason = match arch {
            "qwen3vlmoe" | "qwen35moe" | "qwen4exp" => Some(NoShift::Dimensions),
            "granitehybrid" => Some(NoShift::NoRotation),
            "deepseek4" => Some(NoShift::Unsupported),
            "step35" => Some(NoShift::Window),
            _ => None,
        };
        let (expected, found) = (run(&path, true), run(&path, false));
        assert_eq!(expected.as_ref().err(), reason.as_ref(), "{arch}");
        assert!(found == expected, "{arch}: other logits");
    }
}

/// Evaluates `tokens[from..to]` on sequence 0, logits of the last one only where wanted.
fn place(tokens: &[Token], from: usize, to: usize, logits: bool) -> Vec<BatchToken> {
    (from..to)
        .map(|i| BatchToken { token: tokens[i], position: i as i32, sequence: 0, logits: logits && i + 1 == to })
        .collect()
}

#[test]
fn a_refused_batch_leaves_the_context_alone() {
    let model = open(&demo_model(), ExpertCache::Percent(25.0));
    let tokens = demo_tokens(&model, 24);
    let run = |disturb: bool| {
        let mut session = model.session(&settings()).unwrap();
        session.evaluate(&place(&tokens, 0, 8, true)).unwrap();
        if disturb {
            session.evaluate(&[]).unwrap();
            let impossible = BatchToken { token: Token::MAX, position: 8, sequence: 0, logits: true };
            session.evaluate(&[impossible]).unwrap_err();
            let interrupt = session.interrupt_handle();
            interrupt.set();
            assert!(matches!(session.evaluate(&place(&tokens, 8, 24, true)), Err(EvalError::Interrupted)));
            interrupt.clear();
        }
        session.evaluate(&place(&tokens, 8, 24, true)).unwrap();
        session.logits(15).unwrap().to_vec()
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn sequences_share_the_context_evenly() {
    let model = open(&demo_model(), ExpertCache::Percent(50.0));
    let options = SessionOptions { n_ctx: 512, n_seq_max: 2, context_shift: true, ..settings() };
    let mut session = model.session(&options).unwrap();
    let tokens = demo_tokens(&model, 300);
    for piece in tokens.chunks(60) {
        session.feed(piece).unwrap();
    }
    assert!(session.n_past() <= 256, "{} tokens in a sequence of 256", session.n_past());
}

#[test]
fn one_expert_per_token_has_one_weight() {
    let mut options = ModelOptions::default();
    options.kv_overrides.push("llama.expert_used_count=int:1".parse().unwrap());
    let model = Model::open(&demo_model(), &options).unwrap();
    let seen = Arc::new(Mutex::new(Vec::<RouterChoice>::new()));
    let sink = Arc::clone(&seen);
    let observer = Box::new(move |choice| sink.lock().unwrap().push(choice));
    model.session_observed(&settings(), observer).unwrap().feed(&demo_tokens(&model, 5)).unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), model.info().n_layer as usize);
    assert!(seen.iter().all(|choice| choice.experts.len() == choice.weights.len()), "{seen:?}");
}

/// Layers for multi-token prediction have no slots, and their weights stay in the file, unless an option says only at
/// load that they are such.
#[test]
fn layers_for_multi_token_prediction_stay_in_the_file() {
    for arch in ["glm4moe", "hy_v3", "step35"] {
        let dir = tempfile::tempdir().unwrap();
        let [path, without] = ["mtp.gguf", "plain.gguf"].map(|name| dir.path().join(name));
        synth::write(&path, &Spec { mtp: 1, ..Spec::tiny(arch) }).unwrap();
        synth::write(&without, &Spec::tiny(arch)).unwrap();
        let opened = |path: &Path, kv_overrides: &[&str]| {
            let kv_overrides = kv_overrides.iter().map(|text| text.parse().unwrap()).collect();
            let options = ModelOptions { kv_overrides, passthrough: false, ..ModelOptions::default() };
            let model = Model::open(path, &options).unwrap();
            let mut session = model.session(&settings()).unwrap();
            session.feed(&model.tokenize("some text", true, false).unwrap()).unwrap();
            assert!(session.model().unseen_experts().is_empty());
            (session.stats().layers.len(), session.description().plan.fixed.weights)
        };
        assert_eq!(opened(&path, &[]), opened(&without, &[]), "{arch}");
        let (layers, weights) = opened(&path, &[&format!("{arch}.nextn_predict_layers=int:1")]);
        assert_eq!(layers, opened(&without, &[]).0);
        // llama.cpp by itself leaves out glm4moe's.
        assert!(arch == "glm4moe" || weights > opened(&without, &[]).1, "{arch}");
    }
}

/// Layers of multi-token prediction are not evaluated: with and without them, logits are the same.
#[test]
fn layers_of_multi_token_prediction_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for arch in ["glm4moe", "hy_v3", "step35", "deepseek32", "glm-dsa", "deepseek4"] {
        let logits = [0, 1].map(|mtp| {
            let path = dir.path().join(format!("{arch}-{mtp}.gguf"));
            synth::write(&path, &Spec { mtp, ..Spec::tiny(arch) }).unwrap();
            let model = Model::open(&path, &ModelOptions { passthrough: true, ..ModelOptions::default() }).unwrap();
            let mut session = model.session(&settings()).unwrap();
            session.feed(&[1, 2, 3]).unwrap();
            bits(session.logits(2).unwrap())
        });
        assert!(logits[0] == logits[1], "{arch}");
    }
}

/// Going back to the first tokens of a context is as if nothing had ever followed, wherever a sliding window has moved
/// on to.
#[test]
fn a_context_that_goes_back_forgets_what_followed() {
    let dir = tempfile::tempdir().unwrap();
    let mut with_window = Vec::new();
    for arch in synth::architectures() {
        let path = write(dir.path(), &Spec { ctx: 16384, ..Spec::tiny(arch) });
        // Two have windows of their own, whatever their header says.
        let window = match arch {
            "llama4" => 8192,
            "smallthinker" => 4096,
            _ => 32,
        };
        // llama.cpp by itself, and at the seam.
        for passthrough in [true, false] {
            let kv_overrides = vec![format!("{arch}.attention.sliding_window=int:{window}").parse().unwrap()];
            let options = ModelOptions { kv_overrides, passthrough, ..ModelOptions::default() };
            let model = Model::open(&path, &options).unwrap();
            let options = SessionOptions { n_ctx: 12288, n_batch: 64, n_ubatch: 64, ..settings() };
            let mut session = model.session(&options).unwrap();
            if !session.sequences().has_window() {
                continue;
            }
            with_window.push(arch);
            // llama.cpp rounds the window's cells up to 256; that many more tokens make it use all of them anew.
            let tokens: Vec<Token> = (0..window + 256 + 448).map(|at| at * 7919 % 509).collect();
            let tail: Vec<Token> = (0..32).collect();
            session.feed(&tokens).unwrap();
            // As far as the window still holds, and to before that. Both are multiples of 64: batches are equal.
            let near = (tokens.len() / 64 - 1) * 64;
            let kept = [near, 384].map(|n| {
                let kept = session.keep(n);
                session.feed(&tokens[kept..n]).unwrap();
                session.feed(&tail).unwrap();
                let found = session.logits(tail.len() - 1).unwrap().to_vec();
                let mut fresh = model.session(&options).unwrap();
                fresh.feed(&tokens[..n]).unwrap();
                fresh.feed(&tail).unwrap();
                assert!(fresh.logits(tail.len() - 1).unwrap() == found, "{arch}, alone: {passthrough}, {n} tokens");
                kept
            });
            assert_eq!(kept, [near, 0], "{arch}, alone: {passthrough}");
        }
    }
    with_window.dedup();
    let expected = "gpt-oss llama4 smallthinker mimo2 exaone-moe afmoe laguna mellum cohere2moe granite_swa gemma4 \
                    step35";
    assert_eq!(with_window.join(" "), expected);
}

/// Logits of a context that is gone are not sampled from.
#[test]
fn generation_needs_current_logits_and_loses_no_token() {
    let model = open(&demo_model(), ExpertCache::Percent(50.0));
    let prompt = demo_tokens(&model, 8);
    let mut session = model.session(&settings()).unwrap();
    let mut sampler = Sampler::new(&model, &SamplingOptions::greedy()).unwrap();
    let mut next = |session: &mut hobbit::Session| session.generate(&mut sampler, Some(1)).next().unwrap();
    assert!(matches!(next(&mut session), Err(EvalError::NothingEvaluated)), "a new session");
    session.feed(&prompt).unwrap();
    let first = next(&mut session).unwrap();
    session.reset();
    assert!(matches!(next(&mut session), Err(EvalError::NothingEvaluated)), "after a reset");
    session.feed(&prompt).unwrap();
    assert_eq!(next(&mut session).unwrap(), first);
    // The sampled token alone: the logits are those that it was sampled from.
    session.truncate(8).unwrap();
    assert_eq!(next(&mut session).unwrap(), first);
    session.truncate(4).unwrap();
    assert!(matches!(next(&mut session), Err(EvalError::NothingEvaluated)), "after a cut");
    session.feed(&prompt[4..]).unwrap();
    assert_eq!(next(&mut session).unwrap(), first);
    // The sampled token waits for its evaluation; a feed that fails does not lose it.
    let interrupt = session.interrupt_handle();
    interrupt.set();
    assert!(matches!(session.feed(&prompt), Err(EvalError::Interrupted)));
    assert_eq!(session.n_past(), 9);
    session.truncate(10).unwrap_err();
    interrupt.clear();
    session.feed(&prompt).unwrap();
    assert_eq!(session.n_past(), 17);
}

/// A batch that llama.cpp asserts against is an error, and only the batch is lost.
#[test]
fn an_impossible_batch_is_an_error() {
    let model = open(&demo_model(), ExpertCache::Percent(50.0));
    let tokens = demo_tokens(&model, 12);
    let mut session = model.session(&SessionOptions { n_batch: 8, ..settings() }).unwrap();
    let place = |tokens: &[Token]| place(tokens, 0, tokens.len(), true);
    let error = session.evaluate(&place(&tokens)).unwrap_err();
    assert!(matches!(error, EvalError::BatchTooLarge { n_tokens: 12, n_batch: 8 }), "{error}");
    assert!(error.to_string().contains("12 tokens"), "{error}");
    let good = place(&tokens[..4]);
    let altered = |alter: &dyn Fn(&mut hobbit::BatchToken)| {
        let mut batch = good.clone();
        alter(&mut batch[2]);
        batch
    };
    for (what, batch) in [
        ("a token that is none", altered(&|entry| entry.token = -1)),
        ("a token beyond the vocabulary", altered(&|entry| entry.token = i32::MAX)),
        ("a sequence that is none", altered(&|entry| entry.sequence = -1)),
        ("a sequence that the session does not have", altered(&|entry| entry.sequence = 7)),
        ("a position that is none", altered(&|entry| entry.position = -3)),
        ("a gap", altered(&|entry| entry.position = 100)),
    ] {
        assert!(session.evaluate(&batch).is_err(), "{what}");
    }
    session.evaluate(&good).unwrap();
}

#[test]
fn headers_that_kernels_fail_on_are_refused() {
    for value in ["-1", "nan"] {
        let text = format!("llama.attention.layer_norm_rms_epsilon=float:{value}");
        let options = ModelOptions { kv_overrides: vec![text.parse().unwrap()], ..ModelOptions::default() };
        let error = Model::open(&demo_model(), &options).err().expect("it is refused").to_string();
        assert!(error.contains("demo.gguf") && error.contains("layer_norm_rms_epsilon"), "{error}");
    }
}

/// Each request that needs a text would end the process.
#[test]
fn models_without_a_tokenizer_are_refused() {
    let refused = |path: &Path, options: &ModelOptions| {
        let error = Model::open(path, options).err().expect("it is refused").to_string();
        assert!(error.contains("tokenizer.ggml.model is no") && error.contains("convert it again"), "{error}");
    };
    for kind in ["none", "no_vocab"] {
        let text = format!("tokenizer.ggml.model=str:{kind}");
        refused(&demo_model(), &ModelOptions { kv_overrides: vec![text.parse().unwrap()], ..ModelOptions::default() });
    }
    let dir = tempfile::tempdir().unwrap();
    let demo = Gguf::open(&demo_model()).unwrap();
    let mut header = HeaderBuilder::new(32).unwrap();
    demo.copy_keys(&mut header, |key| !key.starts_with("tokenizer.")).unwrap();
    header.key("tokenizer.ggml.model", "none").unwrap();
    let path = dir.path().join("mute.gguf");
    fs::write(&path, header.finish().header).unwrap();
    refused(&path, &ModelOptions::default());
}

/// Every block of every tensor, experts included, of which llama.cpp only knows addresses.
#[test]
fn check_tensors_finds_invalid_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &Spec { types: vec![Format::Q8_0], ..Spec::tiny("qwen3moe") });
    let sound = fs::read(&path).unwrap();
    let checked = |passthrough| {
        let options = ModelOptions { check_tensors: true, passthrough, ..ModelOptions::default() };
        Model::open(&path, &options).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!([checked(true), checked(false)], [Ok(()), Ok(())]);
    let gguf = Gguf::open(&path).unwrap();
    for (name, named) in [
        ("blk.1.ffn_down_exps.weight", "blk.1.ffn_down_exps.weight[0]"),
        ("blk.0.attn_q.weight", "blk.0.attn_q.weight"),
    ] {
        let mut bytes = sound.clone();
        // The scale of the first block becomes infinite.
        let at = gguf.tensor(name).unwrap().extent.offset as usize;
        bytes[at..at + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        // llama.cpp by itself names the tensor, hobbit the expert.
        for (passthrough, named) in [(true, name), (false, named)] {
            let error = checked(passthrough).unwrap_err();
            assert!(
                error.contains("qwen3moe.gguf") && error.contains(named) && error.contains("invalid data"),
                "{error}"
            );
        }
        Model::open(&path, &ModelOptions::default()).unwrap();
    }
}
