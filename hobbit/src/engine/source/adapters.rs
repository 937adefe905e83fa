//! LoRA adapters and control vectors: llama.cpp's additions to ordinary weights and to the outputs of layers.

use std::path::PathBuf;
use std::ptr::NonNull;

use ggml_sys::llama::{self, llama_adapter_lora};
use ggml_sys::shim;

use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::context::Context;
use crate::engine::ggml::log;
use crate::engine::ggml::raw::{RawModel, with_message};
use hobbit_core::gguf::Gguf;
use hobbit_core::gguf::adapter::{AdapterError, Directions, LoraSummary, check_lora, read_directions};
use hobbit_core::options::{AdapterOptions, SessionOptions};

/// A loaded LoRA adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterInfo {
    /// Its file.
    pub path: PathBuf,
    /// The scale with which sessions begin.
    pub scale: f32,
    /// `adapter.lora.task_name`, or empty.
    pub task_name: String,
    /// `adapter.lora.prompt_prefix`, or empty.
    pub prompt_prefix: String,
}

/// Adapters whose headers fit the model.
pub(crate) struct CheckedAdapters {
    options: AdapterOptions,
    lora: Vec<LoraSummary>,
}

impl CheckedAdapters {
    /// # Errors
    /// [`OpenError::Adapter`].
    pub(crate) fn read(options: &AdapterOptions, model: &Gguf) -> Result<Self, OpenError> {
        let check = |file: &hobbit_core::options::ScaledFile| check_lora(&file.path, model);
        let lora = options.lora.iter().map(check).collect::<Result<_, _>>()?;
        Ok(Self { options: options.clone(), lora })
    }

    /// Bytes of their weights.
    pub(crate) fn bytes(&self) -> u64 {
        self.lora.iter().fold(0, |sum, lora| sum.saturating_add(lora.bytes))
    }

    pub(crate) fn summaries(&self) -> &[LoraSummary] {
        &self.lora
    }

    /// Checks that no adapter changes experts that hobbit manages: their bytes come unchanged from the model's file.
    ///
    /// # Errors
    /// [`AdapterError::OfExperts`].
    pub(crate) fn leave_experts(&self) -> Result<(), OpenError> {
        for (file, lora) in self.options.lora.iter().zip(&self.lora) {
            if let Some(tensor) = &lora.of_experts {
                let (path, tensor) = (file.path.clone(), tensor.clone());
                return Err(AdapterError::OfExperts { path, tensor }.into());
            }
        }
        Ok(())
    }

    /// Loads them into llama.cpp, which frees them with the model.
    ///
    /// # Errors
    /// [`OpenError::Adapter`].
    pub(crate) fn load(self, raw: &RawModel, model: &Gguf) -> Result<Adapters, OpenError> {
        let mut lora = Vec::new();
        for (file, summary) in self.options.lora.iter().zip(self.lora) {
            let unusable = |fault| AdapterError::Unusable { path: file.path.clone(), kind: "LoRA adapter", fault };
            let name = ggml::c_path(&file.path).map_err(&unusable)?;
            log::clear_errors();
            // SAFETY: the model is live, the name NUL-terminated.
            let load = |message, capacity| unsafe {
                shim::hobbit_adapter_load(raw.as_ptr(), name.as_ptr(), message, capacity)
            };
            let adapter = with_message(load).map_err(|message| match log::take_errors() {
                logged if message.is_empty() => unusable(logged),
                _ => unusable(message),
            })?;
            if summary.n_left_out > 0 {
                log::notice(format_args!(
                    "{}: {} norm vectors of this LoRA adapter are left out, as llama.cpp leaves them",
                    file.path.display(),
                    summary.n_left_out
                ));
            }
            let info = AdapterInfo {
                path: file.path.clone(),
                scale: file.scale,
                task_name: summary.task_name.clone(),
                prompt_prefix: summary.prompt_prefix.clone(),
            };
            lora.push(Lora { raw: adapter, info });
        }
        let AdapterOptions { control_vectors, control_layers, .. } = self.options;
        let directions = match control_vectors.is_empty() {
            true => None,
            false => {
                Some(read_directions(control_vectors.iter().map(|file| (file.path.as_path(), file.scale)), model)?)
            }
        };
        Ok(Adapters { lora, directions, layers: control_layers })
    }
}

/// Bytes by which a session's graphs may exceed llama.cpp's first estimate.
pub(crate) fn graph_bytes(lora: &[LoraSummary], session: &SessionOptions) -> u64 {
    let n_rows = u64::from(session.n_ubatch.min(session.n_batch));
    let n_outputs = if session.n_outputs_max == 0 { n_rows } else { n_rows.min(session.n_outputs_max.into()) };
    let bytes = |lora: &LoraSummary| {
        let rows = lora.row_elements.saturating_mul(n_rows);
        rows.max(lora.output_row_elements.saturating_mul(n_outputs)).saturating_mul(4)
    };
    lora.iter().map(bytes).max().unwrap_or(0)
}

/// Adapters loaded with a model.
pub(crate) struct Adapters {
    lora: Vec<Lora>,
    directions: Option<Directions>,
    layers: Option<(u32, u32)>,
}

struct Lora {
    raw: NonNull<llama_adapter_lora>,
    info: AdapterInfo,
}

// SAFETY: immutable after loading; contexts on several threads only read them.
unsafe impl Send for Adapters {}
// SAFETY: as above.
unsafe impl Sync for Adapters {}

impl Adapters {
    pub(crate) fn infos(&self) -> impl ExactSizeIterator<Item = &AdapterInfo> {
        self.lora.iter().map(|lora| &lora.info)
    }

    pub(crate) fn scales(&self) -> Vec<f32> {
        self.infos().map(|info| info.scale).collect()
    }

    /// Applies the requested adapters to a new context.
    ///
    /// # Errors
    /// A control vector that llama.cpp refuses.
    pub(crate) fn begin(&self, context: &Context) -> Result<(), OpenError> {
        self.apply(context, &self.scales());
        let Some(directions) = &self.directions else { return Ok(()) };
        let last = directions.data.len() / (directions.n_embd.max(1) as usize);
        let (first, last) = self.layers.unwrap_or((1, last as u32));
        let whole = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        log::clear_errors();
        // SAFETY: the context is live, the data valid for its length.
        let code = unsafe {
            let (data, len) = (directions.data.as_ptr(), directions.data.len());
            shim::hobbit_set_control_vector(
                context.as_ptr(),
                data,
                len,
                whole(directions.n_embd),
                whole(first),
                whole(last),
            )
        };
        match code {
            0 => Ok(()),
            _ => Err(OpenError::ControlVector(log::take_errors())),
        }
    }

    /// Sets the scale of each adapter for a context's next graphs; a missing scale is 0.
    pub(crate) fn apply(&self, context: &Context, scales: &[f32]) {
        if self.lora.is_empty() {
            return;
        }
        let mut adapters: Vec<*mut llama_adapter_lora> = self.lora.iter().map(|lora| lora.raw.as_ptr()).collect();
        let mut scales: Vec<f32> = scales.iter().copied().chain(std::iter::repeat(0.0)).take(adapters.len()).collect();
        // SAFETY: the context is live, and so is its model, for which the adapters were made; both lists have the same
        // length.
        unsafe {
            llama::llama_set_adapters_lora(
                context.as_ptr(),
                adapters.as_mut_ptr(),
                adapters.len(),
                scales.as_mut_ptr(),
            );
        }
    }
}
