//! `profile` as a user runs it: on the demo model, on one with random weights, and where it must refuse.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gguf_tools::synth::{self, Format, Spec};
use hobbit::{Model, ModelOptions, SessionOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::profile::{Goal, LossBound, Profile, ProfileError, beside, widths};

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(name)
}

/// Runs `profile` with one thread on `model` and `text`.
fn tool(model: &Path, text: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gguf-tools"));
    command.arg("profile").arg(model).arg("--text").arg(text).args(["--threads", "1", "--mem-budget", "4GiB"]);
    command.args(args).output().unwrap()
}

fn words(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn profile(model: &Path, text: &Path, args: &[&str]) -> Profile {
    let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
    let out = tool(model, text, &args);
    assert!(out.status.success(), "{}", words(&out.stderr));
    Profile::parse(words(&out.stdout), Path::new("stdout")).unwrap()
}

/// A small model with random weights, and a text for it.
fn random(dir: &Path, types: Format) -> (PathBuf, PathBuf) {
    let spec = Spec { layers: 3, types: vec![types], seed: 5, ..Spec::tiny("qwen3moe") };
    let model = synth::write(&dir.join("random.gguf"), &spec).unwrap().files.remove(0);
    let text = dir.join("text.txt");
    std::fs::write(&text, "In the beginning was the word, and nobody read it twice. ".repeat(8)).unwrap();
    (model, text)
}

#[test]
fn the_demo_models_most_robust_experts_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let temp = tempfile::tempdir().unwrap();
    let (model, text) = (demo("demo.gguf"), demo("demo-heldout-prose.txt"));
    let file = dir.path().join("demo.json");
    let out = tool(
        &model,
        &text,
        &[
            "--tokens",
            "512",
            "--context",
            "256",
            "--widths",
            "q2_k,q4_k",
            "--tolerance",
            "2%",
            "--shares",
            "67/30/3",
            "-o",
            file.to_str().unwrap(),
            "--temp-dir",
            temp.path().to_str().unwrap(),
        ],
    );
    assert!(out.status.success(), "{}", words(&out.stderr));
    for part in [
        "48 experts in 6 layers",
        "--t1 0.",
        "every expert at q2_K",
        "most robust",
        "experts lowered together, measured",
    ] {
        assert!(words(&out.stdout).contains(part), "'{part}' is not in:\n{}", words(&out.stdout));
    }
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0, "temporary files are left");

    let profile = Profile::read(&file).unwrap();
    let gguf = Gguf::open(&model).unwrap();
    let map = gguf.experts().unwrap();
    profile.check_model(&gguf, &map).unwrap();
    assert_eq!((profile.text.tokens, profile.text.context), (512, 256));
    let fitted = profile.thresholds.as_ref().unwrap();
    for (reached, wanted) in [(fitted.shares.high, 0.67), (fitted.shares.low, 0.30), (fitted.shares.skip, 0.03)] {
        assert!((reached - wanted).abs() < 0.01, "{fitted:?}");
    }
    assert!(0.5 <= fitted.t1 && fitted.t1 < fitted.t2 && fitted.t2 < 1.0, "{fitted:?}");

    let [q4, q2] = profile.widths.as_slice() else { panic!("{:?}", profile.widths) };
    assert_eq!((q4.dtype.name(), q2.dtype.name()), ("q4_K", "q2_K"), "widest first");
    assert!(q2.kl > q4.kl && q4.kl > 0.0, "{} {}", q2.kl, q4.kl);
    for (four, two) in q4.layers.iter().zip(&q2.layers) {
        assert!(two.kl > four.kl, "layer {}: {} {}", two.layer, two.kl, four.kl);
        assert!((two.experts.iter().sum::<f64>() - two.kl).abs() < 1e-9);
        for (expert, (four, two)) in four.experts.iter().zip(&two.experts).enumerate() {
            assert!(*four > 0.0 && two > four, "layer {} expert {expert}: {two} {four}", q2.layers[0].layer);
        }
    }
    // Lowering the most robust experts costs far less than their share of the whole loss.
    let tolerated = q2.tolerated.as_ref().unwrap();
    let share = tolerated.experts.len() as f64 / 48.0;
    assert!(tolerated.loss <= 0.02 && share >= 0.4, "{tolerated:?}");
    assert!(tolerated.loss < 0.6 * share * q2.perplexity_increase, "{tolerated:?} of {}", q2.perplexity_increase);

    let none = widths(&profile, &map, Goal::MaxLoss(0.0)).unwrap();
    assert!(none.types.is_empty());
    let some = widths(&profile, &map, Goal::MaxLoss(0.02)).unwrap();
    assert!(some.loss <= 0.02 && some.record_bytes < none.record_bytes, "{some:?}");
    assert!((1..48).contains(&some.counts[&q2.dtype]), "{:?}", some.counts);
    let all = widths(&profile, &map, Goal::MaxLoss(100.0)).unwrap();
    assert_eq!(all.counts.get(&q2.dtype), Some(&48));
    let fits = widths(&profile, &map, Goal::TargetSize { bytes: 6 << 20, other: 1 << 20 }).unwrap();
    assert!(fits.record_bytes <= 5 << 20 && fits.loss > 0.0);
    let refused = widths(&profile, &map, Goal::TargetSize { bytes: 3 << 20, other: 1 << 20 }).unwrap_err();
    assert!(refused.to_string().contains(&format!("{} bytes", all.record_bytes + (1 << 20))), "{refused}");
}

#[test]
fn a_tolerated_loss_is_kept_and_saves_traffic() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path(), Format::Q8_0);
    let args = ["--tokens", "256", "--context", "128", "--no-widths", "--max-loss", "0.5%", "--low", "q2_k"];
    let first = profile(&model, &text, &args);
    let fitted = first.thresholds.as_ref().unwrap();
    let measured = fitted.measured.as_ref().unwrap();
    assert!(measured.loss <= 0.005, "{measured:?}");
    assert!(measured.bytes_per_token < measured.exact_bytes_per_token, "{measured:?}");
    assert_eq!((measured.expert_cache.as_str(), measured.low.as_str()), ("25%", "q2_K"));
    assert_eq!(fitted.goal, "max loss 0.5%");
    assert!(first.widths.is_empty());
    let [mixes] = &first.mixes[..] else { panic!("{:?}", first.mixes) };
    assert_eq!((mixes.tokens, mixes.text_sha256.len()), (128, 64));
    assert_eq!((mixes.high.as_str(), mixes.low.as_deref()), ("q8_0", Some("q2_K")));
    assert!((0.2..0.3).contains(&mixes.cache_share) && mixes.exact_bytes_per_token > 0.0, "{mixes:?}");
    assert!(mixes.mixes.len() <= 6 && mixes.mixes.iter().all(|own| own.error >= 0.0), "{mixes:?}");
    assert_eq!(profile(&model, &text, &args), first, "a second run measures the same");
}

#[test]
fn mixes_are_found_without_low_versions() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path(), Format::Q8_0);
    let args = ["--tokens", "256", "--context", "128", "--no-widths", "--max-loss", "100%"];
    let found = profile(&model, &text, &args);
    let [mixes] = &found.mixes[..] else { panic!("{:?}", found.mixes) };
    assert!(found.thresholds.is_none() && mixes.low.is_none());
    // Random routers hardly care: what is cheapest goes furthest.
    let best = mixes.cheapest(1.0, false).unwrap();
    assert!(best.bytes_per_token < 0.8 * mixes.exact_bytes_per_token, "{mixes:?}");
    assert!(mixes.mixes.iter().all(|own| !own.mix.uses_low()));
    let alone = profile(&model, &text, &["--tokens", "128", "--context", "128", "--no-widths", "--max-loss", "1%"]);
    assert!(alone.mixes.is_empty(), "one window has no other half");
}

#[test]
fn a_pack_is_measured_with_its_own_low_versions_and_with_several_caches() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path(), Format::Q8_0);
    let pack = dir.path().join("random.hobbit.gguf");
    let made = Command::new(env!("CARGO_BIN_EXE_gguf-tools"))
        .arg("pack")
        .args([&model, Path::new("-o"), &pack])
        .args(["--low", "q2_k"])
        .output();
    assert!(made.unwrap().status.success());
    let args = ["--tokens", "256", "--context", "128", "--no-widths", "--max-loss", "100%"];
    let found = profile(&pack, &text, &[&args[..], &["--expert-cache", "50%,25%"]].concat());
    let [half, quarter] = &found.mixes[..] else { panic!("{:?}", found.mixes) };
    assert_eq!((half.expert_cache.as_str(), quarter.expert_cache.as_str()), ("50%", "25%"));
    assert!((half.cache_share - 0.5).abs() < 0.05 && (quarter.cache_share - 0.25).abs() < 0.05, "{found:?}");
    assert!(half.exact_bytes_per_token < quarter.exact_bytes_per_token, "{found:?}");
    assert_eq!((half.high.as_str(), half.low.as_deref()), ("q8_0", Some("q2_K")));
    assert!(quarter.mixes.iter().any(|own| own.mix.uses_low()), "{quarter:?}");
    assert_eq!(found.thresholds.unwrap().measured.unwrap().expert_cache, "50%", "by the first");

    // What a session takes of it, by how much is in memory.
    let bound =
        |max_loss| LossBound { max_loss, measured: found.mixes.clone(), file: beside(&pack), model: pack.clone() };
    let run = |cache: f64, bound: LossBound| {
        let options = ModelOptions {
            budget: Budget::Bytes(4 << 30),
            expert_cache: ExpertCache::Percent(cache),
            loss_bound: Some(bound),
            ..ModelOptions::default()
        };
        let model = Model::open(&pack, &options).unwrap();
        let session = model.session(&SessionOptions { n_ctx: 64, threads: Some(1), ..SessionOptions::default() });
        session.map(|session| session.precision().clone())
    };
    let low = run(30.0, bound(1.0)).unwrap();
    assert!(low.is_dynamic(), "{low:?}");
    let said = low.loss_bound.unwrap();
    assert!(said.contains("with 25 % of the experts in memory (here ") && said.contains("--t1"), "{said}");
    // Where low versions are not part of the choice, no slot is theirs.
    let mut without = bound(1.0);
    without.measured.iter_mut().for_each(|own| own.mixes.retain(|own| !own.mix.uses_low()));
    let high = run(60.0, without).unwrap();
    assert!(!high.is_dynamic() && high.low.is_none_or(|low| low.slots == 0));
    assert!(high.loss_bound.unwrap().contains("with 50 % of the experts in memory (here "));
    let refused = run(15.0, bound(1.0)).unwrap_err().to_string();
    assert!(refused.contains("has measured with 25 %, 50 %") && refused.contains("--expert-cache 1"), "{refused}");

    let refused = tool(&pack, &text, &["--tokens", "256"]);
    assert!(words(&refused.stderr).contains("give --no-widths, or the plain model"), "{}", words(&refused.stderr));
    let refused = tool(&pack, &text, &[&args[..], &["--low", "q3_k"]].concat());
    assert!(words(&refused.stderr).contains("not made of a pack"), "{}", words(&refused.stderr));
}

#[test]
fn the_share_of_prompts_in_low_precision_is_searched_for_a_loss() {
    let (model, text) = (demo("demo.gguf"), demo("demo-heldout-prose.txt"));
    let with = |max_loss: &str| {
        let args =
            ["--tokens", "1024", "--context", "256", "--no-widths", "--low", "q2_k", "--max-prefill-loss", max_loss];
        profile(&model, &text, &args).prefill.unwrap()
    };
    let (none, some, all) = (with("0%"), with("1%"), with("1000%"));
    assert!(some.loss <= 0.01 && none.loss <= 0.0, "{some:?} {none:?}");
    assert!(none.prefill_low <= some.prefill_low && some.prefill_low < all.prefill_low, "{none:?} {some:?} {all:?}");
    assert_eq!((all.prefill_low, all.n_measured), (1.0, 8), "{all:?}");
    assert!(all.loss > 0.01 && all.loss_error > 0.0 && all.loss > all.loss_error, "{all:?}");
    assert!(all.bytes_per_token < 0.5 * all.exact_bytes_per_token, "{all:?}");
    assert!(some.bytes_per_token <= some.exact_bytes_per_token, "{some:?}");
    assert_eq!((some.expert_cache.as_str(), some.low.as_str(), some.max_loss), ("25%", "q2_K", 0.01));
    let shown =
        tool(&model, &text, &["--tokens", "128", "--no-widths", "--low", "q2_k", "--max-prefill-loss", "1000%"]);
    let shown = words(&shown.stdout);
    assert!(shown.contains("prompts within 1000.0 %: --t1 1 --prefill-low 100%") && shown.contains("±"), "{shown}");
}

#[test]
fn a_profile_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path(), Format::Q8_0);
    let made = profile(&model, &text, &["--tokens", "128", "--no-widths", "--shares", "70/30/0"]);
    let other = Gguf::open(&demo("demo.gguf")).unwrap();
    let refused = made.check_model(&other, &other.experts().unwrap()).unwrap_err();
    assert!(matches!(refused, ProfileError::OtherModel { what: "general.architecture", .. }), "{refused}");
    assert!(refused.to_string().contains("demo.gguf") && refused.to_string().contains("random.gguf"), "{refused}");
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random(dir.path(), Format::Q4_0);
    let short = dir.path().join("short.txt");
    std::fs::write(&short, "Too short.").unwrap();
    let table: [(&Path, &[&str], &str); 8] = [
        (&short, &["--widths", "q2_k"], "the text is too short"),
        (&dir.path().join("none.txt"), &[], "none.txt: cannot read"),
        (&text, &["--widths", "q8_0,q6_k"], "none is smaller than the model's experts"),
        (&text, &["--widths", "iq1_s"], "needs an importance matrix"),
        (&text, &["--no-widths", "--max-loss", "1%", "--low", "q9"], "neither a file nor a type"),
        (&text, &["--no-widths", "--max-loss", "1%", "--low", "q2_k", "--expert-cache", "400MiB"], "every expert fits"),
        (
            &text,
            &["--no-widths", "--max-prefill-loss", "1%", "--low", "q2_k", "--expert-cache", "100%"],
            "every expert fits",
        ),
        (&text, &["--no-widths", "--max-prefill-loss", "1%"], "give --low FILE"),
    ];
    for (text, args, part) in table {
        let out = tool(&model, text, args);
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(words(&out.stderr).contains(part), "'{part}' is not in:\n{}", words(&out.stderr));
    }
    for args in
        [["--shares", "67/30/4"], ["--shares", "67/30"], ["--max-loss", "-1%"], ["--widths", "q9"], ["--low", "q2_k"]]
    {
        assert_eq!(tool(&model, &text, &args).status.code(), Some(2), "{args:?}");
    }
}
