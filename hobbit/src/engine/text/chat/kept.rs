//! Whether a prompt has a conversation's messages: some templates drop those of a role that they do not know. A
//! template may forget earlier messages of a role.

use std::collections::BTreeMap;

use serde_json::Value;

use super::ChatInputs;

/// Below this length in bytes, a tool's result may be in a prompt by chance.
const TELLING_LEN: usize = 16;

/// A conversation whose texts are words that no template changes. The texts are those that the model gets from others:
/// templates drop its own thoughts on purpose.
pub(super) struct MarkedChat {
    pub(super) inputs: ChatInputs,
    /// The words, and where the texts are.
    words: Vec<(String, String)>,
}

impl MarkedChat {
    /// `None` if `prompt` has all texts. It may lack one that it has in another form, such as JSON.
    pub(super) fn of(inputs: &ChatInputs, prompt: &str) -> Option<Self> {
        let mut messages: Vec<Value> = serde_json::from_str(&inputs.messages).ok()?;
        let mut rest = Some(prompt);
        for (_, role, text) in texts(&mut messages) {
            let text = text.trim();
            let is_telling = role != "tool" || text.len() >= TELLING_LEN;
            // Each search begins where the one before ended, so that all together read the prompt once.
            rest = rest.filter(|_| is_telling).and_then(|rest| rest.split_once(text)).map(|(_, rest)| rest);
        }
        if rest.is_some() {
            return None;
        }
        let mut words = Vec::new();
        for (index, role, text) in texts(&mut messages) {
            let word = format!("hobbit-{}-trial", words.len());
            *text = word.clone();
            words.push((word, format!("messages[{index}], of the role '{role}'")));
        }
        let inputs = ChatInputs { messages: Value::Array(messages).to_string(), ..inputs.clone() };
        Some(Self { inputs, words })
    }

    /// Checks the prompt of the marked texts.
    ///
    /// # Errors
    /// A text that it lacks.
    pub(super) fn check(&self, prompt: &str) -> Result<(), String> {
        match self.words.iter().find(|(word, _)| !prompt.contains(word.as_str())) {
            None => Ok(()),
            Some((_, place)) => Err(format!(
                "the chat template does not write the text of {place}: leave it out, or give the server another \
                 --chat-template"
            )),
        }
    }
}

/// The texts of each role's last message, without the assistant's and empty ones: the message's index and role, and
/// the text.
fn texts(messages: &mut [Value]) -> Vec<(usize, String, &mut String)> {
    let role_of = |message: &Value| message.get("role").and_then(Value::as_str).unwrap_or_default().to_owned();
    let last: BTreeMap<String, usize> = messages.iter().map(role_of).zip(0..).collect();
    let mut found = Vec::new();
    for (index, message) in messages.iter_mut().enumerate() {
        let role = role_of(message);
        if role == "assistant" || last.get(&role) != Some(&index) {
            continue;
        }
        match message.get_mut("content") {
            Some(Value::String(text)) => found.push((index, role, text)),
            Some(Value::Array(parts)) => {
                let parts = parts.iter_mut().filter(|part| part.get("type").is_some_and(|kind| kind == "text"));
                let own = parts.filter_map(|part| match part.get_mut("text") {
                    Some(Value::String(text)) => Some(text),
                    _ => None,
                });
                found.extend(own.map(|text| (index, role.clone(), text)));
            }
            _ => {}
        }
    }
    found.retain(|(_, _, text)| !text.trim().is_empty());
    found
}
