//! Every command builds llama.cpp (four minutes) and hobbit with the same features, so that one build serves
//! `cargo run`, `cargo run -p gguf-tools`, `cargo run -p hobbit-server` and `cargo test --workspace`.

use std::collections::BTreeSet;
use std::process::Command;

fn tree(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--offline", "--locked"])
        .args(args)
        .output()
        .expect("cargo, which runs this test, can be run");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// `package` and all that it is built from, with features, as lines of `cargo tree` when cargo is called with
/// `selection`.
fn built_from(package: &str, selection: &[&str]) -> Vec<String> {
    let format = ["--edges", "normal,build", "--prefix", "depth", "--no-dedupe", "--format", " {p} {f}"];
    let text = tree(&[&format, selection].concat());
    let depth = |line: &str| line.split(' ').next().and_then(|depth| depth.parse::<usize>().ok());
    let mut lines = text.lines().skip_while(|line| line.split(' ').nth(1) != Some(package));
    let first = lines.next().unwrap_or_else(|| panic!("{package} is not built by {selection:?}"));
    let top = depth(first).unwrap();
    let relative = |line: &str| {
        let (depth, what) = line.split_once(' ').unwrap();
        format!("{} {what}", depth.parse::<usize>().unwrap() - top)
    };
    let below = lines.take_while(|line| depth(line).is_some_and(|depth| depth > top));
    [first].into_iter().chain(below).map(relative).collect()
}

#[test]
fn every_command_builds_llama_cpp_and_hobbit_with_the_same_features() {
    let [all, tools, server]: [&[&str]; 3] = [&["--workspace"], &["-p", "gguf-tools"], &["-p", "hobbit-server"]];
    let of_llama_cpp = [all, tools, server, &["-p", "lagging-device"], &["-p", "ggml-sys"]];
    let of_programs = &of_llama_cpp[..3];
    for (package, selections) in
        [("llama-cpp-sys-2", &of_llama_cpp[..]), ("hobbit", of_programs), ("hobbit-common", of_programs)]
    {
        let expected = built_from(package, &[]);
        for selection in selections {
            let other = built_from(package, selection);
            let new: Vec<_> = other.iter().filter(|line| !expected.contains(line)).collect();
            assert!(expected == other, "{selection:?} builds {package} again: {new:#?}");
        }
    }
}

#[test]
fn the_library_depends_on_no_crate_of_the_programs() {
    let text = tree(&["-p", "hobbit", "--all-features", "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let names: Vec<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"hobbit") && names.contains(&"thiserror"), "{text}");
    for of_programs in ["anyhow", "clap", "clap_builder", "console", "indicatif", "rustyline", "signal-hook"] {
        assert!(!names.contains(&of_programs), "{of_programs}: {text}");
    }
}

/// `cargo test` builds the dependencies of the programs with the features that `cargo run` gives them, although
/// dependencies of tests ask for more: otherwise it would build llama.cpp and hobbit again.
#[test]
fn tests_use_the_build_of_the_programs() {
    let packages = |edges: &str, selection: &[&str]| -> BTreeSet<String> {
        let format = ["--edges", edges, "--prefix", "none", "--format", "{p} {f}"];
        tree(&[&format, selection].concat()).lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
    };
    let tests = packages("normal,build,dev", &["--workspace"]);
    for package in ["hobbit-programs", "hobbit-server", "gguf-tools"] {
        let programs = packages("normal,build", &["-p", package]);
        let other: Vec<&String> = programs.difference(&tests).collect();
        assert!(other.is_empty(), "{package}, with other features in tests: {other:#?}");
    }
}

#[test]
fn the_first_command_builds_no_crate_of_the_server() {
    let text = tree(&["-p", "hobbit-programs", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"]);
    let names: Vec<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"hobbit-programs") && names.contains(&"ureq"), "{text}");
    for of_server in ["hobbit-server", "hobbit-synth", "axum", "hyper", "tokio", "tower", "syntect", "math-core"] {
        assert!(!names.contains(&of_server), "{of_server}: {text}");
    }
}
