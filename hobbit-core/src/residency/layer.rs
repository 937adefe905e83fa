//! The driver of a layer: one order of steps, wherever its experts are multiplied.
//!
//! ```text
//! select ─► reroute ─► demand ─► begin ─► products ─► end
//!                                  │  └─ predict, before the products or behind them
//!                                  └─ hits are pinned, misses are read
//! ```
//!
//! [`Compute`] is implemented by the engine's CPU path, by its device path, and by the simulator. An implementation
//! has the layer's [`Router`], multiplies slices that have landed, and passes time; it decides nothing.

use super::interfaces::DeviceResidency;
use super::selection::LayerStep;
use super::selection::{Selection, TokenChoices};
use super::{Later, Observer, Reads, Residency, ScoresByLayer};
use crate::expert::{ExpertId, Version};
use crate::predict::RouterScores;
use crate::route::Weighing;

/// Purpose of the router's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsFor {
    /// Tokens may be rerouted.
    Rerouting,
    /// Precisions are demanded.
    Demands,
}

/// The router of the running layer. Its values are asked for only if they decide something: on a device, each costs a
/// copy.
pub trait Router {
    type Error;

    /// Sets `selection` to the router's choice ([`Selection::set`]), or to a recorded one in its place. Returns the
    /// recorded weights, `[n_tokens][n_used]`.
    fn select(&mut self, selection: &mut Selection) -> Result<Option<Vec<f32>>, Self::Error>;

    /// Replaces the router's ids, if some are given, and weights, `[n_tokens][n_used]`, for later nodes of the graph.
    fn write(&mut self, ids: Option<&[u16]>, weights: &[f32]);

    /// The router's scores of all experts, `[n_tokens][n_expert]`, if the policy or an observer needs them; else empty.
    /// `asks_ahead`: the next layers' routers will be asked too.
    fn scores(&mut self, _selection: &Selection, _asks_ahead: bool) -> Vec<f32> {
        Vec::new()
    }

    /// The router's weights of its choice, `[n_tokens][n_used]`.
    fn weights(&mut self, selection: &Selection, purpose: WeightsFor) -> Result<Vec<f32>, Self::Error>;

    /// The router's input of each token; empty if it is not known.
    fn inputs(&self) -> Vec<&[f32]>;

    /// How its weights were made.
    fn weighing(&mut self, selection: &Selection) -> Weighing;

    /// Its scores of all experts, chosen or not, token by token; empty if they do not explain its choice. `None`: no
    /// router chose, because the layer's experts follow from the token alone.
    fn unmasked_scores(&mut self, selection: &Selection) -> Option<Vec<RouterScores>>;

    /// Scores by the routers of `later` layers for this layer's input, token by token, of those that are known.
    fn later_scores(&mut self, later: &[Later]) -> Vec<ScoresByLayer>;
}

/// Computes one split of a layer. [`run_layer`] calls the methods in the order of their declaration.
pub trait Compute<R: Reads, O: Observer>: DeviceResidency {
    type Error;
    type Router: Router<Error = Self::Error>;

    /// Whether the next layers are predicted when this one has been submitted. A device computes meanwhile, so
    /// prediction costs no time then; where this thread multiplies, reads ahead must start before it does.
    const PREDICTS_BEHIND_PRODUCTS: bool = false;

    fn router(&mut self) -> &mut Self::Router;

    /// Replaces the router's ids and weights where later nodes read them ([`Router::write`]).
    fn write(&mut self, ids: Option<&[u16]>, weights: &[f32]) {
        self.router().write(ids, weights);
    }

    /// Sets recorded demands. Only a recording has them: its weights, in half precision, might cross a threshold.
    /// Whether it did.
    fn recorded_demands(&mut self, _selection: &mut Selection) -> bool {
        false
    }

    /// A layer's first split begins: for policies of other memories than the host's. `scores`: [`Router::scores`].
    fn enter(&mut self, _residency: &mut Residency<R, O>, _selection: &Selection, _scores: &[f32]) {}

    /// Sets [`Selection::expected`] of a dense prompt, if the next layer's router is known. Only the CPU path does:
    /// on a device, a prompt's inputs are not in host memory.
    fn expect(&mut self, _residency: &Residency<R, O>, _selection: &mut Selection) {}

    /// The tokens' experts for the predictor. A recording may know more of the router's choice than its order.
    fn token_choices(&self, selection: &Selection) -> TokenChoices {
        selection.token_choices()
    }

    /// Seconds of the layer without waits for reads. `None`: to be measured. Only a virtual clock knows them before.
    fn layer_seconds(&self, _step: &LayerStep) -> Option<f64> {
        None
    }

    /// Multiplies, or submits, each expert as its slices land.
    fn products(
        &mut self,
        residency: &mut Residency<R, O>,
        selection: &Selection,
        step: &LayerStep,
    ) -> Result<(), Self::Error>;

    /// Completes products that were submitted: on a device, copies ahead and the CPU helper's part come behind them.
    fn finish(
        &mut self,
        _residency: &mut Residency<R, O>,
        _selection: &Selection,
        _step: &LayerStep,
    ) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Ends the step, also after a failure. A device keeps its slots pinned until uploads have read them.
    fn end(&mut self, residency: &mut Residency<R, O>, selection: &Selection, step: LayerStep) {
        residency.end(step, selection);
    }
}

pub fn run_layer<R: Reads, O: Observer, C: Compute<R, O>>(
    compute: &mut C,
    residency: &mut Residency<R, O>,
    selection: &mut Selection,
) -> Result<(), C::Error> {
    if let Some(weights) = compute.router().select(selection)? {
        compute.write(Some(&selection.routing.ids), &weights);
    }
    let mut scores = Vec::new();
    if !selection.is_later_split() {
        if residency.may_reroute(selection.phase()) {
            reroute(compute, residency, selection)?;
        }
        demand(compute, residency, selection)?;
        residency.enter(selection);
        scores = compute.router().scores(selection, residency.asks_routers());
        compute.enter(residency, selection, &scores);
        if !selection.phase().is_decode() && selection.is_dense() {
            compute.expect(residency, selection);
        }
    }
    let step = residency.begin(selection, &scores, compute);
    if !C::PREDICTS_BEHIND_PRODUCTS {
        predict(compute, residency, selection, &step);
    }
    if selection.leave_out(&step, &residency.precisions) {
        compute.write(None, &selection.weights);
    }
    let mut result = compute.products(residency, selection, &step);
    if result.is_ok() {
        if C::PREDICTS_BEHIND_PRODUCTS {
            predict(compute, residency, selection, &step);
        }
        result = compute.finish(residency, selection, &step);
    }
    compute.end(residency, selection, step);
    result
}

/// Reroutes tokens to experts that are in memory.
fn reroute<R: Reads, O: Observer, C: Compute<R, O>>(
    compute: &mut C,
    residency: &mut Residency<R, O>,
    selection: &mut Selection,
) -> Result<(), C::Error> {
    let before = compute.router().weights(selection, WeightsFor::Rerouting)?;
    if residency.virtual_experts.is_some() {
        selection.observe(&before, &compute.router().inputs());
    }
    // Usually every expert is present, and the router is not asked: learning it copies its weights.
    let layer = selection.layer();
    let experts = selection.routing.needed.iter().map(|&index| ExpertId { layer, index });
    let missing: Vec<ExpertId> = experts.filter(|&expert| !residency.is_present(expert, compute)).collect();
    let only_present = residency.rerouting.only_present;
    let wants_scores = if missing.is_empty() {
        only_present && compute.router().weighing(selection) == Weighing::OfAll
    } else {
        // An expert that finds a free slot is read once and stays.
        let has_empty_slot = |expert: &ExpertId| {
            let version = Version::high(*expert);
            if compute.copies() { compute.has_empty_slot(version) } else { residency.cache().has_empty_slot(version) }
        };
        only_present || !missing.iter().any(has_empty_slot)
    };
    if !wants_scores {
        return Ok(());
    }
    let weighing = compute.router().weighing(selection);
    let Some(scores) = compute.router().unmasked_scores(selection) else { return Ok(()) };
    if let Some(weights) = residency.reroute(selection, &before, (&scores, weighing), compute) {
        compute.write(Some(&selection.routing.ids), &weights);
    }
    Ok(())
}

/// Demands a precision of each expert.
fn demand<R: Reads, O: Observer, C: Compute<R, O>>(
    compute: &mut C,
    residency: &mut Residency<R, O>,
    selection: &mut Selection,
) -> Result<(), C::Error> {
    if compute.recorded_demands(selection) {
        return Ok(());
    }
    let weights = if residency.precisions.asks_weights(selection.phase()) {
        compute.router().weights(selection, WeightsFor::Demands)?
    } else {
        Vec::new()
    };
    selection.demand(&mut residency.precisions, &weights);
    Ok(())
}

/// Predicts the layers after one of a batch that decodes, once, and reads ahead what is worth it.
fn predict<R: Reads, O: Observer, C: Compute<R, O>>(
    compute: &mut C,
    residency: &mut Residency<R, O>,
    selection: &Selection,
    step: &LayerStep,
) {
    if selection.is_new_decode() && residency.looks_ahead() {
        let later = residency.lookahead.as_ref().map_or_else(Vec::new, |ahead| ahead.layers_to_score(step.layer));
        let scores = if later.is_empty() { Vec::new() } else { compute.router().later_scores(&later) };
        let tokens = compute.token_choices(selection);
        let seconds = compute.layer_seconds(step);
        residency.predict(step, &tokens, scores, seconds, compute);
    }
}
