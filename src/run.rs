//! `hobbit-cli`, from arguments to exit status; also opens and describes models for hobbit-perplexity.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use super::advice;
use super::args;
use super::argv::Note;
use super::console::Screen;
use super::ctrl_c::CtrlC;
use super::demo;
use super::devices;
use super::doctor;
use super::download;
use super::exit::{self, FAILED};
use super::log::{Level, Log};
use super::media;
use super::memory;
use super::output::{is_closed_pipe, write_json};
use super::progress::bar;
use super::prompt_cache::PromptCache;
use super::report::{self, Closing};
use super::resolve::HiArgs;
use super::signals::{self, Interrupted};
use super::stream::{Desk, End};
use super::surroundings::Surroundings;
use super::{completion, conversation, saved};
use hobbit::engine::{ChatTemplates, Description, low_cache_path, quantise_low};
use hobbit::options::{DraftSource, LowSource, PrecisionMode, RopeOptions, SamplerKind, SpeculationOptions};
use hobbit::stats::{DeviceReport, Stats, Timings};
use hobbit::{Model, ModelOptions, OpenError, Sampler, SamplingOptions, Session, SessionOptions};
use hobbit_core::pack::{PartialError, WriteError};
use hobbit_core::units;

/// Note for a run without a model argument.
const DEMO: &str = "no model given (-m): running the demo model";

/// Runs `hobbit-cli` with the arguments of this process.
pub fn main() -> ExitCode {
    hobbit_common::output::prepare_console();
    memory::begin();
    // SAFETY: no thread has been started yet.
    unsafe { hobbit::engine::isolate_chat_templates() };
    exit::code(run(std::env::args_os().skip(1)))
}

fn run(words: impl Iterator<Item = OsString>) -> Result<u8> {
    let words: Vec<OsString> = words.collect();
    let (mut low, notes) = args::read(args::command, words.clone(), args::parse)?;
    if low.run.experts.device.list_devices {
        let json = low.output.stats_json.as_deref().map(|path| ("--stats-json", path));
        return devices::list(&low.run.experts.device.rpc, low.output.log.verbose.0, json).map(|()| 0);
    }
    download::into(&mut low.run.model, args::verbosity(&low.output.closing, &low.output.log))?;
    if low.doctor {
        return doctor::run(&low, words);
    }
    let args = HiArgs::new(low, &Process)?;
    args.check_outputs()?;
    let log = Log::new(args.output.verbosity(), args.output.log.log_file.as_deref())?;
    log.end(speak(&args, &notes, &log))
}

/// Opens the model and generates; returns the exit status.
fn speak(args: &HiArgs, notes: &[Note], log: &Log) -> Result<u8> {
    let ctrl_c = begin(notes, &args.run.session_options, args.colour, log)?;
    let mut projector = args.projector.clone();
    let model_options = media::reserve(projector.as_mut(), &args.run.model_options, &args.run.session_options, log)?;
    let before = model_options.reserved_bytes;
    let model_options = reserve_draft(args.speculation.as_ref(), model_options, &args.run.session_options)?;
    let beside_draft = |error: anyhow::Error| match model_options.reserved_bytes - before {
        bytes @ 1.. if matches!(error.downcast_ref(), Some(OpenError::Plan(_))) => {
            error.context(format!("beside a draft model that takes {}", units::Bytes(bytes)))
        }
        _ => error,
    };
    let model = open(&args.run.model, args.run.is_demo, &model_options, log, &ctrl_c).map_err(beside_draft)?;
    let has_template = model.info().chat_template.is_some();
    let given = if args.converses(has_template) { None } else { Some(completion::text(args, &Process, log, &ctrl_c)?) };
    // A single prompt goes back to nothing, unless a file keeps its state.
    let goes_back = args.input.cache.is_some() || given.is_none() && !args.chat.single_turn.0;
    let checkpoints = if goes_back { args.run.session_options.checkpoints } else { 0 };
    let session_options = SessionOptions { checkpoints, ..args.run.session_options.clone() };
    let session = ctrl_c.during(|| model.session(&session_options));
    let mut session = session.map_err(|error| beside_draft(error.into()))?;
    if ctrl_c.was_pressed() {
        return Err(Interrupted.into());
    }
    let projector = media::open(&model, projector.as_ref(), log)?;
    describe(&model, &session, args.run.is_demo, &args.run.model_options, log);
    speculate(&mut session, args.speculation.as_ref(), log)?;
    warn_of_training(&model, &args.run.session_options, 1, log);
    warn_of_shift(&session, args.run.session_options.context_shift, log);
    log.line(Level::Debug, format_args!("{args:#?}"));
    ctrl_c.attach(session.interrupt_handle());
    // Drawn once, so that all parts of the sampler chain share the seed and the run can be repeated.
    let seed = drawn_once(args.sampling.seed);
    let sampler = Sampler::new(&model, &SamplingOptions { seed, ..args.sampling.clone() })?;
    let screen = Screen::new(args.colour);
    let mark = || {
        let scales: Vec<f32> = model.adapters().map(|adapter| adapter.scale).collect();
        saved::mark_with(saved::mark(&model, &args.run.model_options, &args.run.session_options), &scales)
    };
    let cache = args.input.cache.as_ref().map(|cache| PromptCache::new(cache, mark()));
    if cache.as_ref().is_some_and(PromptCache::keeps_all) && (given.is_none() || args.chat.interactive.0) {
        anyhow::bail!("--prompt-cache-all keeps a text that is continued, not a conversation; leave it out");
    }
    let mut desk = Desk {
        args,
        model: &model,
        session,
        sampler,
        seed,
        screen,
        log,
        ctrl_c: &ctrl_c,
        failed: false,
        cache,
        projector,
        encoder: None,
    };

    let outcome = match &given {
        Some((prompt, predict)) => completion::run(&mut desk, prompt, *predict),
        None => conversation::run(&mut desk),
    };
    let (end, status) = status(outcome, &mut desk)?;
    let ended = desk.screen.end_line();
    if let Some(cache) = desk.cache.take() {
        cache.finish(&mut desk.session, log)?;
    }
    finish(&desk, &end)?;
    if !ctrl_c.is_ending() {
        ended?;
    }
    Ok(status)
}

/// How a run ended, and its exit status.
fn status(outcome: Result<End>, desk: &mut Desk) -> Result<(End, u8)> {
    Ok(match outcome {
        // Also if the terminal is gone and nothing can be printed.
        _ if desk.ctrl_c.is_ending() => (End::Interrupted, signals::status()),
        Ok(End::Interrupted) => (End::Interrupted, signals::status()),
        Ok(end) if desk.failed && (desk.args.chat.single_turn.0 || !io::stdin().is_terminal()) => (end, FAILED),
        Ok(end) => (end, 0),
        // A reader that closed the pipe still wants the measurements.
        Err(error) if is_closed_pipe(&error) => (End::Interrupted, 0),
        Err(error) if error.is::<Interrupted>() => (End::Interrupted, signals::status()),
        Err(error) => {
            let _ = desk.screen.end_line();
            return Err(error);
        }
    })
}

/// Whether another seed may change the text.
fn leaves_to_chance(options: &SamplingOptions) -> bool {
    let is_greedy = options.temp <= 0.0 && options.dynatemp_range <= 0.0;
    let is_cooled = options.samplers.contains(&SamplerKind::Temperature) || options.mirostat.version != 0;
    !is_greedy || !is_cooled || options.mirostat.version != 0 || options.xtc.probability > 0.0
}

/// The given seed, or a random one.
fn drawn_once(given: u32) -> u32 {
    use std::hash::{BuildHasher, Hasher};
    match given {
        // The system seeds the standard library's hashers.
        SamplingOptions::RANDOM_SEED => {
            std::hash::RandomState::new().build_hasher().finish() as u32 % SamplingOptions::RANDOM_SEED
        }
        given => given,
    }
}

/// Opens a model with a progress bar.
pub fn open(path: &Path, is_demo: bool, options: &ModelOptions, log: &Log, ctrl_c: &CtrlC) -> Result<Model> {
    if is_demo && !log.shows(Level::Info) {
        // Below level Info no start-up line reports it. The demo's text must not pass for another model's.
        log.line(Level::Error, format!("hobbit: {DEMO} {}", path.display()));
    }
    // Check for a missing file first: it is the most common mistake.
    std::fs::metadata(path).with_context(|| format!("{}: cannot open this model", path.display()))?;
    signals::explain_lost_pages(path);
    let options = ModelOptions { low: low_source(path, options, log, ctrl_c)?, ..options.clone() };
    let bar = bar(log, "loading {bar:40} {percent:>3} %");
    let model = ctrl_c.during(|| {
        Model::open_with(path, &options, |done| {
            bar.set_position((done * 1000.0) as u64);
            !ctrl_c.was_pressed()
        })
    });
    bar.finish_and_clear();
    let model = model?;
    for words in advice::idle_flags(model.idle_options()) {
        log.line(Level::Warning, format!("note: {words}"));
    }
    Ok(model)
}

/// The chat templates of the model at `path`, or the given template.
///
/// # Errors
/// A template that cannot be used: the message names it, the reason, and the flag that gives another.
pub fn templates(model: &Model, path: &Path, given: Option<&str>) -> Result<ChatTemplates> {
    ChatTemplates::new(model, given).with_context(|| match given {
        Some(_) => "the template of --chat-template (or --chat-template-file) cannot be used".to_owned(),
        None => format!(
            "{}: the model's chat template cannot be used; --chat-template chatml replaces it, or another name or text",
            path.display()
        ),
    })
}

/// Source of low versions, after creating those that are missing.
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
    let made = made.map_err(|error| match &error {
        OpenError::PackWrite(WriteError::Output(
            PartialError::Create { .. } | PartialError::Space { .. } | PartialError::Write { .. },
        )) => {
            let place =
                directory.map_or_else(|| "beside the model".to_owned(), |place| format!("in {}", place.display()));
            let hint = format!("--low {types}: cannot write {place}; give another directory with --low-dir");
            anyhow::Error::new(error).context(hint)
        }
        _ => error.into(),
    })?;
    Ok(Some(LowSource::File(made)))
}

/// Prepares a run before its model is opened: prints notes on the command line, and installs handlers for llama.cpp's
/// log and for signals.
pub fn begin(notes: &[Note], session: &SessionOptions, colour: bool, log: &Log) -> Result<CtrlC> {
    for note in notes {
        match note {
            Note::NoEffect { .. } => log.line(Level::Warning, format!("note: {note}")),
            Note::Preset(words) => log.line(Level::Info, format!("note: {words}")),
        }
    }
    warn_of_threads(session, log);
    log.take_llama_cpps();
    CtrlC::install(colour)
}

fn warn_of_threads(options: &SessionOptions, log: &Log) {
    let Ok(cpus) = std::thread::available_parallelism() else { return };
    for (flag, threads) in [("-t", options.threads), ("-tb", options.threads_batch)] {
        if let Some(threads) = threads.filter(|&threads| usize::try_from(threads).is_ok_and(|n| n > cpus.get())) {
            let warning = format!("warning: {flag} {threads} is more than the {cpus} logical CPUs: this is slow");
            log.line(Level::Warning, warning);
        }
    }
}

/// Start-up lines: at most three, and with `-v` all facts as JSON. Warnings are always printed.
pub fn describe(model: &Model, session: &Session, is_demo: bool, options: &ModelOptions, log: &Log) {
    let info = model.info();
    let say = |line: &str| log.line(Level::Info, format!("hobbit: {line}"));
    let Description { plan, io_choice, precision, devices, warm_start, idle, .. } = session.description();
    let name = info.path.display();
    let name = if is_demo { format!("{DEMO} {name}") } else { name.to_string() };
    say(&report::model(&name, info, session.context().n_ctx(), options.expects.n_ctx > 0));
    say(&report::memory(plan, io_choice, (*warm_start, session.stats().prompt_width, devices)));
    if let Some(routes) = &options.routes {
        let file = routes.trace.display();
        log.line(
            Level::Info,
            format!("note: tokens follow the routes recorded in {file}, not the routers: the text is meaningless"),
        );
    }
    report::devices_and_precision(devices, precision).iter().for_each(|line| say(line));
    if let (Some(bound), None) = (&precision.loss_bound, &precision.routing) {
        log.line(Level::Info, format!("note: {bound}"));
    }
    for words in advice::idle_flags(idle) {
        log.line(Level::Warning, format!("note: {words}"));
    }
    if let Some(warning) = &plan.warning {
        log.line(Level::Warning, format!("warning: {warning}; {}", advice::for_one_token(warning)));
    }
    log.line(Level::More, plan);
    if log.wants(Level::More) {
        log.line(Level::More, format_args!("hobbit: {}", about(session)));
        log.line(Level::More, hobbit::engine::system_info());
    }
}

/// Reserves the draft model's memory in the model's budget, or loads the layers that draft.
///
/// # Errors
/// A draft model that cannot be read.
pub fn reserve_draft(
    speculation: Option<&SpeculationOptions>,
    options: ModelOptions,
    session: &SessionOptions,
) -> Result<ModelOptions> {
    let draft = speculation.and_then(|drafts| drafts.draft.as_ref());
    let mtp = speculation.is_some_and(|drafts| drafts.sources.contains(&DraftSource::DraftMtp)) && draft.is_none();
    let options = ModelOptions { mtp, ..options };
    let Some(draft) = draft else { return Ok(options) };
    let bytes = hobbit::engine::draft_bytes(draft, session).context("-md")?;
    Ok(ModelOptions { reserved_bytes: options.reserved_bytes.saturating_add(bytes), ..options })
}

/// Makes the session draft tokens, where it can.
pub fn speculate(session: &mut Session, options: Option<&SpeculationOptions>, log: &Log) -> Result<()> {
    let Some(options) = options else { return Ok(()) };
    if let Some(reason) = session.no_speculation() {
        log.line(Level::Warning, format!("warning: --spec-type: {reason}: nothing is drafted"));
        return Ok(());
    }
    Ok(session.speculate(options)?)
}

/// Warns of `--context-shift` where it has no effect.
pub fn warn_of_shift(session: &Session, context_shift: bool, log: &Log) {
    if let Some(reason) = session.sequences().no_shift().filter(|_| context_shift) {
        let line = format!("warning: --context-shift: {}: a full context ends the text", advice::no_shift(reason));
        log.line(Level::Warning, line);
    }
}

/// Warns of a context longer than the model was trained for, unless positions are scaled. `n_parts`: conversations
/// that share the value of -c.
pub fn warn_of_training(model: &Model, options: &SessionOptions, n_parts: u32, log: &Log) {
    let (n_ctx, trained) = (options.n_ctx, model.info().n_ctx_train);
    if trained > 0 && n_ctx > trained && options.rope == RopeOptions::default() {
        let warning = format!(
            "warning: the context holds {n_ctx} tokens, but the model was trained on {trained}: beyond them it may \
             talk nonsense; give -c {} or less, or see --rope-scaling",
            trained * n_parts
        );
        log.line(Level::Warning, warning);
    }
}

/// Current use of devices, which may be lower than at the start.
pub fn devices_now(session: &Session) -> Vec<DeviceReport> {
    let now = session.model().device_reports();
    if now.is_empty() { session.description().devices.clone() } else { now }
}

/// Prints the closing lines and writes the file of `--stats-json`.
fn finish(desk: &Desk, end: &End) -> Result<()> {
    let output = &desk.args.output;
    let (timings, stats) = (desk.session.timings(), desk.session.stats());
    let devices = devices_now(&desk.session);
    if output.closing.perf.0 {
        let log = desk.log;
        let closing = Closing {
            stats: &stats,
            precision: &desk.session.description().precision,
            devices: &devices,
            is_eog: *end == End::Eog,
            seed: leaves_to_chance(&desk.args.sampling).then_some(desk.seed),
            is_seed_drawn: desk.args.sampling.seed == SamplingOptions::RANDOM_SEED,
        };
        for line in report::closing(&closing) {
            log.line(Level::Info, format!("hobbit: {line}"));
        }
        log.text(Level::More, &report::timing_lines(&timings));
    }
    let logs = output.closing.perf.0 && desk.log.wants(Level::More);
    if !logs && output.stats_json.is_none() {
        return Ok(());
    }
    let mut all = measured(&desk.session, &timings, &stats, end);
    all["seed"] = desk.seed.into();
    if logs {
        desk.log.line(Level::More, format_args!("hobbit: {all}"));
    }
    output.stats_json.as_ref().map_or(Ok(()), |path| write_json(path, &all, "statistics"))
}

/// A session's model, memory, devices and settings.
fn about(session: &Session) -> Value {
    let Description { plan, precision, caching, io_choice, .. } = session.description();
    json!({
        "model": session.model().info(),
        "plan": plan,
        "precision": precision,
        "caching": caching,
        "devices": devices_now(session),
        "io": io_choice,
        "n_ubatch": session.context().n_ubatch(),
    })
}

/// The measurements of a session, and how it ended.
pub fn measured(session: &Session, timings: &Timings, stats: &Stats, stop: impl Serialize) -> Value {
    let mut about = about(session);
    about["stop"] = json!(stop);
    report::json(about, timings, stats)
}

/// This process, as settings see it.
pub struct Process;

impl Surroundings for Process {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        std::fs::read(path)
    }

    fn demo_model(&self) -> Result<PathBuf, String> {
        demo::find()
    }

    fn grammar_of_schema(&self, schema: &str) -> Result<String> {
        Ok(hobbit::Sampler::json_schema_to_grammar(schema)?)
    }

    fn has_input(&self) -> bool {
        // A terminal and /dev/null are character devices.
        #[cfg(windows)]
        return hobbit_core::windows::has_piped_input();
        #[cfg(unix)]
        {
            use std::os::fd::AsFd;
            use std::os::unix::fs::FileTypeExt;
            let input = io::stdin().as_fd().try_clone_to_owned();
            let input = input.and_then(|input| std::fs::File::from(input).metadata());
            input.is_ok_and(|input| !input.file_type().is_char_device())
        }
    }

    fn is_typed_in(&self) -> bool {
        io::stdin().is_terminal()
    }

    fn variable(&self, name: &str) -> Option<OsString> {
        std::env::var_os(name)
    }

    fn input(&self) -> io::Result<Vec<u8>> {
        completion::read()
    }

    fn shows_colour(&self) -> bool {
        let refused = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        io::stdout().is_terminal() && !dumb && !refused("NO_COLOR")
    }
}
