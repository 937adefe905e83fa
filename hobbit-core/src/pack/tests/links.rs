//! Paths through links, and outputs that are the source.

use super::*;
use crate::files::sole;

#[cfg(unix)]
#[test]
fn links_under_the_names_of_unfinished_work_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (out, made) = packed(dir.path());
    let (path, again) = (dir.path().join("model.gguf"), dir.path().join("again.gguf"));
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::remove_file(&out).unwrap();
    let partial = partial_path(&out);
    type Link = fn(&Path, &Path) -> std::io::Result<()>;
    let links: [Link; 2] = [|from, to| std::os::unix::fs::symlink(from, to), |from, to| fs::hard_link(from, to)];
    for link in links {
        link(&victim, &partial).unwrap();
        let spec = PackSpec { force: true, ..low_spec() };
        let error = write(&Gguf::open(&path).unwrap(), &out, &spec, &Toy, &mut quietly).unwrap_err();
        let words = error.to_string();
        let has_remedy = words.contains("destroyed") || words.contains("remove it");
        assert!(words.contains("pack.gguf.partial") && has_remedy, "{words}");
        fs::remove_file(&partial).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"precious", "{words}");
        pack(&path, &out, &low_spec());
        link(&victim, &partial_path(&again)).unwrap();
        unpack(&made, &again, true, &mut |_, _| ControlFlow::Continue(())).unwrap_err();
        fs::remove_file(partial_path(&again)).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        fs::remove_file(&out).unwrap();
    }
}

/// Under any name, and with `--force`.
#[test]
fn the_source_is_not_the_output() {
    let dir = tempfile::tempdir().unwrap();
    let (out, made) = packed(dir.path());
    let path = dir.path().join("model.gguf");
    let source = Gguf::open(&path).unwrap();
    let (bytes, pack_bytes) = (fs::read(&path).unwrap(), fs::read(&out).unwrap());
    let hard = dir.path().join("hard.gguf");
    fs::hard_link(&path, &hard).unwrap();
    let spec = || PackSpec { force: true, ..low_spec() };
    for output in [&path, &hard] {
        let error = write(&source, output, &spec(), &Toy, &mut quietly).unwrap_err().to_string();
        assert!(error.contains("would be destroyed") && error.contains("model.gguf"), "{error}");
    }
    let error = unpack(&made, &out, true, &mut |_, _| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(error.contains("the file of the pack"), "{error}");
    // The source has the name of the partial file.
    fs::rename(&path, dir.path().join("a.gguf.partial")).unwrap();
    let source = Gguf::open(&dir.path().join("a.gguf.partial")).unwrap();
    let error = write(&source, &dir.path().join("a.gguf"), &spec(), &Toy, &mut quietly).unwrap_err().to_string();
    assert!(error.contains("a.gguf.partial") && error.contains("would be destroyed"), "{error}");
    // Neither a pack nor a model.
    let notes = dir.path().join("notes");
    fs::write(&notes, "precious").unwrap();
    let error = write(&source, &notes, &spec(), &Toy, &mut quietly).unwrap_err().to_string();
    assert!(error.contains("notes: this file exists and is no GGUF"), "{error}");
    assert_eq!(fs::read(&notes).unwrap(), b"precious");
    assert!(fs::read(dir.path().join("a.gguf.partial")).unwrap() == bytes && fs::read(&out).unwrap() == pack_bytes);
}

/// Another process holds the partial file, finishes it, and exits.
#[test]
fn a_second_writer_of_one_output_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (out, made) = packed(dir.path());
    let again = dir.path().join("again.gguf");
    let held = sole::open(&partial_path(&again)).unwrap();
    let mut go_on = |_, _| ControlFlow::Continue(());
    let error = unpack(&made, &again, false, &mut go_on).unwrap_err();
    assert!(matches!(error, UnpackError::Busy { .. }), "{error}");
    let source = Gguf::open(&dir.path().join("model.gguf")).unwrap();
    let error = write(&source, &again, &low_spec(), &Toy, &mut quietly).unwrap_err();
    assert!(matches!(error, WriteError::Busy { .. }), "{error}");
    drop(held);
    unpack(&made, &again, false, &mut go_on).unwrap();
    let error = unpack(&made, &again, false, &mut go_on).unwrap_err();
    assert!(matches!(error, UnpackError::Exists { .. }), "{error}");
    assert!(!partial_path(&again).exists() && out.exists());
}

/// The second writer checks for an output before the first one finishes it.
#[test]
fn who_comes_second_does_not_write_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let (out, source) = (dir.path().join("pack.gguf"), Gguf::open(&path).unwrap());
    let mut errors = Vec::new();
    write(&source, &out, &low_spec(), &Toy, &mut |_| {
        errors.push(write(&source, &out, &low_spec(), &Toy, &mut quietly).unwrap_err());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(!errors.is_empty() && errors.iter().all(|error| matches!(error, WriteError::Busy { .. })), "{errors:?}");
    let error = write(&source, &out, &low_spec(), &Toy, &mut quietly).unwrap_err();
    assert!(matches!(error, WriteError::Exists { .. }), "{error}");
    assert!(!partial_path(&out).exists());
}

#[test]
fn fingerprints_are_of_weights_and_not_of_files() {
    let dir = tempfile::tempdir().unwrap();
    let print = |spec: &Spec| fingerprint(&Gguf::open(&model(dir.path(), spec)).unwrap()).unwrap();
    let expected = print(&spec());
    assert_eq!(print(&Spec { shards: 3, ..spec() }), expected);
    assert_ne!(print(&Spec { seed: 1, ..spec() }), expected);
    let low = dir.path().join("low.gguf");
    let path = model(dir.path(), &spec());
    let only_low = PackSpec { kind: PackKind::Low, ..low_spec() };
    pack(&path, &low, &only_low);
    assert_eq!(Pack::open(&low).unwrap().info.source_fingerprint, Some(expected));
    // A file that was replaced since its header was read.
    let source = Gguf::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    model(dir.path(), &Spec { seed: 1, ..spec() });
    let error = fingerprint(&source).unwrap_err().to_string();
    assert!(error.contains("model.gguf: this file was replaced"), "{error}");
}
