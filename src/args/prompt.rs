//! Flags of texts: the prompt, conversations, and reasoning in them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;

use crate::argv::{Switch, Tri};
use crate::surroundings::{Surroundings, file};
use hobbit::options::ReasoningFormat;

/// A text: typed, or in a file.
#[derive(Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct TextArgs {
    /// Text to continue, or the first message of a conversation (default: what is piped in)
    #[arg(short, long, value_name = "PROMPT", overrides_with_all = ["file", "binary_file"])]
    pub prompt: Option<String>,
    /// File with the prompt, '-' for the standard input; one newline at its end is dropped
    #[arg(short, long, value_name = "FNAME", overrides_with_all = ["prompt", "binary_file"])]
    pub file: Option<PathBuf>,
    /// File with the prompt, '-' for the standard input; its bytes are used unchanged
    #[arg(long, value_name = "FNAME", overrides_with_all = ["prompt", "file"])]
    pub binary_file: Option<PathBuf>,
    /// Process \n, \r, \t, \', \", \\ and \xHH in prompts and affixes
    #[arg(short, long, default_value = "on")]
    pub escape: Switch,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    #[command(flatten)]
    pub text: TextArgs,
    /// Print the prompt before the generated text
    #[arg(long, default_value = "on")]
    pub display_prompt: Switch,
    /// Print the prompt's tokens on stderr
    #[arg(long)]
    pub verbose_prompt: Switch,
    /// Tokens to generate (per turn); -1 without end, -2 until the context is full
    #[arg(short = 'n', long, value_name = "N", env = "LLAMA_ARG_N_PREDICT")]
    pub predict: Option<i32>,
    /// Save the state after the prompt in this file; a later run with the same beginning continues from it
    #[arg(long, value_name = "FNAME")]
    pub prompt_cache: Option<PathBuf>,
    /// Keep the generated tokens there, too
    #[arg(long, requires = "prompt_cache")]
    pub prompt_cache_all: Switch,
    /// Read that file, but do not change it
    #[arg(long, requires = "prompt_cache")]
    pub prompt_cache_ro: Switch,
    /// Stop at this text; in interactive mode it is the user's turn then. May be repeated
    #[arg(short, long, value_name = "PROMPT")]
    pub reverse_prompt: Vec<String>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Conversation")]
pub struct ChatArgs {
    /// Converse instead of continuing a text (default: if the model has a chat template)
    #[arg(long)]
    pub conversation: Option<Switch>,
    /// System prompt of the conversation
    #[arg(long, value_name = "PROMPT", overrides_with = "system_prompt_file")]
    pub system_prompt: Option<String>,
    /// File with the system prompt; one newline at its end is dropped
    #[arg(long, value_name = "FNAME", overrides_with = "system_prompt")]
    pub system_prompt_file: Option<PathBuf>,
    /// End after one answer
    #[arg(long)]
    pub single_turn: Switch,
    /// Continue a text with the user: input is asked for at reverse prompts and at the end of a text
    #[arg(short, long)]
    pub interactive: Switch,
    /// Like -i, but ask for input at once
    #[arg(long)]
    pub interactive_first: Switch,
    /// Input ends with a line that ends in '\' instead of the other way round
    #[arg(long)]
    pub multiline_input: Switch,
    /// Text before each input of the user; disables the chat template
    #[arg(long, value_name = "STRING")]
    pub in_prefix: Option<String>,
    /// Text after each input of the user; disables the chat template
    #[arg(long, value_name = "STRING")]
    pub in_suffix: Option<String>,
    /// BOS token before each input of the user; disables the chat template
    #[arg(long)]
    pub in_prefix_bos: Switch,
    /// Keep what is typed for later conversations, in $XDG_STATE_HOME/hobbit/history or
    /// ~/.local/state/hobbit/history; lines that begin with a space are never kept
    #[arg(long, default_value = "on", env = "HOBBIT_ARG_HISTORY")]
    pub history: Switch,
    #[command(flatten)]
    pub template: TemplateArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Conversation")]
pub struct TemplateArgs {
    /// Chat template: the name of a built-in one or the template itself (default: the model's)
    #[arg(long, value_name = "JINJA_TEMPLATE", env = "LLAMA_ARG_CHAT_TEMPLATE")]
    pub chat_template: Option<String>,
    /// File with the chat template
    #[arg(long, value_name = "FNAME", env = "LLAMA_ARG_CHAT_TEMPLATE_FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// Run the chat template; without it llama.cpp recognises well-known ones and writes their format
    #[arg(long, default_value = "on", env = "LLAMA_ARG_JINJA")]
    pub jinja: Switch,
}

impl TemplateArgs {
    /// Reads the file, unless the template was typed.
    pub fn read_file(&mut self, around: &dyn Surroundings) -> anyhow::Result<()> {
        if let (None, Some(path)) = (&self.chat_template, &self.chat_template_file) {
            self.chat_template = Some(file(path, around)?);
        }
        Ok(())
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Reasoning (in conversations)")]
pub struct ReasoningArgs {
    /// Have the model think before it answers; auto: as its chat template does
    #[arg(long, env = "LLAMA_ARG_REASONING")]
    pub reasoning: Tri,
    /// Place of the reasoning: none leaves it in the answer with its tags; deepseek and auto keep it apart
    #[arg(long, value_name = "none|auto|deepseek|deepseek-legacy", default_value = "auto", env = "LLAMA_ARG_THINK")]
    pub reasoning_format: ReasoningFormat,
    /// How hard to think, for templates that know it (gpt-oss: low, medium, high); default leaves it to the template
    #[arg(long, value_name = "LEVEL", env = "LLAMA_ARG_REASONING_EFFORT")]
    pub reasoning_effort: Option<String>,
    /// Longest reasoning before an answer, in tokens; 0 ends it at once, -1 never
    #[arg(long, value_name = "N", default_value = "-1", allow_negative_numbers = true, env = "LLAMA_ARG_THINK_BUDGET",
          value_parser = clap::value_parser!(i32).range(-1..))]
    pub reasoning_budget: i32,
    /// Text that is inserted where --reasoning-budget ends the reasoning
    #[arg(long, value_name = "MESSAGE", env = "LLAMA_ARG_THINK_BUDGET_MESSAGE")]
    pub reasoning_budget_message: Option<String>,
    /// Keep earlier reasoning in the conversation, where the template can (supports_preserve_reasoning)
    #[arg(long, default_value = "on", env = "LLAMA_ARG_REASONING_PRESERVE")]
    pub reasoning_preserve: Switch,
    /// Variables for the chat template, a JSON object such as {"enable_thinking": false}
    #[arg(long, value_name = "JSON", value_parser = template_kwargs, env = "LLAMA_ARG_CHAT_TEMPLATE_KWARGS")]
    pub chat_template_kwargs: Option<TemplateKwargs>,
    /// Show answers unparsed, with the tags of reasoning and tool calls
    #[arg(long, env = "LLAMA_ARG_SKIP_CHAT_PARSING")]
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
