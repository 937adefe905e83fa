//! Reads what layers that route by the token alone will use: their experts are known before a batch is computed, so no
//! guess is judged.
//!
//! The reads are submitted in the order of layers, behind those that products wait for. Their versions are evicted last
//! until their layer begins.

use super::background::Background;
use super::{Observer, Reads, Residency};
use crate::cache::{Acquired, SlotId};
use crate::expert::{ExpertId, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::TokenRoutes;
use crate::route::Phase;
use crate::stats::TokenRoutedReport;

/// Experts that follow from tokens, and the reads of them.
#[derive(Default)]
pub(super) struct Certain {
    routes: TokenRoutes,
    /// Versions that layers of the running batch use that have not begun, in the order of layers.
    expected: Vec<Version>,
    /// Those of them that were read ahead.
    asked: Vec<Version>,
    counts: TokenRoutedReport,
}

impl Certain {
    pub(super) fn expected(&self) -> impl Iterator<Item = Version> {
        self.expected.iter().copied()
    }
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// From now on, the experts of these layers are read as soon as a batch's tokens are known.
    pub fn read_token_routes(&mut self, routes: TokenRoutes) {
        self.background.certain = (!routes.is_empty()).then(|| Certain { routes, ..Certain::default() });
    }

    /// A batch of these tokens begins: reads the missing experts of layers that route by the token. `is_elsewhere`: a
    /// device has a version.
    ///
    /// Only in exact mode, where tokens alone decide precisions, too. A prompt's reads take slots only: it needs its
    /// staging for the layer that runs.
    pub fn expect(&mut self, phase: Phase, tokens: &[i32], is_elsewhere: &dyn Fn(Version) -> bool) {
        let is_fixed = self.precisions.options.deterministic || self.background.virtual_experts.is_some();
        let Some(certain) = &mut self.background.certain else { return };
        certain.asked.clear();
        certain.expected.clear();
        if !self.precisions.is_exact() || is_fixed {
            return;
        }
        let of = |(layer, index)| Version::high(ExpertId { layer, index });
        certain.expected.extend(certain.routes.of(tokens).map(of).filter(|version| self.layout.has_version(*version)));
        let expected = certain.expected.clone();
        self.poll();
        self.shield_expected();
        for of_layer in expected.chunk_by(|a, b| a.expert.layer == b.expert.layer) {
            self.read_certain(phase, of_layer, is_elsewhere);
        }
    }

    /// Reads what is missing of one layer.
    fn read_certain(&mut self, phase: Phase, versions: &[Version], is_elsewhere: &dyn Fn(Version) -> bool) {
        let order = self.layout.load_order(versions[0].expert.layer, &[]);
        let mut slots: Vec<(SlotId, Version)> = Vec::new();
        for &version in versions {
            let is_here = self.cache.lookup(version).is_some() || self.in_flight.is_staged(version, &self.layout);
            if is_here || is_elsewhere(version) {
                continue;
            }
            let mut staged = None;
            if let Some(Acquired { slot, evicted }) = self.cache.acquire_ahead(version) {
                self.takes(slot, version, evicted);
                slots.push((slot, version));
            } else if phase.is_decode() {
                staged = self.in_flight.stage_ahead(version, &order, &self.layout);
                if staged.is_none() {
                    continue;
                }
            } else {
                continue;
            }
            if let Some(certain) = &mut self.background.certain {
                certain.asked.push(version);
                certain.counts.issued += 1;
            }
            self.submit(LoadClass::ReadAhead, staged.unwrap_or_default());
        }
        self.read_slots(LoadClass::ReadAhead, &slots, &order);
    }

    /// A layer begins: what was read ahead for it has come, or not.
    pub(super) fn settle_expected(&mut self, layer: u16) {
        let is_here = |version: &mut Version| version.expert.layer == layer;
        let Some(certain) = &mut self.background.certain else { return };
        if certain.expected.extract_if(.., is_here).count() == 0 {
            return;
        }
        let asked: Vec<Version> = certain.asked.extract_if(.., is_here).collect();
        let n_complete = asked.iter().filter(|version| self.is_complete(**version)).count();
        if let Some(certain) = &mut self.background.certain {
            certain.counts.useful += n_complete as u64;
            certain.counts.late += (asked.len() - n_complete) as u64;
        }
        self.shield_expected();
    }

    /// Shields what is expected with certainty, and what the last plan of prefetches masks.
    fn shield_expected(&mut self) {
        let Self { background: Background { certain, lookahead, .. }, cache, .. } = self;
        cache.unshield_all();
        cache.shield(certain.iter().flat_map(Certain::expected));
        cache.shield(lookahead.iter().flat_map(|own| own.masked()));
    }

    /// A batch is over.
    pub(super) fn end_expected(&mut self) {
        if let Some(certain) = &mut self.background.certain {
            certain.expected.clear();
            certain.asked.clear();
            self.cache.unshield_all();
        }
    }

    /// Whether all slices of a version are in its slot or in staging.
    pub(super) fn is_complete(&self, version: Version) -> bool {
        let is_staged = |kind: &SliceKind| self.in_flight.staging.is_ready(SliceId { version, kind: *kind });
        match self.cache.lookup(version) {
            Some(slot) => self.cache.is_ready(slot),
            None => self.layout.kinds(version.expert.layer).iter().all(is_staged),
        }
    }

    /// Counts of reads for layers that route by the token; `None` without such layers.
    pub fn token_routed_report(&self) -> Option<TokenRoutedReport> {
        self.background.certain.as_ref().map(|own| own.counts)
    }
}
