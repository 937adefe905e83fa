//! The residency of experts: which are in memory, which are read, and which versions a layer multiplies.
//!
//! ```text
//! router's choice ─► Selection ─► LayerStep ─► products as slices land ─► end
//!                      │             │   ▲
//!    route: demands ◄──┤             │   └── poll, wait ◄──┐
//!  Precisions          │             ▼                     │
//!                      │         Residency ───────────► Memory ─► in_flight ─► Reads (a loader, or a virtual link)
//!                      │             │                   ├─ cache (slots) ◄ policy
//!                      └─► Drafts    │                   └─► Observer (a trace, or counters of a simulation)
//!                                    └─ in the background: ahead (predict, load::prefetch), upgrades, fill,
//!                                       virtual_experts
//! ```
//!
//! [`run_layer`] takes a layer through its steps, for the engine's CPU and device paths and for the simulator; each
//! implements [`Compute`]. Products ask [`Memory::locate`] and [`Memory::wait`] for slices.
//!
//! [`Memory`] owns slots, staging slots and reads, and knows none of those that use it. Each kind of background work is
//! an owner of its own, which gets the memory for the time of a call; [`Residency`] says when.
//!
//! Versions beyond their layer's share of the cache stream through staging slots, in the order in which the
//! products use them; meanwhile the next layer's slots are filled ahead if the batch is dense. While nothing else is
//! read, a frequently used low version is replaced by its high version (`upgrades`) and free slots are filled (`fill`).
//! With virtual experts, the present ones change in the background (`virtual_experts`).
//!
//! Pure: no ggml, no memory, no I/O. Bytes and time come from [`Reads`]; router values and device residency are data.

mod ahead;
mod begin;
mod drafts;
mod fill;
mod in_flight;
mod interfaces;
mod latency;
mod layer;
mod layout;
#[cfg(test)]
mod manual;
mod memory;
#[cfg(test)]
mod model_test;
mod precisions;
mod selection;
#[cfg(test)]
mod tests;
mod upgrades;
mod virtual_experts;
mod warm_start;

pub use ahead::{Later, Lookahead, LookaheadOptions, ScoresByLayer};
pub use begin::Counters;
pub use drafts::Drafts;
pub use in_flight::{Place, StagingOptions};
pub use interfaces::{DeviceResidency, NeededExpert, Observer, Read, Reads, Target};
pub use latency::Latency;
pub use layer::{Compute, Router, WeightsFor, run_layer};
pub use layout::{LayerShape, LayerShare, Layout, RestBytes, VersionBytes};
pub use memory::{Memory, Slots};
pub use precisions::Precisions;
pub use selection::{LayerStep, Selection, Split, TokenChoices, Used};
pub use virtual_experts::{VirtualExperts, VirtualExpertsOptions};

use std::collections::HashSet;

use self::begin::Counts;
use self::fill::Fill;
use self::in_flight::InFlight;
use self::upgrades::Upgrades;
use crate::cache::Cache;
use crate::expert::{ExpertId, Version};
use crate::options::Knob;
use crate::route::{Flatness, Phase, Rerouting};
use crate::stats::LayerStats;

pub struct Parts<R, O> {
    pub reads: R,
    pub observer: O,
    pub cache: Cache,
    pub layout: Layout,
    pub staging: StagingOptions,
    /// Experts are computed while others are read.
    pub overlaps: bool,
    pub precisions: Precisions,
    /// Predicts the next layers; `None`: nothing is read ahead.
    pub lookahead: Option<Lookahead>,
}

/// The memory, the work in the background, and the rules that a layer goes by. See the [module](self).
pub struct Residency<R: Reads, O> {
    pub memory: Memory<R, O>,
    pub lookahead: Option<Lookahead>,
    upgrades: Upgrades,
    fill: Fill,
    /// While tokens are decoded, missing experts are not waited for.
    pub virtual_experts: Option<VirtualExperts>,
    counts: Counts,
    pub drafts: Drafts,
    pub precisions: Precisions,
    pub rerouting: Rerouting,
    flatness: Flatness,
    pub reroutes_prompts: bool,
    /// These alone count as missing, wherever experts are; `None` goes by what is in memory.
    pub masked: Option<HashSet<ExpertId>>,
    /// Chooses [`Rerouting::bias`] by the time of tokens; `None`: it stays.
    pub latency: Option<Latency>,
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Nothing is resident.
    pub fn new(parts: Parts<R, O>) -> Self {
        let Parts { reads, observer, cache, layout, staging, overlaps, precisions, lookahead } = parts;
        Self {
            counts: Counts::new(layout.n_blocks()),
            memory: Memory::new(InFlight::new(reads, staging), observer, cache, layout, overlaps),
            lookahead,
            upgrades: Upgrades::default(),
            fill: Fill::default(),
            virtual_experts: None,
            drafts: Drafts::default(),
            precisions,
            rerouting: Rerouting::default(),
            flatness: Flatness::default(),
            reroutes_prompts: false,
            masked: None,
            latency: None,
        }
    }

    pub fn layout(&self) -> &Layout {
        &self.memory.layout
    }

    pub fn cache(&self) -> &Cache {
        &self.memory.cache
    }

    pub fn reads(&self) -> &R {
        &self.memory.in_flight.reader
    }

    pub fn reads_mut(&mut self) -> &mut R {
        &mut self.memory.in_flight.reader
    }

    pub fn observer_mut(&mut self) -> &mut O {
        &mut self.memory.observer
    }

    pub fn counters(&self) -> Counters {
        let moved = self.memory.moved;
        Counters {
            slices_loaded: moved.slices,
            bytes_read: moved.bytes,
            wait_seconds: moved.wait_seconds,
            upgrades: self.upgrades.n_complete,
            ..self.counts.all
        }
    }

    /// Counts of each layer with experts, ascending.
    pub fn layer_stats(&self) -> Vec<LayerStats> {
        self.counts.of_layers(&self.memory.layout, &self.memory.cache, &self.flatness)
    }

    /// Counts a layer whose products could not be computed expert by expert.
    pub fn count_in_order(&mut self) {
        self.counts.all.in_order += 1;
    }

    /// Waits for all that is being read, and for nothing more. Failures are forgotten.
    pub fn quiesce(&mut self) {
        self.memory.settle();
        self.upgrades.settle(&mut self.memory);
    }

    // Tokens

    pub fn begin_sequence(&mut self) {
        self.memory.cache.begin_sequence();
        self.lookahead.iter_mut().for_each(Lookahead::begin_sequence);
    }

    pub fn begin_batch(&mut self, phase: Phase, n_tokens: u32) {
        if let Some(virtual_experts) = &mut self.virtual_experts {
            virtual_experts.begin_batch(&mut self.memory, phase);
        }
        if self.virtual_experts.is_none() || !phase.is_decode() {
            self.fill.pause(&mut self.memory, phase);
        }
        self.drafts.forget();
        self.memory.cache.begin_batch(!phase.is_decode());
        self.lookahead.iter_mut().for_each(|lookahead| lookahead.begin_batch(phase, n_tokens));
    }

    /// A batch of `n_tokens` tokens was evaluated in `seconds`: the next token begins.
    pub fn end_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64) {
        let is_deterministic = self.precisions.options.deterministic;
        self.counts.all.layer = 0;
        self.hear();
        if let Some(lookahead) = &mut self.lookahead {
            lookahead.end_batch(&mut self.memory, phase, n_tokens, seconds);
        }
        self.memory.cache.end_batch(self.drafts.n_certain(n_tokens));
        self.upgrades.end_token();
        if is_deterministic {
            self.upgrades.step(&mut self.memory, &self.precisions);
        }
        if !phase.is_decode() {
            return;
        }
        if let Some(virtual_experts) = &mut self.virtual_experts {
            virtual_experts.end_batch(&mut self.memory, n_tokens, seconds, is_deterministic);
        }
        if let Some(latency) = &mut self.latency {
            latency.end_token(seconds);
            *match latency.knob() {
                Knob::CacheBias => &mut self.rerouting.bias,
                Knob::Substitute => &mut self.rerouting.substitute,
            } = latency.strength();
        }
        self.fill.between_tokens(&mut self.memory);
    }

    /// Tells the policy which tokens of the batch that was evaluated last are accepted drafts.
    pub fn judge_drafts(&mut self, is_accepted: &[bool]) {
        self.drafts.judge(&mut self.memory.cache, is_accepted);
    }

    /// The router's probabilities of all experts of a layer for one token, `[n_expert]`, for the policy: once per
    /// token.
    pub fn tell_scores(&mut self, layer: u16, scores: &[f32]) {
        self.memory.cache.scores(layer, scores);
    }

    // In the background

    /// From now on, while tokens are decoded, what is present changes in the background. Nothing else fills free
    /// slots then, or reads ahead of single tokens.
    pub fn keep_virtual_experts(&mut self, options: VirtualExpertsOptions) {
        let is_deterministic = self.precisions.options.deterministic;
        self.virtual_experts = Some(VirtualExperts::new(options, &self.memory.layout, is_deterministic));
    }

    /// Whether tokens are looked ahead of while they are decoded: not where they use only what is there.
    pub fn looks_ahead(&self) -> bool {
        let is_watched = self.memory.observer.is_watching();
        self.virtual_experts.is_none()
            && self.lookahead.as_ref().is_some_and(|lookahead| lookahead.predicts(is_watched))
    }

    /// Whether the next layers' routers are to be asked.
    pub fn asks_routers(&self) -> bool {
        let is_watched = self.memory.observer.is_watching();
        self.lookahead.as_ref().is_some_and(|ahead| ahead.predicts(is_watched) && ahead.needs_scores())
    }

    /// Whether free slots may be filled: not where that would be seen in what a repeatable run or a trace depends on,
    /// nor where high versions are not wanted at all, or experts are virtual.
    pub fn may_fill(&self) -> bool {
        let is_repeatable = self.memory.observer.is_watching() || self.precisions.options.deterministic;
        !is_repeatable && self.virtual_experts.is_none() && self.precisions.loads_high()
    }

    /// From now on free slots are filled while no product waits, if they may be, beginning with the versions `first`.
    /// Not for policies that take an insertion for a use. `between_tokens`: also between two tokens of an answer.
    pub fn fill_free_slots(&mut self, between_tokens: bool, first: Vec<Version>) {
        self.fill = Fill::new(self.may_fill(), between_tokens, first);
        self.idle();
    }

    /// Lines up reads for all free slots, while the session is idle. An evaluation withdraws them.
    pub fn idle(&mut self) {
        self.fill.idle(&mut self.memory);
    }

    /// Waits for all that [`Residency::idle`] lines up. Bytes of the versions that are ready in slots then.
    pub fn finish_filling(&mut self) -> u64 {
        self.fill.finish(&mut self.memory)
    }
}
