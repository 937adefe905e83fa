//! What an expert gets: its demand against what is in memory.

use super::Demand;

/// Which versions of an expert are in memory, or on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Resident {
    /// The high-precision version.
    pub high: bool,
    /// The low-precision version.
    pub low: bool,
}

/// In what form an expert is used now. If that version is not resident, it must be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// The high-precision version.
    High,
    /// The low-precision version.
    Low,
    /// Not at all.
    Skip,
}

/// Answers a demand. A resident high version always wins; a resident low one is used rather than nothing. `has_low`:
/// the expert has a low-precision version at all.
pub fn resolve(demand: Demand, residency: Resident, has_low: bool) -> Choice {
    match demand {
        _ if residency.high => Choice::High,
        Demand::High => Choice::High,
        Demand::Low if has_low => Choice::Low,
        Demand::Low => Choice::High,
        Demand::Skip if residency.low => Choice::Low,
        Demand::Skip => Choice::Skip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case() {
        use super::{Choice as C, Demand as D};
        let (neither, low) = (Resident::default(), Resident { high: false, low: true });
        let (high, both) = (Resident { high: true, low: false }, Resident { high: true, low: true });
        let table = [
            // Demand, resident, what an expert with a low version gets, and one without.
            (D::High, neither, C::High, C::High),
            (D::High, low, C::High, C::High),
            (D::High, high, C::High, C::High),
            (D::High, both, C::High, C::High),
            (D::Low, neither, C::Low, C::High),
            (D::Low, low, C::Low, C::High),
            (D::Low, high, C::High, C::High),
            (D::Low, both, C::High, C::High),
            (D::Skip, neither, C::Skip, C::Skip),
            (D::Skip, low, C::Low, C::Low),
            (D::Skip, high, C::High, C::High),
            (D::Skip, both, C::High, C::High),
        ];
        for (demand, resident, with_low, without) in table {
            assert_eq!(resolve(demand, resident, true), with_low, "{demand:?} {resident:?}");
            assert_eq!(resolve(demand, resident, false), without, "{demand:?} {resident:?}, no low version");
        }
    }
}
