//! The experts that a token uses, and their precision: HOBBIT's scorer, residents, and Fate's rule for prompts. Pure.
//!
//! ```text
//! router weights -> score (a token's demands) -> batch (an expert's demand) -> resolve (the version that is used)
//! ```
//!
//! [`Routing`] regroups the router's ids by expert. [`Thresholds`] demand high precision, low precision or nothing of
//! each expert of a token. [`merge`] and `lower_least_popular` turn the demands of a batch's tokens into one
//! [`Demand`] per expert, and [`resolve()`] answers it with what is in memory; [`Rates`] give the cost of what is not.
//! [`renormalise()`] makes up for skipped experts, and [`fit()`] chooses the thresholds. Before all of that,
//! [`reroute()`] may replace experts by others that are in memory.

mod demand;
mod fit;
mod flatness;
mod reroute;
mod routing;

pub use demand::{
    DECODE_TOKENS_MAX, Demand, Phase, ThresholdError, Thresholds, merge, renormalise, resolve, unimportance,
};
pub(crate) use demand::{lower_least_popular, n_least_popular};
pub use fit::{Fit, NoUses, Shares, SharesError, fit};
pub use flatness::Flatness;
pub use reroute::{Choice, RerouteCounts, Rerouting, TokenScores, Weighing, reroute};
pub use routing::{Pair, Routing, rounded};

/// The nearest memory that has a version, seen from the device that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// Where products run, or on its way there.
    Here,
    /// In the host's slots.
    Host,
    /// In a file only.
    File,
}

/// Seconds per byte of the two ways to the device that multiplies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// From the host's slots, or of the CPU's products where these are quicker; 0 where products run on the host's
    /// slots.
    pub link: f64,
    /// From a file into the host's slots.
    pub disk: f64,
}

impl Rates {
    /// Assumed of a link that was not measured yet: PCI Express 4.0, 16 lanes, from pinned memory.
    pub const LINK: f64 = 1.0 / 25e9;
    /// Assumed of a disk that was not measured yet: an NVMe drive.
    pub(crate) const DISK: f64 = 1.0 / 3e9;

    /// Seconds until a version of `(bytes, missing)` bytes can be multiplied; `missing` of them are not in the host's
    /// slots if it is in a file. Bit planes share bytes, so fewer may be missing.
    pub fn seconds(self, location: Location, (bytes, missing): (u64, u64)) -> f64 {
        match location {
            Location::Here => 0.0,
            Location::Host => bytes as f64 * self.link,
            Location::File => bytes as f64 * self.link + missing as f64 * self.disk,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_costs_its_bytes() {
        let rates = Rates { link: 1.0, disk: 8.0 };
        let cost = |location| rates.seconds(location, (100, 50));
        assert_eq!([Location::Here, Location::Host, Location::File].map(cost), [0.0, 100.0, 500.0]);
        let on_host = Rates { link: 0.0, ..rates };
        assert_eq!(on_host.seconds(Location::Host, (100, 50)), 0.0, "products run there");
    }
}
