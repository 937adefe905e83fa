//! The file of the model that flags name, fetched if it is missing.

use std::path::PathBuf;

use anyhow::Result;

use super::args::{ModelArgs, SourceArgs, Verbosity};
use super::log::Level;
pub use hobbit_common::download::*;

/// Sets the model's path to the file of the model that other flags of `model` name, if any; fetches it if it is
/// missing.
pub fn into(model: &mut ModelArgs, verbosity: Verbosity) -> Result<()> {
    if let Some(path) = fetched(&model.source, verbosity)? {
        model.model = Some(path);
    }
    Ok(())
}

/// The file of the model that `args` names, if any; fetched if it is missing.
pub fn fetched(args: &SourceArgs, verbosity: Verbosity) -> Result<Option<PathBuf>> {
    let Some(source) = args.source().map_err(anyhow::Error::msg)? else { return Ok(None) };
    run(&source, &places(args.given())?, verbosity.shown >= Level::Info as u8).map(Some)
}
