//! Why there is no such device.

use super::device_kind::DeviceKind;

/// A device that was asked for and is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A name that no device has.
    #[error("--device: there is no device named '{name}' ({}); --list-devices shows them", known_names(known))]
    Unknown {
        /// As given.
        name: String,
        /// Devices that models can be offloaded to.
        known: Vec<String>,
    },
    /// A device that computes in host memory.
    #[error(
        "--device: '{name}' is {}, and models are not offloaded to it ({}); give --device none for the CPU alone",
        kind.in_words(), known_names(known)
    )]
    NotOffloadable {
        /// Its name.
        name: String,
        /// What it is.
        kind: DeviceKind,
        /// Devices that models can be offloaded to.
        known: Vec<String>,
    },
    /// A device that would hold two parts of the model.
    #[error("--device: '{name}' is named twice; name each device once")]
    Twice {
        /// Its name.
        name: String,
    },
    /// The only device to use is not among the chosen ones.
    #[error("--main-gpu {main}: out of range; give 0 to {}, by place in --device", n_devices.saturating_sub(1))]
    MainOutOfRange {
        /// As given.
        main: u32,
        /// Devices that were chosen.
        n_devices: usize,
    },
    /// Tensors that would go where nothing is.
    #[error("--override-tensor: there is no buffer type named '{found}'; there are {}", known.join(", "))]
    NoBufferType {
        /// As given.
        found: String,
        /// Names that can be given.
        known: Vec<String>,
    },
    /// A build that cannot speak to RPC servers.
    #[error("--rpc: this build of hobbit has no RPC; rebuild with --features rpc")]
    NoRpc,
    /// An endpoint that is none.
    #[error("--rpc: '{endpoint}' is no endpoint: {why}; give HOST:PORT, for example 127.0.0.1:50052")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Nobody listens there.
    #[error(
        "--rpc: cannot connect to {endpoint}: {source}; start a server there (hobbit-rpc -H HOST -p PORT, or llama.cpp's \
         ggml-rpc-server), or leave it out"
    )]
    Unreachable {
        /// The endpoint.
        endpoint: String,
        /// Why not.
        source: std::io::Error,
    },
    /// A server without devices.
    #[error("--rpc: the server at {endpoint} offers no devices; start it with some, or leave it out")]
    NoRemoteDevices {
        /// The endpoint.
        endpoint: String,
    },
}

fn known_names(known: &[String]) -> String {
    match known {
        [] => "there is none beside the CPU".to_owned(),
        [one] => format!("there is only {one}"),
        many => format!("there are {}", many.join(", ")),
    }
}
