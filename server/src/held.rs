//! Memory of requests: a reserved part of the memory budget. Each request holds its share from the first byte of its
//! body until it is answered.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;

use crate::error::ApiError;
use crate::lock;

/// Unit in which memory is counted, in bytes.
const UNIT: usize = 16 << 10;

/// Memory of all requests, as a multiple of the largest body. Prose takes 38 times its length, as [`cost`] counts:
/// the longest prose that can be processed has a third of the largest body's bytes.
const BODY_FACTOR: usize = 12;

/// Minimum memory of all requests, in bytes, even if bodies are limited to less.
const LEAST_BYTES: usize = 1 << 20;

/// Buffers of connections, and answers.
const OTHER_BYTES: usize = 16 << 20;

/// Bytes that all requests may hold, for bodies of at most `max_body` bytes.
fn room(max_body: usize) -> usize {
    max_body.saturating_mul(BODY_FACTOR).max(LEAST_BYTES)
}

/// Bytes of the memory budget reserved for requests with bodies of at most `max_body` bytes. Conversations that may be
/// continued take as many as a body.
pub fn reserved(max_body: usize) -> u64 {
    room(max_body).saturating_add(max_body).saturating_add(OTHER_BYTES) as u64
}

/// Longest wait of a request for memory that others hold. Most requests hold it for less than a second.
const WAIT: Duration = Duration::from_secs(30);

/// A request that lacks no more than this takes free units ahead of larger ones that wait.
const SMALL_UNITS: usize = 2;

/// Memory that all requests may hold.
#[derive(Debug)]
pub struct Memory {
    all: Arc<Pool>,
    arriving: Arc<Pool>,
    /// Held by the request that reads images or sound.
    media: tokio::sync::Mutex<()>,
}

/// Units of memory, and those that are free.
#[derive(Debug)]
struct Pool {
    n_units: usize,
    n_free: Mutex<usize>,
    given_back: Notify,
    /// Large requests wait in order: the first one holds the lock.
    queue: tokio::sync::Mutex<()>,
}

/// Memory that one request holds.
#[derive(Debug)]
pub struct Held {
    pool: Arc<Pool>,
    n_units: Mutex<usize>,
}

impl Memory {
    /// Memory for bodies of at most `max_body` bytes.
    pub fn new(max_body: usize) -> Self {
        let n_units = room(max_body) / UNIT;
        Self { all: Pool::new(n_units), arriving: Pool::new(n_units / 2), media: tokio::sync::Mutex::default() }
    }

    /// A request that holds no memory yet.
    pub fn hold(&self) -> Held {
        Held { pool: Arc::clone(&self.all), n_units: Mutex::default() }
    }

    /// Waits for the turn to read images and sound, which take memory one by one: of two requests at once, each could
    /// have a part and wait for the other's.
    ///
    /// # Errors
    /// Others took too long.
    pub async fn media_turn(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, ApiError> {
        let turn = tokio::time::timeout(WAIT, self.media.lock()).await;
        turn.map_err(|_| ApiError::busy("other requests have images or sound read"))
    }

    /// Memory for a large body whose first byte has not arrived. Arriving bodies may take half of the memory in
    /// total, so that slow clients leave the rest to complete requests.
    pub fn arrive(&self) -> Held {
        Held { pool: Arc::clone(&self.arriving), n_units: Mutex::default() }
    }
}

impl Pool {
    fn new(n_units: usize) -> Arc<Self> {
        let (given_back, queue) = (Notify::new(), tokio::sync::Mutex::new(()));
        Arc::new(Self { n_units, n_free: Mutex::new(n_units), given_back, queue })
    }

    /// Takes `n` units if they are free.
    fn try_take(&self, n: usize) -> bool {
        let mut n_free = lock(&self.n_free);
        let is_free = *n_free >= n;
        if is_free {
            *n_free -= n;
        }
        is_free
    }

    /// Takes `n` units as soon as they are free.
    async fn take(&self, n: usize) {
        let _turn = if n > SMALL_UNITS { Some(self.queue.lock().await) } else { None };
        loop {
            // Register before checking, so that no release is missed.
            let given_back = self.given_back.notified();
            if self.try_take(n) {
                return;
            }
            given_back.await;
        }
    }

    fn give_back(&self, n: usize) {
        if n > 0 {
            *lock(&self.n_free) += n;
            self.given_back.notify_waiters();
        }
    }
}

impl Held {
    /// Grows to at least `bytes`, waiting for memory that others hold.
    ///
    /// # Errors
    /// More than the total, or others held the memory for too long.
    pub async fn grow_to(&self, bytes: usize) -> Result<(), ApiError> {
        let wanted = bytes.div_ceil(UNIT);
        if wanted > self.pool.n_units {
            let max_body = bytes.div_ceil(BODY_FACTOR);
            return Err(ApiError::too_large_to_work_on(bytes, self.pool.n_units * UNIT, max_body));
        }
        let more = wanted.saturating_sub(*lock(&self.n_units));
        if more == 0 {
            return Ok(());
        }
        let taken = tokio::time::timeout(WAIT, self.pool.take(more)).await;
        taken.map_err(|_| ApiError::busy("other requests hold the memory for requests (--max-body)"))?;
        *lock(&self.n_units) += more;
        Ok(())
    }

    /// Grows by `bytes`. Errors are those of [`Self::grow_to`].
    pub async fn grow_by(&self, bytes: usize) -> Result<(), ApiError> {
        let n_units = *lock(&self.n_units);
        self.grow_to((n_units * UNIT).saturating_add(bytes)).await
    }

    /// Releases all but `bytes`.
    pub fn shrink_to(&self, bytes: usize) {
        let mut n_units = lock(&self.n_units);
        let excess = n_units.saturating_sub(bytes.div_ceil(UNIT));
        *n_units -= excess;
        self.pool.give_back(excess);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// Memory for each byte of a body: the byte, its copy in the JSON value, the template's output, and its token (at most
/// one a byte).
const BYTE: usize = BODY_FACTOR;

/// Bytes that a tokenizer needs for a piece of a text, such as a word.
const PIECE: usize = 130;

/// Maximum letters in one piece; each letter beyond counts as a piece.
const PIECE_LETTERS_MAX: usize = 32;

/// Bytes for a value of JSON: its place in a list that grows by doubling, and a number's digits.
const VALUE: usize = 176;

/// Further bytes for a list or an object, also as a value of chat templates.
const CONTAINER: usize = 1500;

/// Further bytes for a field of an object, also as a value of chat templates.
const FIELD: usize = 320;

/// Typical upper bound of bytes that a JSON body takes while it is processed. `[[1],[1],…]` takes 115 times its
/// length as values, prose 33 times as it is tokenized, single letters 80 times. A letter counts once, whether it is
/// one byte, several, or an escape. `by_letters`: the tokenizer starts from letters, not words.
pub fn cost(json: &[u8], by_letters: bool) -> usize {
    let (mut n_values, mut n_containers, mut n_fields, mut n_pieces) = (1usize, 0usize, 0usize, 0usize);
    let (mut is_text, mut n_letters) = (false, 0usize);
    // Pieces added by a letter that follows `n_letters` others.
    let letter = |n_letters: usize| usize::from(n_letters == 0 || n_letters > PIECE_LETTERS_MAX || by_letters);
    let mut bytes = json.iter();
    // The last text, to be told by what follows it: a colon follows a field's name.
    let (mut begin, mut end, mut name) = (0, 0, &json[..0]);
    while let Some(byte) = bytes.next() {
        if !is_text {
            match byte {
                b',' => (n_values, name) = (n_values + 1, &json[..0]),
                b'[' | b'{' => (n_containers, name) = (n_containers + 1, &json[..0]),
                b':' => (n_fields, name) = (n_fields + 1, &json[begin..end]),
                b'"' => {
                    (is_text, n_letters) = (true, 0);
                    begin = json.len() - bytes.len();
                    let n = if MEDIA_FIELDS.contains(&name) { media_bytes(bytes.as_slice(), true) } else { 0 };
                    bytes = bytes.as_slice()[n..].iter();
                    name = &json[..0];
                }
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => (is_text, end) = (false, json.len() - bytes.len() - 1),
            // The letter's first byte was counted.
            0x80..=0xbf => continue,
            b'a'..=b'z' | b'A'..=b'Z' | 0xc0.. => {
                n_pieces += letter(n_letters);
                n_letters += 1;
                continue;
            }
            b'\\' => match bytes.next() {
                Some(b'u') => match escaped(&mut bytes) {
                    // The second half of a surrogate pair; the first half was counted.
                    Some(0xdc00..=0xdfff) => continue,
                    Some(0x100..) => {
                        n_pieces += letter(n_letters);
                        n_letters += 1;
                        continue;
                    }
                    _ => n_pieces += 1,
                },
                _ => n_pieces += 1,
            },
            // A space belongs to the word after it.
            b' ' if n_letters > 0 => n_pieces += usize::from(by_letters),
            _ => n_pieces += 1,
        }
        n_letters = 0;
    }
    json.len() * BYTE + n_pieces * PIECE + n_values * VALUE + n_containers * CONTAINER + n_fields * FIELD
}

/// Names of the fields with the bytes of an image or sound.
const MEDIA_FIELDS: [&[u8]; 3] = [b"url", b"image_url", b"data"];

/// Shortest base64 that counts as bytes of an image or sound.
const MEDIA_BYTES_MIN: usize = 4096;

/// Length of the base64, perhaps with the beginning of a data URL, with which a text begins; 0 if it is short. It is
/// never tokenized: [`check_media`] refuses it elsewhere than in images and sound. `is_json`: line breaks are escaped.
fn media_bytes(text: &[u8], is_json: bool) -> usize {
    let (mut at, mut n) = (0, 0);
    while let Some(byte) = text.get(at) {
        at += match byte {
            b'\\' if is_json && matches!(text.get(at + 1), Some(b'n' | b'r')) => 2,
            b'\n' | b'\r' if !is_json => 1,
            byte if byte.is_ascii_alphanumeric() || b"+/=:;,-.".contains(byte) => 1,
            _ => break,
        };
        n += 1;
    }
    if n < MEDIA_BYTES_MIN { 0 } else { at }
}

/// Checks that long base64 of the names of images and sound is in a part of a message's content, where it is decoded.
///
/// # Errors
/// The name of a field that is elsewhere.
pub fn check_media(body: &Value) -> Result<(), &'static str> {
    /// `is_content`: within a message's content.
    fn check(value: &Value, is_content: bool) -> Result<(), &'static str> {
        match value {
            Value::Array(list) => list.iter().try_for_each(|value| check(value, is_content)),
            Value::Object(fields) => {
                // The source of a text document is tokenized.
                let is_content = is_content && fields.get("type").is_none_or(|kind| kind != "text");
                fields.iter().try_for_each(|(name, value)| field(name, value, is_content))
            }
            _ => Ok(()),
        }
    }
    fn field(name: &str, value: &Value, is_content: bool) -> Result<(), &'static str> {
        let is_long = value.as_str().is_some_and(|text| media_bytes(text.as_bytes(), false) > 0);
        match MEDIA_FIELDS.iter().position(|field| *field == name.as_bytes()) {
            Some(at) if is_long && !is_content => Err(["url", "image_url", "data"][at]),
            _ => check(value, is_content),
        }
    }
    let Value::Object(fields) = body else { return check(body, false) };
    let of_message = |(name, value): (&String, &Value)| match name.as_str() {
        "content" | "output" => check(value, true),
        name => field(name, value, false),
    };
    fields.iter().try_for_each(|(name, value)| match (name.as_str(), value) {
        ("messages" | "input", Value::Array(messages)) => messages.iter().try_for_each(|message| match message {
            Value::Object(fields) => fields.iter().try_for_each(of_message),
            other => check(other, false),
        }),
        (name, value) => field(name, value, false),
    })
}

/// The number given by the four hex digits after `\u`; `None`, with nothing consumed, if they are not digits.
fn escaped(bytes: &mut std::slice::Iter<'_, u8>) -> Option<u32> {
    let digits = bytes.as_slice().get(..4)?;
    let number = u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    *bytes = bytes.as_slice()[4..].iter();
    Some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_count_by_what_they_take() {
        let n = 1000;
        for (value, least) in [("1", 157), ("[1]", 461), ("[[[[1]]]]", 1373), ("{\"a\":1}", 573), ("\"a\"", 157)] {
            let json = format!("[{}]", vec![value; n].join(","));
            assert!(cost(json.as_bytes(), false) >= n * least, "{value}");
        }
        let text = format!("\"{}\\\"[,\"", "[,{:\\\\".repeat(n));
        assert!(cost(text.as_bytes(), false) < text.len() * (BYTE + PIECE) + 1000, "commas of a text are no values");
        assert!(cost(b"\"\\", false) > 0, "a text without an end");
    }

    #[test]
    fn texts_count_by_their_pieces() {
        let n_pieces = |text: &str, by_letters| {
            let json = format!("\"{text}\"");
            (cost(json.as_bytes(), by_letters) - json.len() * BYTE - VALUE) / PIECE
        };
        assert_eq!(n_pieces("The river runs", false), 3);
        assert_eq!(n_pieces("The river runs", true), 14);
        assert_eq!(n_pieces("a, b\\n42", false), 7);
        assert_eq!(n_pieces(&"a".repeat(PIECE_LETTERS_MAX + 101), false), 101);
        assert_eq!(n_pieces(&" ".repeat(100), false), 100);
        for word in ["река", "\\u0440\\u0435\\u043a\\u0430"] {
            assert_eq!((n_pieces(word, false), n_pieces(word, true)), (1, 4), "{word}");
        }
        assert_eq!(n_pieces("\\u0022\\u0041 \\ud83d\\ude00", false), 4);
        // Broken escapes.
        assert_eq!((n_pieces("\\u04", false), n_pieces("\\uwxyz", false)), (3, 2));
    }

    #[test]
    fn bytes_of_images_count_as_bytes() {
        let base64 = "iVBORw0KGgo+/".repeat(100_000);
        let part = format!(r#"{{"type": "image_url", "image_url": {{"url": "data:image/png;base64,{base64}"}}}}"#);
        let json = format!(r#"{{"messages": [{{"role": "user", "content": [{part}]}}]}}"#);
        assert!(cost(json.as_bytes(), true) < json.len() * (BYTE + 1));
        let lines = json.replace("o+/", "o\\r\\n");
        assert!(cost(lines.as_bytes(), true) < lines.len() * (BYTE + 1), "with line breaks");
        let check = |json: &str| check_media(&serde_json::from_str(json).unwrap());
        assert_eq!(check(&json), Ok(()));
        for elsewhere in [
            format!(r#"{{"prompt": "x", "data": "{base64}"}}"#),
            format!(r#"{{"tools": [{{"url": "{base64}"}}], "messages": []}}"#),
            format!(r#"{{"messages": [{{"role": "user", "url": "{base64}", "content": ""}}]}}"#),
            format!(r#"{{"messages": [{{"content": [{{"source": {{"type": "text", "data": "{base64}"}}}}]}}]}}"#),
        ] {
            assert!(check(&elsewhere).is_err());
        }
        // Text of other fields is tokenized.
        let text = format!(r#"{{"prompt": "{base64}"}}"#);
        assert!(cost(text.as_bytes(), false) > text.len() * 2 * BYTE);
        for text in [r#"{"url": "", "data": 1, "content": "#, r#"{"url": [1, "#, r#"{"data": {"#] {
            let text = format!("{text}\"{base64}\"");
            assert!(cost(text.as_bytes(), false) > text.len() * 2 * BYTE);
        }
    }

    #[test]
    fn letters_of_all_scripts_fit() {
        let all = room(4 << 20);
        let russian = format!("{{\"prompt\": \"{}\"}}", "\\u0440".repeat(70_000));
        let chinese = format!("{{\"prompt\": \"{}\"}}", "河".repeat(134_000));
        for json in [russian, chinese] {
            for by_letters in [false, true] {
                let cost = cost(json.as_bytes(), by_letters);
                assert!(cost < all / 2, "{} KiB take {} KiB", json.len() >> 10, cost >> 10);
            }
        }
    }

    #[tokio::test]
    async fn released_memory_is_free_for_others() {
        let memory = Memory::new(1);
        let (one, two) = (memory.hold(), memory.hold());
        one.grow_to(LEAST_BYTES).await.unwrap();
        assert_eq!(one.grow_to(LEAST_BYTES + 1).await.unwrap_err().status.as_u16(), 413);
        one.shrink_to(UNIT);
        two.grow_to(LEAST_BYTES - UNIT).await.unwrap();
        drop(one);
        two.grow_to(LEAST_BYTES).await.unwrap();
        // Bodies that arrive may take half.
        let arriving = memory.arrive();
        arriving.grow_to(LEAST_BYTES / 2).await.unwrap();
        assert_eq!(arriving.grow_to(LEAST_BYTES).await.unwrap_err().status.as_u16(), 413);
    }

    #[tokio::test]
    async fn small_requests_do_not_wait_for_large_ones() {
        let memory = Memory::new(1);
        let (one, large, small) = (memory.hold(), memory.hold(), memory.hold());
        one.grow_to(UNIT).await.unwrap();
        let mut waits = Box::pin(large.grow_to(LEAST_BYTES));
        tokio::select! {
            biased;
            _ = &mut waits => panic!("a unit is held"),
            () = std::future::ready(()) => {}
        }
        small.grow_to(SMALL_UNITS * UNIT).await.unwrap();
        drop((one, small));
        waits.await.unwrap();
    }
}
