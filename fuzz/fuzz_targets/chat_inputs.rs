//! Any JSON as a conversation with tools for a chat template: an error or a prompt, and no crash.
//! `fuzz/run chat_inputs`

#![no_main]

use std::sync::OnceLock;

use hobbit::engine::{ChatInputs, ChatTemplates, ToolChoice};
use libfuzzer_sys::fuzz_target;

const TEMPLATE: &str = include_str!("../../server/tests/http/tools.jinja");

static TEMPLATES: OnceLock<ChatTemplates> = OnceLock::new();

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let templates = TEMPLATES.get_or_init(|| ChatTemplates::from_text(TEMPLATE).expect("a template of the tests"));
    // A line each: messages, tools, a schema, a variable.
    let mut lines = text.splitn(4, '\n');
    let mut line = || lines.next().filter(|line| !line.is_empty()).map(str::to_owned);
    let mut inputs = ChatInputs { messages: line().unwrap_or_default(), tools: line(), ..ChatInputs::default() };
    inputs.json_schema = line();
    inputs.template_kwargs.extend(line().map(|value| ("x".to_owned(), value)));
    inputs.tool_choice = if text.len().is_multiple_of(2) { ToolChoice::Auto } else { ToolChoice::Required };
    if let Ok(prompt) = templates.apply(&inputs) {
        let _ = prompt.parser.parse(text, true);
    }
});
