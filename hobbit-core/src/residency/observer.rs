//! Who looks on: a trace that is being recorded, or the books of a simulation.

use crate::expert::{ExpertId, Version};
use crate::load::LoadClass;
use crate::predict::Predicted;
use crate::route::{Demand, Routing};

/// An expert that a layer needs, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededExpert {
    /// Which.
    pub expert: ExpertId,
    /// What is asked of it.
    pub demand: Demand,
    /// What is used of it; `None`: it is left out.
    pub version: Option<Version>,
    /// That version was complete where the products run.
    pub hit: bool,
    /// It is resident, staged, or on its way.
    pub is_there: bool,
    /// Bytes of the version; 0 for none.
    pub bytes: u64,
}

/// Is told what happens. Nothing of it changes what happens.
pub trait Observer {
    /// Whether anybody looks: otherwise what only an observer wants to know is not worked out.
    fn is_watching(&self) -> bool {
        true
    }

    /// A layer runs: what its router chose for each token, `weights` `[n_tokens][n_used]` and the router's `scores`
    /// `[n_tokens][n_expert]` where they are known, else empty. `waited`: seconds of waiting for reads so far.
    fn begin_layer(&mut self, layer: u16, routing: &Routing, weights: &[f32], scores: &[f32], waited: f64) {
        let _ = (layer, routing, weights, scores, waited);
    }

    /// Of the layer that has begun: what its tokens use in place of its router's choice, `[n_tokens][n_used]`.
    fn rerouted(&mut self, ids: &[u16]) {
        let _ = ids;
    }

    /// It has been computed, or the first of its splits has.
    fn end_layer(&mut self, waited: f64) {
        let _ = waited;
    }

    /// Experts in the order in which they are asked for.
    fn needed(&mut self, needed: &NeededExpert) {
        let _ = needed;
    }

    /// A background read of a version, or of a part of it, was submitted. `whole`: bytes of all of it.
    fn loading(&mut self, version: Version, class: LoadClass, bytes: u64, whole: u64) {
        let _ = (version, class, bytes, whole);
    }

    /// A background read, or a part of one, was taken back.
    fn withdrawn(&mut self, version: Version, bytes: u64) {
        let _ = (version, bytes);
    }

    /// A version left for another one.
    fn evicted(&mut self, version: Version) {
        let _ = version;
    }

    /// The router of a layer at a `distance` of layers with experts says this about the running layer's input of a token,
    /// `[n_expert]`; `n_used` of them will be chosen.
    fn router_scores(&mut self, token: usize, distance: u8, scores: &[f32], n_used: usize) {
        let _ = (token, distance, scores, n_used);
    }

    /// A predictor that works without scores expects these.
    fn predicted(&mut self, predicted: &[Predicted]) {
        let _ = predicted;
    }
}

/// Nobody.
impl Observer for () {
    fn is_watching(&self) -> bool {
        false
    }
}
