//! Starts the runs, one process each, in order.

use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use hobbit::gguf::Gguf;
use serde::Serialize;

use super::child::{Answer, Run, Task, Work};
use super::contestant::{Contestant, Files};
use super::subject::Targets;
use hobbit_programs::measure::cgroup::{Cgroup, Usage};
use hobbit_programs::measure::disk::RandomReads;
use hobbit_programs::measure::page_cache;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Settings {
    pub name: String,
    pub targets: Option<Targets>,
    pub files: Files,
    /// Memory of each process in bytes; `None`: all there is.
    pub limit: Option<u64>,
    pub prompt_tokens: usize,
    pub decode_tokens: usize,
    pub stock_decode_tokens: usize,
    pub order: Vec<Contestant>,
    /// As in `--low-share`.
    pub low_share: String,
    pub threads: i32,
    pub stock_threads: i32,
    pub json: Option<PathBuf>,
}

impl Settings {
    fn task(&self, work: Work) -> Task {
        let is_stock = work == Work::Run(Contestant::Stock);
        Task {
            work,
            files: self.files.clone(),
            threads: if is_stock { self.stock_threads } else { self.threads },
            prompt_tokens: self.prompt_tokens,
            decode_tokens: if is_stock { self.stock_decode_tokens } else { self.decode_tokens },
            skip_tokens: 0,
            cache_state: None,
            budget: self.limit,
            low_share: self.low_share.clone(),
            load_mode: None,
            extra_bufts: false,
        }
    }
}

/// A run that has ended.
#[derive(Clone, Debug, Serialize)]
pub struct Finished {
    /// The variant, for `--tune`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// `None` when the kernel killed it for its memory.
    pub run: Option<Box<Run>>,
    pub cgroup: Option<Usage>,
    /// Measured just before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disk: Vec<RandomReads>,
}

/// Everyone in the order asked for.
pub fn alternate(settings: &Settings) -> Result<Vec<Finished>> {
    let state = settings.order.contains(&Contestant::ExactWarm).then(|| warm_state(settings)).transpose()?;
    let mut all = Vec::new();
    for (number, &contestant) in settings.order.iter().enumerate() {
        eprintln!("{}: run {} of {}, {}", settings.name, number + 1, settings.order.len(), contestant.name());
        let mut disk = Vec::new();
        if settings.limit.is_some()
            && contestant.is_hobbit()
            && let (Some(Answer::Disk(measured)), _) = start(&settings.task(Work::Disk), settings.limit)?
        {
            disk = measured;
        }
        let mut task = settings.task(Work::Run(contestant));
        // Each run leaves its own state behind: the next one is to begin as this one did.
        let copy = state.as_ref().map(|_| tempfile::NamedTempFile::new()).transpose()?;
        if let (Contestant::ExactWarm, Some(state), Some(copy)) = (contestant, &state, &copy) {
            std::fs::copy(state.path(), copy.path())?;
            task.cache_state = Some(copy.path().to_owned());
        }
        let (answer, cgroup) = start(&task, settings.limit)?;
        let Some(Answer::Run(run)) = answer else {
            bail!("{} was killed: it needs more memory than the limit", contestant.name())
        };
        all.push(Finished { variant: None, run: Some(run), cgroup, disk });
    }
    Ok(all)
}

/// What is in memory after another piece of the text.
fn warm_state(settings: &Settings) -> Result<tempfile::NamedTempFile> {
    eprintln!("{}: a run that leaves its cache to those that start warm", settings.name);
    let state = tempfile::NamedTempFile::new()?;
    // An empty file is no state, and would be left as it is.
    std::fs::remove_file(state.path())?;
    let mut task = settings.task(Work::Run(Contestant::ExactWarm));
    task.skip_tokens = task.prompt_tokens + task.decode_tokens;
    task.cache_state = Some(state.path().to_owned());
    start(&task, settings.limit)?.0.context("the run before a warm start was killed")?;
    Ok(state)
}

/// llama.cpp alone, in every setting that could be its best: threads that wait for pages cost nothing, so more of them
/// than cores may help; other load modes and repacking need the weights in memory.
pub fn tune(settings: &Settings) -> Result<Vec<Finished>> {
    let usual = settings.task(Work::Run(Contestant::Stock));
    let mut variants: Vec<(String, Task)> = [1, 2, 4]
        .into_iter()
        .map(|factor| {
            let threads = settings.threads * factor;
            (format!("mmap, {threads} threads"), Task { threads, ..usual.clone() })
        })
        .collect();
    variants.push(("mmap, extra buffer types".into(), Task { extra_bufts: true, ..usual.clone() }));
    for mode in ["none", "dio"] {
        variants.push((mode.into(), Task { load_mode: Some(mode.into()), ..usual.clone() }));
    }
    let mut all = Vec::new();
    for (name, task) in variants {
        eprintln!("{}: llama.cpp, {name}", settings.name);
        let (answer, cgroup) = start(&task, settings.limit)?;
        let run = answer.and_then(|answer| match answer {
            Answer::Run(run) => Some(run),
            Answer::Disk(_) => None,
        });
        all.push(Finished { variant: Some(name), run, cgroup, disk: Vec::new() });
    }
    Ok(all)
}

/// Runs the task in a process of its own; with a limit, from a cold page cache in a control group of its own. No
/// answer when the kernel killed it.
fn start(task: &Task, limit: Option<u64>) -> Result<(Option<Answer>, Option<Usage>)> {
    if limit.is_some() {
        let files = match task.work {
            Work::Run(contestant) => contestant.reads(&task.files),
            Work::Disk => vec![task.files.model.as_path()],
        };
        for path in files {
            for file in Gguf::open(path)?.files {
                page_cache::drop_file(&file.path)?;
            }
        }
    }
    let group = limit.map(Cgroup::new).transpose()?;
    let entrance = group.as_ref().map(Cgroup::entrance).transpose()?;
    let entrance = entrance.as_ref().map(AsRawFd::as_raw_fd);
    let mut command = Command::new(std::env::current_exe().context("the bench's own file")?);
    command.arg("child").arg(serde_json::to_string(task)?).stdin(Stdio::null()).stdout(Stdio::piped());
    // SAFETY: between fork and exec only system calls are made; the descriptor is open until the child has started.
    unsafe {
        command.pre_exec(move || {
            // A child must not outlive a bench that is interrupted.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            match entrance {
                Some(entrance) if libc::write(entrance, c"0".as_ptr().cast(), 1) != 1 => {
                    Err(io::Error::last_os_error())
                }
                _ => Ok(()),
            }
        });
    }
    let mut child = command.spawn().context("starting a run")?;
    let mut text = String::new();
    let read = child.stdout.take().context("a run without output")?.read_to_string(&mut text);
    let status = child.wait()?;
    read?;
    let usage = group.as_ref().map(Cgroup::usage);
    if status.signal() == Some(libc::SIGKILL) && group.is_some() {
        return Ok((None, usage));
    }
    if !status.success() {
        bail!("{:?} failed: {status}", task.work);
    }
    Ok((Some(serde_json::from_str(text.trim()).context("the answer of a run")?), usage))
}
