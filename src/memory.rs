//! The allocator of a program that runs a model.

/// Limits the allocator's arenas: memory freed in one thread's arena cannot be used by other threads and seldom returns
/// to the system. Must be the first action of a program: threads started earlier have arenas of their own.
pub fn few_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ARENAS: libc::c_int = 2;
        // SAFETY: it sets a number that is looked at where a thread needs an arena.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) };
    }
}
