//! Speculative decoding: the text is the one without, whatever is drafted, and nothing of a rejected draft stays.
//!
//! A batch of several tokens has other last bits than a single token where its products are other kernels'. The texts
//! here are ones in which that chooses no other token.

use std::path::{Path, PathBuf};

use hobbit::engine::{DraftRequest, NoSpeculation, draft_bytes};
use hobbit::options::{DraftOptions, DraftSource, FlashAttn, KvType, SpeculationOptions};
use hobbit::{
    BatchToken, CachingOptions, Model, ModelOptions, Sampler, SamplingOptions, Session, SessionOptions, StopReason,
    Token,
};
use hobbit_core::cache::CacheState;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::ExpertCache;
use hobbit_core::speculation::GateReport;
use hobbit_synth::{self as synth, Drafter, Format, Spec};

use crate::fixture::cli::{self, cli, demo_model};
use crate::fixture::{alter, bundled, demo_in_f32, predictable};

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

/// Layers in a file of their own draft as those in the model's do, also beside a pack.
#[test]
fn layers_in_a_file_of_their_own_draft_as_the_models_do() {
    let dir = tempfile::tempdir().unwrap();
    let archs = "qwen35moe glm4moe deepseek2 deepseek32 deepseek4 mimo2 nemotron_h_moe hy_v3 step35 glm-dsa cohere2moe \
                 qwen4exp bailingmoe3";
    let sampling = SamplingOptions { ignore_eos: true, ..greedy() };
    for arch in archs.split(' ') {
        let (whole, prompt, settings, speculation) = predicting((arch, 1), dir.path());
        let spec = Spec { seed: 3, types: vec![Format::F32], ..Spec::tiny(arch) };
        let [trunk, head] = ["trunk", "head"].map(|name| dir.path().join(format!("{arch}.{name}.gguf")));
        synth::write(&trunk, &spec).unwrap();
        synth::write(&head, &Spec { mtp: 1, only_mtp: true, ..spec }).unwrap();
        let apart = SpeculationOptions {
            draft: Some(DraftOptions { path: head, ..DraftOptions::default() }),
            ..speculation.clone()
        };
        let run = |path: &Path, mtp: bool, passthrough: bool, speculation: &SpeculationOptions| {
            let model = open_mtp(path, mtp, passthrough);
            let mut session =
                session(&model, &settings, Some(&SpeculationOptions { fixed: true, ..speculation.clone() }));
            let found = generate(&mut session, &sampling, &prompt, 40);
            (found, report(&session).drafted, report(&session).accepted)
        };
        let expected = run(&whole, true, false, &speculation);
        assert!(expected.1 > 0, "{arch}");
        for passthrough in [false, true] {
            assert_eq!(run(&trunk, false, passthrough, &apart), expected, "{arch}, passthrough {passthrough}");
        }
    }
}

/// Drafts that read the hidden states of a model's layers: on random weights the text stays, and where model and draft
/// always say the same token, nearly all drafts are taken.
#[test]
fn drafts_that_read_hidden_states_follow_the_text() {
    let dir = tempfile::tempdir().unwrap();
    let sampling = SamplingOptions { ignore_eos: true, ..greedy() };
    let prompt: Vec<Token> = (0..150).map(|at| 3 + at * at % 23 % 40).collect();
    let sources = [
        (Drafter::Eagle3, DraftSource::DraftEagle3),
        (Drafter::Dflash, DraftSource::DraftDflash),
        (Drafter::Dspark, DraftSource::DraftDspark),
    ];
    let archs = ["qwen3moe", "gpt-oss", "qwen35moe", "lfm2moe"];
    // DSpark differs from DFlash in what it makes of the guesses.
    let cases = sources.into_iter().flat_map(|source| archs.map(|arch| (source, arch)));
    let cases = cases.filter(|((drafter, _), arch)| *drafter != Drafter::Dspark || *arch == "qwen3moe");
    for (((drafter, source), arch), constant) in cases.flat_map(|case| [(case, false), (case, true)]) {
        let what = format!("{source} for {arch}, constant: {constant}");
        // Every token uses all experts: by width, last bits differ, and a router's choice might.
        let tiny = Spec::tiny(arch);
        let (types, dense_type) = (vec![Format::F32], Some(Format::F32));
        let spec = Spec { seed: 3, types, dense_type, topk: tiny.experts, ..tiny };
        let [model, draft] = ["model", "draft"].map(|name| dir.path().join(format!("{name}.gguf")));
        for path in [&model, &draft] {
            _ = std::fs::remove_file(path);
        }
        synth::write(&model, &spec).unwrap();
        drafter.write(&draft, &spec, &[1, 2, 3], !constant).unwrap();
        if constant {
            // Every token is embedded alike, and no layer adds anything.
            for path in [&model, &draft] {
                alter(path, |name, width, at, value| match name {
                    "token_embd.weight" => 1.0 + (at % width) as f32 / width as f32,
                    "output_norm.weight" | "token_embd_norm.weight" => 1.0,
                    // The last of the three.
                    "fc.weight" => f32::from(at % width == at / width + 2 * width / 3),
                    _ if ["attn_output", "ffn_down", "shortconv.out_proj", "ssm_out", "markov"]
                        .iter()
                        .any(|part| name.contains(part)) =>
                    {
                        0.0
                    }
                    _ => value,
                });
            }
        }
        let settings = SessionOptions { rollback: 3, n_seq_max: 2, n_outputs_max: 8, ..settings() };
        let options = SpeculationOptions {
            sources: vec![source],
            n_max: 3,
            fixed: true,
            draft: Some(DraftOptions { path: draft.clone(), ..DraftOptions::default() }),
            ..lookup()
        };
        let run = |drafts: bool| {
            let model = open(&model, ExpertCache::Percent(50.0));
            let mut session = session(&model, &settings, drafts.then_some(&options));
            let mut found = generate(&mut session, &sampling, &prompt, 40).0;
            // Back, on, and from the start.
            let mut sampler = Sampler::new(&model, &sampling).unwrap();
            session.keep(100);
            let from = session.n_past();
            session.feed(&prompt[from..120]).unwrap();
            found.extend(session.generate(&mut sampler, Some(20)).map(Result::unwrap));
            session.reset();
            session.feed(&prompt[..9]).unwrap();
            found.extend(session.generate(&mut sampler, Some(20)).map(Result::unwrap));
            (found, session.stats().speculation)
        };
        let (expected, (found, report)) = (run(false).0, run(true));
        assert_eq!(found, expected, "{what}");
        let report = report.unwrap();
        assert!(report.drafted > 40, "{what}: {report:?}");
        let is_accepted = report.accepted * 10 > report.drafted * 8;
        assert_eq!(is_accepted, constant, "{what}: {report:?}");
    }
}

#[test]
fn drafts_that_read_another_models_hidden_states_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec::tiny("qwen3moe");
    let write = |name: &str, drafter: Drafter, target: &Spec, layers: &[u32]| {
        let path = dir.path().join(format!("{name}.gguf"));
        drafter.write(&path, target, layers, true).unwrap();
        path
    };
    let write_model = |name: &str, spec: &Spec| {
        let path = dir.path().join(format!("{name}.gguf"));
        synth::write(&path, spec).unwrap();
        path
    };
    let [own, other] = [&spec, &Spec::tiny("glm4moe")]
        .map(|spec| open(&write_model(&format!("model of {}", spec.arch), spec), ExpertCache::Percent(50.0)));
    let wide = Spec { embd: 512, ..spec.clone() };
    let (eagle, dflash) = (DraftSource::DraftEagle3, DraftSource::DraftDflash);
    let good = write("good", Drafter::Eagle3, &spec, &[0, 1, 3]);
    for (model, source, path, reason) in [
        (&own, dflash, good.clone(), "draft-dflash needs a draft of architecture dflash, and it is eagle3"),
        (&own, eagle, write_model("whole", &spec), "needs a draft of architecture eagle3, and it is qwen3moe"),
        (&own, dflash, write("dspark", Drafter::Dspark, &spec, &[1]), "no draft for draft-dflash: give draft-dspark"),
        (&own, eagle, write("deep", Drafter::Eagle3, &spec, &[0, 1, 4]), "it reads layers [0, 1, 4]"),
        (&own, eagle, write("two", Drafter::Eagle3, &spec, &[0, 1]), "it reads layers [0, 1]"),
        (&own, eagle, write("wide", Drafter::Eagle3, &wide, &[0, 1, 2]), "of 512 numbers, and the model's have 256"),
        (&other, eagle, good.clone(), "llama.cpp does not show the hidden states of glm4moe"),
    ] {
        let draft = Some(DraftOptions { path, ..DraftOptions::default() });
        let options = SpeculationOptions { sources: vec![source], draft, ..lookup() };
        let error = model.session(&settings()).unwrap().speculate(&options).expect_err(reason).to_string();
        assert!(error.contains(reason), "{reason}: {error}");
    }
    let none = SpeculationOptions { sources: vec![eagle], ..lookup() };
    let error = own.session(&settings()).unwrap().speculate(&none).unwrap_err().to_string();
    assert!(error.contains("draft-eagle3 needs a draft made for this model (-md)"), "{error}");
    let both = SpeculationOptions { sources: vec![DraftSource::DraftSimple, eagle], ..none };
    let error = own.session(&settings()).unwrap().speculate(&both).unwrap_err().to_string();
    assert!(error.contains("exclude each other"), "{error}");
    let draft = DraftOptions { path: good, ..DraftOptions::default() };
    assert!(draft_bytes(&draft, &settings()).unwrap() > Gguf::open(&draft.path).unwrap().tensor_bytes());
}

#[test]
fn layers_of_another_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, spec: &Spec| {
        let path = dir.path().join(format!("{name}.gguf"));
        synth::write(&path, spec).unwrap();
        path
    };
    let head = Spec { mtp: 1, only_mtp: true, ..Spec::tiny("glm4moe") };
    let model = open(&write("model", &Spec::tiny("glm4moe")), ExpertCache::Percent(50.0));
    let speculation = |path: PathBuf, n_ctx: u32| SpeculationOptions {
        sources: vec![DraftSource::DraftMtp],
        draft: Some(DraftOptions { path, n_ctx, ..DraftOptions::default() }),
        ..lookup()
    };
    let good = write("good", &head);
    let no_embeddings = Spec { without: vec!["token_embd.weight"], ..head.clone() };
    for (path, n_ctx, reason) in [
        (write("whole", &Spec { only_mtp: false, ..head.clone() }), 0, "it has a whole model"),
        (write("none", &Spec::tiny("glm4moe")), 0, "it has no layers for multi-token prediction"),
        (write("other", &Spec { arch: "hy_v3".into(), ..head.clone() }), 0, "for hy_v3, and the model is glm4moe"),
        (write("wide", &Spec { embd: 512, ..head.clone() }), 0, "have 512 numbers, and the model's 256"),
        (write("words", &Spec { vocab: head.vocab + 512, ..head.clone() }), 0, "its vocabulary is not the model's"),
        (write("bare", &no_embeddings), 0, "it lacks embeddings of its own"),
        (good.clone(), 512, "leave out -cd"),
        (dir.path().join("absent.gguf"), 0, "absent.gguf"),
    ] {
        let mut session = model.session(&settings()).unwrap();
        let error = session.speculate(&speculation(path, n_ctx)).expect_err(reason).to_string();
        assert!(error.contains(reason), "{reason}: {error}");
        session.feed(&[1, 2, 3]).unwrap();
    }
    let good = speculation(good, 0);
    model.session(&settings()).unwrap().speculate(&good).unwrap();
    let draft = good.draft.unwrap();
    let bytes = draft_bytes(&draft, &settings()).unwrap();
    let tensors = Gguf::open(&draft.path).unwrap().tensor_bytes();
    assert!(bytes > tensors && bytes < tensors + (64 << 20), "{bytes} bytes, {tensors} of tensors");
}

/// The file says by itself how it drafts; one whose layer pools no keys, as llama.cpp's converter writes qwen4exp's, too.
#[test]
fn the_program_drafts_with_layers_in_a_file_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let [model, head] = ["model.gguf", "head.gguf"].map(|name| dir.path().join(name));
    // As above: all experts, and numbers that the width of a step hardly changes.
    let (types, dense_type, tiny) = (vec![Format::F32], Some(Format::F32), Spec::tiny("qwen4exp"));
    let spec = Spec { types, dense_type, topk: tiny.experts, ..tiny };
    synth::write(&model, &spec).unwrap();
    synth::write(&head, &Spec { mtp: 1, only_mtp: true, ..spec }).unwrap();
    let base = ["-c", "512", "-n", "30", "--ignore-eos", "--temp", "0", "-p", "a b c", "-no-cnv", "-t", "1"];
    let plain_numbers = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"];
    let run = |more: &[&str]| cli::run(&model, &[&base[..], &plain_numbers, more].concat()).expect(0);
    let plain = run(&[]);
    for pools in [true, false] {
        if !pools {
            // The last of five numbers, behind the key, two types and their count.
            let (mut bytes, key) = (std::fs::read(&head).unwrap(), b"qwen4exp.attention.compress_ratios");
            let at = bytes.windows(key.len()).position(|found| found == key).unwrap() + key.len() + 16 + 4 * 4;
            assert_eq!(bytes[at..at + 4], [4, 0, 0, 0]);
            bytes[at] = 0;
            std::fs::write(&head, bytes).unwrap();
        }
        let drafting = run(&["-md", head.to_str().unwrap(), "--draft-fixed"]);
        assert_eq!(drafting.stdout, plain.stdout);
        assert!(drafting.stderr.contains("drafts accepted"), "{}", drafting.stderr);
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
