//! llama.cpp's log lines, routed to the user's choice; error lines are kept for messages.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once, PoisonError};

use ggml_sys::llama;

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum LogLevel {
    Debug,
    Info,
    Warn,
    Error,
    /// A line of hobbit's own, about what goes otherwise than was asked for.
    Notice,
}

type Sink = Box<dyn FnMut(LogLevel, &str) + Send>;

struct State {
    sink: Option<Sink>,
    last_level: LogLevel,
    errors: String,
}

static STATE: Mutex<State> = Mutex::new(State { sink: None, last_level: LogLevel::Info, errors: String::new() });

/// Error text kept for messages, in bytes.
const ERRORS_BYTES_MAX: usize = 4096;

/// Sends llama.cpp's log to `sink`, text as it comes (lines may arrive in pieces, newlines included). Without a call
/// to this function the log is discarded.
pub fn set_log(sink: impl FnMut(LogLevel, &str) + Send + 'static) {
    install();
    STATE.lock().unwrap_or_else(PoisonError::into_inner).sink = Some(Box::new(sink));
}

/// Makes llama.cpp log to us instead of stderr.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    // SAFETY: the callback lives as long as the process and takes no state.
    ONCE.call_once(|| unsafe { llama::llama_log_set(Some(on_log), std::ptr::null_mut()) });
}

/// Tells the user's sink, on a line, what goes otherwise than was asked for.
pub(super) fn notice(text: impl std::fmt::Display) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sink) = state.sink.as_mut() {
            sink(LogLevel::Notice, &format!("{text}\n"));
        }
    }));
}

/// Forgets the errors logged so far.
pub(super) fn clear_errors() {
    STATE.lock().unwrap_or_else(PoisonError::into_inner).errors.clear();
}

/// What was logged as an error since [`clear_errors`], on one line.
pub(super) fn take_errors() -> String {
    let errors = std::mem::take(&mut STATE.lock().unwrap_or_else(PoisonError::into_inner).errors);
    let lines: Vec<String> = errors.lines().map(readable).filter(|line| !line.is_empty()).collect();
    lines.join("; ")
}

/// A line of llama.cpp's without what only its developers read: that loading failed, once more, and the directories
/// of the machine that compiled a failed assertion.
fn readable(line: &str) -> String {
    let line = line.trim();
    if line.ends_with(": failed to load model") {
        return String::new();
    }
    let line = line.strip_prefix("llama_model_load: error loading model: ").unwrap_or(line);
    let words = line.split(' ').map(|word| match word.rsplit_once("/llama.cpp/") {
        Some((_, file)) if word.starts_with('/') => file,
        _ => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

unsafe extern "C" fn on_log(level: llama::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml passes NUL-terminated text.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A sink that panics loses its line, nothing else.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        let level = match level {
            llama::GGML_LOG_LEVEL_DEBUG => LogLevel::Debug,
            llama::GGML_LOG_LEVEL_WARN => LogLevel::Warn,
            llama::GGML_LOG_LEVEL_ERROR => LogLevel::Error,
            llama::GGML_LOG_LEVEL_CONT => state.last_level,
            _ => LogLevel::Info,
        };
        state.last_level = level;
        if level == LogLevel::Error && state.errors.len() + text.len() <= ERRORS_BYTES_MAX {
            state.errors.push_str(&text);
        }
        if let Some(sink) = state.sink.as_mut() {
            sink(level, &text);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::readable;

    #[test]
    fn errors_are_made_readable() {
        let table = [
            ("llama_model_load: error loading model: tensor 'x' not found\n", "tensor 'x' not found"),
            ("llama_model_load_from_file_impl: failed to load model", ""),
            (
                "/build/llama.cpp/src/llama-model.cpp:7: GGML_ASSERT(a > 0) failed",
                "src/llama-model.cpp:7: GGML_ASSERT(a > 0) failed",
            ),
            ("anything else", "anything else"),
        ];
        for (line, expected) in table {
            assert_eq!(readable(line), expected);
        }
    }
}
