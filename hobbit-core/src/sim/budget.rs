//! Division of a budget into slots per layer, and their pools.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::config::{Config, Memory, Slots};
use crate::cache::{Allocation, LayerDemand, LayerLayout, PoolLayout, SliceKinds, allocate};
use crate::expert::{ExpertId, Precision, SliceKind, Version};
use crate::plan::{ExpertCache, SizeError};
use crate::trace::{Header, Layer};

/// Experts move as a whole: one slice stands for all of them.
pub(super) const WHOLE: SliceKind = SliceKind::Gate;

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

impl FromStr for Budget {
    type Err = SizeError;

    /// `recorded`, `25%`, `12slots` or a size (`2GiB`).
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let expected = "recorded, 25%, 12slots or 2GiB";
        let error = || SizeError { found: text.to_owned(), what: "budget", expected };
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

/// Slots of each layer of the header. `low_percent` of the bytes go to low versions, evenly, if there are any.
///
/// As in [`crate::plan`], layers whose experts are equally large form a pool, and every pool gets the same share of its
/// experts. The layers of a pool divide its slots by [`allocate`].
pub fn slots(header: &Header, budget: Budget, allocation: Allocation, low_percent: f64) -> Vec<LayerSlots> {
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
    let low = divide(layers, low_bytes, low_size, Allocation::Even);
    let low_used: u64 = low.iter().zip(layers).map(|(n, layer)| u64::from(*n) * layer.bytes_low).sum();
    let high = divide(layers, bytes.saturating_sub(low_used), high_size, allocation);
    high.into_iter().zip(low).map(|(high, low)| LayerSlots { high, low }).collect()
}

fn bytes_of_all(layers: &[Layer], size: impl Fn(&Layer) -> u64) -> u64 {
    layers.iter().map(|layer| u64::from(layer.n_expert) * size(layer)).sum()
}

fn divide(layers: &[Layer], bytes: u64, size: impl Fn(&Layer) -> u64 + Copy, allocation: Allocation) -> Vec<u32> {
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
        };
        let demands: Vec<LayerDemand> = members.iter().map(demand).collect();
        let n_slots = u32::try_from(*n_slots).unwrap_or(u32::MAX);
        for (at, n) in members.iter().zip(allocate(allocation, n_slots, &demands)) {
            slots[*at] = n;
        }
    }
    slots
}

/// High and low slots of the host, layer by layer.
pub(super) fn slots_of_host(header: &Header, config: &Config) -> Vec<LayerSlots> {
    let Memory { budget, slots: division, low_percent } = config.memory;
    slots(header, budget, division.allocation(), if config.is_dynamic() { low_percent } else { 0.0 })
}

/// A pool for each layer and precision, with the layer's share of the slots. If high versions compete across layers,
/// one pool for each of their sizes.
pub(super) fn pools(header: &Header, config: &Config, slots: Vec<LayerSlots>) -> Vec<PoolLayout> {
    let kinds = SliceKinds::from_iter([WHOLE]);
    let mut pools = Vec::new();
    for (layer, slots) in header.model.layers.iter().zip(slots) {
        let mut pool = |precision, n_slots: u32| {
            let of = |index| Version { expert: ExpertId { layer: layer.layer, index }, precision };
            let members: Vec<Version> = (0..layer.n_expert).map(of).collect();
            let n_slots = n_slots.min(layer.n_expert.into());
            let layout = LayerLayout { layer: layer.layer, members, kinds };
            let is_common = config.memory.slots == Slots::Global && precision == Precision::High;
            let bytes = is_common.then_some(layer.bytes_high);
            let common = pools.iter_mut().find(|(of, _): &&mut (Option<u64>, PoolLayout)| is_common && *of == bytes);
            match common {
                Some((_, known)) => {
                    known.layers.push(layout);
                    known.n_slots += n_slots;
                }
                None => pools.push((bytes, PoolLayout { layers: vec![layout], n_slots, capacities: None, is_common })),
            }
        };
        pool(Precision::High, slots.high);
        if config.is_dynamic() && layer.bytes_low > 0 {
            pool(Precision::Low, slots.low);
        }
    }
    pools.into_iter().map(|(_, pool)| pool).collect()
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
        let slots = slots(header, budget.parse().unwrap(), allocation.parse().unwrap(), 0.0);
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
        assert_eq!(high(&header, "1400", "shallow-first:2"), [8, 6, 0], "although a token uses two");
        assert_eq!(high(&header, "1400", "shallow-first:0"), [5, 5, 4]);
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
        let slots = slots(&header(&[8, 8]), Budget::Bytes(800), Allocation::Even, 25.0);
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
}
