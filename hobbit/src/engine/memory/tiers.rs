//! All memories of one model's experts: the host's slots and the devices' tiers.

mod resize;

use std::collections::{BTreeMap, BTreeSet};

use ggml_sys::llama::{ggml_backend_dev_t, ggml_tensor};

use crate::engine::ggml::log;
use crate::engine::memory::device_tier::Tier;
use crate::engine::memory::gates;
use crate::engine::memory::host_reads::Host;
use crate::engine::memory::norms::NormsJob;
use crate::engine::memory::recorder::as_recorded;
use crate::engine::memory::state_file::StateFile;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::cache::{CacheState, SavedCache, ShareId};
use hobbit_core::expert::{ExpertId, SliceId, SliceKind, Version};
use hobbit_core::options::Idle;
use hobbit_core::plan::{ExpertCache, MemoryPlan};
use hobbit_core::predict::{GateStack, Popularity, sample};
#[cfg(doc)]
use hobbit_core::residency::Memory;
use hobbit_core::residency::{Latency, Observer, Reads, ScoresByLayer, Used};
use hobbit_core::route::Phase;
use hobbit_core::stats::{CachingReport, DeviceCounters, DeviceReport, PrecisionReport, WarmStart};
use hobbit_core::store::StoreError;
use hobbit_core::trace::Walk;

/// The setup of the first session, reported by later ones.
#[derive(Clone)]
pub struct Description {
    /// How the memory budget is divided.
    pub plan: MemoryPlan,
    /// The I/O engine that reads the experts, and the reason.
    pub io_choice: String,
    /// The precision of experts, and the files they come from.
    pub precision: PrecisionReport,
    /// The eviction policy, and the division of slots among layers.
    pub caching: CachingReport,
    /// The devices that hold layers, in their order; empty if everything is on the CPU.
    pub devices: Vec<DeviceReport>,
    /// State that the model's first session loaded from an earlier run; `None` if there was none, or none was
    /// requested.
    pub warm_start: Option<WarmStart>,
    /// Options that cannot act because every expert is in memory, beside those of the model.
    pub idle: Vec<Idle>,
    /// Bytes for checkpoints of all sequences.
    pub(crate) checkpoint_bytes: u64,
}

/// Copies to devices: bytes so far, seconds for each byte if that was measured, and the time by the devices' clock.
pub(crate) struct Link {
    pub(crate) bytes: u64,
    pub(crate) seconds_per_byte: Option<f64>,
    pub(crate) clock_seconds: f64,
}

/// See the [module](self).
pub(crate) struct Tiers {
    // Dropped first: uploads from host memory must end before reads into it.
    /// One per device that has layers with experts.
    pub(crate) tiers: Vec<Tier>,
    pub(crate) host: Host,
    /// Computes the norms of virtual experts.
    pub(crate) norms: Option<NormsJob>,
    pub(crate) routers: Routers,
    pub(crate) unseen: Unseen,
    /// The host's slots by share while a prompt is evaluated; empty: as many as while tokens decode.
    pub(crate) prompt_slots: BTreeMap<ShareId, u32>,
    /// Bytes of llama.cpp's compute buffer that the host's slots have.
    pub(crate) free_compute: u64,
    /// Bytes that a wide ubatch wants for staging; 0 between two.
    pub(crate) wide_staging: u64,
    /// The size of the host's cache that was asked for last.
    pub(crate) wanted: ExpertCache,
    /// Sessions whose contexts hold memory.
    pub(crate) n_sessions: usize,
    /// Keeps the list of resident experts between runs.
    pub(crate) state_file: Option<StateFile>,
    /// Residents of an earlier run, read when there is time.
    pub(crate) earlier: Vec<Version>,
    pub(crate) lending: Lending,
    pub(crate) description: Description,
}

/// Bytes of the budget that something else uses for a while.
#[derive(Default)]
pub(crate) struct Lending {
    /// Bytes lent now.
    pub(crate) bytes: u64,
    /// Bytes that can be lent while all slots stay.
    pub(crate) spare: u64,
    /// Bytes that slots can give up.
    pub(crate) most: u64,
}

/// Expert tensors whose products have not reached us. All of them must, or the model is computed wrongly.
pub(crate) type Unseen = BTreeSet<(u16, SliceKind)>;

/// Everything except the tier of the computing device.
pub(crate) struct TiersView<'a> {
    pub(crate) host: &'a mut Host,
    pub(crate) routers: &'a mut Routers,
    pub(crate) unseen: &'a mut Unseen,
    pub(crate) others: OtherTiers<'a>,
}

/// All tiers except the computing one.
pub(crate) struct OtherTiers<'a>([&'a mut [Tier]; 2]);

impl OtherTiers<'_> {
    /// Whether an upload that may not have run reads a staging slot of the host.
    pub(crate) fn read(&self, slice: SliceId) -> bool {
        self.0.iter().flat_map(|tiers| tiers.iter()).any(|tier| tier.copies.is_reading(slice))
    }

    /// Whether one of these tiers has a version.
    pub(crate) fn have(&self, version: Version) -> bool {
        self.0.iter().flat_map(|tiers| tiers.iter()).any(|tier| tier.slots.is_resident(version))
    }

    /// Whether one of these devices has pinned host memory.
    pub(crate) fn are_pinned(&self) -> bool {
        self.0.iter().flat_map(|tiers| tiers.iter()).any(|tier| tier.report.pinned)
    }

    /// As [`Memory::force_staging`] of `host`.
    pub(crate) fn force_staging(&mut self, host: &mut Host, slice: SliceId, used: Used) -> bool {
        if !host.memory.is_staged_or_cached(slice, used) {
            // Another device's uploads may hold all staging slots.
            for tier in self.0.iter_mut().flat_map(|tiers| tiers.iter_mut()) {
                while !tier.wait_for_host_staging().is_empty() {}
            }
        }
        host.memory.force_staging(slice, used)
    }
}

/// The model's routers, as far as a policy, a prefetcher or a trace needs them.
#[derive(Default)]
pub(crate) struct Routers {
    pub(crate) gates: GateStack,
    /// The policy or a trace wants the router's probabilities of all experts.
    pub(crate) wants_scores: bool,
    /// Recorded routes that replace the routers' choices.
    pub(crate) walk: Option<Walk>,
    /// An unknown input has been reported.
    pub(crate) reported: bool,
}

impl Routers {
    /// Reports once that a router's input is needed and not known. Not of a layer without a router.
    ///
    /// # Safety
    /// `ids` is a live node: the layer's choice.
    pub(crate) unsafe fn misses_input(&mut self, layer: u16, ids: *mut ggml_tensor) {
        // SAFETY: by the caller.
        if !self.reported && !unsafe { gates::is_by_token(ids) } {
            self.reported = true;
            log::notice(format_args!(
                "layer {layer}: the input of this model's router cannot be read here: its experts are neither \
                 predicted nor replaced"
            ));
        }
    }

    /// Whether the router's input of a decode batch is needed. `asks_ahead`: for the next layers' routers, too.
    pub(crate) fn want_input(&self, asks_ahead: bool) -> bool {
        self.wants_scores && self.walk.is_none() || self.ask_ahead(asks_ahead)
    }

    /// The scores that the router of `layer` gives all of its experts for tokens with these inputs,
    /// `[n_tokens][n_expert]`. Empty if they are not needed, if the router is not understood, or if there are no
    /// inputs.
    ///
    /// # Safety
    /// `ids` is a live node that was computed: the router's choice.
    pub(crate) unsafe fn scores(
        &mut self,
        asks_ahead: bool,
        layer: u16,
        ids: *mut ggml_tensor,
        inputs: &[&[f32]],
        n_expert: usize,
    ) -> Vec<f32> {
        if let Some(walk) = self.walk.as_ref().filter(|_| self.wants_scores) {
            return walk.scores(layer);
        }
        // SAFETY: by the caller.
        if inputs.is_empty()
            || !self.want_input(asks_ahead)
            || !(self.gates.knows(layer) || unsafe { gates::learn(&mut self.gates, layer, ids, n_expert) })
            || !self.wants_scores
        {
            return Vec::new();
        }
        let of_tokens = self.of_later(&[layer], inputs).into_iter();
        let mut scores: Vec<f32> = of_tokens.flatten().flat_map(|(_, scores)| scores).collect();
        as_recorded(&mut scores);
        scores
    }

    /// Predicted scores of `layers` (ascending) that have not run, where the router is known: for each token, by layer.
    pub(crate) fn of_later(&mut self, layers: &[u16], inputs: &[&[f32]]) -> Vec<ScoresByLayer> {
        match &self.walk {
            Some(walk) => walk.predicted(layers),
            None => self.gates.scores_of(inputs, layers),
        }
    }

    /// Whether routers are asked about the experts of later layers, where prefetches ask for it: recorded routes know.
    pub(crate) fn ask_ahead(&self, asks_ahead: bool) -> bool {
        self.walk.is_none() && asks_ahead
    }

    /// Expected popularity of experts in the layer after `layer` for a prompt's tokens, whose inputs of the router of
    /// `layer` are `rows`. Leaves `out` as it is without them, or if the next router is not known yet (in a model's
    /// first ubatch).
    ///
    /// # Safety
    /// `ids` is a live node that was computed: the router's choice.
    pub(crate) unsafe fn popularity(
        &mut self,
        host: &Host,
        layer: u16,
        ids: *mut ggml_tensor,
        rows: &[&[f32]],
        n_expert: usize,
        out: &mut Popularity,
    ) {
        // SAFETY: by the caller.
        let (n_used, is_known) = unsafe {
            let is_known = self.gates.knows(layer) || gates::learn(&mut self.gates, layer, ids, n_expert);
            ((*ids).ne[0] as usize, is_known)
        };
        let next = (layer + 1..host.layout().n_blocks()).find(|&next| host.layout().has(next));
        if let Some(next) = next.filter(|_| is_known && !rows.is_empty()) {
            self.gates.popularity(sample(rows.len()).map(|token| rows[token]), next, n_used, out);
        }
    }
}

impl Tiers {
    /// Names of tensors whose products have not reached us.
    pub(crate) fn unseen_tensors(&self) -> Vec<String> {
        self.unseen.iter().map(|(layer, kind)| format!("blk.{layer}.{}.weight", kind.tensor_stem())).collect()
    }

    /// Memories for a computation on the CPU: every tier is among the others.
    pub(crate) fn for_cpu(&mut self) -> TiersView<'_> {
        let Self { tiers, host, routers, unseen, .. } = self;
        TiersView { host, routers, unseen, others: OtherTiers([tiers, &mut []]) }
    }

    /// Memories for a computation on a device: its tier, and the rest. `None` if it has no tier.
    pub(crate) fn for_device(&mut self, dev: ggml_backend_dev_t) -> Option<(&mut Tier, TiersView<'_>)> {
        let Self { tiers, host, routers, unseen, .. } = self;
        let place = tiers.iter().position(|tier| tier.dev == dev)?;
        let (before, rest) = tiers.split_at_mut(place);
        let (tier, after) = rest.split_first_mut()?;
        Some((tier, TiersView { host, routers, unseen, others: OtherTiers([before, after]) }))
    }

    /// Enables filling of free slots during idle time, if that does no harm: devices keep what they need themselves
    /// unless the host has room for all, and some policies take an insertion for a use. `between_tokens`: also between
    /// two tokens of an answer. `own`: the file that hobbit keeps of the model by itself, unless the caches have been
    /// filled already.
    pub(crate) fn fill_free_slots(&mut self, policy: PolicyKind, between_tokens: bool, own: Option<StateFile>) {
        let has_all = self.description.plan.is_fully_resident();
        if has_all || policy == PolicyKind::Learned && !self.tiers.iter().any(|tier| tier.serves.layers) {
            let own = own.filter(|_| !has_all && self.host.may_fill() && self.description.warm_start.is_none());
            let first = own.map(|own| self.recall(own)).unwrap_or_default();
            self.host.fill_free_slots(between_tokens, first);
        }
    }

    /// A batch of `n_tokens` tokens begins.
    pub(crate) fn begin_batch(&mut self, phase: Phase, n_tokens: u32) {
        self.host.begin_batch(phase, n_tokens);
        self.tiers.iter_mut().for_each(|tier| tier.slots.begin_batch(phase));
    }

    /// Which tokens of the batch that has begun are drafts.
    pub(crate) fn expect_drafts(&mut self, is_draft: &[bool]) {
        self.host.drafts.expect(is_draft);
        self.tiers.iter_mut().for_each(|tier| tier.slots.drafts.expect(is_draft));
    }

    /// Tells the policies which tokens of the batch that was evaluated last are accepted drafts.
    pub(crate) fn judge_drafts(&mut self, is_accepted: &[bool]) {
        self.host.judge_drafts(is_accepted);
        self.tiers.iter_mut().for_each(|tier| tier.slots.drafts.judge(&mut tier.slots.cache, is_accepted));
    }

    /// A batch was evaluated in `seconds`.
    pub(crate) fn end_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64) {
        let measured = self.host.reads().stats();
        self.host.observer_mut().end_batch(phase, n_tokens, seconds, &measured);
        self.tiers.iter_mut().for_each(|tier| tier.end_batch(n_tokens));
        self.host.end_batch(phase, n_tokens, seconds);
        if let (Some(job), Some(to)) = (&mut self.norms, &mut self.host.virtual_experts)
            && !job.hand_over(to, false)
        {
            self.norms = None;
        }
        if let Some(report) = self.host.latency.as_mut().and_then(Latency::take_news) {
            log::notice(format_args!("the target latency is out of reach here: {report}"));
        }
    }

    /// Bytes a second of the reads that fill slots, as soon as `bytes` have come; `None` where fewer are on their way.
    pub(crate) fn filling_rate(&mut self, bytes: u64) -> Option<f64> {
        self.host.memory.hasten_filling(bytes);
        loop {
            let stats = self.host.reads().stats();
            if stats.bytes >= bytes {
                return Some(stats.bytes as f64 / stats.busy.as_secs_f64()).filter(|rate| rate.is_finite());
            }
            if !self.host.memory.wait() {
                return None;
            }
        }
    }

    /// Whether tokens follow recorded routes.
    pub(crate) fn follows_routes(&self) -> bool {
        self.routers.walk.is_some()
    }

    /// Whether the router's choice counts even in a layer that is wholly on its device: recorded routes overwrite it, a
    /// trace records it, virtual experts and masks change it, and experts forced to low precision are not in the slots.
    pub(crate) fn needs_every_choice(&mut self) -> bool {
        let changes = self.host.virtual_experts.is_some() || self.host.masked.is_some();
        let is_forced = !self.host.precisions.forced_low.is_empty();
        let is_divided = self.tiers.iter().any(Tier::is_divided);
        self.follows_routes() || self.host.observer_mut().is_watching() || is_divided && (changes || is_forced)
    }

    /// A new sequence begins, alone or beside others.
    pub(crate) fn begin_sequence(&mut self, is_alone: bool) {
        self.routers.walk.iter_mut().for_each(Walk::rewind);
        if !is_alone {
            return;
        }
        self.host.observer_mut().begin_sequence();
        self.host.begin_sequence();
        self.tiers.iter_mut().for_each(|tier| tier.slots.cache.begin_sequence());
    }

    /// Records the initial residents of the host's cache in the trace.
    pub(crate) fn record_residents(&mut self) {
        if self.description.warm_start.is_some() && self.host.observer_mut().is_watching() {
            let saved = self.host.memory.save("");
            self.host.observer_mut().residents(saved);
        }
    }
}

impl Drop for Tiers {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.save_state();
        }
        let measured = self.host.reads().stats();
        self.host.observer_mut().end(&measured);
    }
}

// Filling caches: layers that have slots for all experts, and at a warm start, before the first token, the experts that
// were resident when the model was closed.

/// Experts of a layer that are uploaded to a device at once.
const UPLOAD_AT_ONCE: usize = 8;

/// Name of the host's cache in a saved state.
const HOST: &str = "";

impl Tiers {
    /// The tier of a device.
    pub(crate) fn tier(&mut self, dev: ggml_backend_dev_t) -> Option<&mut Tier> {
        self.tiers.iter_mut().find(|tier| tier.dev == dev)
    }

    /// Fills layers that have a slot for every expert on their device, as llama.cpp loads a model: from then on these
    /// are computed like layers without experts. Not if all experts are to be in low precision.
    ///
    /// # Errors
    /// A read that fails.
    pub(crate) fn preload(&mut self) -> Result<(), StoreError> {
        if !self.host.precisions.loads_high() {
            return Ok(());
        }
        for tier in &mut self.tiers {
            for layer in tier.slots.whole_layers(|layer| self.host.layout().n_expert(layer)) {
                if tier.slots.is_empty(layer) {
                    preload_layer(&mut self.host, tier, layer)?;
                }
            }
        }
        Ok(())
    }

    /// Contents of every device now, in the order of the first session's reports.
    pub(crate) fn device_reports(&self) -> Vec<DeviceReport> {
        let now = |report: &DeviceReport| self.named(report).map_or_else(|| report.clone(), |tier| tier.report.clone());
        self.description.devices.iter().map(now).collect()
    }

    /// Counters of every device, in the same order.
    pub(crate) fn device_counters(&self) -> Vec<DeviceCounters> {
        let done = |report: &DeviceReport| self.named(report).map(|tier| tier.counters).unwrap_or_default();
        self.description.devices.iter().map(done).collect()
    }

    /// Copies to devices so far; `None` if no device has experts copied to it.
    pub(crate) fn link(&self) -> Option<Link> {
        let copying = || self.tiers.iter().filter(|tier| !tier.is_unified());
        let speed = &copying().next()?.speed;
        Some(Link {
            bytes: copying().map(|tier| tier.counters.uploaded_bytes).sum(),
            seconds_per_byte: speed.seconds_per_byte(),
            clock_seconds: speed.clock.seconds(),
        })
    }

    fn named(&self, report: &DeviceReport) -> Option<&Tier> {
        self.tiers.iter().find(|tier| tier.report.name == report.name)
    }

    /// Fills the caches from the state file, as far as their slots allow. A read that fails is repeated when the expert
    /// is needed, and its error is reported then.
    pub(crate) fn warm_up(&mut self) {
        let Some(mut state) = self.state_file.as_mut().and_then(|file| file.read()) else { return };
        // A cache has one entry: a second one in a hostile file would be filled as if the cache were empty.
        let mut seen = BTreeSet::new();
        state.caches.retain(|saved| seen.insert(saved.name.clone()));
        let before = self.host.counters().bytes_read;
        let mut warm = WarmStart::default();
        let hosts = || state.caches.iter().filter(|saved| saved.name == HOST);
        for saved in hosts() {
            self.host.memory.load_statistics(saved);
        }
        // Devices first: their experts pass through the host's slots.
        for saved in state.caches.iter().filter(|saved| saved.name != HOST) {
            warm.saved += saved.residents.len() as u64;
            warm.experts += self.warm_up_device(saved);
        }
        for saved in hosts() {
            warm.saved += saved.residents.len() as u64;
            warm.experts += self.host.memory.restore(saved);
        }
        warm.bytes = self.host.counters().bytes_read - before;
        self.description.warm_start = Some(warm);
    }

    /// Takes what the policy learned from a state file, and keeps the file. Returns the host's residents of that time in
    /// the order to read them.
    fn recall(&mut self, file: StateFile) -> Vec<Version> {
        let state = self.state_file.insert(file).read();
        let Some(saved) = state.and_then(|state| state.caches.into_iter().find(|saved| saved.name == HOST)) else {
            return Vec::new();
        };
        self.host.memory.load_statistics(&saved);
        let first = self.host.cache().pools().in_filling_order(&saved);
        self.description.warm_start =
            Some(WarmStart { saved: saved.residents.len() as u64, later: first.len() as u64, ..WarmStart::default() });
        self.earlier = saved.residents;
        self.earlier.retain(|version| self.host.layout().has_version(*version));
        first
    }

    /// Fills the caches with `experts`, the most wanted last, as far as their slots allow. The host gets those that no
    /// device has.
    pub(crate) fn begin_with(&mut self, mut experts: Vec<ExpertId>) {
        let before = self.host.counters().bytes_read;
        let mut warm = WarmStart { by_frequency: true, saved: experts.len() as u64, ..WarmStart::default() };
        let names = self.tiers.iter().filter(|tier| !tier.is_unified()).map(|tier| tier.report.name.clone());
        for name in names.collect::<Vec<_>>() {
            let residents = experts.iter().copied().map(Version::high).collect();
            warm.experts += self.warm_up_device(&SavedCache { name, residents, ..SavedCache::default() });
        }
        let is_on_device = |expert| self.tiers.iter().any(|tier| tier.slots.is_resident(Version::high(expert)));
        experts.retain(|expert| !is_on_device(*expert));
        let of_host = self.host.memory.that_fit(&experts);
        warm.experts += self.host.memory.restore(&of_host);
        warm.bytes = self.host.counters().bytes_read - before;
        self.description.warm_start = Some(warm);
    }

    /// Returns the number of experts uploaded. Layers that are wholly on the device are skipped.
    fn warm_up_device(&mut self, saved: &SavedCache) -> u64 {
        let Self { tiers, host, .. } = self;
        let Some(tier) = tiers.iter_mut().find(|tier| tier.report.name == saved.name) else { return 0 };
        let mut versions = tier.slots.begin_warm_up(saved);
        versions
            .retain(|version| !tier.slots.whole.contains(&version.expert.layer) && host.layout().has_version(*version));
        // Layer by layer; the order within a layer is that of their last uses.
        versions.sort_by_key(|version| version.expert.layer);
        let is_alike = |a: &Version, b: &Version| (a.expert.layer, a.precision) == (b.expert.layer, b.precision);
        let mut came = 0;
        for versions in versions.chunk_by(is_alike).flat_map(|alike| alike.chunks(UPLOAD_AT_ONCE)) {
            match upload(host, tier, versions) {
                Ok(true) => came += versions.len() as u64,
                _ => {
                    host.memory.settle();
                    break;
                }
            }
        }
        came
    }

    /// Saves the resident experts, unless nothing was computed: the state of an earlier run is then as good.
    fn save_state(&mut self) {
        let Some(file) = self.state_file.take() else { return };
        let counters = self.host.counters();
        if counters.hits + counters.misses == 0 {
            return;
        }
        self.host.quiesce();
        let mut of_host = self.host.memory.save(HOST);
        of_host.remember(&self.earlier);
        let mut state = CacheState { caches: vec![of_host], ..CacheState::default() };
        state.caches.extend(
            self.tiers
                .iter_mut()
                .filter(|tier| !tier.is_unified())
                .map(|tier| tier.slots.cache.save(&tier.report.name)),
        );
        file.write(state);
    }
}

fn preload_layer(host: &mut Host, tier: &mut Tier, layer: u16) -> Result<(), StoreError> {
    let experts = (0..host.layout().n_expert(layer)).map(|index| Version::high(ExpertId { layer, index }));
    for versions in experts.collect::<Vec<_>>().chunks(UPLOAD_AT_ONCE) {
        if !upload(host, tier, versions)? {
            return Ok(());
        }
    }
    tier.slots.whole.insert(layer);
    Ok(())
}

/// Uploads versions of one layer and precision to a device. Returns whether all were uploaded.
///
/// # Errors
/// A read that fails.
fn upload(host: &mut Host, tier: &mut Tier, versions: &[Version]) -> Result<bool, StoreError> {
    let Some(step) = host.load(versions) else { return Ok(true) };
    let kinds = host.layout().kinds(step.layer).to_vec();
    let result = tier.fill(host, &step, &kinds);
    let pins = host.finish(step);
    tier.settled(host);
    host.memory.unpin(pins);
    result
}
