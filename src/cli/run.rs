//! From the process's arguments to its exit status.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use super::args;
use super::console::Screen;
use super::ctrl_c::CtrlC;
use super::demo;
use super::devices;
use super::log::{Level, Log};
use super::report::{self, Circumstances};
use super::resolve::{HiArgs, Surroundings};
use super::stream::{Desk, End};
use super::{complete, converse};
use crate::files::{self, Kind, OutputError};
use crate::{
    DeviceReport, Error, LowSource, Model, ModelOptions, PrecisionMode, Sampler, Session, SessionOptions,
    low_cache_path, quantise_low,
};

/// Exit status when a message got no answer.
const FAILED: u8 = 1;
/// Exit status after wrong usage.
pub const USAGE: u8 = 2;
/// Exit status after Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// Ctrl-C where nothing was left to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Runs `hobbit-cli` with the arguments of this process.
pub fn main() -> ExitCode {
    match run(std::env::args_os().skip(1)) {
        Ok(status) => ExitCode::from(status),
        Err(error) => failure(&error),
    }
}

fn run(words: impl Iterator<Item = OsString>) -> Result<u8> {
    let (low, notes) = match args::parse(words) {
        Ok(parsed) => parsed,
        Err(error) => {
            // Help goes to stdout, which may be closed.
            return match error.print() {
                Err(closed) if closed.kind() != io::ErrorKind::BrokenPipe => Err(closed.into()),
                _ => Ok(u8::try_from(error.exit_code()).unwrap_or(USAGE)),
            };
        }
    };
    if low.device.list_devices {
        let json = low.output.stats_json.as_deref().map(|path| ("--stats-json", path));
        return devices::list(&low.device.rpc, low.output.verbose.0, json).map(|()| 0);
    }
    let args = HiArgs::new(low, &Process)?;
    args.check_outputs()?;
    let log = Log::new(args.output.verbosity, args.output.log_file.as_deref())?;
    for note in notes {
        log.line(Level::Warning, format!("note: {note}"));
    }
    warn_of_threads(&args.session_options, &log);
    if let Some(path) = &args.output.stats_json {
        try_writing(path)?;
    }
    log.take_llama_cpps();
    let ctrl_c = CtrlC::install(args.colour)?;
    crate::watch_memory_signals();
    let model = open(&args.model, args.is_demo, &args.model_options, &log, &ctrl_c)?;
    let session = ctrl_c.during(|| model.session(&args.session_options))?;
    if ctrl_c.was_pressed() {
        return Err(Interrupted.into());
    }
    describe(&model, &session, &args.model_options, &log);
    log.line(Level::Debug, format!("{args:#?}"));
    ctrl_c.attach(session.interrupt_handle());
    let sampler = Sampler::new(&model, &args.sampling)?;
    let screen = Screen::new(args.colour);
    let mut desk =
        Desk { args: &args, model: &model, session, sampler, screen, log: &log, ctrl_c: &ctrl_c, failed: false };

    let has_template = model.info().chat_template.is_some();
    let outcome = if args.converses(has_template) { converse::run(&mut desk) } else { complete::run(&mut desk) };
    let (end, status) = match outcome {
        Ok(End::Interrupted) => (End::Interrupted, INTERRUPTED),
        Ok(end) if desk.failed && (args.single_turn || !io::stdin().is_terminal()) => (end, FAILED),
        Ok(end) => (end, 0),
        // The reader went away; what was measured is still wanted.
        Err(error) if is_closed_pipe(&error) => (End::Interrupted, 0),
        Err(error) if error.is::<Interrupted>() => (End::Interrupted, INTERRUPTED),
        Err(error) => {
            let _ = desk.screen.end_line();
            return Err(error);
        }
    };
    let ended = desk.screen.end_line();
    finish(&desk, &end)?;
    ended?;
    Ok(status)
}

/// Prints an error with its causes on one line; its exit status.
pub fn failure(error: &anyhow::Error) -> ExitCode {
    if is_closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    if error.is::<Interrupted>() || matches!(error.downcast_ref(), Some(Error::Interrupted | Error::Cancelled)) {
        return ExitCode::from(INTERRUPTED);
    }
    let _ = writeln!(io::stderr(), "error: {}", in_words(error));
    // Flags that lack another one.
    let is_usage = matches!(error.downcast_ref(), Some(Error::NoPenalties { .. } | Error::Output(_)));
    if is_usage || error.is::<OutputError>() { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
}

/// Whether an error comes from a reader that went away.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// An error and its causes on one line, each cause once: many of our messages quote theirs.
pub(super) fn in_words(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(|cause| cause.to_string()) {
        if !text.contains(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text.push_str(colon);
            text.push_str(&cause);
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Opens a model with a progress bar.
///
/// # Errors
/// As [`Model::open`]; Ctrl-C.
pub fn open(path: &Path, is_demo: bool, options: &ModelOptions, log: &Log, ctrl_c: &CtrlC) -> Result<Model> {
    if is_demo {
        log.line(Level::Info, format!("hobbit: no model given (-m): running the demo model {}", path.display()));
    }
    // A missing file is the commonest mistake: tell it before anything else happens.
    std::fs::metadata(path).with_context(|| format!("{}: cannot open this model", path.display()))?;
    let options = ModelOptions { low: low_source(path, options, log, ctrl_c)?, ..options.clone() };
    let bar = bar(log, "loading {bar:40} {percent:>3} %");
    let model = ctrl_c.during(|| {
        Model::open(path, &options, |done| {
            bar.set_position((done * 1000.0) as u64);
            !ctrl_c.was_pressed()
        })
    });
    bar.finish_and_clear();
    Ok(model?)
}

/// Where low versions come from once those that were to be made exist.
fn low_source(path: &Path, options: &ModelOptions, log: &Log, ctrl_c: &CtrlC) -> Result<Option<LowSource>> {
    let is_exact = options.precision.mode == Some(PrecisionMode::Exact);
    let (types, directory) = match &options.low {
        Some(LowSource::Quantise { types, directory }) if !is_exact => (types, directory.as_deref()),
        other => return Ok(other.clone()),
    };
    let bar = bar(log, "making low-precision experts {bar:40} {percent:>3} % {eta}");
    let mut has_begun = false;
    let made = ctrl_c.during(|| {
        quantise_low(path, types, directory, &mut |done| {
            if !std::mem::replace(&mut has_begun, true) {
                let file = low_cache_path(path, types, directory);
                let line = format!("hobbit: making low-precision experts ({types}) once: {}", file.display());
                bar.suspend(|| log.line(Level::Info, line));
            }
            bar.set_position((done * 1000.0) as u64);
            !ctrl_c.was_pressed()
        })
    });
    bar.finish_and_clear();
    Ok(Some(LowSource::File(made?)))
}

fn bar(log: &Log, template: &'static str) -> ProgressBar {
    let bar = if log.shows(Level::Info) { ProgressBar::new(1000) } else { ProgressBar::hidden() };
    bar.with_style(ProgressStyle::with_template(template).expect("the template is constant and valid"))
}

/// Warns of more threads than there are CPUs.
pub fn warn_of_threads(options: &SessionOptions, log: &Log) {
    let Ok(cpus) = std::thread::available_parallelism() else { return };
    for (flag, threads) in [("-t", options.threads), ("-tb", options.threads_batch)] {
        if let Some(threads) = threads.filter(|&threads| usize::try_from(threads).is_ok_and(|n| n > cpus.get())) {
            let warning = format!("warning: {flag} {threads} is more than the {cpus} logical CPUs: this is slow");
            log.line(Level::Warning, warning);
        }
    }
}

/// Tells early that statistics could not be written in the end.
///
/// # Errors
/// Why not.
pub fn try_writing(path: &Path) -> Result<()> {
    // A pipe may be opened only once.
    let is_special = std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir());
    if path == Path::new("-") || is_special {
        return Ok(());
    }
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).with_context(|| format!("{}: cannot write the statistics", path.display()))
}

/// The start-up lines.
pub fn describe(model: &Model, session: &Session, options: &ModelOptions, log: &Log) {
    let info = model.info();
    let (size, experts) = (report::bytes(info.tensor_bytes), report::bytes(info.expert_bytes));
    let parameters = report::parameters(info.n_params);
    log.line(Level::Info, format!("hobbit: {}: {}", info.path.display(), report::description(&info.description)));
    log.line(
        Level::Info,
        format!(
            "hobbit: {parameters} parameters, {size}, {} layers, context {} of {} tokens",
            info.n_layer,
            session.n_ctx(),
            info.n_ctx_train
        ),
    );
    if info.is_moe() {
        log.line(
            Level::Info,
            format!("hobbit: {} experts per layer, {} per token, {experts} in all", info.n_expert, info.n_expert_used),
        );
        log.line(Level::Info, format!("hobbit: reading experts: {}", session.io_choice()));
    } else {
        log.line(Level::Info, "hobbit: a dense model: no experts to cache, it runs as in llama.cpp");
    }
    let plan = session.plan();
    log.line(Level::Info, plan);
    log.text(Level::Info, &report::device::start_up_lines(session.devices(), plan, options.device.cpu_helper));
    devices::warn_without_devices(options, !session.devices().is_empty(), log);
    if info.is_moe() {
        log.line(Level::Info, format!("hobbit: {}", session.precision()));
    }
    for line in session.caching().lines() {
        log.line(Level::Info, format!("hobbit: {line}"));
    }
    if let Some(warm) = session.warm_start() {
        log.line(Level::Info, report::warm_start(warm));
    }
    if let Some(warning) = &plan.warning {
        log.line(Level::Warning, format!("warning: {warning}"));
    }
    log.line(Level::More, crate::system_info());
}

/// What devices hold now, which may be less than at the start.
pub fn devices_now(session: &Session) -> Vec<DeviceReport> {
    let now = session.model().device_reports();
    if now.is_empty() { session.devices().to_vec() } else { now }
}

/// The closing lines, and the file of `--stats-json`.
fn finish(desk: &Desk, end: &End) -> Result<()> {
    let output = &desk.args.output;
    let (timings, stats) = (desk.session.timings(), desk.session.stats());
    let devices = devices_now(&desk.session);
    if output.perf && desk.log.shows(Level::Info) {
        desk.log.text(Level::Info, &format!("\n{}", report::timing_lines(&timings)));
        desk.log.text(Level::Info, &report::cache_lines(&stats));
        desk.log.text(Level::Info, &report::device::closing_lines(&devices, &stats.devices));
        desk.log.text(Level::Info, &report::precision_lines(desk.session.precision(), &stats));
    }
    let Some(path) = &output.stats_json else { return Ok(()) };
    let about = Circumstances {
        model: serde_json::to_value(desk.model.info())?,
        plan: serde_json::to_value(desk.session.plan())?,
        precision: serde_json::to_value(desk.session.precision())?,
        caching: serde_json::to_value(desk.session.caching())?,
        devices: serde_json::to_value(&devices)?,
        io: desk.session.io_choice().to_owned(),
        stop: end.name(),
        seed: desk.sampler.seed(),
    };
    let mut text = serde_json::to_string_pretty(&report::json(&about, &timings, &stats))?;
    text.push('\n');
    if path == Path::new("-") {
        let mut out = io::stdout().lock();
        return Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?);
    }
    let written = files::create(path, Kind::Json).and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("{}: cannot write the statistics", path.display()))
}

/// This process, as settings see it.
pub struct Process;

impl Surroundings for Process {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        std::fs::read(path)
    }

    fn demo_model(&self) -> Result<PathBuf, String> {
        demo::Search::here().find(Path::is_file)
    }

    fn grammar_of_schema(&self, schema: &str) -> Result<String> {
        Ok(crate::json_schema_to_grammar(schema)?)
    }

    fn shows_colour(&self) -> bool {
        let refused = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        io::stdout().is_terminal() && !dumb && !refused("NO_COLOR")
    }
}

#[cfg(test)]
mod tests {
    use super::in_words;

    #[test]
    fn each_cause_is_said_once() {
        let error = anyhow::anyhow!("no space").context("cannot write: no space").context("saving");
        assert_eq!(in_words(&error), "saving: cannot write: no space");
    }
}
