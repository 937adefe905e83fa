//! The table of what clap's derive cannot carry of a flag: spellings other than its long name and its letter, its
//! place in the help, and how hobbit-bench reads several values. The rest stands at the flag's declaration.

use clap::Arg;

/// Flags with other spellings than `--long` and their letter; the last ones switch off, as `--no-long` does.
pub const SPELLINGS: &[(&str, &str, &str)] = &[
    ("hf-repo", "-hf -hfr", ""),
    ("predict", "--n-predict", ""),
    ("conversation", "-cnv", "-no-cnv"),
    ("system-prompt", "-sys", ""),
    ("single-turn", "-st", ""),
    ("mmproj", "-mm", ""),
    ("parallel", "-np --n-parallel", ""),
    ("temp", "--temperature", ""),
    ("n-gpu-layers", "-ngl --gpu-layers", ""),
    ("quiet", "--log-disable", ""),
    ("verbose", "--log-verbose", ""),
    ("help", "--usage", ""),
    ("hf-file", "-hff", ""),
    ("hf-token", "-hft", ""),
    ("model-url", "-mu", ""),
    ("device", "-dev", ""),
    ("split-mode", "-sm", ""),
    ("main-gpu", "-mg", ""),
    ("tensor-split", "-ts", ""),
    ("cpu-moe", "-cmoe", ""),
    ("n-cpu-moe", "-ncmoe", ""),
    ("override-tensor", "-ot", ""),
    ("load-mode", "-lm", ""),
    ("output-err", "-oe", ""),
    ("pg", "-pg", ""),
    ("no-kv-offload", "-nkvo", ""),
    ("expert-cache", "--host-cache", ""),
    ("expert-slots", "--slots", ""),
    ("binary-file", "-bf", ""),
    ("kl-divergence-base", "--save-all-logits", ""),
    ("alias", "-a", ""),
    ("timeout", "-to", ""),
    ("cont-batching", "-cb", "-nocb"),
    ("kv-unified", "-kvu", "-no-kvu"),
    ("slot-prompt-similarity", "-sps", ""),
    ("embeddings", "--embedding", ""),
    ("ui", "--webui", "--no-webui"),
    ("system-prompt-file", "-sysf", ""),
    ("reasoning", "-rea", ""),
    ("interactive-first", "-if", ""),
    ("multiline-input", "-mli", ""),
    ("ubatch-size", "-ub", ""),
    ("threads-batch", "-tb", ""),
    ("flash-attn", "-fa", ""),
    ("cache-type-k", "-ctk", ""),
    ("cache-type-v", "-ctv", ""),
    ("kv-offload", "-kvo", "-nkvo"),
    ("ctx-checkpoints", "-ctxcp --swa-checkpoints", ""),
    ("checkpoint-min-step", "-cms", ""),
    ("sampling-seq", "--sampler-seq", ""),
    ("top-nsigma", "--top-n-sigma", ""),
    ("typical", "--typical-p", ""),
    ("json-schema-file", "-jf", ""),
    ("spec-draft-n-max", "--draft --draft-n --draft-max", ""),
    ("spec-draft-n-min", "--draft-min --draft-n-min", ""),
    ("spec-draft-p-min", "--draft-p-min", ""),
    ("spec-draft-model", "-md --model-draft", ""),
    ("ctx-size-draft", "-cd", ""),
    ("spec-draft-device", "-devd --device-draft", ""),
    ("spec-draft-ngl", "-ngld --gpu-layers-draft --n-gpu-layers-draft", ""),
    ("lookup-cache-static", "-lcs", ""),
    ("lookup-cache-dynamic", "-lcd", ""),
    ("color", "-co", ""),
    ("special", "-sp", ""),
    ("verbosity", "-lv --log-verbosity", ""),
    ("perf", "--show-timings", "--no-show-timings"),
    ("repack", "", "-nr --no-repack"),
];

/// The flags of `-h`, in the order of use. A program shows those that it has.
const BRIEF: &str = "\
    model hf-repo models-dir mem-budget prompt file predict conversation system-prompt single-turn mmproj image \
    host port api-key parallel ctx-size threads temp seed low cache-bias n-gpu-layers device-cache list-devices \
    cache-state stats-json quiet verbose version help";

/// Beginnings of the help's headings, in the order of use; others come second.
const HEADINGS: &str = "\
    Model, Prompt, Images, Conversation, Memory, Server, Slots, Context, Sampling, Devices, Output, Help, \
    Reasoning, Speculative, Position, Dynamic precision, Expert caches, Routing, Papers";

/// How hobbit-bench reads several values in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Commas separate them.
    Words,
    /// Commas separate them, and numbers may be ranges.
    Numbers,
    /// Commas separate values; slashes the parts of one value, as in llama-bench.
    Slashes,
    /// Commas separate values; semicolons the parts of one value.
    Semicolons,
    /// A value may contain commas; the flag is repeated.
    Whole,
    /// All cases have every value.
    All,
}

/// The flags of hobbit-bench whose values are no [`List::Words`].
const LISTS: &[(List, &str)] = &[
    (List::Whole, "low low-dir mirror policy-weights path-table cache-state"),
    (List::Whole, "spec-draft-model lookup-cache-static lookup-cache-dynamic"),
    (List::Numbers, "n-gpu-layers n-cpu-moe main-gpu prefetch-distance keep-top substitute-max"),
    (List::Numbers, "spec-draft-n-max spec-draft-n-min"),
    (List::Slashes, "device spec-draft-device spec-type"),
    (List::Semicolons, "override-tensor"),
    (List::All, "rpc"),
];

/// The spellings of `--long` in [`SPELLINGS`], each with whether it switches off.
pub fn spellings(long: &str) -> impl Iterator<Item = (&'static str, bool)> {
    let rows = SPELLINGS.iter().filter(move |row| row.0 == long);
    rows.flat_map(|(_, also, off)| {
        let off = off.split_whitespace().map(|spelling| (spelling, true));
        also.split_whitespace().map(|spelling| (spelling, false)).chain(off)
    })
}

/// A flag's place in `-h`, which shows those that most people need.
pub fn place_in_brief(arg: &Arg) -> Option<usize> {
    BRIEF.split(' ').position(|long| arg.get_long() == Some(long))
}

/// The place of a flag's heading in `--help`; clap orders headings by their first flag.
pub fn rank(arg: &Arg) -> usize {
    let heading = arg.get_help_heading().unwrap_or_default();
    HEADINGS.split(", ").position(|beginning| heading.starts_with(beginning)).unwrap_or(1)
}

/// How hobbit-bench reads values of `--long`.
pub fn list(long: &str) -> List {
    let has = |(_, flags): &&(List, &str)| flags.split(' ').any(|flag| flag == long);
    LISTS.iter().find(has).map_or(List::Words, |row| row.0)
}
