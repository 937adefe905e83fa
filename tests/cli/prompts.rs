//! Prompts of completions.

use super::rig::*;

#[test]
fn without_a_model_the_demo_speaks() {
    let ran = cli(&["--temp", "0", "-t", "1", "-n", "8"]).run().expect(0);
    assert!(ran.stderr.contains("running the demo model"), "{}", ran.stderr);
    assert!(ran.stdout.trim_start().starts_with("In the beginning God created the"), "{}", ran.stdout);
}

#[test]
fn greedy_completion_is_deterministic() {
    let run = |extra: &[&str]| demo(&[&["-p", "In the beginning", "-n", "16"], extra].concat()).run().expect(0);
    let first = run(&[]);
    assert!(first.stdout.trim_start().starts_with("In the beginning"), "{}", first.stdout);
    assert_eq!(run(&["-s", "5"]).stdout, first.stdout);
    assert!(first.stderr.contains("hobbit: "));
    assert!(!first.stderr.contains("seed"), "it has no effect: {}", first.stderr);
    // Only the continuation.
    let alone = run(&["--no-display-prompt"]).stdout;
    assert!(first.stdout.ends_with(&alone) && alone.len() < first.stdout.len(), "{alone:?}");
}

#[test]
fn prompts_from_files_and_environment_are_the_same_prompt() {
    let typed = demo(&["-p", "a\\tb", "-n", "4"]).run().expect(0).stdout;
    let from_file = demo(&["-f", "prompt.txt", "-n", "4"]);
    std::fs::write(from_file.dir.path().join("prompt.txt"), "a\tb\n").unwrap();
    assert_eq!(from_file.run().expect(0).stdout, typed);
    let mut by_environment = cli(&["--temp", "0", "-c", "256", "-p", "a\tb"]);
    by_environment.command.env("LLAMA_ARG_MODEL", demo_model());
    by_environment.command.env("LLAMA_ARG_N_PREDICT", "4").env("LLAMA_ARG_THREADS", "1");
    assert_eq!(by_environment.run().expect(0).stdout, typed);
}

#[test]
fn reverse_prompts_stop_and_are_shown() {
    let whole = demo(&["-p", "In the beginning", "-n", "24", "--no-display-prompt"]).run().expect(0).stdout;
    // The last two words cut across tokens, wherever those end.
    let words: Vec<&str> = whole.split_whitespace().collect();
    let stop = words.windows(2).map(|pair| pair.join(" ")).find(|stop| whole.contains(stop)).unwrap();
    let args = ["-p", "In the beginning", "-n", "24", "--no-display-prompt", "-r", &stop];
    let stopped = demo(&args).run().expect(0).stdout;
    let end = whole.find(&stop).unwrap() + stop.len();
    assert_eq!(stopped.trim_end_matches('\n'), &whole[..end]);
}

#[test]
fn a_prompt_beyond_the_context_is_refused_before_it_is_shown() {
    let long = "In the beginning God created the heaven. ".repeat(100);
    for extra in [&[][..], &["--context-shift"]] {
        let ran = demo(&[&["-p", &long], extra].concat()).run().expect(1);
        assert_eq!(ran.stdout, "");
        assert!(ran.stderr.contains("error: the prompt has ") && ran.stderr.contains("holds 256; give -c "));
        let talk = [&["-cnv", "--chat-template", "chatml", "-n", "4", "--quiet"], extra].concat();
        let ran = demo(&talk).type_in(format!("{long}\nshort\n")).expect(1);
        assert!(ran.stderr.starts_with("error: the message has ") && ran.stderr.lines().count() == 1, "{}", ran.stderr);
        assert!(!ran.stdout.is_empty(), "the short message is answered");
        let ran = demo(&[&talk[..], &["-st", "-p", &long]].concat()).run().expect(1);
        assert_eq!(ran.stdout, "");
    }
    // The advice helps.
    let refused = demo(&["-p", &long]).run().expect(1).stderr;
    let advice = refused.split("give -c ").nth(1).unwrap().split(' ').next().unwrap();
    demo(&["-p", &long, "-n", "1", "-c", advice]).run().expect(0);
}

#[test]
fn piped_input_is_the_prompt() {
    let usual = ["-n", "8", "--quiet"];
    let typed = demo(&[&usual[..], &["-p", "In the beginning"]].concat()).run().expect(0).stdout;
    for args in [&[][..], &["-f", "-"], &["-bf", "-"]] {
        let newline = if args.contains(&"-bf") { "" } else { "\n" };
        let piped = demo(&[&usual[..], args].concat()).type_in(format!("In the beginning{newline}")).expect(0);
        assert_eq!(piped.stdout, typed, "{args:?}");
    }
    let ignored = demo(&[&usual[..], &["-p", "In the beginning"]].concat()).type_in("Something else").expect(0);
    assert_eq!(ignored.stdout, typed);
    // The demo without a name, too.
    let unnamed = cli(&["--temp", "0", "-t", "1", "-c", "256", "-n", "8", "--quiet"]).type_in("In the beginning");
    assert_eq!(unnamed.expect(0).stdout, typed);
}

#[test]
fn an_empty_input_is_an_error() {
    for (args, part) in
        [(&["-n", "4"][..], "error: the standard input is empty"), (&["-f", "-"], "error: -f -: the standard")]
    {
        let ran = demo(args).type_in("").expect(1);
        assert!(ran.stderr.contains(part), "{}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
    assert!(demo(&["-n", "4"]).run().expect(1).stderr.contains("give a text with -p"), "/dev/null");
    // hobbit-cli without arguments shows its demo.
    let ran = cli(&["--temp", "0", "-t", "1", "-n", "8"]).type_in("").expect(0);
    assert!(ran.stderr.contains("warning: the standard input is empty"), "{}", ran.stderr);
    assert!(ran.stdout.trim_start().starts_with("In the beginning God created the"), "{}", ran.stdout);
}

#[test]
fn prompts_may_be_any_bytes() {
    let bytes = b"In the \xff\xfe beginning";
    let piped = demo(&["-n", "4", "-bf", "-"]).type_in(bytes).expect(0).stdout;
    let file = demo(&["-n", "4", "-f", "latin-1.txt"]);
    std::fs::write(file.dir.path().join("latin-1.txt"), bytes).unwrap();
    assert_eq!(file.run().expect(0).stdout, piped);
    assert!(piped.contains("beginning"), "{piped}");
    let talk = ["-cnv", "--chat-template", "chatml", "-st", "-n", "4", "-bf", "-"];
    let talk = demo(&talk).type_in(bytes).expect(0);
    assert!(talk.stderr.contains("warning: the prompt: not UTF-8"), "{}", talk.stderr);
    assert!(talk.stdout.starts_with("> In the \u{FFFD}\u{FFFD} beginning\n"), "{}", talk.stdout);
}

#[test]
fn a_drawn_seed_is_printed_and_repeats_the_run() {
    let run = |extra: &[&str]| demo(&[&["-p", "In the", "-n", "24", "--temp", "1.5"], extra].concat()).run().expect(0);
    let first = run(&["--stats-json", "-"]);
    let seed = first.stderr.split("hobbit: seed ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    assert!(first.stderr.contains(&format!("seed {seed} (drawn; repeat with -s)")), "{}", first.stderr);
    let (text, json) = first.stdout.split_once('{').unwrap();
    assert!(json.contains(&format!("\"seed\": {seed}")), "{json}");
    let again = run(&["-s", &seed]);
    assert_eq!(again.stdout, text);
    assert!(again.stderr.contains(&format!("hobbit: seed {seed}, ")), "{}", again.stderr);
}
