//! Models that are fetched first, from a server of the test's own.

use crate::fixture::cli::*;
use crate::fixture::hub::{hub, server::Server};

/// hobbit-cli with this Hub, and with caches in `dir`.
fn fetching(server: &Server, dir: &std::path::Path, args: &[&str]) -> Cli {
    let mut cli = cli(&[args, &["--temp", "0", "-t", "1", "-c", "256", "-p", "In the", "-n", "4", "-no-cnv"]].concat());
    for name in ["MODEL_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"]
    {
        cli.command.env_remove(name);
    }
    cli.command
        .env("HF_ENDPOINT", server.url(""))
        .env("HF_HOME", dir.join("hf"))
        .env("XDG_CACHE_HOME", dir.join("cache"));
    cli
}

#[test]
fn a_model_of_the_hub_runs_as_a_file_does() {
    let (server, dir) = (hub(None), tempfile::tempdir().unwrap());
    let expected = demo(&["-p", "In the", "-n", "4", "-no-cnv"]).run().expect(0).stdout;
    let ran = fetching(&server, dir.path(), &["-hf", "a/b:q8_0"]).run().expect(0);
    assert_eq!(ran.stdout, expected);
    assert!(ran.stderr.contains("hobbit: downloading a/b/demo-Q8_0.gguf ("), "{}", ran.stderr);
    let ran = fetching(&server, dir.path(), &["-hf", "a/b", "--offline"]).run().expect(0);
    assert!(ran.stdout == expected && !ran.stderr.contains("downloading"), "{}", ran.stderr);
    let ran = fetching(&server, dir.path(), &["-mu", &server.url("/demo.gguf"), "--quiet"]).run().expect(0);
    assert_eq!((ran.stdout, ran.stderr.as_str()), (expected, ""));
    // By the environment, and overridden by a typed flag.
    let mut cli = fetching(&server, dir.path(), &[]);
    cli.command.env("LLAMA_ARG_HF_REPO", "a/b");
    cli.run().expect(0);
    let mut cli = fetching(&server, dir.path(), &["-m", demo_model().to_str().unwrap()]);
    cli.command.env("LLAMA_ARG_HF_REPO", "no/such");
    cli.run().expect(0);
}

#[test]
fn failed_downloads_name_the_remedy() {
    let (server, dir) = (hub(None), tempfile::tempdir().unwrap());
    let rows: &[(&[&str], i32, &str)] = &[
        (&["-hf", "a/b:Q2_K"], 1, "a/b: it has no file of the quant 'Q2_K'; there are Q8_0"),
        (&["-hf", "a/c", "--offline"], 1, "run once without --offline"),
    ];
    check_refusals(|args| fetching(&server, dir.path(), args).run(), rows);
}

/// By a signal.
#[cfg(unix)]
#[test]
fn ctrl_c_keeps_the_part_that_was_downloaded() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    const CAME: usize = 100_000;
    let (server, dir) = (hub(Some(CAME)), tempfile::tempdir().unwrap());
    let mut cli = fetching(&server, dir.path(), &["-hf", "a/b"]);
    let mut child = cli.command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let part = dir.path().join(format!("hf/hub/models--a--b/blobs/{}.incomplete", "d".repeat(40)));
    while std::fs::metadata(&part).map_or(0, |found| found.len()) < CAME as u64 {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before the signal");
        std::thread::yield_now();
    }
    send(&child, "INT");
    let lines: Vec<String> = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("run the same command to resume")), "{lines:?}");
    assert_eq!(std::fs::metadata(&part).unwrap().len(), CAME as u64);
    server.seen();
    let ran = fetching(&server, dir.path(), &["-hf", "a/b"]).run().expect(0);
    assert!(ran.stderr.contains("going on at 97.66 KiB"), "{}", ran.stderr);
    assert!(server.seen().iter().any(|request| request.from() == Some(CAME)));
    assert!(!part.exists());
}
