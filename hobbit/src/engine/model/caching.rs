//! How a model's experts are kept: by its options, else by the policy that was fitted to it.

use super::Model;
use crate::cache::policy::Weights;
use crate::engine::fitted::Fitted;
use crate::fitted::FittedError;
use crate::options::CachingOptions;
use crate::stats::CachingReport;

impl Model {
    /// That the profile was fitted on this model, as it was loaded.
    pub(in crate::engine) fn check_fitted(&self) -> Result<(), FittedError> {
        let Some(fitted) = &self.shared.fitted else { return Ok(()) };
        let layers: Vec<(u16, u16)> =
            self.shared.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert)).collect();
        fitted.policy.check_model(&self.info().architecture, &layers, &fitted.file, &self.info().path)
    }

    /// The weights of HOBBIT's policy: as given, as fitted, or by default.
    pub(in crate::engine) fn policy_weights(&self) -> Weights {
        let CachingOptions { weights, .. } = self.shared.options.caching;
        let fitted = || self.shared.fitted.as_ref().and_then(|fitted| fitted.policy.hobbit_weights());
        weights.or_else(fitted).unwrap_or_default()
    }

    /// How experts are kept in memory, but for what came of it.
    pub(in crate::engine) fn caching_report(&self) -> CachingReport {
        let caching = &self.shared.options.caching;
        CachingReport {
            policy: caching.policy.to_string(),
            policy_weights: self.policy_weights().to_string(),
            profile: self.shared.fitted.as_ref().map(Fitted::report),
            slots: caching.slots.to_string(),
            slots_by_layer: Vec::new(),
        }
    }
}
