//! The profile that a model is opened with: from a file, or from the model's pack.

use std::path::Path;

use super::error::Error;
use super::model::Model;
use crate::cache::Allocation;
use crate::cache::policy::Weights;
use crate::options::CachingOptions;
use crate::profile::{FittedError, FittedPolicy};
use crate::stats::{CachingReport, ProfileReport};

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
        match (given, packed) {
            (Some(path), _) => {
                let policy = FittedPolicy::read(path)?;
                Ok(Some(Self { policy, file: path.display().to_string(), is_packed: false }))
            }
            (None, Some((path, text))) => {
                let file = format!("{} (key {})", path.display(), crate::pack::POLICY_KEY);
                Ok(Some(Self { policy: FittedPolicy::parse(text, &file)?, file, is_packed: true }))
            }
            (None, None) => Ok(None),
        }
    }

    fn report(&self) -> ProfileReport {
        ProfileReport {
            file: self.file.clone(),
            policy: self.policy.policy.clone(),
            thresholds: self.policy.thresholds().is_some(),
            penalties: self.policy.has_penalties(),
        }
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
        let CachingOptions { weights, .. } = self.shared.options.caching;
        let fitted = || self.shared.fitted.as_ref().and_then(|fitted| fitted.policy.hobbit_weights());
        weights.or_else(fitted).unwrap_or_default()
    }

    /// How experts are kept in memory, but for what came of it.
    pub(super) fn caching_report(&self) -> CachingReport {
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
