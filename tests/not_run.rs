//! What is not tested on a machine is among the last lines of CI.
#![cfg(unix)]

#[path = "fixture/not_run.rs"]
mod fixture;

use std::path::Path;
use std::process::Command;

fn last_lines(file: &Path) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(".ci/not-run");
    let output = Command::new(script).arg(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn what_cannot_run_is_among_the_last_lines_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("new/not-run.txt");
    for why in ["io_uring is forbidden here", "io_uring is forbidden here", "two\nlines"] {
        fixture::note(&fixture::line("direct reads", why), &file).unwrap();
    }
    let expected = "== not run here\ndirect reads: io_uring is forbidden here\ndirect reads: two lines\n";
    assert_eq!(last_lines(&file), expected);
}

#[test]
fn a_machine_that_runs_everything_says_so() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(last_lines(&dir.path().join("nothing was noted")), "== every test ran\n");
}
