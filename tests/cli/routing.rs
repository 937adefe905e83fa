//! Tokens that go to experts in memory, and what was promised for it.

use serde_json::Value;

use crate::rig::*;

const WHOLE: [&str; 6] = ["-p", "In the beginning", "-n", "200", "--expert-cache", "50%"];

#[test]
fn a_latency_target_is_told_and_kept_in_the_statistics() {
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
    for words in [["--target-latency", "0"], ["--target-latency", "50ms"]] {
        demo(&[&WHOLE[..], &words].concat()).run().expect(2);
    }
    let stderr = demo(&[&WHOLE[..], &["--target-latency", "50", "--deterministic"]].concat()).run().expect(2).stderr;
    assert!(stderr.contains("cannot be had with --deterministic"), "{stderr}");
}

#[test]
fn a_promise_takes_a_profile() {
    let stderr = demo(&[&WHOLE[..], &["--max-loss", "1%"]].concat()).run().expect(1).stderr;
    assert!(stderr.contains("demo.profile.json") && stderr.contains("gguf-tools profile"), "{stderr}");
    let stderr = demo(&[&WHOLE[..], &["--max-loss", "1%", "--cache-bias", "0.1"]].concat()).run().expect(2).stderr;
    assert!(stderr.contains("'--max-loss 1%' cannot be had with"), "{stderr}");
}
