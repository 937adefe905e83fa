//! `--prompt-cache`: a prompt is read once.

use super::rig::*;

const PROMPT: &str = "In the beginning God created the heaven and the earth. And the earth was without form, and void";

fn run(file: &std::path::Path, prompt: &str, more: &[&str]) -> Cli {
    demo(&[&["--prompt-cache", file.to_str().unwrap(), "-p", prompt, "-n", "8", "-no-cnv", "-ub", "1"], more].concat())
}

#[test]
fn a_known_prompt_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt");
    let first = run(&file, PROMPT, &[]).run().expect(0);
    assert!(!first.stderr.contains("known from"), "{}", first.stderr);
    let bytes = std::fs::read(&file).unwrap();
    // The same again, read only: the same text and file.
    let again = run(&file, PROMPT, &["--prompt-cache-ro"]).run().expect(0);
    assert_eq!(again.stdout, first.stdout);
    assert!(again.stderr.contains(" tokens are known from "), "{}", again.stderr);
    assert_eq!(std::fs::read(&file).unwrap(), bytes);
    // A longer prompt, and one that only begins alike, as without a file.
    for prompt in [format!("{PROMPT}; and darkness"), "In the beginning God said".to_owned()] {
        let expected = demo(&["-p", &prompt, "-n", "8", "-no-cnv", "-ub", "1"]).run().expect(0);
        let found = run(&file, &prompt, &["--prompt-cache-ro"]).run().expect(0);
        assert_eq!(found.stdout, expected.stdout);
        assert!(!found.stderr.contains("hobbit: prompt: 0 of"), "{}", found.stderr);
    }
    // With --prompt-cache-all the generated tokens are saved.
    run(&file, PROMPT, &["--prompt-cache-all"]).run().expect(0);
    assert!(std::fs::metadata(&file).unwrap().len() > bytes.len() as u64);
    let whole = first.stdout.trim_end().to_owned();
    run(&file, &whole, &["--prompt-cache-ro"]).run().expect(0);
}

#[test]
fn unusable_files_are_refused_and_stay() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt");
    run(&file, PROMPT, &[]).run().expect(0);
    let ran = run(&file, PROMPT, &["-ctk", "f32"]).run().expect(1);
    assert!(
        ran.stderr.contains("--prompt-cache ") && ran.stderr.contains("another type of KV cache"),
        "{}",
        ran.stderr
    );
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let ran = run(&file, PROMPT, &[]).run().expect(1);
    assert!(ran.stderr.contains("it is damaged; give another file, or remove this one"), "{}", ran.stderr);
    assert_eq!(std::fs::read(&file).unwrap(), bytes);
    std::fs::write(&file, "letters to my sister").unwrap();
    let ran = run(&file, PROMPT, &[]).run().expect(2);
    assert!(ran.stderr.contains("is no saved sequence"), "{}", ran.stderr);
    assert_eq!(std::fs::read(&file).unwrap(), b"letters to my sister");
}
