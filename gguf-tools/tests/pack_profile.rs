//! `pack --profile` as a user runs it: each expert its own width.

use std::path::Path;
use std::process::{Command, Output};

use hobbit::gguf::Gguf;
use hobbit::pack::Pack;
use hobbit::profile::Profile;

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
    let sized = size(["--target-size", "8MiB"]);
    assert!(sized <= 8 << 20 && sized > 7 << 20, "{sized}");

    let refused = tool(&["pack", &model, "-o", &pack, "--force", "--profile", &profile, "--target-size", "1MiB"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(words(&refused.stderr).contains("cannot be reached"), "{}", words(&refused.stderr));
    let refused = tool(&["pack", &model, "-o", &pack, "--force", "--max-loss", "1%"]);
    assert_eq!(refused.status.code(), Some(2), "a goal without a profile");
}
