//! Host memory that a device reaches directly: pinned, so that copies need no detour, or unified, so that nothing is
//! copied.

use std::io;
use std::ptr::NonNull;

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_dev_t};

use crate::engine::error::OpenError;
use crate::engine::ggml::{self, Buffer};
use hobbit_core::options::UnifiedMemory;
use hobbit_core::store::{Arena, BLOCK_BYTES};

/// How a device reaches host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Copies from any host memory.
    Copies,
    /// Copies faster from memory of its host buffer type.
    Pinned,
    /// Computes in memory of its host buffer type, which the host may write while the device reads other parts.
    Unified,
    /// Computes in any host memory that was registered with it.
    Shown,
}

/// A device's declarations about host memory.
#[derive(Clone, Debug)]
struct Declared {
    backend: String,
    /// Whether it is an integrated GPU.
    is_integrated: bool,
    /// Whether it has a host buffer type.
    pins: bool,
    /// Whether graphs may have tensors in that buffer type.
    supports_pinned: bool,
    /// Whether other host memory can be registered with it.
    registers: bool,
}

impl Reach {
    /// How `dev` reaches host memory if experts may be computed in place as `wanted`.
    pub(crate) fn of(dev: ggml_backend_dev_t, wanted: UnifiedMemory) -> Self {
        let props = ggml::properties(dev);
        // SAFETY: a registered device.
        let host = unsafe { llama::ggml_backend_dev_host_buffer_type(dev) };
        let pins = !host.is_null();
        Self::by(
            &Declared {
                backend: ggml::backend_name(dev),
                is_integrated: props.type_ == llama::GGML_BACKEND_DEVICE_TYPE_IGPU,
                pins,
                // SAFETY: as above.
                supports_pinned: pins && unsafe { llama::ggml_backend_dev_supports_buft(dev, host) },
                registers: props.caps.buffer_from_host_ptr,
            },
            wanted,
        )
    }

    fn by(declared: &Declared, wanted: UnifiedMemory) -> Self {
        let shares = declared.is_integrated || declared.backend == "MTL";
        // CUDA takes the type from the driver, but does not let ggml's scheduler use pinned memory: it reused inputs
        // while kernels read them (llama.cpp's issue 15034). Expert slots are reused only once their products have
        // run, and kernels take any address that the GPU can read.
        let is_known = declared.supports_pinned || declared.backend == "CUDA";
        let copied = if declared.pins { Self::Pinned } else { Self::Copies };
        if !shares || wanted == UnifiedMemory::Off {
            return copied;
        }
        match declared.pins {
            true if is_known => Self::Unified,
            _ if declared.registers => Self::Shown,
            true if wanted == UnifiedMemory::On => Self::Unified,
            _ => copied,
        }
    }

    /// Whether the device computes in the memory that reads write to.
    pub(crate) fn is_unified(self) -> bool {
        matches!(self, Self::Unified | Self::Shown)
    }
}

/// Host memory, and its registration with the device it was allocated for.
pub(crate) struct HostMemory {
    // Dropped before the arena, whose memory it refers to.
    /// The registration with the device.
    pub(crate) shown: Option<Buffer>,
    pub(crate) arena: Arena,
    /// The buffer, for a device that computes in it.
    pub(crate) buffer: Option<ggml_backend_buffer_t>,
    /// The device it was allocated for.
    pub(crate) dev: Option<ggml_backend_dev_t>,
    /// Whether it is pinned.
    pub(crate) pinned: bool,
}

impl HostMemory {
    /// Memory for no device.
    ///
    /// # Errors
    /// The system refuses the memory.
    pub(crate) fn plain(bytes: usize) -> Result<Self, OpenError> {
        Self::in_arena(Arena::touched_as_needed(bytes), bytes)
    }

    fn in_arena(arena: io::Result<Arena>, bytes: usize) -> Result<Self, OpenError> {
        let arena = arena.map_err(|source| OpenError::OutOfMemory { bytes: bytes as u64, source })?;
        Ok(Self { arena, buffer: None, shown: None, dev: None, pinned: false })
    }

    /// Memory that `dev` reaches as well as it can; plain memory if it pins none. No tensor in it is larger than
    /// `slot_bytes`.
    ///
    /// # Errors
    /// As [`HostMemory::plain`]; a device that computes in host memory refuses it.
    pub(crate) fn of(
        dev: ggml_backend_dev_t,
        reach: Reach,
        bytes: usize,
        slot_bytes: usize,
    ) -> Result<Self, OpenError> {
        match reach {
            Reach::Copies => Self::plain(bytes),
            Reach::Pinned => Self::pinned(dev, bytes).map_or_else(|| Self::plain(bytes), Ok),
            Reach::Unified => Self::pinned(dev, bytes).ok_or_else(|| refused(bytes)),
            Reach::Shown => {
                let mut memory = Self::plain(bytes)?;
                let (base, len) = (memory.arena.as_ptr(), memory.arena.len());
                // SAFETY: the arena is live as long as the buffer: the buffer is dropped before it.
                let shown =
                    unsafe { llama::ggml_backend_dev_buffer_from_host_ptr(dev, base.cast(), len, slot_bytes.min(len)) };
                memory.dev = Some(dev);
                memory.shown = NonNull::new(shown).map(Buffer);
                memory.buffer = (!shown.is_null()).then_some(shown);
                if memory.buffer.is_some() { Ok(memory) } else { Err(refused(bytes)) }
            }
        }
    }

    /// Memory for results of `dev`, `pinned` if that is wanted and the device pins memory.
    ///
    /// # Errors
    /// As [`HostMemory::plain`].
    pub(crate) fn for_results(dev: ggml_backend_dev_t, pinned: bool, bytes: usize) -> Result<Self, OpenError> {
        let pins = pinned && Reach::of(dev, UnifiedMemory::Off) == Reach::Pinned;
        let memory = if pins { Self::pinned(dev, bytes) } else { None };
        memory.map_or_else(|| Self::in_arena(Arena::new(bytes), bytes), Ok)
    }

    /// `None` if the device pins no memory.
    fn pinned(dev: ggml_backend_dev_t, bytes: usize) -> Option<Self> {
        let block = BLOCK_BYTES as usize;
        let bytes = bytes.max(1).next_multiple_of(block);
        // SAFETY: a registered device with a host buffer type.
        let buft = unsafe { llama::ggml_backend_dev_host_buffer_type(dev) };
        let buffer = Buffer::new(buft, bytes + block).filter(|buffer| buffer.is_of(buft))?;
        let (raw, base) = (buffer.raw(), buffer.base().cast::<u8>());
        let base = NonNull::new(base.wrapping_add(base.align_offset(block)))?;
        // SAFETY: the buffer has `bytes` bytes from `base`, and belongs to the arena.
        let arena = unsafe { Arena::borrowed(base, bytes, Box::new(buffer)) };
        Some(Self { arena, buffer: Some(raw), shown: None, dev: Some(dev), pinned: true })
    }
}

/// Experts of such a device can be computed only in these host slots.
fn refused(bytes: usize) -> OpenError {
    let source = io::Error::new(io::ErrorKind::OutOfMemory, "the device cannot compute in so much of it");
    OpenError::OutOfMemory { bytes: bytes as u64, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_used_in_place_where_the_device_can_and_the_options_allow_it() {
        use Reach::{Copies, Pinned, Shown, Unified};
        let device = |backend: &str, is_integrated, [pins, supports_pinned, registers]: [bool; 3]| Declared {
            backend: backend.to_owned(),
            is_integrated,
            pins,
            supports_pinned,
            registers,
        };
        for (declared, [auto, on, off]) in [
            // A Jetson, and a discrete GPU.
            (device("CUDA", true, [true, false, false]), [Unified, Unified, Pinned]),
            (device("CUDA", false, [true, false, false]), [Pinned, Pinned, Pinned]),
            (device("MTL", false, [false, false, true]), [Shown, Shown, Copies]),
            (device("Vulkan", true, [true, false, false]), [Pinned, Unified, Pinned]),
            (device("X", true, [true, true, false]), [Unified, Unified, Pinned]),
            (device("X", true, [false, false, false]), [Copies, Copies, Copies]),
            (device("RPC", false, [false, false, false]), [Copies, Copies, Copies]),
        ] {
            let reach = |wanted| Reach::by(&declared, wanted);
            let found = [UnifiedMemory::Auto, UnifiedMemory::On, UnifiedMemory::Off].map(reach);
            assert_eq!(found, [auto, on, off], "{declared:?}");
        }
    }
}
