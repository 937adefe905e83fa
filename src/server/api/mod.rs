//! What the server understands: llama-server's endpoints and OpenAI's.

pub mod fields;
pub mod native;
pub mod params;
pub mod prompts;
pub mod small;

/// How the server names itself to clients.
pub fn build() -> &'static str {
    concat!("b", env!("HOBBIT_VERSION"))
}
