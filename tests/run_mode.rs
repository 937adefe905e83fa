//! Where everything fits, llama.cpp runs by itself, and its bits are llama.cpp's own defaults'.

use std::path::Path;

use hobbit::options::{DeviceChoice, KernelChoice, LowShare, PrecisionMode, Prefetch, Repack};
use hobbit::{Model, ModelOptions, Session, SessionOptions, Token};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::{Budget, ExpertCache, RunMode};
use hobbit_core::store::IoMode;
use hobbit_synth::{Spec, architectures};

use crate::fixture::compare::{Placed, open_stock};
use crate::fixture::script::bits;
use crate::fixture::{self, cli};

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
    // A fixed budget: the machine's free memory decides nothing.
    ModelOptions { budget: Budget::Bytes(GIB), overcommit: true, expects: settings(), ..ModelOptions::default() }
}

fn open(path: &Path, options: &ModelOptions) -> Model {
    Model::open(path, options).unwrap()
}

/// A prompt and single tokens.
const TOKENS: [&[Token]; 4] = [&[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], &[17], &[18], &[3]];

/// Logits of stock llama.cpp, which its caller feeds.
fn stock(path: &Path, options: &SessionOptions, repack: Repack) -> impl FnMut(&[Token]) -> Vec<f32> + use<> {
    let mut stock = open_stock(path, options, &Placed { repack, ..Placed::default() }).unwrap();
    move |tokens| {
        stock.feed(tokens).unwrap();
        stock.logits().unwrap().to_vec()
    }
}

fn prompt() -> Vec<Token> {
    (0..64).map(|i| 5 + i * 7 % 60).collect()
}

/// The logits of the last of these tokens.
fn feed(session: &mut Session, tokens: &[Token]) -> Vec<f32> {
    session.feed(tokens).unwrap();
    session.logits(tokens.len() - 1).unwrap().to_vec()
}

/// Without experts, too, `--no-repack` leaves the weights as they are in the file.
#[test]
fn a_dense_model_is_repacked_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let types = vec!["q4_0".parse().unwrap()];
    let tiny = Spec { embd: 256, ff: 256, types: types.clone(), down_types: types, ..Spec::tiny("deepseek2") };
    let path = fixture::write(dir.path(), &Spec { dense_lead: Some(tiny.layers), ..tiny });
    for repack in [Repack::Auto, Repack::Off] {
        let model = open(&path, &ModelOptions { repack, ..options() });
        let mut session = model.session(&settings()).unwrap();
        let mut stock = stock(&path, &settings(), repack);
        for tokens in TOKENS {
            assert!(bits(&feed(&mut session, tokens)) == bits(&stock(tokens)), "repack {repack:?}");
        }
    }
}

#[test]
fn bits_are_llama_cpps_own_defaults() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["q8_0", "q4_0", "q4_k"] {
        let types = vec![name.parse().unwrap()];
        let spec = Spec { embd: 256, ff: 256, types: types.clone(), down_types: types, ..Spec::tiny("qwen3moe") };
        let path = fixture::write(dir.path(), &spec);
        for repack in [Repack::Auto, Repack::Off] {
            let model = open(&path, &ModelOptions { repack, ..options() });
            assert_eq!(
                model.run_mode(),
                RunMode::Passthrough { repack: repack == Repack::Auto, gives_back: false },
                "{name}"
            );
            let mut session = model.session(&settings()).unwrap();
            let mut stock = stock(&path, &settings(), repack);
            for tokens in TOKENS {
                assert!(bits(&feed(&mut session, tokens)) == bits(&stock(tokens)), "{name}, repack {repack:?}");
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}

/// Every expert has rows enough for plain kernels: they are tried for each shape of the model, which no other test has,
/// and taken where their results are right. A token uses all experts: where it used some, a rounding difference could
/// send it to others, and logits would differ by any amount.
#[test]
fn prompts_take_faster_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let types = ["q8_0", "q4_0", "f16", "bf16", "iq4_nl", "q6_k"];
    for (number, name) in types.into_iter().enumerate() {
        let types = vec![name.parse().unwrap()];
        let ff = 768 + 256 * number as u32;
        let tiny = Spec::tiny("qwen3moe");
        let spec = Spec { embd: 256, ff, topk: tiny.experts, types: types.clone(), down_types: types, ..tiny };
        let path = fixture::write(dir.path(), &spec);
        let evaluate = |kernels: KernelChoice| {
            let model = open(&path, &ModelOptions { repack: Repack::Off, kernels, ..options() });
            assert!(model.run_mode().is_passthrough());
            let mut session = model.session(&settings()).unwrap();
            assert_eq!(session.description().precision.kernels, kernels);
            let logits = [feed(&mut session, &prompt()), feed(&mut session, &[17])].concat();
            let is_own = |trial: &hobbit::stats::KernelTrial| [trial.n_in, trial.n_out].contains(&ff.into());
            (logits, session.stats().kernels.trials.into_iter().filter(is_own).collect::<Vec<_>>())
        };
        let mut stock = stock(&path, &settings(), Repack::Off);
        let expected = [stock(&prompt()), stock(&[17])].concat();
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

/// Biases, scales and gates of other kinds lie between the products. With rearranged weights too, as far as llama.cpp
/// rearranges them.
#[test]
fn prompts_of_all_architectures_keep_their_bits() {
    let dir = tempfile::tempdir().unwrap();
    for arch in architectures() {
        let path = fixture::write(dir.path(), &Spec { seed: 3, ..Spec::tiny(arch) });
        for repack in [Repack::Auto, Repack::Off] {
            let model = open(&path, &ModelOptions { repack, ..options() });
            assert!(model.run_mode().is_passthrough(), "{arch}");
            let mut session = model.session(&settings()).unwrap();
            let mut stock = stock(&path, &settings(), repack);
            for tokens in [&prompt()[..], &[17], &prompt()[..33]] {
                let found = bits(&feed(&mut session, tokens));
                assert!(found == bits(&stock(tokens)), "{arch}, repack {repack:?}, {} tokens", tokens.len());
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}

/// Wider ubatches read the experts less often, and have the bits of that width.
#[test]
fn long_prompts_are_computed_in_fewer_ubatches() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { layers: 2, experts: 64, topk: 2, ff: 1024, ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    let narrow = SessionOptions { n_ubatch: 16, ..settings() };
    let wide = SessionOptions { n_ubatch: 64, ..narrow.clone() };
    let of = |options: &SessionOptions| {
        let mut model = ModelOptions { expert_cache: ExpertCache::Percent(50.0), ..self::options() };
        model.caching.fill = false;
        let model = open(&path, &model);
        let mut session = model.session(options).unwrap();
        assert_eq!(session.context().n_ubatch(), options.n_ubatch as usize);
        (feed(&mut session, &prompt()), session.stats().prompt.bytes_read)
    };
    let ((logits, bytes), (_, more)) = (of(&wide), of(&narrow));
    assert!(bytes < more, "{bytes} read in one pass, {more} in four");
    assert!(bits(&logits) == bits(&stock(&path, &wide, Repack::Off)(&prompt())));
}

#[test]
fn options_on_how_experts_are_kept_take_the_seam() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let run_mode = |change: &dyn Fn(&mut ModelOptions)| {
        let mut options = options();
        change(&mut options);
        open(&path, &options).run_mode()
    };
    assert!(run_mode(&|_| ()).is_passthrough());
    let (state, trace) = (dir.path().join("state"), dir.path().join("trace"));
    let changes: [&dyn Fn(&mut ModelOptions); 7] = [
        &|options| options.passthrough = false,
        &|options| options.expert_cache = ExpertCache::Percent(100.0),
        &|options| options.precision.mode = Some(PrecisionMode::Exact),
        &|options| options.caching.overlap = false,
        &|options| options.io = IoMode::Buffered,
        &|options| options.cache_state = Some(state.clone()),
        &|options| options.trace = Some(trace.clone()),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        assert_eq!(run_mode(change), RunMode::Seam, "change {number}");
    }
    // The fastest kernels are not for exact runs.
    for deterministic in [false, true] {
        let mut options = ModelOptions { kernels: KernelChoice::Fastest, ..options() };
        options.precision.deterministic = deterministic;
        let found = open(&path, &options).session(&settings()).unwrap().stats().kernels.choice;
        assert_eq!(found == KernelChoice::Fastest, !deterministic);
    }
}

/// Options that need low versions, missing experts, a device or another option are named, and change nothing.
#[test]
fn options_that_cannot_act_leave_the_model_to_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    type Change<'a> = (&'a str, &'a dyn Fn(&mut ModelOptions));
    let changes: [Change; 13] = [
        ("mirror", &|options| options.mirrors.push("copy".into())),
        ("cache_bias", &|options| options.routing.cache_bias = 0.2),
        ("drop", &|options| options.routing.drop = 0.2),
        ("t1", &|options| options.precision.t1 = Some(0.5)),
        ("t2", &|options| options.precision.t2 = Some(0.5)),
        ("prefill_low", &|options| options.precision.prefill_low = Some(0.5)),
        ("renormalise", &|options| options.precision.renormalise = true),
        ("precision", &|options| options.precision.mode = Some(PrecisionMode::Dynamic)),
        ("low_share", &|options| options.low_share = LowShare::Percent(25.0)),
        ("n_cpu_moe", &|options| options.device.n_cpu_moe = 2),
        ("device_cache", &|options| options.device.cache = ExpertCache::Percent(50.0)),
        ("policy_weights", &|options| options.caching.weights = "1,2,3,4".parse().unwrap()),
        ("prefetch", &|options| options.caching.prefetch = Prefetch::On),
    ];
    for (setting, change) in changes {
        let mut options = options();
        options.device.devices = DeviceChoice::None;
        change(&mut options);
        let model = open(&path, &options);
        assert!(model.run_mode().is_passthrough(), "{setting}");
        let idle: Vec<&str> = model.idle_options().iter().map(|idle| idle.setting).collect();
        assert_eq!(idle, [setting]);
    }
    let mut options = ModelOptions { expert_cache: ExpertCache::Percent(50.0), ..options() };
    options.precision.mode = Some(PrecisionMode::Dynamic);
    let missing = open(&path, &options).session(&settings()).unwrap();
    assert!(missing.model().idle_options().is_empty() && missing.description().idle.is_empty(), "experts are skipped");
    options.expert_cache = ExpertCache::Percent(100.0);
    let complete = open(&path, &options).session(&settings()).unwrap();
    let idle: Vec<&str> = complete.description().idle.iter().map(|idle| idle.setting).collect();
    assert_eq!(idle, ["precision"]);
    // The first token finds no expert in memory.
    let whole = ["--expert-cache", "100%", "--temp", "0"];
    let exact = cli::run(&path, &whole).expect(0);
    for (flag, value) in [("--cache-bias", "0.2"), ("--drop", "0.9")] {
        let found = cli::run(&path, &[&whole[..], &[flag, value]].concat()).expect(0);
        let found = found.says(&[&format!("note: {flag} has no effect: every expert fits in memory")]);
        assert_eq!(found.stdout, exact.stdout, "{flag}");
    }
    let none = ["--t1", "0.5", "-ncmoe", "2", "-dev", "none", "--prefetch", "on"];
    cli::run(&path, &none).expect(0).says(&[
        "note: --t1 has no effect: there are no low-precision versions (see --low)",
        "note: --n-cpu-moe has no effect: no layer is on a device (see --list-devices)",
        "note: --prefetch has no effect: there is no predictor of experts (see --predictor)",
    ]);
    cli::run(&path, &["--routes-recall", "50%"]).expect(1).says(&["--routes-recall is for --routes"]);
}

/// The default context leaves memory to the experts, and a short one may let everything fit.
#[test]
fn the_default_context_is_fitted() {
    const TRAINED: u32 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec { layers: 8, embd: 256, ctx: TRAINED, ..Spec::tiny("qwen3moe") });
    let n_ctx = |asked: u32, budget: u64, passthrough: bool| {
        let settings = SessionOptions { n_ctx: asked, ..settings() };
        let options =
            ModelOptions { budget: Budget::Bytes(budget), expects: settings.clone(), passthrough, ..options() };
        let model = open(&path, &options);
        (model.session(&settings).unwrap().context().n_ctx(), model.run_mode().is_passthrough())
    };
    let (fitted, is_passthrough) = n_ctx(0, GIB, true);
    assert!((4096..TRAINED).contains(&fitted) && is_passthrough, "{fitted}, {is_passthrough}");
    assert_eq!(n_ctx(0, GIB, false), (fitted, false), "the same where hobbit keeps the experts");
    assert!(n_ctx(0, 2 * GIB, false).0 > fitted, "more memory, more tokens");
    assert_eq!(n_ctx(8192, GIB, false).0, 8192, "as asked");
    // Sequences share or divide the same memory.
    for kv_unified in [true, false] {
        let settings = SessionOptions { n_ctx: 0, n_seq_max: 4, kv_unified, ..settings() };
        let options = ModelOptions { budget: Budget::Bytes(GIB), expects: settings.clone(), ..options() };
        let n_ctx = open(&path, &options).session(&settings).unwrap().context().n_ctx();
        assert!(n_ctx.abs_diff(fitted) < 4 * 256, "{n_ctx}, {fitted}");
    }
}

/// From the smallest budget up: first the seam, then llama.cpp by itself; the budget is kept on both sides of the
/// border.
#[test]
fn passthrough_begins_where_everything_fits() {
    let dir = tempfile::tempdir().unwrap();
    // A program by itself takes 25 MiB more under Wine, where 80 % of the smaller model is too little for any budget.
    let ff = if cfg!(windows) { 1024 } else { 512 };
    let spec = Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff, ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    let file = Gguf::open(&path).unwrap().tensors.iter().map(|tensor| tensor.extent.len).sum::<u64>();
    let mut modes = Vec::new();
    for percent in [80, 100, 130, 170, 300] {
        let budget = file * percent / 100;
        let stats = dir.path().join(format!("{percent}.json"));
        let flags = ["--mem-budget", &budget.to_string(), "--stats-json", stats.to_str().unwrap(), "-c", "256"];
        cli::run(&path, &flags).expect(0);
        let json = cli::json(&stats);
        let peak = json["peak_rss_bytes"].as_u64().unwrap();
        assert!(peak <= budget, "{percent} %: {peak} of {budget} bytes");
        modes.push(json["plan"]["n_experts"].as_u64().unwrap() == 0);
    }
    assert!(!modes[0] && modes[4], "{modes:?}");
    assert!(modes.is_sorted(), "{modes:?}");
}

#[test]
fn free_slots_are_filled_before_the_first_token() {
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
