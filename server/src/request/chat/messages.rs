//! Messages of a conversation in OpenAI's form, as clients send them, in the form that every template reads.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::json::{Fields, get, shortened, text};
use crate::request::{documents, media};

/// Checks messages in OpenAI's form, brings them into the form that every template reads, and moves images and sound
/// to `media`.
pub fn check_messages(messages: &mut Value, marker: Option<&str>, media: &mut Vec<Vec<u8>>) -> Result<(), ApiError> {
    let Value::Array(messages) = messages else {
        return Err(ApiError::invalid("Expected 'messages' to be an array"));
    };
    for message in messages.iter_mut() {
        match message {
            Value::Object(fields) => check_one(fields, marker, media)?,
            _ => return Err(ApiError::invalid("Expected 'messages' to be an array of objects")),
        }
    }
    join_instructions(messages);
    Ok(())
}

/// Joins the system messages at the beginning: many templates refuse a second one, or drop it.
fn join_instructions(messages: &mut Vec<Value>) {
    let instructs = |message: &&Value| message["role"] == "system" || message["role"] == "developer";
    let n = messages.iter().take_while(instructs).count();
    if n < 2 || !messages[..n].iter().all(|message| message["content"].is_string()) {
        return;
    }
    let more: Vec<Value> = messages.drain(1..n).collect();
    let texts = messages[..1].iter().chain(&more).filter_map(|message| message["content"].as_str());
    let text = texts.collect::<Vec<_>>().join("\n\n");
    messages[0]["content"] = json!(text);
}

fn check_one(message: &mut Fields, marker: Option<&str>, media: &mut Vec<Vec<u8>>) -> Result<(), ApiError> {
    let role = match message.get("role") {
        // A tool's result, before there were tools.
        Some(Value::String(role)) if role == "function" => "tool".to_owned(),
        Some(Value::String(role)) => role.clone(),
        Some(_) => return Err(ApiError::invalid("Expected 'role' to be a string")),
        None => String::new(),
    };
    let is_assistant = role == "assistant";
    if is_assistant {
        complete_answer(message)?;
    }
    let has_calls = get(message, "tool_calls").is_some();
    let Some(content) = message.get_mut("content") else {
        return match (is_assistant, has_calls) {
            (true, true) => Ok(()),
            (true, false) => Err(ApiError::invalid("Assistant message must contain either 'content' or 'tool_calls'!")),
            (false, _) => Err(ApiError::invalid("All non-assistant messages must contain 'content'")),
        };
    };
    match content {
        Value::Null | Value::String(_) => {}
        Value::Array(parts) => {
            parts.iter_mut().try_for_each(|part| check_part(part, marker, media))?;
            // Many templates read a list in a user's message only.
            if role != "user" {
                *content = Value::String(joined(parts, if is_assistant { "\n\n" } else { "\n" }));
            }
        }
        _ => return Err(ApiError::invalid("Expected 'content' to be a string or an array")),
    }
    if role.is_empty() {
        return Err(ApiError::invalid("Missing 'role' in message"));
    }
    message.insert("role".to_owned(), Value::String(role));
    Ok(())
}

/// The text of a list, with the separators that llama.cpp writes: none beside an image or sound.
fn joined(parts: &[Value], separator: &str) -> String {
    let mut text = String::new();
    let mut was_media = true;
    for part in parts {
        let is_media = part["type"] == "media_marker";
        if !is_media && !was_media {
            text += separator;
        }
        text += part["text"].as_str().unwrap_or_default();
        was_media = is_media;
    }
    text
}

/// Brings an assistant's message into the form that templates read: calls with arguments, thinking beside the content,
/// a refusal in it.
fn complete_answer(message: &mut Fields) -> Result<(), ApiError> {
    // The form before tools.
    if let Some(function) = message.remove("function_call") {
        message.entry("tool_calls").or_insert_with(|| json!([{"function": function}]));
    }
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let Value::Object(call) = call else { continue };
        call.entry("type").or_insert_with(|| json!("function"));
        let Some(Value::Object(function)) = call.get_mut("function") else { continue };
        let arguments = function.entry("arguments").or_insert(Value::Null);
        if arguments.is_null() || arguments.as_str().is_some_and(|text| text.trim().is_empty()) {
            *arguments = json!("{}");
        }
    }
    if let Some(refusal) = message.remove("refusal").filter(|refusal| !refusal.is_null()) {
        let part = json!({"type": "refusal", "refusal": refusal});
        match message.entry("content").or_insert(Value::Null) {
            Value::Array(parts) => parts.push(part),
            Value::String(text) if !text.is_empty() => {
                let text = json!({"type": "text", "text": text});
                message["content"] = json!([text, part]);
            }
            none => *none = json!([part]),
        }
    }
    let Some(Value::Array(parts)) = message.get_mut("content") else { return Ok(()) };
    let is_thinking = |part: &mut Value| part.get("type").is_some_and(|kind| kind == "thinking");
    let thinking: Vec<Value> = parts.extract_if(.., is_thinking).collect();
    if !thinking.is_empty() {
        let mut all = text(message, "reasoning_content")?.unwrap_or_default().to_owned();
        thinking.iter().try_for_each(|part| add_thinking(&part["thinking"], &mut all))?;
        message.insert("reasoning_content".to_owned(), json!(all));
    }
    Ok(())
}

/// Adds the text of a thinking part, which is a text or, in Mistral's form, a list of text parts.
fn add_thinking(thinking: &Value, all: &mut String) -> Result<(), ApiError> {
    match thinking {
        Value::String(text) => all.push_str(text),
        Value::Array(parts) if parts.iter().all(|part| part["text"].is_string()) => {
            parts.iter().filter_map(|part| part["text"].as_str()).for_each(|text| all.push_str(text));
        }
        _ => return Err(ApiError::invalid("a content part of type 'thinking' needs a string 'thinking'")),
    }
    Ok(())
}

/// Checks a content part. Moves the bytes of an image or sound to `media`, and leaves a marker.
///
/// # Errors
/// Parts that are neither, or images and sound where the server takes none.
pub fn check_part(part: &mut Value, marker: Option<&str>, media: &mut Vec<Vec<u8>>) -> Result<(), ApiError> {
    let cannot = |what: &str| {
        ApiError::invalid(format!(
            "{what} input is not supported: the server has no projector for it; start it with --mmproj, or send the \
             message without it"
        ))
    };
    let bytes = match part.get("type").and_then(Value::as_str) {
        Some("text") if part.get("text").is_some_and(Value::is_string) => return Ok(()),
        Some("text") => return Err(ApiError::invalid("a content part of type 'text' needs a string 'text'")),
        Some("refusal") => {
            let text = part.get("refusal").and_then(Value::as_str);
            let text = text.ok_or_else(|| ApiError::invalid("a content part of type 'refusal' needs its text"))?;
            *part = json!({"type": "text", "text": text});
            return Ok(());
        }
        Some("file") => {
            *part = json!({"type": "text", "text": documents::of_file(&part["file"])?});
            return Ok(());
        }
        Some("image_url") if marker.is_none() => return Err(cannot("image")),
        Some("input_audio") if marker.is_none() => return Err(cannot("audio")),
        Some("image_url") => media::image(&part["image_url"])?,
        Some("input_audio") => media::sound(&part["input_audio"])?,
        Some("input_video" | "video_url") => {
            return Err(ApiError::invalid("video input is not supported; send images of it"));
        }
        Some(kind) => {
            let kind = shortened(kind);
            return Err(ApiError::invalid(format!("unsupported content[].type '{kind}'")));
        }
        None => return Err(ApiError::invalid("unsupported content[].type: a part needs one")),
    };
    if media.len() >= media::COUNT_MAX {
        return Err(ApiError::invalid(format!("a request may have at most {} images and sounds", media::COUNT_MAX)));
    }
    media.push(bytes);
    *part = json!({"type": "media_marker", "text": marker});
    Ok(())
}
