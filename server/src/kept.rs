//! Conversations that a later request continues by `previous_response_id`, in memory: the last ones, in bounded memory.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde_json::Value;

use crate::held::cost;
use crate::lock;

/// Maximum number of responses.
const COUNT_MAX: usize = 256;

/// Bytes of an entry beside its JSON.
const ENTRY_BYTES: usize = 256;

/// The last responses, oldest first.
#[derive(Debug)]
pub struct Kept {
    entries: Mutex<VecDeque<Entry>>,
    n_bytes_max: usize,
}

#[derive(Clone, Debug)]
pub struct Entry {
    id: String,
    /// The conversation's messages, without instructions: JSON.
    messages: String,
    /// The answer's items as JSON, once they are complete.
    output: Option<String>,
}

impl Entry {
    fn n_bytes(&self) -> usize {
        self.messages.len() + self.output.as_ref().map_or(0, String::len) + ENTRY_BYTES
    }

    /// Memory that it takes in a request.
    pub fn cost(&self) -> usize {
        let texts = [Some(&self.messages), self.output.as_ref()];
        texts.into_iter().flatten().map(|json| cost(json.as_bytes(), true)).sum()
    }

    /// The messages and the items of the answer.
    pub fn conversation(&self) -> Option<(Vec<Value>, Vec<Value>)> {
        let read = |json: &String| serde_json::from_str(json).ok();
        Some((read(&self.messages)?, read(self.output.as_ref()?)?))
    }
}

impl Kept {
    pub fn new(n_bytes_max: usize) -> Self {
        Self { entries: Mutex::default(), n_bytes_max }
    }

    /// Keeps a conversation whose answer has begun.
    pub fn begin(&self, id: String, messages: String) {
        let mut entries = lock(&self.entries);
        entries.push_back(Entry { id, messages, output: None });
        self.forget(&mut entries);
    }

    /// Completes an answer, unless its conversation is forgotten.
    pub fn finish(&self, id: &str, output: &[Value]) {
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.iter_mut().find(|entry| entry.id == id) {
            entry.output = serde_json::to_string(output).ok();
            self.forget(&mut entries);
        }
    }

    /// A complete response.
    pub fn find(&self, id: &str) -> Option<Entry> {
        lock(&self.entries).iter().find(|entry| entry.id == id && entry.output.is_some()).cloned()
    }

    /// Forgets the oldest entries that are too many or too large.
    fn forget(&self, entries: &mut VecDeque<Entry>) {
        let mut n_bytes: usize = entries.iter().map(Entry::n_bytes).sum();
        while n_bytes > self.n_bytes_max || entries.len() > COUNT_MAX {
            n_bytes -= entries.pop_front().map_or(0, |entry| entry.n_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_last_conversations_are_kept() {
        let kept = Kept::new(2000);
        let message = |text: &str| json!({"role": "user", "content": text});
        let answer = [json!({"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "Yes.", "annotations": []},
        ]})];
        kept.begin("a".to_owned(), json!([message("Well?")]).to_string());
        assert!(kept.find("a").is_none(), "the answer is not complete");
        kept.finish("a", &answer);
        assert_eq!(kept.find("a").unwrap().conversation(), Some((vec![message("Well?")], answer.to_vec())));
        kept.begin("b".to_owned(), json!([message(&"x".repeat(700))]).to_string());
        kept.finish("b", &answer);
        assert!(kept.find("a").is_some());
        kept.begin("c".to_owned(), json!([message(&"x".repeat(500))]).to_string());
        assert!(kept.find("a").is_none() && kept.find("b").is_some(), "the oldest gives way");
        kept.begin("d".to_owned(), "x".repeat(2000));
        kept.finish("d", &answer);
        assert!(kept.find("b").is_none() && kept.find("d").is_none(), "it is larger than all may be");
        (0..=COUNT_MAX).for_each(|at| kept.begin(at.to_string(), String::new()));
        assert!(lock(&kept.entries).len() <= COUNT_MAX);
    }
}
