//! `pack --profile` and `pack --policy` as a user runs them: each expert its own width, and a tuned policy that goes along.

use std::path::Path;
use std::process::{Command, Output};

use hobbit::options::DeviceChoice;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, PrecisionOptions, SessionOptions};
use hobbit_core::cache::Allocation;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::Pack;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::profile::{MeasuredMix, Mix, Mixes, Profile, mixes_of_json, norms_of_json};
use hobbit_core::tuned::{LayerPenalty, TUNED_FORMAT, TUNED_VERSION, TunedOn, TunedPolicy};

fn tool(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gguf-tools")).args(args).output().unwrap()
}

fn words(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn each_expert_gets_its_own_width() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let [model, text] =
        ["demo.gguf", "demo-heldout-prose.txt"].map(|name| models.join(name).to_str().unwrap().to_owned());
    let (profile, pack) = (path("profile.json"), path("pack.gguf"));
    let measured = tool(&[
        "profile",
        &model,
        "--text",
        &text,
        "--tokens",
        "256",
        "--context",
        "128",
        "--widths",
        "q2_k,q4_k",
        "--threads",
        "1",
        "--mem-budget",
        "4GiB",
        "--shares",
        "67/30/3",
        "--tolerance",
        "2%",
        "-o",
        &profile,
    ]);
    assert!(measured.status.success(), "{}", words(&measured.stderr));

    let size = |goal: [&str; 2]| {
        let out = tool(&["pack", &model, "-o", &pack, "--force", "--profile", &profile, goal[0], goal[1]]);
        assert!(out.status.success(), "{goal:?}: {}", words(&out.stderr));
        assert!(words(&out.stderr).contains("predicted perplexity +"), "{}", words(&out.stderr));
        let checked = tool(&["verify", &pack]);
        assert!(checked.status.success(), "{}", words(&checked.stdout));
        std::fs::metadata(&pack).unwrap().len()
    };
    let [strict, loose] = [["--max-loss", "1%"], ["--max-loss", "4%"]].map(size);
    assert!(loose < strict && strict < Gguf::open(Path::new(&model)).unwrap().file_bytes(), "{loose} {strict}");
    let fitted = Profile::read(Path::new(&profile)).unwrap().thresholds.unwrap();
    let info = Pack::open(Path::new(&pack)).unwrap().info;
    assert_eq!((info.t1, info.t2), (Some(fitted.t1), Some(fitted.t2)), "the pack has the profile's thresholds");
    let norms = Profile::read(Path::new(&profile)).unwrap().norms;
    assert_eq!(info.norms.as_deref().map(norms_of_json), Some(Ok(norms.clone())), "and its norms");
    assert!(
        norms.len() == 6 && norms.iter().all(|own| own.norms.len() == 8 && own.norms.iter().all(|norm| *norm > 0.0))
    );
    assert_eq!(info.mixes, None, "none were sought");
    let sized = size(["--target-size", "8MiB"]);
    assert!(sized <= 8 << 20 && sized > 7 << 20, "{sized}");

    let measured = Profile::read(Path::new(&profile)).unwrap();
    let tolerated = measured.widths.last().unwrap().tolerated.clone().unwrap();
    assert!(tolerated.loss <= 0.02 && (1..48).contains(&tolerated.experts.len()), "{tolerated:?}");
    let mixed = tool(&["pack", &model, "-o", &pack, "--force", "--profile", &profile, "--tolerated", "q2_k"]);
    assert!(mixed.status.success(), "{}", words(&mixed.stderr));
    let lowered = format!("{} experts lowered to q2_K: measured perplexity ", tolerated.experts.len());
    assert!(words(&mixed.stderr).contains(&lowered), "{}", words(&mixed.stderr));
    let refused = tool(&["pack", &model, "-o", &pack, "--force", "--profile", &profile, "--tolerated", "q3_k"]);
    assert!(words(&refused.stderr).contains("--widths q3_K --tolerance"), "{}", words(&refused.stderr));

    let refused = tool(&["pack", &model, "-o", &pack, "--force", "--profile", &profile, "--target-size", "1MiB"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(words(&refused.stderr).contains("cannot be reached"), "{}", words(&refused.stderr));
    // Whatever was sought goes along.
    let one =
        MeasuredMix { mix: Mix { cache_bias: 0.2, ..Mix::EXACT }, loss: 0.004, error: 0.001, bytes_per_token: 1e5 };
    let mixes = vec![Mixes {
        text: "prose.txt".into(),
        text_sha256: "00".repeat(32),
        tokens: 128,
        expert_cache: "25%".into(),
        cache_share: 0.25,
        high: "q8_0".into(),
        low: None,
        exact_bytes_per_token: 2e5,
        mixes: vec![one],
    }];
    std::fs::write(&profile, Profile { mixes: mixes.clone(), ..measured }.to_json()).unwrap();
    let plain = tool(&["pack", &model, "-o", &pack, "--force", "--profile", &profile]);
    assert!(plain.status.success(), "{}", words(&plain.stderr));
    let info = Pack::open(Path::new(&pack)).unwrap().info;
    assert_eq!(info.mixes.as_deref().map(mixes_of_json), Some(Ok(mixes)));
    let inspected = tool(&["inspect", &pack]);
    let line = "measured for --max-loss: 1 mixes on prose.txt with 25 % of the experts in memory";
    assert!(words(&inspected.stdout).contains(line), "{}", words(&inspected.stdout));

    let refused = tool(&["pack", &model, "-o", &pack, "--force", "--max-loss", "1%"]);
    assert_eq!(refused.status.code(), Some(2), "a goal without a profile");
}

/// As `hobbit-sim calibrate` writes it for the demo model, with made-up numbers: the last layer's misses cost most.
fn fitted() -> TunedPolicy {
    let layer = |layer: u16| {
        let penalty = (0..=8).map(|slots| f64::from(1 << layer) * f64::from(8 - slots)).collect();
        LayerPenalty { layer, n_expert: 8, slots: (0..=8).collect(), penalty }
    };
    TunedPolicy {
        format: TUNED_FORMAT.into(),
        version: TUNED_VERSION,
        policy: "hobbit".into(),
        weights: [0.5, 0.25, 0.25, 0.0],
        t1: Some(0.25),
        t2: Some(0.5),
        shares: None,
        tuned_on: TunedOn {
            traces: vec!["prose.trace".into()],
            model: "demo.gguf".into(),
            architecture: "qwen3moe".into(),
            tokens: 400,
            budget: "50%".into(),
        },
        penalty: 1.0,
        penalty_lru: 2.0,
        replays: 9,
        layers: (0..6).map(layer).collect(),
    }
}

#[test]
fn a_tuned_policy_goes_along_and_flags_win() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf").to_str().unwrap().to_owned();
    let (policy, pack) = (path("policy.json"), path("pack.gguf"));
    let architecture = Gguf::open(Path::new(&model)).unwrap().architecture().to_owned();
    let mut fitted = fitted();
    fitted.tuned_on.architecture = architecture;
    std::fs::write(&policy, fitted.to_json()).unwrap();
    let out = tool(&["pack", &model, "-o", &pack, "--low", "q2_k", "--policy", &policy]);
    assert!(out.status.success(), "{}", words(&out.stderr));
    let info = Pack::open(Path::new(&pack)).unwrap().info;
    assert_eq!((info.t1, info.t2), (Some(0.25), Some(0.5)), "no others were given");
    let inspected = tool(&["inspect", &pack]);
    let line = "tuned policy: hobbit, weights 0.5,0.25,0.25,0, tuned on prose.trace (400 tokens)";
    assert!(words(&inspected.stdout).contains(line), "{}", words(&inspected.stdout));

    let none = DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() };
    let by_penalty = CachingOptions { slots: Allocation::ByPenalty, ..CachingOptions::default() };
    let packed = ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(50.0),
        caching: by_penalty,
        device: none,
        ..ModelOptions::default()
    };
    let run = |options: &ModelOptions| {
        let model = Model::open(Path::new(&pack), options).unwrap();
        let options = SessionOptions { n_ctx: 64, threads: Some(1), ..SessionOptions::default() };
        let session = model.session(&options).unwrap();
        let slots: Vec<u32> = session.stats().layers.iter().map(|layer| layer.slots).collect();
        let precision = session.precision();
        (slots, session.caching().clone(), (precision.t1, precision.t2))
    };
    let (slots, caching, thresholds) = run(&packed);
    assert_eq!(slots, [2, 2, 2, 2, 8, 8], "two for a token, the rest where it is worth most");
    assert_eq!((caching.policy_weights.as_str(), thresholds), ("0.5,0.25,0.25,0", (0.25, 0.5)));
    let file = caching.profile.unwrap().file;
    assert!(file.contains("pack.gguf") && file.contains("hobbit.policy"), "{file}");

    // A file wins over the pack, flags over both.
    let other = path("other.json");
    let weights = [1.0, 0.0, 0.0, 0.0];
    std::fs::write(&other, TunedPolicy { weights, t1: Some(0.75), t2: Some(1.0), ..fitted.clone() }.to_json()).unwrap();
    let given = ModelOptions { profile: Some(other.into()), ..packed.clone() };
    let (_, caching, thresholds) = run(&given);
    assert_eq!((caching.policy_weights.as_str(), thresholds), ("1,0,0,0", (0.75, 1.0)));
    let flags = ModelOptions {
        caching: CachingOptions { weights: Some("0,1,0,0".parse().unwrap()), slots: Allocation::Even, ..by_penalty },
        precision: PrecisionOptions { t1: Some(0.5), ..PrecisionOptions::default() },
        ..given
    };
    let (slots, caching, thresholds) = run(&flags);
    assert_eq!((slots, caching.policy_weights.as_str(), thresholds), (vec![4; 6], "0,1,0,0", (0.5, 1.0)));

    // Another model's does not get into a pack.
    fitted.layers.pop();
    std::fs::write(&policy, fitted.to_json()).unwrap();
    let refused = tool(&["pack", &model, "-o", &pack, "--force", "--policy", &policy]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        words(&refused.stderr).contains("number of layers with experts is 5, expected 6"),
        "{}",
        words(&refused.stderr)
    );
}
