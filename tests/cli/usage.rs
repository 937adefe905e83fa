//! Refusals and answers before a model runs.

use serde_json::Value;

use super::rig::*;

#[test]
fn help_names_every_spelling_and_shows_examples() {
    let help = cli(&["--help"]).run().expect(0).stdout;
    for part in ["-m, --model", "-ngl", "-no-cnv", "--mem-budget", "--expert-cache", "LLAMA_ARG_MODEL", "Examples:"] {
        assert!(help.contains(part), "{part} is missing in:\n{help}");
    }
    for headline in ["Model:", "Sampling:", "Conversation:", "Memory and I/O", "Devices:"] {
        assert!(help.contains(headline), "{headline}");
    }
    assert_eq!(cli(&["-h"]).run().expect(0).stdout, help);
}

#[test]
fn version() {
    let printed = cli(&["--version"]).run().expect(0).stdout;
    assert!(printed.starts_with(concat!("hobbit-cli ", env!("CARGO_PKG_VERSION"))), "{printed}");
    assert_eq!(printed, concat!("hobbit-cli ", env!("HOBBIT_VERSION"), "\n"));
}

#[test]
fn wrong_usage_exits_with_2_and_names_the_mistake() {
    for (args, part) in [
        (&["--frobnicate"][..], "'--frobnicate'"),
        (&["-frob"], "unknown flag '-frob'"),
        (&["--mmproj", "x"], "'--mmproj' is a llama.cpp flag"),
        (&["--prompt-cache-ro"], "--prompt-cache"),
        (&["-n", "many"], "invalid value 'many'"),
    ] {
        let ran = cli(args).run().expect(2);
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(part), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn by_penalty_without_a_profile_is_wrong_usage() {
    let ran = demo(&["-p", "x", "-n", "1", "--slots", "by-penalty"]).run().expect(2);
    for part in ["slots by penalty", "--trace", "hobbit-sim calibrate", "--profile", "--expert-slots even"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert_eq!(ran.stdout, "");
}

#[test]
fn devices_are_listed_without_a_model() {
    let text = cli(&["-m", "nowhere.gguf", "--list-devices"]).run().expect(0);
    let (headline, devices) = text.stdout.split_once('\n').unwrap();
    assert_eq!((headline, text.stderr.as_str()), ("Available devices:", ""));
    let json = cli(&["--list-devices", "--stats-json", "-"]).run().expect(0).stdout;
    let json: Value = serde_json::from_str(&json).unwrap();
    let found = json["devices"].as_array().unwrap();
    if found.is_empty() {
        assert_eq!(devices, "  (none)\n");
    }
    for device in found {
        let (name, description) = (device["name"].as_str().unwrap(), device["description"].as_str().unwrap());
        assert!(devices.contains(&format!("  {name}: {description} (")), "{devices}");
        assert!(name != "CPU" && name != "HOBBIT", "{json}");
    }
    let verbose = cli(&["--list-devices", "-v"]).run().expect(0).stdout;
    assert_eq!(verbose.matches("pinned host memory: ").count(), found.len(), "{verbose}");
}

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let ran = demo(&["-p", "x", "-n", "1", "-dev", "Warp9"]).run().expect(1);
    assert!(ran.stderr.contains("error: there is no device named 'Warp9' (there "), "{}", ran.stderr);
    let ran = demo(&["-p", "x", "-n", "1", "-dev", "CPU"]).run().expect(1);
    assert!(ran.stderr.contains("error: 'CPU' is the CPU, "), "{}", ran.stderr);
    demo(&["-p", "x", "-n", "1", "-dev", "none"]).run().expect(0);
}

#[test]
fn an_rpc_server_that_is_not_there_is_an_error_not_an_abort() {
    // Bound and closed: no other process gets this port meanwhile.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("127.0.0.1:{port}");
    for args in [&["--rpc", &endpoint, "--list-devices"][..], &["--rpc", &endpoint, "-p", "x", "-n", "1"]] {
        let ran = demo(args).run().expect(1);
        let unreachable = format!("error: cannot connect to the RPC server {endpoint}: ");
        let is_named = ran.stderr.contains(&unreachable) || ran.stderr.contains("rebuild it with the feature rpc");
        assert!(is_named, "{}", ran.stderr);
    }
    let ran = cli(&["--rpc", "nowhere", "--list-devices"]).run().expect(1);
    assert!(ran.stderr.contains("'nowhere' is no RPC endpoint: it has no port; give HOST:PORT"), "{}", ran.stderr);
}

#[test]
fn layers_without_a_device_are_noted() {
    let ran = demo(&["-p", "x", "-n", "1", "-dev", "none", "-ngl", "99"]).run().expect(0);
    assert!(ran.stderr.contains("note: -ngl has no effect: "), "{}", ran.stderr);
}

#[test]
fn a_missing_model_is_named() {
    let ran = cli(&["-m", "nowhere.gguf", "-p", "x"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: nowhere.gguf: "), "{}", ran.stderr);
    let mut absent = cli(&[]);
    absent.command.env("HOBBIT_DEMO_MODEL", "absent.gguf");
    assert!(absent.run().expect(1).stderr.starts_with("error: absent.gguf: "));
}

#[test]
fn missing_prompt_files_and_bad_settings_fail_before_the_model_loads() {
    let ran = demo(&["-f", "none.txt"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: none.txt: cannot read this file"), "{}", ran.stderr);
    let ran = demo(&["-p", "x", "--samplers", "bogus"]).run().expect(1);
    assert!(ran.stderr.contains("unknown sampler 'bogus'"), "{}", ran.stderr);
    let ran = demo(&["-p", "x", "-j", "{not json"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: --json-schema: "), "{}", ran.stderr);
}

#[test]
fn stats_json_that_cannot_be_written_fails_at_the_start() {
    let ran = demo(&["-p", "a", "--stats-json", "absent/stats.json"]).run().expect(1);
    assert!(ran.stderr.starts_with("error: absent/stats.json: cannot write the statistics"), "{}", ran.stderr);
    assert_eq!(ran.stdout, "");
}

#[test]
fn a_quiet_run_without_a_model_names_the_demo() {
    let ran = cli(&["--temp", "0", "-t", "1", "-n", "4", "--quiet"]).run().expect(0);
    assert!(ran.stderr.starts_with("hobbit: no model given (-m): running the demo model "), "{}", ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 1);
    assert!(ran.stdout.trim_start().starts_with("In the beginning"), "{}", ran.stdout);
}
