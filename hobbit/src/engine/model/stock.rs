//! Plain llama.cpp for comparison: its own loader and scheduler, without hobbit's.
//!
//! It follows recorded routes by llama.cpp's evaluation callback, which stops after each router, and overwrites the
//! router's experts and weights with the recording's. Each stop breaks the graph, which hobbit's seam does not;
//! [`Mode`] measures that cost.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ggml_sys::llama;
use ggml_sys::llama::ggml_tensor;

use crate::engine::error::{EvalError, OpenError, TokenizeError};
use crate::engine::ggml::context::Context;
use crate::engine::ggml::params::{NEVER_INTERRUPTED, Overrides, context_params};
use crate::engine::ggml::raw::{RawModel, with_batch};
use crate::engine::ggml::{self, log};
use crate::engine::gpu::devices;
use crate::engine::seam::hook::{Asked, EvalHook, Watcher};
use crate::engine::session::BatchToken;
use crate::engine::source::adapters::CheckedAdapters;
use hobbit_core::gguf::{Gguf, LayerExperts};
use hobbit_core::options::{AdapterOptions, DeviceOptions, Repack, RouteOptions, SessionOptions, SplitMode, Token};
use hobbit_core::trace::{Routes, Walk};

/// Experts of a layer, by the names that llama.cpp matches to keep them on the CPU.
const EXPERTS: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";

/// How llama.cpp loads a model.
#[derive(Clone, Debug, PartialEq)]
pub struct StockOptions {
    /// As in [`ModelOptions`](crate::ModelOptions); settings for the expert cache have no effect here.
    pub device: DeviceOptions,
    /// Layers on devices; -1 lets llama.cpp choose.
    pub n_gpu_layers: i32,
    /// `none`, `mmap`, `mlock`, `mmap+mlock` or `dio`; `None` lets llama.cpp choose.
    pub load_mode: Option<String>,
    /// Weights to repack for the CPU (`use_extra_bufts`); all with [`Repack::Auto`], llama.cpp's default.
    pub repack: Repack,
    /// Routes that tokens follow instead of the routers' choices.
    pub routes: Option<RouteOptions>,
    /// LoRA adapters and control vectors.
    pub adapters: AdapterOptions,
}

/// A buffer type of ordinary memory other than the CPU's own, under which llama.cpp would repack: that of mapped files.
fn plain_memory() -> Option<llama::ggml_backend_buffer_type_t> {
    #[repr(align(64))]
    struct Line([u8; 64]);
    let mut memory = Line([0; 64]);
    // SAFETY: the buffer holds no tensor and ends before its memory; its type is a constant.
    unsafe {
        let buffer = llama::ggml_backend_cpu_buffer_from_ptr(memory.0.as_mut_ptr().cast(), memory.0.len());
        if buffer.is_null() {
            return None;
        }
        let buft = llama::ggml_backend_buffer_get_type(buffer);
        llama::ggml_backend_buffer_free(buffer);
        Some(buft)
    }
}

/// A model and a context of plain llama.cpp. After a [`Model`](crate::Model) was opened in the process, ggml knows
/// hobbit's device as well, so a comparison runs each in its own process.
pub struct Stock {
    // Dropped before the model, which it reads, and the callback.
    context: Context,
    model: RawModel,
    n_batch: usize,
    followed: Option<EvalHook<Followed>>,
}

impl Stock {
    /// Loads a model and makes a context.
    ///
    /// # Errors
    /// An error from llama.cpp; unknown devices and buffer types.
    pub fn open(path: &Path, options: &StockOptions, session: &SessionOptions) -> Result<Self, OpenError> {
        let load = |reason: String| OpenError::Load { path: path.to_owned(), reason };
        let followed =
            options.routes.as_ref().map(|routes| Followed::open(path, routes)).transpose()?.map(EvalHook::new);
        ggml::ready();
        // SAFETY: returns a struct of plain values.
        let mut params = unsafe { llama::llama_model_default_params() };
        let mut chosen = devices::by_name(&options.device)?;
        let mut overrides = Overrides::default();
        overrides.add(&options.device.override_tensors, chosen.as_deref().unwrap_or_default())?;
        for layer in 0..options.device.n_cpu_moe.min(512) {
            let pattern = CString::new(format!(r"blk\.{layer}{EXPERTS}")).expect("digits and constants");
            // SAFETY: takes no arguments and returns a constant.
            overrides.push(pattern, unsafe { llama::ggml_backend_cpu_buffer_type() });
        }
        if options.repack == Repack::Ordinary {
            let pattern = CString::new(EXPERTS).expect("a constant without NUL");
            overrides.push(pattern, plain_memory().ok_or_else(|| load("the CPU has no plain memory".to_owned()))?);
        }
        // SAFETY: takes no arguments and returns a constant.
        let mut split = vec![0.0; unsafe { llama::llama_max_devices() }];
        for (to, from) in split.iter_mut().zip(&options.device.tensor_split) {
            *to = *from;
        }
        if let Some(devices) = &mut chosen {
            params.devices = devices.as_mut_ptr();
        }
        params.tensor_buft_overrides = overrides.end();
        params.tensor_split = split.as_ptr();
        params.n_gpu_layers = options.n_gpu_layers;
        params.main_gpu = i32::try_from(options.device.main).unwrap_or(i32::MAX);
        params.split_mode = match options.device.split {
            SplitMode::None => llama::LLAMA_SPLIT_MODE_NONE,
            SplitMode::Layer => llama::LLAMA_SPLIT_MODE_LAYER,
        };
        params.use_extra_bufts = options.repack != Repack::Off;
        if let Some(mode) = &options.load_mode {
            let mode = CString::new(mode.as_str()).map_err(|_| load("no such load mode".to_owned()))?;
            // SAFETY: the text is NUL-terminated.
            params.load_mode = unsafe { llama::llama_load_mode_from_str(mode.as_ptr()) };
        }
        log::clear_errors();
        let with_reason = |message: String| match log::take_errors() {
            logged if message.is_empty() => load(logged),
            _ => load(message),
        };
        // SAFETY: everything that params point to outlives the call.
        let model = unsafe { RawModel::load_path(path, params) }.map_err(with_reason)?;
        let adapters = match options.adapters.is_empty() {
            true => None,
            false => {
                let gguf = Gguf::open(path)?;
                Some(CheckedAdapters::read(&options.adapters, &gguf)?.load(&model, &gguf)?)
            }
        };
        let mut params = context_params(session, &raw const NEVER_INTERRUPTED);
        params.op_offload = options.device.op_offload;
        if let Some(followed) = &followed {
            followed.install(&mut params);
        }
        // SAFETY: the model and the callback's state outlive the context.
        let context = unsafe { Context::new(&model, params) }.map_err(with_reason)?;
        adapters.iter().try_for_each(|adapters| adapters.begin(&context))?;
        Ok(Self { model, context, n_batch: session.n_batch.max(1) as usize, followed })
    }

    /// Uses every tensor once, experts included, as llama-cli does before it begins. The
    /// context is empty afterwards.
    ///
    /// # Errors
    /// [`EvalError::Decode`].
    pub fn touch_all(&mut self) -> Result<(), EvalError> {
        let context = self.context.as_ptr();
        // SAFETY: the context is live.
        unsafe { llama::llama_set_warmup(context, true) };
        // Two tokens, as llama-cli: llama.cpp computes a single token on the last token's graph, which contains all
        // experts.
        let fed = self.feed(&[0, 0]);
        // SAFETY: as above.
        unsafe { llama::llama_set_warmup(context, false) };
        self.clear();
        fed
    }

    /// Evaluates tokens after the context's content; keeps the logits of the last token.
    ///
    /// # Errors
    /// [`EvalError::Decode`].
    pub fn feed(&mut self, tokens: &[Token]) -> Result<(), EvalError> {
        for piece in tokens.chunks(self.n_batch) {
            let mut piece = piece.to_vec();
            // SAFETY: the batch borrows `piece`, which outlives its evaluation.
            let decoded = unsafe {
                let batch = llama::llama_batch_get_one(piece.as_mut_ptr(), piece.len() as i32);
                self.context.decode(batch, false)
            };
            answer(decoded)?;
        }
        Ok(())
    }

    /// Evaluates entries with explicit positions, at most one batch; keeps the logits of entries that ask for them.
    ///
    /// # Errors
    /// [`EvalError::Decode`].
    pub fn evaluate(&mut self, batch: &[BatchToken]) -> Result<(), EvalError> {
        // SAFETY: the batch is valid for the call.
        answer(with_batch(batch, |raw| unsafe { self.context.decode(raw, false) }))
    }

    /// Logits of the last token, `[n_vocab]`; `None` before the first.
    pub fn logits(&self) -> Option<&[f32]> {
        self.context.logits(-1, self.n_vocab())
    }

    /// Logits of an entry of the last batch, `[n_vocab]`; `None` if it asked for none.
    pub fn logits_of(&self, index: usize) -> Option<&[f32]> {
        self.context.logits(i32::try_from(index).ok()?, self.n_vocab())
    }

    /// Empties the context.
    pub fn clear(&mut self) {
        self.context.clear();
        self.followed.iter().for_each(|followed| followed.lock().walk.rewind());
    }

    /// Extra seconds per token for following routes, because the graph stops after every router; `None` if no routes
    /// are followed. Excludes the time for the routes themselves: it repeats one token's own routes with and without
    /// stops, which reads nothing. The context is empty afterwards.
    ///
    /// # Errors
    /// [`EvalError::Decode`].
    pub fn seconds_of_stops(&mut self) -> Result<Option<f64>, EvalError> {
        let mut times = [Vec::new(), Vec::new()];
        // The first round loads the experts it needs.
        for round in 0..9 {
            for mode in [Mode::Pass, Mode::Stop, Mode::Stop, Mode::Pass] {
                let Some(followed) = &self.followed else { return Ok(None) };
                followed.lock().mode = mode;
                self.clear();
                let started = Instant::now();
                self.feed(&[0])?;
                if round > 0 {
                    times[usize::from(mode == Mode::Stop)].push(started.elapsed().as_secs_f64());
                }
            }
        }
        self.followed.iter().for_each(|followed| followed.lock().mode = Mode::Follow);
        self.clear();
        let [passed, stopped] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        Ok(Some(stopped - passed))
    }

    /// Tokens of a text, without special ones.
    ///
    /// # Errors
    /// Text that the vocabulary cannot encode.
    pub fn tokenize(&self, text: &str) -> Result<Vec<Token>, TokenizeError> {
        self.model.tokenize(text.as_bytes(), false, false).map_err(TokenizeError)
    }

    /// The token that begins every text, if the model wants one.
    pub fn bos(&self) -> Option<Token> {
        let vocab = self.model.vocab();
        // SAFETY: the vocabulary is live.
        unsafe { llama::llama_vocab_get_add_bos(vocab).then(|| llama::llama_vocab_bos(vocab)) }
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.model.n_vocab()
    }

    /// Bytes of the text that a token stands for, special tokens left out.
    pub fn piece(&self, token: Token) -> Vec<u8> {
        self.model.piece(token, false)
    }

    /// llama.cpp's description of the model, bytes of its tensors, and parameters.
    pub fn describe(&self) -> (String, u64, u64) {
        self.model.describe()
    }
}

fn answer((code, thrown): (i32, String)) -> Result<(), EvalError> {
    match code {
        0 => Ok(()),
        _ => Err(EvalError::Decode(format!("llama_decode answers {code}: {thrown}{}", log::take_errors()))),
    }
}

/// The callback's action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Stops and writes.
    Follow,
    /// Only stops: routers choose.
    Stop,
    /// Does nothing.
    Pass,
}

/// Writes recorded routes over the routers' choices.
struct Followed {
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
    /// [`OpenError::Gguf`], [`OpenError::Trace`].
    fn open(path: &Path, options: &RouteOptions) -> Result<Self, OpenError> {
        let gguf = Gguf::open(path)?;
        let layers = gguf.experts()?.layers;
        let of =
            |layer: &LayerExperts| (layer.layer, layer.n_expert as usize, gguf.n_expert_used(layer.layer) as usize);
        let shape: Vec<_> = layers.iter().map(of).collect();
        let routes = Arc::new(Routes::open(&options.trace, &shape)?);
        Ok(Self {
            walk: Walk::new(routes, options.recall),
            mode: Mode::Follow,
            tokens: Vec::new(),
            weights: HashMap::new(),
            last_layer: None,
            knows_weights: false,
        })
    }
}

impl Watcher for Followed {
    fn wants(&self, asked: Asked, name: &str) -> bool {
        match asked {
            _ if self.mode == Mode::Pass => false,
            Asked::Logits(_) => false,
            Asked::Experts(_) => true,
            Asked::Weights(layer) => !self.knows_weights || self.weights.get(&layer).is_some_and(|last| last == name),
        }
    }

    unsafe fn take(&mut self, asked: Asked, name: &str, tensor: &ggml_tensor) {
        if self.mode != Mode::Follow {
            return;
        }
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
            Asked::Logits(_) => {}
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
