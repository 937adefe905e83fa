//! A region in stages: products that need nothing of each other, each submitted as its experts come.

use super::*;

/// Products that depend on none of each other, and the nodes after them.
pub(super) struct Stage {
    pub(super) products: Vec<(*mut ggml_tensor, SliceKind)>,
    pub(super) plain: Vec<*mut ggml_tensor>,
}

impl Offload {
    /// Divides a region into stages.
    ///
    /// # Safety
    /// Nodes of a live graph.
    pub(super) unsafe fn stages(&self, nodes: &[*mut ggml_tensor]) -> Vec<Stage> {
        let mut stages: Vec<Stage> = Vec::new();
        for &node in nodes {
            // SAFETY: by the caller.
            let product = unsafe { self.product(node) };
            match (product, stages.last_mut()) {
                (Some(tag), Some(stage)) => {
                    // SAFETY: sources of a live node are live.
                    let inputs = unsafe {
                        let input = (*node).src[1];
                        [input, (*input).view_src]
                    };
                    let mut earlier = stage.products.iter().map(|(node, _)| *node).chain(stage.plain.iter().copied());
                    match earlier.any(|earlier| inputs.contains(&earlier)) {
                        false => stage.products.push((node, tag.kind)),
                        true => stages.push(Stage { products: vec![(node, tag.kind)], plain: Vec::new() }),
                    }
                }
                (Some(tag), None) => stages.push(Stage { products: vec![(node, tag.kind)], plain: Vec::new() }),
                (None, Some(stage)) => stage.plain.push(node),
                (None, None) => unreachable!("a region starts with a product"),
            }
        }
        stages
    }

    /// Computes the products of a stage, those of present experts first.
    ///
    /// # Safety
    /// As [`Offload::layer`]; what the products depend on has been submitted.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn stage(
        &mut self,
        experts: &Experts,
        (host, others): (&mut Host, &mut Tiers),
        tier: &mut Tier,
        part: &Part,
        stage: &Stage,
        uploads: &mut Uploads,
        help: &mut Option<Help>,
    ) -> Result<(), Failed> {
        let step = part.step;
        let mut pending: Vec<Wanted> = Vec::new();
        for &(node, kind) in &stage.products {
            pending.extend(part.used.iter().map(|&used| {
                let slice = SliceId { version: step.version(used), kind };
                Wanted { node, used, slice }
            }));
        }
        loop {
            let here = take_located(&mut pending, host, tier);
            // As their indices were uploaded.
            let is_coming = |index: u16| !tier.is_unified() && part.coming.iter().any(|(used, _)| used.index == index);
            let (arriving, here): (Vec<Product>, Vec<Product>) =
                here.into_iter().partition(|product| is_coming(product.used.index));
            let progress = !here.is_empty() || !arriving.is_empty();
            if !here.is_empty() {
                // SAFETY: by the caller.
                unsafe { self.launch.products(&self.compute, &self.chosen.routing, tier, &here)? };
            }
            for product in arriving {
                if tier.is_arriving(product.slice) {
                    // What has been built waits for nothing that is still coming.
                    self.launch.submit(&self.compute, tier)?;
                }
                tier.wait_for(&self.compute, product.slice);
                // SAFETY: by the caller.
                unsafe { self.launch.products(&self.compute, &self.chosen.routing, tier, &[product])? };
            }
            if pending.is_empty() {
                return Ok(());
            }
            // What waits for the host does not keep the device from what is there.
            self.launch.submit(&self.compute, tier)?;
            host.poll();
            if let Some(error) = host.take_failure() {
                experts.fail(error.to_string());
                return Err(GGML_STATUS_FAILED);
            }
            if self.should_abort() {
                return Err(GGML_STATUS_ABORTED);
            }
            // SAFETY: as above.
            if unsafe { uploads.pump(host, tier) } || progress {
                continue;
            }
            // What has landed just now is no longer on its way.
            if pending.iter().any(|wanted| wanted.locate(host, tier).is_some()) {
                continue;
            }
            // SAFETY: by the caller.
            if let Some(help) = help
                && unsafe { self.help_once(host, step, help)? }
            {
                continue;
            }
            let product = pending[0];
            if host.wait() {
                continue;
            }
            let released = tier.wait_for_host_staging();
            if !released.is_empty() {
                released.into_iter().for_each(|slice| host.release(slice));
                continue;
            }
            if !others.insist(host, product.slice, product.used) {
                experts.fail(format!("{}: nothing will ever load it", product.slice));
                return Err(GGML_STATUS_FAILED);
            }
        }
    }
}
