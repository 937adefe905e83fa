//! Speed of copies and of the CPU, by the device's own clock if it has one: input of the balancer and of prefetches.

use std::time::Instant;

use ggml_sys::llama::{self, ggml_backend_dev_t};

use super::Tier;

/// The link is measured in one of this many regions with uploads, beside a CPU helper.
const LINK_SAMPLE: u32 = 32;

/// The same if only prefetches use the result.
pub(super) const LINK_SAMPLE_ALONE: u32 = 256;

/// Seconds since some moment; NaN for a device without a clock.
type Seconds = unsafe extern "C" fn(ggml_backend_dev_t) -> f64;

/// The device's clock if it has one (the tests' device does), otherwise the host's.
pub(super) struct Clock {
    dev: ggml_backend_dev_t,
    own: Option<Seconds>,
    began: Instant,
}

impl Clock {
    pub(in crate::engine) fn of(dev: ggml_backend_dev_t) -> Self {
        // SAFETY: a registered device; what its registry has under this name is such a function.
        let own = unsafe {
            let reg = llama::ggml_backend_dev_backend_reg(dev);
            let address = llama::ggml_backend_reg_get_proc_address(reg, c"hobbit_device_seconds".as_ptr());
            (!address.is_null()).then(|| std::mem::transmute::<*mut std::ffi::c_void, Seconds>(address))
        };
        // SAFETY: the device is live as long as the process.
        let own = own.filter(|seconds| !unsafe { seconds(dev) }.is_nan());
        Self { dev, own, began: Instant::now() }
    }

    /// Seconds since some moment. A device's own clock may be set back.
    pub(in crate::engine) fn seconds(&self) -> f64 {
        match self.own {
            // SAFETY: as above.
            Some(seconds) => unsafe { seconds(self.dev) },
            None => self.began.elapsed().as_secs_f64(),
        }
    }
}

impl Tier {
    /// Whether the CPU may compute misses.
    pub(in crate::engine) fn has_helper(&self) -> bool {
        self.balancer.is_some() && self.is_divided()
    }

    /// The uploads of a region have been submitted. Some regions' uploads are waited for and timed.
    pub(in crate::engine) fn measure_link(&mut self) {
        let (n, bytes) = (self.counters.uploads - self.before.0, self.counters.uploaded_bytes - self.before.1);
        if n == 0 {
            return;
        }
        self.unmeasured = self.unmeasured.saturating_add(1);
        if self.unmeasured >= self.link_sample() {
            self.unmeasured = 0;
            self.copy.synchronize();
            let seconds = self.began.elapsed().as_secs_f64();
            self.balancer.iter_mut().for_each(|balancer| balancer.observe_copy(bytes / n, seconds / n as f64));
            let seconds = self.clock.seconds() - self.began_on_clock;
            self.ahead.iter_mut().for_each(|ahead| ahead.idle.observe_link(bytes, seconds));
        }
    }

    pub(super) fn link_sample(&self) -> u32 {
        match (&self.balancer, &self.ahead) {
            (Some(_), _) => LINK_SAMPLE,
            (None, Some(_)) => LINK_SAMPLE_ALONE,
            (None, None) => u32::MAX,
        }
    }

    /// The CPU has computed experts.
    pub(in crate::engine) fn helped(&mut self, experts: u64, bytes: u64, seconds: f64) {
        self.counters.helper_experts += experts;
        self.counters.helper_seconds += seconds;
        if let Some(balancer) = self.balancer.as_mut() {
            balancer.observe_cpu(bytes, seconds);
        }
    }
}
