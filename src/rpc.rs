//! `hobbit-rpc`: this machine's devices for other hobbits. Names and defaults follow llama.cpp's `ggml-rpc-server`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};

use super::args::{AboutArgs, read};
use super::{exit, output, signals};
use hobbit::engine::{RpcEvent, RpcServer};
use hobbit::{LogLevel, set_log};
use hobbit_core::units::Bytes;

const EXAMPLES: &str = "\
Examples:
  hobbit-rpc
      Serve this machine's GPUs, or its CPU where it has none, to programs on this machine.
  hobbit-rpc -H 192.168.1.7 -c
      Serve a trusted network; keep large ordinary weights on disk, so that they are sent only once (experts are sent
      each time).
  hobbit-rpc -d CUDA1 -p 50053
      One device of several.

One client is served at a time; others wait. llama.cpp of the same version understands the same protocol.
Environment: -c keeps tensors in $LLAMA_CACHE/rpc, else $XDG_CACHE_HOME/llama.cpp/rpc, else ~/.cache/llama.cpp/rpc;
GGML_RPC_DEBUG shows every command.
Exit status: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.";

/// Serve this machine's devices to other hobbits (--rpc HOST:PORT).
#[derive(Debug, Parser)]
#[command(
    name = "hobbit-rpc",
    version = env!("HOBBIT_VERSION"),
    override_usage = "hobbit-rpc [OPTIONS]",
    args_override_self = true,
    disable_help_flag = true,
    disable_version_flag = true,
    max_term_width = 110,
    after_help = EXAMPLES
)]
struct Args {
    /// IPv4 address to listen on; 0.0.0.0 is every one this machine has. A client can do anything that this process may
    #[arg(short = 'H', long, value_name = "HOST", default_value = "127.0.0.1", value_parser = host)]
    host: Ipv4Addr,
    /// Port to listen on
    #[arg(short, long, value_name = "PORT", default_value = "50052",
          value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Devices to serve, by name, separated by commas [default: all GPUs, or the CPU where there is none]
    #[arg(short, long, value_name = "DEV1,DEV2", value_delimiter = ',')]
    device: Vec<String>,
    /// Threads that the CPU computes on [default: half of the logical CPUs]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..=512))]
    threads: Option<i32>,
    /// Keep large tensors that clients send in a directory, and do not have them sent again
    #[arg(short, long)]
    cache: bool,
    #[command(flatten)]
    about: AboutArgs,
}

/// Runs `hobbit-rpc` with the arguments of this process.
pub fn main() -> ExitCode {
    hobbit_common::output::prepare_console();
    exit::code(run(std::env::args_os().skip(1)))
}

fn run(words: impl Iterator<Item = OsString>) -> Result<u8> {
    let parse = |words| Args::try_parse_from(std::iter::once("hobbit-rpc".into()).chain(words));
    let args: Args = read(Args::command, words.collect(), parse)?;
    signals::watch(|signal| signals::end_at_once(signal.status()))?;
    let shown = if variable("GGML_RPC_DEBUG").is_some() { LogLevel::Debug } else { LogLevel::Warn };
    set_log(move |level, text| {
        if level >= shown {
            let _ = write!(io::stderr(), "{text}");
        }
    });
    let cache = if args.cache { Some(made_cache()?) } else { None };
    let server = RpcServer::new(&args.device)?;
    for device in server.devices() {
        let (total, free) = (Bytes(device.total), Bytes(device.free));
        say(&format!("{}: {} ({total}, {free} free)", device.name, device.description));
    }
    if let Some(cache) = &cache {
        say(&format!("tensors are kept in {}", cache.display()));
    }
    if !args.host.is_loopback() {
        output::tell(format_args!(
            "warning: {} can be reached from other machines, and the protocol knows no passwords: a client can \
             read this process's memory, crash it or take it over. Serve trusted networks only.",
            args.host
        ));
    }
    let address = SocketAddrV4::new(args.host, args.port);
    let threads = args.threads.unwrap_or_else(half_of_the_cpus);
    let error = server.serve(address, threads, cache.as_deref(), |event| match event {
        RpcEvent::Listening => say(&format!("listening on {address}")),
        RpcEvent::Connected => say("client connected"),
        RpcEvent::Disconnected => say("client gone"),
    });
    Err(error.into())
}

/// Prints a line on stdout and ignores errors.
fn say(line: &str) {
    let _ = output::say(line);
}

/// An IPv4 address: ggml's sockets accept no other.
fn host(text: &str) -> Result<Ipv4Addr, String> {
    match text {
        "localhost" => Ok(Ipv4Addr::LOCALHOST),
        text => text.parse().map_err(|_| "expected an IPv4 address such as 127.0.0.1".to_owned()),
    }
}

fn half_of_the_cpus() -> i32 {
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
    i32::try_from((cpus / 2).clamp(1, 512)).unwrap_or(1)
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The directory in which llama.cpp's `ggml-rpc-server` keeps tensors; this program shares it.
fn cache_directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name| variable(name).map(PathBuf::from);
    let cache = path("LLAMA_CACHE").or_else(|| {
        if cfg!(target_os = "macos") {
            return path("HOME").map(|home| home.join("Library/Caches/llama.cpp"));
        }
        if cfg!(windows) {
            return path("LOCALAPPDATA").map(|data| data.join("llama.cpp"));
        }
        let caches = path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")));
        caches.map(|caches| caches.join("llama.cpp"))
    })?;
    Some(cache.join("rpc"))
}

fn made_cache() -> Result<PathBuf> {
    let directory = cache_directory(variable).context("-c: set LLAMA_CACHE to a directory: there is no HOME")?;
    std::fs::create_dir_all(&directory)
        .with_context(|| format!("{}: cannot make the directory that -c keeps tensors in", directory.display()))?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rpc_servers_spellings() {
        Args::command().debug_assert();
        let args = Args::try_parse_from(["x", "-H", "0.0.0.0", "-p", "1", "-d", "a,b", "-t", "3", "-c"]).unwrap();
        assert_eq!((args.host, args.port, args.threads, args.cache), (Ipv4Addr::UNSPECIFIED, 1, Some(3), true));
        assert_eq!(args.device, ["a", "b"]);
        let args = Args::try_parse_from(["x", "--host", "localhost"]).unwrap();
        assert_eq!((args.host, args.port, args.cache), (Ipv4Addr::LOCALHOST, 50052, false));
        assert!(args.device.is_empty());
    }

    #[test]
    fn the_directory_of_tensors() {
        let with = |set: &'static [(&str, &str)]| {
            let value = move |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            cache_directory(value)
        };
        assert_eq!(with(&[("LLAMA_CACHE", "/c"), ("HOME", "/h")]), Some("/c/rpc".into()));
        assert_eq!(with(&[]), None);
        if cfg!(target_os = "linux") {
            assert_eq!(with(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]), Some("/x/llama.cpp/rpc".into()));
            assert_eq!(with(&[("HOME", "/h")]), Some("/h/.cache/llama.cpp/rpc".into()));
        }
    }
}
