//! `hobbit-rpc` on a loopback port: the binary, ggml's RPC client against it, and experts on it.

use std::ffi::{CStr, CString};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use ggml_sys::{llama, rpc};
use hobbit::options::DeviceChoice;
use hobbit::{DeviceOptions, Model, ModelOptions, Sampler, SamplingOptions};
use hobbit_core::plan::ExpertCache;
use hobbit_synth::Spec;

use crate::fixture::cases::all_architectures;
use crate::fixture::cli::{Ran, check_refusals, program, ran};
use crate::fixture::compare::{DEVICE_SIZES, check_on_device, each, options};
use crate::fixture::{self, in_own_process, one_thread};

fn command(args: &[&str]) -> Command {
    let mut command = program(env!("CARGO_BIN_EXE_hobbit-rpc"));
    command.args(args).env_remove("GGML_RPC_DEBUG");
    command
}

fn run(args: &[&str]) -> Ran {
    ran(command(args).output().unwrap())
}

/// A server that listens, with one thread of this machine's CPU; killed when dropped.
struct Server {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    /// Lines before it listened.
    printed: Vec<String>,
    port: u16,
}

impl Server {
    /// Starts one on a port that was free. Another process may take the port first: then the next one is tried.
    fn start(args: &[&str], cache: &Path) -> Server {
        for _ in 0..16 {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            let mut command = command(&["-t", "1", "-d", "CPU", "-p", &port.to_string()]);
            command.args(args).env("LLAMA_CACHE", cache).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut printed = Vec::new();
            for line in lines.by_ref() {
                let line = line.unwrap();
                if line.starts_with("listening on ") {
                    assert!(line.ends_with(&format!(":{port}")), "{line}");
                    return Server { child, lines, printed, port };
                }
                printed.push(line);
            }
            let stderr = stderr_of(&mut child);
            assert!(stderr.contains("in use"), "{stderr}");
        }
        panic!("other processes took 16 free ports");
    }

    fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn next_line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn stderr_of(child: &mut Child) -> String {
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

#[test]
fn help_and_mistakes() {
    let help = run(&["--help"]).expect(0).stdout;
    for part in ["-H, --host", "-p, --port", "-d, --device", "-t, --threads", "-c, --cache", "50052", "Examples:"] {
        assert!(help.contains(part), "{part} is missing in:\n{help}");
    }
    assert_eq!(run(&["--version"]).expect(0).stdout, concat!("hobbit-rpc ", env!("HOBBIT_VERSION"), "\n"));
    let usage: &[(&[&str], i32, &str)] = &[
        (&["-p", "65536"], 2, "'65536'"),
        (&["-H", "example.invalid"], 2, "expected an IPv4 address"),
        (&["-H", "::1"], 2, "expected an IPv4 address"),
        (&["-t", "0"], 2, "invalid value '0' for '--threads <N>'"),
        (&["-d", "CPU,Sextant7"], 1, "no device is named 'Sextant7'; there are "),
    ];
    check_refusals(run, usage);
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let refused = run(&["-p", &port.to_string()]).expect(1);
    refused.says(&[&format!("error: cannot listen on 127.0.0.1:{port}: "), "in use", "--port"]);
    // TEST-NET-1: an address of no machine.
    let refused = run(&["-H", "192.0.2.1"]).expect(1);
    refused.says(&["cannot listen on 192.0.2.1:50052: ", "warning: 192.0.2.1 can be reached from other machines"]);
}

#[cfg(unix)]
#[test]
fn one_client_after_another_until_ctrl_c() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(&[], dir.path());
    assert!(server.printed.iter().any(|line| line.starts_with("CPU: ")), "{:?}", server.printed);
    for _ in 0..2 {
        let client = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).unwrap();
        assert_eq!(server.next_line(), "client connected");
        drop(client);
        assert_eq!(server.next_line(), "client gone");
    }
    crate::fixture::cli::send(&server.child, "INT");
    assert_eq!(server.child.wait().unwrap().code(), Some(130));
    assert_eq!(stderr_of(&mut server.child), "");
}

#[test]
fn ggmls_client_gets_back_what_it_sends() {
    // A server with -c keeps weights above 10 MiB.
    const BYTES: usize = 12 << 20;
    let cache = tempfile::tempdir().unwrap();
    let mut server = Server::start(&["-c"], cache.path());
    let kept = cache.path().join("rpc");
    assert!(server.printed.iter().any(|line| line.ends_with(&kept.display().to_string())), "{:?}", server.printed);

    ggml_sys::register_backends();
    let endpoint = CString::new(server.endpoint()).unwrap();
    let sent: Vec<u8> = (0..BYTES).map(|i| (i * 31 % 251) as u8).collect();
    let mut received = vec![0; BYTES];
    // SAFETY: each result is checked before it is used; the tensor lies inside the buffer; all is freed once, the
    // buffer before the backend.
    unsafe {
        let reg = rpc::ggml_backend_rpc_add_server(endpoint.as_ptr());
        assert!(!reg.is_null());
        assert_eq!(llama::ggml_backend_reg_dev_count(reg), 1);
        let device = llama::ggml_backend_reg_dev_get(reg, 0);
        assert_eq!(CStr::from_ptr(llama::ggml_backend_dev_description(device)), endpoint.as_c_str());
        let backend = llama::ggml_backend_dev_init(device, std::ptr::null());
        assert!(!backend.is_null());

        let context = llama::ggml_init(llama::ggml_init_params {
            mem_size: 2 * llama::ggml_tensor_overhead(),
            mem_buffer: std::ptr::null_mut(),
            no_alloc: true,
        });
        let tensor = llama::ggml_new_tensor_1d(context, llama::GGML_TYPE_I8, BYTES as i64);
        let buffer = llama::ggml_backend_alloc_ctx_tensors(context, backend);
        assert!(!buffer.is_null() && !llama::ggml_backend_buffer_is_host(buffer));
        llama::ggml_backend_buffer_set_usage(buffer, llama::GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        llama::ggml_backend_tensor_set(tensor, sent.as_ptr().cast(), 0, BYTES);
        llama::ggml_backend_tensor_get(tensor, received.as_mut_ptr().cast(), 0, BYTES);
        llama::ggml_backend_buffer_free(buffer);
        llama::ggml_free(context);
        llama::ggml_backend_free(backend);
    }
    assert!(sent == received);
    assert_eq!(server.next_line(), "client connected");
    assert_eq!(std::fs::read_dir(kept).unwrap().count(), 1);
}

/// hobbit on the device of a server.
fn on(endpoint: String, cache: ExpertCache) -> DeviceOptions {
    let devices = DeviceChoice::Named(vec!["RPC0".into()]);
    DeviceOptions { devices, rpc: vec![endpoint], headroom: 0.0, cache, ..DeviceOptions::default() }
}

/// Every logit is, bit for bit, that of stock llama.cpp with all layers on the same server.
#[test]
fn logits_are_llama_cpps_on_the_same_server() {
    if !in_own_process("rpc::logits_are_llama_cpps_on_the_same_server") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&[], dir.path());
    let device = on(server.endpoint(), ExpertCache::Auto);
    hobbit::devices(&device.rpc).unwrap();
    let options = ModelOptions { device, ..options(ExpertCache::Auto) };
    each(all_architectures().into_iter().take(2), |case| check_on_device(&case, &options, &DEVICE_SIZES, &mut |_| ()));
}

#[test]
fn reads_are_as_many_as_forecast() {
    if !in_own_process("rpc::reads_are_as_many_as_forecast") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&[], dir.path());
    fixture::quiet_llama_cpp();
    let device = on(server.endpoint(), ExpertCache::Auto);
    hobbit::devices(&device.rpc).unwrap();
    fixture::forecast::check(&device, &fixture::forecast::SIZES[4..]);
}

const PART: &str = "HOBBIT_TEST_PART";
const ENDPOINT: &str = "HOBBIT_TEST_ENDPOINT";
const MODEL: &str = "HOBBIT_TEST_MODEL";
/// The child writes this when the server may be killed.
const READY: &str = "the server may go";

/// A server is killed while it is in use. ggml then ends the process, so [`child`] runs in a process of its own: this
/// program, whose part is in the environment. Returns how it ended.
fn run_until_killed(part: &str) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(&[], dir.path());
    let path = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rpc::child", "--nocapture"])
        .envs([(PART, part), (ENDPOINT, &server.endpoint()), (MODEL, path.to_str().unwrap())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    if lines.any(|line| line.contains(READY)) {
        server.kill();
        writeln!(child.stdin.take().unwrap()).unwrap();
        lines.for_each(drop);
    }
    ran(child.wait_with_output().unwrap())
}

/// Not a test of its own: see [`run_until_killed`].
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
    let is_listed = |rpc: &[String]| hobbit::devices(rpc).unwrap().iter().any(|device| device.name == "RPC0");
    let options = ModelOptions { device: on(endpoint.clone(), ExpertCache::Percent(50.0)), ..ModelOptions::default() };
    if part == "known" {
        let rpc = &options.device.rpc;
        assert!(is_listed(rpc));
        wait();
        let listed = hobbit::devices(rpc).map(drop).unwrap_err().to_string();
        let opened = Model::open(path.as_ref(), &options).err().unwrap().to_string();
        for error in [listed, opened] {
            assert!(error.contains("cannot connect to") && error.contains(&endpoint), "{error}");
        }
        // Without its name it is not needed.
        assert!(!is_listed(&[]));
        let device = DeviceOptions { devices: DeviceChoice::Auto, rpc: Vec::new(), ..options.device.clone() };
        assert!(Model::open(path.as_ref(), &ModelOptions { device, ..options }).is_ok());
        return;
    }
    let model = Model::open(path.as_ref(), &options).unwrap();
    let mut session = model.session(&one_thread(256)).unwrap();
    session.feed(&[1, 2, 3]).unwrap();
    if part == "feeding" {
        wait();
        let result = session.feed(&(4..100).collect::<Vec<_>>());
        panic!("without a server: {result:?}");
    }
    let mut sampler = Sampler::new(&model, &SamplingOptions::greedy()).unwrap();
    let mut tokens = session.generate(&mut sampler, None);
    tokens.next().unwrap().unwrap();
    wait();
    panic!("without a server: {:?}", tokens.collect::<Result<Vec<_>, _>>());
}

#[test]
fn a_server_that_is_killed_ends_a_run_with_a_message() {
    for part in ["generating", "feeding"] {
        let ran = run_until_killed(part).expect(1).says(&["RPC server", "start it again"]);
        assert!(!ran.stderr.contains("/llama.cpp/") && !ran.stderr.contains("panicked"), "{part}: {}", ran.stderr);
    }
}

#[test]
fn a_server_that_is_gone_is_not_needed() {
    run_until_killed("known").expect(0);
}
