//! Speeds of real machines. A run on such a device is a model of the machine, not a measurement of it.

use crate::{Options, Pinned};

/// Seconds to submit a kernel or a copy, and to notice that one has ended: together a read-back of 10 µs. The usual
/// order of such times on CUDA, assumed for both machines.
const SUBMIT: f64 = 5e-6;
const WAIT: f64 = 5e-6;
/// A router's choice or a token's activations: on PCIe 4 they take less than a microsecond of the link.
const SMALL_COPY_BYTES: usize = 16 << 10;

impl Options {
    /// GeForce RTX 4090 in a desktop: 24 GB at 1,008 GB/s, PCIe 4.0 x16, dual-channel DDR5.
    ///
    /// * Memory: NVIDIA's Ada GPU architecture white paper (21 Gbit/s on 384 bits); read with 921 GB/s in
    ///   <https://github.com/krrishnarraj/clpeak/issues/106>.
    /// * Link, pinned: 24.7 GB/s for an expert of Mixtral-8x7B in <https://github.com/efeslab/fiddler/issues/7>, 25.8
    ///   GB/s in <https://github.com/tinygrad/open-gpu-kernel-modules/issues/6>; pageable: 6 GB/s in the first.
    /// * Host: 62.9 GB/s with DDR5-5600 in <https://github.com/memtest86plus/memtest86plus/issues/557>; 60 GB/s here.
    pub fn rtx_4090() -> Options {
        Options {
            memory: 24 << 30,
            link_latency: SUBMIT,
            link_bandwidth: 25e9,
            pageable_bandwidth: 6.5e9,
            small_copy_bytes: SMALL_COPY_BYTES,
            wait_latency: WAIT,
            host_bandwidth: 60e9,
            node_latency: SUBMIT,
            compute_bandwidth: 1008e9,
            ..Options::default()
        }
    }

    /// Jetson AGX Orin 64GB: 204.8 GB/s of LPDDR5 that GPU and CPU share (NVIDIA's Jetson AGX Orin technical brief:
    /// 256 bits). A copy within that memory reads and writes it. Reads of files take no virtual time: a bench adds the
    /// bytes that it counted at [`Options::ORIN_DISK`].
    pub fn orin_64gb() -> Options {
        Options {
            memory: 64 << 30,
            pinned: Pinned::Offered,
            unified: true,
            link_latency: SUBMIT,
            link_bandwidth: 102.4e9,
            small_copy_bytes: SMALL_COPY_BYTES,
            wait_latency: WAIT,
            host_bandwidth: 204.8e9,
            node_latency: SUBMIT,
            compute_bandwidth: 204.8e9,
            ..Options::default()
        }
    }

    /// Bytes per second of an NVMe drive in the Orin's M.2 slot, read in large pieces: assumed.
    pub const ORIN_DISK: f64 = 3e9;

    /// The device for a model of which each layer has 1 / `factor` of the bytes: memory and all rates are divided.
    /// Layers then take the time of the full model's. Latencies stay, and so do small copies, because activations
    /// shrink less than weights.
    pub fn scaled(self, factor: f64) -> Options {
        Options {
            memory: (self.memory as f64 / factor) as u64,
            link_bandwidth: self.link_bandwidth / factor,
            pageable_bandwidth: self.pageable_bandwidth / factor,
            host_bandwidth: self.host_bandwidth / factor,
            compute_bandwidth: self.compute_bandwidth / factor,
            ..self
        }
    }
}
