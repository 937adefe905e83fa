//! `hobbit-bench`, from arguments to exit status.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use super::answer::{Run, answers, equal_logits, ggml_build, record};
use super::args::{self, Format, Typed, Who};
use super::case::{Case, Source, Task, cases, check_files};
use super::child::random_reads;
use super::host::Host;
use super::print::{Printer, Shown};
use super::record::Record;
use super::{child, start};
use crate::args::{Verbosity, read};
use crate::devices;
use crate::download;
use crate::exit::{self, USAGE};
use crate::memory;
use crate::output::{say, tell};
use crate::run::Process;
use crate::signals::{self, Interrupted};
use crate::surroundings::Surroundings;

/// Runs `hobbit-bench` with the arguments of this process.
pub fn main() -> ExitCode {
    hobbit_common::output::prepare_console();
    memory::few_arenas();
    let mut words = std::env::args_os().skip(1).peekable();
    let first = words.peek().and_then(|word| word.to_str()).unwrap_or_default().to_owned();
    let rest = || std::env::args_os().skip(2).collect::<Vec<_>>();
    let outcome = match &first[..] {
        "child" => inner(&rest(), |word| {
            let task: Task = serde_json::from_str(word)?;
            Ok(serde_json::to_string(&child::run(&task)?)?)
        }),
        "disk" => inner(&rest(), |word| Ok(random_reads(word.as_ref(), Duration::from_millis(800))?.to_string())),
        _ => run(words),
    };
    exit::code(outcome)
}

/// Runs work in a child process of this program: one argument, an answer on stdout.
fn inner(words: &[OsString], work: impl Fn(&str) -> Result<String>) -> Result<u8> {
    let word = words.first().and_then(|word| word.to_str()).context("for hobbit-bench itself: one argument")?;
    say(work(word)?)?;
    Ok(0)
}

fn run(words: impl Iterator<Item = OsString>) -> Result<u8> {
    let mut typed = read(args::command, words.collect(), args::parse)?;
    if typed.list_devices {
        return devices::list(&[], typed.bench.output.verbose, None).map(|()| 0);
    }
    for note in &typed.notes {
        tell(format_args!("note: {note}"));
    }
    let test = &mut typed.bench.test;
    test.model.extend(download::fetched(&test.source, Verbosity { shown: 3, logged: 3 })?);
    let cases = match cases(&typed, || Process.demo_model()) {
        Ok(cases) => cases,
        Err(error) => {
            tell(format_args!("error: {}", exit::in_words(&error)));
            return Ok(USAGE);
        }
    };
    let mut printed = Vec::new();
    for note in cases.iter().filter_map(|case| args::engine_args(&case.words).ok()).flat_map(|(_, notes)| notes) {
        if !printed.contains(&note) {
            tell(format_args!("{note}"));
            printed.push(note);
        }
    }
    check_files(&cases, &source(&typed))?;
    start::end_with_signals()?;
    let output = &typed.bench.output;
    let shown = shown(&typed, &cases);
    let mut out = Printer::new(Box::new(io::stdout()), output.output, shown)?;
    let mut err = Printer::new(Box::new(io::stderr()), output.output_err.unwrap_or(Format::None), shown)?;
    let mut bench = Bench::new(&typed, cases.len());
    let mut failed = false;
    let mut interrupted = false;
    for (number, case) in cases.iter().enumerate() {
        let records = match bench.case(number, case) {
            Ok(records) => records,
            Err(error) if error.is::<Interrupted>() => {
                interrupted = true;
                break;
            }
            Err(error) => {
                out.finish(ggml_build())?;
                return Err(error);
            }
        };
        for record in &records {
            // A killed llama.cpp is a result; a killed hobbit exceeded its budget, which is an error.
            let is_killed = record.hobbit_outcome == "killed" && record.hobbit_engine == "hobbit";
            failed |= is_killed || record.hobbit_outcome.starts_with("failed");
            bench.bar.suspend(|| out.print(record).and_then(|()| err.print(record)))?;
        }
    }
    bench.bar.finish_and_clear();
    out.finish(ggml_build())?;
    err.finish(ggml_build())?;
    Ok(match (interrupted, failed) {
        (true, _) => signals::status(),
        (false, failed) => u8::from(failed),
    })
}

/// Columns that vary or were requested.
fn shown(typed: &Typed, cases: &[Case]) -> Shown {
    let (test, comparison) = (&typed.bench.test, &typed.bench.comparison);
    Shown {
        limit: cases.iter().any(|case| case.limit.is_some()),
        engine: comparison.baseline || comparison.baseline_only,
        flags: typed.engine.iter().any(|alternatives| alternatives.len() > 1),
        batch: !test.batch_size.is_empty() || !test.ubatch_size.is_empty(),
        kv_types: !test.cache_type_k.is_empty() || !test.cache_type_v.is_empty(),
        flash_attn: !test.flash_attn.is_empty(),
        drafts: cases.iter().any(Case::generates),
        details: typed.bench.output.verbose,
        gpu_layers: typed.engine.iter().flatten().any(|word| word.starts_with("--n-gpu-layers")),
    }
}

/// Runs cases.
struct Bench<'a> {
    typed: &'a Typed,
    source: Source,
    order: Vec<Who>,
    n_cases: usize,
    bar: ProgressBar,
    /// The model whose disk was measured last, the memory limit, and the bandwidth.
    disk: Option<(PathBuf, Option<u64>, f64)>,
}

/// The source of tokens.
fn source(typed: &Typed) -> Source {
    let comparison = &typed.bench.comparison;
    comparison.prompt_file.clone().map_or(Source::Random, Source::Text)
}

impl<'a> Bench<'a> {
    fn new(typed: &'a Typed, n_cases: usize) -> Self {
        let comparison = &typed.bench.comparison;
        let order = match (comparison.baseline, comparison.baseline_only) {
            (true, _) => comparison.order.0.clone(),
            (_, true) => vec![Who::Stock],
            _ => vec![Who::Hobbit],
        };
        let n_runs = (n_cases * order.len()) as u64;
        let is_quiet = !io::stderr().is_terminal() || typed.bench.output.progress;
        let bar = if is_quiet { ProgressBar::hidden() } else { ProgressBar::new(n_runs) };
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} runs, {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { typed, source: source(typed), order, n_cases, bar, disk: None }
    }

    fn case(&mut self, number: usize, case: &Case) -> Result<Vec<Record>> {
        let host = Host::describe(&case.model);
        let test_time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let mut runs: [Vec<Run>; 2] = Default::default();
        for &who in &self.order {
            let task = self.task(case, who, runs[who as usize].len() as u32);
            let name = if who == Who::Stock { "llama.cpp" } else { "hobbit" };
            self.say(&format!("benchmark {}/{}: {}, {name}", number + 1, self.n_cases, case.test.name()));
            // A run that was killed or failed would fail again.
            if runs[who as usize].iter().all(|(outcome, _)| outcome.is_ok()) {
                runs[who as usize].push(start::run(&task)?);
            }
            self.bar.inc(1);
        }
        let logits = equal_logits(&runs[0], &runs[1]);
        let mut records = Vec::new();
        for who in [Who::Hobbit, Who::Stock] {
            let runs = &runs[who as usize];
            if runs.is_empty() {
                continue;
            }
            let mut record = record(&self.task(case, who, 0), &host, self.bandwidth(case, runs)?, runs);
            let output = &self.typed.bench.output;
            record.hobbit_label.clone_from(&output.label);
            record.hobbit_variant.clone_from(&output.variant);
            record.test_time.clone_from(&test_time);
            if let (Who::Stock, Some(ns)) = (who, record.more.hobbit_stops_ns) {
                let ms = ns.max(0) as f64 / 1e6;
                tell(format_args!("note: stopping behind every router (--routes) costs llama.cpp {ms:.2} ms a token"));
            }
            if self.typed.bench.comparison.baseline {
                (record.hobbit_logits_compared, record.hobbit_logits_equal) = (Some(logits.0), Some(logits.1));
            }
            records.push(record);
        }
        // The model's description is the same for both engines.
        if let [ours, stock] = &mut records[..] {
            stock.hobbit_expert_bytes = ours.hobbit_expert_bytes;
            stock.hobbit_n_experts = ours.hobbit_n_experts;
            (stock.hobbit_n_expert, stock.hobbit_n_expert_used) = (ours.hobbit_n_expert, ours.hobbit_n_expert_used);
        }
        Ok(records)
    }

    fn task(&self, case: &Case, who: Who, run: u32) -> Task {
        let (test, comparison) = (&self.typed.bench.test, &self.typed.bench.comparison);
        let mut case = case.clone();
        if who == Who::Stock {
            case.threads = comparison.baseline_threads.unwrap_or(case.threads);
        }
        Task {
            who,
            case,
            source: self.source.clone(),
            reps: test.repetitions,
            first_rep: run * test.repetitions,
            warmup: !test.no_warmup,
            delay: test.delay,
            with_hashes: comparison.baseline,
            load_mode: comparison.load_mode.clone(),
            repack: comparison.repack.clone(),
            started_ns: 0,
            verbose: self.typed.bench.output.verbose,
        }
    }

    fn say(&self, what: &str) {
        if self.typed.bench.output.progress {
            tell(format_args!("hobbit-bench: {what}"));
        }
        self.bar.set_message(what.to_owned());
    }

    /// Bandwidth of the disk in bytes per second, if hobbit read from it.
    fn bandwidth(&mut self, case: &Case, runs: &[Run]) -> Result<Option<f64>> {
        let reads = answers(runs).filter_map(|answer| answer.traffic).any(|[_, decode]| decode.bytes > 0);
        if !reads || self.typed.bench.comparison.no_roofline {
            return Ok(None);
        }
        match &self.disk {
            Some((model, limit, speed)) if *model == case.model && *limit == case.limit => Ok(Some(*speed)),
            _ => {
                let speed = start::disk(&case.model, case.limit)?;
                self.disk = Some((case.model.clone(), case.limit, speed));
                Ok(Some(speed))
            }
        }
    }
}
