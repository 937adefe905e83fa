//! Flags of the text to continue.

use std::path::PathBuf;

use clap::Args;

use crate::switch::Switch;

#[derive(Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// Text to continue, or the first message of a conversation (default: what is piped in)
    #[arg(short, long, value_name = "PROMPT", overrides_with_all = ["file", "binary_file"])]
    pub prompt: Option<String>,
    /// File with the prompt, '-' for the standard input; one newline at its end is dropped
    #[arg(short, long, value_name = "FNAME", overrides_with_all = ["prompt", "binary_file"])]
    pub file: Option<PathBuf>,
    /// File with the prompt, '-' for the standard input; its bytes are taken as they are
    #[arg(long, value_name = "FNAME", overrides_with_all = ["prompt", "file"])]
    pub binary_file: Option<PathBuf>,
    /// Process \n, \r, \t, \', \", \\ and \xHH in prompts and affixes
    #[arg(short, long, value_name = Switch::NAME, default_value = "on")]
    pub escape: Switch,
    /// Print the prompt before what is generated
    #[arg(long, value_name = Switch::NAME, default_value = "on")]
    pub display_prompt: Switch,
    /// Print the prompt's tokens on stderr
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub verbose_prompt: Switch,
    /// Tokens to generate (per turn); -1 without end, -2 until the context is full
    #[arg(short = 'n', long, value_name = "N", env = "LLAMA_ARG_N_PREDICT")]
    pub predict: Option<i32>,
    /// Keep the state after the prompt in this file; a later run whose prompt begins alike goes on there
    #[arg(long, value_name = "FNAME")]
    pub prompt_cache: Option<PathBuf>,
    /// Keep what is generated there, too
    #[arg(long, value_name = Switch::NAME, default_value = "off", requires = "prompt_cache")]
    pub prompt_cache_all: Switch,
    /// Use that file and leave it as it is
    #[arg(long, value_name = Switch::NAME, default_value = "off", requires = "prompt_cache")]
    pub prompt_cache_ro: Switch,
    /// Stop at this text; in interactive mode it is the user's turn then. May be repeated
    #[arg(short, long, value_name = "PROMPT")]
    pub reverse_prompt: Vec<String>,
}
