//! The build script of gguf-tools and of hobbit-server. Stamps the version and the commit, which `doctor` names. With
//! dynamic backends the program looks for libraries beside itself.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Absent in worktrees and outside of checkouts; cargo would rerun the script every time.
    for path in ["../.git/HEAD", "../.git/refs/heads"].into_iter().filter(|path| Path::new(path).exists()) {
        println!("cargo:rerun-if-changed={path}");
    }
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let commit = Command::new("git").args(["rev-parse", "--short=10", "HEAD"]).output();
    let commit = commit.ok().filter(|output| output.status.success());
    match commit.and_then(|output| String::from_utf8(output.stdout).ok()) {
        Some(commit) => println!("cargo:rustc-env=HOBBIT_VERSION={version} ({})", commit.trim()),
        None => println!("cargo:rustc-env=HOBBIT_VERSION={version}"),
    }
    let is = |variable: &str, value: &str| std::env::var(variable).is_ok_and(|found| found == value);
    if is("CARGO_CFG_TARGET_OS", "windows") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        // Linux's stack of a main thread; Windows's has 2 MiB.
        println!("cargo:rustc-link-arg-bins=-Wl,--stack,8388608");
    }
    println!("cargo:rerun-if-env-changed=CARGO_FEATURE_DYNAMIC_BACKENDS");
    if std::env::var_os("CARGO_FEATURE_DYNAMIC_BACKENDS").is_some() {
        match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
            Ok("windows") => {}
            Ok("macos") => println!("cargo:rustc-link-arg-bins=-Wl,-rpath,@loader_path"),
            // DT_RPATH, because DT_RUNPATH would not find the libraries that libraries need.
            _ => println!("cargo:rustc-link-arg-bins=-Wl,--disable-new-dtags,-rpath,$ORIGIN"),
        }
    }
}
