//! How a model's experts are kept: by its options, else by the profile that it is opened with, from a file or from its pack.

use std::path::Path;

use super::error::Error;
use super::model::Model;
use crate::cache::Allocation;
use crate::cache::policy::Weights;
use crate::fitted::{FittedError, FittedPolicy};
use crate::stats::{CachingReport, FittedReport};

/// A profile and where it comes from.
#[derive(Clone, Debug)]
pub(super) struct Fitted {
    pub(super) policy: FittedPolicy,
    /// For messages.
    pub(super) file: String,
    /// From the model's own pack.
    pub(super) is_packed: bool,
}

impl Fitted {
    /// The file that was given, else what the pack at a path carries.
    pub(super) fn open(given: Option<&Path>, packed: Option<(&Path, &str)>) -> Result<Option<Self>, FittedError> {
        let (policy, file, is_packed) = match (given, packed) {
            (Some(path), _) => (FittedPolicy::read(path)?, path.display().to_string(), false),
            (None, Some((path, text))) => {
                let file = format!("{} (key {})", path.display(), crate::pack::POLICY_KEY);
                (FittedPolicy::parse(text, &file)?, file, true)
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { policy, file, is_packed }))
    }
}

/// That slots can be divided as asked for.
///
/// # Errors
/// [`Error::NoPenalties`].
pub(super) fn check_penalties(allocation: Allocation, fitted: Option<&Fitted>) -> Result<(), Error> {
    match (allocation, fitted) {
        (Allocation::ByPenalty, None) => Err(Error::NoPenalties { found: "there is no profile".to_owned() }),
        (Allocation::ByPenalty, Some(fitted)) if !fitted.policy.has_penalties() => {
            Err(Error::NoPenalties { found: format!("{} does not say", fitted.file) })
        }
        _ => Ok(()),
    }
}

impl Model {
    /// That the profile was fitted on this model, as it was loaded.
    pub(super) fn check_fitted(&self) -> Result<(), FittedError> {
        let Some(fitted) = &self.shared.fitted else { return Ok(()) };
        let layers: Vec<(u16, u16)> =
            self.shared.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert)).collect();
        fitted.policy.check_model(&self.info().architecture, &layers, &fitted.file, &self.info().path)
    }

    /// The weights of HOBBIT's policy: as given, as fitted, or by default.
    pub(super) fn policy_weights(&self) -> Weights {
        let fitted = || self.shared.fitted.as_ref()?.policy.hobbit_weights();
        self.shared.options.caching.weights.or_else(fitted).unwrap_or_default()
    }

    /// How experts are kept in memory, but for what came of it.
    pub(super) fn caching_report(&self) -> CachingReport {
        let caching = &self.shared.options.caching;
        CachingReport {
            policy: caching.policy.to_string(),
            policy_weights: self.policy_weights().to_string(),
            profile: self.shared.fitted.as_ref().map(|fitted| FittedReport {
                file: fitted.file.clone(),
                policy: fitted.policy.policy.clone(),
                thresholds: fitted.policy.thresholds().is_some(),
                penalties: fitted.policy.has_penalties(),
            }),
            slots: caching.slots.to_string(),
            slots_by_layer: Vec::new(),
        }
    }
}
