//! Tolerance of a model for lower quality: thresholds, mixes, and a width for each expert.
//!
//! `gguf-tools profile` runs a model over a text and writes a [`Profile`]. `gguf-tools pack --profile` chooses
//! [`widths()`] from it, and `--max-loss` of the programs chooses a mix ([`LossBound`]). `gguf-tools plan` writes a
//! [`VirtualPlan`]. This module holds formats and decisions; running the model is the tool's part. A tuned cache policy
//! is another file: [`crate::tuned`].

mod error;
mod format;
mod hull;
mod loss;
mod loss_bound;
mod mixes;
mod paths;
pub mod planner;
mod sensitivity;
mod uses;
mod virtual_plan;
mod widths;

pub use crate::pack::SliceTypes;
pub use error::{LossBoundError, ProfileError, WidthsError};
pub use format::{
    ChosenThresholds, FORMAT, LayerNorms, LayerWidth, MeasuredThresholds, ModelId, PrefillShare, Profile, TextId,
    Tolerated, VERSION, Width, norms_of_json, norms_to_json,
};
pub(crate) use format::{VersionedFault, read_versioned};
pub use loss::{Loss, log_softmax, nll};
pub use loss_bound::{ChosenMix, Here, LossBound, in_percent};
pub use mixes::{
    MeasuredMix, Mix, Mixes, Part, RUNS_MAX, beside, mixes_of_json, mixes_to_json, search_mixes, text_sha256,
};
pub use paths::{read_path_table, write_path_table};
pub use sensitivity::{divide, most_lowered};
pub use uses::Uses;
pub use virtual_plan::{
    PLAN_FORMAT, PLAN_VERSION, PlanFault, PlanOutcome, PlannedLayer, VirtualPlan, VirtualPlanError,
};
pub use widths::{Goal, Widths, widths};
