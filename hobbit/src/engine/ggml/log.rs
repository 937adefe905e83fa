//! Routes llama.cpp's log lines to the user's sink; keeps error lines for messages.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_void};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use ggml_sys::llama;

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum LogLevel {
    Debug,
    Info,
    Warn,
    Error,
    /// A line of hobbit's own: behaviour differs from the request.
    Notice,
}

type Sink = Box<dyn FnMut(LogLevel, &str) + Send>;

/// Locked while the sink runs.
static SINK: Mutex<Option<Sink>> = Mutex::new(None);

struct State {
    last_level: LogLevel,
    /// Errors logged on threads that have not called [`clear_errors`].
    errors: String,
}

static STATE: Mutex<State> = Mutex::new(State { last_level: LogLevel::Info, errors: String::new() });

thread_local! {
    /// Whether this thread runs a sink.
    static IN_SINK: Cell<bool> = const { Cell::new(false) };
    /// Errors logged on this thread since [`clear_errors`]; `None` before its first call, as on llama.cpp's own
    /// threads.
    static ERRORS: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Error text kept for messages, in bytes.
const ERRORS_BYTES_MAX: usize = 4096;

/// Sends llama.cpp's log to `sink`, text as it comes (lines may arrive in pieces, newlines included). The log is
/// discarded until this function is called.
///
/// The sink runs on one thread at a time, and must not wait for a thread that logs. It may use hobbit; log output that
/// the sink causes is dropped, since it would recurse for ever, and so is a sink that it sets.
pub fn set_log(sink: impl FnMut(LogLevel, &str) + Send + 'static) {
    install();
    if !IN_SINK.get() {
        let before = SINK.lock().unwrap_or_else(PoisonError::into_inner).replace(Box::new(sink));
        // Not earlier: dropping it runs the owner's code, and the lock is free now.
        drop(before);
    }
}

/// Makes llama.cpp log to us instead of stderr.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    // SAFETY: the callback lives as long as the process and takes no state.
    ONCE.call_once(|| unsafe {
        llama::llama_log_set(Some(on_log), std::ptr::null_mut());
        llama::mtmd_helper_log_set(Some(on_log), std::ptr::null_mut());
    });
}

/// Sends the user's sink a line about behaviour that differs from the request.
pub(crate) fn notice(text: impl std::fmt::Display) {
    deliver(LogLevel::Notice, &format!("{text}\n"));
}

/// Sends the user's sink a line that only those who look for it want to see.
pub(crate) fn detail(text: impl std::fmt::Display) {
    deliver(LogLevel::Debug, &format!("{text}\n"));
}

/// Delivers text to the sink.
fn deliver(level: LogLevel, text: &str) {
    if IN_SINK.replace(true) {
        return;
    }
    // A panicking sink only loses its line.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        SINK.lock().unwrap_or_else(PoisonError::into_inner).iter_mut().for_each(|sink| sink(level, text));
    }));
    IN_SINK.set(false);
}

/// Forgets the errors logged so far. From now on this thread's errors are kept apart, because several threads may open
/// models at once.
pub(crate) fn clear_errors() {
    ERRORS.replace(Some(String::new()));
    state().errors.clear();
}

/// Errors logged since [`clear_errors`], on one line.
pub(crate) fn take_errors() -> String {
    let own = ERRORS.with_borrow_mut(|errors| errors.as_mut().map(mem::take).unwrap_or_default());
    let errors = own + &mem::take(&mut state().errors);
    let lines: Vec<String> = errors.lines().map(readable).filter(|line| !line.is_empty()).collect();
    lines.join("; ")
}

/// Removes parts of a llama.cpp line that matter only to its developers: the repeated message that loading failed, and
/// the build machine's directories in a failed assertion.
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
    let mut state = state();
    let level = match level {
        llama::GGML_LOG_LEVEL_DEBUG => LogLevel::Debug,
        llama::GGML_LOG_LEVEL_WARN => LogLevel::Warn,
        llama::GGML_LOG_LEVEL_ERROR => LogLevel::Error,
        llama::GGML_LOG_LEVEL_CONT => state.last_level,
        _ => LogLevel::Info,
    };
    state.last_level = level;
    if level == LogLevel::Error {
        let keep = |errors: &mut String| {
            if errors.len() + text.len() <= ERRORS_BYTES_MAX {
                errors.push_str(&text);
            }
        };
        let is_own = ERRORS.try_with(|own| own.borrow_mut().as_mut().map(keep).is_some()).unwrap_or(false);
        if !is_own {
            keep(&mut state.errors);
        }
    }
    drop(state);
    deliver(level, &text);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use ggml_sys::llama;

    use super::{clear_errors, notice, on_log, readable, set_log, take_errors};

    fn log_error(text: &std::ffi::CStr) {
        // SAFETY: the text is NUL-terminated.
        unsafe { on_log(llama::GGML_LOG_LEVEL_ERROR, text.as_ptr(), std::ptr::null_mut()) };
    }

    #[test]
    fn errors_are_kept_by_thread() {
        clear_errors();
        log_error(c"of one model\n");
        let other = thread::spawn(|| {
            clear_errors();
            log_error(c"of another model\n");
            take_errors()
        });
        let (other, own) = (other.join().unwrap(), take_errors());
        assert!(other.contains("of another model") && !other.contains("of one model"), "{other}");
        assert!(own.contains("of one model") && !own.contains("of another model"), "{own}");
    }

    /// Counts only these lines, because other tests of this process may log. Times out, so that a deadlock fails the
    /// test.
    fn next(observed: &mpsc::Receiver<String>) -> String {
        let of_ours = |line: String| line.strip_prefix("called back: ").map(|line| line.trim_end().to_owned());
        std::iter::from_fn(|| observed.recv_timeout(Duration::from_secs(60)).ok()).find_map(of_ours).unwrap_or_default()
    }

    #[test]
    fn output_of_the_sink_itself_is_dropped() {
        let (sender, observed) = mpsc::channel();
        set_log(move |_, text| {
            let _ = sender.send(text.to_owned());
            notice("called back: inner");
            set_log(|_, _| {});
        });
        notice("called back: outer");
        notice("called back: after");
        assert_eq!([next(&observed), next(&observed)], ["outer", "after"]);
    }

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
