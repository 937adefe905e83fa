//! Slots in files: requests replace slot files only.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::process::Command;

use serde_json::json;

use super::rig::*;

#[test]
fn a_saved_slot_replaces_nothing_but_a_saved_slot() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo.gguf"), at("model")).unwrap();
    fs::create_dir(at("directory")).unwrap();
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let others =
        [("trace", "HOBBITTR\x02\0\0\0"), ("state", "HOBBITCS\x01\0\0\0"), ("notes", "precious"), ("empty", "")];
    others.iter().for_each(|(name, content)| fs::write(at(name), content).unwrap());
    symlink(at("slot"), at("link")).unwrap();
    symlink(at("nothing"), at("dangling")).unwrap();
    fs::hard_link(at("model"), at("second name")).unwrap();
    let paths = ["model", "log", ""].map(|name| at(name).to_str().unwrap().to_owned());
    let server = Server::start(&["-m", &paths[0], "--log-file", &paths[1], "--slot-save-path", &paths[2]]);
    server.post("/completion", &json!({"prompt": "In the", "n_predict": 2, "id_slot": 0})).ok();
    let save = |name: &str| server.post("/slots/0?action=save", &json!({"filename": name}));
    save("slot").ok();

    let before: Vec<_> = ["model", "log", "slot"].map(|name| fs::read(at(name)).unwrap()).into();
    let inode = |name: &str| fs::symlink_metadata(at(name)).unwrap().ino();
    let names =
        ["model", "log", "second name", "link", "dangling", "pipe", "directory", "trace", "state", "notes", "empty"];
    let inodes = names.map(inode);
    for name in names {
        let error = save(name).error(400, "invalid_request_error");
        assert!(error.starts_with("Unable to save slot: ") && error.contains("another name"), "{name}: {error}");
    }
    assert_eq!(names.map(inode), inodes, "each is the file that it was");
    assert!(fs::read(at("model")).unwrap() == before[0] && fs::read(at("slot")).unwrap() == before[2]);
    assert!(!before[1].is_empty() && fs::read(at("log")).unwrap().starts_with(&before[1]));
    others.iter().for_each(|(name, content)| assert_eq!(fs::read_to_string(at(name)).unwrap(), *content));
    assert!(fs::symlink_metadata(at("pipe")).unwrap().file_type().is_fifo() && !at("nothing").exists());

    // An earlier slot is replaced whole: a reader of the old file keeps it.
    let mut reader = fs::File::open(at("slot")).unwrap();
    let (old, count) = (inode("slot"), fs::read_dir(dir.path()).unwrap().count());
    server.post("/completion", &json!({"prompt": "In the beginning was", "n_predict": 2, "id_slot": 0})).ok();
    save("slot").ok();
    assert!(inode("slot") != old && fs::read(at("slot")).unwrap() != before[2]);
    let mut kept = Vec::new();
    std::io::Read::read_to_end(&mut reader, &mut kept).unwrap();
    assert!(kept == before[2]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), count, "nothing else is left");
    server.post("/slots/1?action=restore", &json!({"filename": "slot"})).ok();
}
