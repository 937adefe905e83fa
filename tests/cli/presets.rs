//! `--preset`: a paper's settings, told at the start.

use super::rig::*;

const WHOLE: [&str; 6] = ["-p", "In the beginning", "-n", "4", "--expert-cache", "50%"];

fn told(words: &[&str]) -> String {
    let stderr = demo(&[&WHOLE[..], words].concat()).run().expect(0).stderr;
    let line = stderr.lines().find(|line| line.starts_with("hobbit: preset "));
    line.unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

#[test]
fn one_line_names_what_a_preset_sets() {
    for (preset, parts) in [
        (
            "hobbit",
            &["--policy hobbit ", "--low auto --low-share 20% --t1 0.6 --t2 0.9", "--predictor stacked-gate"][..],
        ),
        ("fate", &["--policy arc --expert-slots shallow-first:3", "--t1 1 --t2 1 --prefill-low 25%"]),
        ("smoe", &["--policy smoe --expert-slots even --predictor stacked-gate", "--substitute 0.3 --keep-top 0"]),
    ] {
        let low_dir = if preset == "smoe" { &[][..] } else { &["--low-dir", "."] };
        let line = told(&[&["--preset", preset], low_dir].concat());
        assert!(line.starts_with(&format!("hobbit: preset {preset}: ")), "{line}");
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
    let line = told(&["--preset", "hobbit", "--precision", "exact", "--policy", "lru"]);
    assert!(!line.contains("--policy") && !line.contains("--t1") && line.contains("--no-overlap"), "{line}");
    let quiet = demo(&[&WHOLE[..], &["--preset", "hobbit", "--low-dir", ".", "--quiet"]].concat()).run().expect(0);
    assert_eq!(quiet.stderr, "");
}

#[test]
fn in_exact_precision_a_preset_changes_no_letter() {
    let text = |words: &[&str]| demo(&[&WHOLE[..], words].concat()).run().expect(0).stdout;
    let exact = text(&[]);
    for preset in ["hobbit", "smoe"] {
        assert_eq!(text(&["--preset", preset, "--precision", "exact"]), exact, "{preset}");
    }
}

#[test]
fn what_a_preset_contradicts_is_told_with_its_name() {
    for (words, parts) in [
        (&["--preset", "hobbit", "--t1", "0.95"][..], &["'--t1 0.95' is above '--t2 0.9'", "'--preset hobbit'"][..]),
        (&["--preset", "edgemoe", "--kernels", "fastest"], &["'--precision exact'", "'--preset edgemoe'"]),
        (&["--preset", "lina"], &["unknown preset 'lina'", "none, hobbit, edgemoe, fate, smoe, swapmoe"]),
    ] {
        let stderr = demo(&[&WHOLE[..], words].concat()).run().expect(2).stderr;
        assert!(parts.iter().all(|part| stderr.contains(part)), "{words:?}: {stderr}");
    }
    let stderr = demo(&[&WHOLE[..], &["--preset", "edgemoe"]].concat()).run().expect(1).stderr;
    assert!(stderr.contains("needs a table") && stderr.contains("--path-table"), "{stderr}");
}
