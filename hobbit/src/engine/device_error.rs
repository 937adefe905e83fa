//! Errors about the choice of devices.

use super::devices::DeviceKind;

/// A requested device that is unavailable.
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
        /// Its kind.
        kind: DeviceKind,
        /// Devices that models can be offloaded to.
        known: Vec<String>,
    },
    /// A device that is named twice.
    #[error("the device '{name}' is named twice")]
    Twice {
        /// Its name.
        name: String,
    },
    /// The main device's index is out of range.
    #[error("the main device is number {main}, but there are {n_devices} devices; numbers begin at 0")]
    MainOutOfRange {
        /// As given.
        main: u32,
        /// Devices that were chosen.
        n_devices: usize,
    },
    /// An override that names an unknown buffer type.
    #[error("there is no buffer type named '{found}'; there are {}", known.join(", "))]
    NoBufferType {
        /// As given.
        found: String,
        /// Names that can be given.
        known: Vec<String>,
    },
    /// A build without support for RPC servers.
    #[error("this build of hobbit has no RPC; rebuild it with the feature rpc")]
    NoRpc,
    /// A malformed endpoint.
    #[error("'{endpoint}' is no RPC endpoint: {why}; give HOST:PORT, for example 127.0.0.1:50052")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// The reason.
        why: &'static str,
    },
    /// No server listens there.
    #[error("cannot connect to the RPC server {endpoint}: {source}")]
    Unreachable {
        /// The endpoint.
        endpoint: String,
        /// The cause.
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
