//! Finds the llama.cpp sources that `llama-cpp-sys-2` built, binds ggml's backend interface, and compiles and binds the
//! shim. On request it compiles the RPC backend, or gathers the libraries that a program with dynamic backends needs.
//! Reports whether AMX was left out.

#[path = "amx/verdict.rs"]
mod amx;

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=shim");
    let built = Built::find();
    check_amx(&built);
    let source = built.source;
    bind_backend_interface(&source);
    compile_shim(&source);
    bind_shim(&source);
    if env::var_os("CARGO_FEATURE_RPC").is_some() {
        compile_rpc(&source);
    }
    if let Some(backends) = env::var_os("DEP_LLAMA_BACKENDS_DIR") {
        gather_libraries(Path::new(&backends)).expect("libraries can be placed beside the programs");
    }
    link_windows();
}

/// Links what llama.cpp needs of Windows and of the compiler. llama-cpp-sys-2 asks for the compiler's libraries without
/// saying how: the linker takes the archives because their directory, which is searched first, has no DLLs.
fn link_windows() {
    let is = |variable: &str, value: &str| env::var(variable).is_ok_and(|found| found == value);
    if !(is("CARGO_CFG_TARGET_OS", "windows") && is("CARGO_CFG_TARGET_ENV", "gnu")) {
        return;
    }
    let compiler = cc::Build::new().cpp(true).get_compiler();
    let archives = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("compiler");
    fs::create_dir_all(&archives).expect("OUT_DIR is writable");
    println!("cargo:rustc-link-search=native={}", archives.display());
    for library in ["stdc++", "gomp", "winpthread"] {
        let name = format!("lib{library}.a");
        let asked = compiler.to_command().arg(format!("--print-file-name={name}")).output();
        let asked = asked.expect("the C++ compiler runs");
        let path = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
        fs::copy(path, archives.join(name)).expect("the C++ compiler has its library as an archive");
        println!("cargo:rustc-link-lib=static:-bundle={library}");
    }
    for library in ["ws2_32", "crypt32", "bcrypt", "shell32", "mingwex", "mingw32", "msvcrt"] {
        println!("cargo:rustc-link-lib={library}");
    }
}

/// What `llama-cpp-sys-2` built, and where.
struct Built {
    /// The text of CMakeCache.txt.
    cache: String,
    /// The directory of the libraries.
    libraries: PathBuf,
    /// The directory of the llama.cpp sources, as CMake recorded it.
    source: PathBuf,
}

impl Built {
    fn find() -> Built {
        let cmake_dir = env::var("DEP_LLAMA_GGML_CMAKE_DIR")
            .expect("llama-cpp-sys-2 reports where it installed ggml (DEP_LLAMA_GGML_CMAKE_DIR)");
        let cmake_dir = Path::new(&cmake_dir);
        let cache = cmake_dir
            .ancestors()
            .map(|dir| dir.join("build/CMakeCache.txt"))
            .find(|path| path.is_file())
            .expect("llama-cpp-sys-2 keeps its CMakeCache.txt beside what it installed");
        let cache = fs::read_to_string(&cache).expect("CMakeCache.txt is readable");
        let source = cache
            .lines()
            .find_map(|line| line.strip_prefix("CMAKE_HOME_DIRECTORY:INTERNAL="))
            .map(PathBuf::from)
            .expect("CMakeCache.txt names its source directory");
        let libraries = cmake_dir.parent().expect("ggml's package is in a subdirectory of lib").to_owned();
        Built { cache, libraries, source }
    }
}

/// One line if AMX was left out where there would be some; an error if programs would crash for it.
fn check_amx(built: &Built) {
    println!("cargo:rerun-if-changed=amx");
    println!("cargo:rerun-if-env-changed=HOBBIT_AMX");
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch != "x86_64" && arch != "x86") {
        return;
    }
    let asked = env::var("HOBBIT_AMX").ok().filter(|asked| !asked.is_empty()).unwrap_or_else(|| "auto".to_owned());
    let backends = env::var_os("DEP_LLAMA_BACKENDS_DIR").map(PathBuf::from).unwrap_or_default();
    let release = if env::var("PROFILE").is_ok_and(|profile| profile == "release") { " --release" } else { "" };
    let directory = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR")).join("amx");
    let probe = || {
        let object = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("amx_probe.o");
        let compiler = cc::Build::new().cpp(true).warnings(false).get_compiler();
        amx::probe(|| compiler.to_command(), &directory.join("probe.cpp"), &object).expect("the C++ compiler runs")
    };
    let advice = amx::advice(
        amx::Record::parse(&built.cache).as_ref(),
        &asked,
        amx::is_in_libraries(&[&built.libraries, &backends]),
        probe,
        &format!("cargo clean{release} -p llama-cpp-sys-2"),
        &directory.join("amx.cmake").display().to_string(),
    );
    match advice {
        amx::Advice::Nothing => {}
        amx::Advice::Warn(line) => println!("cargo::warning={line}"),
        amx::Advice::Fail(line) => {
            println!("cargo::error={line}");
            std::process::exit(1);
        }
    }
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
        .derive_default(true)
        .layout_tests(true)
        .generate()
        .expect("bindgen reads ggml-backend-impl.h");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings.write_to_file(out.join("backend_impl.rs")).expect("OUT_DIR is writable");
}

fn bind_shim(source: &Path) {
    let bindings = bindgen::Builder::default()
        .header("shim/hobbit.h")
        .clang_args(["include", "ggml/include"].map(|dir| format!("-I{}", source.join(dir).display())))
        .allowlist_item("hobbit_.*")
        .allowlist_var("HOBBIT_.*")
        .allowlist_recursively(false)
        .raw_line("use llama_cpp_sys_2::*;")
        .prepend_enum_name(false)
        .default_macro_constant_type(bindgen::MacroTypeVariation::Signed)
        .generate()
        .expect("bindgen reads shim/hobbit.h");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings.write_to_file(out.join("shim.rs")).expect("OUT_DIR is writable");
}

/// C++; for Windows, the standard library is linked by [`link_windows`].
fn shared_flags() -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true);
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "windows") {
        build.cpp_link_stdlib(None);
    }
    build
}

fn compile_shim(source: &Path) {
    let mut build = shared_flags();
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "windows") {
        build.file("shim/windows.cpp");
    }
    build
        .std("c++17")
        .file("shim/shim.cpp")
        .file("shim/chat.cpp")
        .file("shim/grammar.cpp")
        .file("shim/media.cpp")
        .file("shim/speculative.cpp")
        .include(source.join("include"))
        .include(source.join("src"))
        .include(source.join("common"))
        .include(source.join("vendor"))
        .include(source.join("tools/mtmd"))
        .include(source.join("ggml/include"))
        .include(source.join("ggml/src"))
        .warnings(false)
        .pic(true)
        .compile("hobbit_ggml_shim");
}

/// ggml's RPC backend as its CMake lists would compile it into a static library, without RDMA.
fn compile_rpc(source: &Path) {
    let rpc = source.join("ggml/src/ggml-rpc");
    shared_flags()
        .std("gnu++17")
        .opt_level(3)
        .define("NDEBUG", None)
        .define("_GNU_SOURCE", None)
        .define("_XOPEN_SOURCE", "600")
        // Includes ggml-rpc.cpp.
        .file("shim/rpc.cpp")
        .file(rpc.join("transport.cpp"))
        .include(&rpc)
        .include(source.join("include"))
        .include(source.join("ggml/include"))
        .include(source.join("ggml/src"))
        .warnings(false)
        .pic(true)
        .compile("hobbit_ggml_rpc");
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "windows") {
        println!("cargo:rustc-link-lib=ws2_32");
    }
}

/// Places llama.cpp's libraries, under the names by which they are loaded, and all backends where cargo puts programs:
/// that directory can be copied and runs anywhere. `llama-cpp-sys-2` places the linker's names only, as links to these,
/// and fails when it runs again and finds that they lead nowhere.
fn gather_libraries(backends: &Path) -> io::Result<()> {
    let installed = backends.parent().expect("a subdirectory of what llama-cpp-sys-2 installed");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let programs = out.ancestors().nth(3).expect("OUT_DIR is <profile>/build/<package>/out");
    for directory in [backends.to_owned(), installed.join("lib"), installed.join("lib64")] {
        let Ok(entries) = fs::read_dir(directory) else { continue };
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_backend = path.starts_with(backends);
            // libllama.so.0, which is a link to libllama.so.0.26.0; libllama.0.dylib.
            let is_loaded = name.split('.').filter(|part| part.parse::<u32>().is_ok()).count() == 1;
            if !name.starts_with("lib") || !(is_backend || is_loaded) {
                continue;
            }
            for directory in [programs.to_owned(), programs.join("deps"), programs.join("examples")] {
                if directory.is_dir() {
                    let placed = directory.join(&name);
                    // Not overwritten: a running program may have it mapped.
                    let _ = fs::remove_file(&placed);
                    fs::copy(&path, placed)?;
                }
            }
        }
    }
    Ok(())
}
