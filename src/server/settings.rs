//! Settings of the server, complete and checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hobbit::options::{ModelOptions, SamplingOptions, SessionOptions};

use super::http::guard::{Cors, Hosts};
use super::http::memory;
use crate::args::server::ServerArgs;
use crate::reasoning::Reasoning;
use crate::resolve::{self, Surroundings, Verbosity};

/// Default number of slots.
const SLOTS: u32 = 4;

/// Settings that apply to all requests.
#[derive(Clone, Debug)]
pub struct Settings {
    pub hosts: Vec<String>,
    pub port: u16,
    /// Sorted.
    pub aliases: Vec<String>,
    pub tags: Vec<String>,
    pub api_keys: Vec<String>,
    pub hosts_allowed: Hosts,
    pub cors: Cors,
    /// Private key and certificate.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Time limit for the arrival of a request's body.
    pub timeout: Duration,
    pub max_body: usize,
    pub ping: Option<Duration>,
    pub has_page: bool,
    pub has_metrics: bool,
    pub has_slots: bool,
    pub has_props: bool,
    pub shutdown_grace: Duration,
    pub n_slots: usize,
    pub n_waiting_max: usize,
    /// Any slot may use the whole context.
    pub shares_context: bool,
    pub stall_limit: Duration,
    pub cache_prompt: bool,
    pub cache_reuse: usize,
    pub similarity: f32,
    pub slot_save_path: Option<PathBuf>,
    pub n_predict: Option<usize>,
    pub embeds: bool,
    pub spm_infill: bool,
    pub shows_special: bool,
    pub template: Option<String>,
    pub jinja: bool,
    pub prefills_assistant: bool,
    pub n_keep: i32,
    pub context_shift: bool,
    pub sampling: SamplingOptions,
    /// Default reasoning for requests that do not choose.
    pub reasoning: Reasoning,
    pub model: PathBuf,
    pub is_demo: bool,
    pub verbose: bool,
    /// Apply LoRA adapters from the start.
    pub applies_adapters: bool,
}

/// Everything that a run of the server needs.
pub struct Resolved {
    pub settings: Settings,
    pub model_options: ModelOptions,
    pub session_options: SessionOptions,
    pub verbosity: Verbosity,
    pub log_file: Option<PathBuf>,
}

/// Builds the settings from the command line.
pub fn resolve(args: ServerArgs, around: &dyn Surroundings) -> Result<Resolved> {
    let ServerArgs { model, experts, http, slots, chat, reasoning, context, rope, sampling, closing, log } = args;
    let (path, is_demo) = resolve::model(&model, around)?;
    let template = match (&chat.template.chat_template, &chat.template.chat_template_file) {
        (Some(template), _) => Some(template.clone()),
        (None, Some(file)) => {
            let bytes = resolve::read(file, around)?;
            Some(resolve::utf8(&bytes, file)?.to_owned())
        }
        (None, None) => None,
    };
    let mut api_keys: Vec<String> = http.api_key.into_iter().filter(|key| !key.is_empty()).collect();
    if let Some(file) = &http.api_key_file {
        let bytes = resolve::read(file, around)?;
        let lines = resolve::utf8(&bytes, file)?.lines().map(str::trim);
        let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        api_keys.extend(keys.map(str::to_owned));
        if api_keys.is_empty() {
            bail!("{}: no key in this file; leave --api-key-file out to let everybody ask", file.display());
        }
    }
    if let Some(directory) = &slots.slot_save_path {
        let is_directory = std::fs::metadata(directory).is_ok_and(|found| found.is_dir());
        if !is_directory {
            bail!("--slot-save-path {}: there is no such directory", directory.display());
        }
    }
    let mut aliases = http.alias;
    aliases.retain(|alias| !alias.trim().is_empty());
    aliases.sort();
    aliases.dedup();
    if aliases.is_empty() {
        aliases.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    let n_slots = slots.parallel.unwrap_or(SLOTS);
    let embeds = slots.embeddings.0;
    let base = resolve::session(&context, &rope, false);
    let n_ubatch = base.n_ubatch;
    let session_options = SessionOptions {
        n_seq_max: n_slots,
        n_outputs_max: if embeds { 0 } else { n_slots },
        // Any set of generating slots is computed in one batch.
        kv_unified: true,
        embeddings: embeds,
        pooling: slots.pooling,
        // Pooling needs all tokens of a text in one evaluation.
        n_batch: if embeds { n_ubatch } else { base.n_batch },
        context_shift: false,
        ..base
    };
    let shifts = context.context_shift.0;
    let model_options = resolve::of_model(&model, resolve::experts(experts, &path, session_options.clone())?);
    let model_options = ModelOptions { reserved_bytes: memory::reserved(http.max_body), ..model_options };
    let schema = resolve::json_schema(&sampling, around)?;
    let hosts_allowed = if api_keys.is_empty() && !http.allowed_hosts.iter().any(|name| name == "*") {
        Hosts::Local(http.allowed_hosts.iter().chain(&http.host).map(|name| host_name(name)).collect())
    } else {
        Hosts::Any
    };
    let settings = Settings {
        hosts_allowed,
        hosts: http.host,
        port: http.port,
        aliases,
        tags: http.tags,
        api_keys,
        cors: cors(http.cors_origins.as_deref()),
        tls: http.ssl_key_file.zip(http.ssl_cert_file),
        timeout: Duration::from_secs(http.timeout),
        max_body: http.max_body,
        ping: u64::try_from(http.sse_ping_interval).ok().filter(|n| *n > 0).map(Duration::from_secs),
        has_page: http.ui.0,
        has_metrics: http.endpoint_metrics.0,
        has_slots: http.endpoint_slots.0,
        has_props: http.endpoint_props.0,
        shutdown_grace: http.shutdown_grace,
        n_slots: n_slots as usize,
        n_waiting_max: slots.max_waiting as usize,
        applies_adapters: !slots.lora_init_without_apply.0,
        shares_context: slots.kv_unified.0 || slots.parallel.is_none(),
        stall_limit: slots.stall_limit,
        cache_prompt: slots.cache_prompt.0,
        cache_reuse: slots.cache_reuse,
        similarity: slots.slot_prompt_similarity,
        slot_save_path: slots.slot_save_path,
        n_predict: usize::try_from(slots.predict).ok(),
        embeds,
        spm_infill: slots.spm_infill.0,
        shows_special: slots.special.0,
        template,
        jinja: chat.template.jinja.0,
        prefills_assistant: chat.prefill_assistant.0,
        n_keep: context.keep,
        context_shift: shifts,
        sampling: resolve::sampling(sampling, schema.as_ref(), true, around).context("sampling")?,
        reasoning: Reasoning::new(reasoning),
        is_demo,
        model: path,
        verbose: log.verbose.0,
    };
    let verbosity = resolve::verbosity(&closing, &log);
    Ok(Resolved { settings, model_options, session_options, verbosity, log_file: log.log_file })
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
