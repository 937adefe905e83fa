//! Why there is no such device.

use super::device_kind::DeviceKind;

/// A device that was asked for and is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A name that no device has.
    #[error("there is no device named '{name}' ({})", known_names(known))]
    Unknown {
        /// As given.
        name: String,
        /// Devices that models can be offloaded to.
        known: Vec<String>,
    },
    /// A device that computes in host memory.
    #[error(
        "'{name}' is {}, and models are not offloaded to it ({})",
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
    #[error("the device '{name}' is named twice")]
    Twice {
        /// Its name.
        name: String,
    },
    /// The only device to use is not among the chosen ones.
    #[error("the main device is number {main}, but there are {n_devices} devices; numbers begin at 0")]
    MainOutOfRange {
        /// As given.
        main: u32,
        /// Devices that were chosen.
        n_devices: usize,
    },
    /// Tensors that would go where nothing is.
    #[error("there is no buffer type named '{found}'; there are {}", known.join(", "))]
    NoBufferType {
        /// As given.
        found: String,
        /// Names that can be given.
        known: Vec<String>,
    },
    /// A build that cannot speak to RPC servers.
    #[error("this build of hobbit has no RPC; rebuild it with the feature rpc")]
    NoRpc,
    /// An endpoint that is none.
    #[error("'{endpoint}' is no RPC endpoint: {why}; give HOST:PORT, for example 127.0.0.1:50052")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// No server listens there.
    #[error("cannot connect to the RPC server {endpoint}: {source}")]
    Unreachable {
        /// The endpoint.
        endpoint: String,
        /// Why not.
        source: std::io::Error,
    },
    /// A server without devices.
    #[error("the RPC server {endpoint} offers no devices")]
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
