//! The address of memory that reads fill.

/// Start of a slot's memory. Page-aligned (4096) where it is to be filled by direct reads without a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPtr(*mut u8);

impl SlotPtr {
    /// Names memory that reads may fill.
    ///
    /// # Safety
    /// For every [`super::ReadRequest`] made with this pointer, from its submission to its [`super::ReadDone`] (or to its
    /// withdrawal), the `capacity` bytes at `ptr` must be mapped, initialised, writable from any thread, and
    /// neither read nor written by anyone else.
    pub const unsafe fn new(ptr: *mut u8) -> Self {
        Self(ptr)
    }

    /// The address.
    pub const fn as_ptr(self) -> *mut u8 {
        self.0
    }

    /// So many bytes further, in the same memory.
    pub(super) const fn at(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

// SAFETY: the pointer is only dereferenced for a request in flight, and `SlotPtr::new` makes its caller promise
// that the memory may then be written from any thread.
unsafe impl Send for SlotPtr {}
// SAFETY: a shared `SlotPtr` gives away nothing but the address.
unsafe impl Sync for SlotPtr {}
