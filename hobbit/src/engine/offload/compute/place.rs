//! Which of a step's experts are on the device, which come, and what of them can be multiplied.

use super::*;

/// Pins what a step uses and is on the device. What is not, in the order of need.
pub(super) fn pin_present(tier: &mut Tier, step: &LayerStep, kinds: &[SliceKind], chosen: &Chosen) -> Vec<Used> {
    let mut missing = Vec::new();
    if tier.is_unified() {
        return missing;
    }
    for &used in &step.used {
        let version = step.version(used);
        // Of a layer that comes in several splits, an earlier one may have taken the slot for slices that it left to this one.
        let hit = tier.pin(version) && tier.has(version, kinds);
        if !chosen.is_again() {
            tier.touch(version, hit, chosen.share(used.index));
        }
        if !hit {
            missing.push(used);
        }
    }
    missing
}

/// Experts of a step with their rows: those that can be multiplied together, and those that come one by one. Of the latter
/// are those, too, that were copied ahead and may not have come.
#[allow(clippy::type_complexity)]
pub(super) fn by_place(
    tier: &Tier,
    step: &LayerStep,
    kinds: &[SliceKind],
    all: &[Used],
    missing: &[Used],
) -> (Vec<Vec<(Used, u32)>>, Vec<(Used, u32)>) {
    let mut present: Vec<(u16, Vec<(Used, u32)>)> = Vec::new();
    let mut coming = Vec::new();
    for &used in all {
        let version = step.version(used);
        let is_coming =
            missing.iter().any(|other| other.index == used.index) || tier.is_version_arriving(version, kinds);
        match tier.place(version) {
            Some((pool, row)) if !is_coming => match present.iter_mut().find(|(known, _)| *known == pool) {
                Some((_, members)) => members.push((used, row)),
                None => present.push((pool, vec![(used, row)])),
            },
            place => coming.push((used, place.map_or(0, |(_, row)| row))),
        }
    }
    (present.into_iter().map(|(_, members)| members).collect(), coming)
}

/// A product that has not been submitted.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) node: *mut ggml_tensor,
    pub(super) used: Used,
    pub(super) slice: SliceId,
}

impl Wanted {
    pub(super) fn locate(&self, host: &Host, tier: &Tier) -> Option<Weights> {
        match tier.is_unified() {
            true => tier.locate_on_host(host, self.slice, self.used),
            false => tier.locate(self.slice),
        }
    }
}

/// Takes out of `pending` what the device can multiply, or can once what was submitted has arrived.
pub(super) fn take_located(pending: &mut Vec<Wanted>, host: &Host, tier: &Tier) -> Vec<Product> {
    let mut located = Vec::new();
    pending.retain(|wanted| {
        let weights = wanted.locate(host, tier);
        let &Wanted { node, used, slice } = wanted;
        located.extend(weights.map(|weights| Product { node, used, slice, weights }));
        weights.is_none()
    });
    located
}
