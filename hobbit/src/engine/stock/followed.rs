//! Recorded routes for plain llama.cpp: its evaluation callback stops after each router, and overwrites the router's
//! experts and weights with the recording's. Each stop breaks the graph, which hobbit's seam does not; [`Mode`]
//! measures that cost.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ggml_sys::llama::{self, ggml_tensor};

use crate::engine::error::Error;
use crate::engine::hook::{Asked, asked};
use hobbit_core::gguf::Gguf;
use hobbit_core::options::RouteOptions;
use hobbit_core::trace::{Routes, Walk};

/// The callback's action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Stops and writes.
    Follow,
    /// Only stops: routers choose.
    Stop,
    /// Does nothing.
    Pass,
}

/// The callback, installed while this lives.
pub(super) struct Followed(Arc<Shared>);

type Shared = Mutex<State>;

/// State of the callback, which holds its address.
struct State {
    walk: Walk,
    mode: Mode,
    /// Each token's experts and weights in the current layer.
    tokens: Vec<(Vec<u16>, Vec<f32>)>,
    /// By layer, the tensor with the final weights; once it is known, earlier ones need no stop.
    weights: HashMap<u16, String>,
    last_layer: Option<u16>,
    knows_weights: bool,
}

impl Followed {
    /// For the model at `path`, as its header describes it.
    ///
    /// # Errors
    /// [`Error::Gguf`], [`Error::Trace`].
    pub(super) fn open(path: &Path, options: &RouteOptions) -> Result<Self, Error> {
        let gguf = Gguf::open(path)?;
        let n_used = gguf.metadata.get_u64(&format!("{}.expert_used_count", gguf.architecture())).unwrap_or(0) as usize;
        let layers = gguf.experts()?.layers;
        let shape: Vec<_> = layers.iter().map(|layer| (layer.layer, layer.n_expert as usize, n_used)).collect();
        let routes = Arc::new(Routes::open(&options.trace, &shape)?);
        Ok(Self(Arc::new(Mutex::new(State {
            walk: Walk::new(routes, options.recall),
            mode: Mode::Follow,
            tokens: Vec::new(),
            weights: HashMap::new(),
            last_layer: None,
            knows_weights: false,
        }))))
    }

    /// Makes `params` call back into the state, which must outlive the context.
    pub(super) fn install(&self, params: &mut llama::llama_context_params) {
        params.cb_eval = Some(on_eval);
        params.cb_eval_user_data = Arc::as_ptr(&self.0).cast_mut().cast();
    }

    pub(super) fn set_mode(&self, mode: Mode) {
        lock(&self.0).mode = mode;
    }

    /// Returns to the first token.
    pub(super) fn rewind(&self) {
        lock(&self.0).walk.rewind();
    }
}

fn lock(state: &Shared) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn wants(&self, asked: Asked, name: &str) -> bool {
        match asked {
            _ if self.mode == Mode::Pass => false,
            Asked::Experts(_) => true,
            Asked::Weights(layer) => !self.knows_weights || self.weights.get(&layer).is_some_and(|last| last == name),
        }
    }

    /// # Safety
    /// `tensor` is computed.
    unsafe fn write(&mut self, asked: Asked, name: &str, tensor: &ggml_tensor) {
        match asked {
            Asked::Experts(layer) => {
                self.knows_weights |= self.last_layer.is_some_and(|last| layer <= last);
                self.last_layer = Some(layer);
                self.tokens = self.walk.enter(layer, tensor.ne[1].max(0) as usize);
                // A warm-up uses all experts.
                self.tokens.retain(|(chosen, _)| chosen.len() as i64 == tensor.ne[0]);
                for (token, (chosen, _)) in self.tokens.iter().enumerate() {
                    let ids: Vec<i32> = chosen.iter().map(|&expert| expert.into()).collect();
                    // SAFETY: by the caller; a token's ids lie side by side.
                    unsafe { set(tensor, &ids, token * tensor.nb[1], tensor.nb[0]) };
                }
            }
            Asked::Weights(layer) => {
                if !self.knows_weights {
                    self.weights.insert(layer, name.to_owned());
                }
                // [1, n_used, n_tokens] or [n_used, n_tokens].
                let n_used = self.tokens.first().map_or(0, |(chosen, _)| chosen.len());
                let d = usize::from(tensor.ne[0] != n_used as i64 || tensor.ne[2] > 1);
                for (token, (_, weights)) in self.tokens.iter().enumerate() {
                    // SAFETY: by the caller.
                    unsafe { set(tensor, weights, token * tensor.nb[d + 1], tensor.nb[d]) };
                }
            }
        }
    }
}

/// Writes values at intervals of `stride` bytes.
///
/// # Safety
/// The tensor is allocated and has room for them at these offsets.
unsafe fn set<T>(tensor: &ggml_tensor, values: &[T], offset: usize, stride: usize) {
    let tensor = std::ptr::from_ref(tensor).cast_mut();
    for (i, value) in values.iter().enumerate() {
        // SAFETY: by the caller.
        unsafe {
            llama::ggml_backend_tensor_set(
                tensor,
                std::ptr::from_ref(value).cast(),
                offset + i * stride,
                size_of::<T>(),
            );
        }
    }
}

unsafe extern "C" fn on_eval(tensor: *mut ggml_tensor, ask: bool, state: *mut c_void) -> bool {
    // SAFETY: ggml passes a live tensor with a NUL-terminated name; `install` passed the state, which outlives the
    // context.
    let (tensor, state) = unsafe { (&*tensor, &*state.cast::<Shared>()) };
    let mut state = lock(state);
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(tensor.name.as_ptr()) }.to_str().unwrap_or_default();
    let asked = asked(name).filter(|&asked| state.wants(asked, name));
    if ask {
        return asked.is_some();
    }
    if let Some(asked) = asked.filter(|_| state.mode == Mode::Follow) {
        // SAFETY: the tensor was just computed.
        let _ = catch_unwind(AssertUnwindSafe(|| unsafe { state.write(asked, name, tensor) }));
    }
    true
}
