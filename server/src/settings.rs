//! Settings of the server, complete and checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hobbit::Budget;
use hobbit::options::{ModelOptions, ProjectorOptions, SamplingOptions, SessionOptions, SpeculationOptions};

use hobbit_core::plan::ExpertCache;

use super::held;
use super::origins::{Cors, Hosts};
use hobbit_programs::args::server::{HttpArgs, ServedChatArgs, ServerArgs, SlotArgs};
use hobbit_programs::args::{ContextArgs, RunArgs};
use hobbit_programs::args::{Verbosity, verbosity};
use hobbit_programs::reasoning::Reasoning;
use hobbit_programs::resolve::{self, Run};
use hobbit_programs::surroundings::{Surroundings, file as text_of};

/// Default number of slots.
const SLOTS: u32 = 4;

/// Room for the demo's experts, so that the page has reads to show.
pub const DEMO_CACHE: ExpertCache = ExpertCache::Percent(50.0);

/// The demo has learned texts, not chats: it continues what was written.
const DEMO_TEMPLATE: &str = "{% for message in messages %}{{ message.content }}\n{% endfor %}";

/// Most tokens of an answer of the demo: a conversation of several turns fits in its context of 512.
const DEMO_PREDICT: i32 = 96;

/// Tokens of prompts whose probabilities are computed at once. Each takes as many numbers as the vocabulary has tokens,
/// in llama.cpp's compute buffer and in its buffer of logits. Not less than [`hobbit_core::route::DECODE_TOKENS_MAX`].
const SCORED_AT_ONCE: u32 = 32;

/// Settings that apply to all requests: flags, and what is made of them.
#[derive(Debug)]
pub struct Settings {
    /// The names of the model are sorted, and the keys include those of the file.
    pub http: HttpArgs,
    pub slots: SlotArgs,
    /// A template's file was read.
    pub chat: ServedChatArgs,
    pub context: ContextArgs,
    pub hosts_allowed: Hosts,
    pub cors: Cors,
    pub ping: Option<Duration>,
    pub n_slots: usize,
    /// Any slot may use the whole context.
    pub shares_context: bool,
    pub sampling: SamplingOptions,
    /// Default reasoning for requests that do not choose.
    pub reasoning: Reasoning,
    pub verbose: bool,
}

/// The model to load, and how.
pub struct Source {
    pub file: PathBuf,
    pub is_demo: bool,
    /// The encoder of images and sound.
    pub projector: Option<ProjectorOptions>,
    pub speculation: Option<SpeculationOptions>,
    pub model_options: ModelOptions,
    pub session_options: SessionOptions,
}

/// Everything that a run of the server needs.
pub struct Resolved {
    pub settings: Settings,
    pub source: Source,
    pub verbosity: Verbosity,
    pub log_file: Option<PathBuf>,
}

/// Builds the settings from the command line.
pub fn resolve(args: ServerArgs, around: &dyn Surroundings) -> Result<Resolved> {
    let ServerArgs {
        mut run,
        router: _,
        mut http,
        mut slots,
        media,
        mut chat,
        reasoning,
        sampling,
        speculation,
        closing,
        log,
    } = args;
    let is_demo = run.model.model.is_none();
    chat.template.read_file(around)?;
    if is_demo {
        set_demo_defaults(&mut run, &mut slots, &mut chat);
    }
    read_keys(&mut http, around)?;
    if let Some(directory) = &slots.slot_save_path {
        let is_directory = std::fs::metadata(directory).is_ok_and(|found| found.is_dir());
        if !is_directory {
            bail!("--slot-save-path {}: there is no such directory", directory.display());
        }
    }
    let n_slots = slots.parallel.unwrap_or(SLOTS);
    let embeds = slots.embeddings.0;
    let speculation = speculation.options();
    if embeds && speculation.is_some() {
        bail!("--spec-type: a server with --embeddings generates no text");
    }
    // A step has the logits of every slot's token and of drafts, and prompts may want probabilities of their tokens.
    let n_outputs = n_slots.max(SCORED_AT_ONCE);
    let Run { model, mut model_options, session_options, .. } = Run::new(&run, around, |session| {
        session.n_seq_max = n_slots;
        speculation.iter().for_each(|drafts| drafts.prepare(session));
        session.n_outputs_max = if embeds { 0 } else { n_outputs };
        // Any set of generating slots is computed in one batch.
        session.kv_unified = true;
        session.embeddings = embeds;
        session.pooling = slots.pooling;
        // Pooling needs all tokens of a text in one evaluation.
        if embeds {
            (session.n_batch, session.n_ubatch_max) = (session.n_ubatch, 0);
        }
        session.context_shift = false;
    })?;
    model_options.cache_state_dir = run.experts.caching.cache_state.directory(|name| around.variable(name));
    model_options.reserved_bytes = held::reserved(http.max_body);
    let aliases = &mut http.alias;
    aliases.retain(|alias| !alias.trim().is_empty());
    aliases.sort();
    aliases.dedup();
    if aliases.is_empty() {
        aliases.push(model.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    let schema = resolve::json_schema(&sampling, around)?;
    let settings = Settings {
        hosts_allowed: hosts_allowed(&http),
        cors: cors(http.cors_origins.as_deref()),
        ping: u64::try_from(http.sse_ping_interval).ok().filter(|n| *n > 0).map(Duration::from_secs),
        n_slots: n_slots as usize,
        shares_context: slots.kv_unified.0 || slots.parallel.is_none(),
        sampling: resolve::sampling(sampling, schema.as_ref(), true, around).context("sampling")?,
        reasoning: Reasoning::new(reasoning),
        verbose: log.verbose.0,
        http,
        slots,
        chat,
        context: run.context,
    };
    let verbosity = verbosity(&closing, &log);
    let projector = media.options(&session_options);
    let source = Source { file: model, is_demo, projector, speculation, model_options, session_options };
    Ok(Resolved { settings, source, verbosity, log_file: log.log_file })
}

/// The demo's own values for flags that were not given.
fn set_demo_defaults(run: &mut RunArgs, slots: &mut SlotArgs, chat: &mut ServedChatArgs) {
    let memory = &mut run.experts.memory;
    if (memory.mem_budget, memory.expert_cache) == (Budget::Auto, ExpertCache::Auto) {
        memory.expert_cache = DEMO_CACHE;
    }
    slots.predict.get_or_insert(DEMO_PREDICT);
    if chat.template.jinja.0 {
        chat.template.chat_template.get_or_insert_with(|| DEMO_TEMPLATE.to_owned());
    }
}

/// Adds the keys of `--api-key-file` to those of `--api-key`.
fn read_keys(http: &mut HttpArgs, around: &dyn Surroundings) -> Result<()> {
    http.api_key.retain(|key| !key.is_empty());
    let Some(file) = &http.api_key_file else { return Ok(()) };
    let text = text_of(file, around)?;
    let keys = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    http.api_key.extend(keys.map(str::to_owned));
    if http.api_key.is_empty() {
        bail!("{}: no key in this file; without --api-key-file, no key is needed", file.display());
    }
    Ok(())
}

/// Without a key, requests must name this machine: a page from elsewhere could reach the server by a name of its own.
fn hosts_allowed(http: &HttpArgs) -> Hosts {
    if !http.api_key.is_empty() || http.allowed_hosts.iter().any(|name| name == "*") {
        return Hosts::Any;
    }
    Hosts::Local(http.allowed_hosts.iter().chain(&http.host).map(|name| host_name(name)).collect())
}

/// The host name in `NAME`, `NAME:PORT` or `NAME.`.
fn host_name(given: &str) -> String {
    let given = given.trim();
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = match given.split_once(':') {
        Some((name, port)) if is_port(port) => name,
        _ => given,
    };
    name.strip_suffix('.').unwrap_or(name).to_owned()
}

fn cors(origins: Option<&str>) -> Cors {
    match origins.map(str::trim) {
        None | Some("") => Cors::Off,
        Some("*") => Cors::Any,
        Some("localhost") => Cors::Localhost,
        Some(list) => Cors::Origins(list.split(',').map(|origin| origin.trim().to_owned()).collect()),
    }
}

/// Checks that the model file exists: the most common mistake is reported first.
pub fn check_model(path: &Path) -> Result<()> {
    std::fs::metadata(path).map(drop).with_context(|| format!("{}: cannot open this model", path.display()))
}
