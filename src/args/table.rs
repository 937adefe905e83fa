//! The table of what clap's derive cannot carry of a flag: spellings other than its long name and its letter, its
//! place in `-h`, and how hobbit-bench reads several values. The rest stands at the flag's declaration.

use clap::Arg;

/// A row: one flag, whichever programs have it.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    pub long: &'static str,
    also: &'static str,
    off: &'static str,
    is_brief: bool,
    pub list: List,
}

/// How hobbit-bench reads several values in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Commas separate them.
    Words,
    /// The same, and numbers may be ranges.
    Numbers,
    /// The same; slashes separate the parts of one value, as in llama-bench.
    Slashes,
    /// The same; semicolons separate the parts of one value.
    Semicolons,
    /// A value may contain commas; the flag is repeated.
    Whole,
    /// All cases have every value.
    All,
}

impl Flag {
    /// Spellings beyond the long name, the letter and `--no-` before a switch.
    pub fn also(&self) -> impl Iterator<Item = &'static str> {
        self.also.split_whitespace()
    }

    /// Spellings that switch off.
    pub fn off(&self) -> impl Iterator<Item = &'static str> {
        self.off.split_whitespace()
    }
}

/// The row of `--long`; most flags have none.
pub fn find(long: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.long == long)
}

/// A flag's place in `-h`, which shows those that most people need.
pub fn place_in_brief(arg: &Arg) -> Option<usize> {
    FLAGS.iter().position(|flag| flag.is_brief && arg.get_long() == Some(flag.long))
}

/// Beginnings of the help's headings, in the order of use; others come second.
const HEADINGS: &str = "\
    Model, Prompt, Images, Conversation, Memory, Server, Slots, Context, Sampling, Devices, Output, Help, \
    Reasoning, Speculative, Position, Dynamic precision, Expert caches, Routing, Papers";

/// The place of a flag's heading in `--help`; clap orders headings by their first flag.
pub fn rank(arg: &Arg) -> usize {
    let heading = arg.get_help_heading().unwrap_or_default();
    HEADINGS.split(", ").position(|own| heading.starts_with(own)).unwrap_or(1)
}

const fn flag(long: &'static str, also: &'static str) -> Flag {
    Flag { long, also, off: "", is_brief: false, list: List::Words }
}

impl Flag {
    const fn off_by(self, off: &'static str) -> Self {
        Self { off, ..self }
    }

    const fn brief(self) -> Self {
        Self { is_brief: true, ..self }
    }

    const fn list(self, list: List) -> Self {
        Self { list, ..self }
    }
}

/// The flags of `-h` come first, in its order.
pub static FLAGS: &[Flag] = &[
    flag("model", "").brief(),
    flag("hf-repo", "-hf -hfr").brief(),
    flag("models-dir", "").brief(),
    flag("mem-budget", "").brief(),
    flag("prompt", "").brief(),
    flag("file", "").brief(),
    flag("predict", "--n-predict").brief(),
    flag("conversation", "-cnv").off_by("-no-cnv").brief(),
    flag("system-prompt", "-sys").brief(),
    flag("single-turn", "-st").brief(),
    flag("mmproj", "-mm").brief(),
    flag("image", "").brief(),
    flag("host", "").brief(),
    flag("port", "").brief(),
    flag("api-key", "").brief(),
    flag("parallel", "-np --n-parallel").brief(),
    flag("ctx-size", "").brief(),
    flag("threads", "").brief(),
    flag("temp", "--temperature").brief(),
    flag("seed", "").brief(),
    flag("low", "").brief().list(List::Whole),
    flag("cache-bias", "").brief(),
    flag("n-gpu-layers", "-ngl --gpu-layers").brief().list(List::Numbers),
    flag("device-cache", "").brief(),
    flag("list-devices", "").brief(),
    flag("cache-state", "").brief().list(List::Whole),
    flag("stats-json", "").brief(),
    flag("quiet", "--log-disable").brief(),
    flag("verbose", "--log-verbose").brief(),
    flag("version", "").brief(),
    flag("help", "--usage").brief(),
    flag("hf-file", "-hff"),
    flag("hf-token", "-hft"),
    flag("model-url", "-mu"),
    flag("device", "-dev").list(List::Slashes),
    flag("split-mode", "-sm"),
    flag("main-gpu", "-mg").list(List::Numbers),
    flag("tensor-split", "-ts"),
    flag("cpu-moe", "-cmoe"),
    flag("n-cpu-moe", "-ncmoe").list(List::Numbers),
    flag("override-tensor", "-ot").list(List::Semicolons),
    flag("load-mode", "-lm"),
    flag("output-err", "-oe"),
    flag("pg", "-pg"),
    flag("no-kv-offload", "-nkvo"),
    flag("expert-cache", "--host-cache"),
    flag("expert-slots", "--slots"),
    flag("binary-file", "-bf"),
    flag("kl-divergence-base", "--save-all-logits"),
    flag("alias", "-a"),
    flag("timeout", "-to"),
    flag("cont-batching", "-cb").off_by("-nocb"),
    flag("kv-unified", "-kvu").off_by("-no-kvu"),
    flag("slot-prompt-similarity", "-sps"),
    flag("embeddings", "--embedding"),
    flag("ui", "--webui").off_by("--no-webui"),
    flag("system-prompt-file", "-sysf"),
    flag("reasoning", "-rea"),
    flag("interactive-first", "-if"),
    flag("multiline-input", "-mli"),
    flag("ubatch-size", "-ub"),
    flag("threads-batch", "-tb"),
    flag("flash-attn", "-fa"),
    flag("cache-type-k", "-ctk"),
    flag("cache-type-v", "-ctv"),
    flag("kv-offload", "-kvo").off_by("-nkvo"),
    flag("ctx-checkpoints", "-ctxcp --swa-checkpoints"),
    flag("checkpoint-min-step", "-cms"),
    flag("sampling-seq", "--sampler-seq"),
    flag("top-nsigma", "--top-n-sigma"),
    flag("typical", "--typical-p"),
    flag("json-schema-file", "-jf"),
    flag("spec-draft-n-max", "--draft --draft-n --draft-max").list(List::Numbers),
    flag("spec-draft-n-min", "--draft-min --draft-n-min").list(List::Numbers),
    flag("spec-draft-p-min", "--draft-p-min"),
    flag("spec-draft-model", "-md --model-draft").list(List::Whole),
    flag("ctx-size-draft", "-cd"),
    flag("spec-draft-device", "-devd --device-draft").list(List::Slashes),
    flag("spec-draft-ngl", "-ngld --gpu-layers-draft --n-gpu-layers-draft"),
    flag("lookup-cache-static", "-lcs").list(List::Whole),
    flag("lookup-cache-dynamic", "-lcd").list(List::Whole),
    flag("color", "-co"),
    flag("special", "-sp"),
    flag("verbosity", "-lv --log-verbosity"),
    flag("perf", "--show-timings").off_by("--no-show-timings"),
    flag("repack", "").off_by("-nr --no-repack"),
    flag("low-dir", "").list(List::Whole),
    flag("policy-weights", "").list(List::Whole),
    flag("path-table", "").list(List::Whole),
    flag("prefetch-distance", "").list(List::Numbers),
    flag("keep-top", "").list(List::Numbers),
    flag("substitute-max", "").list(List::Numbers),
    flag("spec-type", "").list(List::Slashes),
    flag("rpc", "").list(List::All),
];
