//! Conversations and interactive completion by a pipe; reasoning before an answer.

use hobbit_synth::{self as synth, Spec};

use crate::fixture::cli::*;
use crate::fixture::write;

pub const TALK: [&str; 5] = ["-cnv", "--chat-template", "chatml", "-n", "8"];

#[test]
fn conversations_read_turns_and_commands_from_a_pipe() {
    let talk = |flags: &[&str]| demo(&[&TALK[..], flags].concat());
    let lines = "hello\n/regen\nsecond \\\nline\n/clear\n/regen\n/exit\nnever read\n";
    let ran = talk(&["-sys", "Be brief."]).type_in(lines).expect(0);
    ran.says(&["there is no answer to replace", "the conversation is forgotten"]);
    let once = talk(&["-st", "-p", "hello"]).run().expect(0);
    assert!(once.stdout.starts_with("> hello\n"), "{}", once.stdout);
    // An unknown command is an error; two slashes send one.
    let ran = talk(&[]).type_in("/bogus\n//bogus\n").expect(1);
    let sent = talk(&["-st", "-p", "/bogus", "--no-display-prompt"]).run().expect(0).stdout;
    assert_eq!(ran.stdout.trim_end(), sent.trim_end());
    ran.says(&["error: unknown command /bogus; /help lists them, and '//bogus' sends it"]);

    let sampled =
        |seed, lines: &str| talk(&["--temp", "1.5", "--ignore-eos", "-s", seed]).type_in(lines).expect(0).stdout;
    let (first, next) = (sampled("1", "hello\n"), sampled("2", "hello\n"));
    assert_ne!(first, next);
    assert_eq!(sampled("1", "hello\n/regen\n"), first + &next, "a new answer has the next seed");

    // Completion takes turns, too.
    let ran = demo(&["-i", "-p", "In the", "-n", "2", "--in-prefix", " "]).type_in("beginning\n").expect(0);
    assert!(ran.stdout.trim_start().starts_with("In the"), "{}", ran.stdout);
    assert_eq!(demo(&["-if", "-n", "2"]).type_in("").expect(0).stdout, "");
}

#[test]
fn conversations_are_saved_and_loaded() {
    let lines = "/system Be kind.\nhello\n/save talk.json\n/clear\n/system Be brief.\n/load talk.json\n/system\n\
                 /regen\n/save again.json\n/read talk.json\n/load absent.json\n/load text.txt\n";
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("text.txt"), "no JSON").unwrap();
    let mut cli = demo(&TALK);
    cli.command.current_dir(dir.path());
    let ran = cli.type_in(lines).expect(1);
    let [first, second] = ["talk.json", "again.json"].map(|name| json(&dir.path().join(name))["messages"].clone());
    assert_eq!((&first[0]["content"], &first[1]["content"]), (&"Be kind.".into(), &"hello".into()));
    assert_eq!((first[2]["role"].as_str(), &first), (Some("assistant"), &second), "a greedy answer is the same again");
    ran.says(&[
        "the system prompt is replaced",
        "the conversation is saved in talk.json",
        "3 messages are loaded from talk.json",
        "\nBe kind.\n",
        " tokens/s",
        "talk.json: ",
        " characters go with the next message",
        "error: absent.json: cannot read this file",
        "error: text.txt: expected {\"messages\"",
    ]);
    let silent = demo(&[&TALK[..], &["--no-perf"]].concat()).type_in("hello\n").expect(0);
    assert!(!silent.stderr.contains("tokens/s"), "{}", silent.stderr);
}

#[test]
fn a_full_conversation_goes_on_without_its_oldest_turns() {
    let args = ["-cnv", "--chat-template", "chatml", "-n", "400", "--ignore-eos", "-sys", "Be brief."];
    let shifting = demo(&[&args[..], &["--context-shift"]].concat()).type_in("hello\nsecond\nthird\n").expect(0);
    assert!(!shifting.stderr.contains("error"), "{}", shifting.stderr);
    shifting.says(&["oldest messages are forgotten"]);
    let ran = demo(&args).type_in("hello\nsecond\n/forget\nthird\n").expect(1);
    let alone = demo(&args).type_in("third\n").expect(0).stdout;
    assert!(ran.stdout.ends_with(&alone), "as if it were the first: {}", ran.stdout);
    ran.says(&["forget the oldest turns with /forget N", "error: the conversation would have ", "1 turn is forgotten"]);
}

/// A model that cannot shift says why at the start and where its text ends, and is not told to shift.
#[test]
fn contexts_that_cannot_shift_end_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    let unrotated = ["--override-kv", "granitemoe.rope.scaling.finetuned=bool:false"];
    let hybrid = ["--override-kv", "granitehybrid.rope.scaling.finetuned=bool:false"];
    let window = ["--override-kv", "mimo2.attention.sliding_window=int:16", "-c", "512", "-ub", "16"];
    for (arch, more, reason) in [
        ("granitemoe", &unrotated[..], Some("its layers have no rotary positions")),
        ("granitehybrid", &hybrid, Some("its layers have no rotary positions")),
        (
            "mimo2",
            &window,
            Some("its sliding window keeps fewer tokens than the context (--swa-full keeps all of them)"),
        ),
        ("qwen3vlmoe", &[], Some("its positions have several dimensions")),
        ("granitemoe", &[], None),
        ("deepseek2", &[], None),
    ] {
        synth::write(&model, &Spec::tiny(arch)).unwrap();
        let text = ["-m", model.to_str().unwrap(), "-p", "hello", "-no-cnv", "-n", "600", "--ignore-eos"];
        let ran = demo(&[&text[..], more, &["--context-shift", "--expert-cache", "50%"]].concat()).run().expect(0);
        assert!(!ran.stderr.contains("use --context-shift"), "{arch}: {}", ran.stderr);
        match reason {
            Some(reason) => {
                let end = " tokens is full; give a larger -c (this model's context cannot be shifted: ";
                ran.says(&[&format!("{reason}: a full context ends the text"), end])
            }
            None => {
                assert!(!ran.stderr.contains("is full"), "{arch}: {}", ran.stderr);
                ran
            }
        };
    }
    // In a conversation the oldest turns go instead.
    synth::write(&model, &Spec::tiny("qwen3vlmoe")).unwrap();
    let args = ["-m", model.to_str().unwrap(), "-cnv", "--chat-template", "chatml", "-n", "300", "--ignore-eos"];
    let ran = demo(&[&args[..], &["--context-shift"]].concat()).type_in("hello\nsecond\n").expect(0);
    assert!(!ran.stderr.contains("error") && !ran.stderr.contains("no room"), "{}", ran.stderr);
    ran.says(&["oldest messages are forgotten"]);
}

/// Shows the model a long introduction and the last message, without earlier ones.
const FORGETFUL: &str = "{{- 'It is known that the same people may have been there before them, \
    and that all of it was made in one day. ' \
    -}}{{- messages[-1].content -}}{{- ': ' -}}";

/// A context goes back to the prefix that it shares with a new prompt; a sliding window that has moved on does not
/// hold that prefix any more.
#[test]
fn answers_do_not_depend_on_earlier_contents_of_a_window() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), &Spec::tiny("gpt-oss"));
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

/// Opens reasoning, as Qwen3's newer templates do, unless `enable_thinking` is false.
const THINKS: &str = "{%- for message in messages -%}\
{{- message.role + ':\n' -}}\
{%- if message.role == 'assistant' and message.reasoning_content -%}\
{{- '<think>' + message.reasoning_content + '</think>' -}}\
{%- endif -%}\
{{- message.content + '\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}\
{{- 'assistant:\n<think>' -}}\
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '</think>' -}}{%- endif -%}\
{%- endif -%}";

#[test]
fn reasoning_is_separate_bounded_and_can_be_turned_off() {
    let talk = |flags: &[&str]| {
        let plain = ["-st", "-p", "hello", "-n", "24", "--ignore-eos", "--no-display-prompt"];
        demo(&[&plain[..], &["--chat-template", THINKS], flags].concat()).run().expect(0).stdout
    };
    let output = talk(&["--reasoning-budget", "4", "--reasoning-budget-message", " So."]);
    let (heading, rest) = output.split_once("\n\n").unwrap();
    assert_eq!(heading, "[Start thinking]", "{output}");
    let (reasoning, answer) = rest.split_once("[End thinking]\n\n").unwrap();
    assert!(reasoning.trim_end().ends_with(" So."), "{reasoning:?}");
    assert!(!answer.trim().is_empty() && !output.contains("think>"), "{output}");
    for raw in [&["--skip-chat-parsing"][..], &["--reasoning-format", "none"]] {
        let output = talk(&[&["--reasoning-budget", "4"], raw].concat());
        assert!(output.contains("</think>") && !output.contains("thinking]"), "{output}");
    }
    let none = talk(&["--reasoning-budget", "0"]);
    assert!(!none.contains("thinking]") && !none.contains("think>"), "{none}");
    let off = talk(&["--reasoning", "off"]);
    assert!(!off.contains("thinking]"), "{off}");
    assert_eq!(talk(&["--chat-template-kwargs", "{\"enable_thinking\": false}"]), off);
}
