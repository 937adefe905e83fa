//! The only door to C.
//!
//! * [`llama`]: llama.cpp's and ggml's public API, as `llama-cpp-sys-2` binds it, unmodified.
//! * [`backend`]: the structs of `ggml-backend-impl.h` that a backend written outside of ggml has to fill in.
//! * [`shim`]: our functions in C++, as shim/hobbit.h declares them: exceptions and failed assertions turned into
//!   errors, memory sizes, and llama.cpp's chat templates, grammars, drafters, and encoders of images and sound.
//! * `rpc` (feature `rpc`): ggml's RPC backend, which `llama-cpp-sys-2` does not build.
//!
//! `UPGRADE.md` says what a version bump has to re-check.

/// llama.cpp's and ggml's public API.
pub use llama_cpp_sys_2 as llama;

/// ggml's backend interface (`ggml-backend-impl.h`), the parts a backend fills in.
#[allow(non_camel_case_types, non_snake_case, non_upper_case_globals, missing_docs, clippy::all)]
pub mod backend {
    include!(concat!(env!("OUT_DIR"), "/backend_impl.rs"));
}

/// The shim (`shim/hobbit.h`).
#[allow(non_camel_case_types, missing_docs, clippy::all)]
pub mod shim {
    include!(concat!(env!("OUT_DIR"), "/shim.rs"));
}

#[cfg(feature = "rpc")]
pub mod rpc;

/// Keeps in every program what llama.cpp's calls of Windows lead to (shim/windows.cpp).
#[cfg(windows)]
#[used]
static STREAMS: unsafe extern "C" fn(*mut shim::hobbit_stream) = shim::hobbit_stream_close;

/// Build number of the llama.cpp that `llama-cpp-sys-2` carries; the published sources do not say.
pub const LLAMA_BUILD_NUMBER: i32 = 12032;

// The interface this crate was written against. A bump of llama-cpp-sys-2 that changes it must not compile.
const _: () = assert!(backend::GGML_BACKEND_API_VERSION == 3);

/// The structs shared with C and their sizes in bytes, as this crate's bindings see them, in the order of
/// `hobbit_abi_sizes` in the shim.
const RUST_ABI_SIZES: [(&str, usize); 9] = [
    ("ggml_tensor", size_of::<llama::ggml_tensor>()),
    ("ggml_backend_buffer_type", size_of::<backend::ggml_backend_buffer_type>()),
    ("ggml_backend_buffer", size_of::<backend::ggml_backend_buffer>()),
    ("ggml_backend", size_of::<backend::ggml_backend>()),
    ("ggml_backend_device", size_of::<backend::ggml_backend_device>()),
    ("ggml_backend_reg", size_of::<backend::ggml_backend_reg>()),
    ("llama_model_params", size_of::<llama::llama_model_params>()),
    ("llama_context_params", size_of::<llama::llama_context_params>()),
    ("llama_batch", size_of::<llama::llama_batch>()),
];

/// Checks that C and Rust agree on the size of every struct they share.
///
/// # Errors
/// Names the first struct that differs; nothing may be called through the bindings then.
pub fn check_abi() -> Result<(), String> {
    let mut sizes = [0usize; RUST_ABI_SIZES.len()];
    // SAFETY: the shim writes at most `sizes.len()` values and returns how many it knows.
    let known = unsafe { shim::hobbit_abi_sizes(sizes.as_mut_ptr(), sizes.len()) };
    if known != sizes.len() {
        return Err(format!("the shim knows {known} shared structs, the bindings {}", sizes.len()));
    }
    match RUST_ABI_SIZES.iter().zip(sizes).find(|((_, rust), c)| rust != c) {
        Some(((name, rust), c)) => Err(format!("{name} has {c} bytes in C and {rust} in Rust: the bindings are stale")),
        None => Ok(()),
    }
}

/// Makes ggml know every backend that this build has, once per process: those that llama.cpp was compiled with register
/// themselves; RPC is added; with the feature `dynamic-backends` the best library of every kind is loaded, from the
/// directory in which they were built, that of the executable and the current one, in this order, and last the one that
/// the environment variable `GGML_BACKEND_PATH` names.
///
/// To be called before anything else that reads ggml's registry, which is not locked.
pub fn register_backends() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        #[cfg(feature = "rpc")]
        // SAFETY: the registration is static; a name is asked for with NUL-terminated text.
        unsafe {
            if llama::ggml_backend_reg_by_name(c"RPC".as_ptr()).is_null() {
                llama::ggml_backend_register(rpc::ggml_backend_rpc_reg());
            }
        }
        #[cfg(feature = "dynamic-backends")]
        // SAFETY: no arguments, no state but the registry.
        unsafe {
            llama::ggml_backend_load_all();
        }
    });
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "rpc")]
    #[test]
    fn rpc_is_registered_once() {
        super::register_backends();
        super::register_backends();
        // SAFETY: registrations live as long as the process, names are NUL-terminated.
        let name = |i| unsafe {
            std::ffi::CStr::from_ptr(super::llama::ggml_backend_reg_name(super::llama::ggml_backend_reg_get(i)))
        };
        // SAFETY: reads the registry.
        let names: Vec<_> = (0..unsafe { super::llama::ggml_backend_reg_count() }).map(name).collect();
        assert_eq!(names.iter().filter(|name| ***name == *c"RPC").count(), 1, "{names:?}");
    }

    #[test]
    fn c_and_rust_agree_on_shared_structs() {
        super::check_abi().unwrap();
    }
}
