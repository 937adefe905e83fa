//! Where the norms of virtual experts come from: the plan, the pack, the file beside the model, or the model itself.

use crate::engine::error::OpenError;
use crate::engine::ggml::log;
use crate::engine::memory::norms::{NormsJob, NormsTask};
use crate::engine::model::Shared;
use hobbit_core::pack::fingerprint;
use hobbit_core::profile::{LayerNorms, ModelId, NORMS_FORMAT, NORMS_VERSION, NormsFile};
use hobbit_core::stats::NormsSource;
use hobbit_core::store::{Original, StoreError, StoreKind};

/// Norms that are known, their source, and the job that computes the others.
pub(super) type Found = (Vec<LayerNorms>, NormsSource, Option<NormsJob>);

/// The model's norms. Those that are nowhere are computed and kept beside the model, if experts are read (`kind`: how).
pub(super) fn norms_of(shared: &Shared, kind: Option<StoreKind>) -> Found {
    let planned = shared.followed.virtual_plan.as_ref().map(|plan| plan.norms.clone()).unwrap_or_default();
    let carried = [(planned, NormsSource::Plan), (shared.source.norms.clone(), NormsSource::Pack)];
    if let Some((norms, source)) = carried.into_iter().find(|(norms, _)| !norms.is_empty()) {
        return (norms, source, None);
    }
    let Some(kind) = kind else { return (Vec::new(), NormsSource::None, None) };
    beside(shared, kind).unwrap_or_else(|error| {
        log::notice(format_args!("norms of experts: {error}; they count as 1"));
        (Vec::new(), NormsSource::None, None)
    })
}

fn beside(shared: &Shared, kind: StoreKind) -> Result<Found, OpenError> {
    let Shared { source, info, options, .. } = shared;
    let weights_sha256 = source.pack_source.map_or_else(|| fingerprint(&source.gguf), Ok)?.to_string();
    let model = ModelId::of(&source.gguf, shared.experts.map());
    let path = NormsFile::beside(&info.path);
    let (mut may_replace, mut norms) = (true, Vec::new());
    if path.exists() {
        match NormsFile::read(&path) {
            Ok(file) if file.model.header_sha256 == model.header_sha256 && file.weights_sha256 == weights_sha256 => {
                norms = file.norms;
            }
            Ok(_) => {}
            Err(error) => {
                may_replace = false;
                log::notice(format_args!(
                    "norms of experts: {error}; they are computed, and this file is left as it is"
                ));
            }
        }
    }
    let layers = source.catalog.layers.iter().map(|layer| (layer.layer, usize::from(layer.n_expert)));
    if !norms.iter().map(|own: &LayerNorms| (own.layer, own.norms.len())).eq(layers.take(norms.len())) {
        norms.clear();
    }
    if norms.len() == source.catalog.layers.len() {
        return Ok((norms, NormsSource::File, None));
    }
    let known = norms.clone();
    let file = NormsFile { format: NORMS_FORMAT.to_owned(), version: NORMS_VERSION, model, weights_sha256, norms };
    let again = |file: &Original| Original::open(&file.path, file.state);
    let job = NormsJob::start(NormsTask {
        catalog: source.catalog.clone(),
        files: source.originals.iter().map(again).collect::<Result<_, _>>()?,
        file,
        keep: may_replace.then_some(path),
        is_direct: kind == StoreKind::Direct,
        is_awaited: options.precision.deterministic,
    });
    let job = job.map_err(|source| StoreError::Thread { engine: "norms", source })?;
    Ok((known, NormsSource::Computing, Some(job)))
}
