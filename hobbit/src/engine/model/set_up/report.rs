//! Reports of a plan: on precision for users, and the header of a trace.

use crate::engine::memory::device_tier::Tier;
use crate::engine::model::Model;
use crate::engine::model::set_up::Rules;
use hobbit_core::cache::Cache;
use hobbit_core::expert::{ExpertId, Precision, Version};
use hobbit_core::gguf::{Catalog, LayerCatalog, VersionSource};
use hobbit_core::options::PrecisionMode;
use hobbit_core::plan::{MemoryPlan, types_of};
use hobbit_core::residency::Precisions;
use hobbit_core::stats::{DeviceReport, LowReport, PrecisionReport, VersionsReport};
use hobbit_core::trace;

/// Whether experts may be missing when they are needed: neither the host nor the devices hold all.
pub(super) fn has_misses(plan: &MemoryPlan, tiers: &[Tier]) -> bool {
    let hold_all = || DeviceReport::hold_all(tiers.iter().map(|tier| &tier.report), plan.n_experts);
    tiers.iter().any(Tier::has_misses) || !plan.is_fully_resident() && !hold_all()
}

/// Report on precision for users, including the approximations of `routing`.
pub(super) fn precision(
    model: &Model,
    (precisions, routing): &Rules,
    plan: &MemoryPlan,
    catalog: &Catalog,
    tiers: &[Tier],
) -> PrecisionReport {
    let shared = &model.shared;
    let Precisions { mode, thresholds, options, .. } = precisions;
    let n_versions = |precision: Precision| {
        let layers = shared.source.catalog.layers.iter();
        let count =
            |layer: &LayerCatalog| (0..layer.n_expert).filter(|&i| layer.source(i, precision).is_some()).count();
        layers.map(count).sum::<usize>() as u64
    };
    let versions = |catalog: &Catalog, precision, slots| VersionsReport {
        types: types_of(catalog, precision),
        bytes: catalog.bytes(precision),
        slots,
        experts: n_versions(precision),
    };
    let low = shared.source.low_name.as_ref().map(|source| LowReport {
        source: source.clone(),
        versions: versions(&shared.source.catalog, Precision::Low, plan.n_low_slots),
        cache_bytes: plan.low_cache,
    });
    PrecisionReport {
        mode: *mode,
        t1: thresholds.t1,
        t2: thresholds.t2,
        prefill_low: options.prefill_low_at(thresholds.t1),
        renormalise: options.renormalise,
        deterministic: options.deterministic,
        upgrade: options.upgrade,
        cpu_helper: tiers.iter().any(Tier::has_helper),
        divided: tiers.iter().any(|tier| tier.is_divided() || tier.serves.batches),
        kernels: shared.options.kernels_taken(),
        routing: routing.words().filter(|_| has_misses(plan, tiers)),
        over_link: *mode == PrecisionMode::Dynamic && plan.is_fully_resident(),
        loss_bound: routing.loss_bound.clone(),
        high: versions(catalog, Precision::High, plan.n_slots),
        low,
    }
}

/// Header of a trace.
pub(super) fn trace_header(
    model: &Model,
    catalog: &Catalog,
    cache: &Cache,
    (precisions, routing): &Rules,
    cache_bytes: u64,
) -> trace::Header {
    let bytes = |layer: &LayerCatalog, precision| {
        let sources = (0..layer.n_expert).filter_map(|index| layer.source(index, precision));
        sources.map(VersionSource::bytes).max().unwrap_or(0)
    };
    // Only if all experts are nested: otherwise the largest read is a whole expert.
    let rest = |layer: &LayerCatalog| {
        let versions = (0..layer.n_expert).map(|index| Version::high(ExpertId { layer: layer.layer, index }));
        let lacks = |version: Version| {
            let source = catalog.source(version).filter(|_| catalog.in_bit_planes(version))?;
            let low = catalog.source(Version::low(version.expert))?;
            Some(source.bytes() - low.bytes())
        };
        versions.map(lacks).collect::<Option<Vec<u64>>>().and_then(|rest| rest.into_iter().max()).unwrap_or(0)
    };
    let layer = |layer: &LayerCatalog| trace::Layer {
        layer: layer.layer,
        n_expert: layer.n_expert,
        n_used: (model.info().n_expert_used as u16).clamp(1, layer.n_expert),
        bytes_high: bytes(layer, Precision::High),
        bytes_low: bytes(layer, Precision::Low),
        bytes_rest: rest(layer),
        slots_high: cache.pools().capacity_of_layer(layer.layer, Precision::High),
        slots_low: cache.pools().capacity_of_layer(layer.layer, Precision::Low),
    };
    let options = &model.shared.options;
    let Precisions { mode, thresholds, options: wanted, .. } = precisions;
    trace::Header {
        model: trace::ModelDescription {
            name: file_name(model),
            architecture: model.info().architecture.clone(),
            layers: catalog.layers.iter().map(layer).collect(),
        },
        settings: trace::Settings {
            policy: options.caching.policy.to_string(),
            predictor: model.shared.predictor().to_string(),
            prefetch: options.caching.prefetch.to_string(),
            distance: options.caching.distance,
            mode: mode.to_string(),
            t1: thresholds.t1,
            t2: thresholds.t2,
            prefill_low: wanted.prefill_low_at(thresholds.t1),
            upgrade: wanted.upgrade,
            deterministic: wanted.deterministic,
            routing: routing.clone(),
            cache_bytes,
            more: [
                ("policy_weights".to_owned(), model.shared.options.caching.weights.to_string()),
                ("slots".to_owned(), options.caching.slots.to_string()),
                ("overlap".to_owned(), if options.caching.overlap { "on" } else { "off" }.to_owned()),
            ]
            .into(),
        },
        host: Default::default(),
    }
}

/// Name of the model's file, without its directories.
pub(super) fn file_name(model: &Model) -> String {
    model.info().path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
