//! Are low versions in a pack those of this very model?

use std::ops::ControlFlow;
use std::path::Path;

use super::error::Error;
use super::log;
use crate::gguf::Gguf;
use crate::pack::{self, Pack, Sha256};

/// Checks that the low pack was made from `model`, whose digest is `sha256` where it is known without reading it (a full pack
/// says what it was made from). Headers are compared, then [`pack::fingerprint()`]s: milliseconds. A pack that has none, from an
/// earlier hobbit, is compared by the model's whole content, once: the fingerprint is then kept beside the pack. `progress` is
/// told 0..=1 meanwhile, and stops that by answering false.
///
/// # Errors
/// [`Error::LowOfAnother`]; a model that cannot be read; [`Error::Cancelled`].
pub(super) fn check_made_from(
    low: &Pack,
    model: &Gguf,
    sha256: Option<Sha256>,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<(), Error> {
    let (path, source) = (model.files[0].path.as_path(), low.info.source_sha256);
    let another = |what: &'static str| Error::LowOfAnother {
        low: low.path.clone(),
        model: path.to_owned(),
        source_name: low.info.source_name.clone(),
        what,
    };
    if !low.has_header_of(model) {
        return Err(another("header or length differ"));
    }
    if let Some(known) = sha256 {
        return if known == source { Ok(()) } else { Err(another("the SHA-256 of what they were made from differ")) };
    }
    let found = pack::fingerprint(model)?;
    if let Some(expected) = low.info.source_fingerprint.or_else(|| pack::kept_fingerprint(&low.path, &source)) {
        return if found == expected { Ok(()) } else { Err(another("its weights differ")) };
    }
    log::notice(format_args!(
        "{}: made by an earlier hobbit: {} is compared with its model this once, all {} MiB of it",
        low.path.display(),
        path.display(),
        model.file_bytes() >> 20
    ));
    let mut tell = |done: u64, total: u64| match progress(done as f32 / total.max(1) as f32) {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    match pack::source_sha256(model, &mut tell)? {
        None => return Err(Error::Cancelled),
        Some(digest) if digest != source => return Err(another("its weights differ")),
        Some(_) => {}
    }
    if let Err(error) = pack::keep_fingerprint(&low.path, &source, &found) {
        log::notice(format_args!("{}", unkept(&low.path, &error)));
    }
    Ok(())
}

fn unkept(low: &Path, error: &std::io::Error) -> String {
    let kept = pack::kept_fingerprint_path(low);
    format!(
        "{}: the result cannot be kept ({error}), so that the next start compares again; make the pack again to end that",
        kept.display()
    )
}
