//! Tuned policies.

use std::process::Command;

use serde_json::Value;

use super::rig::*;

#[test]
fn a_profile_is_made_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).into_os_string().into_string().unwrap();
    let (trace, profile, stats) = (path("a.trace"), path("a.json"), path("stats.json"));
    let usual = ["-p", "In the beginning", "-n", "24", "--expert-cache", "50%"];
    let recorded = demo(&[&usual[..], &["--trace", &trace]].concat()).run().expect(0);
    let sim =
        Command::new(env!("CARGO_BIN_EXE_hobbit-sim")).args(["calibrate", &trace, "-o", &profile]).output().unwrap();
    ran(sim).expect(0);
    let flags = ["--profile", &profile, "--policy", "hobbit", "--slots", "by-penalty", "--stats-json", &stats];
    let tuned = demo(&[&usual[..], &flags].concat()).run().expect(0);
    assert_eq!(tuned.stdout, recorded.stdout);
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&stats).unwrap()).unwrap();
    let caching = &json["caching"];
    assert_eq!((&caching["slots"], &caching["policy"]), (&"by-penalty".into(), &"hobbit".into()));
    assert_eq!(
        (&caching["profile"]["file"], &caching["profile"]["penalties"]),
        (&profile.as_str().into(), &true.into())
    );
    assert_eq!(caching["slots_by_layer"][0]["cache"], "the host");
    let slots = json["layers"].as_array().unwrap().iter().map(|layer| layer["slots"].as_u64().unwrap());
    assert_eq!(slots.clone().sum::<u64>(), 24);
    assert_eq!(caching["slots_by_layer"][0]["most"].as_u64(), slots.max());

    let text = std::fs::read_to_string(&profile).unwrap();
    std::fs::write(&profile, text.replace("\"layer\": 5", "\"layer\": 6")).unwrap();
    let ran = demo(&["-p", "x", "-n", "1", "--profile", &profile]).run().expect(1);
    for part in [&profile, "hobbit-sim calibrate", "layer 6 of 8 experts, expected layer 5 of 8 experts"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    let ran = demo(&["-p", "x", "-n", "1", "--profile", &path("nowhere.json")]).run().expect(1);
    assert!(ran.stderr.contains("nowhere.json: cannot read this tuned policy"), "{}", ran.stderr);
}

#[test]
fn a_path_table_is_taken_from_a_file() {
    use hobbit_core::predict::{PathLimits, PathTableBuilder, PredictShape};
    let dir = tempfile::tempdir().unwrap();
    let [table, stats] = ["a.paths", "stats.json"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
    let mut builder =
        PathTableBuilder::new(PredictShape::new((0..6).map(|layer| (layer, 8)), 2), PathLimits::default());
    (0..6).for_each(|layer| builder.observe(layer, [1, 2]));
    hobbit_core::profile::write_path_table(table.as_ref(), &builder.build()).unwrap();
    let run = ["-no-cnv", "-p", "In the beginning", "-n", "8", "--expert-cache", "25%"];
    let plain = demo(&run).run().expect(0).stdout;
    let ahead = ["--predictor", "path-table", "--prefetch", "on", "--path-table", &table, "--stats-json", &stats];
    assert_eq!(demo(&[&run[..], &ahead].concat()).run().expect(0).stdout, plain);
    let stats: Value = serde_json::from_str(&std::fs::read_to_string(&stats).unwrap()).unwrap();
    let text = stats.to_string();
    assert!(text.contains("\"recall\":[{\"distance\":1"), "{text}");

    let refused = |args: &[&str], parts: &[&str]| {
        let stderr = demo(&[&run[..], args].concat()).run().expect(1).stderr;
        assert!(parts.iter().all(|part| stderr.contains(part)), "{parts:?} are not in: {stderr}");
    };
    refused(&ahead[..2], &["demo.gguf", "needs a table", "--path-table"]);
    refused(&["--path-table", &table], &["--predictor path-table, found --predictor none"]);
    std::fs::write(&table, "hbPT and more").unwrap();
    refused(&ahead, &["a.paths", "path table of version", "profile the model again"]);
}
