//! What an expert gets: its demand against what is in memory.

use super::Demand;
use crate::expert::Precision;

/// Answers a demand: in which precision an expert is used now, if at all. If that version is not resident, it must be
/// loaded.
///
/// `is_resident`: which versions are in memory or on their way, by [`Precision::index`]. A resident high version always
/// wins; a resident low one is used rather than nothing. `has_low`: the expert has a low-precision version at all.
pub fn resolve(demand: Demand, is_resident: [bool; Precision::COUNT], has_low: bool) -> Option<Precision> {
    let [high, low] = is_resident;
    match demand {
        _ if high => Some(Precision::High),
        Demand::Low if has_low => Some(Precision::Low),
        Demand::High | Demand::Low => Some(Precision::High),
        Demand::Skip => low.then_some(Precision::Low),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case() {
        use super::Demand as D;
        const HIGH: Option<Precision> = Some(Precision::High);
        const LOW: Option<Precision> = Some(Precision::Low);
        let (neither, low, high, both) = ([false, false], [false, true], [true, false], [true, true]);
        let table = [
            // Demand, resident, what an expert with a low version gets, and one without.
            (D::High, neither, HIGH, HIGH),
            (D::High, low, HIGH, HIGH),
            (D::High, high, HIGH, HIGH),
            (D::High, both, HIGH, HIGH),
            (D::Low, neither, LOW, HIGH),
            (D::Low, low, LOW, HIGH),
            (D::Low, high, HIGH, HIGH),
            (D::Low, both, HIGH, HIGH),
            (D::Skip, neither, None, None),
            (D::Skip, low, LOW, LOW),
            (D::Skip, high, HIGH, HIGH),
            (D::Skip, both, HIGH, HIGH),
        ];
        for (demand, resident, with_low, without) in table {
            assert_eq!(resolve(demand, resident, true), with_low, "{demand:?} {resident:?}");
            assert_eq!(resolve(demand, resident, false), without, "{demand:?} {resident:?}, no low version");
        }
    }
}
