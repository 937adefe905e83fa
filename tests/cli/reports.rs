//! Start-up and closing lines, statistics and logs.

use crate::fixture::cli::*;

const WHOLE: [&str; 4] = ["-p", "In the beginning", "-n", "4"];

fn stderr(flags: &[&str]) -> String {
    demo(&[&WHOLE, flags].concat()).run().expect(0).stderr
}

#[test]
fn a_run_has_three_lines_before_and_four_after() {
    for flags in [&[][..], &["--expert-cache", "25%"], &["--io", "buffered", "--cache-state", "a.state"]] {
        let stderr = stderr(flags);
        let lines: Vec<&str> = stderr.lines().collect();
        assert!(lines.len() <= 7 && lines.iter().all(|line| line.starts_with("hobbit: ")), "{flags:?}: {stderr}");
        assert!(lines[0].contains("demo.gguf: llama 11.7M Q8_0, 11.88 MiB, 6 layers of 8 experts"), "{stderr}");
        assert!(lines[1].starts_with("hobbit: memory: "), "{stderr}");
        for part in ["hobbit: prompt: 4 tokens in ", "hobbit: decode: 3 tokens in ", "peak memory"] {
            assert!(stderr.contains(part), "{part}: {stderr}");
        }
    }
    let low = ["--expert-cache", "25%", "--low", "q2_k", "--low-dir", "."];
    assert!(stderr(&low).contains("results are approximate"));
    let all = stderr(&["-v"]);
    for part in ["llama_perf_context_print:        eval time = ", "memory budget", "\"mode\":\"exact\"", "\"io\":\""] {
        assert!(all.contains(part), "{part}: {all}");
    }
    let warning = "warning: the context holds 1024 tokens, but the model was trained on 512";
    assert!(stderr(&["-c", "1024"]).contains(warning) && !stderr(&["-c", "512"]).contains("warning"));
    let more = stderr(&["--mem-budget", "500T"]);
    assert!(more.contains("; 500.00 TiB asked)") && !more.contains("(--mem-budget"), "{more}");
    assert!(!stderr(&["--no-perf"]).contains("hobbit: decode"));
    assert_eq!(stderr(&["--quiet"]), "");
}

#[test]
fn a_directory_that_cannot_keep_low_versions_is_named() {
    for directory in ["absent", "/proc"] {
        let flags = ["--expert-cache", "25%", "--low", "q2_k", "--low-dir", directory];
        let ran = demo(&[&WHOLE[..], &flags].concat()).run().expect(1);
        ran.says(&["error: --low q2_k: cannot write in ", directory, "cannot create this file: "]);
    }
}

#[test]
fn stats_json_has_counts_and_rates() {
    let flags = ["-n", "8", "--ignore-eos", "--expert-cache", "50%", "--stats-json", "stats.json"];
    let (_, stats) = demo(&[&WHOLE[..], &flags].concat()).json("stats.json");
    assert_eq!((&stats["stop"], &stats["timings"]["sample_count"]), (&"length".into(), &8.into()));
    for phase in ["prompt", "decode", "total"] {
        let phase = &stats[phase];
        let needed = phase["hits"].as_u64().unwrap() + phase["misses"].as_u64().unwrap();
        assert!(phase["tokens"].as_u64().unwrap() > 0 && needed > 0, "{stats:#}");
        assert!((0.0..=1.0).contains(&phase["hit_rate"].as_f64().unwrap()));
    }
    assert!(stats["peak_rss_bytes"].as_u64().unwrap() > 0 && stats["plan"]["budget"].as_u64().unwrap() > 0);
}

#[test]
fn log_files_have_the_lines_that_quiet_hides() {
    let logged = |flags: &[&str], status| {
        let mut cli = demo(&[&["-p", "a", "-n", "1", "--log-file", "log.txt"], flags].concat());
        let ran = ran(cli.command.output().unwrap()).expect(status);
        (ran.stderr, std::fs::read_to_string(cli.dir.path().join("log.txt")).unwrap())
    };
    let (stderr, log) = logged(&[], 0);
    assert_eq!(stderr, log);
    let (stderr, log) = logged(&["--quiet"], 0);
    assert!(stderr.is_empty() && log.contains("hobbit: memory: ") && !log.contains("llama_perf"), "{log}");
    let (stderr, log) = logged(&["-v", "--quiet"], 0);
    assert!(stderr.is_empty() && log.contains("llama_perf"), "{log}");
    let (stderr, log) = logged(&["-dev", "Warp9", "--quiet"], 1);
    assert!(stderr.starts_with("error: there is no device ") && log.ends_with(&stderr), "{stderr}{log}");
}

#[cfg(unix)]
#[test]
fn a_full_disk_keeps_old_statistics() {
    for old in [None, Some("{\"old\": true}\n")] {
        // No file of this process may grow beyond 512 bytes.
        let limited = program_after("trap '' XFSZ; ulimit -f 1", CLI);
        let model = demo_model();
        let args = ["-m", model.to_str().unwrap(), "-p", "a", "-n", "1", "-t", "1", "--stats-json", "stats.json"];
        let mut cli = in_own_dir(limited, &args);
        let stats = cli.dir.path().join("stats.json");
        if let Some(old) = old {
            std::fs::write(&stats, old).unwrap();
        }
        let ran = ran(cli.command.output().unwrap()).expect(1);
        ran.says(&["error: stats.json: cannot write the statistics: "]);
        assert_eq!(std::fs::read_to_string(&stats).ok().as_deref(), old);
        let n_files = std::fs::read_dir(cli.dir.path()).unwrap().count();
        assert_eq!(n_files, usize::from(old.is_some()), "nothing else is left");
    }
    let expected = demo(&WHOLE).run().expect(0).stdout;
    let ran = demo(&[&WHOLE[..], &["--log-file", "/dev/full"]].concat()).run().expect(1);
    assert_eq!(ran.stdout, expected, "the run goes on");
    let errors = ran.stderr.lines().filter(|line| line.contains("/dev/full")).collect::<Vec<_>>();
    assert!(errors.len() == 1 && errors[0].starts_with("error: /dev/full: this log ends here"), "{}", ran.stderr);
}
