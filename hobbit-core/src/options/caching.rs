//! Which experts stay in memory.

use smart_default::SmartDefault;

use crate::cache::Allocation;
use crate::cache::policy::{PolicyKind, Weights};
use crate::predict::PredictorKind;
use crate::words::named;

/// Whether experts are read before their layer asks for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prefetch {
    /// As long as tokens wait less with it.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never. Predictions are made, and judged, all the same.
    Off,
}

named!(Prefetch, "prefetch setting": Auto = "auto", On = "on", Off = "off");

/// How the caches, the host's and each device's, choose whom to evict.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct CachingOptions {
    /// Who leaves when a slot is needed.
    pub policy: PolicyKind,
    /// The weights of [`PolicyKind::Hobbit`]. `None` takes the profile's ([`super::ModelOptions::profile`]), else
    /// [`Weights::default`].
    pub weights: Option<Weights>,
    /// How slots are divided among layers. [`Allocation::ByPenalty`] needs a profile, or a pack with one.
    pub slots: Allocation,
    /// Who guesses what later layers will use.
    pub predictor: PredictorKind,
    /// Whether that is read ahead.
    pub prefetch: Prefetch,
    /// How many layers ahead it looks at most.
    #[default(Self::DISTANCE)]
    pub distance: u8,
    /// Compute with the experts that are there while others of the layer are read. Off only to measure what that is worth.
    #[default(true)]
    pub overlap: bool,
    /// Free slots are filled while nobody waits for a read, before anybody asks for what they then hold. Only with
    /// [`PolicyKind::Learned`] or where every expert has a slot; not in traced or deterministic runs, nor with devices.
    #[default(true)]
    pub fill: bool,
}

impl CachingOptions {
    /// HOBBIT found 1 to 3 best.
    pub const DISTANCE: u8 = 2;
}
