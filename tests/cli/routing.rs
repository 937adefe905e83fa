//! Cache-aware routing, and a bound on its loss.

use std::path::Path;

use hobbit::engine::Ggml;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{PackKind, PackSpec};
use hobbit_core::profile::{FORMAT, MeasuredMix, Mix, Mixes, ModelId, Profile, TextId, VERSION, mixes_to_json};
use serde_json::Value;

use super::rig::*;

const WHOLE: [&str; 6] = ["-p", "In the beginning", "-n", "200", "--expert-cache", "50%"];

#[test]
fn a_latency_target_is_reported() {
    // A second is always enough, and a thousandth of a millisecond never is.
    for (target, is_reachable) in [("1000", true), ("0.001", false)] {
        let words = [&WHOLE[..], &["--target-latency", target, "--stats-json", "stats.json"]].concat();
        let cli = demo(&words);
        let path = cli.dir.path().join("stats.json");
        let (child, _dir) = cli.spawn();
        let ran = ran(child.wait_with_output().unwrap()).expect(0);
        assert!(ran.stderr.contains("routing: cache bias up to 0.3, as "), "{}", ran.stderr);
        let stats: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let latency = &stats["target_latency"];
        assert_eq!((&latency["is_reachable"], &latency["trials"]), (&is_reachable.into(), &1.into()), "{latency}");
        assert_eq!(latency["strength"], if is_reachable { 0.0 } else { 0.3 }, "{latency}");
        assert_eq!(latency["measured"].as_array().unwrap().len(), 3, "{latency}");
        assert_eq!(ran.stderr.contains("out of reach here: a token takes "), !is_reachable, "{}", ran.stderr);
        assert!(ran.stderr.contains("; a token takes "), "{}", ran.stderr);
    }
}

/// A cache bias with a measured loss of half a percent with this share of the experts in memory.
fn measured(cache_share: f64, cache_bias: f32) -> Mixes {
    let mix = Mix { cache_bias, ..Mix::EXACT };
    Mixes {
        text: "prose.txt".into(),
        text_sha256: "00".repeat(32),
        tokens: 2048,
        expert_cache: format!("{}%", 100.0 * cache_share),
        cache_share,
        high: "q8_0".into(),
        low: None,
        exact_bytes_per_token: 1000.0,
        mixes: vec![MeasuredMix { mix, loss: 0.005, error: 0.001, bytes_per_token: 500.0 }],
    }
}

/// Standard error of a run with a loss bound of 1 %.
fn bounded(model: &Path, cache: &str) -> String {
    let args = ["--temp", "0", "-t", "1", "-c", "256", "-p", "In the beginning", "-n", "8", "--expert-cache", cache];
    let mut cli = cli(&args);
    cli.command.arg("-m").arg(model).args(["--max-loss", "1%"]);
    let ran = cli.run();
    assert!(matches!(ran.status, Some(0 | 1)), "{}", ran.stderr);
    ran.stderr
}

#[test]
fn the_mix_was_measured_at_the_largest_cache_not_above_ours() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("demo.gguf");
    std::fs::copy(demo_model(), &model).unwrap();
    let gguf = Gguf::open(&model).unwrap();
    let profile = Profile {
        format: FORMAT.into(),
        version: VERSION,
        model: ModelId::of(&gguf, &gguf.experts().unwrap()),
        text: TextId { file: "prose.txt".into(), tokens: 4096, context: 512, perplexity: 30.0 },
        thresholds: None,
        mixes: vec![measured(0.25, 0.15), measured(0.5, 0.25)],
        widths: Vec::new(),
        norms: Vec::new(),
    };
    let beside = dir.path().join("demo.profile.json");
    std::fs::write(&beside, profile.to_json()).unwrap();
    let half = bounded(&model, "50%");
    let chosen = "(max loss 1.0 %: --cache-bias 0.25 --keep-top 1 was measured at +0.50 % +- 0.10 % on prose.txt, \
                  reading 50 % of exact's bytes with 50 % of the experts in memory)";
    assert!(half.contains("routing: cache bias 0.25, the best 1 kept ") && half.contains(chosen), "{half}");
    let less = bounded(&model, "40%");
    assert!(
        less.contains("routing: cache bias 0.15") && less.contains("with 25 % of the experts in memory (here "),
        "{less}"
    );
    let refused = bounded(&model, "20%");
    assert!(refused.contains("has measured with 25 %, 50 % of the experts in memory, and here are "), "{refused}");
    assert!(refused.contains("gguf-tools profile") && refused.contains("%,25%,50%"), "{refused}");
    let all = bounded(&model, "100%");
    assert!(all.contains("max loss 1.0 %: everything is in memory, nothing is given up"), "{all}");

    // A pack carries them, and what lies beside it comes first.
    let pack = dir.path().join("demo.hobbit.gguf");
    let mixes = Some(mixes_to_json(&profile.mixes[..1]));
    let spec = PackSpec { mixes, ..PackSpec::new(PackKind::Full) };
    hobbit_core::pack::write(&gguf, &pack, &spec, &Ggml, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    let carried = bounded(&pack, "50%");
    assert!(carried.contains("routing: cache bias 0.15") && carried.contains("(here 50 %)"), "{carried}");
    std::fs::copy(&beside, dir.path().join("demo.hobbit.profile.json")).unwrap();
    let given = bounded(&pack, "50%");
    assert!(given.contains("routing: cache bias 0.25"), "{given}");
}

#[test]
fn a_latency_target_sets_alpha_where_that_was_given() {
    let words =
        [&WHOLE[..], &["--target-latency", "0.001", "--substitute", "0.2", "--stats-json", "stats.json"]].concat();
    let cli = demo(&words);
    let path = cli.dir.path().join("stats.json");
    let (child, _dir) = cli.spawn();
    let ran = ran(child.wait_with_output().unwrap()).expect(0);
    assert!(ran.stderr.contains("routing: substitutes within up to 0.2, as 0.001 ms a token need"), "{}", ran.stderr);
    let stats: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let latency = &stats["target_latency"];
    assert_eq!((&latency["knob"], &latency["strength"]), (&"substitute".into(), &0.2.into()), "{latency}");
}
