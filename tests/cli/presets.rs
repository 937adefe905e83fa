//! `--preset`: a paper's settings.

use super::rig::*;

const WHOLE: [&str; 6] = ["-p", "In the beginning", "-n", "4", "--expert-cache", "50%"];

#[test]
fn in_exact_precision_a_preset_changes_no_letter() {
    let text = |words: &[&str]| demo(&[&WHOLE[..], words].concat()).run().expect(0).stdout;
    let exact = text(&[]);
    for preset in ["hobbit", "smoe"] {
        assert_eq!(text(&["--preset", preset, "--precision", "exact"]), exact, "{preset}");
    }
    let flags = ["--preset", "fate", "--low-dir", "."];
    let stderr = demo(&[&WHOLE[..], &flags].concat()).run().expect(0).stderr;
    assert!(stderr.contains("hobbit: preset fate: --policy arc --expert-slots shallow-first:3"), "{stderr}");
    let quiet = demo(&[&WHOLE[..], &flags, &["--quiet"]].concat()).run().expect(0);
    assert_eq!(quiet.stderr, "");
}

#[test]
fn contradictions_name_the_preset() {
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
