//! Images and sound: llama.cpp's mtmd encodes them, and a session evaluates the result like tokens.
//!
//! A [`Projector`] is open while an [`Encoder`] lives, and the model's experts lend it their memory meanwhile. It reads
//! a file's bytes into [`Media`]. In a prompt's tokens each position of a medium is a placeholder:
//! a negative number, derived from a keyed hash of the bytes. So equal beginnings of two prompts have equal images, and
//! code that compares, counts and keeps tokens needs no other rule. [`Session::evaluate_media`] evaluates them.

use std::ffi::{CString, c_void};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ggml_sys::{llama, media};

use super::error::{EvalError, MediaError};
use super::ggml;
use super::log;
use super::memory::trim_heap;
use super::model::Model;
use super::raw::{MESSAGE_BYTES, text_of, with_message};
use super::session::Session;
use hobbit_core::checkpoints::Cut;
use hobbit_core::options::{ProjectorOptions, Token};

/// Largest image, in pixels. While it is decoded, each takes at most [`PIXEL_BYTES`].
const PIXELS_MAX: u64 = 1 << 24;
/// Bytes of a progressive JPEG: coefficients, components, three channels, and mtmd's copy.
const PIXEL_BYTES: u64 = 18;
/// Longest sound, in seconds: half an hour at 16 kHz takes 110 MiB.
const SECONDS_MAX: f64 = 1800.0;

/// Requirements of a projector, from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProjectorNeeds {
    /// Bytes of its weights, of the buffers for llama.cpp's warm-up, and of the largest image while it is decoded: for
    /// [`ModelOptions::lent_bytes`](crate::ModelOptions::lent_bytes). A larger image lends more
    /// ([`Model::lend`]), or is refused.
    pub bytes: u64,
    weights: u64,
    compute: u64,
    /// Minimum ubatch of a session: tokens of the largest image, if they see each other; else 0.
    pub n_ubatch: u32,
}

fn name_of(options: &ProjectorOptions) -> Result<CString, MediaError> {
    let name = CString::new(options.path.as_os_str().as_bytes());
    name.map_err(|_| unusable(options, "its name contains a NUL byte".into()))
}

/// mtmd is silent for all threads while it reads a header.
fn logging() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error with the given reason, or else with what was logged.
fn unusable(options: &ProjectorOptions, reason: String) -> MediaError {
    let reason = if reason.is_empty() { log::take_errors() } else { reason };
    MediaError::Projector { path: options.path.clone(), reason }
}

impl ProjectorNeeds {
    /// Reads a projector's header.
    ///
    /// # Errors
    /// [`MediaError::Projector`].
    pub fn of(options: &ProjectorOptions) -> Result<Self, MediaError> {
        ggml::ready();
        check_readable(&options.path)?;
        let name = name_of(options)?;
        let (mut weights, mut compute, mut max_tokens, mut non_causal) = (0, 0, 0, false);
        let mut message = [0u8; MESSAGE_BYTES];
        let _alone = logging();
        log::clear_errors();
        // SAFETY: the name is NUL-terminated, all results outlive the call.
        let known = unsafe {
            media::hobbit_media_needs(
                name.as_ptr(),
                options.image_min_tokens,
                options.image_max_tokens,
                &raw mut weights,
                &raw mut compute,
                &raw mut max_tokens,
                &raw mut non_causal,
                message.as_mut_ptr().cast(),
                message.len(),
            )
        };
        if !known {
            return Err(unusable(options, text_of(&message)));
        }
        let n_ubatch = if non_causal { u32::try_from(max_tokens).unwrap_or(0) } else { 0 };
        Ok(Self { bytes: bytes_with(weights, compute), weights, compute, n_ubatch })
    }
}

/// Bytes of a projector with compute buffers of `compute` bytes. Products convert their inputs to 16 bits beside these
/// buffers: at most a third more, for a hidden layer of four times the width.
fn bytes_with(weights: u64, compute: u64) -> u64 {
    weights + compute + compute / 3 + PIXELS_MAX * PIXEL_BYTES
}

fn check_readable(path: &Path) -> Result<(), MediaError> {
    let failed = |reason: String| MediaError::Projector { path: path.to_owned(), reason };
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(()),
        Ok(_) => Err(failed("it is no regular file".into())),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// A projector of a model. Clones are cheap.
#[derive(Clone)]
pub struct Projector(Arc<Shared>);

struct Shared {
    options: ProjectorOptions,
    needs: ProjectorNeeds,
    takes_images: bool,
    takes_sound: bool,
    opened: Mutex<Opened>,
    /// One chunk at a time is encoded.
    encodes: Mutex<()>,
    /// One file at a time is decoded: memory for one is counted.
    reads: Mutex<()>,
    // Dropped after the context, which refers to its vocabulary.
    model: Model,
}

#[derive(Default)]
struct Opened {
    context: Option<Context>,
    n_encoders: usize,
}

/// mtmd's context, and the record of its memory, which it uses.
struct Context {
    raw: NonNull<llama::mtmd_context>,
    memory: *mut media::Memory,
}

// SAFETY: mtmd's context may be used by any thread; reading bytes and making chunks leave it unchanged (mtmd.h calls it
// thread-safe), and encoding, which alone uses the record, holds the lock.
unsafe impl Send for Context {}

impl Context {
    fn open(model: &Model, options: &ProjectorOptions, needs: &ProjectorNeeds) -> Result<Self, MediaError> {
        let name = name_of(options)?;
        let lender = Box::new((model.clone(), needs.weights));
        let lender = Box::into_raw(lender).cast();
        let memory = Box::into_raw(Box::new(media::Memory { seen: needs.compute, lend, lender }));
        let _alone = logging();
        log::clear_errors();
        // SAFETY: the model outlives the context, which keeps a clone; the name is NUL-terminated; the record lives
        // until the context is freed.
        let open = |message, capacity| unsafe {
            media::hobbit_media_open(
                name.as_ptr(),
                model.shared.raw.as_ptr(),
                options.threads.max(1),
                options.image_min_tokens,
                options.image_max_tokens,
                memory,
                message,
                capacity,
            )
        };
        with_message(open).map(|raw| Self { raw, memory }).map_err(|message| {
            // SAFETY: made above, and used by no context.
            unsafe { free(memory) };
            unusable(options, message)
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: both were made by us, and are freed once, the context before the record that it uses.
        unsafe {
            llama::mtmd_free(self.raw.as_ptr());
            free(self.memory);
        }
    }
}

/// # Safety
/// A record made by [`Context::open`] that nothing uses.
unsafe fn free(memory: *mut media::Memory) {
    // SAFETY: by the caller, both are boxes.
    unsafe {
        let memory = Box::from_raw(memory);
        drop(Box::from_raw(memory.lender.cast::<(Model, u64)>()));
    }
}

/// Lends memory for buffers that are larger than those of the warm-up.
///
/// # Safety
/// The lender of a live record.
unsafe extern "C" fn lend(lender: *mut c_void, compute: u64) -> bool {
    // SAFETY: by the caller.
    let (model, weights) = unsafe { &*lender.cast::<(Model, u64)>() };
    model.lend(bytes_with(*weights, compute))
}

/// Keeps a projector open. The last one closes it, and the experts have their memory back.
pub struct Encoder {
    shared: Arc<Shared>,
    context: NonNull<llama::mtmd_context>,
}

// SAFETY: as for the context, which lives as long.
unsafe impl Send for Encoder {}
// SAFETY: as above.
unsafe impl Sync for Encoder {}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Encoder").field(&self.shared.options.path).finish()
    }
}

impl Clone for Encoder {
    fn clone(&self) -> Self {
        self.shared.opened().n_encoders += 1;
        Self { shared: Arc::clone(&self.shared), context: self.context }
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        let mut opened = self.shared.opened();
        opened.n_encoders -= 1;
        // Where memory does not go back to experts, nothing is won by reading the file again.
        if opened.n_encoders == 0 && self.shared.model.lends() {
            opened.context = None;
            trim_heap();
            self.shared.model.lend(0);
        }
    }
}

impl Shared {
    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An image or a sound, ready to be placed in prompts.
#[derive(Clone, Debug)]
pub struct Media(Vec<Piece>);

#[derive(Clone, Debug)]
enum Piece {
    /// Tokens around and between the parts of an image.
    Tokens(Vec<Token>),
    Chunk(Arc<Chunk>),
}

/// A part of a medium that is encoded at once.
#[derive(Debug)]
pub struct Chunk {
    raw: NonNull<llama::mtmd_input_chunk>,
    /// Cells of the context.
    n_tokens: usize,
    /// One for each position.
    placeholders: Vec<Token>,
    non_causal: bool,
}

// SAFETY: immutable once made.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: a copy of our own, freed once.
        unsafe { llama::mtmd_input_chunk_free(self.raw.as_ptr()) };
    }
}

impl Chunk {
    /// Cells of the context that it takes. For models with M-RoPE more than its positions.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Positions in the context, which are its placeholders in a prompt's tokens.
    pub fn n_positions(&self) -> usize {
        self.placeholders.len()
    }
}

/// Chunks of a prompt in order, each with the index of its first placeholder. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Chunks(Arc<[(usize, Arc<Chunk>)]>);

impl Chunks {
    /// The chunks and their indices.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Arc<Chunk>)> {
        self.0.iter().map(|(at, chunk)| (*at, chunk))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Cells of the context that they take beyond their placeholders.
    pub fn n_extra(&self) -> usize {
        self.iter().map(|(_, chunk)| chunk.n_tokens.saturating_sub(chunk.n_positions())).sum()
    }

    /// The largest number of the prompt's tokens, at most `n`, that ends outside of a chunk.
    pub fn whole(&self, n: usize) -> usize {
        let cut = self.iter().find(|(at, chunk)| *at < n && n < at + chunk.n_positions());
        cut.map_or(n, |(at, _)| at)
    }
}

/// Tokens of a prompt, with placeholders for its media.
#[derive(Clone, Debug, Default)]
pub struct MediaPrompt {
    /// One token or placeholder for each position.
    pub tokens: Vec<Token>,
    /// The media.
    pub chunks: Chunks,
}

impl MediaPrompt {
    /// Cells of the context that the prompt takes.
    pub fn n_cells(&self) -> usize {
        self.tokens.len() + self.chunks.n_extra()
    }

    /// The prompt from its token `from` on, which is outside of a chunk.
    pub fn rest(&self, from: usize) -> Self {
        let later = self.chunks.iter().filter(|(at, _)| *at >= from);
        let chunks = later.map(|(at, chunk)| (at - from, Arc::clone(chunk))).collect();
        Self { tokens: self.tokens[from..].to_vec(), chunks: Chunks(chunks) }
    }
}

impl Projector {
    /// Checks a projector for the model, which has a session: opens it, and closes it again.
    ///
    /// # Errors
    /// A file that is damaged, or belongs to another model; a memory budget without room for it.
    pub fn open(model: &Model, options: &ProjectorOptions) -> Result<Self, MediaError> {
        let needs = ProjectorNeeds::of(options)?;
        let shared = Shared {
            options: options.clone(),
            needs,
            takes_images: false,
            takes_sound: false,
            opened: Mutex::default(),
            encodes: Mutex::default(),
            reads: Mutex::default(),
            model: model.clone(),
        };
        let mut new = Self(Arc::new(shared));
        let encoder = new.encoder()?;
        // SAFETY: the context is live.
        let kinds = unsafe {
            let context = encoder.context.as_ptr();
            (llama::mtmd_support_vision(context), llama::mtmd_support_audio(context))
        };
        drop(encoder);
        let shared = Arc::get_mut(&mut new.0).expect("the encoder is gone");
        (shared.takes_images, shared.takes_sound) = kinds;
        Ok(new)
    }

    /// Opens the projector, unless it is open. Reading and evaluating media do so by themselves; who holds an encoder
    /// meanwhile has the file read once.
    ///
    /// # Errors
    /// As [`Projector::open`].
    pub fn encoder(&self) -> Result<Encoder, MediaError> {
        let Shared { options, needs, model, .. } = &*self.0;
        let mut opened = self.0.opened();
        let context = match &opened.context {
            Some(context) => context.raw,
            None => {
                check_readable(&options.path)?;
                if !model.lend(needs.bytes) {
                    let reason = format!("the memory budget has no room for its {} MiB", needs.bytes.div_ceil(1 << 20));
                    return Err(unusable(options, reason));
                }
                let context = Context::open(model, options, needs).inspect_err(|_| {
                    model.lend(0);
                })?;
                opened.context.insert(context).raw
            }
        };
        opened.n_encoders += 1;
        Ok(Encoder { shared: Arc::clone(&self.0), context })
    }

    /// Bytes that it takes while it is open, if its images are not larger than llama.cpp's warm-up.
    pub fn bytes(&self) -> u64 {
        self.0.needs.bytes
    }

    /// Whether it encodes images.
    pub fn takes_images(&self) -> bool {
        self.0.takes_images
    }

    /// Whether it encodes sound.
    pub fn takes_sound(&self) -> bool {
        self.0.takes_sound
    }

    /// Reads the bytes of a file: PNG, JPEG, GIF (its first frame) or BMP; WAV, MP3 or FLAC. Any bytes may be given.
    ///
    /// # Errors
    /// [`MediaError::Unreadable`]: bytes of another kind, damaged or too large; a kind that the projector lacks. As
    /// [`Projector::encoder`].
    pub fn read(&self, bytes: &[u8]) -> Result<Media, MediaError> {
        let encoder = self.encoder()?;
        let context = encoder.context.as_ptr();
        let _alone = self.0.reads.lock().unwrap_or_else(PoisonError::into_inner);
        log::clear_errors();
        let refused = |message: String| {
            let reasons = [message, log::take_errors().trim().to_owned()];
            let reason = reasons.into_iter().find(|reason| !reason.is_empty());
            MediaError::Unreadable(reason.unwrap_or_else(|| "mtmd gives no reason".into()))
        };
        let lacks = |what: &str| Err(MediaError::Unreadable(what.to_owned()));
        let bitmap = if is_sound(bytes) {
            if !self.takes_sound() {
                return lacks("sound, which this model's projector does not encode");
            }
            // SAFETY: the context is live; the bytes are valid for their length, the message buffer for its own.
            with_message(|message, capacity| unsafe {
                let (own, len) = (bytes.as_ptr(), bytes.len());
                media::hobbit_media_audio(context, own, len, SECONDS_MAX, message, capacity)
            })
        } else {
            if !self.takes_images() {
                return lacks("no sound (WAV, MP3 or FLAC), and this model's projector encodes nothing else");
            }
            // SAFETY: the bytes are valid for their length, the message buffer for its own.
            with_message(|message, capacity| unsafe {
                media::hobbit_media_image(bytes.as_ptr(), bytes.len(), PIXELS_MAX, message, capacity)
            })
        };
        let bitmap = Bitmap(bitmap.map_err(refused)?);
        // SAFETY: the context and the bitmap are live.
        let chunks = with_message(|message, capacity| unsafe {
            media::hobbit_media_chunks(context, bitmap.0.as_ptr(), message, capacity)
        });
        let chunks = ChunkList(chunks.map_err(refused)?);
        let mark = mark_of(bytes);
        let mut n = 0;
        let mut next = || {
            n += 1;
            placeholder(mark, n)
        };
        // SAFETY: the list is live, and so are its chunks; indices are below its size; text tokens are valid for their
        // number.
        let pieces = unsafe {
            (0..llama::mtmd_input_chunks_size(chunks.0.as_ptr())).map(|at| {
                let chunk = llama::mtmd_input_chunks_get(chunks.0.as_ptr(), at);
                if llama::mtmd_input_chunk_get_type(chunk) == llama::MTMD_INPUT_CHUNK_TYPE_TEXT {
                    let mut n = 0;
                    let tokens = llama::mtmd_input_chunk_get_tokens_text(chunk, &raw mut n);
                    return Some(Piece::Tokens(if n == 0 {
                        Vec::new()
                    } else {
                        std::slice::from_raw_parts(tokens, n).to_vec()
                    }));
                }
                let n_positions = usize::try_from(llama::mtmd_input_chunk_get_n_pos(chunk)).ok()?;
                Some(Piece::Chunk(Arc::new(Chunk {
                    n_tokens: llama::mtmd_input_chunk_get_n_tokens(chunk),
                    non_causal: llama::mtmd_decode_use_non_causal(context, chunk),
                    raw: NonNull::new(llama::mtmd_input_chunk_copy(chunk))?,
                    placeholders: (0..n_positions).map(|_| next()).collect(),
                })))
            })
        };
        let pieces: Option<Vec<Piece>> = pieces.collect();
        pieces.map(Media).ok_or_else(|| MediaError::Unreadable("mtmd made no chunks of it".into()))
    }

    /// Tokens of `text`, in which each `marker` stands for the next of `media`. Special tokens in the text are parsed;
    /// `add_special` adds BOS and the like where the model wants them.
    ///
    /// # Errors
    /// Another number of markers than of media; text that the vocabulary cannot encode.
    pub fn prompt(
        &self,
        text: &[u8],
        marker: &str,
        media: &[Media],
        add_special: bool,
    ) -> Result<MediaPrompt, MediaError> {
        let model = &self.0.model;
        let parts = split(text, marker.as_bytes());
        if parts.len() != media.len() + 1 {
            return Err(MediaError::Markers { found: parts.len() - 1, expected: media.len() });
        }
        let (mut tokens, mut chunks) = (Vec::new(), Vec::new());
        if add_special && model.adds_bos() {
            tokens.extend(model.special_tokens().bos);
        }
        for (at, part) in parts.iter().enumerate() {
            if !part.is_empty() {
                tokens.extend(model.tokenize(part, false, true)?);
            }
            for piece in media.get(at).map_or(&[][..], |media| &media.0[..]) {
                match piece {
                    Piece::Tokens(own) => tokens.extend(own),
                    Piece::Chunk(chunk) => {
                        chunks.push((tokens.len(), Arc::clone(chunk)));
                        tokens.extend(&chunk.placeholders);
                    }
                }
            }
        }
        // SAFETY: the vocabulary lives as long as the model.
        if add_special && unsafe { llama::llama_vocab_get_add_eos(model.vocab()) } {
            tokens.extend(model.special_tokens().eos);
        }
        Ok(MediaPrompt { tokens, chunks: Chunks(chunks.into()) })
    }

    /// Embeddings of a chunk, `[n_tokens][n_embd_inp]`, and its positions from `first` on.
    fn encode(&self, chunk: &Chunk, first: i32) -> Result<(Vec<f32>, Vec<i32>), EvalError> {
        let encoder = self.encoder().map_err(|error| EvalError::Decode(error.to_string()))?;
        let context = encoder.context.as_ptr();
        // SAFETY: the model is live.
        let width = unsafe { llama::llama_model_n_embd_inp(self.0.model.shared.raw.as_ptr()) }.max(0) as usize;
        // SAFETY: the context is live.
        let n_sections = if unsafe { llama::mtmd_decode_use_mrope(context) } { 4 } else { 1 };
        let mut embeddings = vec![0f32; chunk.n_tokens * width];
        let mut positions = vec![0i32; chunk.n_tokens * n_sections];
        let mut message = [0u8; MESSAGE_BYTES];
        let _alone = self.0.encodes.lock().unwrap_or_else(PoisonError::into_inner);
        log::clear_errors();
        let (text, capacity) = (message.as_mut_ptr().cast(), message.len());
        // SAFETY: the context and the chunk are live; mtmd's output has as many numbers, and so has each buffer.
        let done = unsafe {
            media::hobbit_media_encode(
                context,
                chunk.raw.as_ptr(),
                embeddings.as_mut_ptr(),
                embeddings.len(),
                text,
                capacity,
            ) && media::hobbit_media_positions(
                context,
                chunk.raw.as_ptr(),
                first,
                positions.as_mut_ptr(),
                text,
                capacity,
            )
        };
        if done {
            return Ok((embeddings, positions));
        }
        let reasons = [text_of(&message), log::take_errors()];
        let reason = reasons.into_iter().find(|reason| !reason.is_empty()).unwrap_or_default();
        Err(EvalError::Decode(format!("the projector cannot encode this image or sound: {}", reason.trim())))
    }
}

impl Session {
    /// Encodes a chunk and evaluates it in a sequence, from position `first` on. Logits of its last entry are kept. For
    /// callers of [`Session::evaluate`].
    ///
    /// # Errors
    /// A chunk that cannot be encoded, or needs a larger ubatch; as [`Session::evaluate`].
    pub fn evaluate_media(
        &mut self,
        projector: &Projector,
        chunk: &Chunk,
        sequence: i32,
        first: i32,
    ) -> Result<(), EvalError> {
        let (n, n_ubatch) = (chunk.n_tokens, self.n_ubatch());
        if chunk.non_causal && n > n_ubatch {
            return Err(EvalError::Decode(format!(
                "the image has {n} tokens, which this model computes at once, and a ubatch of the session has \
                 {n_ubatch}"
            )));
        }
        let (embeddings, positions) = projector.encode(chunk, first)?;
        let context = self.context_ptr();
        if chunk.non_causal {
            // SAFETY: the context is live.
            unsafe { llama::llama_set_causal_attn(context, false) };
        }
        let evaluated = self.evaluate_embeddings(&embeddings, &positions, n, sequence, first);
        if chunk.non_causal {
            // SAFETY: as above.
            unsafe { llama::llama_set_causal_attn(context, true) };
        }
        evaluated
    }

    fn evaluate_embeddings(
        &mut self,
        embeddings: &[f32],
        positions: &[i32],
        n: usize,
        sequence: i32,
        first: i32,
    ) -> Result<(), EvalError> {
        let (width, n_sections, n_batch) = (embeddings.len() / n.max(1), positions.len() / n.max(1), self.n_batch());
        for from in (0..n).step_by(n_batch.max(1)) {
            let to = n.min(from + n_batch);
            let mut embd = embeddings[from * width..to * width].to_vec();
            let mut pos: Vec<i32> =
                (0..n_sections).flat_map(|section| positions[section * n..][from..to].iter().copied()).collect();
            let mut counts = vec![1; to - from];
            let mut sequences = vec![sequence; to - from];
            let mut lists: Vec<*mut i32> = sequences.iter_mut().map(|sequence| &raw mut *sequence).collect();
            let mut logits = vec![0i8; to - from];
            logits[to - from - 1] = i8::from(to == n);
            // The arrays outlive the call.
            let batch = llama::llama_batch {
                n_tokens: (to - from) as i32,
                token: std::ptr::null_mut(),
                embd: embd.as_mut_ptr(),
                pos: pos.as_mut_ptr(),
                n_seq_id: counts.as_mut_ptr(),
                seq_id: lists.as_mut_ptr(),
                logits: logits.as_mut_ptr(),
            };
            self.decode(batch, &[(sequence, first)])?;
        }
        Ok(())
    }

    /// Evaluates `prompt` from its token `from` on, after the context's content, which holds the tokens before. As
    /// [`Session::feed`]. The projector is open until the last chunk is evaluated; `encoder` kept it open until now.
    ///
    /// # Errors
    /// As [`Session::feed`] and [`Session::evaluate_media`]. The context keeps what was evaluated, as
    /// [`Session::n_past`] reports.
    pub fn feed_prompt(
        &mut self,
        projector: &Projector,
        prompt: &MediaPrompt,
        from: usize,
        mut encoder: Option<Encoder>,
    ) -> Result<(), EvalError> {
        let (mut at, cuts) = (from, self.cuts(&prompt.tokens, from));
        for (start, chunk) in prompt.chunks.iter().filter(|(start, _)| *start >= from) {
            if encoder.is_none() {
                encoder = Some(projector.encoder().map_err(|error| EvalError::Decode(error.to_string()))?);
            }
            if at < start {
                self.feed_cut(&prompt.tokens[at..start], &cuts_from(&cuts, at))?;
            }
            self.feed_media(projector, chunk)?;
            at = start + chunk.n_positions();
        }
        drop(encoder);
        if at < prompt.tokens.len() { self.feed_cut(&prompt.tokens[at..], &cuts_from(&cuts, at)) } else { Ok(()) }
    }
}

/// Cuts behind token `at` of a prompt, counted from there.
fn cuts_from(cuts: &[Cut], at: usize) -> Vec<Cut> {
    cuts.iter().filter(|cut| cut.at > at).map(|cut| Cut { at: cut.at - at, ..*cut }).collect()
}

struct Bitmap(NonNull<llama::mtmd_bitmap>);

impl Drop for Bitmap {
    fn drop(&mut self) {
        // SAFETY: made for us, freed once.
        unsafe { llama::mtmd_bitmap_free(self.0.as_ptr()) };
    }
}

struct ChunkList(NonNull<llama::mtmd_input_chunks>);

impl Drop for ChunkList {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { llama::mtmd_input_chunks_free(self.0.as_ptr()) };
    }
}

/// Whether bytes begin as a sound does, by mtmd's rule.
fn is_sound(bytes: &[u8]) -> bool {
    let is_wave = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WAVE");
    let is_frame = matches!(bytes, [0xff, second, ..] if second & 0xe0 == 0xe0);
    bytes.len() >= 12 && (is_wave || is_frame || bytes.starts_with(b"ID3") || bytes.starts_with(b"fLaC"))
}

/// 128 bits that no client can choose: the hashers' keys are drawn once per process.
fn mark_of(bytes: &[u8]) -> [u64; 2] {
    static KEYS: OnceLock<[RandomState; 2]> = OnceLock::new();
    KEYS.get_or_init(Default::default).each_ref().map(|key| key.hash_one(bytes))
}

/// A negative number below every token and llama.cpp's null token, -1.
fn placeholder(mark: [u64; 2], n: usize) -> Token {
    let word = mark[n % 2].rotate_left((n / 2 % 64) as u32) ^ (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> 33) as i32 | i32::MIN
}

/// The parts of `text` before, between and after all occurrences of `marker`.
fn split<'a>(text: &'a [u8], marker: &[u8]) -> Vec<&'a [u8]> {
    let mut parts = Vec::new();
    let (mut begin, mut at) = (0, 0);
    while !marker.is_empty() && at + marker.len() <= text.len() {
        if text[at..].starts_with(marker) {
            parts.push(&text[begin..at]);
            at += marker.len();
            begin = at;
        } else {
            at += 1;
        }
    }
    parts.push(&text[begin..]);
    parts
}
