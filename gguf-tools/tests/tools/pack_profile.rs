//! `pack --profile`: each expert's own width.

use hobbit::options::DeviceChoice;
use hobbit::{DeviceOptions, Model, ModelOptions, PrecisionOptions, SessionOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{Pack, PackInfo};
use hobbit_core::plan::ExpertCache;
use hobbit_core::profile::{MeasuredMix, Mix, Mixes, Profile, mixes_of_json, norms_of_json};

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

#[test]
fn a_packs_thresholds_hold_unless_others_are_given() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack] = [bundled("demo.gguf"), dir.path().join("pack.gguf")].map(|path| word(&path).to_owned());
    succeed(&["pack", &model, "-o", &pack, "--low", "q2_k", "--t1", "0.25", "--t2", "0.5"]);
    let device = DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() };
    for (t1, expected) in [(None, (0.25, 0.5)), (Some(0.75), (0.75, 0.75))] {
        let precision = PrecisionOptions { t1, ..PrecisionOptions::default() };
        let expert_cache = ExpertCache::Percent(50.0);
        let options = ModelOptions { expert_cache, precision, device: device.clone(), ..ModelOptions::default() };
        let model = Model::open(Path::new(&pack), &options).unwrap();
        let session = SessionOptions { n_ctx: 64, threads: Some(1), ..SessionOptions::default() };
        let precision = model.session(&session).unwrap().description().precision.clone();
        assert_eq!((precision.t1, precision.t2), expected);
    }
}
