//! `--max-loss`: finds the measurements of a model, in a profile beside it or in the pack.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};

use hobbit::options::ModelOptions;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::Pack;
use hobbit_core::profile::{LossBound, Profile, ProfileError, beside, in_percent, mixes_of_json};

/// The options with a bound of `max_loss`, a share, on the loss. The measurements are those of the profile beside the model, else
/// those in the pack; the mix is chosen when a session opens.
pub fn bound(options: ModelOptions, model: &Path, max_loss: f64) -> Result<ModelOptions> {
    let path = beside(model);
    let asked = format!("--max-loss {}%", in_percent(max_loss));
    let mut bound = LossBound { max_loss, measured: Vec::new(), file: path.clone(), model: model.to_owned() };
    // A session with less memory names its own share.
    let make = bound.make("25%");
    let has_profile = path.exists();
    let gguf = if has_profile || model.exists() { Some(Gguf::open(model)?) } else { None };
    let pack = if gguf.as_ref().is_some_and(Pack::is_pack) { Some(Pack::open(model)?) } else { None };
    if let (Some(gguf), true) = (gguf, has_profile) {
        let profile = Profile::read(&path).with_context(|| asked.clone())?;
        let checked = match &pack {
            Some(pack) => profile.check_model(&pack.plain, &pack.experts),
            None => profile.check_model(&gguf, &gguf.experts()?),
        };
        checked.map_err(|error| anyhow!("{asked}: {error}; {make}"))?;
        bound.measured = profile.mixes;
    }
    if let (Some(mixes), true) = (pack.and_then(|pack| pack.info.mixes), bound.measured.is_empty()) {
        let mixes = mixes_of_json(&mixes).map_err(|reason| ProfileError::Mixes { path: model.to_owned(), reason });
        bound.measured = mixes.with_context(|| asked.clone())?;
        bound.file = model.to_owned();
    }
    if bound.measured.is_empty() && has_profile {
        bail!("{asked}: {} has no mixes; {make}", path.display());
    }
    if bound.measured.is_empty() {
        bail!("{asked}: no measurements of this model: there is no profile {}; {make}", path.display());
    }
    Ok(ModelOptions { loss_bound: Some(bound), ..options })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_profile_the_error_names_the_command_that_makes_one() {
        let directory = tempfile::tempdir().unwrap();
        let model = directory.path().join("a.gguf");
        let error = bound(ModelOptions::default(), &model, 0.01).unwrap_err().to_string();
        assert!(error.contains("a.profile.json") && error.contains("gguf-tools profile"), "{error}");
        assert!(error.contains("--max-loss 1%") && error.contains("37 runs"), "{error}");
    }
}
