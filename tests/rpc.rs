//! `hobbit-rpc`: the binary on a loopback port, and ggml's RPC client against it.

use std::ffi::{CStr, CString};
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ggml_sys::{llama, rpc};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hobbit-rpc"));
    command.args(args).env_remove("GGML_RPC_DEBUG").stdin(Stdio::null());
    command
}

fn failed(args: &[&str], status: i32) -> String {
    let Output { status: actual, stdout, stderr } = command(args).output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(actual.code(), Some(status), "{args:?}: {stderr}");
    assert!(!String::from_utf8(stdout).unwrap().contains("listening"), "{args:?}");
    stderr
}

/// A server that listens; killed when dropped.
struct Server {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    /// Lines before it listened.
    printed: Vec<String>,
    port: u16,
}

impl Server {
    /// Starts one on a port that was free. Another process may take the port first: then the next one is tried.
    fn start(args: &[&str], cache: Option<&Path>) -> Server {
        for _ in 0..16 {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            let mut command = command(&["-t", "1", "-p", &port.to_string()]);
            command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
            if let Some(cache) = cache {
                command.env("LLAMA_CACHE", cache);
            }
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

    fn next_line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    /// Ends it; returns stderr.
    fn end(mut self) -> String {
        self.child.kill().unwrap();
        stderr_of(&mut self.child)
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
fn help_shows_every_flag_and_examples() {
    let output = command(&["--help"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let help = String::from_utf8(output.stdout).unwrap();
    for part in ["-H, --host", "-p, --port", "-d, --device", "-t, --threads", "-c, --cache", "50052", "Examples:"] {
        assert!(help.contains(part), "{part} is missing in:\n{help}");
    }
    let version = command(&["--version"]).output().unwrap().stdout;
    assert_eq!(String::from_utf8(version).unwrap(), concat!("hobbit-rpc ", env!("HOBBIT_VERSION"), "\n"));
}

#[test]
fn wrong_usage_exits_with_2_and_names_the_mistake() {
    for (args, part) in [
        (&["-p", "0"][..], "invalid value '0' for '--port <PORT>'"),
        (&["-p", "65536"], "'65536'"),
        (&["-H", "example.invalid"], "expected an IPv4 address"),
        (&["-H", "::1"], "expected an IPv4 address"),
        (&["-t", "0"], "invalid value '0' for '--threads <N>'"),
        (&["stray"], "'stray'"),
    ] {
        let stderr = failed(args, 2);
        assert!(stderr.starts_with("error: ") && stderr.contains(part), "{args:?}: {stderr}");
    }
}

#[test]
fn an_unknown_device_is_named_beside_those_there_are() {
    let stderr = failed(&["-d", "CPU,Sextant7"], 1);
    assert!(
        stderr.contains("no device is named 'Sextant7'; there are ")
            && stderr.contains("CPU")
            && stderr.contains("--device"),
        "{stderr}"
    );
}

#[test]
fn a_taken_port_is_an_error() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let stderr = failed(&["-p", &port.to_string()], 1);
    assert!(stderr.starts_with(&format!("error: cannot listen on 127.0.0.1:{port}: ")), "{stderr}");
    assert!(stderr.contains("in use") && stderr.contains("--port"), "{stderr}");
}

#[test]
fn an_address_of_another_machine_is_an_error() {
    // TEST-NET-1: an address of no machine.
    let stderr = failed(&["-H", "192.0.2.1"], 1);
    assert!(stderr.contains("error: cannot listen on 192.0.2.1:50052: "), "{stderr}");
    assert!(stderr.contains("warning: 192.0.2.1 can be reached from other machines"), "{stderr}");
}

#[test]
fn one_client_after_another() {
    let mut server = Server::start(&["-d", "cpu"], None);
    assert!(server.printed.iter().any(|line| line.starts_with("CPU: ")), "{:?}", server.printed);
    for _ in 0..2 {
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).unwrap();
        assert_eq!(server.next_line(), "client connected");
        drop(client);
        assert_eq!(server.next_line(), "client gone");
    }
    assert_eq!(server.end(), "");
}

#[cfg(unix)]
#[test]
fn ctrl_c_exits_with_130() {
    let mut server = Server::start(&["-d", "CPU"], None);
    let pid = i32::try_from(server.child.id()).unwrap();
    // SAFETY: a child of ours that was not waited for.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    assert_eq!(server.child.wait().unwrap().code(), Some(130));
}

#[test]
fn ggmls_client_finds_the_device_and_gets_back_what_it_sends() {
    // A server with -c keeps weights above 10 MiB.
    const BYTES: usize = 12 << 20;
    let cache = tempfile::tempdir().unwrap();
    let mut server = Server::start(&["-d", "CPU", "-c"], Some(cache.path()));
    let kept = cache.path().join("rpc");
    assert!(server.printed.iter().any(|line| line.ends_with(&kept.display().to_string())), "{:?}", server.printed);

    ggml_sys::register_backends();
    let endpoint = CString::new(format!("127.0.0.1:{}", server.port)).unwrap();
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
