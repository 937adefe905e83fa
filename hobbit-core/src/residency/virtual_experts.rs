//! Virtual experts (SwapMoE, section 3): while tokens are decoded, a layer's experts are those that are complete in
//! its slots, and which these are changes beside the tokens.
//!
//! ```text
//! unmasked choices -> Importance -+
//!                                 +-> between two tokens: the most important missing expert is read into the spare
//! Turns: whose turn it is ---------+   slot; once complete it is present from the next token on, the least one leaves
//! ```
//!
//! Each layer keeps one slot to spare, so that present experts serve until the newcomer is complete. A prompt may use
//! that slot, too: then the least important expert gives it back when the first replacement begins. Slots that are
//! empty besides are filled without taking turns. If every expert has a slot, none is masked: missing ones are read.
//! Reads are of the class that no product waits for; failed and withdrawn ones change nothing.

mod importance;
mod turns;

use super::interfaces::Observer;
use super::interfaces::Reads;
use super::layout::Layout;
use super::memory::{Memory, Progress};
use crate::cache::ShareId;
use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::options::VirtualUpdate;
use crate::route::{Phase, Routing};
use crate::stats::{NormsSource, VirtualExpertsReport};

use self::importance::Importance;
use self::turns::Turns;

/// How virtual experts are kept.
#[derive(Clone, Debug, Default)]
pub struct VirtualExpertsOptions {
    /// Experts that a router chooses for a token: no layer is left with fewer.
    pub n_used: usize,
    /// How often one of a layer's experts may change.
    pub update: VirtualUpdate,
    /// The norm of all of an expert's weights, by block and expert, where it is known.
    pub norms: Vec<(u16, Vec<f32>)>,
    /// Where these come from.
    pub norms_from: NormsSource,
}

/// Decides which experts count as present, and which comes next.
#[derive(Debug)]
pub struct VirtualExperts {
    n_used: usize,
    importance: Importance,
    norms_from: NormsSource,
    turns: Turns,
    lanes: Vec<Lane>,
    /// By block: every expert has a slot, so that all are used, and read where they are not there yet.
    whole: Vec<bool>,
    /// Versions that are read, or have been since the last token: not present yet.
    underway: Vec<Version>,
    /// Tokens decoded so far.
    token: u64,
    replacements: u64,
    failed: u64,
}

/// Experts of one layer that share slots.
#[derive(Debug)]
struct Lane {
    layer: u16,
    share: ShareId,
    /// Expert indices, ascending.
    members: Vec<u16>,
    /// The first token before which the next replacement may begin.
    next: u64,
}

impl VirtualExperts {
    /// `is_deterministic`: what is present may not depend on times.
    pub(super) fn new(options: VirtualExpertsOptions, layout: &Layout, is_deterministic: bool) -> Self {
        let mut lanes: Vec<Lane> = Vec::new();
        for (version, share) in layout.versions_with_shares() {
            let ExpertId { layer, index } = version.expert;
            if version.precision != Precision::High {
                continue;
            }
            let share = layout.shares(layer)[usize::from(share)].id;
            match lanes.iter_mut().find(|lane| (lane.layer, lane.share) == (layer, share)) {
                Some(lane) => lane.members.push(index),
                None => lanes.push(Lane { layer, share, members: vec![index], next: 0 }),
            }
        }
        let turns = match (options.update, is_deterministic) {
            (VirtualUpdate::Tokens(period), _) => Turns::fixed(period),
            (VirtualUpdate::Auto, true) => Turns::fixed(Turns::DETERMINISTIC),
            (VirtualUpdate::Auto, false) => Turns::auto(),
        };
        // Turns are spread over the period.
        let n_lanes = lanes.len() as u64;
        lanes.iter_mut().zip(0..).for_each(|(lane, at)| lane.next = at * u64::from(turns.period()) / n_lanes);
        let mut importance = Importance::default();
        options.norms.into_iter().for_each(|(layer, norms)| importance.set_norms(layer, norms));
        let VirtualExpertsOptions { n_used, norms_from, .. } = options;
        let whole = vec![false; usize::from(layout.n_blocks())];
        let (underway, token, replacements, failed) = (Vec::new(), 0, 0, 0);
        Self { n_used, importance, norms_from, turns, lanes, whole, underway, token, replacements, failed }
    }

    /// Whether a version arrives in the background, or has since the last token: it is not present yet.
    pub(super) fn is_underway(&self, version: Version) -> bool {
        self.underway.contains(&version)
    }

    /// Whether every expert of a layer has a slot: then none gives way.
    pub(super) fn is_whole(&self, layer: u16) -> bool {
        self.whole.get(usize::from(layer)).copied().unwrap_or(false)
    }

    /// Changes so far.
    pub fn report(&self) -> VirtualExpertsReport {
        let Self { replacements, failed, norms_from, .. } = *self;
        VirtualExpertsReport { replacements, failed, period_tokens: self.turns.period(), norms: norms_from }
    }

    /// A layer's norms are known from now on; earlier uses count by them, too.
    pub fn set_norms(&mut self, layer: u16, norms: Vec<f32>) {
        self.importance.set_norms(layer, norms);
    }

    /// Where the norms come from, from now on.
    pub fn set_norms_from(&mut self, source: NormsSource) {
        self.norms_from = source;
    }

    /// The router of a layer chose for these tokens, wherever they go: `weights` `[n_tokens][n_used]`, or empty where
    /// they are not known; `inputs`: the norm of each token's input, or nothing.
    pub(super) fn observe(&mut self, layer: u16, routing: &Routing, weights: &[f32], inputs: &[f32]) {
        self.importance.observe(layer, &routing.ids, weights, inputs, routing.n_used);
    }

    /// A batch begins. Nothing is withdrawn for tokens that use what is present.
    pub(super) fn begin_batch<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>, phase: Phase) {
        self.whole.fill(true);
        for lane in &self.lanes {
            let is_whole = memory.cache.pools().slots_of_share(lane.share).len() >= lane.members.len();
            self.whole[usize::from(lane.layer)] &= is_whole;
        }
        if phase.is_decode() {
            return;
        }
        // A prompt takes what it needs, also of what is under way.
        memory.stop_filling(None);
        for version in std::mem::take(&mut self.underway) {
            if memory.progress(version) == Progress::Failed {
                memory.cache.release(version);
            }
        }
    }

    /// A batch that decodes was evaluated in `seconds`. `waits`: for all that is being read.
    pub(super) fn end_batch<R: Reads, O: Observer>(
        &mut self,
        memory: &mut Memory<R, O>,
        n_tokens: u32,
        seconds: f64,
        waits: bool,
    ) {
        if waits {
            memory.drain();
        }
        memory.poll();
        self.take_in(memory);
        self.turns.end_token(seconds);
        self.token += u64::from(n_tokens);
        for at in 0..self.lanes.len() {
            self.next_in_lane(memory, at);
        }
    }

    /// Arrived experts are present from now on, and the least important ones leave for them.
    fn take_in<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>) {
        let mut loading = Vec::new();
        for version in std::mem::take(&mut self.underway) {
            match memory.progress(version) {
                Progress::Loading => loading.push(version),
                Progress::Gone => {}
                Progress::Failed => {
                    memory.cache.release(version);
                    self.importance.forget(version.expert);
                    self.failed += 1;
                }
                Progress::Complete => {
                    self.replacements += 1;
                    let lane = self.lanes.iter().find(|lane| is_of(lane, version));
                    if let Some(lane) = lane.filter(|lane| lane.has_no_spare(memory))
                        && let Some((least, _)) = self.least_important(memory, lane, version)
                    {
                        memory.free(least);
                    }
                }
            }
        }
        self.underway = loading;
    }

    /// Begins to read the expert that is missed most in a lane, if it is its turn and a slot can be spared.
    fn next_in_lane<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>, at: usize) {
        let lane = &mut self.lanes[at];
        let is_full = memory.cache.pools().n_empty(lane.share) <= lane.n_spare(memory);
        if is_full && (self.token < lane.next || self.turns.is_paused()) {
            return;
        }
        if is_full {
            lane.next = self.token + u64::from(self.turns.period());
        }
        let lane = &self.lanes[at];
        if self.underway.iter().any(|&version| is_of(lane, version)) {
            return;
        }
        let Some((version, missed)) = self.most_missed(memory, lane) else { return };
        if is_full {
            let residents = lane.residents(memory).count();
            let Some((least, its_own)) = self.least_important(memory, lane, version) else { return };
            let makes_room = memory.cache.pools().n_empty(lane.share) == 0;
            if missed <= its_own || residents - usize::from(makes_room) < self.n_used {
                return;
            }
            if makes_room && !memory.free(least) {
                return;
            }
        }
        if let Some(slot) = memory.acquire(version) {
            self.underway.push(version);
            let order = memory.layout.load_order(version.expert.layer, &[]);
            memory.read_slots(LoadClass::Fill, &[(slot, version)], &order);
        }
    }

    /// The most important missing expert, and its importance; the lowest number of equals.
    fn most_missed<R: Reads, O: Observer>(&self, memory: &Memory<R, O>, lane: &Lane) -> Option<(Version, f64)> {
        let missing = lane.versions().filter(|&version| memory.cache.lookup(version).is_none());
        let missed =
            missing.map(|version| (version, self.importance.of(version.expert))).filter(|(_, wanted)| *wanted > 0.0);
        missed.reduce(|most, next| if next.1 > most.1 { next } else { most })
    }

    /// The least important resident except for a newcomer, and its importance; the highest number of equals.
    fn least_important<R: Reads, O: Observer>(
        &self,
        memory: &Memory<R, O>,
        lane: &Lane,
        newcomer: Version,
    ) -> Option<(Version, f64)> {
        let others = lane.residents(memory).filter(|version| *version != newcomer && !self.is_underway(*version));
        let wanted = others.map(|version| (version, self.importance.of(version.expert)));
        wanted.reduce(|least, next| if next.1 <= least.1 { next } else { least })
    }
}

impl Lane {
    fn versions(&self) -> impl Iterator<Item = Version> {
        self.members.iter().map(|&index| Version::high(ExpertId { layer: self.layer, index }))
    }

    fn residents<R: Reads, O: Observer>(&self, memory: &Memory<R, O>) -> impl Iterator<Item = Version> {
        self.versions().filter(|&version| memory.cache.lookup(version).is_some())
    }

    /// Slots that are kept empty.
    fn n_spare<R: Reads, O: Observer>(&self, memory: &Memory<R, O>) -> u32 {
        u32::from(memory.cache.pools().slots_of_share(self.share).len() < self.members.len())
    }

    /// Not every member has a slot, and no slot is empty.
    fn has_no_spare<R: Reads, O: Observer>(&self, memory: &Memory<R, O>) -> bool {
        self.n_spare(memory) > 0 && memory.cache.pools().n_empty(self.share) == 0
    }
}

fn is_of(lane: &Lane, version: Version) -> bool {
    lane.layer == version.expert.layer && lane.members.binary_search(&version.expert.index).is_ok()
}

#[cfg(test)]
mod tests;
