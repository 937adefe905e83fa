//! Flags of llama.cpp's programs that hobbit-cli lacks.
//!
//! A flag that could change the output or leave work undone is refused with the remedy. Performance hints are
//! accepted and reported. Requests for hobbit's fixed behaviour are accepted silently.

use std::ffi::OsString;

/// The treatment of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// An error, with the reason and the remedy.
    Refused(&'static str),
    /// Dropped, with this reason.
    NoEffect(&'static str),
    /// Dropped: hobbit always does this.
    Implied,
}

/// One of llama.cpp's flags.
#[derive(Clone, Copy, Debug)]
pub struct Unsupported {
    names: &'static [&'static str],
    /// Words that follow it.
    pub values: usize,
    /// The treatment.
    pub verdict: Verdict,
}

/// The flag of that name, if llama.cpp has it.
pub fn find(name: &str) -> Option<&'static Unsupported> {
    let is_speculative = ["--spec-", "--draft", "--lookup-cache-"].iter().any(|start| name.starts_with(start));
    if is_speculative || name.ends_with("-draft") {
        return Some(&SPECULATIVE);
    }
    FLAGS.iter().find(|flag| flag.names.contains(&name))
}

/// The llama.cpp environment variables that are set and that hobbit does not support. `value` looks up a variable;
/// `is_ours` recognises flags that this program has. Each comes with the reason, and with whether it names a model.
pub fn variables(
    value: impl Fn(&str) -> Option<OsString>,
    is_ours: impl Fn(&str) -> bool,
) -> Vec<(&'static str, &'static str, bool)> {
    let set = |&(name, flag): &(&'static str, &'static str)| {
        let found = find(flag).filter(|_| !is_ours(flag))?;
        let value = value(name)?;
        // A switch that is off has no effect.
        let is_off = found.values == 0 && OFF.iter().any(|off| value == **off);
        let (Verdict::Refused(why) | Verdict::NoEffect(why)) = found.verdict else { return None };
        (!value.is_empty() && !is_off).then(|| (name, why, MODEL_FLAGS.contains(&flag)))
    };
    VARIABLES.iter().filter_map(set).collect()
}

const fn refused(names: &'static [&'static str], values: usize, why: &'static str) -> Unsupported {
    Unsupported { names, values, verdict: Verdict::Refused(why) }
}

const fn no_effect(names: &'static [&'static str], values: usize, why: &'static str) -> Unsupported {
    Unsupported { names, values, verdict: Verdict::NoEffect(why) }
}

const fn implied(names: &'static [&'static str], values: usize) -> Unsupported {
    Unsupported { names, values, verdict: Verdict::Implied }
}

const DOCKER: &str = "models come from files, the Hub (-hf) and URLs (-mu)";
const DEFAULTS: &str = "name the repository: -hf USER/REPO[:QUANT]";
const DRAFT: &str = "speculative decoding is not supported yet";
const MEDIA: &str = "only text models are supported";
const PLACEMENT: &str = "hobbit places experts itself; see --device-cache, --mem-budget and --expert-cache";
const LAYERS: &str = "layers go where -ngl and -ts say; give a smaller -ngl if they do not fit";
const READING: &str = "hobbit reads the file itself; see --io and --mem-budget";
const TASKS: &str = "score tasks with lm-eval through hobbit-server";
const SCHEDULING: &str = "threads are left to the system's scheduler; see -t, or taskset(1)";
const LOGGING: &str = "log lines have one form; see --log-file and --verbosity";

/// Values that switch off (`common/arg.cpp`).
const OFF: [&str; 4] = ["off", "disabled", "false", "0"];

/// Flags that name a model.
const MODEL_FLAGS: [&str; 1] = ["--docker-repo"];

/// llama.cpp's variables of the flags below (`set_env` in `common/arg.cpp`), without those that only its server reads.
static VARIABLES: &[(&str, &str)] = &[
    ("LLAMA_ARG_DOCKER_REPO", "--docker-repo"),
    ("LLAMA_ARG_MMPROJ", "--mmproj"),
    ("LLAMA_ARG_MMPROJ_URL", "--mmproj-url"),
    ("LLAMA_ARG_IMAGE_MIN_TOKENS", "--image-min-tokens"),
    ("LLAMA_ARG_IMAGE_MAX_TOKENS", "--image-max-tokens"),
    ("LLAMA_ARG_VIDEO_FPS", "--video-fps"),
    ("LLAMA_ARG_GRP_ATTN_N", "--grp-attn-n"),
    ("LLAMA_ARG_GRP_ATTN_W", "--grp-attn-w"),
    ("LLAMA_ARG_N_PARALLEL", "--parallel"),
    ("LLAMA_ARG_LOG_JSONL", "--log-jsonl"),
    ("LLAMA_ARG_SPEC_TYPE", "--spec-type"),
    ("LLAMA_ARG_SPEC_DRAFT_MODEL", "--model-draft"),
    ("LLAMA_ARG_SPEC_DRAFT_HF_REPO", "--hf-repo-draft"),
    ("LLAMA_ARG_DRAFT_MAX", "--draft-max"),
    ("LLAMA_ARG_DRAFT_MIN", "--draft-min"),
    ("LLAMA_ARG_LOAD_MODE", "--load-mode"),
    ("LLAMA_ARG_LAZY_MODE", "--lazy-mode"),
    ("LLAMA_ARG_NUMA", "--numa"),
    ("LLAMA_ARG_N_CPU_FFN", "--n-cpu-ffn"),
    ("LLAMA_ARG_NO_HOST", "--no-host"),
    ("LLAMA_ARG_DEFRAG_THOLD", "--defrag-thold"),
    ("LLAMA_ARG_BACKEND_SAMPLING", "--backend-sampling"),
];

static SPECULATIVE: Unsupported = refused(&["--spec-*"], 0, DRAFT);

static FLAGS: &[Unsupported] = &[
    implied(&["--no-mmap", "--no-log-jsonl"], 0),
    no_effect(&["--mmap", "--mlock", "-dio", "--direct-io", "-ndio", "--no-direct-io"], 0, READING),
    no_effect(&["-lm", "--load-mode", "-lzm", "--lazy-mode"], 1, READING),
    no_effect(&["--op-offload", "--no-op-offload", "--no-host"], 0, PLACEMENT),
    no_effect(&["-ncffn", "--n-cpu-ffn", "-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx"], 1, LAYERS),
    no_effect(&["--moe-cache-mib"], 1, PLACEMENT),
    no_effect(
        &["--prio", "--poll", "--prio-batch", "--poll-batch", "--cpu-strict", "--cpu-strict-batch"],
        1,
        SCHEDULING,
    ),
    no_effect(&["--numa"], 1, SCHEDULING),
    no_effect(&["-dt", "--defrag-thold"], 1, "the KV cache needs no defragmentation"),
    no_effect(&["-bs", "--backend-sampling"], 0, "sampling runs on the CPU"),
    no_effect(&["--log-colors"], 1, LOGGING),
    no_effect(&["--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps"], 0, LOGGING),
    no_effect(
        &["-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "-cram", "--cache-ram"],
        1,
        "one conversation is held",
    ),
    refused(&["--log-jsonl"], 0, LOGGING),
    refused(
        &["-C", "--cpu-mask", "-Cr", "--cpu-range", "-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch"],
        1,
        SCHEDULING,
    ),
    refused(&["-np", "--parallel"], 1, "only hobbit-server has slots"),
    refused(&["--hellaswag", "--winogrande", "--multiple-choice"], 0, TASKS),
    refused(&["--hellaswag-tasks", "--winogrande-tasks", "--multiple-choice-tasks"], 1, TASKS),
    refused(&["-dr", "--docker-repo"], 1, DOCKER),
    refused(&["-cl", "--cache-list"], 0, "the Hub's own client lists what is kept: hf cache ls"),
    refused(&["--gpt-oss-20b-default", "--gpt-oss-120b-default"], 0, DEFAULTS),
    refused(&["--vision-gemma-4b-default", "--vision-gemma-12b-default"], 0, MEDIA),
    refused(&["-ptc", "--print-token-count"], 1, "see --stats-json for the counts at the end"),
    refused(&["-gan", "--grp-attn-n", "-gaw", "--grp-attn-w"], 1, "self-extend is not supported; see --rope-scale"),
    refused(&["--server-base"], 1, "hobbit-cli runs the model itself"),
    refused(&["-mm", "--mmproj", "-mmu", "--mmproj-url", "-mmdev", "--mmproj-device"], 1, MEDIA),
    refused(&["--image", "--audio", "--video", "--image-min-tokens", "--image-max-tokens"], 1, MEDIA),
    refused(&["--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir"], 1, MEDIA),
    refused(&["--mmproj-auto", "--no-mmproj", "--no-mmproj-auto", "--mmproj-offload", "--no-mmproj-offload"], 0, MEDIA),
    refused(&["-o", "--output", "--output-file"], 1, "redirect the standard output instead"),
    refused(&["--completion-bash"], 0, "it stands alone, as the only flag; see --completions"),
    refused(&["--log-prompts-dir"], 1, "prompts are not logged; see --verbose-prompt"),
    refused(&["-md", "-td", "-tbd", "-hfd", "-hfrd", "-Cd", "-Crd", "-Cbd", "-ctkd", "-ctvd", "-devd"], 1, DRAFT),
    refused(&["-ngld", "-otd", "-ncmoed", "-cmoed", "-lcs", "-lcd"], 1, DRAFT),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_tables_are_consistent() {
        let mut seen = HashSet::new();
        for name in FLAGS.iter().flat_map(|flag| flag.names) {
            assert!(name.starts_with('-') && !name.contains('_') && seen.insert(name), "{name}");
        }
        for (name, flag) in VARIABLES {
            assert!(name.starts_with("LLAMA_ARG_") && find(flag).is_some(), "{name} {flag}");
        }
        assert!(MODEL_FLAGS.iter().all(|flag| VARIABLES.iter().any(|(_, of)| of == flag)));
        assert_eq!(find("--spec-draft-n-max").map(|flag| flag.verdict), Some(Verdict::Refused(DRAFT)));
        assert!(find("--special").is_none());
    }

    #[test]
    fn variables_that_are_set() {
        let found = |set: &'static [(&str, &str)], ours: &str| {
            let value = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            let found = variables(value, |flag| flag == ours);
            found.into_iter().map(|(name, _, names_model)| (name, names_model)).collect::<Vec<_>>()
        };
        let set = &[("LLAMA_ARG_DOCKER_REPO", "a/b"), ("LLAMA_ARG_N_PARALLEL", "4"), ("LLAMA_ARG_MODEL", "x")];
        assert_eq!(found(set, ""), [("LLAMA_ARG_DOCKER_REPO", true), ("LLAMA_ARG_N_PARALLEL", false)]);
        assert_eq!(found(set, "--parallel"), [("LLAMA_ARG_DOCKER_REPO", true)]);
        assert_eq!(found(&[("LLAMA_ARG_DOCKER_REPO", ""), ("LLAMA_ARG_LOG_JSONL", "off")], ""), []);
        assert_eq!(found(&[("LLAMA_ARG_LOG_JSONL", "1")], ""), [("LLAMA_ARG_LOG_JSONL", false)]);
    }
}
