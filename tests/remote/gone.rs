//! An RPC server that is killed while it is in use. ggml then ends the process, so the tests run a child process: this
//! program, whose part is in the environment.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use gguf_tools::synth::Spec;
use hobbit::options::DeviceChoice;
use hobbit::{DeviceOptions, Model, ModelOptions, Sampler, SamplingOptions, SessionOptions};
use hobbit_core::plan::ExpertCache;

use super::server::Server;
use crate::fixture;

const PART: &str = "HOBBIT_TEST_PART";
const ENDPOINT: &str = "HOBBIT_TEST_ENDPOINT";
const MODEL: &str = "HOBBIT_TEST_MODEL";
/// The child writes this when the server may be killed.
const READY: &str = "the server may go";

/// Runs [`child`] in a process of its own and kills the server when that is ready. Exit code, stdout after that,
/// stderr.
fn run(part: &str) -> (Option<i32>, String, String) {
    let mut server = Server::start();
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "remote::gone::child", "--nocapture"])
        .envs([(PART, part), (ENDPOINT, &server.endpoint()), (MODEL, path.to_str().unwrap())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains(READY) {
        line.clear();
        if stdout.read_line(&mut line).unwrap() == 0 {
            let output = child.wait_with_output().unwrap();
            panic!("{part}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
    server.kill();
    writeln!(child.stdin.take().unwrap()).unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code(), rest, String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Not a test of its own: see [`run`].
#[test]
fn child() {
    let (Ok(part), Ok(endpoint), Ok(path)) = (std::env::var(PART), std::env::var(ENDPOINT), std::env::var(MODEL))
    else {
        return;
    };
    let wait = || {
        println!("{READY}");
        std::io::stdin().read_line(&mut String::new()).unwrap();
    };
    let devices = DeviceChoice::Named(vec!["RPC0".into()]);
    let device = DeviceOptions { devices, rpc: vec![endpoint.clone()], headroom: 0.0, ..DeviceOptions::default() };
    let device = DeviceOptions { cache: ExpertCache::Percent(50.0), ..device };
    let options = ModelOptions { device, ..ModelOptions::default() };
    if part == "known" {
        assert!(hobbit::devices(std::slice::from_ref(&endpoint)).unwrap().iter().any(|device| device.name == "RPC0"));
        wait();
        let error = hobbit::devices(std::slice::from_ref(&endpoint)).unwrap_err().to_string();
        assert!(error.contains("cannot connect to") && error.contains(&endpoint), "{error}");
        let error = Model::open(path.as_ref(), &options).err().unwrap().to_string();
        assert!(error.contains("cannot connect to") && error.contains(&endpoint), "{error}");
        // Without its name it is not needed.
        assert!(!hobbit::devices(&[]).unwrap().iter().any(|device| device.name == "RPC0"));
        let without = DeviceOptions { devices: DeviceChoice::Auto, rpc: Vec::new(), ..options.device.clone() };
        assert!(Model::open(path.as_ref(), &ModelOptions { device: without, ..options }).is_ok());
        return;
    }
    let model = Model::open(path.as_ref(), &options).unwrap();
    let options = SessionOptions { n_ctx: 256, threads: Some(1), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    session.feed(&[1, 2, 3]).unwrap();
    let mut sampler = Sampler::new(&model, &SamplingOptions::greedy()).unwrap();
    if part == "feeding" {
        wait();
        let result = session.feed(&(4..100).collect::<Vec<_>>());
        panic!("without a server: {result:?}");
    }
    let mut tokens = session.generate(&mut sampler, None);
    tokens.next().unwrap().unwrap();
    wait();
    panic!("without a server: {:?}", tokens.collect::<Result<Vec<_>, _>>());
}

#[test]
fn a_server_that_is_killed_ends_a_run_with_a_message() {
    for part in ["generating", "feeding"] {
        let (code, _, stderr) = run(part);
        assert_eq!(code, Some(1), "{part}: {stderr}");
        assert!(stderr.contains("RPC server") && stderr.contains("start it again"), "{part}: {stderr}");
        assert!(!stderr.contains("/llama.cpp/") && !stderr.contains("panicked"), "{part}: {stderr}");
    }
}

#[test]
fn a_server_that_is_gone_is_not_needed() {
    let (code, stdout, stderr) = run("known");
    assert_eq!(code, Some(0), "{stdout}{stderr}");
}
