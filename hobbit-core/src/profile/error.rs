//! Why a profile cannot be read or used.

use std::io;
use std::path::PathBuf;

use crate::gguf::GgmlType;
use crate::predict::PathTableError;

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: &'static str, error: io::Error },
    #[error("{}: {reason}; expected what gguf-tools profile -o writes", path.display())]
    Malformed { path: PathBuf, reason: String },
    #[error(
        "{}: version {found} of the format, expected {expected}; make the profile again with this gguf-tools",
        path.display()
    )]
    Version { path: PathBuf, found: u64, expected: u64 },
    /// A path table that cannot be read or written, or is another model's.
    #[error("{}: {error}", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    #[error("{}: key 'hobbit.expert_norms': {reason}; make the pack again with gguf-tools pack", path.display())]
    Norms { path: PathBuf, reason: String },
    #[error("{}: key 'hobbit.mixes': {reason}; make the pack again with gguf-tools pack", path.display())]
    Mixes { path: PathBuf, reason: String },
    #[error(
        "the profile of {profiled} has not measured how many experts at {dtype} are tolerated; make it with \
         gguf-tools profile --widths {dtype} --tolerance 2%"
    )]
    NotMeasured { profiled: String, dtype: GgmlType },
    #[error(
        "the profile was made of {profiled}, not of {}: {what} is {found}, expected {expected}; \
         make a profile of this model with gguf-tools profile", model.display()
    )]
    OtherModel { profiled: String, model: PathBuf, what: &'static str, found: String, expected: String },
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WidthsError {
    #[error("the profile has no widths; make one with gguf-tools profile --widths q2_k,q3_k,q4_k")]
    NoWidths,
    #[error("--max-loss {found} is not a tolerance; give a share of perplexity from 0% on, for example 2%")]
    MaxLoss { found: f64 },
    #[error(
        "--target-size: {target} bytes cannot be reached; with every expert at its smallest width the file has \
         {smallest} bytes (predicted loss {:.2} %), give that or more, or profile narrower --widths", 100.0 * loss
    )]
    TargetSize { target: u64, smallest: u64, loss: f64 },
    #[error("layer {layer}: the profile has {found} experts, expected {expected}; it was made of another model")]
    Layer { layer: u16, found: usize, expected: usize },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LossBoundError {
    #[error(
        "--max-loss {max_loss}: {} measured a model whose experts are {measured}, here they are {here}; {make}",
        file.display()
    )]
    OtherExperts { max_loss: String, file: PathBuf, measured: String, here: String, make: String },
    #[error(
        "--max-loss {max_loss}: {} has measured with {measured} of the experts in memory, and here are {here}: more \
         may be lost; \
         {make}", file.display()
    )]
    SmallerCache { max_loss: String, file: PathBuf, measured: String, here: String, make: String },
}
