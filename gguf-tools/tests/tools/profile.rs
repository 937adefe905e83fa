//! `profile`: on the demo model, on one with random weights, and where it must refuse.

use hobbit::{Model, ModelOptions, SessionOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::profile::{Goal, LossBound, Profile, ProfileError, beside, widths};
use hobbit_synth::Format;

use crate::*;

/// Arguments of `profile` with one thread on `model` and `text`.
fn args<'a>(model: &'a Path, text: &'a Path, args: &[&'a str]) -> Vec<&'a str> {
    let usual = ["profile", word(model), "--text", word(text), "--threads", "1", "--mem-budget", "4GiB"];
    [&usual[..], args].concat()
}

fn profile(model: &Path, text: &Path, more: &[&str]) -> Profile {
    let ran = succeed(&args(model, text, &[more, &["--json"]].concat()));
    Profile::parse(&ran.out, Path::new("stdout")).unwrap()
}

fn random_q8(dir: &Path) -> (PathBuf, PathBuf) {
    random(dir, &Spec { layers: 3, seed: 5, ..Spec::tiny("qwen3moe") })
}

const TWO_WINDOWS: [&str; 5] = ["--tokens", "256", "--context", "128", "--no-widths"];

#[test]
fn the_demo_models_most_robust_experts_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text, file) = (bundled("demo.gguf"), bundled("demo-heldout-prose.txt"), dir.path().join("demo.json"));
    let temp = dir.path().join("temp");
    fs::create_dir(&temp).unwrap();
    let more = ["--tokens", "512", "--context", "256", "--widths", "q2_k,q4_k", "--alone", "0%"];
    let files = ["--shares", "67/30/3", "-o", word(&file), "--temp-dir", word(&temp)];
    let shown = succeed(&args(&model, &text, &[&more[..], &files].concat())).out;
    assert_contains(&shown, &["48 experts in 6 layers", "--t1 0.", "every expert at q2_K", "most robust"]);
    assert_eq!(fs::read_dir(&temp).unwrap().count(), 0, "temporary files are left");

    let profile = Profile::read(&file).unwrap();
    let gguf = Gguf::open(&model).unwrap();
    let map = gguf.experts().unwrap();
    profile.check_model(&gguf, &map).unwrap();
    assert_eq!((profile.text.tokens, profile.text.context), (512, 256));
    let tuned = profile.thresholds.as_ref().unwrap();
    for (reached, wanted) in [(tuned.shares.high, 0.67), (tuned.shares.low, 0.30), (tuned.shares.skip, 0.03)] {
        assert!((reached - wanted).abs() < 0.01, "{tuned:?}");
    }
    assert!(0.5 <= tuned.t1 && tuned.t1 < tuned.t2 && tuned.t2 < 1.0, "{tuned:?}");

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
    let none = widths(&profile, &map, Goal::MaxLoss(0.0)).unwrap();
    assert!(none.types.is_empty());
    let some = widths(&profile, &map, Goal::MaxLoss(0.02)).unwrap();
    assert!(some.loss <= 0.02 && some.record_bytes < none.record_bytes, "{some:?}");
    assert!((1..48).contains(&some.counts[&q2.dtype]), "{:?}", some.counts);
    let all = widths(&profile, &map, Goal::MaxLoss(100.0)).unwrap();
    assert_eq!(all.counts.get(&q2.dtype), Some(&48));
    let fits = widths(&profile, &map, Goal::TargetSize { bytes: 6 << 20, other: 1 << 20 }).unwrap();
    assert!(fits.record_bytes <= 5 << 20 && fits.loss > 0.0);
    let error = widths(&profile, &map, Goal::TargetSize { bytes: 3 << 20, other: 1 << 20 }).unwrap_err();
    assert!(error.to_string().contains(&format!("{} bytes", all.record_bytes + (1 << 20))), "{error}");
}

#[test]
fn experts_are_lowered_alone_and_their_number_is_adjusted_by_measured_losses() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = (bundled("demo.gguf"), bundled("demo-heldout-prose.txt"));
    let usual = ["--tokens", "256", "--context", "128"];
    let more = [&usual[..], &["--widths", "q2_k,q4_k", "--alone", "25%", "--bounds", "2%"]].concat();
    let found = profile(&model, &text, &more);
    for width in &found.widths {
        let measured: usize = width.layers.iter().map(|layer| layer.measured.len()).sum();
        assert_eq!(measured, 12, "a quarter of 48");
        let sum: f64 = width.layers.iter().flat_map(|layer| &layer.experts).sum();
        let whole = width.kl.max(width.perplexity_increase.ln_1p());
        assert!((sum * width.scale - whole).abs() < 1e-9, "{}: {sum} {whole}", width.dtype);
    }
    let [bounded] = &found.bounded[..] else { panic!("{:?}", found.bounded) };
    assert!(bounded.perplexity_increase <= 0.02 && (1..=10).contains(&bounded.runs.len()), "{bounded:?}");
    let best = bounded.runs.iter().filter(|(_, loss)| *loss <= 0.02).max_by_key(|(n, _)| *n).unwrap();
    assert_eq!(*best, (bounded.lowered, bounded.perplexity_increase));

    // The model that was run is the pack that is written.
    let [file, pack] = ["demo.json", "demo.hobbit.gguf"].map(|name| dir.path().join(name));
    fs::write(&file, found.to_json()).unwrap();
    let from = ["--profile", word(&file), "--max-loss"];
    let packed = succeed(&[&["pack", word(&model), "-o", word(&pack)], &from[..], &["2%", "--bounds"]].concat());
    let n = bounded.lowered;
    assert_contains(&packed.err, &[": measured perplexity ", &format!("{n} at q2_K"), &format!("{} at q4_K", 48 - n)]);
    let perplexity = profile(&pack, &text, &[&usual[..], &["--no-widths"]].concat()).text.perplexity;
    let increase = perplexity / found.text.perplexity - 1.0;
    assert!((increase - bounded.perplexity_increase).abs() < 1e-4, "{increase} {bounded:?}");
    let another = [&["pack", word(&model), "-o", word(&pack), "--force"], &from[..], &["3%", "--bounds"]].concat();
    assert_contains(&succeed(&another).err, &[": predicted perplexity ", "profile --bounds 3% measures"]);
    refused(2, &args(&model, &text, &["--no-widths", "--bounds", "2%"]), "cannot be used with");
}

#[test]
fn a_loss_bound_is_kept_and_saves_traffic() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random_q8(dir.path());
    // Losses of random weights are within 5 % of zero, and each CPU's rounding has others.
    let with_low = [&TWO_WINDOWS[..], &["--max-loss", "30%", "--low", "q2_k"]].concat();
    let first = profile(&model, &text, &with_low);
    let tuned = first.thresholds.as_ref().unwrap();
    assert_eq!(tuned.goal, "max loss 30%");
    let [mixes] = &first.mixes[..] else { panic!("{:?}", first.mixes) };
    let alone = mixes.mixes.iter().find(|own| own.mix.is_low_alone()).unwrap();
    assert_eq!((alone.mix.t1, alone.mix.t2), (tuned.t1, tuned.t2));
    assert!(alone.loss <= 0.3 && alone.bytes_per_token < mixes.exact_bytes_per_token, "{alone:?}");
    assert_eq!((mixes.tokens, mixes.text_sha256.len()), (128, 64));
    assert_eq!((mixes.high.as_str(), mixes.low.as_deref()), ("q8_0", Some("q2_K")));
    assert!((0.2..0.3).contains(&mixes.cache_share) && mixes.exact_bytes_per_token > 0.0, "{mixes:?}");
    assert!(mixes.mixes.len() <= 6 && mixes.mixes.iter().all(|own| own.error >= 0.0), "{mixes:?}");
    assert_eq!(profile(&model, &text, &with_low), first, "a second run measures the same");

    let without = profile(&model, &text, &[&TWO_WINDOWS[..], &["--max-loss", "100%"]].concat());
    let [mixes] = &without.mixes[..] else { panic!("{:?}", without.mixes) };
    assert!(without.thresholds.is_none() && mixes.low.is_none());
    // Random routers hardly differ in loss, so the cheapest mix saves much.
    let best = mixes.cheapest(1.0, false).unwrap();
    assert!(best.bytes_per_token < 0.8 * mixes.exact_bytes_per_token, "{mixes:?}");
    assert!(mixes.mixes.iter().all(|own| !own.mix.uses_low()));
    let alone = profile(&model, &text, &["--tokens", "128", "--context", "128", "--no-widths", "--max-loss", "1%"]);
    assert!(alone.mixes.is_empty(), "one window has no other half");
}

#[test]
fn a_pack_is_measured_with_its_own_low_versions_and_with_several_caches() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text) = random_q8(dir.path());
    let pack = dir.path().join("random.hobbit.gguf");
    succeed(&["pack", word(&model), "-o", word(&pack), "--low", "q2_k"]);
    let all = [&TWO_WINDOWS[..], &["--max-loss", "100%"]].concat();
    let found = profile(&pack, &text, &[&all[..], &["--expert-cache", "50%,25%"]].concat());
    let [half, quarter] = &found.mixes[..] else { panic!("{:?}", found.mixes) };
    assert_eq!((half.expert_cache.as_str(), quarter.expert_cache.as_str()), ("50%", "25%"));
    assert!((half.cache_share - 0.5).abs() < 0.05 && (quarter.cache_share - 0.25).abs() < 0.05, "{found:?}");
    assert!(half.exact_bytes_per_token < quarter.exact_bytes_per_token, "{found:?}");
    assert_eq!((half.high.as_str(), half.low.as_deref()), ("q8_0", Some("q2_K")));
    assert!(quarter.mixes.iter().any(|own| own.mix.uses_low()), "{quarter:?}");

    // A session uses the mixes of the largest measured cache that is not above its own.
    let bound = |max_loss| LossBound {
        max_loss,
        measured: found.mixes.clone(),
        file: beside(&pack),
        model: pack.clone(),
        name: |setting| format!("--{setting}"),
    };
    let session = |cache: f64, bound: LossBound| {
        let options = ModelOptions {
            budget: Budget::Bytes(4 << 30),
            expert_cache: ExpertCache::Percent(cache),
            loss_bound: Some(bound),
            ..ModelOptions::default()
        };
        let model = Model::open(&pack, &options).unwrap();
        let opened = model.session(&SessionOptions { n_ctx: 64, threads: Some(1), ..SessionOptions::default() });
        opened.map(|session| session.description().precision.clone())
    };
    let low = session(30.0, bound(1.0)).unwrap();
    assert!(low.is_dynamic(), "{low:?}");
    let said = low.loss_bound.unwrap();
    assert!(said.contains("with 25 % of the experts in memory (here ") && said.contains("--t1"), "{said}");
    // Where low versions are not part of the choice, no slot is theirs.
    let mut without = bound(1.0);
    without.measured.iter_mut().for_each(|own| own.mixes.retain(|own| !own.mix.uses_low()));
    let high = session(60.0, without).unwrap();
    assert!(!high.is_dynamic() && high.low.is_none_or(|low| low.versions.slots == 0));
    assert!(high.loss_bound.unwrap().contains("with 50 % of the experts in memory (here "));
    let error = session(15.0, bound(1.0)).unwrap_err().to_string();
    assert!(error.contains("was measured with 25 %, 50 %"), "{error}");

    refused(1, &args(&pack, &text, &["--tokens", "256"]), "give --no-widths, or the plain model");
    refused(1, &args(&pack, &text, &[&all[..], &["--low", "q3_k"]].concat()), "not made of a pack");
}

#[test]
fn commands_that_make_no_sense_are_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let types = vec![Format::Q4_0];
    let (model, text) = random(dir.path(), &Spec { layers: 3, types, ..Spec::tiny("qwen3moe") });
    let [short, none] = ["short.txt", "none.txt"].map(|name| dir.path().join(name));
    fs::write(&short, "Too short.").unwrap();
    let made = profile(&model, &text, &["--tokens", "128", "--no-widths", "--shares", "70/30/0"]);
    let other = Gguf::open(&bundled("demo.gguf")).unwrap();
    let error = made.check_model(&other, &other.experts().unwrap()).unwrap_err();
    assert!(matches!(error, ProfileError::OtherModel { what: "general.architecture", .. }), "{error}");
    assert_contains(&error.to_string(), &["demo.gguf", "random.gguf"]);

    let max_loss = ["--no-widths", "--max-loss", "1%", "--low", "q2_k"];
    let cases: [(&Path, &[&str], &str); 7] = [
        (&short, &["--widths", "q2_k"], "the text is too short"),
        (&none, &[], "none.txt: cannot read"),
        (&text, &["--widths", "q8_0,q6_k"], "none is smaller than the model's experts"),
        (&text, &["--widths", "iq1_s"], "needs an importance matrix"),
        (&text, &["--no-widths", "--max-loss", "1%", "--low", "q9"], "neither a file nor a type"),
        (&text, &[&max_loss[..], &["--expert-cache", "400MiB"]].concat(), "every expert fits"),
        (&text, &[&max_loss[..], &["--expert-cache", "100%"]].concat(), "every expert fits"),
    ];
    for (text, more, part) in cases {
        refused(1, &args(&model, text, more), part);
    }
    for more in
        [["--shares", "67/30/4"], ["--shares", "67/30"], ["--max-loss", "-1%"], ["--widths", "q9"], ["--low", "q2_k"]]
    {
        refused(2, &args(&model, &text, &more), "");
    }
}
