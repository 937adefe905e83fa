//! The same prompt by hobbit, llama.cpp and other programs, under the same limit. [`generate`] continues a text with our own
//! engines, [`command`] with hobbit-cli; [`watch`] looks at all of them from outside.

mod command;
pub mod generate;
mod watch;

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};

use hobbit::units::Bytes;
use hobbit_programs::bench::answer::{ggml_build, middle, thinned};
use hobbit_programs::bench::args::{Format, Who, bytes};
use hobbit_programs::bench::case::Test;
use hobbit_programs::bench::case::{Case, Source, Task};
use hobbit_programs::bench::inputs;
use hobbit_programs::bench::print::{Printer, Shown};
use hobbit_programs::bench::record::{Moment, More, Record, Tried, speed};
use hobbit_programs::bench::start::{self, Group};
use hobbit_programs::bench::threads::{self, ThreadChoice};
use hobbit_programs::measure::cgroup::Usage;
use hobbit_programs::measure::host::Host;
use hobbit_programs::output::tell;
use hobbit_programs::signals::{self, Interrupted};

use generate::{Continuation, Wish};
use watch::Watch;

const EXAMPLES: &str = "\
Each PEER is a directory with a program `run` that takes --model, --prompt-file, --predict and --threads, and prints as its
last line what it did, as JSON: see benches/peers/README.md. hobbit and the llama.cpp that is linked into it take part
without being named.

Examples:
  hobbit-prove peers -m mixtral.gguf --limit 2.5GiB --prompt-file question.txt -n 32 benches/peers/llama-cpp
  hobbit-prove peers -m mixtral.gguf --limit 2.5GiB,4GiB --prompt-file question.txt -o jsonl benches/peers/*/
  hobbit-prove peers -m mixtral.gguf --prompt-file question.txt -n 32 --cli --warm --repack 1 --baseline-threads auto
      hobbit-cli as its users start it and llama.cpp as it is by default, from start to end, the model in the page cache.";

/// What was typed after `hobbit-prove peers`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct PeersArgs {
    /// Directories of programs; without any, hobbit and llama.cpp alone
    #[arg(value_name = "PEER")]
    pub peers: Vec<PathBuf>,
    /// Model
    #[arg(short, long, value_name = "FNAME", value_delimiter = ',', required = true)]
    pub model: Vec<PathBuf>,
    /// Text to continue
    #[arg(long, value_name = "FNAME")]
    pub prompt_file: PathBuf,
    /// Tokens to generate, always the most probable
    #[arg(short = 'n', long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub predict: u32,
    /// Memory of each program, page cache included: a control group of its own, and a cold page cache (as root)
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = bytes)]
    pub limit: Vec<u64>,
    /// Threads [default: cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..=512))]
    pub threads: Option<i32>,
    /// Threads of the llama.cpp that is linked in, of which those that wait for a page fault need no core: of several the
    /// best in a short run in the same memory; auto tries the cores and twice as many [default: as --threads]
    #[arg(long, value_name = "auto|N,N,...")]
    pub baseline_threads: Option<ThreadChoice>,
    /// Let the llama.cpp that is linked in repack weights, as it does by default: 0 or 1
    #[arg(long, value_name = "0|1", default_value = "0", value_parser = ["0", "1"])]
    pub repack: String,
    /// hobbit is the hobbit-cli beside this program, as its users start it
    #[arg(long)]
    pub cli: bool,
    /// Every run follows an equal one in the same memory, and finds what that has left in the page cache
    #[arg(long)]
    pub warm: bool,
    /// Prompt tokens that hobbit and the llama.cpp that is linked in compute at once: their buffers are reserved for so many
    #[arg(long, value_name = "N", default_value = "512", value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub ubatch_size: u32,
    /// hobbit-cli's flags for hobbit, in one word
    #[arg(long, value_name = "FLAGS", default_value = "", allow_hyphen_values = true, hide_default_value = true)]
    pub flags: String,
    /// Everybody once, instead of once in this order and once in the reverse
    #[arg(long)]
    pub once: bool,
    /// Seconds after which a program is given up
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
    /// Format on stdout: csv, json, jsonl, md or sql
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    pub output: Format,
    /// Name of the study, kept in every record
    #[arg(long, value_name = "NAME", default_value = "peers")]
    pub label: String,
    /// Name of the case in its study
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub variant: String,
}

/// Who continues the text.
#[derive(Clone, Debug)]
enum Contestant {
    Own(Who),
    Program(PathBuf),
}

impl Contestant {
    fn name(&self) -> String {
        match self {
            Self::Own(Who::Hobbit) => "hobbit".into(),
            Self::Own(Who::Stock) => "llama.cpp".into(),
            Self::Program(dir) => dir.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        }
    }
}

/// How a program ended.
struct Run {
    outcome: Result<Continuation, String>,
    /// From the start of the process to its end.
    whole_ns: u64,
    usage: Usage,
    peak_rss: u64,
    series: Vec<Moment>,
}

/// Does what was typed.
///
/// # Errors
/// A directory without a program; no root; a full disk.
pub fn run(args: &PeersArgs) -> Result<u8> {
    let mut contestants = vec![Contestant::Own(Who::Hobbit), Contestant::Own(Who::Stock)];
    for dir in &args.peers {
        ensure!(dir.join("run").is_file(), "{}: no program `run` in this directory; see --help", dir.display());
        contestants.push(Contestant::Program(dir.canonicalize()?));
    }
    args.model.iter().try_for_each(|model| inputs::model(model))?;
    inputs::text(&args.prompt_file).context("--prompt-file")?;
    let prompt = std::fs::metadata(&args.prompt_file)?;
    if args.cli {
        command::find()?;
    }
    start::end_with_signals()?;
    let shown = Shown { limit: !args.limit.is_empty(), engine: true, ..Shown::default() };
    let mut out = Printer::new(Box::new(io::stdout()), args.output, shown)?;
    let limits = if args.limit.is_empty() { vec![None] } else { args.limit.iter().copied().map(Some).collect() };
    let mut places = args.model.iter().flat_map(|model| limits.iter().map(move |limit| (model, *limit)));
    let compared = places.try_for_each(|(model, limit)| {
        let setting = Setting { args, model, limit, prompt_bytes: prompt.len(), tried: Vec::new() };
        compare(setting, &contestants)?.iter().try_for_each(|record| out.print(record)).map_err(anyhow::Error::from)
    });
    out.finish(ggml_build())?;
    match compared {
        Err(error) if error.is::<Interrupted>() => Ok(signals::status()),
        compared => compared.map(|()| 0),
    }
}

/// Where programs are compared.
struct Setting<'a> {
    args: &'a PeersArgs,
    model: &'a Path,
    limit: Option<u64>,
    prompt_bytes: u64,
    /// What the baseline's number of threads was chosen by.
    tried: Vec<Tried>,
}

fn compare(mut setting: Setting, contestants: &[Contestant]) -> Result<Vec<Record>> {
    let Setting { args, model, limit, .. } = setting;
    let test_time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let say = |what: &str| tell(format_args!("{}, {}: {what}", model.display(), memory(limit)));
    let candidates = setting.candidates();
    let has_choice = candidates.len() > 1;
    for threads in candidates.into_iter().filter(|_| has_choice) {
        say(&format!("llama.cpp on {threads} threads, a trial"));
        let baseline = Contestant::Own(Who::Stock);
        let mut wish = setting.wish(&baseline)?;
        wish.task.case.threads = threads;
        wish.predict = wish.predict.min(threads::TRIAL_PREDICT);
        let done = start_one(args, &baseline, &wish)?.outcome.unwrap_or_default();
        setting.tried.push(Tried::new(
            threads,
            done.prompt_tokens + done.decode_tokens,
            done.prompt_ns + done.decode_ns,
        ));
    }
    let mut runs: Vec<Vec<Run>> = contestants.iter().map(|_| Vec::new()).collect();
    let forth = 0..contestants.len();
    let order: Vec<usize> = if args.once { forth.collect() } else { forth.clone().chain(forth.rev()).collect() };
    for at in order {
        // Who was killed or failed once will be again.
        if runs[at].iter().any(|run| run.outcome.is_err()) {
            continue;
        }
        say(&contestants[at].name());
        let wish = setting.wish(&contestants[at])?;
        runs[at].push(start_one(args, &contestants[at], &wish)?);
    }
    let host = Host::describe(model);
    let reference = runs[1].first().and_then(|run| run.outcome.as_ref().ok()).cloned();
    // hobbit-cli does not tell all of it.
    let about = runs[1].iter().chain(&runs[0]).find_map(|run| run.outcome.as_ref().ok()).cloned().unwrap_or_default();
    let common = Record {
        build_number: ggml_build(),
        build_commit: format!("b{}", ggml_build()),
        model_filename: model.display().to_string(),
        model_type: about.model_type,
        model_size: about.model_size,
        model_n_params: about.model_n_params,
        n_batch: 2048,
        n_ubatch: args.ubatch_size,
        n_prompt: about.prompt_tokens as u32,
        n_gen: args.predict,
        backends: "CPU".into(),
        test_time,
        hobbit_label: args.label.clone(),
        hobbit_variant: args.variant.clone(),
        hobbit_text: args.prompt_file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        hobbit_machine: host.machine.clone(),
        hobbit_limit: limit,
        hobbit_warm: args.warm,
        more: More { hobbit_host: host, ..More::default() },
        ..Record::default()
    };
    let all = contestants.iter().zip(&runs).map(|(contestant, runs)| {
        let mut record = record(common.clone(), contestant, runs, reference.as_ref());
        record.n_threads = setting.threads(contestant);
        if matches!(contestant, Contestant::Own(Who::Stock)) {
            record.more.hobbit_threads_tried.clone_from(&setting.tried);
            record.repack = args.repack == "1";
        }
        record
    });
    Ok(all.collect())
}

impl Setting<'_> {
    /// Numbers of threads for the baseline.
    fn candidates(&self) -> Vec<i32> {
        self.args.baseline_threads.as_ref().map(|choice| choice.candidates(cores())).unwrap_or_default()
    }

    fn threads(&self, contestant: &Contestant) -> i32 {
        let of_baseline = || threads::best(&self.tried).or_else(|| self.candidates().first().copied());
        let is_baseline = matches!(contestant, Contestant::Own(Who::Stock));
        let threads = if is_baseline { of_baseline() } else { None };
        threads.or(self.args.threads).unwrap_or(cores() as i32)
    }

    fn wish(&self, contestant: &Contestant) -> Result<Wish> {
        let args = self.args;
        let who = match contestant {
            Contestant::Own(who) => *who,
            Contestant::Program(_) => Who::Stock,
        };
        let words = if who == Who::Hobbit { args.flags.as_str() } else { "" };
        let case = Case {
            model: self.model.to_owned(),
            words: words.split_whitespace().map(str::to_owned).collect(),
            limit: self.limit,
            disk_limit: None,
            busy: 0,
            n_batch: 2048,
            n_ubatch: args.ubatch_size,
            type_k: "f16".into(),
            type_v: "f16".into(),
            no_kv_offload: false,
            flash_attn: "auto".into(),
            threads: self.threads(contestant),
            // A token is a byte at least, but for one that begins the text.
            test: Test { n_prompt: u32::try_from(self.prompt_bytes + 1)?, n_gen: args.predict, n_depth: 0 },
        };
        let task = Task {
            who,
            case,
            source: Source::Random,
            reps: 1,
            first_rep: 0,
            warmup: false,
            delay: 0,
            with_hashes: false,
            load_mode: "mmap".into(),
            repack: args.repack == "1",
            started_ns: 0,
            verbose: false,
        };
        Ok(Wish { task, prompt_file: args.prompt_file.clone(), predict: args.predict as usize })
    }
}

fn cores() -> usize {
    thread::available_parallelism().map_or(4, usize::from)
}

fn start_one(args: &PeersArgs, contestant: &Contestant, wish: &Wish) -> Result<Run> {
    let case = &wish.task.case;
    let group = Group::new(case.limits(), std::slice::from_ref(&case.model))?;
    if args.warm {
        let before = start_in(&group, args, contestant, wish)?;
        if before.outcome.is_err() {
            return Ok(before);
        }
    }
    start_in(&group, args, contestant, wish)
}

fn start_in(group: &Group, args: &PeersArgs, contestant: &Contestant, wish: &Wish) -> Result<Run> {
    let case = &wish.task.case;
    let is_cli = args.cli && matches!(contestant, Contestant::Own(Who::Hobbit));
    let mut command = match contestant {
        Contestant::Own(_) if is_cli => command::hobbit_cli(wish)?,
        Contestant::Own(_) => {
            let mut wish = wish.clone();
            wish.task.started_ns = start::now_ns();
            let mut command = start::own("generate")?;
            command.arg(serde_json::to_string(&wish)?);
            command
        }
        Contestant::Program(dir) => {
            let mut command = std::process::Command::new(dir.join("run"));
            command.arg("--model").arg(&case.model).arg("--prompt-file").arg(&wish.prompt_file);
            command.arg("--predict").arg(wish.predict.to_string()).arg("--threads").arg(case.threads.to_string());
            command.arg("--context").arg(case.test.n_tokens().next_multiple_of(256).to_string());
            command
        }
    };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = Instant::now();
    let mut child = group.spawn(&mut command)?;
    let watch = Watch::start(child.id(), started, Duration::from_secs(args.timeout));
    let errors = child.stderr.take().context("a program without stderr")?;
    let errors = thread::spawn(move || start::last_line(errors));
    let mut text = Vec::new();
    let read = child.stdout.take().context("a program without stdout")?.read_to_end(&mut text);
    let status = start::wait(&mut child)?;
    let whole_ns = started.elapsed().as_nanos() as u64;
    read.context("reading what a program answers")?;
    let seen = watch.stop();
    let said = errors.join().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let outcome = if seen.timed_out {
        Err(format!("failed: not ready after {} s", args.timeout))
    } else if !status.success() {
        // A shell or an interpreter tells of a child that was killed by 128 + 9.
        let is_killed = start::signal(status) == Some(libc::SIGKILL) || status.code() == Some(128 + libc::SIGKILL);
        Err(if is_killed && group.kills() { "killed".to_owned() } else { format!("failed: {status}, {said}") })
    } else if is_cli {
        command::continuation(wish, &text).map_err(|error| format!("failed: {error:#}"))
    } else {
        match text.lines().rev().find(|line| line.trim_start().starts_with('{')).map(serde_json::from_str) {
            Some(Ok(done)) => Ok(done),
            Some(Err(error)) => Err(format!("failed: its last line: {error}")),
            None => Err("failed: it printed no JSON".to_owned()),
        }
    };
    let own_peak = outcome.as_ref().map_or(0, |done: &Continuation| done.peak_rss);
    Ok(Run { outcome, whole_ns, usage: group.usage(), peak_rss: seen.peak.max(own_peak), series: seen.series })
}

/// What all programs have in `common`, and what came of one.
fn record(common: Record, contestant: &Contestant, runs: &[Run], reference: Option<&Continuation>) -> Record {
    let done: Vec<&Continuation> = runs.iter().filter_map(|run| run.outcome.as_ref().ok()).collect();
    let failed = runs.iter().find_map(|run| run.outcome.as_ref().err().cloned());
    let sum = |part: fn(&Continuation) -> u64| done.iter().map(|one| part(one)).sum::<u64>();
    let mut record = Record {
        hobbit_engine: contestant.name(),
        hobbit_outcome: failed.unwrap_or_else(|| "ok".into()),
        hobbit_prompt_ts: speed(sum(|one| one.prompt_tokens), sum(|one| one.prompt_ns)),
        hobbit_decode_ts: speed(sum(|one| one.decode_tokens), sum(|one| one.decode_ns)),
        hobbit_peak_rss: runs.iter().map(|run| run.peak_rss).max(),
        hobbit_cgroup_peak: runs.iter().filter_map(|run| run.usage.peak).max(),
        hobbit_limit_hits: Some(runs.iter().map(|run| run.usage.limit_hits).sum()),
        more: More {
            samples_ns: done.iter().map(|one| one.prompt_ns + one.decode_ns).collect(),
            hobbit_wholes_ns: runs.iter().filter(|run| run.outcome.is_ok()).map(|run| run.whole_ns).collect(),
            hobbit_prompt_ns: done.iter().map(|one| one.prompt_ns).collect(),
            hobbit_decode_ns: done.iter().map(|one| one.decode_ns).collect(),
            hobbit_steps_ns: done.iter().flat_map(|one| one.token_ns.iter().copied()).collect(),
            hobbit_series: runs.first().map(|run| thinned(&run.series)).unwrap_or_default(),
            ..common.more
        },
        ..common
    };
    record.hobbit_whole_ns = middle(record.more.hobbit_wholes_ns.clone());
    let Some(first) = done.first() else { return record };
    (record.hobbit_budget, record.hobbit_expert_cache) = (first.budget, first.expert_cache);
    record.hobbit_expert_bytes = first.expert_bytes;
    record.hobbit_engine_version.clone_from(&first.version);
    record.hobbit_flags.clone_from(&first.command);
    record.hobbit_load_ns = done.iter().map(|one| one.load_ns).min();
    record.hobbit_first_token_ns = done.iter().map(|one| one.load_ns + one.prompt_ns).min();
    record.more.hobbit_generated = Some(first.text.clone());
    let tokens = |one: &Continuation| (one.prompt_tokens + one.decode_tokens) as f64;
    record.more.samples_ts =
        done.iter().map(|one| tokens(one) * 1e9 / (one.prompt_ns + one.decode_ns).max(1) as f64).collect();
    let n = done.len() as f64;
    record.avg_ts = record.more.samples_ts.iter().sum::<f64>() / n;
    record.avg_ns = (record.more.samples_ns.iter().sum::<u64>() as f64 / n) as u64;
    if let Some(reference) = reference {
        let (equal, all) = equal_characters(&first.text, &reference.text);
        (record.hobbit_text_equal, record.hobbit_text_chars) = (Some(equal), Some(all));
    }
    record
}

/// (leading characters that both have, characters of the reference). Programs that leave out the first blank are not told
/// from those that do not.
fn equal_characters(text: &str, reference: &str) -> (u64, u64) {
    let (text, reference) = (text.trim_start(), reference.trim());
    let equal = text.chars().zip(reference.chars()).take_while(|(a, b)| a == b).count();
    (equal as u64, reference.chars().count() as u64)
}

fn memory(limit: Option<u64>) -> String {
    limit.map_or_else(|| "no limit".into(), |limit| Bytes(limit).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_in_common() {
        assert_eq!(equal_characters(" In the end", "In the beginning"), (7, 16));
        assert_eq!(equal_characters("", "a"), (0, 1));
        assert_eq!(equal_characters("äb", "äb\n"), (2, 2));
    }

    #[test]
    fn runs_of_a_program_become_a_record() {
        let run = |decode_ns, text: &str| Run {
            outcome: Ok(Continuation {
                prompt_tokens: 10,
                prompt_ns: 1_000_000_000,
                decode_tokens: 3,
                decode_ns,
                text: text.into(),
                load_ns: 5,
                ..Continuation::default()
            }),
            whole_ns: 2 * decode_ns,
            usage: Usage { peak: Some(7), limit_hits: 1 },
            peak_rss: 100,
            series: Vec::new(),
        };
        let reference = Continuation { text: "abd".into(), ..Continuation::default() };
        let peer = Contestant::Program("dir/peer".into());
        let all =
            record(Record::default(), &peer, &[run(1_000_000_000, "abc"), run(2_000_000_000, "abc")], Some(&reference));
        assert_eq!((all.hobbit_decode_ts, all.hobbit_prompt_ts), (Some(2.0), Some(10.0)));
        assert_eq!((all.hobbit_text_equal, all.hobbit_text_chars), (Some(2), Some(3)));
        assert_eq!((&all.hobbit_engine[..], &all.hobbit_outcome[..]), ("peer", "ok"));
        assert_eq!(all.hobbit_first_token_ns, Some(1_000_000_005));
        assert_eq!(all.hobbit_whole_ns, Some(3_000_000_000), "of two runs the mean");
        let killed = Run { outcome: Err("killed".into()), ..run(1, "") };
        assert_eq!(record(Record::default(), &peer, &[killed], None).hobbit_outcome, "killed");
    }
}
