//! An open model: its vocabulary, its ordinary weights in memory, its experts left in the file.

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use ggml_sys::{llama, shim};

use super::backends;
use super::buffer::while_loading;
use super::chat::{self, ChatMessage, ChatOptions};
use super::device::Device;
use super::error::Error;
use super::experts::Experts;
use super::fitted::Fitted;
use super::hook::RouterObserver;
use super::log;
use super::placement::{DeviceLayers, Placement};
use super::precision::Precisions;
use super::regime;
use super::sanity;
use super::session::Session;
use super::source::ModelSource;
use super::stream::CookieStream;
use super::validate;
use crate::expert::ExpertId;
use crate::gguf::{Catalog, Gguf};
use crate::options::{KvValue, ModelOptions, SessionOptions, Token};
use crate::plan::{ExpertCache, Regime};
use crate::predict::{PathTable, PredictShape};
use crate::profile::ProfileError;
use crate::route::Thresholds;
use crate::stats::DeviceReport;
use crate::store::{Original, Store};

/// Room for a message from the shim, in bytes.
const MESSAGE_BYTES: usize = 1024;

/// Wraps a store, for tests that inject faults.
pub(super) type WrapStore = Box<dyn Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync>;

/// What is known about an open model.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ModelInfo {
    /// llama.cpp's one-line description, such as `llama 8x7B Q8_0`.
    pub description: String,
    /// `general.architecture`.
    pub architecture: String,
    /// The file that was opened (the first shard of a split model).
    pub path: PathBuf,
    /// Context length the model was trained with, in tokens.
    pub n_ctx_train: u32,
    /// Number of parameters.
    pub n_params: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all expert weights.
    pub expert_bytes: u64,
    /// Blocks.
    pub n_layer: u32,
    /// Experts per MoE layer (the largest number); 0 for a dense model.
    pub n_expert: u32,
    /// Experts used per token.
    pub n_expert_used: u32,
    /// The model's own chat template, if it has one.
    pub chat_template: Option<String>,
}

impl ModelInfo {
    /// Whether hobbit serves the experts; a dense model runs as plain llama.cpp.
    pub fn is_moe(&self) -> bool {
        self.n_expert > 0
    }
}

/// An open model. Cheap to share: sessions keep it alive.
#[derive(Clone)]
pub struct Model {
    pub(super) shared: Arc<Shared>,
}

/// What sessions of a model share.
pub(super) struct Shared {
    raw: NonNull<llama::llama_model>,
    gguf: Gguf,
    pub(super) experts: Arc<Experts>,
    /// Where every version of every expert lies, in `files`.
    pub(super) catalog: Catalog,
    pub(super) files: Vec<PathBuf>,
    /// The same, as they were when their headers were read; open.
    pub(super) originals: Vec<Original>,
    pub(super) low_name: Option<String>,
    pub(super) precisions: Precisions,
    /// How its experts are run; of a dense model as if there were any.
    pub(super) regime: Regime,
    pub(super) fitted: Option<Fitted>,
    /// The devices that hold layers.
    pub(super) placement: Vec<DeviceLayers>,
    pub(super) options: ModelOptions,
    /// Which experts follow which, if a predictor wants to know.
    pub(super) path_table: Option<Arc<PathTable>>,
    pub(super) wrap_store: Option<WrapStore>,
    pub(super) load_time: Duration,
    pub(super) opened_at: Instant,
    info: ModelInfo,
    expert_bytes_read_at_load: u64,
}

// SAFETY: a llama_model is immutable after loading; llama.cpp shares it among contexts on several threads.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// That what was loaded is what the headers were read of. By itself llama.cpp opens models by their names.
    fn check_loaded(&self) -> Result<(), Error> {
        for original in &self.originals {
            original.check()?;
            if self.experts.map().is_empty() || self.regime.stands_aside() {
                Original::open(original.path(), original.state())?;
            }
        }
        Ok(())
    }

    /// Why what was read last may be of another model: a file was written to. Words for it.
    pub(super) fn written_to(&self) -> Option<String> {
        let changed = self.originals.iter().find_map(|original| original.check_unwritten().err());
        changed.map(|error| error.to_string())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: loaded by us; every context holds an `Arc` of this value and is gone.
        unsafe { llama::llama_model_free(self.raw.as_ptr()) };
    }
}

impl Model {
    /// Opens `path`, any shard of a split model included. Ordinary weights are read into memory, experts stay in the
    /// file. `progress` is called with 0..=1 and stops loading by answering false.
    ///
    /// # Errors
    /// A damaged, incomplete or unsupported file ([`Error::Gguf`], [`Error::Load`]), an I/O error, a cancelled load; a profile
    /// that cannot be used ([`Error::Fitted`]) or is missing ([`Error::NoPenalties`]).
    pub fn open(path: &Path, options: &ModelOptions, progress: impl FnMut(f32) -> bool) -> Result<Model, Error> {
        Self::load(path, options, None, progress)
    }

    /// As [`Model::open`]; every read of an expert goes through the store that `wrap` makes of the real one.
    #[doc(hidden)]
    pub fn open_with_store(
        path: &Path,
        options: &ModelOptions,
        wrap: impl Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync + 'static,
    ) -> Result<Model, Error> {
        Self::load(path, options, Some(Box::new(wrap)), |_| true)
    }

    fn load(
        path: &Path,
        options: &ModelOptions,
        wrap_store: Option<WrapStore>,
        mut progress: impl FnMut(f32) -> bool,
    ) -> Result<Model, Error> {
        let started = Instant::now();
        options.check_outputs(path)?;
        let source = ModelSource::open(path, options, &mut progress)?;
        sanity::check(&source.gguf, options)?;
        backends::ready();
        let regime = match source.map.is_empty() || wrap_store.is_some() {
            true => Regime::Seam,
            false => regime::choose(&source, options)?,
        };
        let ModelSource {
            gguf,
            virtual_file,
            map,
            mut catalog,
            files,
            low_name,
            mode,
            thresholds,
            path_table,
            fitted,
            ..
        } = source;
        let originals: Vec<Original> =
            files.iter().map(|file| Original::open(&file.path, file.state)).collect::<Result<_, _>>()?;
        let files: Vec<PathBuf> = files.into_iter().map(|file| file.path).collect();
        let mut placement = Placement::new(options, &gguf, &map, &catalog)?;
        let experts = Arc::new(Experts::new(map));
        Device::get()?;
        log::install();
        static INIT: Once = Once::new();
        // SAFETY: once per process, before any other llama.cpp call of ours.
        INIT.call_once(|| unsafe { llama::llama_backend_init() });

        // Where experts have no memory, llama.cpp could only look at their addresses.
        let is_plain = experts.map().is_empty() || regime.stands_aside();
        let is_checked_here = options.check_tensors && !is_plain;
        if is_checked_here {
            validate::check(&gguf, experts.map(), &catalog, &files, &mut progress)?;
        }
        let overrides = KvOverrides::new(options);
        let mut progress = Progress { callback: &mut progress, cancelled: false };
        // SAFETY: returns a struct of plain values.
        let mut params = unsafe { llama::llama_model_default_params() };
        placement.apply(&mut params, !is_plain);
        params.check_tensors = options.check_tensors && !is_checked_here;
        params.kv_overrides = overrides.as_ptr();
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut progress).cast();

        log::clear_errors();
        let mut expert_bytes_read_at_load = 0;
        let raw = if is_plain {
            if let Regime::StandAside { repack } = regime {
                params.use_extra_bufts = repack && options.repack;
            }
            let name = path_to_c(&gguf.files[0].path)?;
            with_message(|message, capacity| {
                // SAFETY: name and params are valid for the call.
                unsafe { shim::hobbit_model_load_path(name.as_ptr(), params, message, capacity) }
            })
        } else {
            params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
            params.use_extra_bufts = false;
            let mut stream = CookieStream::open(virtual_file, &originals)?;
            let are_skipped = stream.skips_experts();
            let file = stream.as_file();
            let raw = while_loading(&experts, are_skipped, || {
                with_message(|message, capacity| {
                    // SAFETY: the stream outlives the call; so does everything that params point to.
                    unsafe { shim::hobbit_model_load(file, params, message, capacity) }
                })
            });
            expert_bytes_read_at_load = stream.expert_bytes_read();
            raw.map_err(|message| stream.error().map_or(message, str::to_owned))
        };
        let cancelled = progress.cancelled;
        let raw = raw.map_err(|message| {
            if cancelled {
                return Error::Cancelled;
            }
            let reasons = [message, experts.take_failure().unwrap_or_default(), log::take_errors()];
            let reason = reasons.into_iter().find(|reason| !reason.is_empty());
            let reason = reason.unwrap_or_else(|| "it gave no reason".to_owned());
            Error::Load { path: gguf.files[0].path.clone(), reason }
        })?;

        if !regime.stands_aside() {
            experts.loaded();
        }
        catalog.retain_layers(|layer| experts.map().layer(layer).is_some());
        let info = describe(raw, &gguf, &experts, options);
        let mut shared = Shared {
            raw,
            gguf,
            experts,
            catalog,
            files,
            originals,
            low_name,
            placement: placement.devices,
            precisions: Precisions::new(mode, thresholds, options.precision),
            regime,
            fitted,
            options: options.clone(),
            path_table: None,
            wrap_store,
            load_time: started.elapsed(),
            opened_at: started,
            info,
            expert_bytes_read_at_load,
        };
        shared.check_loaded()?;
        shared.path_table = checked_path_table(path_table, &predict_shape(&shared.catalog, &shared.info))?;
        let model = Model { shared: Arc::new(shared) };
        model.check_fitted()?;
        Ok(model)
    }

    /// What is known about the model.
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// Whether llama.cpp runs the model by itself, because all of it fits, or hobbit keeps its experts.
    pub fn regime(&self) -> Regime {
        self.shared.regime
    }

    /// Changes T1 and T2 for every session of the model, from the next evaluation on.
    pub fn set_thresholds(&self, thresholds: Thresholds) {
        if let Some(residency) = self.shared.experts.residency().as_mut() {
            residency.precisions.thresholds = thresholds;
        }
    }

    /// Has these experts used in low precision whatever else holds, where they have a low version; replaces the last
    /// such list. Only in dynamic mode, and once the model has a session. For measuring sensitivity.
    pub fn force_low(&self, experts: impl IntoIterator<Item = ExpertId>) {
        if let Some(residency) = self.shared.experts.residency().as_mut() {
            residency.precisions.forced_low = experts.into_iter().collect();
        }
    }

    /// Bytes of host memory that the cache may fill now; 0 before the first session.
    pub fn host_cache_bytes(&self) -> u64 {
        self.shared.experts.residency().as_ref().map_or(0, |residency| residency.host_cache_bytes())
    }

    /// Makes the cache in host memory smaller, or gives it back what it had: at most what was planned at the start, which is
    /// also what [`ExpertCache::Auto`] means. Experts that lose their slot are read again when they are needed; results stay
    /// the same, except that dynamic precision depends on what is resident. Takes effect at once, between two layers of an
    /// evaluation that runs elsewhere. Memory that is pinned for a device stays as it is.
    ///
    /// Says how many bytes the cache may fill now: whole slots, so somewhat less than asked for; 0 before the first session.
    pub fn set_host_cache(&self, cache: ExpertCache) -> u64 {
        self.shared.experts.residency().as_mut().map_or(0, |residency| residency.resize_host(cache))
    }

    /// Waits until no slot is free that could be filled ([`CachingOptions::fill`](crate::CachingOptions::fill)); says how many
    /// bytes of experts the slots hold then. Without filling, what happens to be there.
    pub fn finish_filling(&self) -> u64 {
        self.shared.experts.residency().as_mut().map_or(0, |residency| residency.finish_filling())
    }

    /// As [`Model::set_host_cache`], of the memory of all devices together: it is freed there, and allocated again. What
    /// the slots of a layer held is lost where their number changes. [`Model::device_reports`] tells each device's part.
    pub fn set_device_cache(&self, cache: ExpertCache) -> u64 {
        self.shared.experts.residency().as_mut().map_or(0, |residency| residency.resize_devices(cache))
    }

    /// A new session lacks device memory: takes a quarter away from the slots of earlier ones. Whether there was any.
    pub(super) fn make_room_on_devices(&self) -> bool {
        let before: u64 = self.device_reports().iter().map(|device| device.cache_bytes).sum();
        if before == 0 {
            return false;
        }
        let after = self.set_device_cache(ExpertCache::Bytes(before / 4 * 3));
        if after < before {
            log::notice(format_args!(
                "a session more: the expert caches of devices have {} MiB instead of {}",
                after >> 20,
                before >> 20
            ));
        }
        after < before
    }

    /// What the devices that hold layers have of the model's experts now; empty before the first session and of a dense
    /// model.
    pub fn device_reports(&self) -> Vec<DeviceReport> {
        let residency = self.shared.experts.residency();
        residency.as_ref().map_or_else(Vec::new, |residency| residency.device_reports())
    }

    /// How much of the ubatch that a session evaluates is done, by its layers with experts: 0..1. 0 where nothing is
    /// evaluated, and of a dense model. Waits for the layer that is computed.
    pub fn evaluated_share(&self) -> f64 {
        let layer = self.shared.experts.residency().as_ref().map_or(0, |residency| residency.counters().layer);
        f64::from(layer) / f64::from(self.info().n_layer.max(1))
    }

    /// Where every version of every expert lies.
    pub fn catalog(&self) -> &Catalog {
        &self.shared.catalog
    }

    /// What a predictor must know of the model: the layers with experts that run.
    pub fn predict_shape(&self) -> PredictShape {
        predict_shape(&self.shared.catalog, &self.shared.info)
    }

    /// The parsed header of the model's files.
    pub fn gguf(&self) -> &Gguf {
        &self.shared.gguf
    }

    /// Bytes of experts that loading read from the files: 0 unless this system's stdio defeats [`CookieStream`].
    pub fn expert_bytes_read_at_load(&self) -> u64 {
        self.shared.expert_bytes_read_at_load
    }

    /// Plans memory and prepares to evaluate tokens.
    ///
    /// # Errors
    /// A budget that is too small ([`Error::Plan`]), memory that is refused, settings llama.cpp rejects.
    pub fn session(&self, options: &SessionOptions) -> Result<Session, Error> {
        Session::new(self, options, None)
    }

    /// As [`Model::session`]; `observer` is shown every router's choice. Evaluation gets a little slower, results
    /// stay the same.
    ///
    /// # Errors
    /// As [`Model::session`].
    pub fn session_observed(&self, options: &SessionOptions, observer: RouterObserver) -> Result<Session, Error> {
        Session::new(self, options, Some(observer))
    }

    /// The tokens of `text`, which is UTF-8 or, as llama.cpp takes it, any bytes. `add_special` adds BOS and the like where
    /// the model wants them, `parse_special` reads special tokens written in the text.
    ///
    /// # Errors
    /// Text that the vocabulary cannot encode.
    pub fn tokenize(
        &self,
        text: impl AsRef<[u8]>,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, Error> {
        let text = text.as_ref();
        let text_len = i32::try_from(text.len()).map_err(|_| Error::Tokenize("text of 2 GiB or more".into()))?;
        let mut tokens: Vec<Token> = vec![0; text.len() + 8];
        loop {
            let capacity = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            let mut message = [0u8; MESSAGE_BYTES];
            // SAFETY: text and tokens are valid for the lengths passed.
            let n = unsafe {
                shim::hobbit_tokenize(
                    self.vocab(),
                    text.as_ptr().cast(),
                    text_len,
                    tokens.as_mut_ptr(),
                    capacity,
                    add_special,
                    parse_special,
                    message.as_mut_ptr().cast(),
                    message.len(),
                )
            };
            match n {
                i32::MIN => return Err(Error::Tokenize(text_of(&message))),
                n if n < 0 && n.unsigned_abs() as usize > tokens.len() => tokens.resize(n.unsigned_abs() as usize, 0),
                n if n < 0 => return Err(Error::Tokenize(text_of(&message))),
                n => {
                    tokens.truncate(n as usize);
                    return Ok(tokens);
                }
            }
        }
    }

    /// The bytes a token stands for; they may be part of a UTF-8 character. `special` spells out control tokens.
    pub fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        if token < 0 || token >= self.n_vocab() as Token {
            return Vec::new();
        }
        let mut piece = vec![0u8; 32];
        loop {
            // SAFETY: the token is in the vocabulary and the buffer valid for its length.
            let n = unsafe {
                llama::llama_token_to_piece(
                    self.vocab(),
                    token,
                    piece.as_mut_ptr().cast(),
                    piece.len() as i32,
                    0,
                    special,
                )
            };
            if n >= 0 {
                piece.truncate(n as usize);
                return piece;
            }
            piece.resize(n.unsigned_abs() as usize, 0);
        }
    }

    /// Number of tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_n_tokens(self.vocab()).max(0) as usize }
    }

    /// Whether generation ends at this token.
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; ids are compared, not used as an index.
        unsafe { llama::llama_vocab_is_eog(self.vocab(), token) }
    }

    /// Whether the model wants a BOS token before a prompt.
    pub fn adds_bos(&self) -> bool {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_get_add_bos(self.vocab()) }
    }

    /// A conversation as the model's chat template writes it.
    ///
    /// # Errors
    /// No template, or one that fails on these messages.
    pub fn render_chat(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, Error> {
        chat::render(self.as_ptr(), messages, options)
    }

    /// The experts, if their backend must be told the router's weights: a layer with scales comes in several splits.
    pub(super) fn wants_router_weights(&self) -> Option<Arc<Experts>> {
        let scaled = || self.shared.gguf.tensors.iter().any(|tensor| tensor.name.ends_with("_exps.scale"));
        (!self.shared.precisions.is_exact() && scaled()).then(|| Arc::clone(&self.shared.experts))
    }

    pub(super) fn as_ptr(&self) -> *mut llama::llama_model {
        self.shared.raw.as_ptr()
    }

    pub(super) fn vocab(&self) -> *const llama::llama_vocab {
        // SAFETY: the model is live; its vocabulary lives as long.
        unsafe { llama::llama_model_get_vocab(self.as_ptr()) }
    }
}

fn predict_shape(catalog: &Catalog, info: &ModelInfo) -> PredictShape {
    let layers = catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert));
    PredictShape::new(layers, info.n_expert_used)
}

fn checked_path_table(
    found: Option<(PathBuf, PathTable)>,
    shape: &PredictShape,
) -> Result<Option<Arc<PathTable>>, Error> {
    let Some((path, table)) = found else { return Ok(None) };
    match table.check_shape(shape) {
        Ok(()) => Ok(Some(Arc::new(table))),
        Err(error) => Err(ProfileError::PathTable { path, error }.into()),
    }
}

/// Calls a function of the shim that fills a message buffer when it returns null.
pub(super) fn with_message<T>(call: impl FnOnce(*mut c_char, usize) -> *mut T) -> Result<NonNull<T>, String> {
    let mut message = [0u8; MESSAGE_BYTES];
    NonNull::new(call(message.as_mut_ptr().cast(), message.len())).ok_or_else(|| text_of(&message))
}

/// The text of a NUL-terminated message buffer.
pub(super) fn text_of(message: &[u8]) -> String {
    CStr::from_bytes_until_nul(message).map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}

pub(super) fn path_to_c(path: &Path) -> Result<CString, Error> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::Load { path: path.to_owned(), reason: "its name contains a NUL byte".into() })
}

fn describe(raw: NonNull<llama::llama_model>, gguf: &Gguf, experts: &Experts, options: &ModelOptions) -> ModelInfo {
    let mut text = [0u8; 256];
    let architecture = gguf.architecture().to_owned();
    // SAFETY: the model is live, the buffer valid for its length, the template NUL-terminated or null.
    let (n_ctx_train, n_params, tensor_bytes, n_layer, chat_template) = unsafe {
        let raw = raw.as_ptr();
        llama::llama_model_desc(raw, text.as_mut_ptr().cast(), text.len());
        let template = llama::llama_model_chat_template(raw, ptr::null());
        (
            llama::llama_model_n_ctx_train(raw).max(0) as u32,
            llama::llama_model_n_params(raw),
            llama::llama_model_size(raw),
            llama::llama_model_n_layer(raw).max(0) as u32,
            template.as_ref().map(|text| CStr::from_ptr(text).to_string_lossy().into_owned()),
        )
    };
    let used = format!("{architecture}.expert_used_count");
    let replaced = options.kv_overrides.iter().find(|chosen| chosen.key == used).map(|chosen| &chosen.value);
    let n_expert_used = match replaced {
        Some(KvValue::Int(n)) => u64::try_from(*n).ok(),
        _ => gguf.get_u64(&used),
    };
    let n_expert_used = n_expert_used.unwrap_or(0);
    ModelInfo {
        description: text_of(&text),
        path: gguf.files[0].path.clone(),
        n_ctx_train,
        n_params,
        tensor_bytes,
        expert_bytes: experts.map().layers.iter().map(|layer| layer.bytes()).sum(),
        n_layer,
        n_expert: experts.map().layers.iter().map(|layer| layer.n_expert).max().unwrap_or(0),
        n_expert_used: u32::try_from(n_expert_used).unwrap_or(u32::MAX),
        architecture,
        chat_template,
    }
}

struct Progress<'a> {
    callback: &'a mut dyn FnMut(f32) -> bool,
    cancelled: bool,
}

unsafe extern "C" fn on_progress(progress: f32, state: *mut c_void) -> bool {
    // SAFETY: `Model::load` passes its `Progress`, alive for the whole load, from one thread.
    let state = unsafe { &mut *state.cast::<Progress<'_>>() };
    let go_on = catch_unwind(AssertUnwindSafe(|| (state.callback)(progress))).unwrap_or(false);
    state.cancelled |= !go_on;
    go_on
}

/// `llama_model_kv_override`s, ended by an empty key.
pub(super) struct KvOverrides(Vec<llama::llama_model_kv_override>);

impl KvOverrides {
    pub(super) fn new(options: &ModelOptions) -> Self {
        // SAFETY: all-zero is a valid override: empty key, integer 0.
        let empty = || -> llama::llama_model_kv_override { unsafe { std::mem::zeroed() } };
        let mut list: Vec<_> = options
            .kv_overrides
            .iter()
            .map(|chosen| {
                let mut raw = empty();
                copy_text(&chosen.key, &mut raw.key);
                // The union's field is the one that the tag names.
                match &chosen.value {
                    KvValue::Int(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_INT;
                        raw.__bindgen_anon_1.val_i64 = *value;
                    }
                    KvValue::Float(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_FLOAT;
                        raw.__bindgen_anon_1.val_f64 = *value;
                    }
                    KvValue::Bool(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_BOOL;
                        raw.__bindgen_anon_1.val_bool = *value;
                    }
                    KvValue::Str(value) => {
                        raw.tag = llama::LLAMA_KV_OVERRIDE_TYPE_STR;
                        let mut text = [0; 128];
                        copy_text(value, &mut text);
                        raw.__bindgen_anon_1.val_str = text;
                    }
                }
                raw
            })
            .collect();
        if !list.is_empty() {
            list.push(empty());
        }
        Self(list)
    }

    pub(super) fn as_ptr(&self) -> *const llama::llama_model_kv_override {
        if self.0.is_empty() { ptr::null() } else { self.0.as_ptr() }
    }
}

/// Copies `text`, cut so that a terminating NUL remains.
fn copy_text(text: &str, to: &mut [c_char; 128]) {
    for (byte, place) in text.bytes().zip(&mut to[..127]) {
        *place = byte as c_char;
    }
}
