//! Checks that the messages of a conversation contain only what templates accept.

use serde_json::{Map, Value};

use crate::server::http::error::ApiError;

/// Checks messages in OpenAI's form, and removes null fields.
///
/// # Errors
/// Not a list of messages, or content that needs vision or audio.
pub fn check(messages: &mut Value) -> Result<(), ApiError> {
    let Value::Array(messages) = messages else {
        return Err(ApiError::invalid("Expected 'messages' to be an array"));
    };
    messages.iter_mut().try_for_each(|message| match message {
        Value::Object(fields) => check_one(fields),
        _ => Err(ApiError::invalid("Expected 'messages' to be an array of objects")),
    })
}

fn check_one(message: &mut Map<String, Value>) -> Result<(), ApiError> {
    // Content may be null; any other null field counts as absent.
    message.retain(|name, value| name == "content" || !value.is_null());
    let role = match message.get("role") {
        Some(Value::String(role)) => role.as_str(),
        Some(_) => return Err(ApiError::invalid("Expected 'role' to be a string")),
        None => "",
    };
    let is_assistant = role == "assistant";
    let is_role_missing = role.is_empty();
    let Some(content) = message.get("content") else {
        return match (is_assistant, message.contains_key("tool_calls")) {
            (true, true) => Ok(()),
            (true, false) => Err(ApiError::invalid("Assistant message must contain either 'content' or 'tool_calls'!")),
            (false, _) => Err(ApiError::invalid("All non-assistant messages must contain 'content'")),
        };
    };
    match content {
        Value::Null | Value::String(_) => {}
        Value::Array(parts) => parts.iter().try_for_each(check_part)?,
        _ => return Err(ApiError::invalid("Expected 'content' to be a string or an array")),
    }
    match is_role_missing {
        true => Err(ApiError::invalid("Missing 'role' in message")),
        false => Ok(()),
    }
}

/// Checks that a content part is a text.
///
/// # Errors
/// Any other part. The server takes no images, audio or video, even if the model could.
pub fn check_part(part: &Value) -> Result<(), ApiError> {
    let cannot = |what: &str| {
        Err(ApiError::invalid(format!(
            "{what} input is not supported: this server takes text only; send the message without it, or use llama-server with --mmproj"
        )))
    };
    match part.get("type").and_then(Value::as_str) {
        Some("text") if part.get("text").is_some_and(Value::is_string) => Ok(()),
        Some("text") => Err(ApiError::invalid("a content part of type 'text' needs a string 'text'")),
        Some("image_url") => cannot("image"),
        Some("input_audio") => cannot("audio"),
        Some("input_video" | "video_url") => cannot("video"),
        _ => Err(ApiError::invalid("unsupported content[].type")),
    }
}

/// Whether a message has the assistant's role.
pub fn is_assistant(message: &Value) -> bool {
    message.get("role").is_some_and(|role| role == "assistant")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_no_conversation() {
        for messages in [
            json!("text"),
            json!([123]),
            json!([{}]),
            json!([{"role": 123}]),
            json!([{"role": 123, "content": "x"}]),
            json!([{"content": "x"}]),
            json!([{"role": "system", "content": 123}]),
            json!([{"role": "user", "content": "x"}, {}]),
            json!([{"role": "user"}]),
            json!([{"role": "assistant"}]),
            json!([{"role": "assistant", "tool_calls": null}]),
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            json!([{"role": "user", "content": [{"type": "dream", "text": "x"}]}]),
            json!([{"role": "user", "content": ["x"]}]),
        ] {
            let error = check(&mut messages.clone()).unwrap_err();
            assert_eq!(error.status.as_u16(), 400, "{messages}");
        }
    }

    #[test]
    fn what_is_one() {
        let mut messages = json!([
            {"role": "system", "content": "s", "name": null},
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
            {"role": "assistant", "content": null, "tool_calls": []},
            {"role": "assistant", "tool_calls": []},
        ]);
        check(&mut messages).unwrap();
        assert_eq!(messages[0], json!({"role": "system", "content": "s"}));
        assert_eq!(messages[2]["content"], Value::Null);
        assert!(check(&mut json!([])).is_ok());
    }

    #[test]
    fn images_are_refused() {
        let mut messages = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
        let error = check(&mut messages).unwrap_err();
        assert!(error.message.contains("image input is not supported"), "{}", error.message);
        assert_eq!(error.status.as_u16(), 400);
    }
}
