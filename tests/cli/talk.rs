//! Conversations and interactive completion.

use gguf_tools::synth::{self, Spec};

use super::rig::*;

#[test]
fn conversations_read_turns_from_a_pipe() {
    let talk = demo(&["-cnv", "--chat-template", "chatml", "-n", "4", "-sys", "Be brief."]);
    let ran = talk.type_in("hello\n/regen\nsecond \\\nline\n/clear\n/regen\n/exit\nnever read\n").expect(0);
    assert!(ran.stderr.contains("there is no answer to replace"), "{}", ran.stderr);
    assert!(ran.stderr.contains("the conversation is forgotten"), "{}", ran.stderr);
    let once = demo(&["-cnv", "--chat-template", "chatml", "-n", "4", "-st", "-p", "hello"]).run().expect(0);
    assert!(once.stdout.starts_with("> hello\n"), "{}", once.stdout);
}

#[test]
fn a_conversation_beyond_the_context_forgets_its_oldest_turns() {
    let args = ["-cnv", "--chat-template", "chatml", "-n", "400", "--ignore-eos", "-sys", "Be brief."];
    let shifting = demo(&[&args[..], &["--context-shift"]].concat()).type_in("hello\nsecond\nthird\n").expect(0);
    assert!(shifting.stderr.contains("oldest messages are forgotten"), "{}", shifting.stderr);
    assert!(!shifting.stderr.contains("error"), "{}", shifting.stderr);
    let full = demo(&args).type_in("hello\nsecond\n").expect(1);
    assert!(full.stderr.contains("error: the conversation would have "), "{}", full.stderr);
}

#[test]
fn interactive_completion_takes_turns() {
    let ran = demo(&["-i", "-p", "In the", "-n", "2", "--in-prefix", " "]).type_in("beginning\n").expect(0);
    assert!(ran.stdout.trim_start().starts_with("In the"), "{}", ran.stdout);
    let ran = demo(&["-if", "-n", "2"]).type_in("").expect(0);
    assert_eq!(ran.stdout, "");
}

const TALK: [&str; 5] = ["-cnv", "--chat-template", "chatml", "-n", "8"];

#[test]
fn unknown_commands_are_errors_and_two_slashes_send_one() {
    let ran = demo(&TALK).type_in("/bogus\n//bogus\n").expect(1);
    assert!(
        ran.stderr.contains("error: unknown command /bogus; /help lists them, and '//bogus' sends it"),
        "{}",
        ran.stderr
    );
    let sent = demo(&[&TALK[..], &["-st", "-p", "/bogus", "--no-display-prompt"]].concat()).run().expect(0).stdout;
    assert_eq!(ran.stdout.trim_end(), sent.trim_end());
}

#[test]
fn a_regenerated_answer_differs() {
    let answers = |seed: &str, lines: &str| {
        let sampled = ["--temp", "1.5", "--ignore-eos", "-s", seed];
        demo(&[&TALK[..], &sampled].concat()).type_in(lines).expect(0).stdout
    };
    let (first, next) = (answers("1", "hello\n"), answers("2", "hello\n"));
    assert_ne!(first, next);
    assert_eq!(answers("1", "hello\n/regen\n"), first + &next, "the next seed");
}

#[test]
fn a_full_conversation_goes_on_without_its_oldest_turns() {
    let args = ["-cnv", "--chat-template", "chatml", "-n", "400", "--ignore-eos", "-sys", "Be brief."];
    let ran = demo(&args).type_in("hello\nsecond\n/forget\nthird\n").expect(1);
    for part in
        ["no room for another message: forget the oldest turns with /forget N", "error: the conversation would have "]
    {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert!(ran.stderr.contains("hobbit: 1 turn is forgotten, 0 are left: "), "{}", ran.stderr);
    let alone = demo(&args).type_in("third\n").expect(0).stdout;
    assert!(ran.stdout.ends_with(&alone), "as if it were the first: {}", ran.stdout);
}

/// Shows the model a long introduction and the last message, without earlier ones.
const FORGETFUL: &str = "{{- 'It is known that the same people may have been there before them, \
    and that all of it was made in one day. ' \
    -}}{{- messages[-1].content -}}{{- ': ' -}}";

/// A context goes back to what a new prompt has in common with it; a sliding window that has moved on does not hold
/// that any more.
#[test]
fn answers_do_not_depend_on_what_a_window_has_seen() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    synth::write(&model, &Spec::tiny("gpt-oss")).unwrap();
    // llama.cpp by itself, and at the seam.
    for experts in [&[][..], &["--expert-cache", "50%"]] {
        let answers = |lines: &str| {
            let flags = ["-m", model.to_str().unwrap(), "-c", "2048", "-ub", "1", "-n", "450", "--ignore-eos"];
            let talk =
                ["--override-kv", "gpt-oss.attention.sliding_window=int:32", "-cnv", "--chat-template", FORGETFUL];
            demo(&[&flags[..], &talk, experts].concat()).type_in(lines).expect(0).stdout
        };
        let (first, other) = (answers("hello\n"), answers("another\n"));
        assert_ne!(first, other);
        let both = first.clone() + &first + &other;
        assert!(answers("hello\n/regen\nanother\n") == both, "{experts:?}");
    }
}
