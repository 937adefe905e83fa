//! Who takes part.

use std::fmt;

use hobbit::options::CpuHelper;
use serde::Serialize;

/// A way to run the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Contestant {
    /// Plain llama.cpp: experts on the CPU, of large batches copied to the device (`--n-cpu-moe` all, op-offload on).
    Stock,
    /// hobbit with a device cache of so many percent of all experts.
    Hobbit { cache_percent: f64, helper: Helper },
}

/// What becomes of missing experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Helper {
    Off,
    On,
    Auto,
}

impl Contestant {
    /// llama.cpp, and each helper at each cache size.
    pub fn all(cache_percents: &[f64]) -> Vec<Contestant> {
        let helpers = [Helper::Off, Helper::On, Helper::Auto];
        let of_cache = |&cache_percent| helpers.map(|helper| Contestant::Hobbit { cache_percent, helper });
        std::iter::once(Contestant::Stock).chain(cache_percents.iter().flat_map(of_cache)).collect()
    }
}

impl Helper {
    pub fn option(self) -> CpuHelper {
        match self {
            Helper::Off => CpuHelper::Off,
            Helper::On => CpuHelper::On,
            Helper::Auto => CpuHelper::Auto,
        }
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contestant::Stock => f.write_str("llama.cpp, experts on the CPU"),
            Contestant::Hobbit { cache_percent, helper } => {
                write!(f, "hobbit, {cache_percent}% on the device, CPU helper {}", helper.option())
            }
        }
    }
}
