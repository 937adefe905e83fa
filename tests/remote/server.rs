//! An RPC server on loopback, in a process of its own.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};

/// Killed when dropped.
pub struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Serves this machine's CPU, with one thread.
    pub fn start() -> Server {
        for _ in 0..16 {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            let mut child = Command::new(env!("CARGO_BIN_EXE_hobbit-rpc"))
                .args(["-t", "1", "-d", "CPU", "-p", &port.to_string()])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            if lines.by_ref().any(|line| line.unwrap().starts_with("listening on ")) {
                std::thread::spawn(move || lines.for_each(drop));
                return Server { child, port };
            }
            child.wait().unwrap();
        }
        panic!("other processes took 16 free ports");
    }

    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn kill(&mut self) {
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
