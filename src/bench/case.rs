//! Test cases: every combination of the command line's values, in llama-bench's order and grammar.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use super::args::{Typed, Who, engine_args};
use crate::resolve;
use hobbit::options::{FlashAttn, KvType, LowSource, ModelOptions, SessionOptions, SpeculationOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::UBATCH_MAX;

/// The source of tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Random tokens, the same for every engine.
    #[default]
    Random,
    /// A text.
    Text(PathBuf),
}

/// The tokens of one repetition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Test {
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// Tokens evaluated one by one.
    pub n_gen: u32,
    /// Tokens in the context beforehand, not timed.
    pub n_depth: u32,
}

impl Test {
    /// Tokens of a repetition.
    pub fn n_tokens(self) -> usize {
        self.n_prompt as usize + self.n_gen as usize + self.n_depth as usize
    }

    /// llama-bench's name of the test: `pp512`, `tg128`, `pp16+tg32`, with ` @ d1024` appended.
    pub fn name(self) -> String {
        let Self { n_prompt, n_gen, n_depth } = self;
        let name = match (n_prompt, n_gen) {
            (_, 0) => format!("pp{n_prompt}"),
            (0, _) => format!("tg{n_gen}"),
            _ => format!("pp{n_prompt}+tg{n_gen}"),
        };
        if n_depth > 0 { format!("{name} @ d{n_depth}") } else { name }
    }
}

/// One row of the results. Both engines run it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    pub model: PathBuf,
    /// hobbit's flags.
    pub words: Vec<String>,
    /// Memory of the process in bytes.
    pub limit: Option<u64>,
    pub n_batch: u32,
    pub n_ubatch: u32,
    /// Tokens of hobbit's widest ubatch, as costs decide; 0: all have `n_ubatch`.
    pub n_ubatch_max: u32,
    pub type_k: String,
    pub type_v: String,
    pub no_kv_offload: bool,
    pub flash_attn: String,
    pub threads: i32,
    pub test: Test,
}

/// The task of one process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Task {
    pub who: Who,
    pub case: Case,
    pub source: Source,
    /// Measured repetitions.
    pub reps: u32,
    /// Index of the first repetition in the text.
    pub first_rep: u32,
    pub warmup: bool,
    /// Seconds.
    pub delay: u64,
    /// Report the hashes of the logits.
    pub with_hashes: bool,
    /// llama.cpp's load mode.
    pub load_mode: String,
    /// Weights that are repacked: `0`, `1` or `ordinary`.
    pub repack: String,
    /// When the process was started, in nanoseconds since 1970.
    pub started_ns: u128,
    pub verbose: bool,
}

/// Tokens computed at once where none are given: llama-bench's default.
const UBATCH: u32 = 512;

/// All cases.
pub fn cases(typed: &Typed, demo: impl Fn() -> Result<PathBuf, String>) -> Result<Vec<Case>> {
    let test = &typed.bench.test;
    let models = match &test.model[..] {
        [] => vec![demo().map_err(anyhow::Error::msg)?],
        models => models.to_vec(),
    };
    let limits = match &typed.bench.comparison.limit[..] {
        [] => vec![None],
        limits => limits.iter().copied().map(Some).collect(),
    };
    let numbers = |flag: &str, given: &[String], usual: u32| -> Result<Vec<u32>> {
        if given.is_empty() {
            return Ok(vec![usual]);
        }
        let values = given.iter().map(|text| integers(text, false)).collect::<Result<Vec<_>, _>>();
        let values = values.map_err(|why| anyhow!("{flag}: {why}"))?.concat();
        ensure!(!values.is_empty(), "{flag} {}: an empty range", given.join(","));
        let number = |value: i64| u32::try_from(value).ok().filter(|n| *n <= 1 << 24);
        values.into_iter().map(|n| number(n).with_context(|| format!("{flag} {n}: too large"))).collect()
    };
    let n_batch = positive("-b", numbers("-b", &test.batch_size, 2048)?)?;
    let (auto, given): (Vec<String>, Vec<String>) = test.ubatch_size.iter().cloned().partition(|text| text == "auto");
    let fixed = if auto.is_empty() || !given.is_empty() { numbers("-ub", &given, UBATCH)? } else { Vec::new() };
    let fixed = positive("-ub", fixed)?.into_iter().map(|n| (n, 0));
    let n_ubatch: Vec<(u32, u32)> = fixed.chain(auto.iter().map(|_| (UBATCH, UBATCH_MAX))).collect();
    let cores = std::thread::available_parallelism().map_or(4, |n| n.get() as u32);
    let threads = positive("-t", numbers("-t", &test.threads, cores)?)?;
    ensure!(threads.iter().all(|n| *n <= 512), "-t: at most 512 threads");
    let type_k = words::<KvType>("-ctk", &test.cache_type_k, "f16")?;
    let type_v = words::<KvType>("-ctv", &test.cache_type_v, "f16")?;
    let flash_attn = words::<FlashAttn>("-fa", &test.flash_attn, "auto")?;
    let no_kv_offload = words::<String>("-nkvo", &test.no_kv_offload, "0")?;
    if let Some(word) = no_kv_offload.iter().find(|word| *word != "0" && *word != "1") {
        bail!("-nkvo {word}: expected 0 or 1");
    }
    let tests = tests(typed, &numbers)?;
    let depths = numbers("-d", &test.n_depth, 0)?;

    let engine = product(&typed.engine);
    // Flags contradict each other only in combination.
    for words in &engine {
        engine_args(words).map_err(|error| anyhow!(error.render().to_string().trim().to_owned()))?;
    }
    // The first values change slowest.
    let mut cases = vec![Case::default()];
    cases = vary(cases, models, |case, model| case.model = model);
    cases = vary(cases, limits, |case, limit| case.limit = limit);
    cases = vary(cases, engine, |case, words| case.words = words);
    cases = vary(cases, n_batch, |case, n| case.n_batch = n);
    cases = vary(cases, n_ubatch, |case, widths| (case.n_ubatch, case.n_ubatch_max) = widths);
    cases = vary(cases, type_k, |case, word| case.type_k = word);
    cases = vary(cases, type_v, |case, word| case.type_v = word);
    cases = vary(cases, no_kv_offload, |case, word| case.no_kv_offload = word == "1");
    cases = vary(cases, flash_attn, |case, word| case.flash_attn = word);
    cases = vary(cases, threads, |case, n| case.threads = n as i32);
    cases = vary(cases, depths, |case, n_depth| case.test.n_depth = n_depth);
    cases = vary(cases, tests, |case, test| case.test = Test { n_depth: case.test.n_depth, ..test });
    if cases.iter().any(Case::generates) {
        let comparison = &typed.bench.comparison;
        ensure!(comparison.prompt_file.is_some(), "drafts need a text that a model goes on with: give --prompt-file");
        let is_alone = !comparison.baseline && !comparison.baseline_only;
        ensure!(is_alone, "with drafts each engine would go on with a text of its own: leave out --baseline");
    }
    Ok(cases)
}

fn tests(typed: &Typed, numbers: &impl Fn(&str, &[String], u32) -> Result<Vec<u32>>) -> Result<Vec<Test>> {
    let test = &typed.bench.test;
    let prompts = numbers("-p", &test.n_prompt, 512)?;
    let gens = numbers("-n", &test.n_gen, 128)?;
    let pairs: Vec<(u32, u32)> =
        test.pg.iter().map(|text| pair(text).map_err(|why| anyhow!("-pg: {why}"))).collect::<Result<_>>()?;
    let tests: Vec<Test> = prompts
        .into_iter()
        .map(|n_prompt| (n_prompt, 0))
        .chain(gens.into_iter().map(|n_gen| (0, n_gen)))
        .chain(pairs)
        .filter(|test| *test != (0, 0))
        .map(|(n_prompt, n_gen)| Test { n_prompt, n_gen, n_depth: 0 })
        .collect();
    if tests.is_empty() {
        bail!("nothing to test: give -p, -n or -pg above 0");
    }
    Ok(tests)
}

/// The words of a flag, each of which is a `T`.
fn words<T: FromStr<Err: Display>>(flag: &str, given: &[String], usual: &str) -> Result<Vec<String>> {
    let words = if given.is_empty() { vec![usual.to_owned()] } else { given.to_vec() };
    let wrong = words.iter().find_map(|word| word.parse::<T>().err());
    wrong.map_or(Ok(words), |error| Err(anyhow!("{flag}: {error}")))
}

fn positive(flag: &str, values: Vec<u32>) -> Result<Vec<u32>> {
    ensure!(values.iter().all(|value| *value > 0), "{flag}: expected numbers above 0");
    Ok(values)
}

/// Every case with each of the values.
fn vary<T: Clone>(cases: Vec<Case>, values: Vec<T>, set: impl Fn(&mut Case, T)) -> Vec<Case> {
    let with = |case: &Case, value: &T| {
        let mut case = case.clone();
        set(&mut case, value.clone());
        case
    };
    cases.iter().flat_map(|case| values.iter().map(|value| with(case, value)).collect::<Vec<_>>()).collect()
}

/// Every combination with one alternative of each flag.
fn product(alternatives: &[Vec<String>]) -> Vec<Vec<String>> {
    alternatives.iter().fold(vec![Vec::new()], |all, one| {
        all.iter()
            .flat_map(|words| one.iter().map(move |word| [&words[..], std::slice::from_ref(word)].concat()))
            .collect()
    })
}

impl Case {
    /// Options for a [`Model`](hobbit::Model).
    pub fn model_options(&self) -> Result<ModelOptions> {
        let options = resolve::experts(&engine_args(&self.words)?.0.experts, &self.model, self.session_options()?)?;
        // Measured runs are not traced.
        Ok(ModelOptions { trace: None, ..options })
    }

    /// Options of speculative decoding.
    pub fn speculation(&self) -> Result<Option<SpeculationOptions>> {
        Ok(engine_args(&self.words)?.0.speculation.options())
    }

    /// Whether the model chooses the tokens after the first single one by itself, drafted or not: a given text would
    /// not be what it drafts.
    pub fn generates(&self) -> bool {
        let names = ["--spec-", "--lookup-cache-"];
        self.words.iter().any(|word| names.iter().any(|name| word.starts_with(name)))
    }

    /// Options for a session of either engine.
    pub fn session_options(&self) -> Result<SessionOptions> {
        let mut session = SessionOptions {
            n_ctx: u32::try_from(self.test.n_tokens())?.next_multiple_of(256),
            n_batch: self.n_batch,
            n_ubatch: self.n_ubatch.min(self.n_batch),
            n_ubatch_max: self.n_ubatch_max,
            n_outputs_max: 1,
            threads: Some(self.threads),
            flash_attn: self.flash_attn.parse()?,
            type_k: self.type_k.parse()?,
            type_v: self.type_v.parse()?,
            kv_offload: !self.no_kv_offload,
            warmup: false,
            ..SessionOptions::default()
        };
        self.speculation()?.iter().for_each(|drafts| drafts.prepare(&mut session));
        Ok(session)
    }
}

/// Maximum values in one range: more is a mistake.
const VALUES_MAX: usize = 10_000;

/// `first[-last[(+|*)step]]`, comma-separated.
pub fn integers(text: &str, with_negative: bool) -> Result<Vec<i64>, String> {
    let mut values = Vec::new();
    for part in text.split(',') {
        let wrong = || format!("'{part}': expected a number, or a range such as 16-64, 16-64+16 or 16-64*2");
        let sign = if with_negative && part.starts_with('-') { 1 } else { 0 };
        let (first, rest) = match part[sign..].split_once('-') {
            Some((first, rest)) => (&part[..sign + first.len()], Some(rest)),
            None => (part, None),
        };
        let first = number(first).ok_or_else(wrong)?;
        let Some(rest) = rest else {
            values.push(first);
            continue;
        };
        let (last, step) = match rest.find(['+', '*']) {
            Some(at) => (&rest[..at], Some((rest.as_bytes()[at], number(&rest[at + 1..]).ok_or_else(wrong)?))),
            None => (rest, None),
        };
        let last = number(last).ok_or_else(wrong)?;
        let mut value = first;
        while value <= last {
            values.push(value);
            let next = match step {
                None => value.checked_add(1),
                Some((b'+', step)) => value.checked_add(step),
                Some((_, factor)) => value.checked_mul(factor),
            };
            let next = next.filter(|next| *next > value && values.len() < VALUES_MAX);
            value = next.ok_or_else(|| format!("'{part}': the range does not end"))?;
        }
    }
    Ok(values)
}

/// `pp,tg`.
fn pair(text: &str) -> Result<(u32, u32), String> {
    let wrong = || format!("'{text}': expected two numbers, as in 512,128");
    let (prompt, gen_) = text.split_once(',').ok_or_else(wrong)?;
    let number = |word: &str| word.trim().parse().map_err(|_| wrong());
    Ok((number(prompt)?, number(gen_)?))
}

/// Digits with an optional sign.
fn number(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// Checks the models of all cases and the text before anything is measured or printed: a mistyped name is an error, not
/// a row.
pub fn check_files(cases: &[Case], source: &Source) -> Result<()> {
    let mut known: Vec<&Path> = Vec::new();
    for case in cases {
        if !known.contains(&&*case.model) {
            check_model(&case.model)?;
            known.push(&case.model);
        }
        if let Some(LowSource::File(low)) = case.model_options()?.low {
            check_model(&low).context("--low")?;
        }
    }
    match source {
        Source::Random => Ok(()),
        Source::Text(path) => check_text(path).context("--prompt-file"),
    }
}

fn check_model(path: &Path) -> Result<()> {
    std::fs::metadata(path).with_context(|| format!("{}: cannot open this model", path.display()))?;
    Gguf::open(path)?;
    Ok(())
}

fn check_text(path: &Path) -> Result<()> {
    let found =
        std::fs::read_to_string(path).with_context(|| format!("{}: cannot read this file as text", path.display()))?;
    ensure!(!found.trim().is_empty(), "{}: this file is empty, expected text", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::args::parse;
    use super::*;

    fn all(line: &str) -> Result<Vec<Case>> {
        cases(&parse(line.split_whitespace().map(OsString::from)).unwrap(), || Ok("demo.gguf".into()))
    }

    #[test]
    fn llama_benchs_tests() {
        for (line, expected) in [
            ("", "pp512 tg128"),
            ("-p 0 -n 64", "tg64"),
            ("-p 8,16 -n 0 -pg 16,32", "pp8 pp16 pp16+tg32"),
            ("-p 8 -n 4 -d 0-32+32", "pp8 tg4 pp8@d32 tg4@d32"),
        ] {
            let names: Vec<String> = all(line).unwrap().iter().map(|case| case.test.name().replace(' ', "")).collect();
            assert_eq!(names.join(" "), expected, "{line}");
        }
    }

    #[test]
    fn every_combination() {
        let cases = all("-m a,b --limit 1GiB,2GiB --policy lru,lfu -n 0 -t 1,2").unwrap();
        assert_eq!((cases.len(), cases[0].threads, cases[1].threads), (16, 1, 2));
        assert_eq!(
            (&cases[0].words[..], &cases[2].words[..]),
            (&["--policy=lru".into()][..], &["--policy=lfu".into()][..])
        );
        assert_eq!((cases[4].limit, cases[8].model.to_str()), (Some(2 << 30), Some("b")));
        let cases = all("-p 100 -n 0 -b 64 -ctk q8_0 -fa on -nkvo 1 -ngl 3").unwrap();
        let session = cases[0].session_options().unwrap();
        assert_eq!((session.n_ctx, session.n_batch, session.n_ubatch), (256, 64, 64));
        assert_eq!((session.type_k, session.flash_attn, session.kv_offload), (KvType::Q8_0, FlashAttn::On, false));
        assert_eq!(cases[0].model_options().unwrap().n_gpu_layers, 3);
        let cases = all("-p 100 -n 0 -ub 64,auto").unwrap();
        let widths: Vec<_> = cases.iter().map(|case| (case.n_ubatch, case.n_ubatch_max)).collect();
        assert_eq!(widths, [(64, 0), (512, UBATCH_MAX)]);
    }

    #[test]
    fn mistakes() {
        for (line, part) in [
            ("-p x", "-p: 'x'"),
            ("-p 9-1", "-p 9-1: an empty range"),
            ("-p 0 -n 0", "nothing to test"),
            ("-b 0", "-b: expected numbers above 0"),
            ("-t 1000", "at most 512"),
            ("-ctk q9", "-ctk: unknown KV cache type"),
            ("-fa maybe", "-fa: unknown flash"),
            ("-nkvo 2", "-nkvo 2"),
            ("-pg 1", "-pg: '1'"),
            ("-p 99999999", "too large"),
            ("--precision exact --t1 0.5", "contradicts"),
        ] {
            let error = all(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn lists_and_ranges() {
        for (text, expected) in [
            ("512", &[512][..]),
            ("16,32", &[16, 32]),
            ("1-3", &[1, 2, 3]),
            ("0-4096+1024", &[0, 1024, 2048, 3072, 4096]),
            ("16-64*2,7", &[16, 32, 64, 7]),
            ("5-4", &[]),
        ] {
            assert_eq!(integers(text, false).as_deref(), Ok(expected), "{text}");
        }
        assert_eq!(integers("-1,99", true), Ok(vec![-1, 99]));
        for bad in ["", "a", "1,", "1-", "-1", "1-2+", "1-2x3", "1-4*1", "0-4*2", "1-4+0", "+1", "99999999999999999999"]
        {
            assert!(integers(bad, false).is_err(), "{bad}");
        }
        assert!(integers("0-9999999", false).unwrap_err().contains("does not end"));
        assert_eq!(pair("16,32"), Ok((16, 32)));
        assert!(["", "16", "16,", "a,1", "1,2,3", "-1,2"].iter().all(|bad| pair(bad).is_err()));
    }
}
