//! Memory of the host's slots, and the store that fills it.

use std::path::PathBuf;
use std::sync::Arc;

use ggml_sys::llama::ggml_backend_dev_t;

use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::log;
use crate::engine::memory::device_tier::Tier;
use crate::engine::memory::pinned::{HostMemory, Reach};
use crate::engine::model::Shared;
use hobbit_core::options::DeviceOptions;
use hobbit_core::plan::{MemoryLimits, Setup};
use hobbit_core::store::mirror::MirrorError;
use hobbit_core::store::{
    self, Choice, Conditions, Copies, CopyReport, IoMode, Mirror, Original, Store, choose, probe,
};
use hobbit_core::units::{Bytes, Percent};

/// Memory of each pool, and at last of staging.
///
/// # Errors
/// [`OpenError::OutOfMemory`].
pub(super) fn allocate(
    setup: &Setup,
    tiers: &mut [Tier],
    options: &DeviceOptions,
) -> Result<Vec<HostMemory>, OpenError> {
    let host = HostSlots::of(tiers, options);
    let staging = (setup.n_staging * setup.staging_stride(), setup.staging_stride());
    let sizes = setup.pool_bytes().chain([staging]);
    let mut memory = sizes.map(|(bytes, stride)| host.memory(bytes, stride)).collect::<Result<Vec<_>, _>>()?;
    host.tell_of_refusal(&memory);
    tiers.iter_mut().for_each(|tier| memory.iter_mut().for_each(|memory| tier.show(memory)));
    Ok(memory)
}

/// Opens the store that reads best into `memory`, and says why it was chosen.
///
/// # Errors
/// A file that cannot be opened.
pub(super) fn open_store(
    shared: &Shared,
    setup: &Setup,
    limits: &MemoryLimits,
    memory: &mut [HostMemory],
) -> Result<(Arc<dyn Store>, Choice), OpenError> {
    let originals = &shared.source.originals;
    let mut probe = |files: &[Original]| {
        files.iter().try_for_each(|file| match memory.iter_mut().find(|pool| pool.dev.is_some()) {
            Some(pool) => probe::direct_into(&file.path, &mut pool.arena),
            None => probe::direct(&file.path),
        })
    };
    let ours = setup.plan.budget - setup.plan.unused();
    let conditions = Conditions {
        expert_bytes: setup.catalog.stored_bytes().saturating_sub(setup.plan.expert_cache),
        page_cache_bytes_available: limits.budget().map_or(0, |(bytes, _)| bytes.saturating_sub(ours)),
        direct: probe(originals),
        io_uring: probe::io_uring(),
    };
    let choice = choose(shared.options.io, &conditions);
    let mut store = store::open_originals(choice.kind, originals)?;
    let mirrors = open_mirrors(shared, &conditions, probe);
    if !mirrors.is_empty() {
        let bytes = originals.iter().map(|file| file.state.len).sum();
        let original = (store, originals[0].path.clone(), originals.len(), bytes);
        store = Arc::new(Copies::new(original, mirrors, |line| log::notice(line)));
    }
    if let Some(wrap) = &shared.wrap_store {
        store = wrap(store);
    }
    Ok((store, choice))
}

/// The mirrors that can be used, each with the store that reads it best. Notifies the user of others.
fn open_mirrors(
    shared: &Shared,
    conditions: &Conditions,
    mut probe: impl FnMut(&[Original]) -> Result<(), String>,
) -> Vec<(Mirror, Arc<dyn Store>)> {
    let paths = &shared.options.mirrors;
    if shared.options.io == IoMode::Auto && conditions.fit_page_cache() && !paths.is_empty() {
        log::notice("mirrors are not needed: the experts that have no slot fit the page cache");
        return Vec::new();
    }
    let open = |path: &PathBuf| {
        let mirror = Mirror::open(path, &shared.source.originals)?;
        let conditions = Conditions { direct: probe(mirror.files()), ..conditions.clone() };
        let store = store::open_originals(choose(shared.options.io, &conditions).kind, mirror.files())?;
        Ok((mirror, store))
    };
    let tell = |error: MirrorError| log::notice(format_args!("{error}; it is not used as a mirror"));
    paths.iter().map(open).filter_map(|opened| opened.map_err(tell).ok()).collect()
}

/// Words about the mirrors among a store's copies.
pub(super) fn mirrors(copies: &[CopyReport]) -> String {
    let whole = copies.first().map_or(0, |original| original.bytes);
    let word = |copy: &CopyReport| {
        let (bytes, share) = (Bytes(copy.bytes), Percent(copy.bytes as f64 / whole.max(1) as f64));
        format!("; mirror {} ({bytes}, {share:.0} of the model, {})", copy.path.display(), copy.engine)
    };
    copies.iter().skip(1).map(word).collect()
}

/// The device for which host slots are allocated, and how it reaches them; `None` for plain memory.
struct HostSlots(Option<(ggml_backend_dev_t, Reach)>);

impl HostSlots {
    /// Selects the first device that reaches host memory better than by copying.
    fn of(tiers: &[Tier], options: &DeviceOptions) -> Self {
        let reach = |tier: &Tier| (tier.dev, Reach::of(tier.dev, options.unified));
        // A device that computes in host memory cannot do without it.
        let unified = tiers.iter().find(|tier| tier.is_unified());
        let pins = |tier: &&Tier| options.pinned && reach(tier).1 == Reach::Pinned;
        Self(unified.or_else(|| tiers.iter().find(pins)).map(reach))
    }

    /// Notifies the user of memory that could not be pinned: copies from it take a detour.
    fn tell_of_refusal(&self, memory: &[HostMemory]) {
        let Some((dev, Reach::Pinned)) = self.0 else { return };
        let plain: u64 = memory.iter().filter(|memory| !memory.pinned).map(|memory| memory.arena.len() as u64).sum();
        if plain > 0 {
            let name = ggml::name(dev);
            let mib = plain.div_ceil(1 << 20);
            log::notice(format_args!(
                "{name} cannot pin {mib} MiB of host memory: copies to it will be slower; a smaller expert cache may \
                 help"
            ));
        }
    }

    fn memory(&self, bytes: usize, slot_bytes: usize) -> Result<HostMemory, OpenError> {
        match self.0 {
            Some((dev, reach)) => HostMemory::of(dev, reach, bytes, slot_bytes),
            None => HostMemory::plain(bytes),
        }
    }
}
