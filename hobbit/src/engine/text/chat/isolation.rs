//! llama.cpp's rendering of chat templates and its conversion of JSON schemas to grammars. Both run in processes of
//! their own if the program calls [`isolate_chat_templates`].
//!
//! A template is a program inside a model's file. It may loop for ever, take all memory, overflow the stack (recursive
//! macros, self-referential lists) or crash llama.cpp's interpreter (`1 is divisibleby(0)`), and C++ on a thread cannot
//! be stopped. A schema can do the same in a hundred bytes: llama.cpp follows references within `allOf` for ever, and
//! visits nested ones exponentially often. So each task is a process of its own, with limits. These processes are
//! forked from an idle one, which was forked while the program had one thread, and which ends with the program. If it
//! is killed, the program starts itself again as an idle process, a few times within a minute. Windows has no fork:
//! there the idle process runs one task after the other itself, and a task that exceeds a limit ends it.
//!
//! Slow tasks do not delay others: each task first has a little CPU time; one that needs more begins again in an idle
//! process for slow tasks, once [`when_templates_are_slow`] gives it a turn.

#[cfg(unix)]
#[path = "isolation/unix.rs"]
mod process;
#[cfg(windows)]
#[path = "isolation/windows.rs"]
mod process;

use std::any::Any;
use std::env;
use std::ffi::{c_char, c_void};
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ggml_sys::shim::{self, hobbit_text_callback};
use serde::{Deserialize, Serialize};

use crate::engine::ggml::limits;
use crate::engine::ggml::raw::{MESSAGE_BYTES, text_of};
use process::Idle;

/// CPU time limit of a task, in seconds. Renderings of a megabyte take about 30 ms.
const CPU_SECONDS: u64 = 2;

/// CPU time limit of a task's first trial, in microseconds. A schema of usual size takes a few milliseconds.
const QUICK_MICROSECONDS: i64 = 150_000;

/// Wall-clock limit of a task, for busy machines.
const WALL_SECONDS: u32 = 10;

/// Longest wait for an idle process's answer: it may be stopped.
#[cfg(unix)]
const PATIENCE: Duration = Duration::from_secs(WALL_SECONDS as u64 + 20);

/// Memory limit of a task, without the part per byte of its inputs: renderings of ten megabytes take 13 bytes per
/// input byte.
const MEMORY_BYTES: u64 = 192 << 20;
const MEMORY_PER_INPUT_BYTE: u64 = 24;

/// Message of the exception that C++ throws when memory is refused.
const OUT_OF_MEMORY: &str = "std::bad_alloc";

/// Longest result, without the part per byte of the inputs.
const RESULT_BYTES: u64 = 16 << 20;
const RESULT_PER_INPUT_BYTE: u64 = 4;

/// Longest message from one process to another.
const MESSAGE_MAX: u64 = 1 << 30;

/// Set for an idle process that the program starts again: its standard input is the stream.
const REVIVED: &str = "HOBBIT_TEMPLATE_PROCESS";

/// Idle processes that are started again within [`REVIVALS_SPAN`].
const REVIVALS_MAX: usize = 5;
const REVIVALS_SPAN: Duration = Duration::from_secs(60);

/// The idle processes, if isolation was requested.
static LANES: OnceLock<Result<Lanes, String>> = OnceLock::new();

/// Waits for the turn of a slow task, on its thread.
type Turn = fn() -> Result<Box<dyn Any>, String>;

static WHEN_SLOW: OnceLock<Turn> = OnceLock::new();

/// Sets a function that waits, on the thread of a slow task, for the task's turn. The turn lasts as long as the result.
/// A task that gets none fails with the reason.
pub fn when_templates_are_slow(turn: Turn) {
    let _ = WHEN_SLOW.set(turn);
}

struct Lanes {
    quick: Mutex<Idle>,
    slow: Mutex<Idle>,
}

/// Starts rendering chat templates, and converting JSON schemas, in separate processes, with limits of time, memory and
/// stack. A program that does not call this does both in its own process, which a hostile template or schema can hang
/// or crash.
///
/// Should the process be killed, this program is started again as such a process: a program calls this first of all,
/// and does nothing of its own before.
///
/// # Safety
/// This process has one thread.
pub unsafe fn isolate_chat_templates() {
    if env::var_os(REVIVED).is_some() {
        process::serve_standard_input();
    }
    // SAFETY: by the caller.
    let started = unsafe { process::start() };
    let lanes = |quick| Lanes { quick: Mutex::new(quick), slow: Mutex::default() };
    let _ = LANES.set(started.map(lanes).map_err(|error| error.to_string()));
}

impl Lanes {
    fn run(&self, task: &Task) -> io::Result<Result<String, Failure>> {
        let first = locked(&self.quick).ask(true, task)?;
        if !matches!(first, Err(Failure::Slow)) {
            return Ok(first);
        }
        match WHEN_SLOW.get().map(|turn| turn()).transpose() {
            Ok(_turn) => locked(&self.slow).ask(false, task),
            Err(reason) => Ok(Err(Failure::Busy(reason))),
        }
    }
}

/// Counts that an idle process is started again, unless that was done too often.
fn may_revive(revivals: &mut Vec<Instant>, now: Instant) -> bool {
    revivals.retain(|at| now.duration_since(*at) < REVIVALS_SPAN);
    let may = revivals.len() < REVIVALS_MAX;
    if may {
        revivals.push(now);
    }
    may
}

fn locked(idle: &Mutex<Idle>) -> MutexGuard<'_, Idle> {
    idle.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a task, in another process if [`isolate_chat_templates`] was called.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(task: &Task) -> Result<String, Failure> {
    match LANES.get() {
        None => task.run(),
        Some(Ok(lanes)) => lanes.run(task).unwrap_or_else(|error| {
            let reason = format!("the process for templates and schemas is gone ({error}): restart the program");
            Err(Failure::Work(reason))
        }),
        Some(Err(reason)) => Err(Failure::Work(format!("there is no process for it: {reason}"))),
    }
}

fn send(stream: &mut impl Write, message: &[u8]) -> io::Result<()> {
    stream.write_all(&(message.len() as u64).to_le_bytes())?;
    stream.write_all(message)
}

fn receive(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut len = [0; 8];
    stream.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let mut message = Vec::new();
    stream.take(len.min(MESSAGE_MAX)).read_to_end(&mut message)?;
    if message.len() as u64 == len { Ok(message) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(unix)]
fn failed(reason: String) -> Vec<u8> {
    outcome_of(Failure::Work(reason))
}

#[cfg(unix)]
fn outcome_of(failure: Failure) -> Vec<u8> {
    serde_json::to_vec(&Err::<String, _>(failure)).unwrap_or_default()
}

// The interpreter.

/// Returned by `hobbit_chat_apply` for inputs that it cannot read.
const INPUTS_FAILED: i32 = 1;

/// Stack for reading and running a template; schemas may need more.
const STACK_BYTES: usize = 32 << 20;

/// Work for llama.cpp. A template is [`super::templates::Texts`] as JSON; `schema_stack` is what the schemas need, in
/// bytes.
#[derive(Serialize, Deserialize)]
pub(crate) enum Task {
    /// Describes a template, and tries it on a message.
    Describe { template: String },
    /// Renders a template for [`super::ChatInputs`] as JSON.
    Render { template: String, inputs: String, schema_stack: usize },
    /// Makes a grammar of a JSON schema.
    Schema { schema: String, schema_stack: usize },
}

/// Why a task failed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// The inputs cannot be read, or the schema has no grammar.
    Inputs(String),
    /// The template fails, or a limit was exceeded.
    Work(String),
    /// It needs more than the time of a first trial.
    Slow,
    /// It is slow, and got no turn.
    Busy(String),
}

impl Task {
    /// Stack that the work needs, in bytes.
    fn stack_bytes(&self) -> usize {
        match self {
            Self::Describe { .. } => STACK_BYTES,
            Self::Render { schema_stack, .. } => (*schema_stack).max(STACK_BYTES),
            Self::Schema { schema_stack, .. } => *schema_stack,
        }
    }

    /// Bytes of a request.
    fn input_bytes(&self) -> usize {
        match self {
            Self::Describe { .. } => 0,
            Self::Render { inputs, .. } => inputs.len(),
            Self::Schema { schema, .. } => schema.len(),
        }
    }

    /// Bytes of memory that it may take, without its stack.
    fn memory_bytes(&self) -> u64 {
        MEMORY_BYTES + MEMORY_PER_INPUT_BYTE * self.input_bytes() as u64
    }

    /// Runs the task in this process, whose memory is limited to `memory`.
    fn bounded(&self, memory: u64) -> Result<String, Failure> {
        let result_max = RESULT_BYTES + RESULT_PER_INPUT_BYTE * self.input_bytes() as u64;
        match self.run() {
            // llama.cpp wraps the exception in a message that quotes the template.
            Err(Failure::Work(reason)) if reason.contains(OUT_OF_MEMORY) => {
                Err(Failure::Work(format!("it takes more than {} MiB of memory", memory >> 20)))
            }
            Ok(result) if result.len() as u64 > result_max => {
                Err(Failure::Work(format!("its result is longer than {} MiB", result_max >> 20)))
            }
            other => other,
        }
    }

    /// Runs the task in this process, limited only in stack.
    ///
    /// # Errors
    /// See [`Failure`].
    fn run(&self) -> Result<String, Failure> {
        let work = || match self {
            Self::Describe { template } => {
                // SAFETY: the text is valid for its length, the message buffer for its capacity.
                let described = shim_text(true, |output, context, message, capacity| unsafe {
                    let bytes = template.as_ptr().cast();
                    shim::hobbit_chat_describe(bytes, template.len(), output, context, message, capacity)
                });
                described.map_err(|(_, reason)| Failure::Work(reason))
            }
            Self::Render { template, inputs, .. } => {
                // SAFETY: the texts are valid for their lengths, the message buffer for its capacity.
                let applied = shim_text(0, |output, context, message, capacity| unsafe {
                    let (bytes, len) = (template.as_ptr().cast(), template.len());
                    let (read, read_len) = (inputs.as_ptr().cast(), inputs.len());
                    shim::hobbit_chat_apply(bytes, len, read, read_len, output, context, message, capacity)
                });
                applied.map_err(|(code, reason)| match code {
                    INPUTS_FAILED => Failure::Inputs(reason),
                    _ => Failure::Work(reason),
                })
            }
            Self::Schema { schema, .. } => grammar_of(schema),
        };
        limits::with_stack(self.stack_bytes(), work).map_err(Failure::Work)?
    }
}

/// The grammar of a JSON schema, by llama.cpp.
fn grammar_of(schema: &str) -> Result<String, Failure> {
    // SAFETY: the text is valid for its length, the message buffer for its capacity.
    let grammar = shim_text(true, |output, context, message, capacity| unsafe {
        shim::hobbit_schema_grammar(schema.as_ptr().cast(), schema.len(), output, context, message, capacity)
    });
    grammar.map_err(|(_, reason)| {
        if reason.contains(OUT_OF_MEMORY) {
            return Failure::Work(reason);
        }
        let reason = reason.trim_start_matches("JSON schema conversion failed:").trim().replace('\n', "; ");
        Failure::Inputs(format!("llama.cpp cannot turn this JSON schema into a grammar: {reason}"))
    })
}

/// Returns the text that a function of the shim passes to a callback; if the function does not return `done`, its
/// result and the reason.
pub(super) fn shim_text<T: PartialEq>(
    done: T,
    call: impl FnOnce(hobbit_text_callback, *mut c_void, *mut c_char, usize) -> T,
) -> Result<String, (T, String)> {
    let mut bytes: Vec<u8> = Vec::new();
    let mut message = [0u8; MESSAGE_BYTES];
    let code = call(Some(on_text), (&raw mut bytes).cast(), message.as_mut_ptr().cast(), message.len());
    let reason = if code != done {
        text_of(&message)
    } else {
        match String::from_utf8(bytes) {
            Ok(text) => return Ok(text),
            Err(_) => "llama.cpp's text is not UTF-8".to_owned(),
        }
    };
    Err((code, if reason.is_empty() { "llama.cpp gave no reason".to_owned() } else { reason }))
}

unsafe extern "C" fn on_text(bytes: *mut c_void, text: *const c_char, len: usize) {
    // SAFETY: `text` passes its vector; the shim passes `len` readable bytes.
    let (bytes, text) = unsafe { (&mut *bytes.cast::<Vec<u8>>(), std::slice::from_raw_parts(text.cast::<u8>(), len)) };
    // No panic may cross into C++.
    let _ = catch_unwind(AssertUnwindSafe(|| bytes.extend_from_slice(text)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_started_again_a_few_times_a_minute() {
        let (mut revivals, now) = (Vec::new(), Instant::now());
        assert!((0..REVIVALS_MAX).all(|_| may_revive(&mut revivals, now)));
        assert!(!may_revive(&mut revivals, now + REVIVALS_SPAN / 2));
        assert!(may_revive(&mut revivals, now + REVIVALS_SPAN));
    }
}
