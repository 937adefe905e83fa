//! `--max-loss`: what is known of a model's losses, from a profile beside it or from the pack.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};

use hobbit::gguf::Gguf;
use hobbit::options::ModelOptions;
use hobbit::pack::Pack;
use hobbit::profile::{Profile, ProfileError, Promise, beside, in_percent, mixes_of_json};

/// The options with a promise to lose no more than `max_loss`, a share, by the profile beside the model, or where there is none by
/// what the pack carries. What it takes is chosen when the model has a session.
///
/// # Errors
/// No profile beside the model, one of another model, or one without mixes: each with the command that makes it, and what that takes.
pub fn keep(options: ModelOptions, model: &Path, max_loss: f64) -> Result<ModelOptions> {
    let path = beside(model);
    let asked = format!("--max-loss {}%", in_percent(max_loss));
    let mut promise = Promise { max_loss, measured: Vec::new(), file: path.clone(), model: model.to_owned() };
    // A share that everybody has; a session with less says so.
    let make = promise.make("25%");
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
        promise.measured = profile.mixes;
    }
    if let (Some(mixes), true) = (pack.and_then(|pack| pack.info.mixes), promise.measured.is_empty()) {
        let mixes = mixes_of_json(&mixes).map_err(|reason| ProfileError::Mixes { path: model.to_owned(), reason });
        promise.measured = mixes.with_context(|| asked.clone())?;
        promise.file = model.to_owned();
    }
    if promise.measured.is_empty() && has_profile {
        bail!("{asked}: {} has no mixes; {make}", path.display());
    }
    if promise.measured.is_empty() {
        bail!("{asked}: there is no profile {} that says what this model tolerates; {make}", path.display());
    }
    Ok(ModelOptions { promise: Some(promise), ..options })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_profile_the_command_that_makes_it_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let model = directory.path().join("a.gguf");
        let error = keep(ModelOptions::default(), &model, 0.01).unwrap_err().to_string();
        assert!(error.contains("a.profile.json") && error.contains("gguf-tools profile"), "{error}");
        assert!(error.contains("--max-loss 1%") && error.contains("37 runs"), "{error}");
    }
}
