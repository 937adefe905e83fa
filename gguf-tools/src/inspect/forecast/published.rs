//! Rates as standards define them, by name: what a machine that cannot be measured may reach.
//!
//! * `DDR5-5600x2`: 5600 million transfers of 8 bytes a second on 2 channels (JEDEC: JESD79-4 for DDR4, JESD79-5 for
//!   DDR5, JESD209-5 for LPDDR5).
//! * `PCIe3`, `PCIe4`, `PCIe5`: 4 lanes of 8, 16 or 32 GT/s, 128 of 130 bits are data (PCI-SIG: PCI Express base
//!   specification).
//! * `SATA`: 6 Gbit/s, 8 of 10 bits are data (SATA-IO: Serial ATA 3.0).
//! * `RTX4090`: memory, its bandwidth and the link of a GPU, as its maker publishes them ([`GPUS`]).
//!
//! All are upper bounds: cores, drives and GPUs reach less.

use hobbit_core::forecast::Device;
use hobbit_core::units::GIB;

/// Bytes of a transfer on one channel of memory. A channel of LPDDR is narrower: these count 64 bits of it.
const TRANSFER_BYTES: f64 = 8.0;
/// Millions of transfers per second that memory may have, and channels.
const TRANSFERS: std::ops::RangeInclusive<u32> = 200..=20_000;
const CHANNELS: std::ops::RangeInclusive<u32> = 1..=64;
/// Bytes per second of a lane of PCI Express, per GT/s.
const PCIE_LANE: f64 = 1e9 * 128.0 / 130.0 / 8.0;
/// Lanes of an NVMe drive.
const DRIVE_LANES: f64 = 4.0;

/// GPUs: name, memory in GiB, its bandwidth in GB/s, generation and lanes of PCI Express.
const GPUS: [(&str, u64, u32, u8, u8); 32] = [
    ("GTX1080Ti", 11, 484, 3, 16),
    ("RTX2080Ti", 11, 616, 3, 16),
    ("RTX3060", 12, 360, 4, 16),
    ("RTX3070", 8, 448, 4, 16),
    ("RTX3080", 10, 760, 4, 16),
    ("RTX3090", 24, 936, 4, 16),
    ("RTX3090Ti", 24, 1008, 4, 16),
    ("RTX4060", 8, 272, 4, 8),
    ("RTX4060Ti", 8, 288, 4, 8),
    ("RTX4060Ti-16GB", 16, 288, 4, 8),
    ("RTX4070", 12, 504, 4, 16),
    ("RTX4070Ti", 12, 504, 4, 16),
    ("RTX4070TiSuper", 16, 672, 4, 16),
    ("RTX4080", 16, 717, 4, 16),
    ("RTX4080Super", 16, 736, 4, 16),
    ("RTX4090", 24, 1008, 4, 16),
    ("RTX5060Ti", 8, 448, 5, 8),
    ("RTX5060Ti-16GB", 16, 448, 5, 8),
    ("RTX5070", 12, 672, 5, 16),
    ("RTX5070Ti", 16, 896, 5, 16),
    ("RTX5080", 16, 960, 5, 16),
    ("RTX5090", 32, 1792, 5, 16),
    ("RTXA6000", 48, 768, 4, 16),
    ("RTX6000Ada", 48, 960, 4, 16),
    ("H200", 141, 4800, 5, 16),
    ("RX6800XT", 16, 512, 4, 16),
    ("RX7800XT", 16, 624, 4, 16),
    ("RX7900XT", 20, 800, 4, 16),
    ("RX7900XTX", 24, 960, 4, 16),
    ("RX9070XT", 16, 640, 5, 16),
    ("ArcA770", 16, 560, 4, 16),
    ("ArcB580", 12, 456, 4, 8),
];

/// Memory and disk of usual machines.
pub const USUAL: [(&str, &str); 5] = [
    ("DDR4-2666x2", "SATA"),
    ("DDR4-3200x2", "PCIe3"),
    ("DDR5-5600x2", "PCIe4"),
    ("LPDDR5X-8533x2", "PCIe4"),
    ("DDR5-4800x12", "PCIe5"),
];

/// Bandwidth of memory: `DDR4-3200x2`, or `DDR4-3200` with one channel.
pub fn memory(name: &str) -> Option<f64> {
    let name = name.to_ascii_lowercase();
    let (kind, rest) = name.split_once('-')?;
    if !["ddr3", "ddr4", "ddr5", "lpddr4", "lpddr4x", "lpddr5", "lpddr5x"].contains(&kind) {
        return None;
    }
    let (transfers, channels) = rest.split_once('x').unwrap_or((rest, "1"));
    let (transfers, channels) = (transfers.parse().ok()?, channels.parse().ok()?);
    let is_sane = TRANSFERS.contains(&transfers) && CHANNELS.contains(&channels);
    is_sane.then(|| f64::from(transfers) * 1e6 * TRANSFER_BYTES * f64::from(channels))
}

/// Bandwidth of a drive's connection: `SATA`, `PCIe3`, `PCIe4`, `PCIe5`.
pub fn disk(name: &str) -> Option<f64> {
    match name.to_ascii_lowercase().as_str() {
        "sata" => Some(6e9 * 8.0 / 10.0 / 8.0),
        "pcie3" => Some(DRIVE_LANES * pcie_lane(3)),
        "pcie4" => Some(DRIVE_LANES * pcie_lane(4)),
        "pcie5" => Some(DRIVE_LANES * pcie_lane(5)),
        _ => None,
    }
}

/// A lane's bytes per second: 8 GT/s in the third generation, twice as much in each later one.
fn pcie_lane(generation: u8) -> f64 {
    8.0 * 2f64.powi(i32::from(generation) - 3) * PCIE_LANE
}

/// The names of the GPUs in the table.
pub fn gpu_names() -> impl Iterator<Item = &'static str> {
    GPUS.iter().map(|(name, ..)| *name)
}

/// A GPU of the table: `RTX4090`, `rtx 4090`, or as drivers spell it (`NVIDIA GeForce RTX 4090`).
pub fn gpu(name: &str) -> Option<Device> {
    let wanted = plain(name);
    let (_, memory, bandwidth, generation, lanes) = GPUS.into_iter().find(|(known, ..)| plain(known) == wanted)?;
    let link = f64::from(lanes) * pcie_lane(generation);
    Some(Device { memory: memory * GIB, bandwidth: f64::from(bandwidth) * 1e9, link: Some(link) })
}

/// A GPU's name in small letters and digits, without maker, brand and the driver's chip in parentheses.
fn plain(name: &str) -> String {
    let name = name.to_ascii_lowercase().replace("(r)", " ").replace("(tm)", " ");
    let name = name.split('(').next().unwrap_or_default();
    let brands = ["nvidia", "geforce", "amd", "radeon", "intel", "graphics", "generation"];
    let words = name.split([' ', '-', '_']).filter(|word| !brands.contains(word));
    words.flat_map(str::chars).filter(char::is_ascii_alphanumeric).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures that makers print on modules (PC4-25600, PC5-44800) and drives.
    #[test]
    fn names_have_the_rates_of_their_standards() {
        let gb = |rate: Option<f64>| rate.map(|rate| (rate / 1e8).round() / 10.0);
        assert_eq!(gb(memory("DDR4-3200")), Some(25.6));
        assert_eq!(gb(memory("ddr4-3200x2")), Some(51.2));
        assert_eq!(gb(memory("DDR5-5600x1")), Some(44.8));
        assert_eq!(gb(memory("LPDDR5X-8533x2")), Some(136.5));
        assert_eq!(["SATA", "pcie3", "PCIe4", "PCIe5"].map(|name| gb(disk(name)).unwrap()), [0.6, 3.9, 7.9, 15.8]);
        for bad in ["DDR4", "DDR9-3200", "DDR4-", "DDR4-3200x", "DDR4-3200x0", "DDR4-3200x99", "DDR4-1", "-", ""] {
            assert_eq!((memory(bad), disk(bad)), (None, None), "{bad}");
        }
        let card = gpu("RTX4090").unwrap();
        assert_eq!((card.memory, card.bandwidth, gb(card.link)), (24 << 30, 1.008e12, Some(31.5)));
        for spelling in ["rtx 4090", "NVIDIA GeForce RTX 4090", "rtx-4090"] {
            assert_eq!(gpu(spelling), Some(card), "{spelling}");
        }
        assert_eq!(gpu("AMD Radeon RX 7900 XTX (RADV NAVI31)"), gpu("RX7900XTX"));
        assert_eq!(gpu("Intel(R) Arc(TM) B580 Graphics"), gpu("ArcB580"));
        assert_eq!(gb(gpu("RTX4060").unwrap().link), Some(15.8), "8 lanes");
        for other in ["", "RTX9999", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA", "RTX40"] {
            assert_eq!(gpu(other), None, "{other}");
        }
        assert!(gpu_names().all(|name| gpu(name).is_some()));
        assert!(USUAL.iter().all(|(own, drive)| memory(own).is_some() && disk(drive).is_some()));
    }
}
