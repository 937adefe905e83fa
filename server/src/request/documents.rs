//! Text documents in conversations: they become a part of the prompt's text.

use serde_json::Value;

use super::media;
use crate::error::ApiError;

/// The beginning of a document in the prompt, with what its fields `names` tell about it.
pub fn opening(tag: &str, block: &Value, names: &[&str]) -> String {
    let fields = names.iter().filter_map(|name| Some((name, block.get(*name)?.as_str()?)));
    fields.fold(format!("<{tag}>\n"), |all, (name, text)| all + &format!("<{name}>{text}</{name}>\n"))
}

/// The end of a document in the prompt.
pub fn closing(tag: &str) -> String {
    format!("\n</{tag}>\n")
}

/// The text of a file as OpenAI's clients send it: `{"filename", "file_data": "data:text/plain;base64,…"}`.
///
/// # Errors
/// A file that is no text, or is not in the request.
pub fn of_file(file: &Value) -> Result<String, ApiError> {
    let given =
        file.get("file_data").and_then(Value::as_str).and_then(|url| url.strip_prefix("data:")?.split_once(','));
    let Some((kind, data)) = given else {
        let message = "a file needs its bytes as file_data: data:text/plain;base64,...; ids and URLs are not fetched";
        return Err(ApiError::invalid(message));
    };
    let kind = kind.strip_suffix(";base64").unwrap_or_default();
    if !kind.starts_with("text/") && !kind.starts_with("application/json") {
        return Err(ApiError::invalid(format!("a file of type '{kind}' is not supported: send its text")));
    }
    let bytes = media::decoded(data, "file_data")?;
    let text = String::from_utf8(bytes).map_err(|_| ApiError::invalid("file_data: the text is not UTF-8"))?;
    Ok(opening("document", file, &["filename"]) + &text + &closing("document"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_files_are_read() {
        let file = json!({"filename": "a.txt", "file_data": "data:text/plain;charset=utf-8;base64,SGk="});
        let expected = "<document>\n<filename>a.txt</filename>\nHi\n</document>\n";
        assert_eq!(of_file(&file).map_err(|error| error.message), Ok(expected.to_owned()));
        for (file, part) in [
            (json!({"file_id": "file-1"}), "not fetched"),
            (json!({"file_data": "SGk="}), "not fetched"),
            (json!({"file_data": "data:application/pdf;base64,AAAA"}), "'application/pdf'"),
            (json!({"file_data": "data:text/plain;base64,?"}), "base64"),
            (json!({"file_data": "data:text/plain;base64,/w=="}), "UTF-8"),
        ] {
            let message = of_file(&file).unwrap_err().message;
            assert!(message.contains(part), "{message}");
        }
    }
}
