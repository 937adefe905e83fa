//! Settings of a model's thoughts, from flags to the inputs of templates and samplers.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde_json::Value;

use super::args::ReasoningArgs;
use super::switch::Tri;
use hobbit::options::{ReasoningBudget, ReasoningFormat};

/// The template variable that turns thoughts on and off.
pub const ENABLE_THINKING: &str = "enable_thinking";
/// The template variable for the effort of thoughts.
pub const REASONING_EFFORT: &str = "reasoning_effort";
/// The template variable that keeps earlier thoughts in the prompt.
const PRESERVE_REASONING: &str = "preserve_reasoning";

/// How a model thinks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasoning {
    /// On or off; `None` leaves it to the template.
    pub enabled: Option<bool>,
    /// The form in which thoughts are returned.
    pub format: ReasoningFormat,
    /// Maximum tokens of one thought; `None`: no limit.
    pub budget: Option<u32>,
    /// Text inserted before a thought is ended by its budget.
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
    ///
    /// # Errors
    /// The variable `enable_thinking` is a text.
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

    /// The sampler's settings; the template supplies the tags of thoughts.
    pub fn sampled(&self) -> ReasoningBudget {
        ReasoningBudget { tokens: self.budget, message: self.budget_message.clone(), ..ReasoningBudget::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        reasoning: ReasoningArgs,
    }

    fn reasoning(words: &[&str]) -> Reasoning {
        Reasoning::new(Line::parse_from(["test"].iter().chain(words)).reasoning)
    }

    fn kwargs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    #[test]
    fn flags_become_variables() {
        let preserve = ("preserve_reasoning", "true");
        let plain = Reasoning { template_kwargs: kwargs(&[preserve]), ..Reasoning::default() };
        assert_eq!(reasoning(&[]), plain);
        let given = "--chat-template-kwargs={\"reasoning_effort\": \"low\", \"preserve_reasoning\": false, \"x\": 1}";
        let low = [("reasoning_effort", "\"low\""), ("preserve_reasoning", "false"), ("x", "1")];
        assert_eq!(reasoning(&[given]).template_kwargs, kwargs(&low));
        let high = [("reasoning_effort", "\"high\""), ("preserve_reasoning", "false"), ("x", "1")];
        assert_eq!(reasoning(&[given, "--reasoning-effort=high"]).template_kwargs, kwargs(&high));
        let without = [("preserve_reasoning", "false"), ("x", "1")];
        assert_eq!(reasoning(&[given, "--reasoning-effort=default"]).template_kwargs, kwargs(&without));
        let off = reasoning(&["--reasoning=off", "--reasoning-budget=0", "--reasoning-budget-message=So:"]);
        assert_eq!((off.enabled, off.budget, off.budget_message.as_str()), (Some(false), Some(0), "So:"));
        assert_eq!(off.template_kwargs, kwargs(&[("enable_thinking", "false"), preserve]));
        assert_eq!(off.sampled().tokens, Some(0));
        assert_eq!(reasoning(&["--reasoning-budget=-1"]).budget, None);
    }

    #[test]
    fn who_thinks() {
        let (auto, off) = (reasoning(&[]), reasoning(&["--reasoning=off"]));
        let on = reasoning(&["--reasoning=on"]);
        for (reasoning, template_thinks, expected) in
            [(&auto, true, true), (&auto, false, false), (&on, false, true), (&off, true, false)]
        {
            let thinks = reasoning.enable_thinking(&reasoning.template_kwargs, template_thinks).unwrap();
            assert_eq!(thinks, expected, "{reasoning:?} {template_thinks}");
        }
        assert!(!auto.enable_thinking(&kwargs(&[("enable_thinking", "false")]), true).unwrap());
        assert!(auto.enable_thinking(&kwargs(&[("enable_thinking", "\"no\"")]), true).is_err());
    }
}
