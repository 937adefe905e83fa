//! `/v1/responses`: conversations, in the shape of OpenAI's Responses.

mod items;
pub mod request;
mod stream;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hobbit::engine::{ChatDelta, ToolCallDelta};
use serde_json::{Value, json};

use super::chat::answer::Message;
use super::chat::{Talk, count};
use super::openai::{Usage, now, random_id};
use crate::server::app::App;
use crate::server::http::body::Body;
use crate::server::http::error::ApiError;
use crate::server::http::stream::{respond, whole};
use crate::server::job::{Done, Stop};
use items::Items;
use request::to_chat;

/// `POST /v1/responses`
pub async fn responses(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let talk = app.work(|| Talk::new(&app, loaded, to_chat(body)?, held)).await?;
    let header = Header::new(&app);
    let mut running = talk.start(loaded).await?;
    if talk.params.stream {
        let ping = talk.params.ping;
        return respond(running, stream::Events::new(talk, header)?, ping).await;
    }
    let own = whole(running.remove(0)).await?;
    let message = app.work(|| talk.message(&own)).await?;
    let mut answer = header.whole(&output(&message), &own.done);
    answer["timings"] = own.done.timings.json();
    if let Some(verbose) = talk.verbose(&own.done, 0, &own.text) {
        answer["__verbose"] = verbose;
    }
    Ok(Json(answer).into_response())
}

/// `POST /v1/responses/input_tokens`
pub async fn input_tokens(State(app): State<Arc<App>>, Body(body, _held): Body) -> Result<Json<Value>, ApiError> {
    let n = app.work(|| count(&app, to_chat(body)?)).await?;
    Ok(Json(json!({"input_tokens": n, "object": "response.input_tokens"})))
}

/// The items of a message.
fn output(message: &Message) -> Vec<Value> {
    let mut items = Items::default();
    let mut events = Vec::new();
    if !message.reasoning.is_empty() {
        items.add(&ChatDelta::Reasoning(message.reasoning.clone()), &mut events);
    }
    if !message.content.is_empty() {
        items.add(&ChatDelta::Content(message.content.clone()), &mut events);
    }
    for (index, call) in message.calls.iter().cloned().enumerate() {
        let call = ToolCallDelta { index, id: call.id, name: call.name, arguments: call.arguments };
        items.add(&ChatDelta::ToolCall(call), &mut events);
    }
    items.close(&mut events);
    items.output().to_vec()
}

/// The fields of an answer other than its items.
struct Header {
    id: String,
    model: String,
    created: u64,
}

impl Header {
    fn new(app: &App) -> Self {
        Self { id: format!("resp_{}", random_id()), model: app.model_name().to_owned(), created: now() }
    }

    /// The answer while it is generated.
    fn begun(&self) -> Value {
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "model": self.model,
            "output": [],
            "error": null,
            "incomplete_details": null,
            "parallel_tool_calls": true,
            "tool_choice": "auto",
            "tools": [],
        })
    }

    /// The complete answer.
    fn whole(&self, output: &[Value], done: &Done) -> Value {
        let mut answer = self.begun();
        let usage = Usage::of(done);
        answer["completed_at"] = json!(now());
        answer["status"] = json!("completed");
        answer["output"] = json!(output);
        if done.stop == Stop::Limit {
            answer["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        answer["usage"] = json!({
            "input_tokens": usage.n_prompt,
            "output_tokens": usage.n_decoded,
            "total_tokens": usage.n_prompt + usage.n_decoded,
            "input_tokens_details": {"cached_tokens": usage.n_cached},
        });
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::engine::ToolCall;

    #[test]
    fn a_message_in_items() {
        let calls =
            ["1", "2"].map(|id| ToolCall { id: id.to_owned(), name: "w".to_owned(), arguments: "{}".to_owned() });
        let message = Message { content: "Ja".to_owned(), reasoning: String::new(), calls: calls.to_vec() };
        let kinds: Vec<Value> = output(&message).iter().map(|item| json!([item["type"], item["call_id"]])).collect();
        assert_eq!(
            kinds,
            [json!(["message", null]), json!(["function_call", "call_1"]), json!(["function_call", "call_2"])]
        );
    }
}
