//! With dynamic backends the program looks for libraries beside itself. hobbit-server's build script, too.

fn main() {
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
