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
mod uses;
mod virtual_plan;
mod widths;

pub use crate::pack::SliceTypes;
pub use error::{LossBoundError, ProfileError, WidthsError};
pub(crate) use format::read_versioned;
pub use format::{
    ChosenThresholds, FORMAT, LayerNorms, LayerWidth, ModelId, Profile, TextId, VERSION, Width, norms_of_json,
    norms_to_json,
};
pub use loss::{Loss, log_softmax, nll};
pub use loss_bound::{ChosenMix, Here, LossBound, in_percent};
pub use mixes::{
    MeasuredMix, Mix, Mixes, Part, RUNS_MAX, beside, mixes_of_json, mixes_to_json, search_mixes, text_sha256,
};
pub use paths::{read_path_table, write_path_table};
pub use uses::{Uses, divide};
pub use virtual_plan::{PLAN_FORMAT, PLAN_VERSION, PlanOutcome, PlannedLayer, VirtualPlan, VirtualPlanError};
pub use widths::{Goal, Widths, widths};
