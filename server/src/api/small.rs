//! Endpoints without a generation: models, tokens, slots, metrics.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use hobbit::Model;
use hobbit::engine::ExpertPlace;
use hobbit::options::Token;
use hobbit_core::expert::Precision;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use crate::adapters;
use crate::app::App;
use crate::backend::Backend;
use crate::error::ApiError;
use crate::http::{AnyBody, Asked};
use crate::job::SlotAction;
use crate::json::{Fields, boolean, get, list, shortened, text};
use crate::request::params::{Params, shown};
use crate::request::prompts;
use crate::status::{self, SlotState};
use hobbit_programs::saved::is_file_name;

type Answer = Result<Json<Value>, ApiError>;

/// `GET /health`
pub async fn health(State(app): State<Arc<App>>) -> Answer {
    app.backend()?;
    Ok(Json(json!({"status": "ok"})))
}

/// `GET /v1/models`
pub async fn models(State(app): State<Arc<App>>) -> Answer {
    let backend = app.backend()?;
    let info = backend.model.info();
    let settings = &app.settings;
    let name = &backend.name;
    Ok(Json(json!({
        "models": [{
            "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model",
            "description": "", "tags": settings.http.tags,
            "capabilities": [if settings.slots.embeddings.0 { "embedding" } else { "completion" }],
            "parameters": "", "details": {"parent_model": "", "format": "gguf", "family": "", "families": [""],
                "parameter_size": "", "quantization_level": ""},
        }],
        "object": "list",
        "data": [{
            "id": name,
            "aliases": settings.http.alias,
            "tags": settings.http.tags,
            "object": "model",
            "created": app.began,
            "owned_by": "llamacpp",
            "meta": {
                "vocab_type": backend.model.vocab_type(),
                "n_vocab": backend.model.n_vocab(),
                "n_ctx": backend.n_ctx,
                "n_ctx_train": info.n_ctx_train,
                "n_embd": backend.model.n_embd(),
                "n_params": info.n_params,
                "size": info.tensor_bytes,
                "ftype": info.description,
            },
        }],
    })))
}

/// `GET /v1/models/NAME`, by any of the model's names.
pub async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer {
    let all = models(State(Arc::clone(&app))).await?;
    if !app.settings.http.alias.contains(&name) {
        let message = format!("The model '{}' does not exist", shortened(&name));
        return Err(ApiError::not_found(message));
    }
    Ok(Json(all.0["data"][0].clone()))
}

/// `GET /props`
pub async fn props(State(app): State<Arc<App>>) -> Answer {
    let backend = app.backend()?;
    let info = backend.model.info();
    let special = backend.model.special_tokens();
    let [sees, hears] = backend.takes_media();
    let defaults = Params::of(&Fields::new(), &app)?;
    let templates = &backend.templates;
    let mut props = json!({
        "default_generation_settings": {
            "params": shown(&defaults.generate, &backend.model, true, false, false),
            "n_ctx": backend.n_ctx,
        },
        "total_slots": app.settings.n_slots,
        "model_alias": backend.name,
        "model_ftype": info.description,
        "model_path": info.path,
        "modalities": {
            "vision": sees,
            "video": false,
            "audio": hears,
        },
        "endpoint_slots": app.settings.http.endpoint_slots.0,
        "endpoint_props": app.settings.http.endpoint_props.0,
        "endpoint_metrics": app.settings.http.endpoint_metrics.0,
        "ui": app.settings.http.ui.0,
        "ui_settings": {},
        "chat_template": templates.source(),
        "chat_template_caps": templates.capabilities(),
        "bos_token": spelled(backend, special.bos),
        "eos_token": spelled(backend, special.eos),
        "build_info": super::build(),
        "is_sleeping": false,
        "cors_proxy_enabled": false,
    });
    if !templates.source_tool_use().is_empty() {
        props["chat_template_tool_use"] = json!(templates.source_tool_use());
    }
    Ok(Json(props))
}

/// The text of a special token; empty without one.
fn spelled(backend: &Backend, token: Option<Token>) -> String {
    token.map_or_else(String::new, |token| backend.spelled(&[token]))
}

/// `GET /tokenizer_info`, vLLM's: lm-eval asks there whether it may use this server's tokenizer.
pub async fn tokenizer_info(State(app): State<Arc<App>>) -> Answer {
    let backend = app.backend()?;
    let special = backend.model.special_tokens();
    let text = |token: Option<Token>| token.map(|token| spelled(backend, Some(token)));
    Ok(Json(json!({
        "bos_token": text(special.bos), "eos_token": text(special.eos), "chat_template": backend.templates.source(),
    })))
}

/// `POST /props`
pub async fn set_props(State(app): State<Arc<App>>) -> Answer {
    if !app.settings.http.endpoint_props.0 {
        let message = "This server does not support changing global properties. Start it with `--props`";
        return Err(ApiError::unsupported(message));
    }
    Ok(Json(json!({"success": true})))
}

/// The query of `/slots`.
#[derive(Debug, Deserialize)]
pub struct SlotsQuery {
    fail_on_no_slot: Option<String>,
}

/// `GET /slots`
pub async fn slots(State(app): State<Arc<App>>, Query(query): Query<SlotsQuery>) -> Answer {
    if !app.settings.http.endpoint_slots.0 {
        return Err(ApiError::unsupported("This server does not support slots endpoint. Start it with `--slots`"));
    }
    let backend = app.backend()?;
    let state = backend.status.get();
    if query.fail_on_no_slot.is_some_and(|word| word != "0") && state.slots.iter().all(|slot| slot.is_processing) {
        return Err(ApiError::unavailable("no slot available"));
    }
    // Waits for the layer being computed.
    let share = tokio::task::block_in_place(|| backend.model.evaluated_share());
    Ok(Json(state.slots.iter().map(|slot| slot_json(slot, backend, share)).collect()))
}

/// `share`: the evaluated part of the tokens that are being evaluated.
fn slot_json(slot: &SlotState, backend: &Backend, share: f64) -> Value {
    let mut value = json!({
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": backend.drafting.n_max > 0,
        "is_processing": slot.is_processing,
        "n_past": slot.n_past,
    });
    let Some(run) = &slot.run else { return value };
    let n_remain = match run.generate.as_ref().and_then(|generate| generate.n_predict) {
        Some(n) if slot.is_processing => n.saturating_sub(run.counts.n_predicted) as i64,
        _ => -1,
    };
    let n_decoded = if slot.is_processing { run.counts.n_predicted } else { 0 };
    value["id_task"] = json!(run.job);
    value["n_prompt_tokens"] = json!(run.n_prompt);
    value["n_prompt_tokens_processed"] = json!(run.n_processed_with(share));
    value["n_prompt_tokens_cache"] = json!(run.counts.n_cached);
    if let Some(generate) = &run.generate {
        value["params"] = shown(generate, &backend.model, false, false, false);
    }
    value["next_token"] = json!([{
        "has_next_token": slot.is_processing,
        "has_new_line": run.has_new_line,
        "n_remain": n_remain,
        "n_decoded": n_decoded,
    }]);
    value
}

/// The query of `/slots/N`.
#[derive(Debug, Deserialize)]
pub struct ActionQuery {
    action: Option<String>,
}

/// `POST /slots/N?action=save|restore|erase`
pub async fn act_on_slot(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Query(query): Query<ActionQuery>,
    AnyBody(body, _held): AnyBody,
) -> Answer {
    let Some(directory) = &app.settings.slots.slot_save_path else {
        return Err(ApiError::unsupported(
            "This server does not support slots action. Start it with `--slot-save-path`",
        ));
    };
    let backend = app.backend()?;
    let slot = id.parse().ok().filter(|slot| *slot < app.settings.n_slots);
    let slot: usize = slot.ok_or_else(|| ApiError::invalid("Invalid slot ID"))?;
    let action = query.action.as_deref().unwrap_or_default();
    if action == "erase" {
        let answer = backend.act(slot, SlotAction::Erase).await?;
        return Ok(Json(json!({"id_slot": slot, "n_erased": answer.n_tokens})));
    }
    let name = || {
        let name = body.get("filename").and_then(Value::as_str).filter(|name| is_file_name(name));
        name.ok_or_else(|| ApiError::invalid("Invalid filename"))
    };
    let (name, action, [n_tokens, n_bytes, ms]) = match action {
        "save" => (name()?, SlotAction::Save(directory.join(name()?)), ["n_saved", "n_written", "save_ms"]),
        "restore" => {
            let action = SlotAction::Restore(directory.join(name()?), backend.adapters.scales());
            (name()?, action, ["n_restored", "n_read", "restore_ms"])
        }
        _ => return Err(ApiError::invalid("Invalid action")),
    };
    let answer = backend.act(slot, action).await?;
    Ok(Json(json!({
        "id_slot": slot, "filename": name, n_tokens: answer.n_tokens, n_bytes: answer.n_bytes,
        "timings": {ms: answer.ms},
    })))
}

/// `POST /tokenize`
pub async fn tokenize(Asked { app, backend, body, held }: Asked) -> Result<Response, ApiError> {
    let model = &backend.model;
    let tokens = app.work(|| tokens(&body, model)).await?;
    let with_pieces = boolean(&body, "with_pieces")?.unwrap_or(false);
    held.grow_to(tokens.len() * if with_pieces { PIECE_BYTES } else { TOKEN_BYTES }).await?;
    let pieces = || Json(Tokens { tokens: Pieces(&tokens, model) }).into_response();
    let plain = || Json(Tokens { tokens: &tokens }).into_response();
    Ok(app.work(|| if with_pieces { pieces() } else { plain() }).await)
}

/// Bytes per token in an answer, whose buffer grows by doubling.
const TOKEN_BYTES: usize = 24;

/// Bytes per token with its text.
const PIECE_BYTES: usize = 128;

/// Tokens are written directly as text: JSON values would take ten times the memory.
#[derive(Serialize)]
struct Tokens<T> {
    tokens: T,
}

/// Tokens with their texts.
struct Pieces<'a>(&'a [Token], &'a Model);

impl Serialize for Pieces<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|token| {
            let piece = String::from_utf8(self.1.piece(*token, true));
            json!({"id": token, "piece": piece.map_or_else(|error| json!(error.as_bytes()), Value::String)})
        }))
    }
}

/// The tokens of a text, or of a list of tokens and texts: llama-server's `content`, or vLLM's `prompt`.
fn tokens(body: &Fields, model: &Model) -> Result<Vec<Token>, ApiError> {
    if let Some(text) = text(body, "prompt")?.filter(|_| get(body, "content").is_none()) {
        return prompts::tokens(model, text, boolean(body, "add_special_tokens")?.unwrap_or(true));
    }
    let adds_special = boolean(body, "add_special")?.unwrap_or(false);
    let parses_special = boolean(body, "parse_special")?.unwrap_or(true);
    match get(body, "content") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => prompts::encode(model, text, adds_special, parses_special),
        Some(Value::Array(parts)) if parts.iter().all(|part| part.is_number() || part.is_string()) => {
            prompts::mixed(parts, model, adds_special)
        }
        Some(_) => Err(ApiError::field("content", "expected a string, or an array of tokens and strings")),
    }
}

/// `POST /detokenize`
pub async fn detokenize(Asked { app, backend, body, held: _held }: Asked) -> Answer {
    let text = app.work(|| detokenized(&body, &backend)).await?;
    // `prompt` is vLLM's name.
    Ok(Json(json!({"content": text, "prompt": text})))
}

fn detokenized(body: &Fields, backend: &Backend) -> Result<String, ApiError> {
    let tokens = list(body, "tokens")?.map_or(&[][..], Vec::as_slice);
    let tokens: Vec<i32> =
        tokens.iter().map(|value| prompts::token(value, &backend.model)).collect::<Result<_, _>>()?;
    Ok(backend.spelled(&tokens))
}

/// `GET /metrics`
pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if !app.settings.http.endpoint_metrics.0 {
        return Err(ApiError::unsupported("This server does not support metrics endpoint. Start it with `--metrics`"));
    }
    let backend = app.backend()?;
    let text = status::metrics(&backend.status.take(), backend.model.host_cache_bytes());
    let headers = [
        (CONTENT_TYPE.as_str(), "text/plain; version=0.0.4".to_owned()),
        ("process-start-time-unix", app.began.to_string()),
    ];
    Ok((headers, text).into_response())
}

/// `GET /experts`: the location of every expert, one character each.
pub async fn experts(State(app): State<Arc<App>>) -> Answer {
    let backend = app.backend()?;
    let model = backend.model.clone();
    // Blocks until the current layer is computed.
    let places = tokio::task::spawn_blocking(move || {
        (model.expert_places(), model.host_cache_bytes(), model.prefetch_counters(), model.evaluated_share())
    });
    let (places, capacity, prefetch, share) = places.await.map_err(|error| ApiError::server(error.to_string()))?;
    let info = backend.model.info();
    let state = backend.status.get();
    let (totals, traffic) = (&state.totals, &state.totals.traffic);
    let n_processing = state.slots.iter().filter(|slot| slot.is_processing).count();
    let layers: Vec<Value> = places
        .iter()
        .flatten()
        .map(|layer| {
            let cells: String = layer.experts.iter().map(|place| letter(*place)).collect();
            json!({"layer": layer.layer, "cells": cells})
        })
        .collect();
    let slots: Vec<Value> = state
        .slots
        .iter()
        .map(|slot| {
            let mut value = json!({
                "id": slot.id, "is_processing": slot.is_processing, "n_ctx": slot.n_ctx, "n_past": slot.n_past,
                "n_decoded": slot.run.as_ref().map_or(0, |run| run.counts.n_predicted),
            });
            if let Some(run) = slot.run.as_ref().filter(|run| slot.is_processing && run.counts.n_predicted == 0) {
                let processed = run.counts.n_cached + run.n_processed_with(share);
                value["prompt"] =
                    json!({"total": run.n_prompt, "processed": processed, "seconds_left": run.seconds_left(share)});
            }
            value
        })
        .collect();
    Ok(Json(json!({
        "managed": places.is_some() && info.is_moe(),
        "n_expert": info.n_expert,
        "n_expert_used": info.n_expert_used,
        "layers": layers,
        "totals": {"hits": traffic.hits, "misses": traffic.misses, "bytes_read": traffic.bytes_read,
            "tokens": totals.predicted_tokens, "seconds": totals.predicted_seconds,
            "io_wait_seconds": traffic.io_wait_ms / 1e3},
        "prefetch": prefetch,
        "capacity_bytes": capacity,
        "expert_bytes": info.expert_bytes,
        "requests": {"processing": n_processing, "waiting": state.n_waiting},
        "slots": slots,
    })))
}

fn letter(place: ExpertPlace) -> char {
    match place {
        ExpertPlace::Absent => '.',
        ExpertPlace::Held(Precision::High) => 'H',
        ExpertPlace::Held(Precision::Low) => 'L',
        ExpertPlace::Arriving(Precision::High) => 'h',
        ExpertPlace::Arriving(Precision::Low) => 'l',
        ExpertPlace::OnDevice => 'D',
    }
}

/// `GET /lora-adapters`
pub async fn adapters(State(app): State<Arc<App>>) -> Answer {
    let backend = app.backend()?;
    Ok(Json(adapters::described(&backend.model, &backend.adapters.scales())))
}

/// `POST /lora-adapters`
pub async fn set_adapters(State(app): State<Arc<App>>, AnyBody(body, _held): AnyBody) -> Answer {
    let backend = app.backend()?;
    if !body.is_array() {
        return Err(ApiError::invalid("Request body must be an array"));
    }
    backend.adapters.set(adapters::read(&body, backend.model.adapters().len())?);
    Ok(Json(json!({"success": true})))
}

/// `POST /rerank`. The body is read, because a client that still sends it would only see a closed connection.
pub async fn rerank(_body: Result<AnyBody, ApiError>) -> Answer {
    Err(ApiError::unsupported("This server does not support reranking"))
}
