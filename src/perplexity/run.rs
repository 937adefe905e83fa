//! `hobbit-perplexity`, from arguments to exit status.

use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::args::{self, HiArgs, LowArgs, Measure};
use super::{format, measure};
use crate::args::{parse_as, read, verbosity};
use crate::argv::Note;
use crate::devices;
use crate::download;
use crate::exit;
use crate::log::{Level, Log};
use crate::memory;
use crate::output::write_json;
use crate::progress::TokenBar;
use crate::report::{self, Closing};
use crate::run::{Process, begin, describe, devices_now, measured, open};
use crate::signals::{self, Interrupted};
use hobbit::{EvalError, Model, Session, SessionOptions};
use hobbit_core::perplexity::chunking::Chunking;

/// State shared by all measurements.
pub struct Desk<'a> {
    pub args: &'a HiArgs,
    pub log: &'a Log,
}

/// A prepared measurement, its input read and checked: the windows that the context must hold, and what measures; the
/// results are JSON.
pub type Measurement<'a> = (Chunking, Box<dyn FnOnce(&mut Session) -> Result<Value> + 'a>);

impl Desk<'_> {
    /// The evaluation of `n_chunk` chunks of `n_ctx` tokens: several whole chunks together if they fit in a batch.
    pub fn windows(&self, n_ctx: usize, n_chunk: usize) -> Chunking {
        let options = &self.args.run.session_options;
        let given = options.n_batch as usize;
        let n_batch = if given < n_ctx { given } else { given - given % n_ctx };
        Chunking {
            n_ctx,
            n_batch,
            n_ubatch: (options.n_ubatch as usize).min(n_batch),
            n_chunk: n_chunk.min(self.args.n_chunk_max.unwrap_or(usize::MAX)),
        }
    }

    /// Prints results.
    pub fn print(&self, text: &str) -> Result<()> {
        let mut out = io::stdout().lock();
        Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?)
    }

    /// Logs the start of a measurement.
    pub fn log_windows(&self, what: &str, windows: &Chunking) {
        let Chunking { n_ctx, n_batch, n_chunk, .. } = windows;
        let n_seq = windows.n_seq();
        let line = format!("{what} over {n_chunk} chunks, n_ctx={n_ctx}, batch_size={n_batch}, n_seq={n_seq}");
        self.log.line(Level::Info, line);
    }

    /// A progress bar for the chunks of a pass. It is drawn behind the values of earlier chunks on the same line.
    pub fn bar(&self, session: &Session, windows: &Chunking, chunks: &Range<usize>) -> Option<TokenBar> {
        let model = session.model().clone();
        let share = move || model.evaluated_share();
        let is_mid_line = chunks.start > 0 && !self.args.in_lines;
        TokenBar::new("evaluating", chunks.len() * windows.n_ctx, windows.n_ubatch, is_mid_line, share, self.log)
    }

    /// Prints the estimated duration after the first pass. llama.cpp prints one half of this line to each stream.
    pub fn print_eta(&self, who: &str, pass: Duration, windows: &Chunking) -> Result<()> {
        let seconds = pass.as_secs_f64();
        self.log.text(Level::Info, &format!("{who}: {seconds:.2} seconds per pass - ETA "));
        self.print(&format::eta(seconds * windows.n_chunk as f64 / windows.n_seq() as f64))
    }
}

/// Runs `hobbit-perplexity` with the arguments of this process.
pub fn main() -> ExitCode {
    hobbit_common::output::prepare_console();
    memory::few_arenas();
    exit::code(run(std::env::args_os().skip(1)))
}

fn run(words: impl Iterator<Item = OsString>) -> Result<u8> {
    let (mut low, notes) = read(args::command, words.collect(), |words| parse_as::<LowArgs>(args::command(), words))?;
    if low.run.experts.device.list_devices {
        let json = low.output.json.as_deref().map(|path| ("--json", path));
        return devices::list(&low.run.experts.device.rpc, low.output.log.verbose.0, json).map(|()| 0);
    }
    let verbosity = verbosity(&low.output.closing, &low.output.log);
    download::into(&mut low.run.model, verbosity)?;
    let args = HiArgs::new(low, &Process)?;
    args.check_outputs()?;
    let log = Log::new(verbosity, args.output.log.log_file.as_deref())?;
    log.end(evaluate(&args, &notes, &log))
}

/// Opens the model and measures; returns the exit status.
fn evaluate(args: &HiArgs, notes: &[Note], log: &Log) -> Result<u8> {
    let ctrl_c = begin(notes, &args.run.session_options, false, log)?;
    let model = open(&args.run.model, args.run.is_demo, &args.run.model_options, log, &ctrl_c)?;
    let desk = Desk { args, log };
    let (windows, measure) = match &args.measure {
        Measure::Perplexity(base) => measure::perplexity(&desk, &model, base.as_deref())?,
        Measure::Divergence(base) => measure::divergence(&desk, &model, base)?,
    };
    let options = session_options(&args.run.session_options, &windows);
    warn_of_training(&model, windows.n_ctx, log);
    let mut session = ctrl_c.during(|| model.session(&options))?;
    if ctrl_c.was_pressed() {
        return Err(Interrupted.into());
    }
    describe(&model, &session, args.run.is_demo, &args.run.model_options, log);
    log.line(Level::Debug, format_args!("{args:#?}"));
    ctrl_c.attach(session.interrupt_handle());
    let outcome = ctrl_c.during(|| measure(&mut session));
    let (result, status) = match outcome {
        Ok(result) => (result, 0),
        Err(error) if matches!(error.downcast_ref(), Some(EvalError::Interrupted)) => {
            desk.print("\n")?;
            (Value::Null, signals::status())
        }
        Err(error) => return Err(error),
    };
    finish(&desk, &session, &options, result, status)?;
    Ok(status)
}

fn session_options(given: &SessionOptions, windows: &Chunking) -> SessionOptions {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    SessionOptions {
        n_ctx: number(windows.n_ctx.saturating_mul(windows.n_seq())),
        n_batch: number(windows.n_batch),
        n_ubatch: given.n_ubatch.min(number(windows.n_batch)),
        n_seq_max: number(windows.n_seq()),
        ..given.clone()
    }
}

fn warn_of_training(model: &Model, n_ctx: usize, log: &Log) {
    let trained = model.info().n_ctx_train;
    if n_ctx > trained as usize {
        let warning = format!("perplexity: model was trained on only {trained} context tokens ({n_ctx} specified)");
        log.line(Level::Warning, format!("warning: {warning}"));
    }
}

/// The closing lines, and the file of `--json`.
fn finish(desk: &Desk, session: &Session, options: &SessionOptions, result: Value, status: u8) -> Result<()> {
    let (timings, stats) = (session.timings(), session.stats());
    let devices = devices_now(session);
    desk.print("\n")?;
    if desk.args.output.closing.perf.0 && desk.log.shows(Level::Info) {
        // Nothing was sampled.
        let timings = report::timing_lines(&timings);
        let lines = timings.lines().filter(|line| !line.starts_with("llama_perf_sampler"));
        lines.for_each(|line| desk.log.line(Level::Info, line));
        let precision = &session.description().precision;
        let closing =
            Closing { stats: &stats, precision, devices: &devices, is_eog: false, seed: None, is_seed_drawn: false };
        for line in report::closing(&closing) {
            desk.log.line(Level::Info, format!("hobbit: {line}"));
        }
        if let Some(line) = format::experts_used(&stats) {
            desk.log.line(Level::Info, line);
        }
    }
    let Some(path) = &desk.args.output.json else { return Ok(()) };
    let mut all = measured(session, &timings, &stats, if status == 0 { "end" } else { "interrupted" });
    all["measure"] = json!(match &desk.args.measure {
        Measure::Perplexity(_) => "perplexity",
        Measure::Divergence(_) => "kl-divergence",
    });
    all["text"] = json!(desk.args.text.as_ref().map(|(name, _)| name.display().to_string()));
    all["n_ctx"] = json!(options.n_ctx);
    all["n_batch"] = json!(options.n_batch);
    all["n_ubatch"] = json!(options.n_ubatch);
    all["n_seq"] = json!(options.n_seq_max);
    all["result"] = result;
    write_json(path, &all, "results")
}
