//! A writer that is stopped or killed leaves no broken output, and the next one makes the same file.

use super::*;

/// Stops after `n` finished jobs; returns the number of jobs finished at that point.
pub(super) fn stop_after(path: &Path, out: &Path, spec: &PackSpec<'_>, n: usize) -> usize {
    let mut seen = 0;
    let mut stop = |progress: Progress| {
        seen = progress.finished;
        if progress.finished >= n { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let error = write(&Gguf::open(path).unwrap(), out, spec, &Toy, &mut stop).unwrap_err();
    assert!(matches!(error, WriteError::Stopped { .. }), "{error}");
    assert!(!out.exists() && !partial_path(out).exists());
    seen
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
        assert!(stop_after(&path, &out, &low_spec(), n) >= n);
        pack(&path, &out, &low_spec());
        assert!(fs::read(&out).unwrap() == expected, "{n}");
    }
}

/// A killed writer leaves its partial file. No state of it opens as a pack or blocks the next writer.
#[test]
fn the_partial_file_of_a_killed_writer_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (out, pack_of) = packed(dir.path());
    let path = dir.path().join("model.gguf");
    let expected = fs::read(&out).unwrap();
    let partial = partial_path(&out);
    let (mut states, mut progress) = (Vec::new(), 0);
    fs::remove_file(&out).unwrap();
    let mut look = |now: Progress| {
        if now.finished > progress {
            progress = now.finished;
            states.push(fs::read(&partial).unwrap());
        }
        ControlFlow::Continue(())
    };
    write(&Gguf::open(&path).unwrap(), &out, &low_spec(), &Toy, &mut look).unwrap();
    assert!(states.len() > 1 && states.len() <= pack_of.versions.len() + pack_of.ordinary().count());
    // As long as another spec's pack, or longer.
    states.push(vec![0; expected.len() + 4096]);
    states.push(expected[..expected.len() / 2].to_vec());
    for (i, state) in states.iter().enumerate() {
        fs::write(&partial, state).unwrap();
        assert!(Pack::open(&partial).is_err(), "{i}");
        fs::remove_file(&out).unwrap();
        pack(&path, &out, &low_spec());
        assert!(fs::read(&out).unwrap() == expected && !partial.exists(), "{i}");
    }
}

/// A source that changes during packing gives no pack.
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
