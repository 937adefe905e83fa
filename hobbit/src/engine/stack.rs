//! Stack space for llama.cpp functions whose recursion depth depends on their input.

/// Bytes of stack that any thread is expected to have left.
pub(super) const ANY_THREAD: usize = 512 << 10;

/// Runs `work` with `bytes` of stack, on a thread of its own if that is more than [`ANY_THREAD`].
///
/// # Errors
/// The system refuses the memory or the thread.
pub(super) fn with_bytes<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, String> {
    if bytes <= ANY_THREAD {
        return Ok(work());
    }
    std::thread::scope(|scope| {
        let stack = std::thread::Builder::new().stack_size((1 << 20) + bytes);
        let worker = stack
            .spawn_scoped(scope, work)
            .map_err(|error| format!("not enough memory for the stack that this input needs: {error}"))?;
        worker.join().map_err(|_| "reading it has failed".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_much_has_a_thread_of_its_own() {
        let own = std::thread::current().id();
        let id = || std::thread::current().id();
        assert_eq!(with_bytes(ANY_THREAD, id), Ok(own));
        assert_ne!(with_bytes(ANY_THREAD + 1, id), Ok(own));
        assert!(with_bytes(usize::MAX >> 2, id).is_err(), "there is no such memory");
    }
}
