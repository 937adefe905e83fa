//! Options of expert caching.

use smart_default::SmartDefault;

use crate::cache::Allocation;
use crate::cache::policy::{PolicyKind, Weights};
use crate::named::named;
use crate::predict::PredictorKind;

/// Whether experts are read before their layer asks for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prefetch {
    /// As long as tokens wait less with it.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never. Predictions are still made and judged.
    Off,
}

named!(Prefetch, "prefetch setting": Auto = "auto", On = "on", Off = "off");

/// Eviction, slots and prefetching of the caches of the host and of each device.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct CachingOptions {
    /// Eviction policy.
    pub policy: PolicyKind,
    /// The weights of [`PolicyKind::Hobbit`]. `None` takes the profile's ([`super::ModelOptions::profile`]), else
    /// [`Weights::default`].
    pub weights: Option<Weights>,
    /// How slots are divided among layers. [`Allocation::ByPenalty`] needs a profile, or a pack with one.
    pub slots: Allocation,
    /// Predictor of later layers' experts.
    pub predictor: PredictorKind,
    /// Whether predicted experts are read ahead.
    pub prefetch: Prefetch,
    /// Maximum layers to look ahead.
    #[default(Self::DISTANCE)]
    pub distance: u8,
    /// Compute with resident experts while others of the layer are read. `false` only serves to measure the gain.
    #[default(true)]
    pub overlap: bool,
    /// Fill free slots while no product waits for a read, before the experts are needed. Only with
    /// [`PolicyKind::Learned`] or if every expert has a slot; not in traced or deterministic runs, nor with devices.
    #[default(true)]
    pub fill: bool,
}

impl CachingOptions {
    /// HOBBIT found 1 to 3 to be best.
    pub const DISTANCE: u8 = 2;
}
