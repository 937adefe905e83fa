//! Speeds of real machines. A run on such a device is a model of the machine, not a measurement of it.

use crate::{Options, Pinned};

/// Seconds to submit a kernel or a copy, and to notice that one has ended: together a read-back of 10 µs. The usual
/// order of such times on CUDA, assumed for all machines.
const SUBMIT: f64 = 5e-6;
const WAIT: f64 = 5e-6;
/// A router's choice or a token's activations: on PCIe 4 they take less than a microsecond of the link.
const SMALL_COPY_BYTES: usize = 16 << 10;
/// Copies from memory that is not pinned: 6 GB/s beside 24.7 GB/s in <https://github.com/efeslab/fiddler/issues/7>.
const PAGEABLE: f64 = 6.5e9;
/// A Samsung 980 PRO: 7 GB/s on paper and "around 3,000 MB/s in practice" (HOBBIT, section 5.1). Assumed for all
/// machines.
const NVME: f64 = 3e9;

impl Options {
    /// GeForce RTX 4090 in a desktop: 24 GB at 1,008 GB/s, PCIe 4.0 x16, 64 GB of dual-channel DDR5-5600.
    ///
    /// * Memory: NVIDIA's Ada GPU architecture white paper (21 Gbit/s on 384 bits); read with 921 GB/s in
    ///   <https://github.com/krrishnarraj/clpeak/issues/106>.
    /// * Link, pinned: 24.7 GB/s for an expert of Mixtral-8x7B in <https://github.com/efeslab/fiddler/issues/7>, 25.8
    ///   GB/s in <https://github.com/tinygrad/open-gpu-kernel-modules/issues/6>, 23.9 to 26.4 GB/s in
    ///   <https://github.com/NVIDIA/nvbandwidth/issues/15>.
    /// * Host: 62.9 GB/s in <https://github.com/memtest86plus/memtest86plus/issues/557>; 60 GB/s here. All readers
    ///   together: 80 GB/s, nine tenths of the nominal 89.6 GB/s, as DDR5-6400 in
    ///   <https://github.com/memtest86plus/memtest86plus/issues/612> (95 of 102.4 GB/s).
    pub fn rtx_4090() -> Options {
        Options {
            memory: 24 << 30,
            link_latency: SUBMIT,
            link_bandwidth: 25e9,
            pageable_bandwidth: PAGEABLE,
            small_copy_bytes: SMALL_COPY_BYTES,
            wait_latency: WAIT,
            host_bandwidth: 60e9,
            host_memory_bandwidth: 80e9,
            disk_bandwidth: NVME,
            node_latency: SUBMIT,
            compute_bandwidth: 1008e9,
            ..Options::default()
        }
    }

    /// GeForce RTX 3060 12GB in a desktop: 12 GB at 360 GB/s, PCIe 4.0 x16, 32 GB of dual-channel DDR4-3200.
    ///
    /// * Memory: 15 Gbit/s on 192 bits (NVIDIA's product page). Link: PCIe 4.0 x16, as [`Options::rtx_4090`].
    /// * Host: 36 GB/s, seven tenths of the nominal 51.2 GB/s; 36.7 GB/s were read with two channels in
    ///   <https://github.com/apache/arrow/pull/3378>. All readers together: nine tenths, as above.
    pub fn rtx_3060() -> Options {
        Options {
            memory: 12 << 30,
            host_bandwidth: 36e9,
            host_memory_bandwidth: 46e9,
            compute_bandwidth: 360e9,
            ..Options::rtx_4090()
        }
    }

    /// Fate's high-end PC (section 5.1): GeForce RTX 3090, 24 GB at 936 GB/s, "PCIe 3.0 x16 (16GB/s bandwidth)", an
    /// i9-9900X with 128 GB.
    ///
    /// * Memory: 19.5 Gbit/s on 384 bits (NVIDIA's Ampere GA102 GPU architecture white paper).
    /// * Link: the paper's figure, which is the nominal one.
    /// * Host: four channels of DDR4-2666 (Intel's data sheet): 85.3 GB/s, of which the CPU reads seven and all
    ///   readers together nine tenths.
    pub fn rtx_3090() -> Options {
        Options {
            link_bandwidth: 16e9,
            host_bandwidth: 60e9,
            host_memory_bandwidth: 77e9,
            compute_bandwidth: 936e9,
            ..Options::rtx_4090()
        }
    }

    /// Fate's low-end PC (section 5.1): GeForce GTX 1080 Ti, 11 GB at 484 GB/s, "PCIe 1.0 x16 (4GB/s bandwidth)", a
    /// Xeon E5-2650 v4 with 64 GB.
    ///
    /// * Memory: 11 Gbit/s on 352 bits (NVIDIA's product page). Link: the paper's figure, the nominal one.
    /// * Host: four channels of DDR4-2400 (Intel's data sheet): 76.8 GB/s, of which the CPU reads seven and all
    ///   readers together nine tenths.
    pub fn gtx_1080_ti() -> Options {
        Options {
            memory: 11 << 30,
            link_bandwidth: 4e9,
            host_bandwidth: 54e9,
            host_memory_bandwidth: 69e9,
            compute_bandwidth: 484e9,
            ..Options::rtx_4090()
        }
    }

    /// Jetson AGX Orin 64GB: 204.8 GB/s of LPDDR5 that GPU and CPU share (NVIDIA's Jetson AGX Orin technical brief:
    /// 256 bits). A copy within that memory reads and writes it.
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
            disk_bandwidth: NVME,
            node_latency: SUBMIT,
            compute_bandwidth: 204.8e9,
            ..Options::default()
        }
    }

    /// Jetson AGX Orin 32GB, HOBBIT's (section 5.1): as [`Options::orin_64gb`] with half the memory, which is as fast
    /// (technical brief).
    pub fn orin_32gb() -> Options {
        Options { memory: 32 << 30, ..Options::orin_64gb() }
    }

    /// The device for a model of which each layer has 1 / `factor` of the bytes: memory and all rates are divided.
    /// Layers then take the time of the full model's. Latencies stay, and so do small copies, because activations
    /// shrink less than weights.
    pub fn scaled(self, factor: f64) -> Options {
        Options {
            memory: (self.memory as f64 / factor) as u64,
            link_bandwidth: self.link_bandwidth / factor,
            pageable_bandwidth: self.pageable_bandwidth / factor,
            host_bandwidth: self.host_bandwidth / factor,
            host_memory_bandwidth: self.host_memory_bandwidth / factor,
            disk_bandwidth: self.disk_bandwidth / factor,
            compute_bandwidth: self.compute_bandwidth / factor,
            ..self
        }
    }
}
