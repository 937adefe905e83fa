//! Divides a region into stages of independent products; each product is submitted as its experts arrive.

use super::*;

/// Pins a step's experts that are on the device. Returns the others, in the order of need.
pub(super) fn pin_present(tier: &mut Tier, step: &LayerStep, kinds: &[SliceKind], selection: &Selection) -> Vec<Used> {
    let mut missing = Vec::new();
    if tier.is_unified() {
        return missing;
    }
    for &used in &step.used {
        let version = step.version(used);
        // If a layer comes in several splits, an earlier one may have taken the slot for slices that it left to this
        // one.
        let hit = tier.pin(version) && tier.has(version, kinds);
        if !selection.is_later_split() {
            tier.touch(version, hit, selection);
        }
        if !hit {
            missing.push(used);
        }
    }
    missing
}

/// Divides a step's experts, with their rows, into groups that are multiplied together and experts that are multiplied
/// one by one. The latter include prefetched experts that may not have arrived.
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

/// Products that do not depend on each other, and the nodes after them.
pub(super) struct Stage {
    pub(super) products: Vec<(*mut ggml_tensor, SliceKind)>,
    pub(super) plain: Vec<*mut ggml_tensor>,
}

/// Divides a region into stages.
///
/// # Safety
/// Nodes of a live graph, the first of which is a product.
pub(super) unsafe fn stages(region: &[Node]) -> Vec<Stage> {
    let mut stages: Vec<Stage> = Vec::new();
    for &(node, kind) in region {
        let Some(kind) = kind else {
            stages.last_mut().expect("a region starts with a product").plain.push(node);
            continue;
        };
        // SAFETY: sources of a live node are live.
        let inputs = unsafe { [(*node).src[1], (*(*node).src[1]).view_src] };
        let is_apart = |stage: &&mut Stage| {
            let mut earlier = stage.products.iter().map(|(node, _)| node).chain(&stage.plain);
            !earlier.any(|earlier| inputs.contains(earlier))
        };
        match stages.last_mut().filter(is_apart) {
            Some(stage) => stage.products.push((node, kind)),
            None => stages.push(Stage { products: vec![(node, kind)], plain: Vec::new() }),
        }
    }
    stages
}

impl DeviceLayer<'_, '_> {
    /// Computes the products of a stage, those of present experts first.
    ///
    /// # Safety
    /// As [`Offload::layer`]; the inputs of the products have been submitted.
    pub(super) unsafe fn stage(
        &mut self,
        host: &mut Host,
        selection: &Selection,
        step: &LayerStep,
        part: &Part,
        stage: &Stage,
    ) -> Result<(), Failed> {
        let routing = &selection.routing;
        let mut pending: Vec<Product> = Vec::new();
        for &(node, kind) in &stage.products {
            pending.extend(part.used.iter().map(|&used| {
                let slice = SliceId { version: step.version(used), kind };
                Product { node, used, slice }
            }));
        }
        loop {
            let mut here = Vec::new();
            pending.retain(|product| match locate(product, host, self.tier) {
                Some(weights) => {
                    here.push((*product, weights));
                    false
                }
                None => true,
            });
            let progress = !here.is_empty();
            // Experts are multiplied one by one as their indices were uploaded.
            let is_coming =
                |index: u16| !self.tier.is_unified() && part.coming.iter().any(|(used, _)| used.index == index);
            let (arriving, here): (Vec<_>, Vec<_>) =
                here.into_iter().partition(|(product, _)| is_coming(product.used.index));
            if !here.is_empty() {
                // SAFETY: by the caller.
                unsafe { self.offload.launch.products(routing, self.tier, &here)? };
            }
            for located in arriving {
                let slice = located.0.slice;
                if self.tier.is_arriving(slice) {
                    // The graph built so far must not wait for slices that are still arriving.
                    self.offload.launch.submit(self.tier)?;
                }
                self.tier.wait_for(&self.offload.launch.stream, slice);
                // SAFETY: by the caller.
                unsafe { self.offload.launch.products(routing, self.tier, &[located])? };
            }
            let Some(&Product { slice, used, .. }) = pending.first() else { return Ok(()) };
            // The device computes the experts it has while the host waits for others.
            self.offload.launch.submit(self.tier)?;
            split::poll(host, &self.offload.abort)?;
            // SAFETY: as above.
            if unsafe { self.uploads.pump(host, self.tier) } || progress {
                continue;
            }
            // Slices that have just landed are no longer in flight.
            if pending.iter().any(|product| locate(product, host, self.tier).is_some()) {
                continue;
            }
            // SAFETY: by the caller.
            if unsafe { self.help_once(host, selection, step)? } || host.wait() {
                continue;
            }
            let released = self.tier.wait_for_host_staging();
            if !released.is_empty() {
                released.into_iter().for_each(|slice| host.release(slice));
                continue;
            }
            if !self.others.force_staging(host, slice, used) {
                return Err(split::failed(format!("{slice}: nothing will ever load it")));
            }
        }
    }
}

/// The location of weights that the device can multiply by, now or once submitted uploads have arrived.
fn locate(product: &Product, host: &Host, tier: &Tier) -> Option<Weights> {
    match tier.is_unified() {
        true => tier.locate_on_host(host, product.slice, product.used),
        false => tier.locate(product.slice),
    }
}
