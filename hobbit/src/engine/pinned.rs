//! Host memory that a device reaches directly: pinned, so that copies need no detour, or unified, so that nothing is
//! copied.

use std::io;
use std::ptr::NonNull;

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_dev_t};

use super::error::OpenError;
use super::ggml::{self, Buffer};
use hobbit_core::store::{Arena, BLOCK_BYTES};

/// How a device reaches host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Copies from any host memory.
    Copies,
    /// Copies faster from memory of its host buffer type.
    Pinned,
    /// Computes in memory of its host buffer type.
    Unified,
    /// Computes in any host memory that was registered with it.
    Shown,
}

impl Reach {
    /// As the device reports it.
    pub(super) fn of(dev: ggml_backend_dev_t) -> Self {
        let props = ggml::properties(dev);
        let shares = props.type_ == llama::GGML_BACKEND_DEVICE_TYPE_IGPU || ggml::backend_name(dev) == "MTL";
        // SAFETY: a registered device.
        let host = unsafe { llama::ggml_backend_dev_host_buffer_type(dev) };
        match !host.is_null() {
            // SAFETY: as above.
            true if shares && unsafe { llama::ggml_backend_dev_supports_buft(dev, host) } => Self::Unified,
            _ if shares && props.caps.buffer_from_host_ptr => Self::Shown,
            true => Self::Pinned,
            false => Self::Copies,
        }
    }

    /// Whether the device computes in the memory that reads write to.
    pub(super) fn is_unified(self) -> bool {
        matches!(self, Self::Unified | Self::Shown)
    }
}

/// Host memory, and its registration with the device it was allocated for.
pub(super) struct HostMemory {
    // Dropped before the arena, whose memory it refers to.
    /// The registration with the device.
    pub(super) shown: Option<Buffer>,
    pub(super) arena: Arena,
    /// The buffer, for a device that computes in it.
    pub(super) buffer: Option<ggml_backend_buffer_t>,
    /// The device it was allocated for.
    pub(super) dev: Option<ggml_backend_dev_t>,
    /// Whether it is pinned.
    pub(super) pinned: bool,
}

impl HostMemory {
    /// Memory for no device.
    ///
    /// # Errors
    /// The system refuses the memory.
    pub(super) fn plain(bytes: usize) -> Result<Self, OpenError> {
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
    pub(super) fn of(
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
    pub(super) fn for_results(dev: ggml_backend_dev_t, pinned: bool, bytes: usize) -> Result<Self, OpenError> {
        let pins = pinned && matches!(Reach::of(dev), Reach::Pinned | Reach::Unified);
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
