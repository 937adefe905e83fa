//! Embeddings: texts as vectors, in OpenAI's shape and in llama-server's own.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::backend::Backend;
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Asked;
use crate::job::{Event, Running};
use crate::json::{Fields, get, text, whole};
use crate::request::inputs::inputs;

/// Bytes for each number of an embedding: the float, and its digits in the answer's buffer, which doubles as it grows.
const NUMBER_BYTES: usize = 4 + 24;

/// The Euclidean norm, llama.cpp's number for it.
const EUCLIDEAN: i64 = 2;

/// The greatest of the numbers that `embd_normalize` 0 scales to.
const INT16_SCALE: f64 = 32760.0;

/// The embedding of an input: one row, or one per token.
pub struct Embedded {
    pub rows: Vec<Vec<f32>>,
    pub n_tokens: usize,
}

/// `POST /v1/embeddings`
pub async fn openai(Asked { app, backend, mut body, held }: Asked) -> Result<Response, ApiError> {
    refuse_text_server(&app)?;
    if backend.pooling.is_none() {
        return Err(ApiError::invalid(
            "Pooling type 'none' is not OAI compatible. Please use a different pooling type",
        ));
    }
    let is_base64 = match text(&body, "encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            return Err(ApiError::invalid("The format to return the embeddings in. Can be either float or base64"));
        }
    };
    let is_native = get(&body, "input").is_none();
    let all = embed(&app, &backend, &mut body, held, false).await?;
    if is_native {
        return Ok(app.work(|| plain(&all)).await);
    }
    let n_tokens: usize = all.iter().map(|input| input.n_tokens).sum();
    let data = all.iter().enumerate().map(|(index, input)| {
        let row = input.rows.first().map_or(&[][..], Vec::as_slice);
        let bytes = || row.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let embedding = if is_base64 { Numbers::Base64(STANDARD.encode(bytes())) } else { Numbers::Plain(row) };
        Row { embedding, index, object: "embedding", encoding_format: is_base64.then_some("base64") }
    });
    let model = get(&body, "model").and_then(Value::as_str).unwrap_or(&backend.name);
    let usage = json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens});
    Ok(app.work(|| Json(List { model, object: "list", usage, data: data.collect() }).into_response()).await)
}

/// OpenAI's answer. Numbers are written directly as text: JSON values would take ten times the memory.
#[derive(Serialize)]
struct List<'a> {
    model: &'a str,
    object: &'static str,
    usage: Value,
    data: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    embedding: Numbers<'a>,
    index: usize,
    object: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoding_format: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Numbers<'a> {
    Plain(&'a [f32]),
    Base64(String),
}

/// `POST /embedding`
pub async fn native(Asked { app, backend, mut body, held }: Asked) -> Result<Response, ApiError> {
    let all = embed(&app, &backend, &mut body, held, false).await?;
    Ok(app.work(|| plain(&all)).await)
}

fn refuse_text_server(app: &App) -> Result<(), ApiError> {
    if !app.settings.slots.embeddings.0 {
        return Err(ApiError::unsupported("This server does not support embeddings. Start it with `--embeddings`"));
    }
    Ok(())
}

/// llama-server's own shape.
fn plain(all: &[Embedded]) -> Response {
    #[derive(Serialize)]
    struct Rows<'a> {
        index: usize,
        embedding: &'a [Vec<f32>],
    }
    let rows = all.iter().enumerate().map(|(index, input)| Rows { index, embedding: &input.rows });
    Json(rows.collect::<Vec<_>>()).into_response()
}

/// The vectors of all inputs, in order; as many run at once as there are slots. Takes the inputs out of the body.
/// `dimensions` cuts each vector to its first numbers, which are then scaled. `truncates`: an input that is too long
/// loses its end.
pub async fn embed(
    app: &App,
    backend: &Backend,
    body: &mut Fields,
    held: Held,
    truncates: bool,
) -> Result<Vec<Embedded>, ApiError> {
    refuse_text_server(app)?;
    let name = if get(body, "input").is_some() { "input" } else { "content" };
    let input = body.remove(name).filter(|input| !input.is_null());
    let input = input.ok_or_else(|| ApiError::invalid("\"input\" or \"content\" must be provided"))?;
    let n_max = if truncates { backend.n_ctx.min(backend.n_batch) } else { usize::MAX };
    let inputs = app.work(move || inputs(&input, &backend.model, n_max)).await?;
    let n_tokens: usize = inputs.iter().map(|input| input.len()).sum();
    let n_embd = backend.model.n_embd();
    let dimensions = whole(body, &["dimensions"], 1..=n_embd as i64)?.map_or(n_embd, |n| n as usize);
    let n_rows = if backend.pooling.is_none() { n_tokens } else { inputs.len() };
    let bytes = n_tokens * size_of::<i32>() + n_rows * n_embd * NUMBER_BYTES;
    held.shrink_to(bytes);
    held.grow_to(bytes).await?;
    let held = &Arc::new(held);
    // Rows of single tokens are not normalised.
    let norm = match backend.pooling {
        None => -1,
        Some(_) => whole(body, &["embd_normalize"], -1..=i64::from(i32::MAX))?.unwrap_or(EUCLIDEAN),
    };
    let work = inputs.into_iter().map(|prompt| async move {
        let running = backend.embed(prompt, held);
        let (mut rows, n_tokens) = rows(running).await?;
        for row in &mut rows {
            row.truncate(dimensions);
            normalise(row, norm);
        }
        Ok::<_, ApiError>(Embedded { rows, n_tokens })
    });
    stream::iter(work).buffered(app.settings.n_slots).try_collect().await
}

/// Waits for an embedding: rows, and the number of tokens of the input.
async fn rows(mut running: Running) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    loop {
        match running.next().await {
            Event::Embedding(rows) => return Ok((rows, running.n_prompt)),
            Event::Failed(error) => return Err(error),
            Event::Started(_) | Event::Scores(_) | Event::Progress(_) | Event::Token(_) | Event::Done(_) => {}
        }
    }
}

/// Scales a row as llama.cpp's `common_embd_normalize` does: -1 leaves it, 0 scales to 16-bit integers, other numbers
/// are a p-norm scaled to 1.
fn normalise(row: &mut [f32], norm: i64) {
    let values = || row.iter().map(|value| f64::from(*value).abs());
    let length = match norm {
        -1 => return,
        0 => values().fold(0.0, f64::max) / INT16_SCALE,
        EUCLIDEAN => values().map(|value| value * value).sum::<f64>().sqrt(),
        p => values().map(|value| value.powf(p as f64)).sum::<f64>().powf(1.0 / p as f64),
    };
    let scale = if length > 0.0 { (1.0 / length) as f32 } else { 0.0 };
    row.iter_mut().for_each(|value| *value *= scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms() {
        let scaled = |norm: i64| {
            let mut row = [3.0, -4.0];
            normalise(&mut row, norm);
            row
        };
        assert_eq!(scaled(-1), [3.0, -4.0]);
        assert_eq!(scaled(2), [0.6, -0.8]);
        assert_eq!(scaled(0), [24570.0, -32760.0]);
        assert_eq!(scaled(1), [3.0 * (1.0 / 7.0), -4.0 * (1.0 / 7.0)]);
        let mut zero = [0.0; 2];
        normalise(&mut zero, 2);
        assert_eq!(zero, [0.0; 2]);
    }
}
