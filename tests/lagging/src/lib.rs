//! A ggml device that stands in for a GPU, so that the mistakes one makes with a GPU are seen without one.
//!
//! [`register`] adds a device `LAG<n>` of type GPU to ggml. It computes what the CPU backend computes, one node at a
//! time on one thread, so its bits depend neither on how a graph is split nor on when it runs. It makes visible:
//!
//! * **Touching device memory from the host.** Tensors have addresses, but no page is readable there: a stray read or
//!   write is a segmentation fault. The real bytes lie elsewhere.
//! * **Using memory that was never written.** New buffers are full of 0xFF, NaN in every float format; the padding
//!   behind quantised rows that CUDA kernels read is checked before every product ([`Device::faults`]), and must be
//!   zero behind experts in host memory.
//! * **A missing event.** Streams only queue. With [`Order::CopiesLate`] an operation runs when something waits for it,
//!   and only the needed operations run; a product that does not wait for its upload multiplies the bytes from before.
//!   With [`Order::CopiesEarly`] copies run at once and graphs late; an upload that does not wait for the last use of
//!   its target overwrites the product's weights.
//! * **Reusing pinned host memory too early.** It is read when the upload runs, not when it is submitted. Other host
//!   memory is copied at submission, as drivers do. Results arrive at the host when the download runs.
//! * **Freeing a graph too early is allowed**, as on CUDA: node structs are copied at submission, data is not.
//! * **A slice twice for one token**, which most of CUDA's kernels multiply once only ([`Options::forbids_repeats`]).
//! * **Tensors the device cannot reach**: a node that reads host memory (unless [`Options::unified`]) fails.
//! * **Lost time.** Every stream, the host and the one link all copies share have a virtual time; [`Device::report`]
//!   says how long a schedule would take with given speeds, without a clock and without noise.
//! * **Bad days**: too little memory, refused pinned memory, a failing graph, a lost device.
//!
//! ggml's registry is not thread-safe. The first [`register`] of a process adds [`DEVICES_MAX`] devices to it and hands
//! out one; the others pass for spare CPU devices, which llama.cpp ignores. A test binary in which tests run side
//! by side calls [`register`] before anything else that looks at ggml's devices.

#![cfg(unix)] // Windows has other calls for its memory.
#![cfg(feature = "engine")]
#![warn(missing_docs)]

mod device;
mod graph;
mod memory;
mod profiles;
mod queue;
mod schedule;
mod shared;
mod stream;

pub use device::{DEVICES_MAX, Device, Report, register};

/// Abilities and speeds of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Device memory in bytes.
    pub memory: u64,
    /// Whether the device allocates host memory for fast transfers.
    pub pinned: Pinned,
    /// An integrated GPU: the device type is IGPU, and graphs may read the device's host buffers.
    pub unified: bool,
    /// With `unified`: the device says that it supports its own buffers only, as CUDA does on Jetson.
    pub undeclared: bool,
    /// When queued operations run.
    pub order: Order,
    /// Seconds before the first byte of every copy.
    pub link_latency: f64,
    /// Bytes per second of the link that all copies, up and down, share.
    pub link_bandwidth: f64,
    /// Bytes per second of copies from and to host memory that is not pinned; never more than `link_bandwidth`.
    pub pageable_bandwidth: f64,
    /// Copies of at most this many bytes take `link_latency` alone.
    pub small_copy_bytes: usize,
    /// Seconds of the host for each wait: a synchronous copy, a synchronisation with a stream that has run since the
    /// last one, or with an event that is to come. Each copy into host memory that is not pinned waits for itself, as
    /// on CUDA.
    pub wait_latency: f64,
    /// Bytes of weights per second that the host's CPU multiplies by, if the caller reports its work.
    pub host_bandwidth: f64,
    /// Bytes per second of host memory, which copies and the host's products share.
    pub host_memory_bandwidth: f64,
    /// Bytes per second of files. Infinite: reads take real time, as far as hobbit is concerned, and no virtual time.
    pub disk_bandwidth: f64,
    /// Seconds every node takes besides its bytes.
    pub node_latency: f64,
    /// Bytes of weights (`MUL_MAT`, `MUL_MAT_ID`: slices of the experts used) or results (other nodes) per second.
    pub compute_bandwidth: f64,
    /// Operations that the device does not have.
    pub without: Vec<ggml_sys::llama::ggml_op>,
    /// Products are rounded to 15 bits: other bits than the CPU's, as kernels of another make give.
    pub rounds_products: bool,
    /// Reports a slice that a token uses twice: most of CUDA's kernels compute only one of the two products. A single
    /// token with quantised weights may use one twice, because its kernel computes each product. llama.cpp's own graphs
    /// of GroveMoE use slices twice, so this is off by default.
    pub forbids_repeats: bool,
}

impl Default for Options {
    /// 256 MiB, pinned memory, copies late; a link of 1 GB/s, 10 GB/s of weights, no latencies, a host that takes no
    /// time; one thread.
    fn default() -> Options {
        Options {
            memory: 256 << 20,
            pinned: Pinned::Offered,
            unified: false,
            undeclared: false,
            order: Order::CopiesLate,
            link_latency: 0.0,
            link_bandwidth: 1e9,
            pageable_bandwidth: f64::INFINITY,
            small_copy_bytes: 0,
            wait_latency: 0.0,
            host_bandwidth: f64::INFINITY,
            host_memory_bandwidth: f64::INFINITY,
            disk_bandwidth: f64::INFINITY,
            node_latency: 0.0,
            compute_bandwidth: 1e10,
            without: Vec::new(),
            rounds_products: false,
            forbids_repeats: false,
        }
    }
}

/// Whether the device has a host buffer type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// Buffers of type `LAG_Host`, page-aligned.
    Offered,
    /// The type is there, but it allocates ordinary CPU buffers, as CUDA does when `cudaMallocHost` fails.
    Refused,
    /// No host buffer type.
    None,
}

/// When queued operations run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// When waited for: by the host (`synchronize`, `event_synchronize`) or by a stream that runs an `event_wait`.
    CopiesLate,
    /// Copies at submission, with all operations before them on their stream and all they wait for; graphs when waited
    /// for.
    CopiesEarly,
}
