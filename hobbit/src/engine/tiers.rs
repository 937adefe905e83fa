//! All memories of one model's experts: the host's slots and the devices' tiers.

mod fill;

use std::collections::BTreeSet;

use ggml_sys::llama::{ggml_backend_dev_t, ggml_tensor};

use super::gates;
use super::host_reads::Host;
use super::log;
use super::recorder::as_recorded;
use super::state_file::StateFile;
use super::tier::Tier;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::expert::{SliceId, SliceKind, Version};
use hobbit_core::plan::MemoryPlan;
use hobbit_core::predict::{GateStack, Popularity, sample};
#[cfg(doc)]
use hobbit_core::residency::Residency;
use hobbit_core::residency::{Latency, Observer, Reads, ScoresByLayer, Used};
use hobbit_core::route::Phase;
use hobbit_core::stats::{CachingReport, DeviceReport, PrecisionReport, WarmStart};
use hobbit_core::trace::Walk;

/// The setup of the first session, reported by later ones.
#[derive(Clone)]
pub(super) struct Description {
    pub(super) plan: MemoryPlan,
    pub(super) io_choice: String,
    pub(super) precision: PrecisionReport,
    pub(super) caching: CachingReport,
    pub(super) devices: Vec<DeviceReport>,
    pub(super) warm_start: Option<WarmStart>,
}

/// See the [module](self).
pub(super) struct Tiers {
    // Dropped first: uploads from host memory must end before reads into it.
    /// One per device that has layers with experts.
    pub(super) tiers: Vec<Tier>,
    pub(super) host: Host,
    pub(super) routers: Routers,
    pub(super) unseen: Unseen,
    /// Keeps the list of resident experts between runs.
    pub(super) state_file: Option<StateFile>,
    pub(super) description: Description,
}

/// Expert tensors whose products have not reached us. All of them must, or the model is computed wrongly.
pub(super) type Unseen = BTreeSet<(u16, SliceKind)>;

/// Everything except the tier of the computing device.
pub(super) struct TiersView<'a> {
    pub(super) host: &'a mut Host,
    pub(super) routers: &'a mut Routers,
    pub(super) unseen: &'a mut Unseen,
    pub(super) others: OtherTiers<'a>,
}

/// All tiers except the computing one.
pub(super) struct OtherTiers<'a>([&'a mut [Tier]; 2]);

impl OtherTiers<'_> {
    /// Whether an upload that may not have run reads a staging slot of the host.
    pub(super) fn read(&self, slice: SliceId) -> bool {
        self.0.iter().flat_map(|tiers| tiers.iter()).any(|tier| tier.is_reading(slice))
    }

    /// Whether one of these tiers has a version.
    pub(super) fn have(&self, version: Version) -> bool {
        self.0.iter().flat_map(|tiers| tiers.iter()).any(|tier| tier.is_resident(version))
    }

    /// As [`Residency::force_staging`] of `host`.
    pub(super) fn force_staging(&mut self, host: &mut Host, slice: SliceId, used: Used) -> bool {
        if !host.is_staged_or_cached(slice, used) {
            // Another device's uploads may hold all staging slots.
            for tier in self.0.iter_mut().flat_map(|tiers| tiers.iter_mut()) {
                while !tier.wait_for_host_staging().is_empty() {}
            }
        }
        host.force_staging(slice, used)
    }
}

/// The model's routers, as far as a policy, a prefetcher or a trace needs them.
#[derive(Default)]
pub(super) struct Routers {
    pub(super) gates: GateStack,
    /// The policy or a trace wants the router's probabilities of all experts.
    pub(super) wants_scores: bool,
    /// Recorded routes that replace the routers' choices.
    pub(super) walk: Option<Walk>,
}

impl Routers {
    /// Whether the router's input of a decode batch is needed.
    pub(super) fn want_input(&self, host: &Host) -> bool {
        self.walk.is_none() && (self.wants_scores || host.asks_routers())
    }

    /// The scores that the router of `layer` gives all of its experts for tokens with these inputs,
    /// `[n_tokens][n_expert]`. Empty if they are not needed, if the router is not understood, or if there are no
    /// inputs.
    ///
    /// # Safety
    /// `ids` is a live node that was computed: the router's choice.
    pub(super) unsafe fn scores(
        &mut self,
        host: &Host,
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
            || !self.want_input(host)
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

    /// The same for `layers` (ascending) that have not run, where the router is known: for each token, by layer.
    pub(super) fn of_later(&mut self, layers: &[u16], inputs: &[&[f32]]) -> Vec<ScoresByLayer> {
        match &self.walk {
            Some(walk) => walk.predicted(layers),
            None => self.gates.scores_of(inputs, layers),
        }
    }

    /// Expected popularity of experts in the layer after `layer` for a prompt's tokens. `input`: their inputs of the
    /// router of `layer`, `[n_embd, 1, n_tokens]`. Leaves `out` as it is if there is no prefetching by routers, or if
    /// the next router is not known yet (in a model's first ubatch).
    ///
    /// # Safety
    /// `ids` is a live node that was computed: the router's choice. `input` is live, and was computed in host memory.
    pub(super) unsafe fn popularity(
        &mut self,
        host: &Host,
        layer: u16,
        ids: *mut ggml_tensor,
        input: Option<&ggml_tensor>,
        n_expert: usize,
        out: &mut Popularity,
    ) {
        let Some(input) = input.filter(|_| self.walk.is_none() && host.asks_routers()) else { return };
        // SAFETY: by the caller.
        let (n_used, is_known) = unsafe {
            let is_known = self.gates.knows(layer) || gates::learn(&mut self.gates, layer, ids, n_expert);
            ((*ids).ne[0] as usize, is_known)
        };
        let next = (layer + 1..host.layout().n_blocks()).find(|&next| host.layout().has(next));
        if let Some(next) = next.filter(|_| is_known) {
            let (width, stride) = (input.ne[0] as usize, input.nb[2]);
            // SAFETY: a token of the input; its floats are contiguous.
            let row = |token: usize| unsafe {
                std::slice::from_raw_parts(input.data.cast::<u8>().add(token * stride).cast::<f32>(), width)
            };
            self.gates.popularity(sample(input.ne[2] as usize).map(row), next, n_used, out);
        }
    }
}

impl Tiers {
    /// Names of tensors whose products have not reached us.
    pub(super) fn unseen_tensors(&self) -> Vec<String> {
        self.unseen.iter().map(|(layer, kind)| format!("blk.{layer}.{}.weight", kind.tensor_stem())).collect()
    }

    /// Memories for a computation on the CPU: every tier is among the others.
    pub(super) fn for_cpu(&mut self) -> TiersView<'_> {
        let Self { tiers, host, routers, unseen, .. } = self;
        TiersView { host, routers, unseen, others: OtherTiers([tiers, &mut []]) }
    }

    /// Memories for a computation on a device: its tier, and the rest. `None` if it has no tier.
    pub(super) fn for_device(&mut self, dev: ggml_backend_dev_t) -> Option<(&mut Tier, TiersView<'_>)> {
        let Self { tiers, host, routers, unseen, .. } = self;
        let place = tiers.iter().position(|tier| tier.dev == dev)?;
        let (before, rest) = tiers.split_at_mut(place);
        let (tier, after) = rest.split_first_mut()?;
        Some((tier, TiersView { host, routers, unseen, others: OtherTiers([before, after]) }))
    }

    /// Enables filling of free slots during idle time, if that does no harm: devices keep what they need themselves,
    /// and some policies take an insertion for a use. `between_tokens`: also between two tokens of an answer.
    pub(super) fn fill_free_slots(&mut self, policy: PolicyKind, between_tokens: bool) {
        let is_indifferent = policy == PolicyKind::Learned || self.description.plan.is_fully_resident();
        if is_indifferent && self.tiers.is_empty() {
            self.host.fill_free_slots(between_tokens);
        }
    }

    /// A batch of `n_tokens` tokens begins.
    pub(super) fn begin_batch(&mut self, phase: Phase, n_tokens: u32) {
        self.host.begin_batch(phase, n_tokens);
        self.tiers.iter_mut().for_each(|tier| tier.cache.begin_batch(n_tokens));
    }

    /// A batch was evaluated in `seconds`.
    pub(super) fn end_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64) {
        let measured = self.host.reads().stats();
        self.host.observer_mut().end_batch(phase, n_tokens, seconds, &measured);
        self.tiers.iter_mut().for_each(|tier| tier.end_batch(n_tokens));
        self.host.end_batch(phase, n_tokens, seconds);
        if let Some(report) = self.host.latency.as_mut().and_then(Latency::take_news) {
            log::notice(format_args!("the target latency is out of reach here: {report}"));
        }
    }

    /// Whether tokens follow recorded routes.
    pub(super) fn follows_routes(&self) -> bool {
        self.routers.walk.is_some()
    }

    /// A new sequence begins.
    pub(super) fn begin_sequence(&mut self) {
        self.routers.walk.iter_mut().for_each(Walk::rewind);
        self.host.observer_mut().begin_sequence();
        self.host.begin_sequence();
        self.tiers.iter_mut().for_each(|tier| tier.cache.begin_sequence());
    }

    /// Records the initial residents of the host's cache in the trace.
    pub(super) fn record_residents(&mut self) {
        if self.description.warm_start.is_some() && self.host.observer_mut().is_watching() {
            let saved = self.host.save("");
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
