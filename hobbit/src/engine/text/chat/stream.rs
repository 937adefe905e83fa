//! An answer as it grows.
//!
//! llama.cpp's parser reads the whole answer again at every token. That is unnecessary while new text only extends a
//! field. llama.cpp describes the form of an answer as a parser (`common_peg_arena::save`). In it, contents and
//! reasoning are the text before delimiters, or all remaining text. As long as no delimiter begins in the new text or
//! may be open at the end of the old text, the current field continues: every earlier decision was made on text that
//! has not changed, because a parser that needs more text reports `NEED_MORE_INPUT` and is the current field itself.
//! Other parsers are always run in full. A long tool call is parsed only when it has grown by a share of its length, so
//! that the work for all of it is proportional to its length.

use std::collections::HashMap;

use serde::Deserialize;

use super::reply::{ChatDelta, ChatParser, ChatReply};
use crate::engine::error::ChatError;
use crate::engine::ggml::log;

/// Parses a growing answer, and reports its changes.
#[derive(Debug)]
pub struct ChatStream {
    parser: ChatParser,
    text: String,
    reply: ChatReply,
    /// Ids for tool calls that the model does not number.
    ids: Vec<String>,
    make_id: fn() -> String,
    /// The field that new text extends, as long as no delimiter begins in it.
    growing: Option<Growing>,
    /// Length of the text, in bytes, before which a tool call is not parsed again.
    parse_at: usize,
}

/// A tool call shorter than this is parsed at every token.
const SHORT_CALL: usize = 2 << 10;

/// A longer one is parsed when it has grown by this part of its length.
const CALL_PARTS: usize = 64;

/// A field that may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growing {
    Reasoning,
    Content,
}

impl ChatStream {
    /// An empty answer. `make_id` numbers tool calls that the model does not number itself.
    ///
    /// # Errors
    /// [`ChatError::Reply`] if the continued message does not have the template's form.
    pub fn new(parser: ChatParser, make_id: fn() -> String) -> Result<Self, ChatError> {
        let reply = parser.prefilled()?;
        Ok(Self { parser, text: String::new(), reply, ids: Vec::new(), make_id, growing: None, parse_at: 0 })
    }

    /// Appends `text` and returns the changes. The last call has `is_partial` false.
    ///
    /// # Errors
    /// [`ChatError::Reply`] if the answer does not have the template's form.
    pub fn push(&mut self, text: &str, is_partial: bool) -> Result<Vec<ChatDelta>, ChatError> {
        let goes_on = is_partial && !text.is_empty() && self.can_only_go_on(text);
        if goes_on && let Some(growing) = self.growing {
            return Ok(vec![self.grow(growing, text)]);
        }
        self.text.push_str(text);
        if is_partial && !self.reply.tool_calls.is_empty() && self.text.len() < self.parse_at {
            return Ok(Vec::new());
        }
        self.growing = None;
        let n = self.text.len();
        self.parse_at = if n < SHORT_CALL { 0 } else { n + n / CALL_PARTS };
        let mut reply = self.parser.parse(&self.text, is_partial)?;
        if reply.is_empty() {
            return Ok(Vec::new());
        }
        let n_calls = reply.tool_calls.len();
        for (at, call) in reply.tool_calls.iter_mut().enumerate() {
            // Until its arguments begin, a call may get its id, or a longer one. llama.cpp writes the first brace with
            // the name.
            let is_settled = !is_partial || call.arguments.len() > 1 || at + 1 < n_calls;
            if self.ids.len() == at && is_settled {
                self.ids.push(if call.id.is_empty() { (self.make_id)() } else { call.id.clone() });
            }
            if let Some(id) = self.ids.get(at) {
                call.id.clone_from(id);
            }
        }
        let changes = reply.changes_since(&self.reply)?;
        self.reply = reply;
        // The field that this text extended also takes the next.
        self.growing = match &changes[..] {
            [ChatDelta::Reasoning(added)] if goes_on && added == text => Some(Growing::Reasoning),
            [ChatDelta::Content(added)] if goes_on && added == text => Some(Growing::Content),
            _ => None,
        };
        self.growing = self.growing.filter(|_| self.reply.tool_calls.is_empty());
        Ok(changes)
    }

    /// Appends the last `text`. Of an answer that does not have the template's form, or that `is_cut`, what can be read
    /// is kept. Text that cannot be read becomes content, with a notice.
    pub fn finish(&mut self, text: &str, is_cut: bool) -> Vec<ChatDelta> {
        let error = match self.push(text, false) {
            Ok(changes) => return changes,
            Err(error) => error,
        };
        // As much as a stream can show.
        self.parse_at = 0;
        let mut changes = self.push("", true).unwrap_or_default();
        if is_cut && !self.reply.is_empty() {
            return changes;
        }
        let unread = self.unread().to_owned();
        log::notice(format_args!("{error}; {} bytes of it are returned as content", unread.len()));
        if !unread.is_empty() {
            self.reply.content.push_str(&unread);
            changes.push(ChatDelta::Content(unread));
        }
        changes
    }

    /// The text after the part that has become reasoning or content; nothing once there are calls.
    fn unread(&self) -> &str {
        if !self.reply.tool_calls.is_empty() {
            return "";
        }
        let parts = [&self.reply.reasoning_content, &self.reply.content];
        parts
            .iter()
            .filter(|part| !part.is_empty())
            .fold(&self.text, |text, part| text.find(part.as_str()).map_or(text, |start| &text[start + part.len()..]))
    }

    /// Whether `text` neither begins a delimiter nor may end one.
    fn can_only_go_on(&self, text: &str) -> bool {
        self.parser.delimiters().is_some_and(|delimiters| {
            !delimiters.may_begin_in(text.as_bytes()) && !delimiters.may_be_open_after(&self.text)
        })
    }

    /// Appends without parsing the whole text again.
    fn grow(&mut self, growing: Growing, text: &str) -> ChatDelta {
        self.text.push_str(text);
        let (field, change): (_, fn(String) -> ChatDelta) = match growing {
            Growing::Reasoning => (&mut self.reply.reasoning_content, ChatDelta::Reasoning),
            Growing::Content => (&mut self.reply.content, ChatDelta::Content),
        };
        field.push_str(text);
        change(text.to_owned())
    }

    /// The answer so far.
    pub fn reply(&self) -> &ChatReply {
        &self.reply
    }

    /// All text from the model.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the next text needs no full parse unless it may begin a delimiter.
    #[cfg(test)]
    pub(super) fn is_growing(&self) -> bool {
        self.growing.is_some()
    }
}

/// Delimiters that may end the contents and reasoning of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Delimiters {
    /// First bytes of delimiters.
    first: [bool; 256],
    /// Length of the longest delimiter, in bytes.
    longest: usize,
}

/// Formats whose content is exactly the text their parser finds.
const PLAIN: [&str; 3] = ["Content-only", "peg-simple", "peg-native"];

/// Maximum depth of nodes that are followed.
const DEPTH_MAX: usize = 32;

/// Format of `common_peg_arena::to_json`.
#[derive(Deserialize)]
struct Arena {
    parsers: Vec<Node>,
    rules: HashMap<String, usize>,
}

#[derive(Deserialize)]
struct Node {
    r#type: String,
    child: Option<usize>,
    #[serde(default)]
    children: Vec<usize>,
    #[serde(default)]
    name: String,
    #[serde(default)]
    tag: String,
    #[serde(default)]
    delimiters: Vec<String>,
}

/// Node types that succeed, fail or need more input based on the text they match: they do not fail at its end.
const KNOWN: &str = "epsilon start end literal sequence choice repetition and not any space chars \
     string schema rule ref atomic tag";

impl Delimiters {
    /// Delimiters of a parser in llama.cpp's notation; `None` if contents may be anything other than text before
    /// delimiters.
    pub(super) fn of(format: &str, parser: &str) -> Option<Self> {
        let mut own = Self { first: [false; 256], longest: 0 };
        if !PLAIN.contains(&format) {
            return None;
        }
        if parser.is_empty() {
            return Some(own);
        }
        let arena: Arena = serde_json::from_str(parser).ok()?;
        for node in &arena.parsers {
            let child = || arena.resolved(node.child?);
            match node.r#type.as_str() {
                "until" => {
                    for delimiter in &node.delimiters {
                        own.first[usize::from(*delimiter.as_bytes().first()?)] = true;
                        own.longest = own.longest.max(delimiter.len());
                    }
                }
                "tag" if matches!(node.tag.as_str(), "content" | "reasoning") => {
                    child().filter(|child| child.r#type == "until")?;
                }
                // A lookahead must not take the end of the text for an answer.
                "and" => arena.consists_of(node.child?, &["literal", "chars", "sequence", "choice", "space"], 0)?,
                "not" => arena.consists_of(node.child?, &["literal", "chars", "choice"], 0)?,
                "gbnf" | "ac" => {}
                known => drop(KNOWN.split(' ').find(|kind| *kind == known)?),
            }
        }
        Some(own)
    }

    /// Whether a delimiter may begin in `text`.
    pub(super) fn may_begin_in(&self, text: &[u8]) -> bool {
        text.iter().any(|byte| self.first[usize::from(*byte)])
    }

    /// Whether a delimiter may be open at the end of `text`, which may be only the end of a longer text.
    pub(super) fn may_be_open_after(&self, text: &str) -> bool {
        let bytes = text.as_bytes();
        bytes.len() < self.longest || self.may_begin_in(&bytes[bytes.len() - self.longest..])
    }
}

impl Arena {
    /// The node at an index; references and rules are followed.
    fn resolved(&self, mut at: usize) -> Option<&Node> {
        for _ in 0..DEPTH_MAX {
            let node = self.parsers.get(at)?;
            at = match node.r#type.as_str() {
                "ref" => *self.rules.get(&node.name)?,
                "rule" => node.child?,
                _ => return Some(node),
            };
        }
        None
    }

    /// `Some` if a node consists only of these types.
    fn consists_of(&self, at: usize, types: &[&str], depth: usize) -> Option<()> {
        let node = self.resolved(at).filter(|node| depth < DEPTH_MAX && types.contains(&node.r#type.as_str()))?;
        node.child.iter().chain(&node.children).try_for_each(|child| self.consists_of(*child, types, depth + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(parsers: &str) -> String {
        format!(r#"{{"parsers": [{parsers}], "rules": {{"own": 1}}, "root": 0}}"#)
    }

    #[test]
    fn delimiters_of_contents() {
        let until = r#"{"type": "until", "delimiters": ["</a>", "[b"]}"#;
        let tag = r#"{"type": "tag", "tag": "content", "child": 2}, {"type": "rule", "name": "own", "child": 3}"#;
        let text = arena(&format!(r#"{tag}, {{"type": "ref", "name": "own"}}, {until}"#));
        let own = Delimiters::of("peg-native", &text).unwrap();
        assert_eq!(own.longest, 4);
        assert!(own.may_begin_in(b"a < b") && own.may_begin_in(b"[") && !own.may_begin_in(b"a/b>"));
        assert!(own.may_be_open_after("abc") && own.may_be_open_after("abc[xyz") && !own.may_be_open_after("abc[wxyz"));
        assert_eq!(Delimiters::of("peg-gemma4", &text), None);
        let rest = Delimiters::of("Content-only", "").unwrap();
        assert!(!rest.may_begin_in(b"<") && !rest.may_be_open_after(""));
    }

    #[test]
    fn parsers_with_other_ends_of_fields_are_run_in_full() {
        let tag = r#"{"type": "tag", "tag": "reasoning", "child": 1}"#;
        for other in [
            format!(r#"{tag}, {{"type": "any"}}"#),
            format!(r#"{tag}, {{"type": "ref", "name": "none"}}"#),
            r#"{"type": "something"}"#.to_owned(),
            r#"{"type": "until", "delimiters": [""]}"#.to_owned(),
            r#"{"type": "not", "child": 1}, {"type": "end"}"#.to_owned(),
            r#"{"type": "and", "child": 0}"#.to_owned(),
        ] {
            assert_eq!(Delimiters::of("peg-native", &arena(&other)), None, "{other}");
        }
        assert_eq!(Delimiters::of("peg-native", "{"), None);
        let not = arena(r#"{"type": "not", "child": 1}, {"type": "literal", "literal": "a"}"#);
        assert!(Delimiters::of("peg-native", &not).is_some());
    }
}
