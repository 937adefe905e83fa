//! Virtual experts (SwapMoE, section 3): while tokens are decoded, a layer's experts are those that are complete in
//! its slots, and which these are changes beside the tokens.
//!
//! ```text
//! unmasked choices -> Importance -+
//!                                 +-> between two tokens: the most important missing expert is read into the spare
//! Pace: whose turn it is ---------+   slot; once complete it is present from the next token on, the least one leaves
//! ```
//!
//! Each layer keeps one slot to spare, so that present experts serve until the newcomer is complete. A prompt may use
//! that slot, too: then the least important expert gives it back when the first replacement begins. Slots that are
//! empty besides are filled without taking turns. If every expert has a slot, none is masked: missing ones are read.
//! Reads are of the class that no product waits for; failed and withdrawn ones change nothing.

mod importance;
mod pace;

use super::{Observer, Reads, Residency};
use crate::cache::{ShareId, SliceState};
use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::options::VirtualUpdate;
use crate::route::{Phase, Routing};
use crate::stats::VirtualExpertsReport;

use self::importance::Importance;
use self::pace::Pace;

/// How virtual experts are kept.
#[derive(Clone, Debug)]
pub struct VirtualExpertsOptions {
    /// Experts that a router chooses for a token: no layer is left with fewer.
    pub n_used: usize,
    /// How often one of a layer's experts may change.
    pub update: VirtualUpdate,
    /// The norm of all of an expert's weights, by block and expert, where it is known.
    pub norms: Vec<(u16, Vec<f32>)>,
}

/// Which experts count as present, and who comes next. See the [module](self).
#[derive(Debug)]
pub(super) struct VirtualExperts {
    n_used: usize,
    importance: Importance,
    pace: Pace,
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

/// State of a version that was to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Loading,
    Complete,
    Failed,
    /// It was taken back before it began, or has left again.
    Gone,
}

impl VirtualExperts {
    /// Whether a version arrives in the background, or has since the last token: it is not present yet.
    pub(super) fn is_underway(&self, version: Version) -> bool {
        self.underway.contains(&version)
    }

    /// Whether every expert of a layer has a slot.
    pub(super) fn is_whole(&self, layer: u16) -> bool {
        self.whole.get(usize::from(layer)).copied().unwrap_or(false)
    }
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// From now on, while tokens are decoded, what is present changes in the background. Nothing else fills free
    /// slots then, or reads ahead of single tokens.
    pub fn keep_virtual_experts(&mut self, options: VirtualExpertsOptions) {
        let mut lanes: Vec<Lane> = Vec::new();
        for (version, share) in self.layout.versions_with_shares() {
            let ExpertId { layer, index } = version.expert;
            if version.precision != Precision::High {
                continue;
            }
            let share = self.layout.shares(layer)[usize::from(share)].id;
            match lanes.iter_mut().find(|lane| (lane.layer, lane.share) == (layer, share)) {
                Some(lane) => lane.members.push(index),
                None => lanes.push(Lane { layer, share, members: vec![index], next: 0 }),
            }
        }
        let pace = match (options.update, self.precisions.options.deterministic) {
            (VirtualUpdate::Tokens(period), _) => Pace::fixed(period),
            (VirtualUpdate::Auto, true) => Pace::fixed(Pace::DETERMINISTIC),
            (VirtualUpdate::Auto, false) => Pace::auto(),
        };
        // Turns are spread over the period.
        let n_lanes = lanes.len() as u64;
        lanes.iter_mut().zip(0..).for_each(|(lane, at)| lane.next = at * u64::from(pace.period()) / n_lanes);
        let importance = Importance::new(options.norms);
        let n_used = options.n_used;
        let whole = vec![false; usize::from(self.layout.n_blocks())];
        let (underway, token, replacements, failed) = (Vec::new(), 0, 0, 0);
        self.background.virtual_experts =
            Some(VirtualExperts { n_used, importance, pace, lanes, whole, underway, token, replacements, failed });
    }

    /// Whether tokens use only what is present.
    pub fn has_virtual_experts(&self) -> bool {
        self.background.virtual_experts.is_some()
    }

    /// Changes so far; `None` if experts are not virtual.
    pub fn virtual_experts_report(&self) -> Option<VirtualExpertsReport> {
        let own = self.background.virtual_experts.as_ref()?;
        let VirtualExperts { replacements, failed, .. } = *own;
        Some(VirtualExpertsReport { replacements, failed, period_tokens: own.pace.period() })
    }

    /// The router of a layer chose for these tokens, wherever they go: `weights` `[n_tokens][n_used]`, or empty where
    /// they are not known; `inputs`: the norm of each token's input, or nothing.
    pub(super) fn count_wanted(&mut self, layer: u16, routing: &Routing, weights: &[f32], inputs: &[f32]) {
        if let Some(own) = &mut self.background.virtual_experts {
            own.importance.observe(layer, &routing.ids, weights, inputs, routing.n_used);
        }
    }

    /// A batch begins. Whether it is of tokens that use what is present: nothing is withdrawn for them.
    pub(super) fn begin_virtual_batch(&mut self, phase: Phase) -> bool {
        let Some(own) = &mut self.background.virtual_experts else { return false };
        own.whole.fill(true);
        for lane in &own.lanes {
            let is_whole = self.cache.slots_of_share(lane.share).len() >= lane.members.len();
            own.whole[usize::from(lane.layer)] &= is_whole;
        }
        if phase.is_decode() {
            return true;
        }
        // A prompt takes what it needs, also of what is under way.
        let underway = std::mem::take(&mut own.underway);
        self.stop_filling(None);
        for version in underway {
            if self.progress(version) == Progress::Failed {
                self.cache.release(version);
            }
        }
        false
    }

    /// A batch was evaluated in so many seconds.
    pub(super) fn end_virtual_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64) {
        if self.background.virtual_experts.is_none() || !phase.is_decode() {
            return;
        }
        if self.precisions.options.deterministic {
            self.drain();
        }
        self.poll();
        self.take_in();
        let Some(mut own) = self.background.virtual_experts.take() else { return };
        own.pace.end_token(seconds);
        own.token += u64::from(n_tokens);
        for at in 0..own.lanes.len() {
            self.next_in_lane(&mut own, at);
        }
        self.background.virtual_experts = Some(own);
    }

    /// Arrived experts are present from now on, and the least important ones leave for them.
    fn take_in(&mut self) {
        let Some(mut own) = self.background.virtual_experts.take() else { return };
        let mut loading = Vec::new();
        for version in std::mem::take(&mut own.underway) {
            match self.progress(version) {
                Progress::Loading => loading.push(version),
                Progress::Gone => {}
                Progress::Failed => {
                    self.cache.release(version);
                    own.importance.forget(version.expert);
                    own.failed += 1;
                }
                Progress::Complete => {
                    own.replacements += 1;
                    let lane = own.lanes.iter().find(|lane| is_of(lane, version));
                    if let Some(lane) = lane.filter(|lane| self.has_no_spare(lane)) {
                        self.free_least(&own, lane, version);
                    }
                }
            }
        }
        own.underway = loading;
        self.background.virtual_experts = Some(own);
    }

    fn progress(&self, version: Version) -> Progress {
        let Some(slot) = self.cache.lookup(version) else { return Progress::Gone };
        let kinds = self.layout.kinds(version.expert.layer);
        let is_any = |state| kinds.iter().any(|&kind| self.cache.state(slot, kind) == state);
        match (is_any(SliceState::Loading), is_any(SliceState::Free)) {
            (true, _) => Progress::Loading,
            (false, true) => Progress::Failed,
            (false, false) => Progress::Complete,
        }
    }

    /// Not every member has a slot, and no slot is empty.
    fn has_no_spare(&self, lane: &Lane) -> bool {
        self.n_spare(lane) > 0 && self.cache.n_empty(lane.share) == 0
    }

    /// Slots that are kept empty.
    fn n_spare(&self, lane: &Lane) -> u32 {
        u32::from(self.cache.slots_of_share(lane.share).len() < lane.members.len())
    }

    /// Begins to read who is missed most in a lane, if it is its turn and a slot can be spared.
    fn next_in_lane(&mut self, own: &mut VirtualExperts, at: usize) {
        let lane = &mut own.lanes[at];
        let is_full = self.cache.n_empty(lane.share) <= self.n_spare(lane);
        if is_full && (own.token < lane.next || own.pace.is_paused()) {
            return;
        }
        if is_full {
            lane.next = own.token + u64::from(own.pace.period());
        }
        let lane = &own.lanes[at];
        if own.underway.iter().any(|&version| is_of(lane, version)) {
            return;
        }
        let Some((version, missed)) = self.most_missed(own, lane) else { return };
        if is_full {
            let residents = self.residents_of(lane).count();
            let Some((least, its_own)) = self.least_important(own, lane, version) else { return };
            let makes_room = self.cache.n_empty(lane.share) == 0;
            if missed <= its_own || residents - usize::from(makes_room) < own.n_used {
                return;
            }
            if makes_room && !self.free(least) {
                return;
            }
        }
        if let Some(slot) = self.acquire(version) {
            own.underway.push(version);
            self.background.fill.is_reading = true;
            let order = self.layout.load_order(version.expert.layer, &[]);
            self.read_slots(LoadClass::Fill, &[(slot, version)], &order);
        }
    }

    fn residents_of(&self, lane: &Lane) -> impl Iterator<Item = Version> {
        let version = |&index: &u16| Version::high(ExpertId { layer: lane.layer, index });
        lane.members.iter().map(version).filter(|&version| self.cache.lookup(version).is_some())
    }

    /// The most important missing expert, and its importance; the lowest number of equals.
    fn most_missed(&self, own: &VirtualExperts, lane: &Lane) -> Option<(Version, f64)> {
        let version = |&index: &u16| Version::high(ExpertId { layer: lane.layer, index });
        let missing = lane.members.iter().map(version).filter(|&version| self.cache.lookup(version).is_none());
        let missed =
            missing.map(|version| (version, own.importance.of(version.expert))).filter(|(_, wanted)| *wanted > 0.0);
        missed.reduce(|most, next| if next.1 > most.1 { next } else { most })
    }

    /// The least important resident except for a newcomer, and its importance; the highest number of equals.
    fn least_important(&self, own: &VirtualExperts, lane: &Lane, newcomer: Version) -> Option<(Version, f64)> {
        let others = self.residents_of(lane).filter(|version| *version != newcomer && !own.is_underway(*version));
        let wanted = others.map(|version| (version, own.importance.of(version.expert)));
        wanted.reduce(|least, next| if next.1 <= least.1 { next } else { least })
    }

    fn free_least(&mut self, own: &VirtualExperts, lane: &Lane, newcomer: Version) {
        if let Some((least, _)) = self.least_important(own, lane, newcomer) {
            self.free(least);
        }
    }

    /// Empties a slot, unless it is in use.
    fn free(&mut self, version: Version) -> bool {
        let is_free = self.cache.release(version);
        if is_free {
            self.observer.evicted(version);
        }
        is_free
    }
}

fn is_of(lane: &Lane, version: Version) -> bool {
    lane.layer == version.expert.layer && lane.members.binary_search(&version.expert.index).is_ok()
}

#[cfg(test)]
mod tests;
