//! Rates as standards define them, by name: what a machine that cannot be measured may reach.
//!
//! * `DDR5-5600x2`: 5600 million transfers of 8 bytes a second on 2 channels (JEDEC: JESD79-4 for DDR4, JESD79-5 for
//!   DDR5, JESD209-5 for LPDDR5).
//! * `PCIe3`, `PCIe4`, `PCIe5`: 4 lanes of 8, 16 or 32 GT/s, 128 of 130 bits are data (PCI-SIG: PCI Express base
//!   specification).
//! * `SATA`: 6 Gbit/s, 8 of 10 bits are data (SATA-IO: Serial ATA 3.0).
//!
//! All are upper bounds: cores and drives reach less.

/// Bytes of a transfer on one channel of memory. A channel of LPDDR is narrower: these count 64 bits of it.
const TRANSFER_BYTES: f64 = 8.0;
/// Millions of transfers per second that memory may have, and channels.
const TRANSFERS: std::ops::RangeInclusive<u32> = 200..=20_000;
const CHANNELS: std::ops::RangeInclusive<u32> = 1..=64;
/// Bytes per second of an NVMe drive's four lanes, per GT/s of a lane.
const PCIE_LANES: f64 = 4.0 * 1e9 * 128.0 / 130.0 / 8.0;

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
        "pcie3" => Some(8.0 * PCIE_LANES),
        "pcie4" => Some(16.0 * PCIE_LANES),
        "pcie5" => Some(32.0 * PCIE_LANES),
        _ => None,
    }
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
        assert!(USUAL.iter().all(|(own, drive)| memory(own).is_some() && disk(drive).is_some()));
    }
}
