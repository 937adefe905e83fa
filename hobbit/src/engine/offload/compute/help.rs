//! The CPU's part of a region, beside the device.

use super::*;
use crate::engine::hierarchy::HostBytes;

/// Work of the CPU in a region.
pub(super) struct Help<'a> {
    pub(super) region: &'a [Node],
    /// Experts, most important first.
    pub(super) experts: Vec<Used>,
    /// The input of the region's first product, `[n_in, 1 or n_used]`.
    pub(super) input: Vec<f32>,
    /// Rows of the last product that have been computed, by rank.
    pub(super) rows: Vec<(u32, Vec<f32>)>,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

impl Offload {
    /// Decides which of the missing experts the CPU computes, and reads the input for them.
    ///
    /// # Safety
    /// As [`Offload::layer`].
    pub(super) unsafe fn divide<'a>(
        &mut self,
        host: &Host,
        tier: &mut Tier,
        step: &LayerStep,
        missing: &[Used],
        region: &'a [Node],
    ) -> Option<Help<'a>> {
        let balancer = tier.balancer.as_mut()?;
        let kinds = || region.iter().filter_map(|(_, kind)| *kind);
        // A part of a layer has results besides the last product's.
        let is_whole = kinds().count() == host.layout().kinds(step.layer).len();
        // SAFETY: nodes of a live graph.
        if missing.is_empty() || !is_whole || self.chosen.routing.n_tokens != 1 || !unsafe { Helper::can(region) } {
            return None;
        }
        let n_used = self.chosen.routing.n_used;
        let misses: Vec<Miss> = missing
            .iter()
            .map(|&used| {
                let rank = self.chosen.routing.pairs_of(used.index).first().map_or(0, |pair| pair.rank as usize);
                let slices = kinds().map(|kind| SliceId { version: step.version(used), kind });
                Miss {
                    index: used.index,
                    bytes: slices.clone().map(|slice| host.shape(slice).bytes).sum(),
                    // The router's order replaces its weights if these were not read.
                    score: self.chosen.weights.get(rank).copied().unwrap_or((n_used - rank) as f32),
                    on_host: used.row.is_some() && slices.clone().all(|slice| host.host_bytes(slice, used).is_some()),
                }
            })
            .collect();
        let split = balancer.split(&misses, 0.0);
        if split.cpu.is_empty() {
            return None;
        }
        if self.helper.is_none() {
            self.helper = Helper::new();
        }
        let n_threads = tier.helper_threads.map_or(self.n_threads, c_int::from);
        self.helper.as_mut()?.set_n_threads(n_threads);
        let experts = missing.iter().copied().filter(|used| split.cpu.contains(&used.index)).collect();
        let bytes = misses.iter().filter(|miss| split.cpu.contains(&miss.index)).map(|miss| miss.bytes).sum();
        // SAFETY: by the caller; the input was computed before, and is waited for.
        unsafe {
            let tensor = &*(*region[0].0).src[1];
            let mut input = vec![0f32; llama::ggml_nbytes(tensor) / size_of::<f32>()];
            self.launch.stream.get(tensor, &mut input);
            self.launch.synchronize();
            Some(Help { region, experts, input, rows: Vec::new(), bytes, seconds: 0.0 })
        }
    }

    /// Computes the most important of the experts left to the CPU.
    ///
    /// # Safety
    /// As [`Offload::layer`].
    pub(super) unsafe fn help_once(&mut self, host: &Host, step: &LayerStep, help: &mut Help) -> Result<bool, Failed> {
        if help.experts.is_empty() {
            return Ok(false);
        }
        let started = Instant::now();
        let used = help.experts.remove(0);
        let Some(helper) = self.helper.as_mut() else { return Err(GGML_STATUS_FAILED) };
        for pair in self.chosen.routing.pairs_of(used.index) {
            let weights = |kind: SliceKind| {
                let slice = SliceId { version: step.version(used), kind };
                let (data, _) = host.host_bytes(slice, used).expect("what the CPU computes is on the host");
                (data, host.shape(slice).clone())
            };
            // SAFETY: by the caller; host slots of a step are pinned.
            let row = unsafe {
                let tensor = &*(*help.region[0].0).src[1];
                let n = tensor.ne[0] as usize;
                let at = (i64::from(pair.rank) % tensor.ne[1]) as usize * n;
                helper.row(&self.launch.stream, help.region, &mut help.input[at..at + n], used.index, &weights)
            };
            help.rows.push((pair.rank, row.ok_or(GGML_STATUS_FAILED)?));
        }
        help.seconds += started.elapsed().as_secs_f64();
        Ok(true)
    }

    /// Computes the rest of the CPU's experts, and writes their rows to the device.
    ///
    /// # Safety
    /// As [`Offload::layer`]; the region has been submitted.
    pub(super) unsafe fn finish_help(
        &mut self,
        host: &mut Host,
        tier: &mut Tier,
        step: &LayerStep,
        help: Option<Help>,
        uploads: &mut Uploads,
    ) -> Result<(), Failed> {
        let Some(mut help) = help else { return Ok(()) };
        // SAFETY: by the caller.
        while unsafe { self.help_once(host, step, &mut help)? } {
            host.poll();
            // SAFETY: the host slots of the step are pinned until the uploads have run.
            unsafe { uploads.pump(host, tier) };
        }
        let (last, _) = *help.region.last().expect("a region has a product");
        tier.helped(help.rows.len() as u64, help.bytes, help.seconds);
        for (rank, row) in help.rows {
            let bytes = row.iter().flat_map(|value| value.to_ne_bytes()).collect();
            // SAFETY: the last product is allocated on the device and has the rank's row.
            unsafe { self.launch.set(last, bytes, rank as usize * (*last).nb[1]) };
        }
        Ok(())
    }
}
