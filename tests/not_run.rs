//! The last lines of CI name tests that cannot run on a machine.

use std::path::Path;
use std::process::Command;

use crate::fixture::not_run::{line, note};

fn last_lines(file: &Path) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(".ci/not-run");
    let output = Command::new(script).arg(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn each_note_is_among_the_last_lines_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("new/not-run.txt");
    for why in ["io_uring is forbidden here", "io_uring is forbidden here", "two\nlines"] {
        note(&line("direct reads", why), &file).unwrap();
    }
    let expected = "== not run here\ndirect reads: io_uring is forbidden here\ndirect reads: two lines\n";
    assert_eq!(last_lines(&file), expected);
}

#[test]
fn no_note_means_that_every_test_ran() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(last_lines(&dir.path().join("nothing was noted")), "== every test ran\n");
}
