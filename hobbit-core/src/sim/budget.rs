//! Division of a budget into slots per layer, and hit curves by number of slots.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::recording::{Recording, need_order};
use crate::cache::{Allocation, LayerDemand, allocate};
use crate::plan::ExpertCache;
use crate::trace::{Header, Layer};
use crate::tuned::LayerPenalty;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// The slots that the recorded run had, layer by layer.
    Recorded,
    Bytes(u64),
    /// Percent of the bytes of all high versions, `0.0..=100.0`.
    Percent(f64),
    /// High slots per layer.
    Slots(u32),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{found}' is not a budget (expected recorded, 25%, 12slots or 2GiB)")]
pub struct BudgetError {
    pub found: String,
}

impl FromStr for Budget {
    type Err = BudgetError;

    /// `recorded`, `25%`, `12slots` or a size (`2GiB`).
    fn from_str(text: &str) -> Result<Self, BudgetError> {
        let error = || BudgetError { found: text.to_owned() };
        if text == "recorded" {
            return Ok(Self::Recorded);
        }
        if let Some(number) = text.strip_suffix("slots") {
            return number.trim_end().parse().map(Self::Slots).map_err(|_| error());
        }
        match text.parse() {
            Ok(ExpertCache::Bytes(bytes)) => Ok(Self::Bytes(bytes)),
            Ok(ExpertCache::Percent(percent)) => Ok(Self::Percent(percent)),
            _ => Err(error()),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recorded => f.pad("recorded"),
            Self::Bytes(bytes) => f.pad(&format!("{}MiB", bytes.div_ceil(1 << 20))),
            Self::Percent(percent) => f.pad(&format!("{percent}%")),
            Self::Slots(n) => f.pad(&format!("{n}slots")),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerSlots {
    pub high: u32,
    pub low: u32,
}

/// Slots of each layer of the header. `low_percent` of the bytes go to low versions, evenly, if there are any;
/// [`Allocation::ByPenalty`] needs `curves`, one per layer.
///
/// As in [`crate::plan`], layers whose experts are equally large form a pool, and every pool gets the same share of its
/// experts. The layers of a pool divide its slots: each gets as many as a token uses before any gets more.
pub fn slots(
    header: &Header,
    budget: Budget,
    allocation: Allocation,
    low_percent: f64,
    curves: &[HitCurve],
) -> Vec<LayerSlots> {
    let layers = &header.model.layers;
    let high_size = |layer: &Layer| layer.bytes_high;
    let low_size = |layer: &Layer| layer.bytes_low;
    let (all, all_low) = (bytes_of_all(layers, high_size), bytes_of_all(layers, low_size));
    let bytes = match budget {
        Budget::Recorded => {
            let recorded = |layer: &Layer| LayerSlots { high: layer.slots_high, low: layer.slots_low };
            return layers.iter().map(recorded).collect();
        }
        Budget::Slots(n) => {
            let slots = |layer: &Layer| LayerSlots { high: n.min(layer.n_expert.into()), low: 0 };
            return layers.iter().map(slots).collect();
        }
        Budget::Bytes(bytes) => bytes.min(all),
        Budget::Percent(percent) => ((all as f64 * percent / 100.0).round() as u64).min(all),
    };
    let low_bytes = if bytes >= all { 0 } else { ((bytes as f64 * low_percent / 100.0) as u64).min(all_low) };
    let low = divide(layers, low_bytes, low_size, Allocation::Even, &[]);
    let low_used: u64 = low.iter().zip(layers).map(|(n, layer)| u64::from(*n) * layer.bytes_low).sum();
    let high = divide(layers, bytes.saturating_sub(low_used), high_size, allocation, curves);
    high.into_iter().zip(low).map(|(high, low)| LayerSlots { high, low }).collect()
}

fn bytes_of_all(layers: &[Layer], size: impl Fn(&Layer) -> u64) -> u64 {
    layers.iter().map(|layer| u64::from(layer.n_expert) * size(layer)).sum()
}

fn divide(
    layers: &[Layer],
    bytes: u64,
    size: impl Fn(&Layer) -> u64 + Copy,
    allocation: Allocation,
    curves: &[HitCurve],
) -> Vec<u32> {
    let all = bytes_of_all(layers, size);
    let mut slots = vec![0; layers.len()];
    if all == 0 {
        return slots;
    }
    // For each size, the layers of its pool and the pool's slots.
    let mut pools: BTreeMap<u64, (Vec<usize>, u64, u64)> = BTreeMap::new();
    for (at, layer) in layers.iter().enumerate().filter(|(_, layer)| size(layer) > 0) {
        let (members, n_versions, _) = pools.entry(size(layer)).or_default();
        members.push(at);
        *n_versions += u64::from(layer.n_expert);
    }
    let mut left = bytes;
    for (size, (_, n_versions, n_slots)) in &mut pools {
        *n_slots = (u128::from(*n_versions) * u128::from(bytes) / u128::from(all)) as u64; // at most the versions
        left -= *n_slots * size;
    }
    // Distribute the remainder from rounding, largest experts first.
    for (size, (_, n_versions, n_slots)) in pools.iter_mut().rev() {
        let more = (left / size).min(*n_versions - *n_slots);
        *n_slots += more;
        left -= more * size;
    }
    for (members, _, n_slots) in pools.values() {
        let demand = |at: &usize| LayerDemand {
            depth: *at as u16, // layers of a trace are capped
            needs: layers[*at].n_used.into(),
            members: layers[*at].n_expert.into(),
            penalty: curves.get(*at).map_or(0.0, |curve| curve.n_uses() as f64),
            hits: curves.get(*at).map_or(Vec::new(), HitCurve::rates),
        };
        let demands: Vec<LayerDemand> = members.iter().map(demand).collect();
        let n_slots = u32::try_from(*n_slots).unwrap_or(u32::MAX);
        for (at, n) in members.iter().zip(allocate(allocation, n_slots, &demands)) {
            slots[*at] = n;
        }
    }
    slots
}

/// Hits of one layer under LRU by number of slots (Mattson's stack distances).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HitCurve {
    by_slots: Vec<u64>,
    n_uses: u64,
}

impl HitCurve {
    /// `by_slots[n]` is the number of hits with n slots, ascending; beyond its end the number stays the same.
    pub fn new(by_slots: Vec<u64>, n_uses: u64) -> Self {
        Self { by_slots, n_uses }
    }

    /// Curve from a fitted file, in millionths of a use per token. Empty without measurements.
    pub fn fitted(penalty: &LayerPenalty) -> Self {
        let millionths = |penalty: f64| (penalty * 1e6) as u64;
        let all = millionths(penalty.at(0.0).unwrap_or(0.0));
        let saved = |slots: u16| all.saturating_sub(millionths(penalty.at(f64::from(slots)).unwrap_or(0.0)));
        Self::new((0..=penalty.n_expert).map(saved).collect(), all)
    }

    pub fn n_uses(&self) -> u64 {
        self.n_uses
    }

    /// Hit rates by number of slots, `0.0..=1.0`.
    pub fn rates(&self) -> Vec<f64> {
        self.by_slots.iter().map(|hits| *hits as f64 / self.n_uses.max(1) as f64).collect()
    }

    pub fn hits(&self, n_slots: u32) -> u64 {
        let last = self.by_slots.len().saturating_sub(1);
        self.by_slots.get((n_slots as usize).min(last)).copied().unwrap_or(0)
    }
}

/// The curve of each layer of a recording, from an LRU list of the needed experts in order, in one precision.
///
/// A layer that needs more experts at once than it has slots does slightly better in a replay, which keeps experts in
/// use.
pub fn hit_curves(recording: &Recording) -> Vec<HitCurve> {
    let mut order = Vec::new();
    let layers = recording.header.model.layers.iter();
    let of_layer = |layer: &Layer| {
        let mut stack: Vec<u16> = Vec::new();
        let mut n_uses = 0;
        let mut at_depth = vec![0u64; usize::from(layer.n_expert) + 1];
        for record in recording.batches().flat_map(|batch| &batch.layers).filter(|own| own.layer == layer.layer) {
            need_order(record, &mut order);
            n_uses += order.len() as u64;
            for &expert in &order {
                if let Some(depth) = stack.iter().rposition(|other| *other == expert).map(|at| stack.len() - at) {
                    at_depth[depth] += 1;
                    stack.remove(stack.len() - depth);
                }
                stack.push(expert);
            }
        }
        let mut sum = 0;
        HitCurve::new(at_depth.into_iter().map(|hits| (sum += hits, sum).1).collect(), n_uses)
    };
    layers.map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::ModelDescription;

    fn header(n_experts: &[u16]) -> Header {
        let layers = n_experts.iter().zip(0..).map(|(&n_expert, layer)| Layer {
            layer,
            n_expert,
            n_used: 2,
            bytes_high: 100,
            bytes_low: 25,
            slots_high: 3,
            slots_low: 1,
            ..Layer::default()
        });
        Header { model: ModelDescription { layers: layers.collect(), ..Default::default() }, ..Header::default() }
    }

    fn high(header: &Header, budget: &str, allocation: &str) -> Vec<u32> {
        let slots = slots(header, budget.parse().unwrap(), allocation.parse().unwrap(), 0.0, &[]);
        assert!(slots.iter().all(|slots| slots.low == 0 || budget == "recorded"));
        slots.into_iter().map(|slots| slots.high).collect()
    }

    #[test]
    fn divided_evenly_as_the_engine_does() {
        let header = header(&[8, 8, 8]);
        assert_eq!(high(&header, "1000", "even"), [4, 3, 3]);
        assert_eq!(high(&header, "50%", "even"), [4, 4, 4]);
        assert_eq!(high(&header, "100%", "even"), [8, 8, 8]);
        assert_eq!(high(&header, "5slots", "even"), [5, 5, 5]);
        assert_eq!(high(&header, "99slots", "even"), [8, 8, 8]);
        assert_eq!(high(&header, "0%", "even"), [0, 0, 0]);
        assert_eq!(high(&header, "recorded", "even"), [3, 3, 3]);
    }

    #[test]
    fn shallow_layers_first() {
        let header = header(&[8, 8, 8]);
        assert_eq!(high(&header, "1400", "shallow-first:1"), [8, 3, 3]);
        assert_eq!(high(&header, "1400", "shallow-first:2"), [8, 4, 2], "a token uses two");
        assert_eq!(high(&header, "1400", "shallow-first:0"), [5, 5, 4]);
    }

    #[test]
    fn slots_go_to_who_uses_them() {
        let curves = [HitCurve::new(vec![0, 1, 2, 7, 9], 9), HitCurve::new(vec![0, 0, 0, 1], 9)];
        let measured = |bytes| {
            let slots = slots(&header(&[4, 4]), Budget::Bytes(bytes), Allocation::ByPenalty, 0.0, &curves);
            slots.into_iter().map(|slots| slots.high).collect::<Vec<_>>()
        };
        assert_eq!(measured(300), [2, 1]);
        assert_eq!(measured(600), [4, 2]);
        assert_eq!(measured(800), [4, 4]);
    }

    #[test]
    fn pools_of_other_sizes_get_the_same_share() {
        let mut header = header(&[8, 8, 8]);
        header.model.layers[1].bytes_high = 300;
        assert_eq!(high(&header, "50%", "even"), [4, 4, 4]);
        assert_eq!(high(&header, "2100", "even"), [5, 4, 4], "what is left is too small for a large one");
    }

    #[test]
    fn low_versions_take_their_part() {
        let slots = slots(&header(&[8, 8]), Budget::Bytes(800), Allocation::Even, 25.0, &[]);
        assert_eq!(slots, [LayerSlots { high: 3, low: 4 }; 2]);
    }

    #[test]
    fn words() {
        for text in ["recorded", "25%", "12slots", "2MiB"] {
            assert_eq!(text.parse::<Budget>().unwrap().to_string(), text);
        }
        assert_eq!(
            "lots".parse::<Budget>().unwrap_err().to_string(),
            "'lots' is not a budget (expected recorded, 25%, 12slots or 2GiB)"
        );
        assert!("auto".parse::<Budget>().is_err() && "-1%".parse::<Budget>().is_err());
    }

    #[test]
    fn a_fitted_curve_saves_what_it_says() {
        let penalty = LayerPenalty { layer: 0, n_expert: 4, slots: vec![0, 2, 4], penalty: vec![2.0, 1.0, 0.5] };
        let curve = HitCurve::fitted(&penalty);
        assert_eq!((curve.n_uses(), curve.rates()), (2_000_000, vec![0.0, 0.25, 0.5, 0.625, 0.75]));
        assert_eq!(HitCurve::fitted(&LayerPenalty::default()).n_uses(), 0);
    }
}
