//! Images and sound: llama.cpp's mtmd encodes them, and a session evaluates the result like tokens.
//!
//! A [`Projector`] is open while an [`Encoder`] lives, and the model's experts lend it their memory meanwhile. It reads
//! a file's bytes into [`Media`], which [`Projector::prompt`] places in a prompt.

mod prompt;

use std::cell::UnsafeCell;
use std::ffi::{CString, c_void};
use std::fmt;
use std::path::Path;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ggml_sys::{llama, shim};

use crate::engine::error::MediaError;
use crate::engine::ggml;
use crate::engine::ggml::log;
use crate::engine::ggml::memory_use::trim_heap;
use crate::engine::ggml::raw::{MESSAGE_BYTES, Owned, text_of, with_message};
use crate::engine::model::{Borrower, Model};
use hobbit_core::options::ProjectorOptions;

pub use prompt::{Chunk, Chunks, Media, MediaPrompt};

/// Largest images. The height of a resized image has tables for all rows of the original one, and its width is made
/// before its height, so sides and their ratio are limited too.
const IMAGE_LIMITS: shim::hobbit_image_limits =
    shim::hobbit_image_limits { pixels: 1 << 24, side: 1 << 14, aspect: 200 };
/// Bytes that are lent for reading a medium. Most images need no more: those of the most pixels have 18 for each.
const READING_BYTES: u64 = 18 << 24;
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
    ggml::c_path(&options.path).map_err(|why| unusable(options, why))
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
            shim::hobbit_media_needs(
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
        Ok(Self { bytes: bytes_with(weights, compute, 0), weights, compute, n_ubatch })
    }
}

/// Bytes of a projector with compute buffers of `compute` bytes that reads a medium. Products convert their inputs to
/// 16 bits beside these buffers: at most a third more, for a hidden layer of four times the width.
fn bytes_with(weights: u64, compute: u64, reading: u64) -> u64 {
    weights + compute + compute / 3 + reading.max(READING_BYTES)
}

/// Lends the projector memory for what it does.
struct Lender {
    model: Model,
    weights: u64,
    lent: Mutex<Lent>,
}

#[derive(Clone, Copy)]
struct Lent {
    /// Bytes of the largest buffers so far.
    compute: u64,
    /// Bytes of the medium that is read.
    reading: u64,
}

impl Lender {
    /// False, without a change, if the budget has not so much.
    fn lend(&self, change: impl FnOnce(&mut Lent)) -> bool {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wanted = *lent;
        change(&mut wanted);
        let is_lent = self.model.lend(Borrower::Projector, bytes_with(self.weights, wanted.compute, wanted.reading));
        if is_lent {
            *lent = wanted;
        }
        is_lent
    }
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
    lender: Arc<Lender>,
    // Dropped after the context, which refers to its vocabulary.
    model: Model,
}

#[derive(Default)]
struct Opened {
    context: Option<Context>,
    n_encoders: usize,
}

/// mtmd's context, and what it uses: the record of its memory, and the record's lender.
struct Context {
    // Dropped before the records.
    raw: Owned<llama::mtmd_context>,
    _memory: Rc<UnsafeCell<shim::hobbit_media_memory>>,
    _lender: Arc<Lender>,
}

// SAFETY: mtmd's context may be used by any thread; reading bytes and making chunks leave it unchanged (mtmd.h calls it
// thread-safe), and encoding, which alone uses the records, holds the lock. The records have no other owner.
unsafe impl Send for Context {}

impl Context {
    fn open(lender: &Arc<Lender>, options: &ProjectorOptions, needs: &ProjectorNeeds) -> Result<Self, MediaError> {
        let (name, lender) = (name_of(options)?, Arc::clone(lender));
        let memory = shim::hobbit_media_memory {
            seen: needs.compute,
            lend: Some(lend),
            lender: Arc::as_ptr(&lender).cast_mut().cast(),
        };
        let memory = Rc::new(UnsafeCell::new(memory));
        let _alone = logging();
        log::clear_errors();
        // SAFETY: the model outlives the context, whose lender has a clone; the name is NUL-terminated; the record
        // lives until the context is freed.
        let open = |message, capacity| unsafe {
            shim::hobbit_media_open(
                name.as_ptr(),
                lender.model.shared.raw.as_ptr(),
                options.threads.max(1),
                options.image_min_tokens,
                options.image_max_tokens,
                memory.get(),
                message,
                capacity,
            )
        };
        let raw = with_message(open).map_err(|message| unusable(options, message))?;
        Ok(Self { raw: Owned(raw), _memory: memory, _lender: lender })
    }
}

/// Lends memory for buffers that are larger than those of the warm-up.
///
/// # Safety
/// A live lender.
unsafe extern "C" fn lend(lender: *mut c_void, compute: u64) -> bool {
    // SAFETY: by the caller.
    unsafe { &*lender.cast::<Lender>() }.lend(|lent| lent.compute = compute)
}

/// Lends memory for reading a medium.
///
/// # Safety
/// A live lender.
unsafe extern "C" fn take(lender: *mut c_void, bytes: u64) -> bool {
    // SAFETY: by the caller.
    unsafe { &*lender.cast::<Lender>() }.lend(|lent| lent.reading = bytes)
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
            self.shared.model.lend(Borrower::Projector, 0);
        }
    }
}

impl Shared {
    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
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
            lender: Arc::new(Lender {
                model: model.clone(),
                weights: needs.weights,
                lent: Mutex::new(Lent { compute: needs.compute, reading: 0 }),
            }),
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
        let Shared { options, needs, model, lender, .. } = &*self.0;
        let mut opened = self.0.opened();
        let context = match &opened.context {
            Some(context) => context.raw.0,
            None => {
                check_readable(&options.path)?;
                if !lender.lend(|lent| lent.compute = needs.compute) {
                    let reason = format!("the memory budget has no room for its {} MiB", needs.bytes.div_ceil(1 << 20));
                    return Err(unusable(options, reason));
                }
                let context = Context::open(lender, options, needs).inspect_err(|_| {
                    model.lend(Borrower::Projector, 0);
                })?;
                opened.context.insert(context).raw.0
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
        let lender = &self.0.lender;
        let room = shim::hobbit_media_room { take: Some(take), taker: Arc::as_ptr(lender).cast_mut().cast() };
        // Given back when it is read.
        let _reading = Reading(lender);
        let bitmap = if is_sound(bytes) {
            if !self.takes_sound() {
                return lacks("sound, which this model's projector does not encode");
            }
            // SAFETY: the context and the lender are live; the bytes are valid for their length, the message buffer for
            // its own.
            with_message(|message, capacity| unsafe {
                let (own, len) = (bytes.as_ptr(), bytes.len());
                shim::hobbit_media_audio(context, own, len, SECONDS_MAX, room, message, capacity)
            })
        } else {
            if !self.takes_images() {
                return lacks("no sound (WAV, MP3 or FLAC), and this model's projector encodes nothing else");
            }
            // SAFETY: as above.
            with_message(|message, capacity| unsafe {
                let (own, len) = (bytes.as_ptr(), bytes.len());
                shim::hobbit_media_image(context, own, len, IMAGE_LIMITS, room, message, capacity)
            })
        };
        let bitmap = Owned(bitmap.map_err(refused)?);
        // SAFETY: the context and the bitmap are live.
        let chunks = with_message(|message, capacity| unsafe {
            shim::hobbit_media_chunks(context, bitmap.as_ptr(), message, capacity)
        });
        Media::of(bytes, &Owned(chunks.map_err(refused)?), context)
    }
}

/// Gives back the memory for reading a medium.
struct Reading<'a>(&'a Lender);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.lend(|lent| lent.reading = 0);
    }
}

/// Whether bytes begin as a sound does, by mtmd's rule.
fn is_sound(bytes: &[u8]) -> bool {
    let is_wave = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WAVE");
    let is_frame = matches!(bytes, [0xff, second, ..] if second & 0xe0 == 0xe0);
    bytes.len() >= 12 && (is_wave || is_frame || bytes.starts_with(b"ID3") || bytes.starts_with(b"fLaC"))
}
