//! Advice, manuals and completions know the flags.

use std::ffi::OsString;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use hobbit_common::advice::{flag, idle_flags, spelled};
use hobbit_common::manuals::{answer, manual, script};
use hobbit_core::options::{CachingOptions, DeviceOptions, Idle, ModelOptions, Parts, PrecisionOptions, Prefetch};

#[test]
fn settings_have_the_flags_that_programs_declare() {
    let command = super::LowArgs::command();
    let declared = |long: &str| command.get_arguments().any(|arg| arg.get_long() == Some(long));
    let settings = ["low", "mirror", "trace", "cache_state", "path_table", "lora", "control_vectors"];
    // Names of options that may be idle.
    let idle = ["io", "kernels", "repack", "overcommit", "mem_budget", "keep_top", "route_prompts", "virtual_update"];
    for flag in settings.map(|setting| flag(setting).to_owned()).into_iter().chain(idle.map(spelled)) {
        assert!(declared(flag.trim_start_matches("--")), "{flag}");
    }
}

#[test]
fn options_that_cannot_act_are_named_as_flags() {
    let precision = PrecisionOptions { t1: Some(0.5), t2: Some(0.6), prefill_low: Some(0.1), ..Default::default() };
    let device = DeviceOptions { n_cpu_moe: 2, tensor_split: vec![1.0], headroom: 5.0, main: 1, ..Default::default() };
    let caching = CachingOptions { prefetch: Prefetch::On, ..Default::default() };
    let options = ModelOptions { precision, device, caching, n_gpu_layers: 9, ..Default::default() };
    let command = super::LowArgs::command();
    for experts in [true, false] {
        let idle = options.idle(Parts { experts, low: false, n_devices: 0, device_experts: false, passthrough: false });
        assert_eq!(idle.len(), 9, "{idle:?}");
        for Idle { setting, .. } in idle {
            let long = setting.replace('_', "-");
            assert!(command.get_arguments().any(|arg| arg.get_long() == Some(&long)), "{setting}");
        }
    }
    let reason = "there are no low-precision versions (see low)";
    let idle = [Idle { setting: "low_share", reason }, Idle { setting: "t1", reason: "it is off" }];
    assert_eq!(
        idle_flags(&idle).collect::<Vec<_>>(),
        ["--low-share has no effect: there are no low-precision versions (see --low)", "--t1 has no effect: it is off",]
    );
}

#[test]
fn pages_and_scripts() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
        let script = String::from_utf8(script(super::command(), shell)).unwrap();
        assert!(script.contains("mem-budget"), "{shell}");
    }
    let bash = String::from_utf8(script(super::command(), Shell::Bash)).unwrap();
    let offered =
        |flag: &str| bash.split(&format!("                {flag})\n")).nth(1).unwrap().lines().next().unwrap();
    for (flag, part) in [
        ("--policy", "compgen -W \"lru lfu hobbit edgemoe smoe arc classlru learned\""),
        ("--color", "compgen -W \"on off auto\""),
        ("--mem-budget", "COMPREPLY=(\"${cur}\")"),
    ] {
        assert!(offered(flag).contains(part), "{flag}: {}", offered(flag));
    }
    assert!(bash.contains("compgen -f"), "paths are offered files");
    let page = String::from_utf8(manual(super::command()).unwrap()).unwrap();
    assert!(page.contains(".TH hobbit-cli 1") && page.contains("mem\\-budget") && page.contains("Examples:"));
    let two = Command::new("a").about("first").subcommand(Command::new("b").about("second"));
    let page = String::from_utf8(manual(two).unwrap()).unwrap();
    assert!(page.contains(".TH a-b 1") && page.contains("second"), "{page}");
    for other in ["-p --man", "--man -m x", "--completions", "--completions csh", ""] {
        let words: Vec<OsString> = other.split_whitespace().map(OsString::from).collect();
        assert!(answer(super::command, &words).is_none(), "{other}");
    }
}
