//! Images and sound in prompts. Each position of a medium is a placeholder in the prompt's tokens: a negative number,
//! derived from a keyed hash of the bytes. Two prompts with equal tokens therefore have equal images, and code that
//! compares, counts and keeps tokens needs no other rule. [`Session::evaluate_media`] evaluates the media.

use std::hash::{BuildHasher, RandomState};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock, PoisonError};

use ggml_sys::{llama, shim};

use super::{Encoder, Projector};
use crate::engine::error::{EvalError, MediaError};
use crate::engine::ggml::log;
use crate::engine::ggml::raw::{MESSAGE_BYTES, Owned, text_of};
use crate::engine::session::Session;
use crate::engine::text::sampling::are_finite;
use hobbit_core::checkpoints::Cut;
use hobbit_core::options::Token;

/// An image or a sound, ready to be placed in prompts.
#[derive(Clone, Debug)]
pub struct Media(Vec<Piece>);

impl Media {
    /// The chunks that mtmd has made of a file's `bytes`.
    pub(super) fn of(
        bytes: &[u8],
        chunks: &Owned<llama::mtmd_input_chunks>,
        context: *mut llama::mtmd_context,
    ) -> Result<Self, MediaError> {
        let mark = mark_of(bytes);
        let mut n = 0;
        let mut next = || {
            n += 1;
            placeholder(mark, n)
        };
        // SAFETY: the context and the list are live, and so are its chunks; indices are below its size; text tokens are
        // valid for their number.
        let pieces = unsafe {
            (0..llama::mtmd_input_chunks_size(chunks.as_ptr())).map(|at| {
                let chunk = llama::mtmd_input_chunks_get(chunks.as_ptr(), at);
                if llama::mtmd_input_chunk_get_type(chunk) == llama::MTMD_INPUT_CHUNK_TYPE_TEXT {
                    let mut n = 0;
                    let tokens = llama::mtmd_input_chunk_get_tokens_text(chunk, &raw mut n);
                    let tokens = if n == 0 { &[] } else { std::slice::from_raw_parts(tokens, n) };
                    return Some(Piece::Tokens(tokens.to_vec()));
                }
                let n_positions = usize::try_from(llama::mtmd_input_chunk_get_n_pos(chunk)).ok()?;
                Some(Piece::Chunk(Arc::new(Chunk {
                    n_tokens: llama::mtmd_input_chunk_get_n_tokens(chunk),
                    n_bytes: shim::hobbit_media_chunk_bytes(chunk) as usize,
                    non_causal: llama::mtmd_decode_use_non_causal(context, chunk),
                    raw: Owned::new(llama::mtmd_input_chunk_copy(chunk))?,
                    placeholders: (0..n_positions).map(|_| next()).collect(),
                })))
            })
        };
        let pieces: Option<Vec<Piece>> = pieces.collect();
        pieces.map(Self).ok_or_else(|| MediaError::Unreadable("mtmd made no chunks of it".into()))
    }

    /// Cells of the context that it takes.
    pub fn n_tokens(&self) -> usize {
        let of_piece = |piece: &Piece| match piece {
            Piece::Tokens(tokens) => tokens.len(),
            Piece::Chunk(chunk) => chunk.n_tokens,
        };
        self.0.iter().map(of_piece).sum()
    }

    /// Bytes of memory that it takes until it is evaluated.
    pub fn n_bytes(&self) -> usize {
        let of_piece = |piece: &Piece| if let Piece::Chunk(chunk) = piece { chunk.n_bytes() } else { 0 };
        self.0.iter().map(of_piece).sum()
    }
}

/// Bytes for each token of a medium besides its numbers: placeholders, positions, a part of an embedding.
const TOKEN_BYTES: usize = 4 << 10;

#[derive(Clone, Debug)]
enum Piece {
    /// Tokens around and between the parts of an image.
    Tokens(Vec<Token>),
    Chunk(Arc<Chunk>),
}

/// A part of a medium that is encoded at once.
#[derive(Debug)]
pub struct Chunk {
    raw: Owned<llama::mtmd_input_chunk>,
    /// Cells of the context.
    n_tokens: usize,
    /// Bytes of its pixels, or of its sound, as numbers.
    n_bytes: usize,
    /// One for each position.
    placeholders: Vec<Token>,
    non_causal: bool,
}

// SAFETY: immutable once made.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Cells of the context that it takes. For models with M-RoPE more than its positions.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Bytes of memory that it takes until it is evaluated.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes + self.n_tokens * TOKEN_BYTES
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
        if add_special && unsafe { llama::llama_vocab_get_add_eos(model.shared.raw.vocab()) } {
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
            shim::hobbit_media_encode(
                context,
                chunk.raw.as_ptr(),
                embeddings.as_mut_ptr(),
                embeddings.len(),
                text,
                capacity,
            ) && shim::hobbit_media_positions(
                context,
                chunk.raw.as_ptr(),
                first,
                positions.as_mut_ptr(),
                text,
                capacity,
            )
        };
        if done {
            // In the shared cache they would spoil every sequence.
            if !are_finite(&embeddings) {
                let reason = "the projector makes numbers of this image or sound that are not finite";
                return Err(EvalError::Decode(reason.into()));
            }
            return Ok((embeddings, positions));
        }
        let reasons = [text_of(&message), log::take_errors()];
        let reason = reasons.into_iter().find(|reason| !reason.is_empty()).unwrap_or_default();
        Err(EvalError::Decode(format!("the projector cannot encode this image or sound: {}", reason.trim())))
    }
}

impl Session {
    /// Encodes a chunk and evaluates it at the end of a sequence. Logits of its last entry are kept. For callers of
    /// [`Session::evaluate`].
    ///
    /// # Errors
    /// A chunk that cannot be encoded, or needs a larger ubatch; as [`Session::evaluate`].
    pub fn evaluate_media(&mut self, projector: &Projector, chunk: &Chunk, sequence: i32) -> Result<(), EvalError> {
        let first = self.sequences.tokens(sequence).len() as i32;
        let (n, n_ubatch) = (chunk.n_tokens, self.context().n_ubatch());
        if chunk.non_causal && n > n_ubatch {
            return Err(EvalError::Decode(format!(
                "the image has {n} tokens, which this model computes at once, and a ubatch of the session has \
                 {n_ubatch}"
            )));
        }
        let (embeddings, positions) = projector.encode(chunk, first)?;
        let context = self.context().as_ptr();
        if chunk.non_causal {
            // SAFETY: the context is live.
            unsafe { llama::llama_set_causal_attn(context, false) };
        }
        let evaluated = self.evaluate_embeddings(&embeddings, &positions, n, sequence, first);
        if chunk.non_causal {
            // SAFETY: as above.
            unsafe { llama::llama_set_causal_attn(context, true) };
        }
        evaluated?;
        let last = n.saturating_sub(1) % self.context().n_batch().max(1);
        if let Some(own) = self.sequences.get_mut(sequence) {
            (first as usize..).zip(&chunk.placeholders).for_each(|(at, token)| own.add(at, *token, last));
        }
        Ok(())
    }

    fn evaluate_embeddings(
        &mut self,
        embeddings: &[f32],
        positions: &[i32],
        n: usize,
        sequence: i32,
        first: i32,
    ) -> Result<(), EvalError> {
        let (width, n_sections) = (embeddings.len() / n.max(1), positions.len() / n.max(1));
        let n_batch = self.context().n_batch();
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
                token: null_mut(),
                embd: embd.as_mut_ptr(),
                pos: pos.as_mut_ptr(),
                n_seq_id: counts.as_mut_ptr(),
                seq_id: lists.as_mut_ptr(),
                logits: logits.as_mut_ptr(),
            };
            let speculator = self.speculator.as_deref_mut();
            self.decoder.decode(&mut self.sequences, speculator, batch, &[(sequence, first)])?;
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
        let (mut at, cuts) = (from, self.sequences.cuts(&prompt.tokens, from));
        for (start, chunk) in prompt.chunks.iter().filter(|(start, _)| *start >= from) {
            if encoder.is_none() {
                encoder = Some(projector.encoder().map_err(|error| EvalError::Decode(error.to_string()))?);
            }
            let before = (at < start).then(|| cuts_from(&cuts, at));
            self.feed_by(&prompt.tokens[at..start], before.as_deref(), usize::MAX, &mut |_| {})?;
            if self.n_past() + chunk.n_tokens > self.context().n_ctx_seq() as usize {
                return Err(self.sequences.context_full());
            }
            self.evaluate_media(projector, chunk, 0)?;
            let own = &mut self.sequences.all[0];
            (own.n_ahead, own.n_prompt) = (0, own.tokens.len());
            at = start + chunk.n_positions();
        }
        drop(encoder);
        if at >= prompt.tokens.len() {
            return Ok(());
        }
        self.feed_by(&prompt.tokens[at..], Some(&cuts_from(&cuts, at)), usize::MAX, &mut |_| {})
    }
}

/// Cuts behind token `at` of a prompt, counted from there.
fn cuts_from(cuts: &[Cut], at: usize) -> Vec<Cut> {
    cuts.iter().filter(|cut| cut.at > at).map(|cut| Cut { at: cut.at - at, ..*cut }).collect()
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
fn split<'a>(mut text: &'a [u8], marker: &[u8]) -> Vec<&'a [u8]> {
    let mut parts = Vec::new();
    while let Some(at) = text.windows(marker.len().max(1)).position(|own| own == marker) {
        parts.push(&text[..at]);
        text = &text[at + marker.len()..];
    }
    parts.push(text);
    parts
}
