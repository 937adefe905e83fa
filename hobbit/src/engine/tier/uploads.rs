//! The uploads of one region, in the order of need.

use super::{Destination, Tier};
use crate::engine::host_reads::{Host, host_bytes};
use hobbit_core::expert::{SliceId, SliceKind};
use hobbit_core::residency::{LayerStep, Used};

/// Slices that are not uploaded yet.
#[derive(Default)]
pub(in crate::engine) struct Uploads {
    /// Kind by kind, in the order of products; within a kind, experts in the order of need.
    waiting: Vec<(SliceId, Used)>,
}

impl Uploads {
    pub(in crate::engine) fn new(step: &LayerStep, kinds: &[SliceKind], missing: &[Used]) -> Self {
        let of_kind = |&kind: &SliceKind| {
            missing.iter().map(move |&used| (SliceId { version: step.version(used), kind }, used)).collect::<Vec<_>>()
        };
        Self { waiting: kinds.iter().flat_map(of_kind).collect() }
    }

    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Makes the host read the first slice although no read is in flight. Returns `false` if that is impossible.
    pub(in crate::engine) fn force_staging(&self, host: &mut Host) -> bool {
        self.waiting.first().is_some_and(|&(slice, used)| host.force_staging(slice, used))
    }

    /// Starts every upload whose bytes are in host memory and that has a destination. Returns whether any was started.
    ///
    /// # Safety
    /// The step's pinned host slots stay unchanged until the uploads have run.
    pub(in crate::engine) unsafe fn pump(&mut self, host: &Host, tier: &mut Tier) -> bool {
        // Staging slots go to the earliest products: taken by a later one, they might never become free again.
        let mut staging_for = None;
        let before = self.waiting.len();
        self.waiting.retain(|&(slice, used)| {
            let is_staged = !tier.is_resident(slice.version);
            if is_staged && staging_for.is_some_and(|kind| kind != slice.kind) {
                return true;
            }
            let Some((data, on_loan)) = host_bytes(host, slice, used) else {
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
            unsafe { tier.upload(slice, host.reads().shape(slice), data, to) };
            if on_loan {
                tier.hold_staged(slice);
            }
            false
        });
        self.waiting.len() < before
    }
}
