//! A writer that was stopped, killed, or lied to goes on and makes the same file.

use super::*;

/// Stops after `n` finished jobs; the number of jobs the journal has then.
pub(super) fn stop_after(path: &Path, out: &Path, spec: &PackSpec<'_>, n: usize) -> usize {
    let mut seen = 0;
    let mut stop = |progress: Progress| {
        seen = progress.finished;
        if progress.finished >= n { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let error = write(&Gguf::open(path).unwrap(), out, spec, &Toy, &mut stop).unwrap_err();
    assert!(matches!(error, WriteError::Stopped { .. }), "{error}");
    assert!(error.to_string().contains("the same command goes on"), "{error}");
    seen
}

pub(super) fn journal_of(out: &Path) -> PathBuf {
    out.with_file_name("pack.gguf.partial.journal")
}

#[test]
fn stopped_after_every_row() {
    let dir = tempfile::tempdir().unwrap();
    let (out, pack_of) = packed(dir.path());
    let path = dir.path().join("model.gguf");
    let expected = fs::read(&out).unwrap();
    let jobs = pack_of.versions.len() + pack_of.ordinary().count();
    for n in 1..=jobs {
        fs::remove_file(&out).unwrap();
        let seen = stop_after(&path, &out, &low_spec(), n);
        assert!(seen >= n && !out.exists());
        let written = pack(&path, &out, &low_spec());
        assert!(written.resumed >= n, "{} of {n}", written.resumed);
        assert!(fs::read(&out).unwrap() == expected, "{n}");
        assert!(!journal_of(&out).exists());
    }
}

/// Stopped again and again, with one job done each time at least.
#[test]
fn many_small_steps() {
    let dir = tempfile::tempdir().unwrap();
    let (out, pack_of) = packed(dir.path());
    let path = dir.path().join("model.gguf");
    let expected = fs::read(&out).unwrap();
    let jobs = pack_of.versions.len() + pack_of.ordinary().count();
    fs::remove_file(&out).unwrap();
    let mut finished = 0;
    while finished < jobs {
        finished = stop_after(&path, &out, &low_spec(), finished + 1);
    }
    assert_eq!(pack(&path, &out, &low_spec()).resumed, jobs);
    assert!(fs::read(&out).unwrap() == expected);
}

/// What the journal claims is read again: bytes that never reached the disk are written anew.
#[test]
fn claims_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let (out, _) = packed(dir.path());
    let path = dir.path().join("model.gguf");
    let expected = fs::read(&out).unwrap();
    fs::remove_file(&out).unwrap();
    stop_after(&path, &out, &low_spec(), 12);
    let partial = partial_path(&out);
    let sound = fs::read(&partial).unwrap();
    let journal = fs::read(journal_of(&out)).unwrap();
    let rows = journal.len() / 64 - 1;
    let all = |bytes: &[u8]| fs::write(&partial, bytes).unwrap();
    let resumes = |what: &str, at_most: usize| {
        let written = pack(&path, &out, &low_spec());
        assert!(written.resumed <= at_most, "{what}: {}", written.resumed);
        assert!(fs::read(&out).unwrap() == expected, "{what}");
        fs::remove_file(&out).unwrap();
    };
    all(&vec![0; sound.len()]);
    resumes("a partial file of zeros", 2);
    let again = || fs::write(journal_of(&out), &journal).unwrap();
    again();
    all(&sound[..sound.len() / 2]);
    resumes("a partial file cut short", rows - 1);
    again();
    all(&[]);
    resumes("an empty partial file", 2);
    again();
    resumes("no partial file", 0);
    all(&sound);
    resumes("no journal", 0);
    let mut torn = journal.clone();
    torn[64 + 3] ^= 1;
    torn.truncate(torn.len() - 5);
    fs::write(journal_of(&out), &torn).unwrap();
    all(&sound);
    resumes("a damaged row and a torn one", rows - 2);
    fs::write(journal_of(&out), b"hobbitpj, more or less").unwrap();
    all(&sound);
    resumes("noise for a journal", 0);
}

#[test]
fn other_work_is_not_mixed_in() {
    let dir = tempfile::tempdir().unwrap();
    let (out, _) = packed(dir.path());
    let path = dir.path().join("model.gguf");
    fs::remove_file(&out).unwrap();
    stop_after(&path, &out, &low_spec(), 5);
    let other = PackSpec { low: Some("q4_0".parse().unwrap()), ..low_spec() };
    let source = Gguf::open(&path).unwrap();
    let error = write(&source, &out, &other, &Toy, &mut quietly).unwrap_err();
    assert!(matches!(error, WriteError::OtherWork { .. }), "{error}");
    let written = pack(&path, &out, &PackSpec { force: true, ..other });
    assert_eq!(written.resumed, 0);
    assert_eq!(Pack::open(&out).unwrap().info.low.as_deref(), Some("q4_0"));

    // Another model of the same shapes.
    fs::remove_file(&out).unwrap();
    stop_after(&path, &out, &low_spec(), 5);
    model(dir.path(), &Spec { seed: 1, ..spec() });
    let error = write(&Gguf::open(&path).unwrap(), &out, &low_spec(), &Toy, &mut quietly).unwrap_err();
    assert!(matches!(error, WriteError::OtherWork { .. }), "{error}");
}

#[test]
fn two_writers_do_not_meet() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let out = dir.path().join("pack.gguf");
    let source = Gguf::open(&path).unwrap();
    let mut second = None;
    write(&source, &out, &low_spec(), &Toy, &mut |_| {
        second.get_or_insert_with(|| write(&source, &out, &low_spec(), &Toy, &mut quietly).unwrap_err().to_string());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(second.unwrap().contains("another process is writing"));
}

/// A source that is written to meanwhile makes no pack.
#[test]
fn a_source_that_changes_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let out = dir.path().join("pack.gguf");
    let mut changed = false;
    let error = write(&Gguf::open(&path).unwrap(), &out, &low_spec(), &Toy, &mut |_| {
        if !changed {
            let file = fs::File::options().append(true).open(&path).unwrap();
            std::io::Write::write_all(&mut &file, &[1]).unwrap();
            changed = true;
        }
        ControlFlow::Continue(())
    })
    .unwrap_err();
    assert!(matches!(error, WriteError::SourceChanged { .. }), "{error}");
    assert!(!out.exists());
}
