//! Where everything fits, llama.cpp runs by itself, and its bits are llama.cpp's own defaults'.

#[path = "fixture/cli.rs"]
mod cli;
#[path = "fixture/mod.rs"]
mod fixture;

use std::path::Path;

use gguf_tools::synth::{Spec, architectures};
use hobbit::engine::{Stock, StockOptions};
use hobbit::options::{KernelChoice, PrecisionMode, Repack};
use hobbit::{Model, ModelOptions, SessionOptions, Token};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::{Budget, ExpertCache, RunMode};
use hobbit_core::store::IoMode;

const GIB: u64 = 1 << 30;

fn settings() -> SessionOptions {
    SessionOptions {
        n_ctx: 256,
        n_batch: 64,
        n_ubatch: 64,
        n_outputs_max: 1,
        threads: Some(2),
        warmup: false,
        ..SessionOptions::default()
    }
}

fn options() -> ModelOptions {
    // The budget is the test's own: what the machine has left meanwhile decides nothing.
    ModelOptions { budget: Budget::Bytes(GIB), overcommit: true, expects: settings(), ..ModelOptions::default() }
}

fn open(path: &Path, options: &ModelOptions) -> Model {
    Model::open(path, options).unwrap()
}

/// A prompt and single tokens.
const TOKENS: [&[Token]; 4] = [&[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], &[17], &[18], &[3]];

/// Logits of the last token of each piece, as bits.
fn logits_of(path: &Path, options: &ModelOptions) -> Vec<Vec<u32>> {
    let model = open(path, options);
    let mut session = model.session(&settings()).unwrap();
    let mut row = |tokens: &[Token]| {
        session.feed(tokens).unwrap();
        // The last entry of the batch asked for logits.
        let last = session.logits(tokens.len() - 1).unwrap();
        last.iter().map(|logit| logit.to_bits()).collect()
    };
    TOKENS.iter().map(|tokens| row(tokens)).collect()
}

fn stock_options() -> StockOptions {
    let device = ModelOptions::default().device;
    StockOptions { device, n_gpu_layers: 0, load_mode: None, repack: true, routes: None, adapters: Default::default() }
}

fn stock_logits(path: &Path, repack: bool) -> Vec<Vec<u32>> {
    let load = StockOptions { repack, ..stock_options() };
    let mut stock = Stock::open(path, &load, &settings()).unwrap();
    let mut row = |tokens: &[Token]| {
        stock.feed(tokens).unwrap();
        stock.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
    };
    TOKENS.iter().map(|tokens| row(tokens)).collect()
}

#[test]
fn bits_are_llama_cpps_own_defaults() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["q8_0", "q4_0", "q4_k"] {
        let types = vec![name.parse().unwrap()];
        let spec = Spec { embd: 256, ff: 256, types: types.clone(), down_types: types, ..Spec::tiny("qwen3moe") };
        let path = fixture::write(dir.path(), &spec);
        for repack in [true, false] {
            let options = ModelOptions { repack: if repack { Repack::Auto } else { Repack::Off }, ..options() };
            assert_eq!(open(&path, &options).run_mode(), RunMode::Passthrough { repack }, "{name}");
            assert!(logits_of(&path, &options) == stock_logits(&path, repack), "{name}, repack {repack}");
        }
        std::fs::remove_file(path).unwrap();
    }
}

/// A prompt in which every expert has rows enough for plain kernels: they are tried for each shape of the model's, which no
/// other test has, and taken where they are as they should be.
#[test]
fn prompts_take_faster_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let types = ["q8_0", "q4_0", "f16", "bf16", "iq4_nl", "q6_k"];
    for (number, name) in types.into_iter().enumerate() {
        let types = vec![name.parse().unwrap()];
        let ff = 768 + 256 * number as u32;
        let spec = Spec { embd: 256, ff, types: types.clone(), down_types: types, ..Spec::tiny("qwen3moe") };
        let path = fixture::write(dir.path(), &spec);
        let prompt: Vec<Token> = (0..64).map(|i| 5 + i * 7 % 60).collect();
        let evaluate = |kernels: KernelChoice| {
            let model = open(&path, &ModelOptions { repack: Repack::Off, kernels, ..options() });
            assert!(model.run_mode().is_passthrough());
            let mut session = model.session(&settings()).unwrap();
            assert_eq!(session.precision().kernels, kernels);
            session.feed(&prompt).unwrap();
            let mut logits = session.logits(prompt.len() - 1).unwrap().to_vec();
            session.feed(&[17]).unwrap();
            logits.extend(session.logits(0).unwrap());
            let trials = session.stats().kernels.trials;
            (
                logits,
                trials.into_iter().filter(|trial| [trial.n_in, trial.n_out].contains(&ff.into())).collect::<Vec<_>>(),
            )
        };
        let load = StockOptions { repack: false, ..stock_options() };
        let mut stock = Stock::open(&path, &load, &settings()).unwrap();
        let mut expected = Vec::new();
        for tokens in [&prompt[..], &[17]] {
            stock.feed(tokens).unwrap();
            expected.extend_from_slice(stock.logits().unwrap());
        }
        let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
        let (identical, trials) = evaluate(KernelChoice::Identical);
        assert_eq!(trials.len(), 2, "{name}: gate and up, and down: {trials:?}");
        assert!(trials.iter().all(|trial| trial.dtype.eq_ignore_ascii_case(name) && trial.threads == 2), "{trials:?}");
        assert!(bits(&identical) == bits(&expected), "{name}");
        let (fastest, _) = evaluate(KernelChoice::Fastest);
        let size = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let off = fastest.iter().zip(&expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(off <= 0.02 * size, "{name}: off by {off} of {size}");
        let other = trials
            .iter()
            .any(|trial| trial.plain_from(KernelChoice::Fastest) != trial.plain_from(KernelChoice::Identical));
        assert!(other || off == 0.0, "{name}: off by {off}, and yet nothing else was taken");
        std::fs::remove_file(path).unwrap();
    }
}

/// Whatever lies between and behind the products: biases, scales, gates of other kinds. With weights rearranged, too, as far as
/// llama.cpp rearranges them.
#[test]
fn prompts_of_all_architectures_keep_their_bits() {
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<Token> = (0..64).map(|i| 5 + i * 7 % 60).collect();
    let last = |session: &mut hobbit::Session, tokens: &[Token]| {
        session.feed(tokens).unwrap();
        session.logits(tokens.len() - 1).unwrap().iter().map(|logit| logit.to_bits()).collect::<Vec<_>>()
    };
    for arch in architectures() {
        let path = fixture::write(dir.path(), &Spec { seed: 3, ..Spec::tiny(arch) });
        for repack in [true, false] {
            let model =
                open(&path, &ModelOptions { repack: if repack { Repack::Auto } else { Repack::Off }, ..options() });
            assert!(model.run_mode().is_passthrough(), "{arch}");
            let mut session = model.session(&settings()).unwrap();
            let mut stock = Stock::open(&path, &StockOptions { repack, ..stock_options() }, &settings()).unwrap();
            for tokens in [&prompt[..], &[17], &prompt[..33]] {
                stock.feed(tokens).unwrap();
                let expected: Vec<u32> = stock.logits().unwrap().iter().map(|logit| logit.to_bits()).collect();
                assert!(last(&mut session, tokens) == expected, "{arch}, repack {repack}, {} tokens", tokens.len());
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}

/// Fewer passes over the file where experts are read in every one, and then the bits of that width.
#[test]
fn long_prompts_are_computed_in_fewer_ubatches() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { layers: 2, experts: 64, topk: 2, ff: 1024, ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    let narrow = SessionOptions { n_ubatch: 16, ..settings() };
    let model = |change: &dyn Fn(&mut ModelOptions)| {
        let mut options = ModelOptions { expert_cache: ExpertCache::Percent(50.0), ..options() };
        change(&mut options);
        open(&path, &options)
    };
    let half = model(&|_| ());
    assert_eq!([1, 16, 17, 64].map(|n_prompt| half.ubatch_for(n_prompt, &narrow)), [16, 16, 64, 64]);
    assert_eq!(model(&|options| options.expert_cache = ExpertCache::Auto).ubatch_for(64, &narrow), 16, "it fits");
    assert_eq!(model(&|options| options.expert_cache = ExpertCache::Percent(100.0)).ubatch_for(64, &narrow), 16);
    assert_eq!(model(&|options| options.precision.deterministic = true).ubatch_for(64, &narrow), 16);
    assert_eq!(model(&|options| options.precision.mode = Some(PrecisionMode::Exact)).ubatch_for(64, &narrow), 16);

    let prompt: Vec<Token> = (0..64).map(|i| 5 + i * 7 % 60).collect();
    let wide = SessionOptions { n_ubatch: half.ubatch_for(prompt.len(), &narrow), ..narrow.clone() };
    let of = |options: &SessionOptions| {
        let model = model(&|options| options.caching.fill = false);
        let mut session = model.session(options).unwrap();
        assert_eq!(session.n_ubatch(), options.n_ubatch as usize);
        session.feed(&prompt).unwrap();
        (session.logits(prompt.len() - 1).unwrap().to_vec(), session.stats().prompt.bytes_read)
    };
    let ((logits, bytes), (_, more)) = (of(&wide), of(&narrow));
    assert!(bytes < more, "{bytes} read in one pass, {more} in four");
    let load = StockOptions { repack: false, ..stock_options() };
    let mut stock = Stock::open(&path, &load, &wide).unwrap();
    stock.feed(&prompt).unwrap();
    let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
    assert!(bits(&logits) == bits(stock.logits().unwrap()));
}

#[test]
fn the_fastest_kernels_are_not_for_exact_runs() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let choice = |change: &dyn Fn(&mut ModelOptions)| {
        let mut options = ModelOptions { kernels: KernelChoice::Fastest, ..options() };
        change(&mut options);
        open(&path, &options).session(&settings()).unwrap().stats().kernels.choice
    };
    assert_eq!(choice(&|_| ()), KernelChoice::Fastest);
    assert_eq!(choice(&|options| options.precision.deterministic = true), KernelChoice::Identical);
    assert_eq!(choice(&|options| options.precision.mode = Some(PrecisionMode::Exact)), KernelChoice::Identical);
}

#[test]
fn whatever_says_how_experts_are_kept_takes_the_seam() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let run_mode = |change: &dyn Fn(&mut ModelOptions)| {
        let mut options = options();
        change(&mut options);
        open(&path, &options).run_mode()
    };
    assert!(run_mode(&|_| ()).is_passthrough());
    assert_eq!(run_mode(&|options| options.passthrough = false), RunMode::Seam);
    assert_eq!(run_mode(&|options| options.expert_cache = ExpertCache::Percent(100.0)), RunMode::Seam);
    assert_eq!(run_mode(&|options| options.precision.mode = Some(PrecisionMode::Exact)), RunMode::Seam);
    assert_eq!(run_mode(&|options| options.caching.overlap = false), RunMode::Seam);
    assert_eq!(run_mode(&|options| options.io = IoMode::Buffered), RunMode::Seam);
    assert_eq!(run_mode(&|options| options.cache_state = Some(dir.path().join("state"))), RunMode::Seam);
    assert_eq!(run_mode(&|options| options.trace = Some(dir.path().join("trace"))), RunMode::Seam);
}

/// A context that nobody asked for leaves memory to the experts, and a short one may let everything fit.
#[test]
fn a_context_that_nobody_asked_for_is_fitted() {
    const TRAINED: u32 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec { layers: 8, embd: 256, ctx: TRAINED, ..Spec::tiny("qwen3moe") });
    let n_ctx = |asked: u32, budget: u64, passthrough: bool| {
        let settings = SessionOptions { n_ctx: asked, ..settings() };
        let options =
            ModelOptions { budget: Budget::Bytes(budget), expects: settings.clone(), passthrough, ..options() };
        let model = open(&path, &options);
        (model.session(&settings).unwrap().n_ctx(), model.run_mode().is_passthrough())
    };
    let (fitted, is_passthrough) = n_ctx(0, GIB, true);
    assert!((4096..TRAINED).contains(&fitted) && is_passthrough, "{fitted}, {is_passthrough}");
    assert_eq!(n_ctx(0, GIB, false), (fitted, false), "the same where hobbit keeps the experts");
    assert!(n_ctx(0, 2 * GIB, false).0 > fitted, "more memory, more tokens");
    assert_eq!(n_ctx(8192, GIB, false).0, 8192, "as asked");
}

/// From the smallest budget up: first the seam, then llama.cpp by itself; the budget is kept on both sides of the border.
#[test]
fn the_border_is_where_everything_fits() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff: 512, ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    let file = Gguf::open(&path).unwrap().tensors.iter().map(|tensor| tensor.extent.len).sum::<u64>();
    let mut modes = Vec::new();
    for percent in [80, 100, 130, 170, 300] {
        let budget = file * percent / 100;
        let stats = dir.path().join(format!("{percent}.json"));
        let words = ["--mem-budget", &budget.to_string(), "--stats-json", stats.to_str().unwrap(), "-c", "256"];
        let run = cli::run(&path, &words);
        assert_eq!(run.code, Some(0), "{percent} %:\n{}", run.stderr);
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
        let peak = json["stats"]["peak_rss_bytes"].as_u64().or(json["peak_rss_bytes"].as_u64()).unwrap();
        assert!(peak <= budget, "{percent} %: {peak} of {budget} bytes");
        modes.push(json["plan"]["n_experts"].as_u64().unwrap() == 0);
    }
    assert!(!modes[0] && modes[4], "{modes:?}");
    assert!(modes.is_sorted(), "{modes:?}");
}

#[test]
fn free_slots_are_filled_before_anybody_asks() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let first_token = |fill: bool, expert_cache: ExpertCache| {
        let mut options = ModelOptions { expert_cache, ..options() };
        options.caching.fill = fill;
        let model = open(&path, &options);
        let mut session = model.session(&settings()).unwrap();
        let bytes = model.finish_filling();
        session.feed(&[5]).unwrap();
        (bytes, session.stats().decode)
    };
    let (bytes, filled) = first_token(true, ExpertCache::Percent(100.0));
    let (none, empty) = first_token(false, ExpertCache::Percent(100.0));
    assert_eq!((filled.misses, filled.bytes_read, none, empty.hits), (0, 0, 0, 0), "{filled:?} {empty:?}");
    assert!(filled.hits > 0 && filled.hits == empty.misses);
    assert!(bytes >= open(&path, &options()).info().expert_bytes, "{bytes} bytes in slots");
    let (half, stats) = first_token(true, ExpertCache::Percent(50.0));
    assert!(half > 0 && half < bytes && stats.hits + stats.misses == filled.hits, "{half} of {bytes}: {stats:?}");
}

#[test]
fn a_session_gives_as_many_logits_as_it_was_opened_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let model = open(&path, &options());
    let mut session = model.session(&settings()).unwrap();
    let entry = |position: i32| hobbit::BatchToken { token: 5, position, sequence: 0, logits: true };
    let error = session.evaluate(&[entry(0), entry(1)]).unwrap_err().to_string();
    assert!(error.contains("n_outputs_max"), "{error}");
    session.evaluate(&[entry(0)]).unwrap();
    assert!(session.logits(0).is_some());
}
