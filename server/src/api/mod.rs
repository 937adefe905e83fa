//! The endpoints: llama-server's, OpenAI's, Anthropic's and Ollama's. A protocol reads its JSON as a validated request
//! ([`crate::request`]), and writes the engine's events as JSON ([`dialect`]).

pub mod anthropic;
pub mod chat;
pub mod completions;
mod dialect;
pub mod embeddings;
pub mod native;
pub mod ollama;
mod openai;
pub mod responses;
pub mod small;

/// How the server names itself to clients.
pub fn build() -> String {
    format!("b{}", hobbit_programs::VERSION)
}
