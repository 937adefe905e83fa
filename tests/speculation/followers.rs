//! Drafts in a file of their own that read the hidden states of the model.

use std::path::{Path, PathBuf};

use hobbit::engine::draft_bytes;
use hobbit::options::{DraftOptions, DraftSource, SpeculationOptions};
use hobbit::{Model, ModelOptions, Sampler, SamplingOptions, SessionOptions, Token};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::ExpertCache;
use hobbit_synth::{self as synth, Drafter, Format, Spec};

use super::{generate, greedy, lookup, open, open_mtp, predicting, report, session, settings};
use crate::fixture::alter;
use crate::fixture::cli;

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
    // Not even llama.cpp's own checks would refuse them as models.
    let refused = Model::open(&good, &ModelOptions::default()).err().expect("no layers run").to_string();
    assert!(refused.contains("it lacks blk.0.attn_norm.weight; layers for multi-token prediction alone"), "{refused}");
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
