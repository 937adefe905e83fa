//! `hobbit-server`: llama-server's and OpenAI's HTTP interface on hobbit's engine.
//!
//! **Two sides.** HTTP ([`http`], [`api`], [`page`]) runs on tokio. A protocol's request becomes a validated one
//! ([`request`]), which the [`backend`] schedules as jobs ([`job`]); the engine's events become answers. The engine
//! thread ([`worker`]) alone owns the session; [`slots`] chooses the
//! sequence for a prompt, [`schedule`] how many prompt tokens are evaluated while others wait for their next token,
//! [`text`] which text of a token may be shown. Both sides read [`status`]. [`saved`] keeps slots in files.
//!
//! **Several models.** [`router`] has none itself: each is served by a process of its own.

mod adapters;
mod api;
mod app;
mod backend;
mod error;
mod held;
mod http;
mod ids;
mod job;
mod json;
mod kept;
mod listen;
mod markdown;
mod origins;
mod page;
mod record;
mod request;
mod router;
mod schedule;
mod settings;
mod slots;
mod status;
mod text;
mod timings;
mod turns;
mod worker;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hobbit::engine::{ChatInputs, ChatTemplates};
use hobbit::options::{FlashAttn, KvType};
use hobbit::{DeviceKind, Interrupt, Model, SessionOptions};
use hobbit_core::files::Kind;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::Pack;
use hobbit_core::store::threads;
use hobbit_core::units::{Bytes, Percent};
use tokio::runtime::Runtime;

use adapters::Adapters;
use app::App;
use backend::Backend;
use hobbit_common::{exit, signals};
use hobbit_programs::args::{self, server::ServerArgs};
use hobbit_programs::argv::{self, Note};
use hobbit_programs::ctrl_c::CtrlC;
use hobbit_programs::log::{Level, Log};
use hobbit_programs::{download, media, memory, run, saved};
use job::{Drafting, Traffic};
use settings::{Resolved, Settings, Source, resolve};
use status::{Status, Totals};
use worker::{Worker, WorkerOptions};

/// Locks a mutex. A thread that panics with the lock leaves the value usable.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Interval between checks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// Interval at which an idle server returns freed memory to the system: large requests leave hundreds of MiB in the
/// allocator.
const TRIM: Duration = Duration::from_secs(5);

/// Runs `hobbit-server` with the arguments of this process.
pub fn main() -> ExitCode {
    hobbit_common::output::prepare_console();
    memory::begin();
    // SAFETY: no thread has been started yet.
    unsafe { hobbit::engine::isolate_chat_templates() };
    exit::code(serve(std::env::args_os().skip(1)))
}

fn serve(words: impl Iterator<Item = OsString>) -> Result<u8> {
    let words: Vec<OsString> = words.collect();
    let parse = |words| args::parse_as::<ServerArgs>(args::server::command(), words);
    let (mut args, mut notes) = args::read(args::server::command, words.clone(), parse)?;
    if args.run.experts.device.list_devices {
        return hobbit_programs::devices::list(&args.run.experts.device.rpc, args.log.verbose.0, None).map(|()| 0);
    }
    let (router, places) = (args.router.clone(), download::places(args.run.model.source.given()));
    args.run.model.model = router.models().cloned().or(args.run.model.model);
    if router.models().is_none() && router.sleep_idle_seconds >= 0 {
        let why = "the model stays loaded without --models-dir";
        notes.push(Note::NoEffect { flag: "--sleep-idle-seconds".to_owned(), why });
    }
    download::into(&mut args.run.model, args::verbosity(&args.closing, &args.log))?;
    let Resolved { settings, source, verbosity, log_file } = resolve(args, &run::Process)?;
    if router.models().is_none() {
        settings::check_model(&source.file)?;
        let written = [("--log-file", &log_file, Kind::Log)];
        hobbit_programs::resolve::check_outputs(&source.model_options, &source.file, &written, &[])?;
    }
    let log = Log::new(verbosity, log_file.as_deref())?.in_json(settings.http.log_format == "json");
    if router.models().is_some() {
        let words = argv::normalise(words, &args::grammar(&args::server::command()))?.words;
        let given =
            router::Given { args: router, words, places: places?, budget: source.model_options.budget, verbosity };
        return log.end(router::serve(given, settings, &source.session_options, &notes, &log));
    }
    log.end(answer(settings, &source, &notes, &log))
}

/// Listens, opens the model, and answers until a signal arrives.
fn answer(settings: Settings, source: &Source, notes: &[Note], log: &Log) -> Result<u8> {
    let ctrl_c = run::begin(notes, &source.session_options, false, log)?;
    let app = Arc::new(App::new(settings, ids::now()));
    let runtime = runtime(app.settings.http.threads_http)?;
    let listening = runtime.block_on(listen::listen(&app, listen::routes(&app), 1, log))?;
    let (worker, interrupt) = match load(&app, source, &ctrl_c, log) {
        Ok(loaded) => loaded,
        Err(error) => {
            listening.stop(Duration::ZERO);
            return Err(error);
        }
    };
    let backend = app.backend.get().expect("it was just loaded");
    let (addresses, slots) = (listening.addresses.join(", "), slots_line(&app.settings, backend));
    log.line(Level::Info, format!("hobbit: ready; {addresses}, {slots}"));
    let mut trimmed = Instant::now();
    while !signals::came() && !worker.is_finished() {
        memory::obey(&backend.model, log);
        if trimmed.elapsed() >= TRIM && !backend.status.is_processing() {
            hobbit::engine::trim_heap();
            trimmed = Instant::now();
        }
        std::thread::sleep(LOOK);
    }
    ctrl_c.obey();
    let grace = app.settings.http.shutdown_grace;
    log.line(Level::Info, "hobbit: ending");
    backend.stop(grace);
    listening.stop(grace + Duration::from_secs(1));
    let end = Instant::now() + grace + LOOK;
    while !worker.is_finished() {
        // An evaluation that runs past the deadline is interrupted.
        if Instant::now() >= end {
            interrupt.set();
        }
        std::thread::sleep(LOOK);
    }
    let panicked = worker.join().is_err();
    runtime.block_on(listening.ended());
    log.line(Level::Info, format!("hobbit: {}", closing_line(&backend.status.get().totals)));
    // All connections have ended: the model is closed, which writes its state files.
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(app);
    anyhow::ensure!(!panicked, "the engine's thread ended with a fault; see its message above");
    Ok(0)
}

/// The threads for HTTP.
fn runtime(n_threads: usize) -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let built =
        builder.worker_threads(n_threads).thread_name("http").on_thread_start(threads::register).enable_all().build();
    built.context("cannot start the threads for HTTP")
}

/// Opens the model and starts the engine's thread. Its evaluation can be interrupted.
fn load(app: &Arc<App>, source: &Source, ctrl_c: &CtrlC, log: &Log) -> Result<(JoinHandle<()>, Interrupt)> {
    let settings = &app.settings;
    let Source { file, is_demo, speculation, session_options, .. } = source;
    let mut projector = source.projector.clone();
    let model_options = media::reserve(projector.as_mut(), &source.model_options, session_options, log)?;
    let mut model_options = run::reserve_draft(speculation.as_ref(), model_options, session_options)?;
    // The memory of the session is planned before the model is opened. Packs are planned with fused attention.
    if let Ok(gguf) = Gguf::open(file)
        && !Pack::is_pack(&gguf)
    {
        model_options.expects = attending(&gguf, &model_options.device.rpc, &model_options.expects, None);
    }
    let model_options = &model_options;
    let model: Model = run::open(file, *is_demo, model_options, log, ctrl_c)?;
    let session_options = &attending(model.gguf(), &model_options.device.rpc, session_options, Some(log));
    let mut session = ctrl_c.during(|| model.session(session_options))?;
    if ctrl_c.was_pressed() {
        return Err(signals::Interrupted.into());
    }
    let projector = media::open(&model, projector.as_ref(), log)?;
    run::describe(&model, &session, *is_demo, model_options, log);
    if *is_demo && model_options.expert_cache == settings::DEMO_CACHE {
        log.line(Level::Info, "note: the demo reads experts while it answers: see it work on the server's page");
    }
    run::speculate(&mut session, speculation.as_ref(), log)?;
    let drafting = Drafting::new(speculation.as_ref().filter(|_| session.no_speculation().is_none()));
    run::warn_of_shift(&session, settings.context.context_shift.0, log);
    let templates = templates(&model, file, settings, log)?;
    let context = session.context();
    let (n_ctx_all, n_batch, pooling) = (context.n_ctx() as usize, context.n_batch(), context.pooling());
    let n_slots = settings.n_slots;
    let n_ctx = if settings.shares_context { n_ctx_all } else { n_ctx_all / n_slots };
    let given = SessionOptions { n_ctx: session_options.n_ctx.min(n_ctx as u32), ..session_options.clone() };
    run::warn_of_training(&model, &given, (n_ctx_all / n_ctx.max(1)) as u32, log);
    let options = WorkerOptions {
        n_slots,
        n_ctx,
        // Positions of an image cannot be moved one by one.
        context_shift: settings.context.context_shift.0 && projector.is_none(),
        similarity: settings.slots.slot_prompt_similarity,
        stall_limit: settings.slots.stall_limit,
        n_waiting_max: settings.slots.max_waiting as usize,
        // The context's own values, which llama.cpp may have changed.
        n_batch: n_batch.min(session_options.n_batch as usize),
        has_fused_attention: session_options.flash_attn != FlashAttn::Off,
        n_outputs: session_options.n_outputs_max as usize,
        mark: saved::mark(&model, model_options, session_options),
    };
    let interrupt = session.interrupt_handle();
    let status = Arc::new(Status::default());
    let (commands, incoming) = crossbeam_channel::unbounded();
    let worker = Worker::new(session, projector.clone(), options, Arc::clone(&status));
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || worker.run(&incoming))?;
    let backend = Backend {
        name: settings.http.alias.first().cloned().unwrap_or_default(),
        adapters: Adapters::of(&model, !settings.slots.lora_init_without_apply.0),
        model,
        commands,
        status,
        n_slots,
        n_ctx,
        n_batch,
        pooling,
        drafting,
        templates,
        projector: projector.map(|opened| (opened, format!("<__media_{}__>", ids::random_id()))),
    };
    assert!(app.backend.set(Arc::new(backend)).is_ok(), "a model is loaded once");
    Ok((thread, interrupt))
}

/// Entry points of fuzz targets.
#[cfg(fuzzing)]
pub mod fuzzed {
    use serde_json::Value;

    use super::api::{anthropic, responses};
    use super::request::chat::fields;
    use hobbit_programs::reasoning::Reasoning;

    /// Reads the body of a chat request in OpenAI's and Anthropic's forms: the conversation that the template is given.
    pub fn body(bytes: &[u8]) {
        let Ok(Value::Object(body)) = serde_json::from_slice(bytes) else { return };
        let reasoning = Reasoning::default();
        for jinja in [true, false] {
            let defaults = fields::Defaults {
                reasoning: &reasoning,
                jinja,
                prefills_assistant: true,
                template_reasons: true,
                calls_in_parallel: true,
                marker: jinja.then_some("<__media__>"),
            };
            let other = [anthropic::request::to_openai(&body), responses::request::to_chat(body.clone(), Vec::new())];
            for body in other.into_iter().flatten().chain([body.clone()]) {
                let _ = fields::read(body, &defaults);
            }
        }
    }
}

/// The model's chat templates, or the given one. A template that refuses a single message may still work for others.
///
/// # Errors
/// As [`run::templates`]; without Jinja, a template that llama.cpp does not know.
fn templates(model: &Model, file: &Path, settings: &Settings, log: &Log) -> Result<ChatTemplates> {
    let templates = run::templates(model, file, settings.chat.template.chat_template.as_deref())?;
    let trial = ChatInputs {
        messages: r#"[{"role": "user", "content": "Hi"}]"#.to_owned(),
        use_jinja: settings.chat.template.jinja.0,
        ..ChatInputs::default()
    };
    match templates.apply(&trial) {
        Err(error) if !settings.chat.template.jinja.0 => {
            return Err(error).context("--no-jinja: llama.cpp does not know this chat template by itself");
        }
        Err(error) => {
            log.line(Level::Warning, format!("warning: the chat template fails on a single message: {error}"))
        }
        Ok(_) if !templates.was_explicit() => {
            log.line(
                Level::Info,
                "note: the model has no chat template: chats are written as chatml; see --chat-template",
            );
        }
        Ok(_) => {}
    }
    let lacks = |name: &str| templates.capabilities().get(name) == Some(&false);
    for (is_so, lack) in [
        (
            lacks(ChatTemplates::ARGUMENT_SCHEMAS),
            "the arguments of calls may break the schemas of their tools: check them",
        ),
        (lacks(ChatTemplates::CONTENT_WITH_CALLS), "an assistant's message that has calls loses its text"),
        (
            lacks("supports_tool_calls") && !lacks("supports_tools"),
            "an assistant's message loses its calls: the model sees their results alone",
        ),
    ] {
        if is_so && settings.chat.template.jinja.0 {
            log.line(Level::Info, format!("note: with this chat template {lack}"));
        }
    }
    Ok(templates)
}

/// Tokens of a slot that are enough for coding agents: Claude Code begins with 88,000, codex with 7,000.
const AGENT_TOKENS: usize = 88 << 10;

/// The number of slots and their context, with advice if it is short and the user did not choose it.
fn slots_line(settings: &Settings, backend: &Backend) -> String {
    let (n_slots, n_ctx) = (settings.n_slots, backend.n_ctx);
    let s = if n_slots == 1 { "" } else { "s" };
    let enough = AGENT_TOKENS.min(backend.model.info().n_ctx_train as usize);
    let mut line = format!("{n_slots} slot{s} of at most {n_ctx} tokens");
    if settings.context.ctx_size == 0 && n_ctx < enough {
        line +=
            &format!("; coding agents need 7,000 to 88,000: give -c {enough} -np 1, which takes memory from experts");
    }
    line
}

/// The last log line: totals of the run.
fn closing_line(totals: &Totals) -> String {
    let Totals { requests, prompt_tokens, cached_tokens, predicted_tokens, traffic, .. } = *totals;
    let Traffic { hits, misses, bytes_read, .. } = traffic;
    let s = if requests == 1 { "" } else { "s" };
    let all = prompt_tokens + cached_tokens;
    let mut line =
        format!("{requests} request{s}: {all} prompt tokens ({cached_tokens} cached), {predicted_tokens} generated");
    if hits + misses > 0.0 {
        let per_token = Bytes((bytes_read / predicted_tokens.max(1) as f64) as u64);
        line += &format!("; hit rate {}, {per_token} read per generated token", Percent(hits / (hits + misses)));
    }
    line
}

/// Maximum bytes of scores that plain attention may use to keep texts independent of each other.
const SCORES_BYTES_MAX: u64 = 256 << 20;

/// The same options with plain attention, if the user chose none, there are several slots, and the scores are small:
/// the CPU's fused attention sums in another order for one row than for several, and for many rows depending on how
/// much all slots hold.
fn attending(gguf: &Gguf, rpc: &[String], options: &SessionOptions, log: Option<&Log>) -> SessionOptions {
    let has_no_devices = hobbit::devices(rpc)
        .is_ok_and(|found| found.iter().all(|device| matches!(device.kind, DeviceKind::Cpu | DeviceKind::Accelerator)));
    let number = |key: &str| gguf.metadata.get_u64(&format!("{}.{key}", gguf.architecture()));
    let n_head = number("attention.head_count").unwrap_or(u64::MAX);
    let n_ctx = if options.n_ctx == 0 { number("context_length").unwrap_or(0) } else { options.n_ctx.into() };
    let scores = [n_head, n_ctx, options.n_ubatch.into(), 4].into_iter().fold(1, u64::saturating_mul);
    let is_plain = |kind| matches!(kind, KvType::F32 | KvType::F16 | KvType::Bf16);
    let may = options.flash_attn == FlashAttn::Auto && is_plain(options.type_v) && has_no_devices;
    if !may || options.n_seq_max == 1 {
        return options.clone();
    }
    if scores > SCORES_BYTES_MAX {
        let line = format!(
            "note: concurrent requests may slightly change each other's output; -fa off prevents it ({})",
            Bytes(scores)
        );
        if let Some(log) = log {
            log.line(Level::Info, &line);
        }
        return options.clone();
    }
    SessionOptions { flash_attn: FlashAttn::Off, ..options.clone() }
}
