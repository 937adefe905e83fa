//! Texts with long words, or long runs of one character: llama.cpp's pre-tokenizers go through them by recursion.

use hobbit::{Model, ModelOptions};

use crate::fixture::cli::{self, demo_model};

/// All names of pre-tokenizers that llama.cpp knows.
const NAMES: &str = "a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe \
    command-r dbrx deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone \
    exaone-moe exaone4 f2llmv2 falcon falcon-h1 falcon3 gemma4 gigachat glm4 glm5 gpt-2 gpt-4o \
    gpt3-finnish granite-docling granite-embed-multi-311m granite-embed-multi-97m grok-2 hunyuan \
    hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code jina-v2-de \
    jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe \
    llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 mmbert \
    modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe \
    seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken \
    tiny_aya trillion ufakzeka viking whitespace youtu";

/// Names for which llama.cpp has code of its own: no text is too long for them.
const CODED: [&str; 6] = ["gpt-2", "llama-bpe", "qwen2", "qwen35", "kimi-k2", "gemma4"];

/// Spaces, line breaks, letters, digits, dashes, CJK, emoji, and mixtures that some patterns take for one word.
const UNITS: [&str; 15] =
    [" ", "\n", "a", "A", "7", "-", "汉", "😀", "\n/", "w ", "<sentinel:1", "-\n", "a'", "1汉", " \u{a0}"];

/// The most characters in one match, as `engine::pretokenizer` has it.
const MATCH_MAX: usize = 64 << 10;

fn model(pre: &str) -> Model {
    let overridden = format!("tokenizer.ggml.pre=str:{pre}").parse().unwrap();
    Model::open(&demo_model(), &ModelOptions { kv_overrides: vec![overridden], ..ModelOptions::default() }).unwrap()
}

fn run_of(unit: &str, n_chars: usize) -> String {
    unit.repeat(n_chars / unit.chars().count())
}

/// Overflows the stack of the test where a match is deeper than was expected.
#[test]
fn every_pre_tokenizer_reads_long_runs_or_refuses_them() {
    let names: Vec<&str> = NAMES.split_whitespace().collect();
    assert_eq!(names.len(), 92);
    for pre in names {
        let model = model(pre);
        for unit in UNITS {
            // `whitespace` makes words of all but spaces, and llama.cpp's merges assert that there are none.
            let is_refused = matches!((pre, unit), ("deepseek-llm" | "superbpe", _));
            if !is_refused && (pre != "whitespace" || !unit.contains([' ', '\n', '\u{a0}'])) {
                let read = model.tokenize(run_of(unit, 10_000), false, false);
                read.unwrap_or_else(|error| panic!("{pre}, {unit:?}: {error}"));
            }
        }
        for (unit, n) in [("a", 100_000), (" ", 100_000), ("a", 1_000_000), ("汉", 1_000_000)] {
            // A second or two for each: not all names that share code.
            if n > 100_000 && model.tokenize(run_of(unit, 100_000), false, false).is_ok() && !CODED.contains(&pre) {
                continue;
            }
            if let Err(error) = model.tokenize(run_of(unit, n), false, false) {
                let error = error.to_string();
                assert!(!CODED.contains(&pre), "{pre}: {error}");
                assert!(error.contains("takes at most") && error.contains("divide"), "{pre}: {error}");
            }
        }
    }
}

#[test]
fn a_long_run_is_read_where_its_match_fits() {
    let model = model("gpt-4o");
    // Stack of 20 MiB is touched here; the text comes back.
    let text = run_of("a", MATCH_MAX - 8);
    let tokens = model.tokenize(&text, false, false).unwrap();
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| model.piece(*token, false)).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
    let error = model.tokenize(format!("fine. {text}bbbbbbbbb"), false, false).unwrap_err().to_string();
    assert!(error.contains("from byte 6 on"), "{error}");
    // Length alone is no reason.
    let long = "Some words, and more of them.\n".repeat(40_000);
    assert!(model.tokenize(&long, false, false).unwrap().len() > 200_000);
}

/// Each program names the problem and ends with exit code 1.
#[test]
fn programs_refuse_what_is_too_long() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("long.txt");
    std::fs::write(&file, run_of("a", 100_000)).unwrap();
    let (file, demo) = (file.to_str().unwrap(), demo_model());
    let pre = ["--override-kv", "tokenizer.ggml.pre=str:gpt-4o"];
    let parts = ["100008 characters from byte 0 on", "divide them"];
    cli::run(&demo, &[&pre[..], &["-f", file]].concat()).is_refused(&parts).unwrap();
    let more = dir.path().join("fits.txt");
    std::fs::write(&more, run_of("a", 30_000)).unwrap();
    let fits = cli::run(&demo, &[&pre[..], &["-f", more.to_str().unwrap()]].concat());
    fits.is_refused(&["the prompt has 30001 tokens"]).unwrap();
    let mut perplexity = cli::program(cli::PERPLEXITY);
    perplexity.arg("-m").arg(&demo).args(pre).args(["-f", file, "-t", "1"]);
    cli::ran(perplexity.output().unwrap()).is_refused(&parts).unwrap();
}
