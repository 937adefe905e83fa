use super::*;

const NULL: &str = if cfg!(windows) { "NUL" } else { "/dev/null" };

fn base(magic: &[u8], n: [i32; 3]) -> Vec<u8> {
    [magic, &n.map(i32::to_le_bytes).concat()].concat()
}

#[test]
fn files_are_overwritten_only_by_their_kind() {
    use Kind::*;
    let unfinished = base(&[0; 8], [512, 32000, 3]);
    let complete = base(b"_logits_", [512, 32000, 3]);
    let table: &[(&[u8], &[Kind])] = &[
        (b"", &[Log, Json, Trace, Base, PathTable, Model, PartialModel]),
        (b"HOBSLOT1\x07\0\0\0", &[Sequence]),
        (b"HOBSLOT", &[Log]),
        (b"GGUF\x03\0\0\0", &[Model, PartialModel]),
        (b"GGUF", &[Model, PartialModel]),
        (b"GG", &[Log, Model, PartialModel]),
        (b"hobbit: a line\n", &[Log]),
        (b"{\"n\": 1}", &[Log, Json]),
        (b"\xef\xbb\xbf \n[1]", &[Log, Json]),
        (b" \n", &[Log, Json]),
        (b"{\0", &[]),
        (b"#!/bin/sh\n", &[Log]),
        (b"<!DOCTYPE html>\n<html>", &[Log]),
        (b"\n<html lang='en'>", &[Log]),
        (b"<svg>", &[Log]),
        (b"HOBBITTR\x02\0\0\0", &[Trace]),
        (b"HOBB", &[Log, Trace]),
        (b"hbPT\x01\0\0\0", &[PathTable]),
        (&[0; 64], &[PartialModel]),
        (&unfinished, &[Base]),
        (&complete, &[Base]),
        (b"_logits_", &[Log, Base]),
        (&[0; 7], &[Base, PartialModel]),
        (b"PK\x03\x04\0\0", &[]),
    ];
    for (head, kinds) in table {
        for kind in [Log, Json, Trace, Base, Sequence, PathTable, Model, PartialModel] {
            let text = String::from_utf8_lossy(head);
            assert_eq!(kind.may_replace(head), kinds.contains(&kind), "{kind:?} over {text:?}");
        }
        assert!(CacheState.may_replace(head));
    }
}

fn output<'a>(flag: &'a str, path: &'a Path, kind: Kind) -> Output<'a> {
    Output { flag, path, kind }
}

#[cfg(unix)]
#[test]
fn an_input_is_known_under_all_its_names() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("model.gguf"), "GGUF").unwrap();
    std::os::unix::fs::symlink(at("model.gguf"), at("symbolic")).unwrap();
    fs::hard_link(at("model.gguf"), at("hard")).unwrap();
    std::os::unix::fs::symlink(dir.path(), at("directory")).unwrap();
    let model = at("model.gguf");
    let inputs = [Input { flag: "--low", path: Path::new("absent") }, Input { flag: "-m", path: &model }];
    for name in ["model.gguf", "symbolic", "hard", "directory/model.gguf", "directory/directory/hard"] {
        let path = at(name);
        for kind in [Kind::Trace, Kind::Model, Kind::CacheState] {
            let error = check(&[output("--trace", &path, kind)], &inputs).unwrap_err();
            assert!(matches!(error, OutputError::IsInput { .. }), "{name}: {error}");
            let error = error.to_string();
            let given = format!("--trace {}", path.display());
            let parts = [given.as_str(), "the file of -m", "would be destroyed", "give --trace"];
            assert!(parts.iter().all(|part| error.contains(*part)), "{error}");
            assert!(error.contains(&model.display().to_string()), "{error}");
        }
    }
    assert_eq!(fs::read(&model).unwrap(), b"GGUF");
}

#[test]
fn other_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (notes, log, new) = (at("notes.txt"), at("old.log"), at("new"));
    fs::write(&notes, "precious").unwrap();
    fs::write(&log, "hobbit: a line\n").unwrap();
    let error = check(&[output("--trace", &notes, Kind::Trace)], &[]).unwrap_err().to_string();
    assert!(error.contains("--trace") && error.contains("notes.txt: this file exists and is no trace"), "{error}");
    assert!(error.contains("remove it first"), "{error}");
    let error = create(&notes, Kind::Json).unwrap_err();
    assert!(error.kind() == io::ErrorKind::AlreadyExists && error.to_string().contains("is no JSON"), "{error}");
    assert_eq!(fs::read(&notes).unwrap(), b"precious");

    let outputs = [
        output("--log-file", &log, Kind::Log),
        output("--trace", &new, Kind::Trace),
        output("--json", Path::new("-"), Kind::Json),
        output("--stats-json", Path::new("-"), Kind::Json),
        output("--cache-state", Path::new(NULL), Kind::CacheState),
    ];
    check(&outputs, &[Input { flag: "-f", path: &notes }]).unwrap();
    assert!(!new.exists(), "nothing is made by looking");
    drop(create(&log, Kind::Log).unwrap());
    assert_eq!(fs::read(&log).unwrap(), b"", "as with File::create");
}

#[cfg(unix)]
#[test]
fn a_file_is_overwritten_whole_if_it_is_of_the_kind() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("notes"), "precious").unwrap();
    fs::write(at("old"), "{}").unwrap();
    std::os::unix::fs::symlink(at("old"), at("link")).unwrap();
    assert!(overwrite(&at("notes"), Kind::Json, b"[1]").unwrap_err().to_string().contains("is no JSON"));
    overwrite(&at("link"), Kind::Json, b"[1]").unwrap();
    overwrite(&at("new"), Kind::Json, b"[2]").unwrap();
    assert_eq!(
        [at("notes"), at("old"), at("new")].map(|path| fs::read(path).unwrap()),
        [b"precious".to_vec(), b"[1]".to_vec(), b"[2]".to_vec()]
    );
    assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
    overwrite(Path::new("/dev/null"), Kind::Json, b"[3]").unwrap();
    assert_eq!(overwrite(Path::new("/dev/full"), Kind::Json, b"[3]").unwrap_err().kind(), io::ErrorKind::StorageFull);
}

/// A GGUF is written in parts and renamed: onto anything but a file that would replace a device or a pipe.
#[cfg(unix)]
#[test]
fn a_model_is_no_device_and_no_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let fifo = std::ffi::CString::new(at("fifo").into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: the name ends with a zero byte.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    std::os::unix::fs::symlink("/dev/null", at("link")).unwrap();
    for (path, found) in [
        (Path::new("/dev/null"), "device"),
        (&at("link"), "device"),
        (&at("fifo"), "pipe"),
        (dir.path(), "directory"),
        (Path::new("/dev/stdout"), "this is a "),
    ] {
        for kind in [Kind::Model, Kind::PartialModel] {
            let error = check(&[output("-o", path, kind)], &[]).unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(found), "{error}");
        }
    }
    check(&[output("--trace", &at("fifo"), Kind::Trace), output("--log-file", &at("link"), Kind::Log)], &[]).unwrap();
}

#[cfg(windows)]
#[test]
fn names_of_devices_are_no_files() {
    for name in ["NUL", "con", r"C:\models\nul.gguf", r"\\.\PhysicalDrive0", "COM1", "lpt9.txt", "CONOUT$"] {
        assert!(is_device(Path::new(name)), "{name}");
        assert!(check(&[output("-o", Path::new(name), Kind::Model)], &[]).unwrap_err().is_usage(), "{name}");
    }
    for name in ["NULL", "console.gguf", "COM", "COM10", "model.nul"] {
        assert!(!is_device(Path::new(name)), "{name}");
    }
}

#[test]
fn outputs_that_cannot_be_written_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent/x");
    use Kind::*;
    for kind in [Log, Json, Trace, Base, Sequence, PathTable, Model, PartialModel, CacheState] {
        let error = check(&[output("--out", &absent, kind)], &[]).unwrap_err();
        assert!(matches!(error, OutputError::Unwritable { .. }) && !error.is_usage(), "{error}");
        assert!(error.to_string().starts_with(&format!("--out {}: cannot write", absent.display())), "{error}");
        assert!(check(&[output("--out", dir.path(), kind)], &[]).is_err(), "{kind:?}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn links_lead_to_files_that_need_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let dir = fs::canonicalize(dir.path()).unwrap();
    let at = |name: &str| dir.join(name);
    std::os::unix::fs::symlink("second", at("first")).unwrap();
    std::os::unix::fs::symlink("new", at("second")).unwrap();
    std::os::unix::fs::symlink("round", at("round")).unwrap();
    assert_eq!(["first", "new", "round"].map(|name| destination(&at(name))), ["new", "new", "round"].map(at));
    overwrite(&at("first"), Kind::CacheState, b"state").unwrap();
    assert_eq!(destination(&at("first")), at("new"));
    assert_eq!((fs::read(at("new")).unwrap(), fs::read_link(at("second")).unwrap()), (b"state".to_vec(), "new".into()));
}

#[test]
fn two_outputs_are_two_files() {
    let dir = tempfile::tempdir().unwrap();
    let (there, absent) = (dir.path().join("there"), dir.path().join("absent"));
    fs::write(&there, "").unwrap();
    for path in [&there, &absent] {
        let again = dir.path().join(".").join(path.file_name().unwrap());
        let outputs = [output("--trace", path, Kind::Trace), output("--log-file", &again, Kind::Log)];
        let error = check(&outputs, &[]).unwrap_err().to_string();
        assert!(error.contains("--log-file") && error.contains("the file of --trace too"), "{error}");
    }
    let null = Path::new(NULL);
    check(&[output("--trace", null, Kind::Trace), output("--log-file", null, Kind::Log)], &[]).unwrap();
}
