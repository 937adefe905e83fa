//! Presets, path tables, latency targets, loss bounds, and experts that are kept from run to run.

use std::path::{Path, PathBuf};

use hobbit::engine::Ggml;
use hobbit_core::cache::CacheState;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{PackKind, PackSpec};
use hobbit_core::predict::{PathTableBuilder, PredictShape};
use hobbit_core::profile::{
    FORMAT, MeasuredMix, Mix, Mixes, ModelId, Profile, TextId, VERSION, mixes_to_json, write_path_table,
};
use hobbit_synth::Spec;

use crate::fixture::cli::*;

const WHOLE: [&str; 6] = ["-p", "In the beginning", "-n", "24", "--expert-cache", "50%"];

fn whole(flags: &[&str]) -> Cli {
    demo(&[&WHOLE, flags].concat())
}

#[test]
fn in_exact_precision_a_preset_changes_no_letter() {
    let text = |flags: &[&str]| whole(flags).run().expect(0).stdout;
    let exact = text(&[]);
    for preset in ["hobbit", "smoe"] {
        assert_eq!(text(&["--preset", preset, "--precision", "exact"]), exact, "{preset}");
    }
    let fate = ["--preset", "fate", "--low-dir", "."];
    whole(&fate).run().expect(0).says(&["note: preset fate: --policy arc --expert-slots shallow-first:3"]);
    assert_eq!(whole(&[&fate[..], &["--quiet"]].concat()).run().expect(0).stderr, "");
    whole(&["--preset", "edgemoe"]).run().expect(1).says(&["needs a table", "--path-table"]);
    whole(&["--preset", "lina"]).run().expect(2).says(&["unknown preset 'lina'"]);
}

/// Rows of 2880 weights, as gpt-oss has them, are no whole blocks of Q2_K.
#[test]
fn presets_take_low_types_that_fit_the_rows() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = Spec::preset("gpt-oss-20b").unwrap();
    let small = Spec { layers: 2, experts: 4, topk: 2, vocab: 300, heads: 8, kv_heads: Some(1), ctx: 256, ..sizes };
    let path = hobbit_synth::write(&dir.path().join("oss.gguf"), &small).unwrap().files.remove(0);
    for flags in [&["--low", "auto"][..], &["--preset", "hobbit"], &["--preset", "fate"]] {
        let ran = run(&path, &[flags, &["--expert-cache", "50%"]].concat()).expect(0);
        ran.says(&["low q2_0 from oss.low-q2_0.hobbit.gguf"]);
    }
    let refused = run(&path, &["--low", "q3_k"]).expect(1);
    refused.says(&["rows of 2880 weights are no whole blocks of q3_K", "; give --low q2_0"]);
}

#[test]
fn a_path_table_is_taken_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let table = dir.path().join("a.paths").display().to_string();
    let shape = PredictShape::new((0..6).map(|layer| (layer, 8)), |_| 2);
    let mut builder = PathTableBuilder::new(shape);
    (0..6).for_each(|layer| builder.observe(layer, [1, 2]));
    write_path_table(table.as_ref(), &builder.build()).unwrap();
    let ahead = ["--predictor", "path-table", "--prefetch", "on", "--path-table", &table, "--stats-json", "stats.json"];
    let (ran, stats) = whole(&ahead).json("stats.json");
    assert_eq!(ran.stdout, whole(&[]).run().expect(0).stdout);
    assert!(stats.to_string().contains("\"recall\":[{\"distance\":1"), "{stats}");
    whole(&ahead[..2]).run().expect(1).says(&["demo.gguf", "needs a table", "--path-table"]);
    std::fs::write(&table, "hbPT and more").unwrap();
    whole(&ahead).run().expect(1).says(&["a.paths", "path table of version", "profile the model again"]);
}

#[test]
fn a_latency_target_is_reported() {
    // A second is always enough, and a thousandth of a millisecond never is.
    for (flags, knob, is_reachable, strength) in [
        (&["--target-latency", "1000"][..], "cache-bias", true, 0.0),
        (&["--target-latency", "0.001"], "cache-bias", false, 0.3),
        (&["--target-latency", "0.001", "--substitute", "0.2"], "substitute", false, 0.2),
    ] {
        let (ran, stats) = whole(&[flags, &["-n", "200", "--stats-json", "stats.json"]].concat()).json("stats.json");
        let latency = &stats["target_latency"];
        assert_eq!((&latency["is_reachable"], &latency["trials"]), (&is_reachable.into(), &1.into()), "{latency}");
        assert_eq!((&latency["knob"], &latency["strength"]), (&knob.into(), &strength.into()), "{latency}");
        assert_eq!(ran.stderr.contains("out of reach here: a token takes "), !is_reachable, "{}", ran.stderr);
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

#[test]
fn a_loss_bound_uses_the_nearest_smaller_cache() {
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
        bounded: Vec::new(),
        norms: Vec::new(),
    };
    let beside = dir.path().join("demo.profile.json");
    std::fs::write(&beside, profile.to_json()).unwrap();
    let bounded = |model: &Path, cache| run(model, &["--expert-cache", cache, "--max-loss", "1%"]);
    bounded(&model, "50%")
        .expect(0)
        .says(&["routing: cache bias 0.25, a token's best expert always used ", "(max loss 1.0 %: "]);
    bounded(&model, "40%").expect(0).says(&["routing: cache bias 0.15", "with 25 % of the experts in memory (here "]);
    bounded(&model, "20%").expect(1).says(&["was measured with 25 %, 50 % of the experts in memory", "%,25%,50%"]);
    bounded(&model, "100%").expect(0).says(&["max loss 1.0 %: everything is in memory, nothing is given up"]);

    // A pack carries measurements; a profile beside it comes first.
    let pack = dir.path().join("demo.hobbit.gguf");
    let mixes = Some(mixes_to_json(&profile.mixes[..1]));
    let spec = PackSpec { mixes, ..PackSpec::new(PackKind::Full) };
    hobbit_core::pack::write(&gguf, &pack, &spec, &Ggml, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    bounded(&pack, "50%").expect(0).says(&["routing: cache bias 0.15", "(here 50 %)"]);
    std::fs::copy(&beside, dir.path().join("demo.hobbit.profile.json")).unwrap();
    bounded(&pack, "50%").expect(0).says(&["routing: cache bias 0.25"]);
}

/// A program as it is by default, in a cache directory.
fn by_default(mut cli: Cli, caches: &Path) -> Cli {
    cli.command.env_remove("HOBBIT_ARG_CACHE_STATE").env("XDG_CACHE_HOME", caches);
    cli
}

/// Files of experts in a cache directory.
fn kept(caches: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(caches.join("hobbit").join("experts")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn the_next_run_begins_with_the_experts_of_the_last_one() {
    const PARTS: &str = "of an earlier run are read in pauses (--cache-state)";
    let caches = tempfile::tempdir().unwrap();
    let run = |flags: &[&str]| by_default(whole(flags), caches.path()).run().expect(0);
    let first = run(&[]);
    assert!(!first.stderr.contains(PARTS) && kept(caches.path()).len() == 1, "{}", first.stderr);
    assert_eq!(run(&[]).says(&[PARTS]).stdout, first.stdout);
    let path = &kept(caches.path())[0];
    std::fs::write(path, "HOBBITCS").unwrap();
    let silent = run(&[]);
    assert!(!silent.stderr.contains(path.to_str().unwrap()), "{}", silent.stderr);
    std::fs::write(path, "HOBBITCS").unwrap();
    run(&["-v"]).says(&[path.to_str().unwrap(), "it is damaged"]);
    run(&[]).says(&[PARTS]);
}

#[test]
fn nothing_is_kept_of_runs_that_are_measured_or_that_fit() {
    let caches = tempfile::tempdir().unwrap();
    let model = demo_model();
    let text = ["-m", model.to_str().unwrap(), "-t", "1", "--expert-cache", "50%"];
    let bench = in_own_dir(program(BENCH), &[&text[..], &["-p", "8", "-n", "4", "-r", "1"]].concat());
    let long = "In the beginning ".repeat(80);
    let perplexity = [&text[..], &["-p", &long, "-c", "64", "--chunks", "1"]].concat();
    for cli in [
        whole(&["--cache-state", "off"]),
        whole(&["--deterministic"]),
        whole(&["--no-fill"]),
        whole(&["--trace", "a.trace"]),
        whole(&["--cache-state", "a.state"]),
        demo(&["-p", "In the beginning", "-n", "4"]),
        bench,
        in_own_dir(program(PERPLEXITY), &perplexity),
    ] {
        by_default(cli, caches.path()).run().expect(0);
        assert_eq!(kept(caches.path()), Vec::<PathBuf>::new());
    }
    let mut off = by_default(whole(&[]), caches.path());
    off.command.env("HOBBIT_ARG_CACHE_STATE", "off");
    off.run().expect(0);
    assert_eq!(kept(caches.path()), Vec::<PathBuf>::new());
}

#[test]
fn a_cache_directory_that_cannot_be_used_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "text").unwrap();
    let plain = whole(&[]).run().expect(0);
    for caches in [file.as_path(), Path::new("/proc")] {
        let ran = by_default(whole(&[]), caches).run().expect(0);
        assert_eq!(ran.stdout, plain.stdout);
        assert!(!ran.stderr.contains("cache state"), "{}", ran.stderr);
    }
    // Windows finds no file below another one; Unix says that this is no directory.
    let end = if cfg!(windows) { "are not saved" } else { "caches start empty, and it is left as it is" };
    by_default(whole(&["-v"]), &file).run().expect(0).says(&["cache state ", end]);
}

#[test]
fn processes_may_keep_one_file_at_once() {
    let caches = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let running: Vec<_> = (0..3).map(|_| by_default(whole(&["-n", "4"]), caches.path()).spawn()).collect();
        for (child, _dir) in running {
            ran(child.wait_with_output().unwrap()).expect(0);
        }
        let [file] = &kept(caches.path())[..] else { panic!("{:?}", kept(caches.path())) };
        CacheState::from_bytes(&std::fs::read(file).unwrap()).unwrap();
    }
}
