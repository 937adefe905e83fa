//! Speed of copies and of the CPU, by the device's clock if it has one: input of the balancer and of prefetches.

use std::ffi::{CStr, c_void};
use std::time::Instant;

use ggml_sys::llama::{self, ggml_backend_dev_t};

use super::{CpuHelper, Tier};
use hobbit_core::load::balance::RunningMean;
use hobbit_core::route::Phase;

/// The link is measured in one of this many regions with uploads, beside a CPU helper.
const LINK_SAMPLE: u32 = 32;

/// The sampling interval where only prefetches use the result.
const LINK_SAMPLE_ALONE: u32 = 256;

/// How many times as long as its product a slice's copy takes at least where slices are submitted together: the
/// products that then wait for the last copy add at most this part to the time of the copies.
const LINK_SLOW: f64 = 8.0;

/// Seconds since some moment, or bytes per second.
type Number = unsafe extern "C" fn(ggml_backend_dev_t) -> f64;
/// Tells the device that the host's CPU has multiplied by this many bytes of weights.
type HostWork = unsafe extern "C" fn(ggml_backend_dev_t, u64);

/// Tells the device that the host waits until a moment.
type HostWait = unsafe extern "C" fn(ggml_backend_dev_t, f64);

/// Functions of a device with a virtual clock.
struct Virtual {
    seconds: Number,
    work: HostWork,
    wait: HostWait,
    /// Bytes per second of files; infinite where their reads take real time.
    disk: Number,
}

/// The device's clock if it has one (the tests' device does), otherwise the host's.
pub(crate) struct Clock {
    dev: ggml_backend_dev_t,
    of_device: Option<Virtual>,
    began: Instant,
}

impl Clock {
    pub(crate) fn of(dev: ggml_backend_dev_t) -> Self {
        // SAFETY: a registered device; what its registry has under these names are such functions.
        let of_device = unsafe {
            let reg = llama::ggml_backend_dev_backend_reg(dev);
            let address = |name: &CStr| llama::ggml_backend_reg_get_proc_address(reg, name.as_ptr());
            let addresses = [
                c"hobbit_device_seconds",
                c"hobbit_device_host_work",
                c"hobbit_device_host_wait",
                c"hobbit_device_disk",
            ]
            .map(address);
            let [seconds, work, wait, disk] = addresses;
            addresses.iter().all(|address| !address.is_null()).then(|| Virtual {
                seconds: std::mem::transmute::<*mut c_void, Number>(seconds),
                work: std::mem::transmute::<*mut c_void, HostWork>(work),
                wait: std::mem::transmute::<*mut c_void, HostWait>(wait),
                disk: std::mem::transmute::<*mut c_void, Number>(disk),
            })
        };
        Self { dev, of_device, began: Instant::now() }
    }

    /// The CPU has computed beside the device, with `bytes` bytes of weights: a device with a virtual clock advances
    /// it.
    pub(crate) fn host_worked(&self, bytes: u64) {
        if let Some(device) = &self.of_device {
            // SAFETY: the device is live as long as the process.
            unsafe { (device.work)(self.dev, bytes) }
        }
    }

    /// The host has waited until then by this clock, if it is the device's.
    pub(crate) fn wait_until(&self, seconds: f64) {
        if let Some(device) = &self.of_device {
            // SAFETY: as above.
            unsafe { (device.wait)(self.dev, seconds) }
        }
    }

    /// Bytes per second of files, if their reads take the device's virtual time.
    pub(crate) fn disk_bandwidth(&self) -> Option<f64> {
        let device = self.of_device.as_ref()?;
        // SAFETY: as above.
        Some(unsafe { (device.disk)(self.dev) }).filter(|bandwidth| bandwidth.is_finite())
    }

    /// Whether this is the host's clock.
    pub(crate) fn is_hosts(&self) -> bool {
        self.of_device.is_none()
    }

    /// Seconds since some moment. A device's own clock may be set back.
    pub(crate) fn seconds(&self) -> f64 {
        match &self.of_device {
            // SAFETY: as above.
            Some(device) => unsafe { (device.seconds)(self.dev) },
            None => self.began.elapsed().as_secs_f64(),
        }
    }
}

/// Measurements of the link and of the device's products.
pub(crate) struct Speed {
    pub(crate) clock: Clock,
    /// Seconds per byte of copies, and of the device's products of batches that decode.
    link: RunningMean,
    product: RunningMean,
    /// Regions with uploads since the link was measured last.
    pub(super) unmeasured: u32,
    /// Uploads and their bytes before the running region, and the time of its start.
    pub(super) before: (u64, u64),
    pub(super) began: f64,
}

impl Speed {
    pub(super) fn of(dev: ggml_backend_dev_t) -> Self {
        let (link, product) = Default::default();
        Self { clock: Clock::of(dev), link, product, unmeasured: LINK_SAMPLE_ALONE, before: (0, 0), began: 0.0 }
    }

    /// The next uploads of a region are timed.
    pub(crate) fn measure_next(&mut self) {
        self.unmeasured = u32::MAX;
    }

    /// Records that the device multiplied by `bytes` bytes of weights in `seconds`, for a batch that decodes.
    pub(crate) fn observe_products(&mut self, bytes: u64, seconds: f64) {
        if bytes > 0 {
            self.product.add(seconds / bytes as f64);
        }
    }

    /// Seconds that a byte's copy takes; `None` before one was measured.
    pub(crate) fn seconds_per_byte(&self) -> Option<f64> {
        self.link.get()
    }

    /// Whether copies take so much longer than products that nothing is gained by multiplying each slice as it lands:
    /// those of a stage wait for each other, and are submitted together.
    pub(crate) fn is_link_slow(&self) -> bool {
        self.link.get().zip(self.product.get()).is_some_and(|(link, product)| link >= LINK_SLOW * product)
    }
}

impl Tier {
    /// Whether the CPU may compute misses.
    pub(crate) fn has_helper(&self) -> bool {
        self.helper.balancer.is_some() && self.is_divided()
    }

    /// The uploads of a region have been submitted. Some regions' uploads are waited for and timed; then returns when
    /// they had ended.
    pub(crate) fn measure_link(&mut self) -> Option<f64> {
        let (n, bytes) =
            (self.counters.uploads - self.speed.before.0, self.counters.uploaded_bytes - self.speed.before.1);
        if n == 0 {
            return None;
        }
        self.speed.unmeasured = self.speed.unmeasured.saturating_add(1);
        if self.speed.unmeasured < self.link_sample() {
            return None;
        }
        self.speed.unmeasured = 0;
        self.copies.stream.synchronize();
        let ended = self.speed.clock.seconds();
        let seconds = ended - self.speed.began;
        let CpuHelper { balancer, of_prompts, .. } = &mut self.helper;
        balancer.iter_mut().chain(of_prompts).for_each(|own| own.observe_copy(bytes / n, seconds / n as f64));
        self.ahead.iter_mut().for_each(|ahead| ahead.idle.observe_link(bytes, seconds));
        self.speed.link.add(seconds / bytes as f64);
        Some(ended)
    }

    pub(super) fn link_sample(&self) -> u32 {
        match (&self.helper.balancer, &self.ahead) {
            (Some(_), _) => LINK_SAMPLE,
            (None, Some(_)) => LINK_SAMPLE_ALONE,
            (None, None) => u32::MAX,
        }
    }

    /// The CPU has computed experts of so much [`hobbit_core::load::balance::Miss::work`].
    pub(crate) fn helped(&mut self, phase: Phase, experts: u64, work: u64, seconds: f64) {
        self.counters.helper_experts += experts;
        self.counters.helper_seconds += seconds;
        if let Some(balancer) = self.helper.of(phase) {
            balancer.observe_cpu(work, seconds);
        }
    }
}
