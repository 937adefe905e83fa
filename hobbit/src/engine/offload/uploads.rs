//! The uploads of one region, in the order of need.

use super::tier::{Destination, Tier};
use crate::engine::residency::{Residency, Step, Used};
use crate::expert::{SliceId, SliceKind};

/// What is still to be uploaded.
pub(super) struct Uploads {
    /// Kind by kind, as the products come; within a kind, experts in the order of need.
    waiting: Vec<(SliceId, Used)>,
}

impl Uploads {
    pub(super) fn new(step: &Step, kinds: &[SliceKind], missing: &[Used]) -> Self {
        let of_kind = |&kind: &SliceKind| {
            missing.iter().map(move |&used| (SliceId { version: step.version(used), kind }, used)).collect::<Vec<_>>()
        };
        Self { waiting: kinds.iter().flat_map(of_kind).collect() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Makes the host read the first of them though nothing is on its way. False when that is impossible.
    pub(super) fn insist(&self, residency: &mut Residency) -> bool {
        self.waiting.first().is_some_and(|&(slice, used)| residency.insist(slice, used))
    }

    /// Starts every upload whose bytes are in host memory and that has a place to go. Whether there was one.
    ///
    /// # Safety
    /// What the step pins on the host stays as it is until the uploads have run.
    pub(super) unsafe fn pump(&mut self, residency: &Residency, tier: &mut Tier) -> bool {
        // Staging slots go to the products that come first: taken by a later one, they might never be free again.
        let mut staging_for = None;
        let before = self.waiting.len();
        self.waiting.retain(|&(slice, used)| {
            let is_staged = !tier.is_resident(slice.version);
            if is_staged && staging_for.is_some_and(|kind| kind != slice.kind) {
                return true;
            }
            let Some((data, on_loan)) = residency.host_bytes(slice, used) else {
                if is_staged {
                    staging_for = Some(slice.kind);
                }
                return true;
            };
            let Some(to) = tier.destination(slice) else {
                staging_for = Some(slice.kind);
                return true;
            };
            debug_assert!(is_staged == matches!(to, Destination::Staging(_)));
            // SAFETY: by the caller for what is cached; a staged slice is kept until its upload has run.
            unsafe { tier.upload(slice, residency.shape(slice), data, to) };
            if on_loan {
                tier.hold_staged(slice);
            }
            false
        });
        self.waiting.len() < before
    }
}
