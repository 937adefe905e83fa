//! Observers of a residency: a trace, or the counters of a simulation.

use crate::expert::{ExpertId, Version};
use crate::load::LoadClass;
use crate::predict::Predicted;
use crate::route::{Demand, Routing};

/// An expert that a layer needs, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededExpert {
    pub expert: ExpertId,
    pub demand: Demand,
    /// The version that is used; `None`: it is left out.
    pub version: Option<Version>,
    /// The version was complete where the products run.
    pub hit: bool,
    /// It is resident, staged, or on its way.
    pub is_there: bool,
    /// Bytes of the version; 0 for none.
    pub bytes: u64,
}

/// Sees events, and changes none.
pub trait Observer {
    /// False: skip work that only an observer needs.
    fn is_watching(&self) -> bool {
        true
    }

    /// A layer runs: what its router chose for each token, `weights` `[n_tokens][n_used]` and the router's `scores`
    /// `[n_tokens][n_expert]` where they are known, else empty. `waited`: seconds of waiting for reads so far.
    fn begin_layer(&mut self, _layer: u16, _routing: &Routing, _weights: &[f32], _scores: &[f32], _waited: f64) {}

    /// Tokens of the layer that has begun use these experts in place of its router's choice, `[n_tokens][n_used]`.
    fn rerouted(&mut self, _ids: &[u16]) {}

    /// It has been computed, or the first of its splits has.
    fn end_layer(&mut self, _waited: f64) {}

    /// Experts in the order in which they are asked for.
    fn needed(&mut self, _needed: &NeededExpert) {}

    /// A background read of a version, or of a part of it, was submitted. `whole`: bytes of all of it.
    fn loading(&mut self, _version: Version, _class: LoadClass, _bytes: u64, _whole: u64) {}

    /// A background read, or a part of one, was taken back.
    fn withdrawn(&mut self, _version: Version, _bytes: u64) {}

    /// A version left for another one.
    fn evicted(&mut self, _version: Version) {}

    /// The router of a layer at a `distance` of layers with experts says this about the running layer's input of a
    /// token, `[n_expert]`; `n_used` of them will be chosen.
    fn router_scores(&mut self, _token: usize, _distance: u8, _scores: &[f32], _n_used: usize) {}

    /// A predictor that works without scores expects these.
    fn predicted(&mut self, _predicted: &[Predicted]) {}
}

impl Observer for () {
    fn is_watching(&self) -> bool {
        false
    }
}
