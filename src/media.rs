//! Images and sound of prompts: opens the projector, reads files, and finds their places in texts.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hobbit::engine::{Media, MediaPrompt, Projector, ProjectorNeeds};
use hobbit::options::ProjectorOptions;
use hobbit::{Model, ModelOptions, SessionOptions};

use super::log::{Level, Log};
use super::stream::Desk;

/// Place of an image or sound in a text, as in llama.cpp.
pub const MARKER: &str = "<__media__>";

/// Largest file in bytes.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Has the model's budget lend the projector its memory. Limits images whose tokens are computed at once to a ubatch,
/// as llama.cpp does.
///
/// # Errors
/// A projector that cannot be used.
pub fn reserve(
    projector: Option<&mut ProjectorOptions>,
    options: &ModelOptions,
    session: &SessionOptions,
    log: &Log,
) -> Result<ModelOptions> {
    let Some(projector) = projector else { return Ok(options.clone()) };
    let mut needs = ProjectorNeeds::of(projector)?;
    let n_ubatch = session.n_ubatch.min(session.n_batch);
    if needs.n_ubatch > n_ubatch {
        projector.image_max_tokens = i32::try_from(n_ubatch).unwrap_or(i32::MAX);
        projector.image_min_tokens = projector.image_min_tokens.min(projector.image_max_tokens);
        let line = format!(
            "warning: images have at most {n_ubatch} tokens instead of {}, which this model computes at once; see -ub",
            needs.n_ubatch
        );
        log.line(Level::Warning, line);
        needs = ProjectorNeeds::of(projector)?;
    }
    Ok(ModelOptions { lent_bytes: needs.bytes, ..options.clone() })
}

/// Opens the projector, once the model has a session.
pub fn open(model: &Model, options: Option<&ProjectorOptions>, log: &Log) -> Result<Option<Projector>> {
    let Some(options) = options else { return Ok(None) };
    let projector = Projector::open(model, options)?;
    let kinds = match (projector.takes_images(), projector.takes_sound()) {
        (true, true) => "images and sound",
        (false, true) => "sound",
        _ => "images",
    };
    let from = if model.lends() { "of the experts' while one is read" } else { "reserved" };
    let (n, file) = (projector.bytes().div_ceil(1 << 20), options.path.display());
    log.line(Level::Info, format!("hobbit: projector: {kinds}, on the CPU; {n} MiB {from}; {file}"));
    Ok(Some(projector))
}

/// Reads a file of an image or sound. The projector stays open until the next prompt with one is evaluated.
///
/// # Errors
/// No projector; a file that cannot be read.
pub fn read(desk: &mut Desk, path: &Path) -> Result<Media> {
    let Some(projector) = &desk.projector else {
        bail!("{}: the model needs a projector: give --mmproj", path.display())
    };
    if desk.encoder.is_none() {
        desk.encoder = Some(projector.encoder()?);
    }
    let name = || path.display().to_string();
    let n = std::fs::metadata(path).with_context(name)?.len();
    if n > FILE_BYTES_MAX {
        bail!("{}: {n} bytes, and at most {FILE_BYTES_MAX} are read", path.display());
    }
    projector.read(&std::fs::read(path).with_context(name)?).with_context(name)
}

/// Reads several.
pub fn read_all(desk: &mut Desk, paths: &[PathBuf]) -> Result<Vec<Media>> {
    paths.iter().map(|path| read(desk, path)).collect()
}

/// The text with a place for each of `n` media: missing places come first.
pub fn placed(text: String, n: usize) -> String {
    let n_places = text.matches(MARKER).count();
    format!("{}{text}", MARKER.repeat(n.saturating_sub(n_places)))
}

/// Tokens of a text with media. Without a projector the text has no places.
pub fn tokens(model: &Model, projector: Option<&Projector>, text: &[u8], media: &[Media]) -> Result<MediaPrompt> {
    Ok(match projector {
        Some(projector) if !media.is_empty() => projector.prompt(text, MARKER, media, true)?,
        _ => MediaPrompt { tokens: model.tokenize(text, true, true)?, ..MediaPrompt::default() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_places_come_first() {
        assert_eq!(placed("a".into(), 0), "a");
        assert_eq!(placed("a".into(), 2), format!("{MARKER}{MARKER}a"));
        assert_eq!(placed(format!("a {MARKER} b"), 1), format!("a {MARKER} b"));
        assert_eq!(placed(format!("a {MARKER} b"), 2), format!("{MARKER}a {MARKER} b"));
    }
}
