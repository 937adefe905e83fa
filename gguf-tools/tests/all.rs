//! Tests of gguf-tools, in one binary that is linked once.

mod closed_pipe;
mod forecast_records;
mod inspect_verify;
mod pack;
#[cfg(feature = "engine")]
mod pack_profile;
mod plan;
#[cfg(feature = "engine")]
mod profile;
#[cfg(feature = "engine")]
mod profile_paths;
mod second_reader;
mod widen;
