//! Flags of llama.cpp's and ik_llama.cpp's programs that hobbit's lack.
//!
//! A flag that could change the output or leave work undone is refused with the remedy. Performance hints are
//! accepted and reported. Requests for hobbit's fixed behaviour are accepted silently.

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

/// A flag of another program.
#[derive(Clone, Copy, Debug)]
pub struct Unsupported {
    names: &'static str,
    /// Words that follow it.
    pub values: usize,
    /// The treatment.
    pub verdict: Verdict,
}

/// The flag of that name, if one of those programs has it.
pub fn find(name: &str) -> Option<&'static Unsupported> {
    FLAGS.iter().find(|flag| flag.names.split(' ').any(|spelling| spelling == name))
}

const fn refused(names: &'static str, values: usize, why: &'static str) -> Unsupported {
    Unsupported { names, values, verdict: Verdict::Refused(why) }
}

const fn no_effect(names: &'static str, values: usize, why: &'static str) -> Unsupported {
    Unsupported { names, values, verdict: Verdict::NoEffect(why) }
}

const fn implied(names: &'static str, values: usize) -> Unsupported {
    Unsupported { names, values, verdict: Verdict::Implied }
}

const DOCKER: &str = "models come from files, the Hub (-hf) and URLs (-mu)";
const DEFAULTS: &str = "name the repository: -hf USER/REPO[:QUANT]";
const DRAFT: &str = "the draft model has the target's settings, except for -cd, -devd and -ngld";
const DRAFT_HUB: &str = "give the draft model's file: -md FILE";
const DRAFTING: &str = "the drafters have llama.cpp's defaults; see --spec-type and --spec-draft-n-max";
const MEDIA: &str = "name the repository (-hf) and the projector (--mmproj)";
const VIDEO: &str = "images and sound are supported, videos are not; see --image";
const PROJECTOR: &str = "the projector is the file of --mmproj, and runs on the CPU";
const PLACEMENT: &str = "hobbit places experts itself; see --device-cache, --mem-budget and --expert-cache";
const LAYERS: &str = "layers go where -ngl and -ts say; give a smaller -ngl if they do not fit";
const READING: &str = "hobbit reads the file itself; see --io and --mem-budget";
const TASKS: &str = "score tasks with lm-eval through hobbit-server";
const STRIDE: &str = "chunks do not overlap; leave it out, or score tasks with lm-eval through hobbit-server";
const SCHEDULING: &str = "threads are left to the system's scheduler; see -t, or taskset(1)";
const LOGGING: &str = "log lines have one form; see --log-file and --verbosity";
const NO_TOOLS: &str = "the server runs no tools; clients do";
const OWN_PAGE: &str = "the server's page keeps its settings in the browser; --no-ui turns it off";
const CORS: &str = "--cors-origins alone decides which pages may use the server";
const FUSED: &str = "experts are always computed together; see --kernels";
const LATENT: &str = "latent attention is used where the model has it; -ub bounds the compute buffers";

static FLAGS: &[Unsupported] = &[
    implied("--no-mmap --no-log-jsonl", 0),
    no_effect("--mmap --mlock -dio --direct-io -ndio --no-direct-io", 0, READING),
    no_effect("-lm --load-mode -lzm --lazy-mode", 1, READING),
    no_effect("--no-host", 0, PLACEMENT),
    no_effect("-ncffn --n-cpu-ffn -fit --fit -fitt --fit-target -fitc --fit-ctx", 1, LAYERS),
    no_effect("--moe-cache-mib", 1, PLACEMENT),
    no_effect("--prio --poll --prio-batch --poll-batch --cpu-strict --cpu-strict-batch", 1, SCHEDULING),
    no_effect("--numa", 1, SCHEDULING),
    no_effect("-dt --defrag-thold", 1, "the KV cache needs no defragmentation"),
    no_effect("-bs --backend-sampling", 0, "sampling runs on the CPU"),
    no_effect("--log-colors", 1, LOGGING),
    no_effect("--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps", 0, LOGGING),
    no_effect("-cram --cache-ram", 1, "a slot keeps its last prompt in the context; see -np and -c"),
    no_effect("--cache-idle-slots --no-cache-idle-slots", 0, "a slot keeps its last prompt until it is reused"),
    refused("--log-jsonl", 0, LOGGING),
    refused("-C --cpu-mask -Cr --cpu-range -Cb --cpu-mask-batch -Crb --cpu-range-batch", 1, SCHEDULING),
    refused("--hellaswag --winogrande --multiple-choice", 0, TASKS),
    refused("--ppl-stride", 1, STRIDE),
    refused("--hellaswag-tasks --winogrande-tasks --multiple-choice-tasks", 1, TASKS),
    refused("-dr --docker-repo", 1, DOCKER),
    refused("-cl --cache-list", 0, "gguf-tools list shows the downloaded models"),
    refused("--gpt-oss-20b-default --gpt-oss-120b-default --embd-gemma-default", 0, DEFAULTS),
    refused("--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default", 0, DEFAULTS),
    refused("--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default", 0, DEFAULTS),
    refused("--vision-gemma-4b-default --vision-gemma-12b-default", 0, MEDIA),
    refused("-ptc --print-token-count", 1, "see --stats-json for the counts at the end"),
    refused("-gan --grp-attn-n -gaw --grp-attn-w", 1, "self-extend is not supported; see --rope-scale"),
    refused("--server-base", 1, "hobbit-cli runs the model itself"),
    refused("-mmu --mmproj-url", 1, "give the projector's file: --mmproj FILE"),
    refused("--video --video-fps --video-timestamp-interval --video-ffmpeg-dir", 1, VIDEO),
    no_effect("-mmdev --mmproj-device", 1, PROJECTOR),
    no_effect("--mmproj-auto --mmproj-offload", 0, PROJECTOR),
    implied("--no-mmproj --no-mmproj-auto --no-mmproj-offload", 0),
    refused("-o --output --output-file", 1, "redirect the standard output instead"),
    refused("--completion-bash", 0, "give it as the only flag; see --completions"),
    refused("--log-prompts-dir", 1, "prompts are not logged; see --verbose-prompt"),
    refused("--spec-draft-hf -hfd -hfrd --hf-repo-draft", 1, DRAFT_HUB),
    refused("--spec-draft-threads -td --threads-draft", 1, DRAFT),
    refused("--spec-draft-threads-batch -tbd --threads-batch-draft", 1, DRAFT),
    refused("--spec-draft-cpu-mask -Cd --cpu-mask-draft", 1, SCHEDULING),
    refused("--spec-draft-cpu-range -Crd --cpu-range-draft", 1, SCHEDULING),
    refused("--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft", 1, SCHEDULING),
    refused("--spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft", 1, SCHEDULING),
    no_effect("--spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft", 1, SCHEDULING),
    no_effect("--spec-draft-poll --poll-draft --spec-draft-poll-batch --poll-batch-draft", 1, SCHEDULING),
    no_effect("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft", 1, SCHEDULING),
    no_effect("--spec-draft-prio-batch --prio-batch-draft", 1, SCHEDULING),
    refused("--spec-draft-type-k -ctkd --cache-type-k-draft", 1, DRAFT),
    refused("--spec-draft-type-v -ctvd --cache-type-v-draft", 1, DRAFT),
    refused("--spec-draft-override-tensor -otd --override-tensor-draft", 1, DRAFT),
    refused("--spec-draft-cpu-moe -cmoed --cpu-moe-draft", 0, DRAFT),
    refused("--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft", 1, DRAFT),
    no_effect("--spec-draft-p-split --draft-p-split", 1, "llama.cpp's drafters do not use it either"),
    no_effect("--spec-draft-backend-sampling --no-spec-draft-backend-sampling", 0, "sampling runs on the CPU"),
    refused("--spec-draft-sampling", 1, "drafts are the draft model's most probable tokens"),
    refused("--spec-synth-len --spec-synth-rates", 1, "the texts would be meaningless"),
    refused("--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match", 1, DRAFTING),
    refused("--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits", 1, DRAFTING),
    refused("--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits", 1, DRAFTING),
    refused("--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m", 1, DRAFTING),
    refused("--spec-ngram-map-k4v-min-hits", 1, DRAFTING),
    refused("--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits", 1, DRAFTING),
    refused("--spec-default", 0, "name the source of drafts, e.g. --spec-type ngram-cache"),
    // llama-server's.
    refused("--path", 1, "the server serves its own page and no files; --no-ui turns the page off"),
    refused("--api-prefix", 1, "a proxy in front of the server can add a prefix"),
    refused("--media-path", 1, "requests bring images and sound themselves, as base64"),
    no_effect("--mtmd-batch-max-tokens", 1, PROJECTOR),
    refused("--tools --tools-runtime --mcp-servers-config --mcp-servers-json", 1, NO_TOOLS),
    refused("-ag --agent --ui-mcp-proxy --webui-mcp-proxy", 0, NO_TOOLS),
    implied("-no-ag --no-agent --no-ui-mcp-proxy --no-webui-mcp-proxy", 0),
    no_effect("--ui-config --webui-config --ui-config-file --webui-config-file", 1, OWN_PAGE),
    refused("--cors-methods --cors-headers", 1, CORS),
    refused("--cors-credentials --no-cors-credentials", 0, CORS),
    refused("--rerank --reranking", 0, "the server does not rerank"),
    refused("--embd-normalize", 1, "requests say it: the field embd_normalize"),
    refused("--reuse-port", 0, "each server has a port of its own; --port 0 takes a free one"),
    refused("--kv-unified-per-slot", 1, "-c is the context of all slots; give -np and -c"),
    // ik_llama.cpp's.
    no_effect("-rtr --run-time-repack", 0, "weights are rearranged where that helps; see --repack"),
    no_effect("-fmoe --fused-moe -no-fmoe --no-fused-moe", 0, FUSED),
    no_effect("-ger --grouped-expert-routing -no-fug --no-fused-up-gate", 0, FUSED),
    no_effect("-mla --mla-use -amb --attention-max-batch", 1, LATENT),
    refused(
        "-ser --smart-expert-reduction",
        1,
        "--drop leaves out missing experts of little weight; --override-kv ARCH.expert_used_count=int:N uses fewer",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_tables_are_consistent() {
        let mut seen = HashSet::new();
        for name in FLAGS.iter().flat_map(|flag| flag.names.split(' ')) {
            assert!(name.starts_with('-') && !name.contains('_') && seen.insert(name), "{name}");
        }
        assert_eq!(find("--spec-draft-hf").map(|flag| flag.verdict), Some(Verdict::Refused(DRAFT_HUB)));
        assert!(find("--special").is_none());
    }
}
