//! llama.cpp's template interpreter: reads a task, writes JSON.

use ggml_sys::chat;
use serde::{Deserialize, Serialize};

use super::call;
use crate::engine::stack;

/// Returned by `hobbit_chat_apply` for inputs that it cannot read.
const INPUTS_FAILED: i32 = 1;

/// Stack for reading and running a template; schemas may need more.
const STACK_BYTES: usize = 32 << 20;

/// A task for the interpreter.
#[derive(Serialize, Deserialize)]
pub(super) struct Task {
    /// [`super::templates::Texts`] as JSON.
    pub(super) template: String,
    /// [`super::ChatInputs`] as JSON. `None` describes the template, and tries it on a message.
    pub(super) inputs: Option<String>,
    /// Stack that the schemas of the inputs need, in bytes.
    pub(super) schema_stack: usize,
}

/// Reason for a failed rendering.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Failure {
    /// The inputs cannot be read.
    Inputs(String),
    /// The template fails.
    Template(String),
}

impl Task {
    /// Stack that the work needs, in bytes.
    pub(super) fn stack_bytes(&self) -> usize {
        self.schema_stack.max(STACK_BYTES)
    }

    /// Runs the task in this process, limited only in stack.
    ///
    /// # Errors
    /// See [`Failure`].
    pub(super) fn run(&self) -> Result<String, Failure> {
        let template = &self.template;
        let work = || match &self.inputs {
            None => {
                // SAFETY: the text is valid for its length, the message buffer for its capacity.
                let described = call::text(true, |output, context, message, capacity| unsafe {
                    let bytes = template.as_ptr().cast();
                    chat::hobbit_chat_describe(bytes, template.len(), output, context, message, capacity)
                });
                described.map_err(|(_, reason)| Failure::Template(reason))
            }
            Some(inputs) => {
                // SAFETY: the texts are valid for their lengths, the message buffer for its capacity.
                let applied = call::text(0, |output, context, message, capacity| unsafe {
                    let (bytes, len) = (template.as_ptr().cast(), template.len());
                    let (read, read_len) = (inputs.as_ptr().cast(), inputs.len());
                    chat::hobbit_chat_apply(bytes, len, read, read_len, output, context, message, capacity)
                });
                applied.map_err(|(code, reason)| match code {
                    INPUTS_FAILED => Failure::Inputs(reason),
                    _ => Failure::Template(reason),
                })
            }
        };
        stack::with_bytes(self.stack_bytes(), work).map_err(Failure::Template)?
    }
}
