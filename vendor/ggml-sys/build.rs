//! Finds the llama.cpp sources that `llama-cpp-sys-2` built, binds ggml's backend interface and compiles the shim.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=shim");
    let source = llama_cpp_source();
    bind_backend_interface(&source);
    compile_shim(&source);
}

/// The directory of the llama.cpp sources, as CMake recorded it when `llama-cpp-sys-2` was built.
fn llama_cpp_source() -> PathBuf {
    let cmake_dir = env::var("DEP_LLAMA_GGML_CMAKE_DIR")
        .expect("llama-cpp-sys-2 reports where it installed ggml (DEP_LLAMA_GGML_CMAKE_DIR)");
    let cache = Path::new(&cmake_dir)
        .ancestors()
        .map(|dir| dir.join("build/CMakeCache.txt"))
        .find(|path| path.is_file())
        .expect("llama-cpp-sys-2 keeps its CMakeCache.txt beside what it installed");
    let text = fs::read_to_string(&cache).expect("CMakeCache.txt is readable");
    let home = text
        .lines()
        .find_map(|line| line.strip_prefix("CMAKE_HOME_DIRECTORY:INTERNAL="))
        .expect("CMakeCache.txt names its source directory");
    PathBuf::from(home)
}

fn bind_backend_interface(source: &Path) {
    let bindings = bindgen::Builder::default()
        .header(source.join("ggml/src/ggml-backend-impl.h").to_str().expect("a UTF-8 path"))
        .clang_arg(format!("-I{}", source.join("ggml/include").display()))
        .allowlist_type("ggml_backend_(buffer_type|buffer|backend|device|reg)(_i)?")
        .allowlist_type("ggml_backend(_i)?")
        .allowlist_type("ggml_backend_graph_optimize_params")
        .allowlist_function("ggml_backend_buffer_init")
        .allowlist_var("GGML_BACKEND_API_VERSION")
        .allowlist_recursively(false)
        .raw_line("use llama_cpp_sys_2::*;")
        .prepend_enum_name(false)
        .layout_tests(true)
        .generate()
        .expect("bindgen reads ggml-backend-impl.h");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings.write_to_file(out.join("backend_impl.rs")).expect("OUT_DIR is writable");
}

fn compile_shim(source: &Path) {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("shim/shim.cpp")
        .include(source.join("include"))
        .include(source.join("src"))
        .include(source.join("common"))
        .include(source.join("vendor"))
        .include(source.join("ggml/include"))
        .include(source.join("ggml/src"))
        .warnings(false)
        .pic(true)
        .compile("hobbit_ggml_shim");
}
