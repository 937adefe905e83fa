//! Current place of every expert, for displays.

use super::Model;
use hobbit_core::expert::Precision;

/// Where an expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPlace {
    /// Only in the file.
    Absent,
    /// In the host's memory, in a precision.
    Held(Precision),
    /// Being read into the host's memory.
    Arriving(Precision),
    /// On a device.
    OnDevice,
}

/// Where the experts of one layer are, by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPlaces {
    /// Block number.
    pub layer: u16,
    /// One entry for each expert, `[n_expert]`.
    pub experts: Vec<ExpertPlace>,
}

impl Model {
    /// Place of every expert; `None` where llama.cpp runs the model by itself, and before the first session. Waits for
    /// the layer being computed.
    #[doc(hidden)]
    pub fn expert_places(&self) -> Option<Vec<LayerPlaces>> {
        let memories = self.shared.experts.memories();
        let memories = memories.as_ref()?;
        let mut layers: Vec<LayerPlaces> = self
            .layers_with_experts()
            .into_iter()
            .map(|(layer, n)| LayerPlaces { layer, experts: vec![ExpertPlace::Absent; usize::from(n)] })
            .collect();
        let mut put = |layer: u16, index: u16, place: ExpertPlace| {
            let found = layers.binary_search_by_key(&layer, |own| own.layer).ok();
            let Some(cell) = found.and_then(|at| layers[at].experts.get_mut(usize::from(index))) else { return };
            if rank(place) > rank(*cell) {
                *cell = place;
            }
        };
        let cache = memories.host.cache();
        for (version, slot) in cache.residents() {
            let place = match cache.is_ready(slot) {
                true => ExpertPlace::Held(version.precision),
                false => ExpertPlace::Arriving(version.precision),
            };
            put(version.expert.layer, version.expert.index, place);
        }
        for tier in &memories.tiers {
            for (version, _) in tier.cache.residents() {
                put(version.expert.layer, version.expert.index, ExpertPlace::OnDevice);
            }
        }
        Some(layers)
    }
}

/// Precedence when an expert is in several places.
fn rank(place: ExpertPlace) -> u8 {
    match place {
        ExpertPlace::Absent => 0,
        ExpertPlace::Arriving(Precision::Low) => 1,
        ExpertPlace::Held(Precision::Low) => 2,
        ExpertPlace::Arriving(Precision::High) => 3,
        ExpertPlace::Held(Precision::High) => 4,
        ExpertPlace::OnDevice => 5,
    }
}
