//! Flags of what models think before they answer.

use std::collections::BTreeMap;

use clap::Args;

use crate::switch::{Switch, Tri};
use hobbit::options::ReasoningFormat;

#[derive(Args, Debug)]
#[command(next_help_heading = "Reasoning (in conversations)")]
pub struct ReasoningArgs {
    /// Have the model think before it answers; auto: as its chat template does
    #[arg(long, value_name = Tri::NAME, default_value = "auto", env = "LLAMA_ARG_REASONING")]
    pub reasoning: Tri,
    /// What becomes of thoughts: none leaves them in the answer with their tags; deepseek and auto keep them apart
    #[arg(long, value_name = "none|auto|deepseek|deepseek-legacy", default_value = "auto", env = "LLAMA_ARG_THINK")]
    pub reasoning_format: ReasoningFormat,
    /// How hard to think, for templates that know it (gpt-oss: low, medium, high); default leaves it to the template
    #[arg(long, value_name = "LEVEL", env = "LLAMA_ARG_REASONING_EFFORT")]
    pub reasoning_effort: Option<String>,
    /// Tokens of one thought, after which it is ended; 0 ends it at once, -1 never
    #[arg(long, value_name = "N", default_value = "-1", allow_negative_numbers = true, env = "LLAMA_ARG_THINK_BUDGET",
          value_parser = clap::value_parser!(i32).range(-1..))]
    pub reasoning_budget: i32,
    /// Said for the model before a thought is ended so
    #[arg(long, value_name = "MESSAGE", env = "LLAMA_ARG_THINK_BUDGET_MESSAGE")]
    pub reasoning_budget_message: Option<String>,
    /// Show the model its earlier thoughts, too, where its template can (supports_preserve_reasoning)
    #[arg(long, value_name = Switch::NAME, default_value = "on", env = "LLAMA_ARG_REASONING_PRESERVE")]
    pub reasoning_preserve: Switch,
    /// Variables for the chat template, a JSON object such as {"enable_thinking": false}
    #[arg(long, value_name = "JSON", value_parser = template_kwargs, env = "LLAMA_ARG_CHAT_TEMPLATE_KWARGS")]
    pub chat_template_kwargs: Option<TemplateKwargs>,
    /// Take answers as they are, with tags of thoughts and of tool calls
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "LLAMA_ARG_SKIP_CHAT_PARSING")]
    pub skip_chat_parsing: Switch,
}

/// Variables of a chat template: names, and values in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateKwargs(pub BTreeMap<String, String>);

fn template_kwargs(text: &str) -> Result<TemplateKwargs, String> {
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))?;
    Ok(TemplateKwargs(object.into_iter().map(|(name, value)| (name, value.to_string())).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_templates() {
        let kwargs = template_kwargs(r#"{"enable_thinking": false, "level": "low", "more": {"a": [1]}}"#).unwrap();
        let expected = [("enable_thinking", "false"), ("level", "\"low\""), ("more", "{\"a\":[1]}")];
        assert_eq!(kwargs.0, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        for text in ["", "[]", "{\"a\": }", "null"] {
            assert!(template_kwargs(text).unwrap_err().contains("expected a JSON object"), "{text}");
        }
    }
}
