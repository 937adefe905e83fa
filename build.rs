//! Stamps the version: the commit where there is one. Programs with dynamic backends look for libraries beside
//! themselves.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=.git/HEAD");
    println!("cargo:rerun-if-changed=.git/refs/heads");
    println!("cargo:rerun-if-changed=build.rs");
    let commit = Command::new("git")
        .args(["rev-parse", "--short=10", "HEAD"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok());
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    match commit {
        Some(commit) => println!("cargo:rustc-env=HOBBIT_VERSION={version} ({})", commit.trim()),
        None => println!("cargo:rustc-env=HOBBIT_VERSION={version}"),
    }
    if std::env::var_os("CARGO_FEATURE_DYNAMIC_BACKENDS").is_some() {
        match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
            Ok("windows") => {}
            Ok("macos") => println!("cargo:rustc-link-arg-bins=-Wl,-rpath,@loader_path"),
            _ => println!("cargo:rustc-link-arg-bins=-Wl,-rpath,$ORIGIN"),
        }
    }
}
