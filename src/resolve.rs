//! From flags to settings: reads files, processes escapes, converts schemas, finds the model.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::advice;
use super::args::{
    ChatArgs, ContextArgs, ExpertArgs, LowArgs, OutputArgs, PromptArgs, RopeArgs, RunArgs, SamplingArgs, TextArgs,
    bounded,
};
use super::argv::{Switch, Tri};
use super::demo;
use super::reasoning::Reasoning;
use super::surroundings::{Surroundings, file, read, unmarked};
use super::text::unescape;
use hobbit::options::{
    DryOptions, MirostatOptions, ModelOptions, ProjectorOptions, RopeOptions, SamplerKind, SamplingOptions,
    SessionOptions, SpeculationOptions, XtcOptions, sampler_order,
};
use hobbit_core::files::{Input, Kind, Output, OutputError};
use hobbit_core::plan::UBATCH_MAX;

/// Settings of a run, complete and checked.
#[derive(Debug)]
pub struct HiArgs {
    pub run: Run,
    pub sampling: SamplingOptions,
    pub speculation: Option<SpeculationOptions>,
    /// The schema from which the grammar was made, if any: a chat template knows in which part of an answer it
    /// applies.
    pub json_schema: Option<String>,
    pub reasoning: Reasoning,
    /// The encoder of images and sound.
    pub projector: Option<ProjectorOptions>,
    pub input: UserInput,
    /// The files of the system prompt and the template were read; `-if` is `-i` too.
    pub chat: ChatArgs,
    pub output: OutputArgs,
    pub colour: bool,
    /// Files read for these settings, with their flags.
    pub read: Vec<(&'static str, PathBuf)>,
}

/// Text and media for the model, and the length of its answer.
#[derive(Debug)]
pub struct UserInput {
    /// Text to continue, or the first message. Usually UTF-8, but llama.cpp takes any bytes.
    pub prompt: Option<Bytes>,
    pub cache: Option<PromptCacheOptions>,
    /// Files of images and sound for the prompt.
    pub attached: Vec<PathBuf>,
    pub affixes: Affixes,
    /// Tokens to generate at once; `None` until the model or the context ends.
    pub predict: Option<usize>,
    /// `predict` of the demo model when it continues its own text.
    pub demo_predict: Option<usize>,
    /// Texts at which generation stops.
    pub stops: Vec<String>,
    /// Other flags of the prompt. Escapes are processed in input, too.
    pub flags: PromptArgs,
}

/// A model, and the session that it runs in.
#[derive(Debug)]
pub struct Run {
    /// The model's file.
    pub model: PathBuf,
    /// Whether it is the bundled one.
    pub is_demo: bool,
    pub model_options: ModelOptions,
    pub session_options: SessionOptions,
}

impl Run {
    /// `fit` changes the session to what the program needs, before memory is planned for it.
    pub fn new(args: &RunArgs, around: &dyn Surroundings, fit: impl FnOnce(&mut SessionOptions)) -> Result<Self> {
        let (path, is_demo) = match &args.model.model {
            Some(path) => (path.clone(), false),
            None => (around.demo_model().map_err(anyhow::Error::msg)?, true),
        };
        let mut session_options = session(&args.context, &args.rope);
        fit(&mut session_options);
        let model_options = ModelOptions {
            repack: args.model.repack,
            check_tensors: args.model.check_tensors.0,
            kv_overrides: args.model.override_kv.clone(),
            adapters: args.model.adapters.options(),
            ..experts(&args.experts, &path, session_options.clone())?
        };
        Ok(Self { model: path, is_demo, model_options, session_options })
    }
}

/// The file of `--prompt-cache`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptCacheOptions {
    pub path: PathBuf,
    /// Save generated tokens, too.
    pub keeps_all: bool,
    pub is_read_only: bool,
}

/// A text that need not be UTF-8.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        String::from_utf8_lossy(&self.0).fmt(f)
    }
}

/// Texts around the user's input if no template applies.
#[derive(Debug, Default)]
pub struct Affixes {
    pub prefix: String,
    pub suffix: String,
    pub bos: bool,
    /// Whether any was given: this disables the chat template.
    pub given: bool,
}

impl HiArgs {
    pub fn new(mut low: LowArgs, around: &dyn Surroundings) -> Result<Self> {
        let is_demo = low.run.model.model.is_none();
        let inputs = given_files([
            ("-f", &low.prompt.text.file),
            ("-bf", &low.prompt.text.binary_file),
            ("--system-prompt-file", &low.chat.system_prompt_file),
            ("--chat-template-file", &low.chat.template.chat_template_file),
            ("--grammar-file", &low.sampling.grammar_file),
            ("--json-schema-file", &low.sampling.json_schema_file),
        ]);
        low.chat.interactive.0 |= low.chat.interactive_first.0;
        low.chat.template.read_file(around)?;
        if let (None, Some(path)) = (&low.chat.system_prompt, &low.chat.system_prompt_file) {
            let text = file(path, around)?;
            low.chat.system_prompt = Some(text.strip_suffix('\n').unwrap_or(&text).to_owned());
        }
        let mut prompt = given_text(&low.prompt.text, around)?.map(|(_, text)| text);
        let mut predict = low.prompt.predict;
        let prompt_cache = low.prompt.prompt_cache.take().map(|path| PromptCacheOptions {
            path,
            keeps_all: low.prompt.prompt_cache_all.0,
            is_read_only: low.prompt.prompt_cache_ro.0,
        });
        let demo_predict = predict.unwrap_or(demo::PREDICT);
        let is_talk = low.chat.interactive.0 || low.chat.conversation == Some(Switch(true));
        if is_demo && prompt.is_none() && !is_talk && !around.has_input() {
            prompt = Some(Bytes(demo::PROMPT.into()));
            predict = Some(demo_predict);
        }
        let until_full = predict == Some(-2);
        let escape = low.prompt.text.escape.0;
        let speculation = low.speculation.options();
        let mut run = Run::new(&low.run, around, |session| {
            session.context_shift &= !until_full;
            speculation.iter().for_each(|drafts| drafts.prepare(session));
        })?;
        run.model_options.cache_state_dir = low.run.experts.caching.cache_state.directory(|name| around.variable(name));
        let json_schema = json_schema(&low.sampling, around)?;
        let projector = low.media.options(&run.session_options);
        if projector.is_some() && prompt_cache.is_some() {
            bail!("--prompt-cache keeps texts, not images and sound; leave it out with --mmproj");
        }
        if projector.is_some() {
            // An image's tokens and positions differ in number, and a checkpoint counts tokens.
            run.session_options.checkpoints = 0;
        }
        Ok(Self {
            run,
            sampling: sampling(low.sampling, json_schema.as_ref(), escape, around)?,
            speculation,
            json_schema: json_schema.map(|(_, schema)| schema),
            reasoning: Reasoning::new(low.reasoning),
            projector,
            input: UserInput {
                prompt,
                cache: prompt_cache,
                attached: [low.attached.image, low.attached.audio].concat(),
                affixes: Affixes {
                    prefix: text(low.chat.in_prefix.as_deref().unwrap_or_default(), escape, "--in-prefix")?,
                    suffix: text(low.chat.in_suffix.as_deref().unwrap_or_default(), escape, "--in-suffix")?,
                    bos: low.chat.in_prefix_bos.0,
                    given: low.chat.in_prefix.is_some() || low.chat.in_suffix.is_some() || low.chat.in_prefix_bos.0,
                },
                predict: predict.and_then(|n| usize::try_from(n).ok()),
                demo_predict: usize::try_from(demo_predict).ok(),
                stops: low.prompt.reverse_prompt.iter().map(|stop| text(stop, escape, "-r")).collect::<Result<_>>()?,
                flags: low.prompt,
            },
            colour: match low.output.color {
                Tri::On => true,
                Tri::Off => false,
                Tri::Auto => around.shows_colour(),
            },
            chat: low.chat,
            output: low.output,
            read: inputs,
        })
    }

    /// Checks that no output overwrites an input or a file of another kind.
    pub fn check_outputs(&self) -> Result<(), OutputError> {
        let cache = self.input.cache.as_ref().filter(|cache| !cache.is_read_only).map(|cache| cache.path.clone());
        let written = [
            ("--log-file", &self.output.log.log_file, Kind::Log),
            ("--stats-json", &self.output.stats_json, Kind::Json),
            ("--prompt-cache", &cache, Kind::Sequence),
        ];
        check_outputs(&self.run.model_options, &self.run.model, &written, &self.read)
    }

    /// Conversation or completion, as llama-completion decides.
    pub fn converses(&self, model_has_template: bool) -> bool {
        let wanted = self.chat.conversation.map(|switch| switch.0);
        let has_template = model_has_template || self.chat.template.chat_template.is_some();
        !self.input.affixes.given && wanted.unwrap_or(has_template && !self.chat.interactive.0)
    }
}

/// The given text and its source.
pub fn given_text(args: &TextArgs, around: &dyn Surroundings) -> Result<Option<(PathBuf, Bytes)>> {
    let escape = args.escape.0;
    Ok(match (&args.prompt, &args.file, &args.binary_file) {
        (Some(typed), ..) => Some(("-p".into(), unescaped(typed.as_bytes(), escape))),
        (_, Some(path), _) => Some((path.clone(), as_typed(prompt_file(path, around, "-f")?, escape))),
        (.., Some(path)) => Some((path.clone(), Bytes(prompt_file(path, around, "-bf")?))),
        _ => None,
    })
}

/// A file with a prompt; '-' is the standard input.
fn prompt_file(path: &Path, around: &dyn Surroundings, flag: &str) -> Result<Vec<u8>> {
    if path != Path::new("-") {
        return read(path, around);
    }
    let bytes = around.input().with_context(|| format!("{flag} -: cannot read the standard input"))?;
    if bytes.is_empty() {
        bail!("{flag} -: the standard input is empty, expected a prompt");
    }
    Ok(bytes)
}

/// A text file's content as typed input: a byte order mark and one newline at its end are removed, and escapes are
/// processed.
pub fn as_typed(bytes: Vec<u8>, escape: bool) -> Bytes {
    let mut text = unmarked(bytes);
    text.pop_if(|last| *last == b'\n');
    unescaped(&text, escape)
}

fn unescaped(bytes: &[u8], escape: bool) -> Bytes {
    Bytes(if escape { unescape(bytes) } else { bytes.to_vec() })
}

/// The files that were given, with their flags.
pub fn given_files<const N: usize>(files: [(&'static str, &Option<PathBuf>); N]) -> Vec<(&'static str, PathBuf)> {
    files.into_iter().filter_map(|(flag, path)| Some((flag, path.clone()?))).collect()
}

/// Checks the outputs of a program other than the engine's.
pub fn check_outputs(
    options: &ModelOptions,
    model: &Path,
    written: &[(&'static str, &Option<PathBuf>, Kind)],
    read: &[(&'static str, PathBuf)],
) -> Result<(), OutputError> {
    let written = written.iter().filter_map(|&(flag, path, kind)| Some(Output { flag, path: path.as_deref()?, kind }));
    let read = read.iter().map(|(flag, path)| Input { flag, path });
    options.check_outputs_with(model, (&written.collect::<Vec<_>>(), &read.collect::<Vec<_>>()), advice::flag)
}

/// Options for expert storage and computation, for a session like `expects`. All programs' flags pass through here.
pub fn experts(args: &ExpertArgs, model: &Path, expects: SessionOptions) -> Result<ModelOptions> {
    let ExpertArgs { preset: _, memory, device, precision, routing, caching } = args;
    let options = ModelOptions {
        budget: memory.mem_budget,
        overcommit: memory.overcommit.0,
        expects,
        expert_cache: memory.expert_cache,
        low: precision.source(model)?,
        low_share: precision.low_share,
        precision: precision.options(),
        routing: routing.options(),
        kernels: precision.kernels,
        caching: caching.options(),
        path_table: caching.path_table()?,
        routes: caching.routes()?,
        trace: caching.trace.clone(),
        cache_state: caching.cache_state.file().map(Path::to_owned),
        io: memory.io,
        mirrors: memory.mirror.clone(),
        n_gpu_layers: device.n_gpu_layers,
        device: device.options(),
        ..ModelOptions::default()
    };
    match routing.max_loss {
        Some(max_loss) => bounded(options, model, max_loss),
        None => Ok(options),
    }
}

/// Settings of a session.
fn session(context: &ContextArgs, rope: &RopeArgs) -> SessionOptions {
    let threads = |n: i32| (n > 0).then_some(n);
    SessionOptions {
        n_ctx: context.ctx_size,
        n_batch: context.batch_size,
        n_ubatch: context.ubatch_size.0.unwrap_or(SessionOptions::default().n_ubatch),
        n_ubatch_max: if context.ubatch_size.0.is_none() { UBATCH_MAX } else { 0 },
        n_outputs_max: 1,
        rollback: 0,
        n_seq_max: 1,
        kv_unified: false,
        embeddings: false,
        pooling: None,
        threads: threads(context.threads),
        threads_batch: context.threads_batch.and_then(threads),
        flash_attn: context.flash_attn,
        type_k: context.cache_type_k,
        type_v: context.cache_type_v,
        warmup: context.warmup.0,
        context_shift: context.context_shift.0,
        n_keep: context.keep,
        swa_full: context.swa_full.0,
        checkpoints: context.ctx_checkpoints,
        checkpoint_step: context.checkpoint_min_step,
        kv_offload: context.kv_offload.0,
        rope: RopeOptions {
            scaling: rope.rope_scaling,
            freq_base: rope.rope_freq_base,
            freq_scale: rope.rope_freq_scale.or(rope.rope_scale.map(f32::recip)).unwrap_or(0.0),
            yarn_orig_ctx: rope.yarn_orig_ctx,
            yarn_ext_factor: rope.yarn_ext_factor,
            yarn_attn_factor: rope.yarn_attn_factor,
            yarn_beta_fast: rope.yarn_beta_fast,
            yarn_beta_slow: rope.yarn_beta_slow,
        },
    }
}

/// The JSON schema in force, and the flag that gave it.
pub fn json_schema(args: &SamplingArgs, around: &dyn Surroundings) -> Result<Option<(String, String)>> {
    if args.grammar.is_some() || args.grammar_file.is_some() {
        return Ok(None);
    }
    Ok(match (&args.json_schema, &args.json_schema_file) {
        (Some(schema), _) => Some(("--json-schema".to_owned(), schema.clone())),
        (None, Some(path)) => Some((path.display().to_string(), file(path, around)?)),
        (None, None) => None,
    })
}

pub fn sampling(
    args: SamplingArgs,
    json_schema: Option<&(String, String)>,
    escape: bool,
    around: &dyn Surroundings,
) -> Result<SamplingOptions> {
    let defaults = SamplingOptions::default();
    let samplers = match (&args.samplers, &args.sampling_seq) {
        (Some(names), _) => sampler_order(names).context("--samplers")?,
        (None, Some(letters)) => {
            letters.chars().map(SamplerKind::from_letter).collect::<Result<_, _>>().context("--sampling-seq")?
        }
        (None, None) => defaults.samplers,
    };
    let sequence_breakers = match args.dry_sequence_breaker.as_slice() {
        [] => defaults.dry.sequence_breakers,
        given => {
            // "none" discards earlier values, as in llama.cpp.
            let after_none = given.iter().rposition(|text| text == "none").map_or(0, |none| none + 1);
            let given = &given[after_none..];
            given.iter().map(|breaker| text(breaker, escape, "--dry-sequence-breaker")).collect::<Result<_>>()?
        }
    };
    Ok(SamplingOptions {
        seed: args.seed,
        samplers,
        temp: args.temp.max(0.0),
        dynatemp_range: args.dynatemp_range,
        dynatemp_exponent: args.dynatemp_exp,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        typical_p: args.typical,
        top_n_sigma: args.top_nsigma,
        xtc: XtcOptions { probability: args.xtc_probability, threshold: args.xtc_threshold },
        repeat_penalty: args.repeat_penalty,
        repeat_last_n: args.repeat_last_n,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        dry: DryOptions {
            multiplier: args.dry_multiplier,
            base: args.dry_base,
            allowed_length: args.dry_allowed_length,
            penalty_last_n: args.dry_penalty_last_n,
            sequence_breakers,
        },
        adaptive_target: args.adaptive_target,
        adaptive_decay: args.adaptive_decay,
        mirostat: MirostatOptions { version: args.mirostat, tau: args.mirostat_ent, eta: args.mirostat_lr },
        ignore_eos: args.ignore_eos.0,
        logit_bias: args.logit_bias,
        grammar: match (args.grammar, args.grammar_file, json_schema) {
            (Some(grammar), ..) => Some(grammar),
            (_, Some(path), _) => Some(file(&path, around)?),
            (.., Some((giver, schema))) => Some(around.grammar_of_schema(schema).with_context(|| giver.clone())?),
            _ => None,
        },
        ..SamplingOptions::default()
    })
}

/// Typed text, with escapes processed if wanted.
pub fn text(typed: &str, escape: bool, flag: &str) -> Result<String> {
    if !escape {
        return Ok(typed.to_owned());
    }
    String::from_utf8(unescape(typed.as_bytes()))
        .with_context(|| format!("{flag}: \\x escapes that do not form UTF-8; use --no-escape to take them literally"))
}
