//! Serves this machine's devices to other processes, over ggml's RPC protocol.

use std::ffi::{CStr, CString, c_int, c_void};
use std::io;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::ptr;

use ggml_sys::llama::{self, ggml_backend_dev_t};
use ggml_sys::shim;

use crate::engine::ggml;
use crate::engine::gpu::devices::{self, DeviceInfo};

/// Errors of serving devices.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages are the documentation.
pub enum RpcError {
    #[error("no device is named '{name}'; there are {known}")]
    UnknownDevice { name: String, known: String },
    #[error("no device found, not even a CPU: put ggml's backend libraries (libggml-*.so) beside the program")]
    NoDevice,
    #[error("{}: the name of this directory contains a NUL", .0.display())]
    Path(PathBuf),
    #[error("{action}: {source}")]
    Listen { action: String, source: io::Error },
    #[error("cannot serve: {0}")]
    Failed(String),
}

/// Events while serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcEvent {
    /// Clients may connect.
    Listening,
    /// A client has connected. Others wait until it disconnects.
    Connected,
    /// The client has disconnected; its buffers are freed.
    Disconnected,
}

/// The devices of this machine that are served.
pub struct RpcServer {
    /// They live as long as the process.
    devices: Vec<ggml_backend_dev_t>,
}

impl RpcServer {
    /// Chooses the devices with these names, in this order (case does not matter). Without names: every GPU, or the CPU
    /// where there is none.
    ///
    /// # Errors
    /// [`RpcError::UnknownDevice`], [`RpcError::NoDevice`].
    pub fn new(names: &[String]) -> Result<Self, RpcError> {
        ggml::ready();
        // SAFETY: a registered device.
        let kind = |device: &ggml_backend_dev_t| unsafe { llama::ggml_backend_dev_type(*device) };
        // Neither ours nor other helpers of the CPU.
        let computes = |device: &_| kind(device) != llama::GGML_BACKEND_DEVICE_TYPE_ACCEL;
        let all: Vec<_> = ggml::devices().filter(computes).collect();
        let devices = match names {
            [] => {
                let is_gpu = |device: &_| kind(device) != llama::GGML_BACKEND_DEVICE_TYPE_CPU;
                let gpus: Vec<_> = all.iter().copied().filter(is_gpu).collect();
                if gpus.is_empty() { all } else { gpus }
            }
            names => names.iter().map(|name| by_name(&all, name)).collect::<Result<_, _>>()?,
        };
        if devices.is_empty() {
            return Err(RpcError::NoDevice);
        }
        Ok(Self { devices })
    }

    /// The chosen devices.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.devices.iter().copied().map(devices::info).collect()
    }

    /// Serves one client after the other; returns only on failure. The CPU uses `n_threads` threads. Tensors that
    /// clients send are kept in the directory `cache`, which must exist, and not sent again.
    pub fn serve(
        mut self,
        address: SocketAddrV4,
        n_threads: i32,
        cache: Option<&Path>,
        on_event: impl FnMut(RpcEvent),
    ) -> RpcError {
        let host = CString::new(address.ip().to_string()).expect("an address has no NUL");
        let cache = match cache.map(|path| CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| path)) {
            Some(Err(path)) => return RpcError::Path(path.to_owned()),
            Some(Ok(path)) => Some(path),
            None => None,
        };
        let mut on_event: Box<dyn FnMut(RpcEvent)> = Box::new(on_event);
        let mut message = [0; 512];
        // SAFETY: all arguments live until the call returns, and the callback gets the context it expects. A failed
        // assertion ends the process instead of dumping core.
        let code = unsafe {
            shim::hobbit_guard_aborts();
            shim::hobbit_rpc_serve(
                host.as_ptr(),
                c_int::from(address.port()),
                cache.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
                n_threads,
                self.devices.len(),
                self.devices.as_mut_ptr(),
                Some(call),
                (&raw mut on_event).cast(),
                message.as_mut_ptr(),
                message.len(),
            )
        };
        // SAFETY: the shim ends its message with a NUL.
        let message = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned();
        match code {
            0 => RpcError::Failed(message),
            code => RpcError::Listen { action: message, source: io::Error::from_raw_os_error(code) },
        }
    }
}

unsafe extern "C" fn call(context: *mut c_void, event: shim::hobbit_rpc_event) {
    // SAFETY: `RpcServer::serve` passes its box; the server calls from one thread.
    let on_event = unsafe { &mut *context.cast::<Box<dyn FnMut(RpcEvent)>>() };
    match event {
        shim::HOBBIT_RPC_LISTENING => on_event(RpcEvent::Listening),
        shim::HOBBIT_RPC_CONNECTED => on_event(RpcEvent::Connected),
        _ => on_event(RpcEvent::Disconnected),
    }
}

fn by_name(devices: &[ggml_backend_dev_t], name: &str) -> Result<ggml_backend_dev_t, RpcError> {
    let found = devices.iter().copied().find(|&device| ggml::name(device).eq_ignore_ascii_case(name));
    found.ok_or_else(|| {
        let known: Vec<_> = devices.iter().copied().map(ggml::name).collect();
        RpcError::UnknownDevice { name: name.to_owned(), known: known.join(", ") }
    })
}
