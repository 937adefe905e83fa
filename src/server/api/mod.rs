//! The server's endpoints: llama-server's, OpenAI's and Anthropic's.

pub mod anthropic;
pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod fields;
pub mod native;
pub mod openai;
pub mod params;
pub mod prompts;
pub mod responses;
pub mod small;

/// How the server names itself to clients.
pub fn build() -> &'static str {
    concat!("b", env!("HOBBIT_VERSION"))
}
