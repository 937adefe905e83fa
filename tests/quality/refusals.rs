//! What cannot be measured is refused by name, before anything is.

use std::path::Path;

use clap::Parser;
use hobbit::gguf::HeaderBuilder;

use super::args::Args;
use super::arm::{self, Arm};
use super::{bundled, setup};

fn refused(words: &[&str]) -> String {
    let args = Args::try_parse_from([&["quality"], words].concat()).unwrap();
    match setup::studies(&args) {
        Ok(_) => panic!("{words:?}: nothing was refused"),
        Err(error) => format!("{error:#}"),
    }
}

/// A GGUF with one ordinary tensor.
fn dense(path: &Path) {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "llama").unwrap();
    header.tensor("output_norm.weight", hobbit::gguf::GgmlType::F32, &[32]).unwrap();
    let mut file = std::fs::File::create(path).unwrap();
    header.finish().write(&mut file, |tensor, out| out.write_all(&vec![0; tensor.extent.len as usize])).unwrap();
}

#[test]
fn what_cannot_be_measured_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (short, plain, list, odd) = (path("short.txt"), path("plain.gguf"), path("list.txt"), path("odd.txt"));
    std::fs::write(&short, "In the beginning").unwrap();
    dense(Path::new(&plain));
    std::fs::write(&list, "# a comment\n\nfine: --low q2_k\nodd: --treshold 0.5\n").unwrap();
    std::fs::write(&odd, [0xff, 0xfe]).unwrap();
    let demo = bundled("demo.gguf").to_str().unwrap().to_owned();
    let of_demo = ["--model", demo.as_str()];
    let cases: &[(&[&str], &[&str])] = &[
        (&["--text", &short], &["short.txt", "tokens, expected at least 512"]),
        (&["--text", &odd], &["odd.txt"]),
        (&["--text", &path("none.txt")], &["none.txt"]),
        (&["--model", &plain], &["plain.gguf", "no experts"]),
        (&["--model", &path("none.gguf")], &["none.gguf"]),
        (&["--arm", "odd: --lwo q2_k"], &["arm 'odd'", "--lwo"]),
        (&["--arm", "odd: --low q9_9"], &["arm 'odd'", "q9_9"]),
        (&["--arm", "odd: --experts q9_9"], &["arm 'odd'", "q9_9"]),
        (&["--arm", "odd: --nested --experts q4_k"], &["arm 'odd'", "cannot be used with"]),
        (&["--arm", "odd: --expert-cache 10%"], &["arm 'odd'", "--expert-cache", "--cache"]),
        (&["--arm", "--low q2_k"], &["--low q2_k", "NAME: FLAGS"]),
        (&["--arm", "a: --low q2_k", "--arm", "a: --low q3_k"], &["two arms", "'a'"]),
        (&["--arms", &list], &["list.txt:4", "arm 'odd'", "--treshold"]),
        (&["--arms", &path("none.txt")], &["none.txt"]),
        (&["--cache", "25,120"], &["--cache 120"]),
    ];
    for (words, parts) in cases {
        let has_model = words.contains(&"--model");
        let words = if has_model { words.to_vec() } else { [&of_demo, *words].concat() };
        let error = refused(&words);
        assert!(parts.iter().all(|part| error.contains(part)), "{words:?}: {error}");
    }
}

#[test]
fn every_list_of_arms_is_sound() {
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/quality/arms")).unwrap() {
        let arms = arm::read_file(&entry.unwrap().path()).unwrap();
        assert!(!arms.is_empty());
    }
    assert!(arm::read_all(arm::BUILT_IN, "built in").unwrap().iter().any(Arm::is_promised));
}

#[test]
fn controls_are_smaller_and_stand_once() {
    let types = |own: &str, given: &[Arm]| {
        let own = hobbit::gguf::GgmlType::from_name(own).unwrap();
        let all = arm::with_controls(given, own, 256).unwrap();
        all.iter().map(|arm| arm.name.clone()).collect::<Vec<_>>()
    };
    let all = ["exact", "uniform q6_k", "uniform q5_k", "uniform q4_k", "uniform q3_k", "uniform q2_k"];
    assert_eq!(types("q8_0", &[]), all);
    assert_eq!(types("q4_k", &[]), ["exact", "uniform q3_k", "uniform q2_k"]);
    let own = Arm::new("small: --experts q4_k").unwrap();
    assert!(own.is_control() && !Arm::new("a: --experts q4_k --low q2_k").unwrap().is_control());
    assert_eq!(types("q6_k", &[own]), ["exact", "uniform q5_k", "uniform q3_k", "uniform q2_k", "small"]);
}
