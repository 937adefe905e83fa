//! Stamps what was built: version, commit and the version of llama.cpp's bindings, which records name. Programs with
//! dynamic backends look for libraries beside themselves.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=.git/HEAD");
    println!("cargo:rerun-if-changed=.git/refs/heads");
    println!("cargo:rerun-if-changed=Cargo.lock");
    println!("cargo:rerun-if-changed=build.rs");
    let commit = Command::new("git")
        .args(["rev-parse", "HEAD"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .map(|commit| commit.trim().to_owned());
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    match commit.as_deref().and_then(|commit| commit.get(..10)) {
        Some(short) => println!("cargo:rustc-env=HOBBIT_VERSION={version} ({short})"),
        None => println!("cargo:rustc-env=HOBBIT_VERSION={version}"),
    }
    println!("cargo:rustc-env=HOBBIT_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo:rustc-env=HOBBIT_LLAMA_CPP_SYS={}", llama_cpp_sys().as_deref().unwrap_or("unknown"));
    let is = |variable: &str, value: &str| std::env::var(variable).is_ok_and(|found| found == value);
    if is("CARGO_CFG_TARGET_OS", "windows") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        // Linux's stack of a main thread; Windows's has 2 MiB.
        println!("cargo:rustc-link-arg-bins=-Wl,--stack,8388608");
    }
    if std::env::var_os("CARGO_FEATURE_DYNAMIC_BACKENDS").is_some() {
        match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
            Ok("windows") => {}
            Ok("macos") => println!("cargo:rustc-link-arg-bins=-Wl,-rpath,@loader_path"),
            // DT_RPATH, because DT_RUNPATH would not find the libraries that libraries need.
            _ => println!("cargo:rustc-link-arg-bins=-Wl,--disable-new-dtags,-rpath,$ORIGIN"),
        }
    }
}

/// The version of llama.cpp's bindings in the lock file.
fn llama_cpp_sys() -> Option<String> {
    let lock = std::fs::read_to_string("Cargo.lock").ok()?;
    let (_, rest) = lock.split_once("name = \"llama-cpp-sys-2\"\nversion = \"")?;
    Some(rest.split_once('"')?.0.to_owned())
}
