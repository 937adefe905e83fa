//! AMX is in llama.cpp where the compiler gets it right, and nowhere else, however ggml asks for it. Nothing here
//! runs an AMX instruction.
#![cfg(unix)]

#[allow(dead_code)]
#[path = "../amx/verdict.rs"]
mod amx;
#[path = "../../../tests/fixture/not_run.rs"]
mod not_run;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use amx::{Advice, Probe, Record};

const REMEDY: &str = "cargo clean --release -p llama-cpp-sys-2";
const SCRIPT: &str = "/hobbit/vendor/ggml-sys/amx/amx.cmake";

fn in_this_package(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A C and a C++ compiler that are here.
fn compilers() -> Vec<(&'static str, &'static str)> {
    [("cc", "c++"), ("gcc", "g++"), ("clang", "clang++")]
        .into_iter()
        .filter(|(c, cxx)| [c, cxx].iter().all(|name| Command::new(name).arg("--version").output().is_ok()))
        .collect()
}

fn compiler_probe(cxx: &str, scratch: &Path) -> Probe {
    fs::create_dir_all(scratch).unwrap();
    amx::probe(|| Command::new(cxx), &in_this_package("amx/probe.cpp"), &scratch.join("probe.o")).unwrap()
}

/// Configures and builds tests/amx_toy with HOBBIT_AMX as `asked`: what the script recorded, and which of the toy's
/// libraries have AMX in them, as C++ and as C.
fn build_toy((c, cxx): (&str, &str), asked: &str, more: &[&str]) -> (Record, Vec<(String, bool, bool)>) {
    let name = format!("amx-{cxx}-{asked}-{}", more.len());
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&build);
    let succeeds = |command: &mut Command| {
        let output: Output = command.env("HOBBIT_AMX", asked).output().expect("cmake, which built llama.cpp, runs");
        let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{command:?}: {text}");
    };
    succeeds(
        Command::new("cmake")
            .arg("-S")
            .arg(in_this_package("tests/amx_toy"))
            .arg("-B")
            .arg(&build)
            .arg(format!("-DCMAKE_PROJECT_INCLUDE={}", in_this_package("amx/amx.cmake").display()))
            .arg(format!("-DCMAKE_C_COMPILER={c}"))
            .arg(format!("-DCMAKE_CXX_COMPILER={cxx}"))
            .arg("-DCMAKE_BUILD_TYPE=Release")
            .args(more),
    );
    succeeds(Command::new("cmake").arg("--build").arg(&build));

    let has = |library: &str, symbol: &str| {
        let bytes = fs::read(build.join(format!("ggml/lib{library}.a"))).unwrap();
        bytes.windows(symbol.len()).any(|window| window == symbol.as_bytes())
    };
    let libraries = ["march", "variant", "without"]
        .map(|library| (library.to_owned(), has(library, "toy_amx_mul_mat"), has(library, "toy_amx_in_c")));
    let record = Record::parse(&fs::read_to_string(build.join("CMakeCache.txt")).unwrap())
        .expect("the script leaves its record");
    (record, libraries.to_vec())
}

fn in_all_that_ask(libraries: &[(String, bool, bool)], expected: bool) -> bool {
    libraries.iter().all(|(name, cxx, c)| {
        let expected = expected && name != "without";
        (*cxx, *c) == (expected, expected)
    })
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_forced_answer_is_obeyed_in_every_way_of_asking_for_amx() {
    let compiler = ("cc", "c++");
    if compiler_probe("c++", Path::new(env!("CARGO_TARGET_TMPDIR"))) == Probe::Unknown {
        not_run::not_run("amx: a forced answer", "c++ does not know AMX");
        return;
    }
    for (asked, expected) in [("on", true), ("off", false)] {
        let (record, libraries) = build_toy(compiler, asked, &["-DGGML_AMX_INT8=ON"]);
        assert_eq!(record.asked, asked);
        assert!(record.wanted, "{record:?}");
        assert_eq!(record.answer, if expected { "kept" } else { "left-out" });
        assert!(in_all_that_ask(&libraries, expected), "{asked}: {libraries:?}");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn each_compiler_here_is_judged_by_what_it_makes_of_the_probe() {
    for (c, cxx) in compilers() {
        let probe = compiler_probe(cxx, &Path::new(env!("CARGO_TARGET_TMPDIR")).join(cxx));
        let version = Command::new(cxx).args(["-dumpversion"]).output().unwrap().stdout;
        let version = String::from_utf8_lossy(&version).trim().to_owned();
        let (record, libraries) = build_toy((c, cxx), "auto", &["-DGGML_CPU_ALL_VARIANTS=ON"]);
        let expected = match probe {
            Probe::Unknown => "unknown-to-compiler",
            Probe::Right => "kept",
            Probe::Wrong => "left-out",
        };
        assert_eq!(record.answer, expected, "{cxx} {version}: {record:?}");
        assert!(in_all_that_ask(&libraries, probe == Probe::Right), "{cxx} {version}: {libraries:?}");
        // Known results, whatever the probe says.
        if record.compiler.starts_with("GNU 12.") {
            assert_eq!(probe, Probe::Wrong, "GCC 12 drops stores to tile configurations");
        }
        if record.compiler.starts_with("Clang") && probe != Probe::Unknown {
            assert_eq!(probe, Probe::Right);
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_compiler_that_cannot_be_judged_is_taken_for_wrong() {
    // Assembler text instead of an object: the mark is not found in the control either.
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hidden");
    fs::create_dir_all(&scratch).unwrap();
    let wrapper = scratch.join("c++");
    fs::write(&wrapper, "#!/bin/sh\nexec c++ \"$@\" -S\n").unwrap();
    let mut permissions = fs::metadata(&wrapper).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    fs::set_permissions(&wrapper, permissions).unwrap();
    let known = compiler_probe("c++", &scratch) != Probe::Unknown;
    let probe = compiler_probe(wrapper.to_str().unwrap(), &scratch);
    assert_eq!(probe, if known { Probe::Wrong } else { Probe::Unknown });
}

fn record(asked: &str, wanted: bool, answer: &str) -> Record {
    Record { asked: asked.into(), wanted, answer: answer.into(), compiler: "GNU 12.2.0".into() }
}

#[test]
fn messages_about_a_build() {
    let say = |record: Option<&Record>, asked: &str, has_amx: bool, probe: Probe| {
        amx::advice(record, asked, has_amx, || probe, REMEDY, SCRIPT)
    };
    let left_out = record("auto", true, "left-out");
    let wrong = Probe::Wrong;

    // One line where something was left out; none on machines that have no AMX, or where it is kept.
    let Advice::Warn(line) = say(Some(&left_out), "auto", false, wrong) else { panic!("one line is wanted") };
    assert!(line.contains("without AMX") && line.contains("GNU 12.2.0") && !line.contains('\n'), "{line}");
    assert_eq!(say(Some(&record("auto", false, "left-out")), "auto", false, wrong), Advice::Nothing);
    assert_eq!(say(Some(&record("auto", true, "kept")), "auto", true, Probe::Right), Advice::Nothing);
    assert_eq!(say(Some(&record("on", true, "kept")), "on", true, wrong), Advice::Nothing);

    // The script's flags did not win.
    let Advice::Fail(line) = say(Some(&left_out), "auto", true, wrong) else { panic!("that would crash") };
    assert!(line.contains("-mno-amx-tile") && line.contains(REMEDY), "{line}");

    // Another answer than the one that llama.cpp was built with.
    for asked in ["on", "off"] {
        let Advice::Fail(line) = say(Some(&left_out), asked, false, wrong) else { panic!("not what was asked for") };
        assert!(line.contains(asked) && line.contains("auto") && line.contains(REMEDY), "{line}");
    }

    // The script did not run.
    let Advice::Fail(line) = say(None, "auto", true, wrong) else { panic!("that would crash") };
    assert!(line.contains(SCRIPT) && line.contains(REMEDY) && line.contains("-mno-amx-int8"), "{line}");
    assert_eq!(say(None, "auto", true, Probe::Right), Advice::Nothing);
    assert_eq!(say(None, "on", true, wrong), Advice::Nothing);
    assert!(matches!(say(None, "off", true, Probe::Right), Advice::Fail(_)));
    for asked in ["auto", "on", "off"] {
        assert_eq!(say(None, asked, false, wrong), Advice::Nothing, "there is no AMX in it");
    }
}

#[test]
fn a_cache_without_the_scripts_record_has_none() {
    assert_eq!(Record::parse("GGML_NATIVE:BOOL=ON\nGGML_AMX_INT8:BOOL=OFF\n"), None);
    let cache = "HOBBIT_AMX:INTERNAL=left-out\nHOBBIT_AMX_ASKED:INTERNAL=auto\n\
                 HOBBIT_AMX_COMPILER:INTERNAL=GNU 12.2.0\nHOBBIT_AMX_WANTED:INTERNAL=ON\n";
    assert_eq!(Record::parse(cache), Some(record("auto", true, "left-out")));
}
