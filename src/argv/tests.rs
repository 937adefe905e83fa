use super::*;
use crate::args::command;

fn run(words: &[&str]) -> Result<Line, UsageError> {
    normalise(words.iter().map(OsString::from), &Grammar::of(&command()))
}

fn words(typed: &[&str]) -> Vec<String> {
    run(typed).unwrap().words.into_iter().map(|word| word.into_string().unwrap()).collect()
}

#[test]
fn spellings() {
    for (typed, expected) in [
        (&["-m", "a.gguf"][..], &["--model=a.gguf"][..]),
        (&["--model=a.gguf"], &["--model=a.gguf"]),
        (&["-ngl", "99"], &["--n-gpu-layers=99"]),
        (&["-hf", "a/b:Q8_0", "--offline"], &["--hf-repo=a/b:Q8_0", "--offline=on"]),
        (&["-hff", "c", "-hft", "t", "-mu", "u"], &["--hf-file=c", "--hf-token=t", "--model-url=u"]),
        (&["--gpu-layers", "all"], &["--n-gpu-layers=all"]),
        (&["--n_predict", "5"], &["--predict=5"]),
        (&["--top_k=5"], &["--top-k=5"]),
        (&["-n", "-1"], &["--predict=-1"]),
        (&["-no-cnv", "-st"], &["--conversation=off", "--single-turn=on"]),
        (&["--no-warmup", "--warmup"], &["--warmup=off", "--warmup=on"]),
        (&["--jinja=off"], &["--jinja=off"]),
        (&["-h"], &["--help"]),
        (&["-e", "--no-escape"], &["--escape=on", "--escape=off"]),
        (&["--no-perf", "--show-timings"], &["--perf=off", "--perf=on"]),
        (&["-dev", "none", "-sm", "none", "-mg", "1"], &["--device=none", "--split-mode=none", "--main-gpu=1"]),
        (&["-ts", "3,1", "-cmoe", "-ncmoe", "3"], &["--tensor-split=3,1", "--cpu-moe=on", "--n-cpu-moe=3"]),
        (&["--list-devices", "--host-cache", "4G"], &["--list-devices", "--expert-cache=4G"]),
        (&["--low", "q2_k,down=q3_k", "--low_dir", "d"], &["--low=q2_k,down=q3_k", "--low-dir=d"]),
        (&["--low_share", "25%", "--t1", "1", "--t2=1"], &["--low-share=25%", "--t1=1", "--t2=1"]),
        (
            &["--no-upgrade", "--renormalise", "--deterministic"],
            &["--upgrade=off", "--renormalise=on", "--deterministic=on"],
        ),
    ] {
        assert_eq!(words(typed), expected, "{typed:?}");
    }
}

#[test]
fn values_are_never_rewritten() {
    for value in ["-ngl", "--help", "--no-warmup", "", "-", "--", "a_b", "x=--y_z", "--offline"] {
        assert_eq!(words(&["-p", value, "-st"]), [format!("--prompt={value}"), "--single-turn=on".into()]);
    }
}

#[test]
fn a_word_after_on_off_auto_flags_is_taken_only_if_it_is_one() {
    assert_eq!(words(&["-fa", "off", "-i"]), ["--flash-attn=off", "--interactive=on"]);
    assert_eq!(words(&["-fa", "-i"]), ["--flash-attn", "--interactive=on"]);
    assert_eq!(words(&["-fa"]), ["--flash-attn"]);
    assert_eq!(words(&["--color", "-1", "--color"]), ["--color=-1", "--color"]);
    let (args, _) = crate::args::parse(["--color"].map(OsString::from)).unwrap();
    assert_eq!(args.output.color, Tri::On, "clap's default for a bare flag");
}

#[cfg(unix)]
#[test]
fn paths_need_not_be_text() {
    use std::os::unix::ffi::OsStringExt;
    let path = OsString::from_vec(b"\xff.gguf".to_vec());
    let line = normalise([OsString::from("-m"), path], &Grammar::of(&command())).unwrap();
    assert_eq!(line.words, [OsString::from_vec(b"--model=\xff.gguf".to_vec())]);
}

#[test]
fn llama_cpps_other_flags() {
    let line = run(&["--no-log-jsonl", "--no-mmap", "--prio", "2", "-p", "x"]).unwrap();
    assert_eq!(line.words, ["--prompt=x"]);
    assert!(matches!(&line.notes[..], [Note::NoEffect { flag, .. }] if flag == "--prio"), "{:?}", line.notes);
    let error = run(&["--mmproj", "x.gguf"]).unwrap_err();
    assert!(error.to_string().starts_with("'--mmproj' is a llama.cpp flag that hobbit does not have: "), "{error}");
}

#[test]
fn two_words_after_a_flag() {
    let line = run(&["--control-vector-layer-range", "2", "-1", "-p", "x"]).unwrap();
    assert_eq!(line.words, ["--control-vector-layer-range=2,-1", "--prompt=x"]);
    assert!(crate::args::parse(["--control-vector-layer-range", "2"].map(OsString::from)).is_err());
}

#[test]
fn no_flag_is_both_here_and_unsupported() {
    let grammar = Grammar::of(&command());
    for spelling in grammar.flags.keys() {
        assert!(unsupported::find(spelling).is_none(), "{spelling}");
    }
    let others = [crate::perplexity::args::command(), crate::bench::args::command()];
    let all: Vec<_> = others.iter().map(Grammar::of).chain([grammar]).collect();
    #[cfg(feature = "server")]
    let all: Vec<_> = all.into_iter().chain([Grammar::of(&crate::args::server::command())]).collect();
    #[cfg(not(feature = "server"))]
    let of_the_server =
        ["parallel", "alias", "timeout", "cont-batching", "kv-unified", "slot-prompt-similarity", "embeddings", "ui"];
    for (spelling, long) in SPELLINGS.iter().chain(NEGATIONS) {
        #[cfg(not(feature = "server"))]
        if of_the_server.contains(long) {
            continue;
        }
        let mut found = all.iter().filter_map(|grammar| grammar.flags.get(*spelling));
        assert!(found.any(|(target, _)| target == long), "{spelling}");
    }
}

#[test]
fn errors_tell_what_to_write() {
    for (typed, message) in [
        (&["-ngl=99"][..], "unknown flag '-ngl=99'; write '-ngl 99'"),
        (&["-n64"], "unknown flag '-n64'; write '-n 64'"),
        (&["-t1"], "unknown flag '-t1'; did you mean '-t 1' or '--t1'?"),
        (&["-temp", "1"], "unknown flag '-temp'; did you mean '--temp'?"),
        (&["-zzz"], "unknown flag '-zzz'"),
        (&["-é"], "unknown flag '-é'"),
    ] {
        assert_eq!(run(typed).unwrap_err().to_string(), message);
    }
    // clap finds these, and suggests.
    for (typed, part) in [
        (&["-m"][..], "a value is required for '--model <FNAME>'"),
        (&["--list-devices=x"], "unexpected value 'x' for '--list-devices'"),
        (&["--no-warmup=on"], "unexpected argument '--no-warmup'"),
    ] {
        let error = crate::args::parse(typed.iter().map(OsString::from)).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(words(&["--modle", "x"]), ["--modle", "x"]);
}
