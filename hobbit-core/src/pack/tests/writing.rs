//! A writer leaves a whole pack or nothing, and touches no other file.

use super::*;
use crate::files::sole;

/// Whatever state a killed writer leaves its partial file in, and after whichever job a writer is stopped, nothing
/// opens as a pack and the next writer makes the same file.
#[test]
fn stopped_or_killed_anywhere_a_pack_is_written_anew() {
    for (model_spec, spec) in both() {
        let dir = tempfile::tempdir().unwrap();
        let (path, out) = (model(dir.path(), &model_spec), dir.path().join("pack.gguf"));
        let (source, partial) = (Gguf::open(&path).unwrap(), partial_path(&out));
        let (mut states, mut n_jobs) = (Vec::new(), 0);
        let mut look = |now: Progress| {
            if now.finished > n_jobs {
                n_jobs = now.finished;
                states.push(fs::read(&partial).unwrap());
            }
            ControlFlow::Continue(())
        };
        write(&source, &out, &spec, &Toy, &mut look).unwrap();
        let expected = fs::read(&out).unwrap();
        assert!(states.len() > 1);
        // As long as another spec's pack, or longer.
        states.extend([vec![0; expected.len() + 4096], expected[..expected.len() / 2].to_vec()]);
        let again = || {
            pack(&path, &out, &spec);
            assert!(fs::read(&out).unwrap() == expected && !partial.exists());
        };
        for (i, state) in states.iter().enumerate() {
            fs::write(&partial, state).unwrap();
            assert!(Pack::open(&partial).is_err(), "{i}");
            fs::remove_file(&out).unwrap();
            again();
        }
        for n in (1..=n_jobs).step_by(3) {
            fs::remove_file(&out).unwrap();
            let mut stop =
                |now: Progress| if now.finished >= n { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            let error = write(&source, &out, &spec, &Toy, &mut stop).unwrap_err();
            assert!(matches!(error, WriteError::Output(PartialError::Stopped { .. })), "{error}");
            assert!(!out.exists() && !partial.exists());
            again();
        }
    }
}

#[test]
fn stopping_to_unpack_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (.., pack) = packed(dir.path(), &spec(), &low_spec());
    let out = dir.path().join("unpacked.gguf");
    let error = unpack(&pack, &out, false, &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert!(matches!(error, UnpackError::Output(PartialError::Stopped { .. })), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "model and pack");
    assert_eq!(verify(&pack, &mut |_, _| ControlFlow::Break(())).unwrap(), None);
}

#[test]
fn a_source_that_changes_while_it_is_packed_gives_no_pack() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out) = (model(dir.path(), &spec()), dir.path().join("pack.gguf"));
    let mut is_changed = false;
    let mut change = |_| {
        if !std::mem::replace(&mut is_changed, true) {
            let file = fs::File::options().append(true).open(&path).unwrap();
            std::io::Write::write_all(&mut &file, &[1]).unwrap();
        }
        ControlFlow::Continue(())
    };
    let error = write(&Gguf::open(&path).unwrap(), &out, &low_spec(), &Toy, &mut change).unwrap_err();
    assert!(matches!(error, WriteError::SourceChanged { .. }) && !out.exists(), "{error}");
}

/// Under any name, and with `--force`.
#[test]
fn the_source_is_not_the_output() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (path, out, made) = packed(dir.path(), &spec(), &low_spec());
    let before = [&path, &out].map(|path| fs::read(path).unwrap());
    fs::hard_link(&path, at("hard.gguf")).unwrap();
    fs::hard_link(&path, at("a.gguf.partial")).unwrap();
    fs::write(at("notes"), "precious").unwrap();
    for (source, output, parts) in [
        (&path, path.clone(), ["model.gguf", "would be destroyed"]),
        (&path, at("hard.gguf"), ["model.gguf", "would be destroyed"]),
        (&at("a.gguf.partial"), at("a.gguf"), ["a.gguf.partial", "would be destroyed"]),
        (&path, at("notes"), ["notes", "this file exists and is no GGUF"]),
    ] {
        let error = try_pack(source, &output, &PackSpec { force: true, ..low_spec() }).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let error = unpack(&made, &out, true, &mut go_on).unwrap_err().to_string();
    assert!(error.contains("the file of the pack"), "{error}");
    assert_eq!(fs::read(at("notes")).unwrap(), b"precious");
    assert!(before == [&path, &out].map(|path| fs::read(path).unwrap()));
}

/// While one writer holds the partial file, a second one is refused; after it has finished, the output exists.
#[test]
fn two_writers_do_not_make_one_output() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out, made) = packed(dir.path(), &spec(), &low_spec());
    let (again, source) = (dir.path().join("again.gguf"), Gguf::open(&path).unwrap());
    let held = sole::open(&partial_path(&again)).unwrap();
    let error = unpack(&made, &again, false, &mut go_on).unwrap_err();
    assert!(matches!(error, UnpackError::Output(PartialError::Busy { .. })), "{error}");
    drop(held);
    unpack(&made, &again, false, &mut go_on).unwrap();
    let error = unpack(&made, &again, false, &mut go_on).unwrap_err();
    assert!(matches!(error, UnpackError::Output(PartialError::Exists { .. })), "{error}");

    // The second writer checks for an output before the first one finishes it.
    fs::remove_file(&out).unwrap();
    let mut errors = Vec::new();
    write(&source, &out, &low_spec(), &Toy, &mut |_| {
        errors.push(try_pack(&path, &out, &low_spec()).unwrap_err());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(
        !errors.is_empty() && errors.iter().all(|error| matches!(error, WriteError::Output(PartialError::Busy { .. }))),
        "{errors:?}"
    );
    let error = try_pack(&path, &out, &low_spec()).unwrap_err();
    assert!(matches!(error, WriteError::Output(PartialError::Exists { .. })), "{error}");
    assert!(!partial_path(&out).exists() && !partial_path(&again).exists());
}

#[test]
fn fingerprints_depend_on_weights_and_not_on_files() {
    let dir = tempfile::tempdir().unwrap();
    let print = |spec: &Spec| fingerprint(&Gguf::open(&model(dir.path(), spec)).unwrap()).unwrap();
    let expected = print(&spec());
    assert_eq!(print(&Spec { shards: 3, ..spec() }), expected);
    assert_ne!(print(&Spec { seed: 1, ..spec() }), expected);
    let only_low = PackSpec { kind: PackKind::Low, ..low_spec() };
    let (path, _, low) = packed(dir.path(), &spec(), &only_low);
    assert_eq!(low.info.source_fingerprint, Some(expected));
    // A file that was replaced since its header was read.
    let source = Gguf::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    model(dir.path(), &Spec { seed: 1, ..spec() });
    let error = fingerprint(&source).unwrap_err().to_string();
    assert!(error.contains("model.gguf: this file was replaced"), "{error}");
}

#[test]
fn damage_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, sound) = packed(dir.path(), &spec(), &low_spec());
    let bytes = fs::read(&out).unwrap();
    let version = crate::expert::Version::low(crate::expert::ExpertId { layer: 2, index: 3 });
    let record = sound.versions.iter().find(|v| v.version == version).unwrap().record;
    let of = |name: &str| sound.raw.tensor(name).unwrap().extent;
    // In the vocabulary, where no reader looks.
    let word = of("hobbit.header").offset as usize + find(cut(&bytes, of("hobbit.header")), b"tokens") + 40;
    for (at, expected) in [
        (record.offset as usize + 5, "tensor 'blk.2.ffn_exps.low', layer 2 expert 3 (low): its checksum differs"),
        (record.end() as usize - 1, "layer 2 expert 3 (low)"),
        (word, "tensor 'hobbit.header': its checksum differs"),
        (of("output_norm.weight").offset as usize, "tensor 'output_norm.weight': its checksum differs"),
        (of("hobbit.index").offset as usize + 6 * 8, "layer 0 expert 0 (high): its checksum differs"),
        (find(&bytes, b"model.gguf"), "tensor '(header)'"),
    ] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        fs::write(&out, &damaged).unwrap();
        let faults = verified(&Pack::open(&out).unwrap()).faults;
        assert!(faults.iter().any(|fault| fault.to_string().contains(expected)), "{expected}: {faults:?}");
        assert!(faults.len() <= 2, "{faults:?}");
    }
    // A damaged pack is not unpacked.
    let mut damaged = bytes;
    damaged[sound.versions[1].record.offset as usize] ^= 1;
    fs::write(&out, &damaged).unwrap();
    let error = unpacked(&Pack::open(&out).unwrap(), dir.path()).unwrap_err();
    assert!(matches!(error, UnpackError::Digest { .. }), "{error}");
    assert!(!dir.path().join("unpacked.gguf").exists() && !dir.path().join("unpacked.gguf.partial").exists());
}
