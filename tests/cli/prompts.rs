//! Prompts of completions: where they come from, what is shown, and `--prompt-cache`.

use std::fs;

use hobbit_synth::{self as synth, Format, Spec};

use crate::fixture::cli::*;

const PROMPT: [&str; 4] = ["-p", "In the beginning", "-n", "16"];

#[test]
fn the_demo_runs_without_a_model_or_a_prompt() {
    let bare = ["--temp", "0", "-t", "1", "-n", "8"];
    let ran = cli(&[&bare[..], &["--quiet"]].concat()).run().expect(0);
    assert!(ran.stderr.starts_with("hobbit: no model given (-m): running the demo model "), "{}", ran.stderr);
    assert!(ran.stdout.trim_start().starts_with("In the beginning God created the"), "{}", ran.stdout);
    let empty = cli(&bare).type_in("").expect(0).says(&["warning: the standard input is empty"]);
    assert_eq!(empty.stdout, ran.stdout);
}

#[test]
fn greedy_completion_is_deterministic() {
    let run = |extra: &[&str]| demo(&[&PROMPT, extra].concat()).run().expect(0);
    let first = run(&[]);
    assert!(first.stdout.trim_start().starts_with("In the beginning"), "{}", first.stdout);
    assert_eq!(run(&["-s", "5"]).stdout, first.stdout);
    assert!(!first.stderr.contains("seed"), "it has no effect: {}", first.stderr);
    let whole = run(&["--no-display-prompt"]).stdout;
    assert!(first.stdout.ends_with(&whole) && whole.len() < first.stdout.len(), "{whole:?}");
    // A reverse prompt of two words cuts across tokens, and is shown.
    let words: Vec<&str> = whole.split_whitespace().collect();
    let stop = words.windows(2).map(|pair| pair.join(" ")).find(|stop| whole.contains(stop)).unwrap();
    let stopped = run(&["--no-display-prompt", "-r", &stop]).stdout;
    assert_eq!(stopped.trim_end_matches('\n'), &whole[..whole.find(&stop).unwrap() + stop.len()]);
}

#[test]
fn a_drawn_seed_is_printed_and_repeats_the_run() {
    let run = |extra: &[&str]| demo(&[&["-p", "In the", "-n", "24", "--temp", "1.5"], extra].concat());
    let first = run(&["--stats-json", "-"]).run().expect(0);
    let seed =
        first.stderr.split("hobbit: random seed ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    let (text, json) = first.stdout.split_once('{').unwrap();
    assert!(json.contains(&format!("\"seed\": {seed}")), "{json}");
    assert_eq!(run(&["-s", &seed]).run().expect(0).stdout, text);
    first.says(&[&format!("random seed {seed} (reuse: -s)")]);
}

#[test]
fn a_prompt_is_the_same_from_every_source() {
    let usual = ["-n", "4", "--quiet"];
    let demo = |args: &[&str]| demo(&[&usual, args].concat());
    let typed = demo(&["-p", "a\\tb"]).run().expect(0).stdout;
    for (args, piped) in [(&[][..], "a\tb\n"), (&["-f", "-"], "a\tb\n"), (&["-bf", "-"], "a\tb")] {
        assert_eq!(demo(args).type_in(piped).expect(0).stdout, typed, "{args:?}");
    }
    assert_eq!(demo(&["-p", "a\tb"]).type_in("Something else").expect(0).stdout, typed, "input is ignored");
    let from_file = demo(&["-f", "prompt.txt"]);
    fs::write(from_file.dir.path().join("prompt.txt"), "a\tb\n").unwrap();
    assert_eq!(from_file.run().expect(0).stdout, typed);
    let mut by_environment = cli(&["--temp", "0", "-c", "256", "-p", "a\tb"]);
    by_environment.command.env("LLAMA_ARG_MODEL", demo_model());
    by_environment.command.env("LLAMA_ARG_N_PREDICT", "4").env("LLAMA_ARG_THREADS", "1");
    assert_eq!(by_environment.run().expect(0).stdout, typed);
    // Without a text there is an error.
    for (args, part) in [(&[][..], "error: the standard input is empty"), (&["-f", "-"], "error: -f -: the standard")] {
        let ran = demo(args).type_in("").expect(1).says(&[part]);
        assert_eq!(ran.stdout, "");
    }
    demo(&[]).run().expect(1).says(&["give a text with -p"]);
}

#[test]
fn prompts_may_be_any_bytes() {
    let bytes = b"In the \xff\xfe beginning";
    let piped = demo(&["-n", "4", "-bf", "-"]).type_in(bytes).expect(0).stdout;
    let file = demo(&["-n", "4", "-f", "latin-1.txt"]);
    fs::write(file.dir.path().join("latin-1.txt"), bytes).unwrap();
    assert_eq!(file.run().expect(0).stdout, piped);
    let talk = ["-cnv", "--chat-template", "chatml", "-st", "-n", "4", "-bf", "-"];
    let talk = demo(&talk).type_in(bytes).expect(0).says(&["warning: the prompt: not UTF-8"]);
    assert!(talk.stdout.starts_with("> In the \u{FFFD}\u{FFFD} beginning\n"), "{}", talk.stdout);
}

#[test]
fn a_prompt_beyond_the_context_is_refused_before_it_is_shown() {
    let long = "In the beginning God created the heaven. ".repeat(100);
    for extra in [&[][..], &["--context-shift"]] {
        let ran = demo(&[&["-p", &long], extra].concat()).run().expect(1).says(&["error: the prompt has "]);
        assert_eq!(ran.stdout, "");
        // The advice helps.
        let advice = ran.stderr.split("holds 256; give -c ").nth(1).unwrap().split(' ').next().unwrap();
        demo(&["-p", &long, "-n", "1", "-c", advice]).run().expect(0);
        let talk = [&["-cnv", "--chat-template", "chatml", "-n", "4", "--quiet"], extra].concat();
        let ran = demo(&talk).type_in(format!("{long}\nshort\n")).expect(1);
        assert!(ran.stderr.starts_with("error: the message has ") && ran.stderr.lines().count() == 1, "{}", ran.stderr);
        assert!(!ran.stdout.is_empty(), "the short message is answered");
    }
}

const CACHED: &str = "In the beginning God created the heaven and the earth. And the earth was without form, and void";

#[test]
fn a_cached_prompt_is_continued_and_other_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt");
    let plain = |prompt: &str, more: &[&str]| demo(&[&["-p", prompt, "-n", "8", "-no-cnv", "-ub", "1"], more].concat());
    let run = |prompt: &str, more: &[&str]| {
        plain(prompt, &[&["--prompt-cache", file.to_str().unwrap()], more].concat()).run()
    };
    let first = run(CACHED, &[]).expect(0);
    let bytes = fs::read(&file).unwrap();
    let again = run(CACHED, &["--prompt-cache-ro"]).expect(0).says(&[" tokens are known from "]);
    assert!(again.stdout == first.stdout && fs::read(&file).unwrap() == bytes);
    // A longer prompt, and one that only begins alike, as without a file.
    for prompt in [format!("{CACHED}; and darkness"), "In the beginning God said".to_owned()] {
        let found = run(&prompt, &["--prompt-cache-ro"]).expect(0);
        assert_eq!(found.stdout, plain(&prompt, &[]).run().expect(0).stdout);
        assert!(!found.stderr.contains("hobbit: prompt: 0 of"), "{}", found.stderr);
    }
    run(CACHED, &["--prompt-cache-all"]).expect(0);
    assert!(fs::metadata(&file).unwrap().len() > bytes.len() as u64, "generated tokens are saved");

    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    for (content, more, status, part) in [
        (&bytes[..], &["-ctk", "f32"][..], 1, "another type of KV cache"),
        (&damaged, &[], 1, "it is damaged"),
        (b"letters to my sister", &[], 2, "is no saved sequence"),
    ] {
        fs::write(&file, content).unwrap();
        run(CACHED, more).expect(status).says(&[part, "prompt"]);
        assert!(fs::read(&file).unwrap() == content, "{part}: the file stays");
    }
}

/// A checksum is no signature: a state whose numbers were changed is refused, or continued without a crash.
#[test]
fn a_cached_prompt_with_changed_numbers_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (file, model) = (dir.path().join("prompt"), dir.path().join("model.gguf"));
    for (arch, more) in [("llama", "; and darkness"), ("lfm2moe", "; and darkness"), ("lfm2moe", "")] {
        // A product that quantises its input may take a NaN for a number.
        let spec = Spec { types: vec![Format::F32], dense_type: Some(Format::F32), ..Spec::tiny(arch) };
        synth::write(&model, &spec).unwrap();
        let run = |prompt: &str| {
            let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
            demo(&["-m", model, "-p", prompt, "-n", "4", "-no-cnv", "--prompt-cache", file]).run()
        };
        run(CACHED).expect(0);
        let saved = fs::read(&file).unwrap();
        let number = |at: usize| u64::from_le_bytes(saved[at..at + 8].try_into().unwrap()) as usize;
        let end = 40 + 4 * number(16) + number(24);
        assert_eq!(end < saved.len(), arch == "lfm2moe", "a recurrent prompt has checkpoints");
        // Numbers of 32 or 16 bits, in the state; or in the last checkpoint, to which the same prompt goes back.
        let end = if more.is_empty() { saved.len() } else { end } - 1024;
        for word in [0x7fc0_7fc0_u32, 0x7f80_7c00] {
            let mut changed = saved.clone();
            changed[end - 64..end].chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&word.to_le_bytes()));
            let sum = xxhash_rust::xxh3::xxh3_64(&changed[40..]).to_le_bytes();
            changed[32..40].copy_from_slice(&sum);
            fs::write(&file, &changed).unwrap();
            let parts = ["--prompt-cache", "not finite", "give another file, or remove this one"];
            run(&format!("{CACHED}{more}")).expect(1).says(&parts);
        }
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn a_cached_recurrent_prompt_resumes_at_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (file, model) = (dir.path().join("prompt"), dir.path().join("model.gguf"));
    let (file, path) = (file.to_str().unwrap(), model.to_str().unwrap());
    for (arch, window) in [("lfm2moe", 0), ("qwen3next", 0), ("gpt-oss", 32)] {
        synth::write(&model, &Spec::tiny(arch)).unwrap();
        let window = format!("{arch}.attention.sliding_window=int:{window}");
        let more =
            ["-p", CACHED, "-n", "8", "-no-cnv", "--ignore-eos", "--override-kv", &window, "--prompt-cache", file];
        let run = || demo(&[&["-m", path][..], &more].concat()).run().expect(0);
        let first = run();
        let again = run();
        assert_eq!(again.stdout, first.stdout, "{arch}");
        let line = again.stderr.split("hobbit: prompt: ").nth(1).unwrap_or_else(|| panic!("{}", again.stderr));
        let mut counts = line.split(' ').filter_map(|word| word.parse::<usize>().ok());
        let (known, all) = (counts.next().unwrap(), counts.next().unwrap());
        assert!(all - known <= 2, "{arch}: {known} of {all}");
        fs::remove_file(file).unwrap();
    }
}
