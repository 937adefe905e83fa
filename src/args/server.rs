//! Flags of `hobbit-server`: groups shared with hobbit-cli, and llama-server's own.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser};

use super::{
    ClosingArgs, LogArgs, MediaArgs, ReasoningArgs, RunArgs, SamplingArgs, SpeculationArgs, TemplateArgs, as_program,
};
use crate::argv::Switch;
use hobbit::options::Pooling;

const EXAMPLES: &str = "\
Examples:
  hobbit-server
      The bundled demo model, on http://127.0.0.1:8080: a page to talk to it, and OpenAI's interface under /v1.
  hobbit-server -m qwen3-moe.gguf --mem-budget 8GiB --port 8080
      In 8 GiB, whatever the size of the file. -np 4 serves four requests at once, which share what is read.
  hobbit-server -m qwen3-moe.gguf -np 4 -c 32768 --api-key-file keys.txt --host 0.0.0.0
      For others on the network: every request must bring one of the keys. Each slot has 8192 tokens.
  hobbit-server -m mixtral.gguf --low q2_k --cache-state mixtral.state --metrics
      Approximate and faster; remembers from one run to the next which experts were useful; figures for Prometheus.
  hobbit-server --models-dir models --mem-budget 16G --sleep-idle-seconds 600
      Several models, one in memory at a time: the one that the last request named.
  hobbit-server -m nomic-moe.gguf --embeddings --pooling mean
      /v1/embeddings.

Environment: every flag that shows [env: NAME] may be given there; the command line wins.
Exit status: 0 after a signal that ended it in order, 1 failure, 2 wrong usage.";

#[cfg(not(windows))]
const SIGNALS: &str = "\
Signals: SIGTERM, SIGHUP and Ctrl-C end it in order: nothing new is begun, streams have --shutdown-grace to finish or
end with an error event, --cache-state is written. A second signal ends it at once. SIGUSR1 halves the expert caches
and SIGUSR2 restores them.";
#[cfg(windows)]
const SIGNALS: &str = "\
Ctrl-C, Ctrl-Break, and closing the window end it in order: nothing new is begun, streams have --shutdown-grace to
finish or end with an error event, --cache-state is written. A second one ends it at once. The expert caches keep their
size while it runs.";

/// Serve a Mixture-of-Experts GGUF model that does not fit in memory: OpenAI's and llama-server's HTTP interface.
#[derive(Debug, Parser)]
#[command(name = "hobbit-server", override_usage = "hobbit-server [OPTIONS]")]
#[command(after_help = format!("{EXAMPLES}\n{SIGNALS}"))]
pub struct ServerArgs {
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub router: RouterArgs,
    #[command(flatten)]
    pub http: HttpArgs,
    #[command(flatten)]
    pub slots: SlotArgs,
    #[command(flatten)]
    pub media: MediaArgs,
    #[command(flatten)]
    pub chat: ServedChatArgs,
    #[command(flatten)]
    pub reasoning: ReasoningArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub closing: ClosingArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub struct RouterArgs {
    /// Serve the models of this directory and those that -hf has fetched. Requests name one, which is then loaded
    #[arg(long, value_name = "PATH", group = "named_model", env = "LLAMA_ARG_MODELS_DIR")]
    pub models_dir: Option<PathBuf>,
    /// INI file with a section for each model (*: for all), whose keys are flags without dashes; the command line wins.
    /// `model = FNAME` names a model outside --models-dir, or without one
    #[arg(long, value_name = "FNAME", env = "LLAMA_ARG_MODELS_PRESET",
          conflicts_with_all = ["model", "hf_repo", "model_url"])]
    pub models_preset: Option<PathBuf>,
    /// With --models-dir: models in memory at once; each gets an equal part of --mem-budget
    #[arg(long, value_name = "N", default_value = "1", env = "LLAMA_ARG_MODELS_MAX",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub models_max: u16,
    /// With --models-dir: seconds that a request may wait until other models have left memory for its own; then it is
    /// answered with 503, and they stay
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds, env = "HOBBIT_ARG_MODEL_WAIT")]
    pub model_wait: Duration,
    /// With --models-dir: load a model when a request names it; otherwise only POST /models/load does
    #[arg(long, default_value = "on", env = "LLAMA_ARG_MODELS_AUTOLOAD")]
    pub models_autoload: Switch,
    /// With --models-dir: clients may download models of the Hub (/api/pull) and remove them (/api/delete)
    #[arg(long, env = "HOBBIT_ARG_MODELS_PULL")]
    pub models_pull: Switch,
    /// With --models-dir: seconds without a request after which a model leaves memory; -1 never
    #[arg(long, value_name = "N", default_value = "-1", value_parser = clap::value_parser!(i64).range(-1..))]
    pub sleep_idle_seconds: i64,
}

impl RouterArgs {
    /// The directory or preset with the models of a server of several.
    pub fn models(&self) -> Option<&PathBuf> {
        self.models_dir.as_ref().or(self.models_preset.as_ref())
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Server")]
pub struct HttpArgs {
    /// Addresses to listen on, comma-separated; 0.0.0.0 for every one of this machine
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", value_delimiter = ',', env = "LLAMA_ARG_HOST")]
    pub host: Vec<String>,
    /// Port; 0 takes a free one, which is printed
    #[arg(long, value_name = "PORT", default_value = "8080", env = "LLAMA_ARG_PORT")]
    pub port: u16,
    /// Listen on the socket that is standard input, which the server of several models gives its processes
    #[arg(long, hide = true)]
    pub socket_on_stdin: Switch,
    /// Names of the model for clients, comma-separated (default: the file's name)
    #[arg(long, value_name = "NAME", value_delimiter = ',', env = "LLAMA_ARG_ALIAS")]
    pub alias: Vec<String>,
    /// Words that /v1/models shows beside the model, comma-separated
    #[arg(long, value_name = "TAG", value_delimiter = ',', env = "LLAMA_ARG_TAGS")]
    pub tags: Vec<String>,
    /// A key that requests must bring; comma-separated or repeated
    #[arg(long, value_name = "KEY", value_delimiter = ',', env = "LLAMA_API_KEY", hide_env_values = true)]
    pub api_key: Vec<String>,
    /// File with keys, one a line; lines that begin with # are comments
    #[arg(long, value_name = "FNAME", env = "LLAMA_ARG_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Host names that requests without a key may use, comma-separated, besides localhost, IP addresses and those of
    /// --host; '*' is any. Otherwise a web page whose name leads to this machine could use the server
    #[arg(long, value_name = "NAME", value_delimiter = ',', env = "HOBBIT_ARG_ALLOWED_HOSTS")]
    pub allowed_hosts: Vec<String>,
    /// Web pages that may use the server from a browser: 'localhost', '*', or origins, comma-separated (default: only
    /// its own)
    #[arg(long, value_name = "ORIGINS", env = "LLAMA_ARG_CORS_ORIGINS")]
    pub cors_origins: Option<String>,
    /// Threads for HTTP; the model's are --threads
    #[arg(long, value_name = "N", default_value = "2", env = "LLAMA_ARG_THREADS_HTTP", value_parser = http_threads)]
    pub threads_http: usize,
    /// TLS: file with the private key (PEM)
    #[arg(long, value_name = "FNAME", requires = "ssl_cert_file", env = "LLAMA_ARG_SSL_KEY_FILE")]
    pub ssl_key_file: Option<PathBuf>,
    /// TLS: file with the certificate (PEM)
    #[arg(long, value_name = "FNAME", requires = "ssl_key_file", env = "LLAMA_ARG_SSL_CERT_FILE")]
    pub ssl_cert_file: Option<PathBuf>,
    /// Seconds within which a request must arrive. A connection whose client is silent, or does not read its answer, is
    /// closed after 30 s, or after this time if it is shorter
    #[arg(long, value_name = "N", default_value = "600", env = "LLAMA_ARG_TIMEOUT", value_parser = timeout)]
    pub timeout: Duration,
    /// Largest body of a request, in bytes. Of the memory budget, twelve times as much and 16 MiB are reserved for all
    /// requests
    #[arg(long, value_name = "SIZE", default_value = "4M", env = "HOBBIT_ARG_MAX_BODY",
          value_parser = size)]
    pub max_body: usize,
    /// Seconds of silence after which a stream sends a ping; -1 never
    #[arg(long, value_name = "N", default_value = "30", value_parser = clap::value_parser!(i64).range(-1..))]
    pub sse_ping_interval: i64,
    /// Lines of the log as text, or each as a JSON object
    #[arg(long, value_name = "text|json", default_value = "text", value_parser = ["text", "json"],
          env = "HOBBIT_ARG_LOG_FORMAT")]
    pub log_format: String,
    /// Serve the page at /
    #[arg(long, default_value = "on", env = "LLAMA_ARG_UI")]
    pub ui: Switch,
    /// Serve /metrics, for Prometheus
    #[arg(long = "metrics", env = "LLAMA_ARG_ENDPOINT_METRICS")]
    pub endpoint_metrics: Switch,
    /// Serve /slots
    #[arg(long = "slots", default_value = "on", env = "LLAMA_ARG_ENDPOINT_SLOTS")]
    pub endpoint_slots: Switch,
    /// Accept POST /props
    #[arg(long = "props", env = "LLAMA_ARG_ENDPOINT_PROPS")]
    pub endpoint_props: Switch,
    /// Seconds that streams have to finish when the server ends
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds, env = "HOBBIT_ARG_SHUTDOWN_GRACE")]
    pub shutdown_grace: Duration,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Slots")]
pub struct SlotArgs {
    /// Requests that are served at once; each has its part of --ctx-size, and all share the experts that are read
    /// (default: 4, which share --ctx-size too, as with --kv-unified)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), env = "LLAMA_ARG_N_PARALLEL")]
    pub parallel: Option<u32>,
    /// Requests that may wait for a slot
    #[arg(long, value_name = "N", default_value = "256", env = "HOBBIT_ARG_MAX_WAITING",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub max_waiting: u32,
    /// Slots share one context: each may take as much as the others leave
    #[arg(long, env = "LLAMA_ARG_KV_UNIFIED")]
    pub kv_unified: Switch,
    /// Generate for all slots in one batch (always)
    #[arg(long, default_value = "on", env = "LLAMA_ARG_CONT_BATCHING")]
    pub cont_batching: Switch,
    /// Longest wait in seconds for the next token of a stream while prompts of others are computed, which is done in
    /// pieces short enough for it
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds, env = "HOBBIT_ARG_STALL_LIMIT")]
    pub stall_limit: Duration,
    /// Reuse the beginning of a prompt that a slot has evaluated already
    #[arg(long, default_value = "on", env = "LLAMA_ARG_CACHE_PROMPT")]
    pub cache_prompt: Switch,
    /// Reuse runs of at least N tokens from other places of the context; 0: none
    #[arg(long, value_name = "N", default_value = "0", env = "LLAMA_ARG_CACHE_REUSE")]
    pub cache_reuse: usize,
    /// The share of a prompt that a slot must hold to be preferred
    #[arg(long, value_name = "N", default_value = "0.1", value_parser = super::finite)]
    pub slot_prompt_similarity: f32,
    /// Directory in which slots are saved, and restored from
    #[arg(long, value_name = "PATH", env = "LLAMA_ARG_SLOT_SAVE_PATH")]
    pub slot_save_path: Option<PathBuf>,
    /// Load LoRA adapters without applying them: requests and POST /lora-adapters give the scales
    #[arg(long)]
    pub lora_init_without_apply: Switch,
    /// Tokens to generate where a request gives no number; -1 without end (default: -1, 96 with the demo model)
    #[arg(short = 'n', long, value_name = "N", env = "LLAMA_ARG_N_PREDICT",
          value_parser = clap::value_parser!(i32).range(-1..))]
    pub predict: Option<i32>,
    /// Serve embeddings, and nothing else
    #[arg(long, env = "LLAMA_ARG_EMBEDDINGS")]
    pub embeddings: Switch,
    /// How the embeddings of a text's tokens are combined: none, mean, cls, last, rank (default: the model's way)
    #[arg(long, value_name = "POOLING", env = "LLAMA_ARG_POOLING")]
    pub pooling: Option<Pooling>,
    /// /infill with the suffix before the prefix
    #[arg(long)]
    pub spm_infill: Switch,
    /// Spell out special tokens
    #[arg(long)]
    pub special: Switch,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Conversation")]
pub struct ServedChatArgs {
    #[command(flatten)]
    pub template: TemplateArgs,
    /// An assistant's message at the end of a conversation is continued
    #[arg(long, default_value = "on", env = "LLAMA_ARG_PREFILL_ASSISTANT")]
    pub prefill_assistant: Switch,
}

fn size(text: &str) -> Result<usize, String> {
    super::bytes(text).and_then(|bytes| usize::try_from(bytes).map_err(|error| error.to_string()))
}

/// llama-server's -1 leaves the choice to it.
fn http_threads(text: &str) -> Result<usize, String> {
    if text == "-1" { Ok(2) } else { super::number(1..=256, "a number from 1 to 256, or -1")(text) }
}

fn timeout(text: &str) -> Result<Duration, String> {
    super::number(1..=u64::MAX, "a number of seconds above 0")(text).map(Duration::from_secs)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "expected a number of seconds, 0 or above".to_owned())
}

/// The clap command.
pub fn command() -> clap::Command {
    as_program(ServerArgs::command())
}
