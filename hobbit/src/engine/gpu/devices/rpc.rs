//! RPC servers, whose devices are registered by address.

use std::collections::HashSet;
use std::ffi::{CString, c_char, c_void};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ggml_sys::llama::{self, ggml_backend_reg_t};

use crate::engine::error::DeviceError;

/// How long a server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Registers the devices of each server, once per process.
pub(super) fn add_servers(endpoints: &[String]) -> Result<(), DeviceError> {
    static ADDED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    if endpoints.is_empty() {
        return Ok(());
    }
    let endpoints = endpoints.iter().map(|text| Endpoint::parse(text)).collect::<Result<Vec<_>, _>>()?;
    let add_server = add_server_function().ok_or(DeviceError::NoRpc)?;
    let mut added = ADDED.lock().unwrap_or_else(PoisonError::into_inner);
    let added = added.get_or_insert_default();
    for endpoint in endpoints {
        if added.contains(endpoint.text) {
            continue;
        }
        probe(endpoint.text)?;
        let text = CString::new(endpoint.text).map_err(|_| endpoint.error("it contains a NUL"))?;
        // SAFETY: the function is ggml's, of the type it documents; it copies the text.
        let backend = unsafe { add_server(text.as_ptr()) };
        if backend.is_null() {
            return Err(DeviceError::NoRemoteDevices { endpoint: endpoint.text.to_owned() });
        }
        // SAFETY: a backend that lives as long as the process.
        unsafe { llama::ggml_backend_register(backend) };
        added.insert(endpoint.text.to_owned());
    }
    Ok(())
}

/// Checks that a server listens at the endpoint of a registered device. ggml ends the process when it calls a server
/// that is gone.
///
/// # Errors
/// [`DeviceError::Unreachable`].
pub(super) fn probe(endpoint: &str) -> Result<(), DeviceError> {
    let unreachable = |source| DeviceError::Unreachable { endpoint: endpoint.to_owned(), source };
    Endpoint::parse(endpoint)?.try_connecting().map_err(unreachable)
}

type AddServer = unsafe extern "C" fn(endpoint: *const c_char) -> ggml_backend_reg_t;

/// `ggml_backend_rpc_add_server`, if this build has it.
fn add_server_function() -> Option<AddServer> {
    // SAFETY: names are NUL-terminated; the backend is registered; the function of this name has this type
    // (llama.cpp, common/arg.cpp, `add_rpc_devices`).
    unsafe {
        let backend = llama::ggml_backend_reg_by_name(c"RPC".as_ptr());
        if backend.is_null() {
            return None;
        }
        let function = llama::ggml_backend_reg_get_proc_address(backend, c"ggml_backend_rpc_add_server".as_ptr());
        if function.is_null() {
            return None;
        }
        Some(std::mem::transmute::<*mut c_void, AddServer>(function))
    }
}

/// `host:port`, as ggml splits it: at the first colon, so that a host is a name or an IPv4 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Endpoint<'a> {
    text: &'a str,
    host: &'a str,
    port: u16,
}

impl<'a> Endpoint<'a> {
    fn parse(text: &'a str) -> Result<Self, DeviceError> {
        let error = |why| DeviceError::Endpoint { endpoint: text.to_owned(), why };
        let (host, port) = text.split_once(':').ok_or_else(|| error("it has no port"))?;
        if host.is_empty() || host.contains(char::is_whitespace) {
            return Err(error("it has no host"));
        }
        if port.contains(':') {
            return Err(error("ggml's RPC knows no IPv6 addresses"));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self { text, host, port }),
            _ => Err(error("a port is a number from 1 to 65535")),
        }
    }

    fn error(&self, why: &'static str) -> DeviceError {
        DeviceError::Endpoint { endpoint: self.text.to_owned(), why }
    }

    /// Opens a connection and closes it.
    fn try_connecting(&self) -> io::Result<()> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no IPv4 address");
        for address in (self.host, self.port).to_socket_addrs()?.filter(SocketAddr::is_ipv4) {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(_) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        let endpoint = Endpoint::parse("localhost:50052").unwrap();
        assert_eq!((endpoint.host, endpoint.port), ("localhost", 50052));
        for (text, why) in [
            ("", "it has no port"),
            ("somewhere", "it has no port"),
            (":50052", "it has no host"),
            (" :1", "it has no host"),
            ("a:", "a port is a number from 1 to 65535"),
            ("a:0", "a port is a number from 1 to 65535"),
            ("a:65536", "a port is a number from 1 to 65535"),
            ("a:1x", "a port is a number from 1 to 65535"),
            ("::1:50052", "it has no host"),
            ("[::1]:50052", "ggml's RPC knows no IPv6 addresses"),
            ("fe80::1:5", "ggml's RPC knows no IPv6 addresses"),
        ] {
            let error = Endpoint::parse(text).unwrap_err().to_string();
            let expected = format!("'{text}' is no RPC endpoint: {why}; give HOST:PORT");
            assert!(error.contains(&expected), "{text}: {error}");
        }
    }
}
