//! Figures of this machine: the speed of copies to a device, and of an expert's product on the CPU. They are the first
//! estimates of [`crate::load::balance`]; a wrong one costs speed until it is corrected, never a result.

use std::collections::BTreeMap;
use std::fmt;

/// Measured figures of a device and the CPU beside it. A figure that could not be measured is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// The device's name, as ggml has it.
    pub device: String,
    pub device_description: String,
    /// From pinned host memory to the device, in bytes per second.
    pub upload_bytes_per_s: Option<f64>,
    /// From ordinary host memory to the device, in bytes per second.
    pub upload_pageable_bytes_per_s: Option<f64>,
    /// A copy of 64 bytes, submitted and awaited, in seconds.
    pub upload_latency_s: Option<f64>,
    /// Threads that compute on the CPU.
    pub threads: u32,
    /// One row times an expert on the CPU, in seconds per weight byte, by the name of the element type.
    pub cpu_expert_seconds_per_byte: BTreeMap<String, f64>,
    /// Reasons for absent figures, for the user.
    pub notes: Vec<String>,
}

/// A few aligned lines, the device's name first, without a newline at the end.
impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, device_description, threads, .. } = self;
        write!(f, "{device}: {device_description}")?;
        for (what, bytes_per_s) in
            [("upload, pinned", self.upload_bytes_per_s), ("upload, pageable", self.upload_pageable_bytes_per_s)]
        {
            if let Some(bytes_per_s) = bytes_per_s {
                write!(f, "\n  {what:<24}{:>8.2} GB/s", bytes_per_s / 1e9)?;
            }
        }
        if let Some(seconds) = self.upload_latency_s {
            write!(f, "\n  {:<24}{:>8.1} µs", "upload latency", seconds * 1e6)?;
        }
        for (name, seconds_per_byte) in &self.cpu_expert_seconds_per_byte {
            let what = format!("CPU experts, {name}");
            write!(f, "\n  {what:<24}{:>8.2} GB/s, {threads} threads", seconds_per_byte.recip() / 1e9)?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n    note: {note}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Calibration {
        Calibration {
            device: "CUDA0".into(),
            device_description: "A card".into(),
            upload_bytes_per_s: Some(8e9),
            upload_pageable_bytes_per_s: Some(2e9),
            upload_latency_s: Some(1e-5),
            threads: 8,
            cpu_expert_seconds_per_byte: [("q4_K".to_owned(), 2e9_f64.recip())].into(),
            notes: vec!["cannot measure q1_0 experts on the CPU: no product".into()],
        }
    }

    #[test]
    fn it_is_shown_in_aligned_lines() {
        let expected = "CUDA0: A card
  upload, pinned              8.00 GB/s
  upload, pageable            2.00 GB/s
  upload latency              10.0 µs
  CPU experts, q4_K           2.00 GB/s, 8 threads
    note: cannot measure q1_0 experts on the CPU: no product";
        assert_eq!(measured().to_string(), expected);
    }

    #[test]
    fn figures_seed_the_balance() {
        use crate::load::balance::Costs;

        let costs = Costs::seeded(&measured(), "q4_K", true);
        assert_eq!((costs.link.get(), costs.cpu.get()), (Some(8e9_f64.recip()), Some(2e9_f64.recip())));
        assert_eq!(costs.link_latency, 1e-5);
        assert_eq!(Costs::seeded(&measured(), "f16", false), Costs::seeded(&measured(), "q4_K", false));
        assert_eq!(Costs::seeded(&measured(), "q4_K", false).link.get(), Some(2e9_f64.recip()));
        assert_eq!(Costs::seeded(&Calibration::default(), "q4_K", true), Costs::default());
    }
}
