//! Settings of a model's reasoning, from flags to the inputs of templates and samplers.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde_json::Value;

use super::args::ReasoningArgs;
use super::argv::Tri;
use hobbit::options::{ReasoningBudget, ReasoningFormat};

/// The template variable that turns reasoning on and off.
pub const ENABLE_THINKING: &str = "enable_thinking";
/// The template variable for the effort of reasoning.
pub const REASONING_EFFORT: &str = "reasoning_effort";
/// The template variable that keeps earlier reasoning in the prompt.
const PRESERVE_REASONING: &str = "preserve_reasoning";

/// How a model thinks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasoning {
    /// On or off; `None` leaves it to the template.
    pub enabled: Option<bool>,
    /// The form in which reasoning is returned.
    pub format: ReasoningFormat,
    /// Maximum tokens of reasoning; `None`: no limit.
    pub budget: Option<u32>,
    /// Text inserted where the budget ends the reasoning.
    pub budget_message: String,
    /// Variables of the chat template: names, and values in JSON.
    pub template_kwargs: BTreeMap<String, String>,
    /// Leave answers unparsed.
    pub skip_parsing: bool,
}

impl Reasoning {
    /// The settings from the flags. Dedicated flags override `--chat-template-kwargs`.
    pub fn new(args: ReasoningArgs) -> Self {
        let mut kwargs = args.chat_template_kwargs.unwrap_or_default().0;
        let enabled = match args.reasoning {
            Tri::Auto => None,
            Tri::On => Some(true),
            Tri::Off => Some(false),
        };
        if let Some(enabled) = enabled {
            kwargs.insert(ENABLE_THINKING.to_owned(), enabled.to_string());
        }
        match args.reasoning_effort.as_deref() {
            None => {}
            Some("default") => drop(kwargs.remove(REASONING_EFFORT)),
            Some(level) => drop(kwargs.insert(REASONING_EFFORT.to_owned(), Value::from(level).to_string())),
        }
        let preserve = args.reasoning_preserve.0;
        if preserve {
            kwargs.entry(PRESERVE_REASONING.to_owned()).or_insert_with(|| true.to_string());
        } else {
            kwargs.insert(PRESERVE_REASONING.to_owned(), false.to_string());
        }
        Self {
            enabled,
            format: args.reasoning_format,
            budget: u32::try_from(args.reasoning_budget).ok(),
            budget_message: args.reasoning_budget_message.unwrap_or_default(),
            template_kwargs: kwargs,
            skip_parsing: args.skip_chat_parsing.0,
        }
    }

    /// Whether the model thinks, given these template variables; `template_thinks`: whether the template supports it.
    pub fn enable_thinking(&self, kwargs: &BTreeMap<String, String>, template_thinks: bool) -> Result<bool> {
        match kwargs.get(ENABLE_THINKING).map(String::as_str) {
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(text) if text.starts_with('"') => {
                bail!("the template's variable enable_thinking is true or false, not the text {text}")
            }
            _ => Ok(self.enabled != Some(false) && template_thinks),
        }
    }

    /// The sampler's settings; the template supplies the tags of reasoning.
    pub fn sampled(&self) -> ReasoningBudget {
        ReasoningBudget { tokens: self.budget, message: self.budget_message.clone(), ..ReasoningBudget::default() }
    }
}
