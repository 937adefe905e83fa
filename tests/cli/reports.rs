//! Start-up and closing lines, statistics and logs.

use serde_json::Value;

use super::rig::*;

#[test]
fn a_run_has_three_lines_before_and_four_after() {
    let whole = ["-p", "In the beginning", "-n", "4"];
    for extra in [&["--expert-cache", "25%"][..], &["--io", "buffered", "--cache-state", "a.state"]] {
        let stderr = demo(&[&whole[..], extra].concat()).run().expect(0).stderr;
        let lines: Vec<&str> = stderr.lines().collect();
        assert!(lines.len() <= 7 && lines.iter().all(|line| line.starts_with("hobbit: ")), "{extra:?}: {stderr}");
        assert!(lines[0].contains("demo.gguf: llama 11.7M Q8_0, 11.88 MiB, 6 layers of 8 experts"), "{stderr}");
        assert!(lines[1].starts_with("hobbit: memory: "), "{stderr}");
        for part in ["hobbit: prompt: 4 tokens in ", "hobbit: decode: 3 tokens in ", "read per token", "peak memory"] {
            assert!(stderr.contains(part), "{part}: {stderr}");
        }
        assert!(!stderr.contains("outside the cache"), "{stderr}");
    }
    let plain = demo(&whole).run().expect(0).stderr;
    let lines: Vec<&str> = plain.lines().collect();
    assert!(lines.len() <= 6 && lines.iter().all(|line| line.starts_with("hobbit: ")), "{plain}");
    assert!(lines[1].contains("all of the model fits, and llama.cpp runs it by itself (mapped"), "{plain}");
    let low =
        demo(&[&whole[..], &["--expert-cache", "25%", "--low", "q2_k", "--low-dir", "."]].concat()).run().expect(0);
    assert!(low.stderr.contains("results are approximate"), "{}", low.stderr);
    let all = demo(&[&whole[..], &["-v"]].concat()).run().expect(0).stderr;
    for part in ["llama_perf_context_print:        eval time = ", "memory budget", "\"mode\":\"exact\"", "\"io\":\""] {
        assert!(all.contains(part), "{part}: {all}");
    }
}

#[test]
fn a_context_beyond_the_training_is_warned_of() {
    let warning = "warning: the context holds 1024 tokens, but the model was trained on 512";
    assert!(demo(&["-p", "a", "-n", "1", "-c", "1024"]).run().expect(0).stderr.contains(warning));
    assert!(!demo(&["-p", "a", "-n", "1", "-c", "512"]).run().expect(0).stderr.contains("warning"));
}

#[test]
fn low_versions_that_cannot_be_kept_name_the_flag_that_helps() {
    for directory in ["absent", "/proc"] {
        let args = ["-p", "a", "-n", "1", "--expert-cache", "25%", "--low", "q2_k", "--low-dir", directory];
        let stderr = demo(&args).run().expect(1).stderr;
        let parts = ["error: --low q2_k: nothing can be kept in ", directory, "--low-dir", "cannot create this file: "];
        assert!(parts.iter().all(|part| stderr.contains(part)), "{stderr}");
        assert!(!stderr.contains("what is finished is kept"), "{stderr}");
    }
}

#[test]
fn quiet_runs_print_nothing_but_the_text() {
    let ran = demo(&["-p", "In the beginning", "-n", "4", "--quiet"]).run().expect(0);
    assert_eq!(ran.stderr, "");
    let ran = demo(&["-p", "In the beginning", "-n", "4", "--no-perf"]).run().expect(0);
    assert!(ran.stderr.contains("hobbit: memory") && !ran.stderr.contains("hobbit: decode"), "{}", ran.stderr);
}

#[test]
fn stats_json_has_counts_and_rates() {
    let flags = ["-n", "8", "--ignore-eos", "--expert-cache", "50%", "--stats-json", "stats.json"];
    let cli = demo(&[&["-p", "In the beginning"], &flags[..]].concat());
    let path = cli.dir.path().join("stats.json");
    let Cli { dir, mut command } = cli;
    ran(command.output().unwrap()).expect(0);
    let stats: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    drop(dir);
    assert_eq!(stats["stop"], "length");
    assert_eq!(stats["timings"]["sample_count"], 8);
    assert!(stats["model"]["n_expert"].as_u64().unwrap() > 0);
    for phase in ["prompt", "decode", "total"] {
        let phase = &stats[phase];
        let needed = phase["hits"].as_u64().unwrap() + phase["misses"].as_u64().unwrap();
        assert!(phase["tokens"].as_u64().unwrap() > 0 && needed > 0, "{stats:#}");
        assert!((0.0..=1.0).contains(&phase["hit_rate"].as_f64().unwrap()));
    }
    assert!(stats["peak_rss_bytes"].as_u64().unwrap() > 0);
    assert!(stats["plan"]["budget"].as_u64().unwrap() > 0);
    // On the standard output nothing else follows the text.
    let printed = demo(&["-p", "a", "-n", "1", "--no-display-prompt", "--stats-json", "-"]).run().expect(0).stdout;
    let json = &printed[printed.find('{').unwrap()..];
    assert!(serde_json::from_str::<Value>(json).is_ok(), "{printed}");
}

#[test]
fn log_files() {
    let logged = |extra: &[&str], status| {
        let cli = demo(&[&["-n", "1", "--log-file", "log.txt"], extra].concat());
        let path = cli.dir.path().join("log.txt");
        let Cli { dir, mut command } = cli;
        let ran = ran(command.output().unwrap()).expect(status);
        let log = std::fs::read_to_string(path).unwrap();
        drop(dir);
        (ran.stderr, log)
    };
    let (stderr, log) = logged(&["-p", "a"], 0);
    assert_eq!(stderr, log);
    let (stderr, log) = logged(&["-p", "a", "--quiet"], 0);
    assert_eq!(stderr, "");
    assert!(log.contains("hobbit: memory: ") && !log.contains("llama_perf"), "{log}");
    let (stderr, log) = logged(&["-p", "a", "-v", "--quiet"], 0);
    assert!(stderr.is_empty() && log.contains("llama_perf"), "{log}");
    let (stderr, log) = logged(&["-p", "a", "-dev", "Warp9", "--quiet"], 1);
    assert!(stderr.starts_with("error: there is no device ") && log.ends_with(&stderr), "{stderr}{log}");
}

/// No file of this process may grow beyond 512 bytes: as where a disk is full.
#[test]
fn statistics_that_find_no_room_leave_the_old_ones() {
    for old in [None, Some("{\"old\": true}\n")] {
        let mut cli = demo(&["-p", "a", "-n", "1", "--stats-json", "stats.json"]);
        let mut limited = std::process::Command::new("sh");
        limited.args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh"]).arg(cli.command.get_program());
        limited.args(cli.command.get_args()).current_dir(cli.dir.path()).stdin(std::process::Stdio::null());
        cli.command = limited;
        let stats = cli.dir.path().join("stats.json");
        if let Some(old) = old {
            std::fs::write(&stats, old).unwrap();
        }
        let (child, dir) = cli.spawn();
        let ran = ran(child.wait_with_output().unwrap()).expect(1);
        assert!(ran.stderr.contains("error: stats.json: cannot write the statistics: "), "{}", ran.stderr);
        assert_eq!(std::fs::read_to_string(&stats).ok().as_deref(), old);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), usize::from(old.is_some()), "nothing else is left");
    }
}

#[test]
fn a_full_disk_ends_the_log_with_one_error() {
    let expected = demo(&["-p", "In the", "-n", "4"]).run().expect(0).stdout;
    let ran = demo(&["-p", "In the", "-n", "4", "--log-file", "/dev/full"]).run().expect(1);
    assert_eq!(ran.stdout, expected, "the run goes on");
    let errors = ran.stderr.lines().filter(|line| line.contains("/dev/full")).collect::<Vec<_>>();
    assert_eq!(errors.len(), 1, "{}", ran.stderr);
    assert!(errors[0].starts_with("error: /dev/full: this log ends here, it cannot be written: "), "{}", errors[0]);
}
