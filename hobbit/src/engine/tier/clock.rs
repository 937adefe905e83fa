//! The time that a device keeps: its own where it has one, as the tests' device does, otherwise the host's.

use std::time::Instant;

use ggml_sys::llama::{self, ggml_backend_dev_t};

/// Seconds since some moment; not a number for a device that has no time of its own.
type Seconds = unsafe extern "C" fn(ggml_backend_dev_t) -> f64;

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

    /// Seconds since some moment. A clock of the device's own may be set back.
    pub(in crate::engine) fn seconds(&self) -> f64 {
        match self.own {
            // SAFETY: as above.
            Some(seconds) => unsafe { seconds(self.dev) },
            None => self.began.elapsed().as_secs_f64(),
        }
    }
}
