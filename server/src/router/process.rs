//! The process of one model.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use hobbit_core::plan::Budget;

use super::list::Entry;
use super::models::Models;
use super::presets::OWN;
use hobbit_common::signals;
use hobbit_programs::args;
use hobbit_programs::args::Verbosity;
use hobbit_programs::log::Level;

/// Longest line of a model's log.
const LINE_MAX: u64 = 64 << 10;

/// Flags that every model gets: the router's, without [`OWN`], and what the router needs.
pub fn common_flags(words: &[OsString], budget: Budget, verbosity: Verbosity) -> Vec<OsString> {
    let is_own = |word: &&OsString| {
        let name = word.to_str().and_then(|word| word.strip_prefix("--")?.split('=').next());
        name.is_some_and(|name| OWN.contains(&name))
    };
    let budget = match budget {
        Budget::Auto => "auto".to_owned(),
        Budget::Bytes(bytes) => bytes.to_string(),
    };
    let mut flags: Vec<OsString> = words.iter().filter(|word| !is_own(word)).cloned().collect();
    let mut needed = vec![
        "--host=127.0.0.1".to_owned(),
        "--socket-on-stdin=on".to_owned(),
        "--ui=off".to_owned(),
        "--log-format=text".to_owned(),
        "--quiet=off".to_owned(),
        format!("--mem-budget={budget}"),
    ];
    // The last lines of a process explain its end.
    let level = verbosity.shown.max(verbosity.logged);
    needed.push(format!("--verbosity={}", level.max(Level::Info as u8)));
    flags.extend(needed.into_iter().map(OsString::from));
    flags
}

/// The command that serves a model on `socket`: `presets` count less than `flags`. The process inherits the socket, so
/// that nothing it prints can name an address: its log has texts of models and clients.
pub fn command(
    program: &Path,
    presets: &[OsString],
    flags: &[OsString],
    entry: &Entry,
    key: &str,
    socket: TcpListener,
) -> Prepared {
    let mut command = Command::new(program);
    for arg in args::server::command().get_arguments() {
        if let Some(variable) = arg.get_env().filter(|_| arg.get_long().is_some_and(|long| OWN.contains(&long))) {
            command.env_remove(variable);
        }
    }
    let flag = |name: &str, value: &Path| {
        let mut word = OsString::from(name);
        word.push(value);
        word
    };
    command
        .args(entry.projector.iter().map(|file| flag("--mmproj=", file)))
        .args(presets)
        .args(flags)
        .arg(flag("--model=", &entry.file))
        .arg(flag("--alias=", Path::new(&entry.name)))
        // Not on the command line, which every user of the machine sees.
        .env("LLAMA_API_KEY", key)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    // Ctrl-C in a terminal is for the router, which ends its models in order.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command.stdin(std::os::fd::OwnedFd::from(socket)), 0);
    #[cfg(windows)]
    std::os::windows::process::CommandExt::creation_flags(command.stdin(Stdio::piped()), CREATE_NO_WINDOW);
    signals::end_with_this(&mut command, signals::SIGTERM);
    Prepared {
        command,
        #[cfg(windows)]
        socket,
    }
}

/// Creation flag of a process without a console.
#[cfg(windows)]
const CREATE_NO_WINDOW: u32 = 0x0800_0000;

/// A process that can be started.
pub struct Prepared {
    command: Command,
    /// Given to the process on its standard input.
    #[cfg(windows)]
    socket: TcpListener,
}

impl Prepared {
    /// Starts the process. On Windows the socket stays open here too, until it is dropped.
    fn spawn(mut self) -> std::io::Result<(Child, Option<TcpListener>)> {
        #[cfg(unix)]
        return Ok((self.command.spawn()?, None));
        #[cfg(windows)]
        {
            let mut child = self.command.spawn()?;
            let socket = hobbit_core::windows::socket_for(&self.socket, child.id())?;
            if let Some(input) = &mut child.stdin {
                std::io::Write::write_all(input, &socket)?;
            }
            signals::bind(&mut child);
            Ok((child, Some(self.socket)))
        }
    }
}

/// Starts the process, passes on its log, and waits for its end. Runs on a thread of its own, because the process gets
/// a signal when the thread that started it ends.
pub fn attend(models: &Arc<Models>, name: &str, id: u64, prepared: Prepared) {
    // Drops our handles of the socket: only the process may listen on it.
    let (mut child, socket) = match prepared.spawn() {
        Ok(started) => started,
        Err(error) => return models.ended(name, format!("its process cannot be started: {error}"), None),
    };
    models.started(name, id, child.id());
    let mut lines = BufReader::new(child.stderr.take().expect("it is piped"));
    let (mut last, mut line) = (String::new(), Vec::new());
    loop {
        line.clear();
        match lines.by_ref().take(LINE_MAX).read_until(b'\n', &mut line) {
            Ok(n) if n > 0 => {}
            _ => break,
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        let level = match text.split_once(": ").map_or(text, |(first, _)| first) {
            "error" => Level::Error,
            "warning" => Level::Warning,
            _ => Level::Info,
        };
        models.log.line(level, format!("[{name}] {text}"));
        if level == Level::Error || !last.starts_with("error: ") && !text.is_empty() {
            text.clone_into(&mut last);
        }
    }
    drop(socket);
    // From here on its number may be another process's.
    models.is_gone(name, id);
    let status = child.wait().ok();
    let why = format!("{}: {last}", status.map_or_else(|| "unknown status".to_owned(), how));
    models.ended(name, why, status.and_then(|status| status.code()));
}

/// How a process ended, in words.
fn how(status: ExitStatus) -> String {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(windows)]
    let signal = None::<i32>;
    match (status.code(), signal) {
        (Some(code), _) => format!("exit status {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_get_the_flags_that_are_not_the_routers() {
        let words =
            ["--models-dir=x", "--api-key=secret", "--ctx-size=64", "--hf-token=t", "--temp=0"].map(OsString::from);
        let verbosity = Verbosity { shown: 1, logged: 0 };
        let flags = common_flags(&words, Budget::Bytes(1 << 30), verbosity);
        let flags: Vec<&str> = flags.iter().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(flags[..2], ["--ctx-size=64", "--temp=0"]);
        assert!(flags.contains(&"--mem-budget=1073741824") && flags.contains(&"--verbosity=3"), "{flags:?}");
        assert!(!flags.concat().contains("secret"));
    }

    #[test]
    fn own_flags_exist() {
        let command = args::server::command();
        for own in OWN {
            assert!(command.get_arguments().any(|arg| arg.get_long() == Some(own)), "{own}");
        }
    }
}
