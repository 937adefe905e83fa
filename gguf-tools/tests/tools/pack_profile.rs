//! `pack --profile` and `pack --policy`: each expert's own width, and a tuned policy in a pack.

use hobbit::options::DeviceChoice;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, PrecisionOptions, SessionOptions};
use hobbit_core::cache::Allocation;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{Pack, PackInfo};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::profile::{MeasuredMix, Mix, Mixes, Profile, mixes_of_json, norms_of_json};
use hobbit_core::tuned::{LayerPenalty, TUNED_FORMAT, TUNED_VERSION, TunedOn, TunedPolicy};

use crate::*;

fn info(pack: &str) -> PackInfo {
    Pack::open(Path::new(pack)).unwrap().info
}

#[test]
fn each_expert_gets_its_own_width() {
    let dir = tempfile::tempdir().unwrap();
    let [model, text] = ["demo.gguf", "demo-heldout-prose.txt"].map(|name| word(&bundled(name)).to_owned());
    let [profile, pack] = ["profile.json", "pack.gguf"].map(|name| word(&dir.path().join(name)).to_owned());
    let usual = ["--threads", "1", "--mem-budget", "4GiB", "--tokens", "256", "--context", "128"];
    let goals = ["--widths", "q2_k,q4_k", "--shares", "67/30/3", "-o", &profile];
    succeed(&[&["profile", &model, "--text", &text][..], &usual, &goals].concat());
    let args = |goal: &[&'static str]| {
        let usual = ["pack", &model, "-o", &pack, "--force", "--profile", &profile];
        [&usual.map(str::to_owned)[..], &goal.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()].concat()
    };
    let pack_with = |goal: &[&'static str], part: &str| {
        let args = args(goal);
        let ran = succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert_contains(&ran.err, &[part]);
        succeed(&["verify", &pack]);
        fs::metadata(&pack).unwrap().len()
    };
    let refuse = |goal: &[&'static str], part: &str| {
        let args = args(goal);
        refused(1, &args.iter().map(String::as_str).collect::<Vec<_>>(), part);
    };

    let [strict, loose] = [["--max-loss", "1%"], ["--max-loss", "4%"]].map(|goal| pack_with(&goal, "perplexity +"));
    assert!(loose < strict && strict < Gguf::open(Path::new(&model)).unwrap().file_bytes(), "{loose} {strict}");
    let measured = Profile::read(Path::new(&profile)).unwrap();
    let thresholds = measured.thresholds.as_ref().map(|own| (own.t1, own.t2));
    assert_eq!(info(&pack).t1.zip(info(&pack).t2), thresholds);
    assert_eq!(info(&pack).norms.as_deref().map(norms_of_json), Some(Ok(measured.norms.clone())));
    assert!(measured.norms.len() == 6 && measured.norms.iter().all(|own| own.norms.len() == 8));
    assert!(measured.norms.iter().flat_map(|own| &own.norms).all(|norm| *norm > 0.0));
    assert_eq!(info(&pack).mixes, None, "none were sought");
    let bounded = pack_with(&["--max-loss", "1%", "--bounds"], "perplexity +");
    assert!(bounded < Gguf::open(Path::new(&model)).unwrap().file_bytes(), "{bounded}");
    let sized = pack_with(&["--target-size", "8MiB"], "perplexity +");
    assert!(sized <= 8 << 20 && sized > 7 << 20, "{sized}");
    refuse(&["--target-size", "1MiB"], "cannot be reached");
    refused(2, &["pack", &model, "-o", &pack, "--force", "--max-loss", "1%"], "--profile");

    // Mixes of the profile are stored too.
    let mix = Mix { cache_bias: 0.2, ..Mix::EXACT };
    let mixes = vec![Mixes {
        text: "prose.txt".into(),
        text_sha256: "00".repeat(32),
        tokens: 128,
        expert_cache: "25%".into(),
        cache_share: 0.25,
        high: "q8_0".into(),
        low: None,
        exact_bytes_per_token: 2e5,
        mixes: vec![MeasuredMix { mix, loss: 0.004, error: 0.001, bytes_per_token: 1e5 }],
    }];
    fs::write(&profile, Profile { mixes: mixes.clone(), ..measured }.to_json()).unwrap();
    pack_with(&[], "high q8_0");
    assert_eq!(info(&pack).mixes.as_deref().map(mixes_of_json), Some(Ok(mixes)));
    let line = "measured for --max-loss: 1 mixes on prose.txt with 25 % of the experts in memory";
    assert_contains(&succeed(&["inspect", &pack]).out, &[line]);
}

/// As `hobbit-sim calibrate` writes it for the demo model, with made-up numbers: the last layer's misses cost most.
fn tuned() -> TunedPolicy {
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
    let model = word(&bundled("demo.gguf")).to_owned();
    let [policy, pack, other] =
        ["policy.json", "pack.gguf", "other.json"].map(|name| word(&dir.path().join(name)).to_owned());
    let mut tuned = tuned();
    tuned.tuned_on.architecture = Gguf::open(Path::new(&model)).unwrap().architecture().to_owned();
    fs::write(&policy, tuned.to_json()).unwrap();
    succeed(&["pack", &model, "-o", &pack, "--low", "q2_k", "--policy", &policy]);
    assert_eq!((info(&pack).t1, info(&pack).t2), (Some(0.25), Some(0.5)), "no others were given");
    let line = "tuned policy: hobbit, weights 0.5,0.25,0.25,0, tuned on prose.trace (400 tokens)";
    assert_contains(&succeed(&["inspect", &pack]).out, &[line]);

    let none = DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() };
    let by_penalty = CachingOptions { slots: Allocation::ByPenalty, ..CachingOptions::default() };
    let packed = ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(50.0),
        caching: by_penalty,
        device: none,
        ..ModelOptions::default()
    };
    let session = |options: &ModelOptions| {
        let model = Model::open(Path::new(&pack), options).unwrap();
        let options = SessionOptions { n_ctx: 64, threads: Some(1), ..SessionOptions::default() };
        let opened = model.session(&options).unwrap();
        let slots: Vec<u32> = opened.stats().layers.iter().map(|layer| layer.slots).collect();
        let precision = opened.precision();
        (slots, opened.caching().clone(), (precision.t1, precision.t2))
    };
    let (slots, caching, thresholds) = session(&packed);
    assert_eq!(slots, [2, 2, 2, 2, 8, 8], "two for a token, the rest where it is worth most");
    assert_eq!((caching.policy_weights.as_str(), thresholds), ("0.5,0.25,0.25,0", (0.25, 0.5)));
    let file = caching.profile.unwrap().file;
    assert!(file.contains("pack.gguf") && file.contains("hobbit.policy"), "{file}");

    // A file wins over the pack, flags over both.
    let weights = [1.0, 0.0, 0.0, 0.0];
    fs::write(&other, TunedPolicy { weights, t1: Some(0.75), t2: Some(1.0), ..tuned.clone() }.to_json()).unwrap();
    let given = ModelOptions { profile: Some(other.clone().into()), ..packed.clone() };
    let (_, caching, thresholds) = session(&given);
    assert_eq!((caching.policy_weights.as_str(), thresholds), ("1,0,0,0", (0.75, 1.0)));
    let flags = ModelOptions {
        caching: CachingOptions { weights: Some("0,1,0,0".parse().unwrap()), slots: Allocation::Even, ..by_penalty },
        precision: PrecisionOptions { t1: Some(0.5), ..PrecisionOptions::default() },
        ..given
    };
    let (slots, caching, thresholds) = session(&flags);
    assert_eq!((slots, caching.policy_weights.as_str(), thresholds), (vec![4; 6], "0,1,0,0", (0.5, 1.0)));

    // A pack takes no policy of another model.
    tuned.layers.pop();
    fs::write(&policy, tuned.to_json()).unwrap();
    let args = ["pack", &model, "-o", &pack, "--force", "--policy", &policy];
    refused(1, &args, "number of layers with experts is 5, expected 6");
}
