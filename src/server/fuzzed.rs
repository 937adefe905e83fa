//! Entry points of fuzz targets.

use serde_json::Value;

use super::api::{anthropic, chat, responses};
use crate::reasoning::Reasoning;

/// Reads the body of a chat request in OpenAI's and Anthropic's forms: the conversation that the template is given.
pub fn body(bytes: &[u8]) {
    let Ok(Value::Object(body)) = serde_json::from_slice(bytes) else { return };
    let reasoning = Reasoning::default();
    for jinja in [true, false] {
        let defaults = chat::request::Defaults {
            reasoning: &reasoning,
            jinja,
            prefills_assistant: true,
            template_thinks: true,
            calls_in_parallel: true,
        };
        let other = [anthropic::request::to_openai(&body), responses::request::to_chat(body.clone())];
        for body in other.into_iter().flatten().chain([body.clone()]) {
            let _ = chat::request::read(body, &defaults);
        }
    }
}
