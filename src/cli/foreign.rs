//! Flags that llama.cpp's programs have and hobbit-cli has not.
//!
//! What could change the output or leave something undone is refused with the remedy. Mere hints about speed are
//! accepted and reported. Requests for what always happens are accepted in silence.

/// What becomes of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// An error, with the reason and the remedy.
    Refused(&'static str),
    /// Dropped, with this reason.
    NoEffect(&'static str),
    /// Dropped: hobbit does so anyway.
    Implied,
}

/// One of llama.cpp's flags.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    names: &'static [&'static str],
    /// Words that follow it.
    pub values: usize,
    /// What becomes of it.
    pub verdict: Verdict,
}

/// The flag of that name, if llama.cpp has it.
pub fn find(name: &str) -> Option<&'static Foreign> {
    // Every flag of speculative decoding begins alike.
    if name.starts_with("--spec-") && name != SPECULATIVE.names[0] {
        return Some(&SPECULATIVE);
    }
    FLAGS.iter().find(|flag| flag.names.contains(&name))
}

const fn refused(names: &'static [&'static str], values: usize, why: &'static str) -> Foreign {
    Foreign { names, values, verdict: Verdict::Refused(why) }
}

const fn no_effect(names: &'static [&'static str], values: usize, why: &'static str) -> Foreign {
    Foreign { names, values, verdict: Verdict::NoEffect(why) }
}

const fn implied(names: &'static [&'static str], values: usize) -> Foreign {
    Foreign { names, values, verdict: Verdict::Implied }
}

const DOWNLOAD: &str = "hobbit downloads nothing; fetch the file and pass it with -m";
const DRAFT: &str = "speculative decoding is not supported yet";
const MEDIA: &str = "only text models are supported";
const PLACEMENT: &str = "hobbit places experts itself; see --device-cache, --mem-budget and --expert-cache";
const LAYERS: &str = "layers go where -ngl and -ts say; give a smaller -ngl if they do not fit";
const READING: &str = "hobbit reads the file itself; see --io and --mem-budget";
const SCHEDULING: &str = "threads are left to the system's scheduler; see -t, or taskset(1)";
const THINKING: &str = "what the model thinks is printed as it comes; see --chat-template";
const LOGGING: &str = "log lines have one form; see --log-file and --verbosity";

static SPECULATIVE: Foreign = refused(&["--spec-*"], 0, DRAFT);

static FLAGS: &[Foreign] = &[
    implied(&["--offline", "--no-mmap", "--skip-chat-parsing", "--no-log-jsonl"], 0),
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
    refused(&["-np", "--parallel"], 1, "hobbit-cli runs one sequence"),
    refused(
        &["--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"],
        1,
        "adapters are not supported yet",
    ),
    refused(&["--control-vector-layer-range"], 2, "adapters are not supported yet"),
    refused(
        &["-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"],
        1,
        DOWNLOAD,
    ),
    refused(&["-hft", "--hf-token"], 1, DOWNLOAD),
    refused(&["-cl", "--cache-list", "--gpt-oss-20b-default", "--gpt-oss-120b-default"], 0, DOWNLOAD),
    refused(&["--vision-gemma-4b-default", "--vision-gemma-12b-default"], 0, DOWNLOAD),
    refused(&["--prompt-cache"], 1, "sessions are not saved yet; leave it out"),
    refused(&["--prompt-cache-all", "--prompt-cache-ro"], 0, "sessions are not saved yet; leave it out"),
    refused(&["-ptc", "--print-token-count"], 1, "see --stats-json for the counts at the end"),
    refused(&["-gan", "--grp-attn-n", "-gaw", "--grp-attn-w"], 1, "self-extend is not supported; see --rope-scale"),
    refused(&["--reasoning-format", "-rea", "--reasoning", "--reasoning-effort"], 1, THINKING),
    refused(&["--reasoning-budget", "--reasoning-budget-message", "--chat-template-kwargs"], 1, THINKING),
    refused(&["--reasoning-preserve", "--no-reasoning-preserve", "--no-skip-chat-parsing"], 0, THINKING),
    refused(&["--server-base"], 1, "hobbit-cli runs the model itself"),
    refused(&["-mm", "--mmproj", "-mmu", "--mmproj-url", "-mmdev", "--mmproj-device"], 1, MEDIA),
    refused(&["--image", "--audio", "--video", "--image-min-tokens", "--image-max-tokens"], 1, MEDIA),
    refused(&["--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir"], 1, MEDIA),
    refused(&["--mmproj-auto", "--no-mmproj", "--no-mmproj-auto", "--mmproj-offload", "--no-mmproj-offload"], 0, MEDIA),
    refused(&["-o", "--output", "--output-file"], 1, "redirect the standard output instead"),
    refused(&["--log-prompts-dir"], 1, "prompts are not logged; see --verbose-prompt"),
    refused(&["--completion-bash"], 0, "there is no completion script yet"),
    refused(&["-md", "--model-draft", "-td", "--threads-draft", "-tbd", "--threads-batch-draft"], 1, DRAFT),
    refused(&["-hfd", "-hfrd", "--hf-repo-draft", "-Cd", "--cpu-mask-draft", "-Crd", "--cpu-range-draft"], 1, DRAFT),
    refused(&["-ctkd", "--cache-type-k-draft", "-ctvd", "--cache-type-v-draft", "-devd", "--device-draft"], 1, DRAFT),
    refused(&["-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "-otd", "--override-tensor-draft"], 1, DRAFT),
    refused(&["--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min", "--draft-p-min"], 1, DRAFT),
    refused(&["--draft-p-split", "-ncmoed", "--n-cpu-moe-draft", "-Cbd", "--cpu-mask-batch-draft"], 1, DRAFT),
    refused(&["--cpu-strict-draft", "--prio-draft", "--poll-draft", "--cpu-strict-batch-draft"], 1, DRAFT),
    refused(&["--prio-batch-draft", "--poll-batch-draft", "-lcs", "--lookup-cache-static"], 1, DRAFT),
    refused(&["-lcd", "--lookup-cache-dynamic"], 1, DRAFT),
    refused(&["-cmoed", "--cpu-moe-draft"], 0, DRAFT),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_look_like_flags() {
        let mut seen = HashSet::new();
        for name in FLAGS.iter().flat_map(|flag| flag.names) {
            assert!(name.starts_with('-') && !name.contains('_'), "{name}");
            assert!(seen.insert(name), "{name} twice");
        }
    }

    #[test]
    fn speculative_flags_are_one_family() {
        assert_eq!(find("--spec-draft-n-max").map(|flag| flag.verdict), Some(Verdict::Refused(DRAFT)));
        assert!(find("--special").is_none());
    }
}
