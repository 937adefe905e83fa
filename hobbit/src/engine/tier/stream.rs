//! A device's streams and events, owned.
//!
//! A stream is one instance of a ggml backend: what is submitted to it runs in order. Two streams of a device run side by
//! side; events order them.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::rc::Rc;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_backend_t, ggml_tensor};

/// An instance of a device's backend.
pub(in crate::engine) struct Stream(ggml_backend_t);

// SAFETY: a backend may move between threads as long as one uses it at a time, which `&mut` and the owner's lock ensure.
unsafe impl Send for Stream {}

impl Stream {
    /// `None` when the device refuses another stream.
    pub(in crate::engine) fn new(dev: ggml_backend_dev_t) -> Option<Self> {
        // SAFETY: `dev` is a registered device, and those live as long as the process.
        let backend = unsafe { llama::ggml_backend_dev_init(dev, std::ptr::null()) };
        (!backend.is_null()).then_some(Self(backend))
    }

    pub(in crate::engine) fn raw(&self) -> ggml_backend_t {
        self.0
    }

    pub(in crate::engine) fn interface(&self) -> &ffi::ggml_backend_i {
        // SAFETY: the backend is live.
        unsafe { &(*self.0.cast::<ffi::ggml_backend>()).iface }
    }

    /// Copies host bytes into a tensor.
    ///
    /// # Safety
    /// `data` is valid for `bytes` bytes until the stream has run the copy; the tensor is allocated on the device and
    /// has `offset + bytes` bytes.
    pub(in crate::engine) unsafe fn set(
        &self,
        tensor: *mut ggml_tensor,
        data: *const c_void,
        offset: usize,
        bytes: usize,
    ) {
        // SAFETY: by the caller.
        unsafe { llama::ggml_backend_tensor_set_async(self.0, tensor, data, offset, bytes) };
    }

    /// Copies a tensor's bytes to the host.
    ///
    /// # Safety
    /// As [`Stream::set`], for writing.
    pub(in crate::engine) unsafe fn get(
        &self,
        tensor: *const ggml_tensor,
        data: *mut c_void,
        offset: usize,
        bytes: usize,
    ) {
        // SAFETY: by the caller.
        unsafe { llama::ggml_backend_tensor_get_async(self.0, tensor, data, offset, bytes) };
    }

    /// Waits until everything submitted has run.
    pub(in crate::engine) fn synchronize(&self) {
        // SAFETY: the backend is live.
        unsafe { llama::ggml_backend_synchronize(self.0) };
    }

    /// What this stream runs from here on waits for `event`.
    pub(in crate::engine) fn wait(&self, event: &Event) {
        // SAFETY: both are live and of one device.
        unsafe { llama::ggml_backend_event_wait(self.0, event.raw.as_ptr()) };
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once.
        unsafe { llama::ggml_backend_free(self.0) };
    }
}

/// A point in a stream.
pub(in crate::engine) struct Event {
    raw: NonNull<llama::ggml_backend_event>,
}

impl Event {
    /// Waits on the host.
    pub(in crate::engine) fn synchronize(&self) {
        // SAFETY: the event is live and was recorded.
        unsafe { llama::ggml_backend_event_synchronize(self.raw.as_ptr()) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `Events::record`, freed once.
        unsafe { llama::ggml_backend_event_free(self.raw.as_ptr()) };
    }
}

/// Makes events, and uses those again that nobody waits for any more.
pub(in crate::engine) struct Events {
    dev: ggml_backend_dev_t,
    known: Vec<Rc<Event>>,
}

// SAFETY: the counted events never leave the tier that owns this value, which one thread uses at a time.
unsafe impl Send for Events {}

impl Events {
    pub(in crate::engine) fn new(dev: ggml_backend_dev_t) -> Self {
        Self { dev, known: Vec::new() }
    }

    /// Waits on the host for every event that was recorded. Not for one that nobody is sure will be reached.
    pub(in crate::engine) fn synchronize(&self) {
        self.known.iter().for_each(|event| event.synchronize());
    }

    /// The point that `stream` has been told to reach. `None` on devices without events: the stream has then been waited
    /// for instead.
    pub(in crate::engine) fn record(&mut self, stream: &Stream) -> Option<Rc<Event>> {
        let free = self.known.iter().find(|event| Rc::strong_count(event) == 1).cloned();
        let event = match free {
            Some(event) => event,
            None => {
                // SAFETY: the device is live as long as the process.
                let raw = NonNull::new(unsafe { llama::ggml_backend_event_new(self.dev) });
                let Some(raw) = raw else {
                    stream.synchronize();
                    return None;
                };
                self.known.push(Rc::new(Event { raw }));
                Rc::clone(self.known.last().expect("just pushed"))
            }
        };
        // SAFETY: both are live and of one device.
        unsafe { llama::ggml_backend_event_record(event.raw.as_ptr(), stream.raw()) };
        Some(event)
    }
}
