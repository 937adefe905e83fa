//! The CPU's part of a region, beside the device.

use super::*;
use crate::engine::host_reads::host_bytes;

/// Work of the CPU in a region.
pub(super) struct Help {
    pub(super) region: Vec<Node>,
    /// Experts, most important first.
    pub(super) experts: Vec<Used>,
    /// The input of the region's first product, `[n_in, 1 or n_used]`.
    pub(super) input: Vec<f32>,
    /// Rows of the last product that have been computed, by rank.
    pub(super) rows: Vec<(u32, Vec<f32>)>,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

impl DeviceLayer<'_, '_> {
    /// Decides which of the missing experts the CPU computes, and reads the input for them.
    ///
    /// # Safety
    /// As [`Offload::layer`].
    pub(super) unsafe fn divide(
        &mut self,
        host: &Host,
        selection: &Selection,
        step: &LayerStep,
        missing: &[Used],
        region: &[Node],
    ) -> Option<Help> {
        let balancer = self.tier.balancer.as_mut()?;
        let kinds = || region.iter().filter_map(|(_, kind)| *kind);
        // A part of a layer has results besides the last product's.
        let is_whole = kinds().count() == host.layout().kinds(step.layer).len();
        // SAFETY: nodes of a live graph.
        if missing.is_empty() || !is_whole || selection.routing.n_tokens != 1 || !unsafe { Helper::can(region) } {
            return None;
        }
        let n_used = selection.routing.n_used;
        let misses: Vec<Miss> = missing
            .iter()
            .map(|&used| {
                let rank = selection.routing.pairs_of(used.index).first().map_or(0, |pair| pair.rank as usize);
                let slices = kinds().map(|kind| SliceId { version: step.version(used), kind });
                Miss {
                    index: used.index,
                    bytes: slices.clone().map(|slice| host.reads().shape(slice).bytes).sum(),
                    // The router's order replaces its weights if these were not read.
                    score: selection.weights.get(rank).copied().unwrap_or((n_used - rank) as f32),
                    on_host: used.row.is_some() && slices.clone().all(|slice| host_bytes(host, slice, used).is_some()),
                }
            })
            .collect();
        let split = balancer.split(&misses, 0.0);
        if split.cpu.is_empty() {
            return None;
        }
        if self.offload.helper.is_none() {
            self.offload.helper = Helper::new();
        }
        let n_threads = self.tier.helper_threads.map_or(self.offload.n_threads, c_int::from);
        self.offload.helper.as_mut()?.set_n_threads(n_threads);
        let experts = missing.iter().copied().filter(|used| split.cpu.contains(&used.index)).collect();
        let bytes = misses.iter().filter(|miss| split.cpu.contains(&miss.index)).map(|miss| miss.bytes).sum();
        // SAFETY: by the caller; the input was computed before, and is waited for.
        unsafe {
            let tensor = &*(*region[0].0).src[1];
            let mut input = vec![0f32; llama::ggml_nbytes(tensor) / size_of::<f32>()];
            self.offload.launch.stream.get(tensor, &mut input);
            self.offload.launch.synchronize();
            Some(Help { region: region.to_vec(), experts, input, rows: Vec::new(), bytes, seconds: 0.0 })
        }
    }

    /// Computes the most important of the experts left to the CPU. Returns whether there was one.
    ///
    /// # Safety
    /// As [`Offload::layer`].
    pub(super) unsafe fn help_once(
        &mut self,
        host: &Host,
        selection: &Selection,
        step: &LayerStep,
    ) -> Result<bool, Failed> {
        let Some(help) = self.help.as_mut().filter(|help| !help.experts.is_empty()) else { return Ok(false) };
        let started = Instant::now();
        let used = help.experts.remove(0);
        let Some(helper) = self.offload.helper.as_mut() else { return Err(GGML_STATUS_FAILED) };
        for pair in selection.routing.pairs_of(used.index) {
            let weights = |kind: SliceKind| {
                let slice = SliceId { version: step.version(used), kind };
                let (data, _) = host_bytes(host, slice, used).expect("what the CPU computes is on the host");
                (data, host.reads().shape(slice).clone())
            };
            // SAFETY: by the caller; host slots of a step are pinned.
            let row = unsafe {
                let tensor = &*(*help.region[0].0).src[1];
                let n = tensor.ne[0] as usize;
                let at = (i64::from(pair.rank) % tensor.ne[1]) as usize * n;
                let (stream, input) = (&self.offload.launch.stream, &mut help.input[at..at + n]);
                helper.row(stream, &help.region, input, used.index, &weights)
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
        selection: &Selection,
        step: &LayerStep,
    ) -> Result<(), Failed> {
        // SAFETY: by the caller.
        while unsafe { self.help_once(host, selection, step)? } {
            host.poll();
            // SAFETY: the host slots of the step are pinned until the uploads have run.
            unsafe { self.uploads.pump(host, self.tier) };
        }
        let Some(help) = self.help.take() else { return Ok(()) };
        let (last, _) = *help.region.last().expect("a region has a product");
        self.tier.helped(help.rows.len() as u64, help.bytes, help.seconds);
        for (rank, row) in help.rows {
            let bytes = row.iter().flat_map(|value| value.to_ne_bytes()).collect();
            // SAFETY: the last product is allocated on the device and has the rank's row.
            unsafe { self.offload.launch.set(last, bytes, rank as usize * (*last).nb[1]) };
        }
        Ok(())
    }
}
