//! Tensors that go where their names say, as llama.cpp is told.

use std::ffi::{CStr, CString};
use std::ptr;

use ggml_sys::llama::{self, ggml_backend_buffer_type_t, ggml_backend_dev_t, llama_model_tensor_buft_override};

use super::device_error::DeviceError;
use crate::options::TensorOverride;

/// Patterns with buffer types; the first that a name matches decides.
pub(super) struct Overrides {
    /// What `raw` points to.
    patterns: Vec<CString>,
    /// Ended by null.
    raw: Vec<llama_model_tensor_buft_override>,
}

impl Default for Overrides {
    fn default() -> Self {
        Self { patterns: Vec::new(), raw: vec![END] }
    }
}

const END: llama_model_tensor_buft_override =
    llama_model_tensor_buft_override { pattern: ptr::null(), buft: ptr::null_mut() };

impl Overrides {
    /// After those that are there.
    pub(super) fn push(&mut self, pattern: CString, buft: ggml_backend_buffer_type_t) {
        self.raw.pop();
        self.raw.push(llama_model_tensor_buft_override { pattern: pattern.as_ptr(), buft });
        self.raw.push(END);
        self.patterns.push(pattern);
    }

    /// What the user wants, after those that are there. `devices` end with null or with the slice.
    ///
    /// # Errors
    /// [`DeviceError::NoBufferType`]: a buffer type that neither the CPU nor one of the devices has.
    pub(super) fn add(&mut self, wanted: &[TensorOverride], devices: &[ggml_backend_dev_t]) -> Result<(), DeviceError> {
        if wanted.is_empty() {
            return Ok(());
        }
        let known = buffer_types(devices);
        for one in wanted {
            let found = known.iter().find(|(name, _)| *name == one.buffer_type);
            let pattern = CString::new(one.pattern.as_str()).ok();
            let (Some((_, buft)), Some(pattern)) = (found, pattern) else {
                let known = known.into_iter().map(|(name, _)| name).collect();
                return Err(DeviceError::NoBufferType { found: one.buffer_type.clone(), known });
            };
            self.push(pattern, *buft);
        }
        Ok(())
    }

    /// Valid until the next change.
    pub(super) fn as_ptr(&self) -> *const llama_model_tensor_buft_override {
        self.raw.as_ptr()
    }
}

/// The CPU's buffer type and those of the devices, by name.
fn buffer_types(devices: &[ggml_backend_dev_t]) -> Vec<(String, ggml_backend_buffer_type_t)> {
    let named = devices.iter().take_while(|device| !device.is_null());
    // SAFETY: devices are registered and live as long as the process; so do buffer types and their names.
    unsafe {
        let types = named.map(|device| llama::ggml_backend_dev_buffer_type(*device));
        std::iter::once(llama::ggml_backend_cpu_buffer_type())
            .chain(types)
            .map(|buft| (CStr::from_ptr(llama::ggml_backend_buft_name(buft)).to_string_lossy().into_owned(), buft))
            .collect()
    }
}
