//! Memory and address space that the system refuses.

use gguf_tools::synth::Spec;

use crate::fixture::{self, cli};

/// Slots are whole pages, so that many small slices take several times the memory that they take in the file: loading
/// fits below the limit, the cache does not.
#[test]
fn an_expert_cache_that_the_system_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { embd: 32, ff: 32, heads: 1, experts: 512, layers: 40, ..Spec::tiny("llama") };
    let path = fixture::write(dir.path(), &spec);
    let whole = ["--mem-budget", "4G", "--expert-cache", "100%"];
    assert_eq!(cli::run(&path, &whole).code, Some(0), "without a limit it runs");
    let refused = cli::run_within_address_space(450 << 10, &path, &whole);
    refused.is_refused(&["cannot allocate", "expert cache", "--expert-cache"]).unwrap();
}

/// With less and less address space, each refusal ends the process with a message.
#[test]
fn little_address_space() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec { layers: 8, experts: 64, ..Spec::tiny("qwen3moe") });
    for mib in (128..=512).step_by(32) {
        let run = cli::run_within_address_space(mib << 10, &path, &[]);
        match run.code {
            Some(0) => {}
            Some(1) => assert!(!run.stderr.trim().is_empty(), "{mib} MiB: no message"),
            code => panic!("{mib} MiB: exit code {code:?}:\n{}", run.stderr),
        }
    }
}
