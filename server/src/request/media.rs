//! Images and sound of requests: their bytes, and their evaluation's parts.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use hobbit::engine::{Chunks, Encoder, Media, MediaError, MediaPrompt};
use serde_json::Value;

use crate::app::App;
use crate::backend::Backend;
use crate::error::ApiError;
use crate::held::Held;

/// Base64 of requests. Padding may be absent, as in llama-server.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Maximum images and sounds of a request.
pub const COUNT_MAX: usize = 32;

/// Bytes that chunks take while they wait for the engine.
pub fn bytes(chunks: &Chunks) -> usize {
    chunks.iter().map(|(_, chunk)| chunk.n_bytes()).sum()
}

/// The bytes of `{"url": "data:image/…;base64,…"}`. The server fetches nothing, so that no request can have it read
/// its own files or network.
pub fn image(image: &Value) -> Result<Vec<u8>, ApiError> {
    let url = image.get("url").unwrap_or(image).as_str();
    let url = url.ok_or_else(|| ApiError::invalid("image_url needs a string 'url'"))?;
    if url.starts_with("http") || url.starts_with("file:") {
        let message = "images are not fetched from URLs; send the bytes: data:image/png;base64,...";
        return Err(ApiError::invalid(message));
    }
    match url.split_once(',') {
        Some((kind, data)) if kind.starts_with("data:image/") && kind.ends_with(";base64") => {
            decoded(data, "image_url")
        }
        _ => Err(ApiError::invalid("Invalid url: expected data:image/TYPE;base64,DATA")),
    }
}

/// The bytes of `{"data": "…", "format": "wav"}`.
pub fn sound(sound: &Value) -> Result<Vec<u8>, ApiError> {
    if !matches!(sound.get("format").and_then(Value::as_str), Some("wav" | "mp3")) {
        return Err(ApiError::invalid("input_audio.format must be either 'wav' or 'mp3'"));
    }
    let data = sound.get("data").and_then(Value::as_str);
    decoded(data.ok_or_else(|| ApiError::invalid("input_audio needs a string 'data'"))?, "input_audio")
}

/// The bytes of a text in base64.
pub fn decoded(data: &str, what: &str) -> Result<Vec<u8>, ApiError> {
    // Some encoders break lines.
    let data: Vec<u8> = data.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    BASE64.decode(data).map_err(|error| ApiError::invalid(format!("{what}: no base64: {error}")))
}

/// Reads files of images and sound; what keeps the projector open until they are evaluated. Each counts in the
/// request's memory as soon as it is read.
///
/// # Errors
/// Bytes that are no image or sound; more than the context or the memory of requests can hold; a projector that cannot
/// be opened any more.
pub async fn read(
    app: &App,
    backend: &Backend,
    files: Vec<Vec<u8>>,
    held: &Held,
) -> Result<(Vec<Media>, Option<Encoder>), ApiError> {
    let Some((projector, _)) = backend.projector.as_ref().filter(|_| !files.is_empty()) else {
        return Ok((Vec::new(), None));
    };
    let _turn = app.memory.media_turn().await?;
    let encoder = app.work(|| projector.encoder()).await.map_err(|error| ApiError::server(error.to_string()))?;
    let (mut media, mut n_tokens, mut n_bytes) = (Vec::new(), 0, 0);
    let file_bytes: usize = files.iter().map(Vec::len).sum();
    for file in files {
        let read: Media = app.work(|| projector.read(&file)).await.map_err(invalid)?;
        (n_tokens, n_bytes) = (n_tokens + read.n_tokens(), n_bytes + read.n_bytes());
        if n_tokens >= backend.n_ctx {
            return Err(ApiError::exceeds_context(n_tokens, backend.n_ctx, backend.model.info().n_ctx_train as usize));
        }
        held.grow_to(file_bytes + n_bytes).await?;
        media.push(read);
    }
    Ok((media, Some(encoder)))
}

/// Tokens of a text in which the server's marker stands for each of `media`.
///
/// # Errors
/// A text that the vocabulary cannot encode.
pub fn tokens(backend: &Backend, text: &str, media: &[Media]) -> Result<MediaPrompt, ApiError> {
    match backend.projector.as_ref().filter(|_| !media.is_empty()) {
        Some((projector, marker)) => projector.prompt(text.as_bytes(), marker, media, true).map_err(invalid),
        None => {
            let tokens = super::prompts::tokens(&backend.model, text, true)?;
            Ok(MediaPrompt { tokens, ..MediaPrompt::default() })
        }
    }
}

fn invalid(error: MediaError) -> ApiError {
    ApiError::invalid(error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_bytes_are_taken() {
        let url = |url: &str| image(&json!({"url": url})).map_err(|error| error.message);
        assert_eq!(url("data:image/png;base64,AAEC"), Ok(vec![0, 1, 2]));
        assert_eq!(url("data:image/png;base64,AA\r\nEC\n"), Ok(vec![0, 1, 2]), "lines");
        assert_eq!(url("data:image/png;base64,AAE"), Ok(vec![0, 1]), "no padding");
        for wrong in ["http://127.0.0.1/x", "https://x/y.png", "file:///etc/passwd", "AAEC", "data:image/png,AAEC", ""]
        {
            assert!(url(wrong).is_err(), "{wrong}");
        }
        assert!(url("data:image/png;base64,A?").unwrap_err().contains("base64"));
        assert_eq!(sound(&json!({"data": "AAEC", "format": "wav"})).unwrap(), [0, 1, 2]);
        assert!(sound(&json!({"data": "AAEC", "format": "ogg"})).is_err());
        assert!(sound(&json!({"format": "mp3"})).is_err());
    }
}
