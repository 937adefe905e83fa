//! Damaged bytes are found and named.

use super::*;
use crate::expert::{ExpertId, Version};

#[test]
fn verify_names_what_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let (out, sound) = packed(dir.path());
    let bytes = fs::read(&out).unwrap();
    let version = Version::low(ExpertId { layer: 2, index: 3 });
    let record = sound.versions.iter().find(|v| v.version == version).unwrap().record;
    let norm = sound.raw.tensor("output_norm.weight").unwrap().extent;
    let header = sound.raw.tensor("hobbit.header").unwrap().extent;
    // In the vocabulary, where no reader looks.
    let word = header.offset as usize + cut(&bytes, header).windows(6).position(|w| w == b"tokens").unwrap() + 40;
    let index = sound.raw.tensor("hobbit.index").unwrap().extent;
    let name_of_source = bytes.windows(10).position(|w| w == b"model.gguf").unwrap();
    for (at, expected) in [
        (record.offset as usize + 5, "tensor 'blk.2.ffn_exps.low', layer 2 expert 3 (low): its checksum differs"),
        (record.end() as usize - 1, "layer 2 expert 3 (low)"),
        (word, "tensor 'hobbit.header': its checksum differs"),
        (norm.offset as usize, "tensor 'output_norm.weight': its checksum differs"),
        (index.offset as usize + 6 * 8, "layer 0 expert 0 (high): its checksum differs"),
        (name_of_source, "tensor '(header)'"),
    ] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        fs::write(&out, &damaged).unwrap();
        let faults = verified(&Pack::open(&out).unwrap()).faults;
        assert!(faults.iter().any(|fault| fault.to_string().contains(expected)), "{expected}: {faults:?}");
        assert!(faults.len() <= 2, "{faults:?}");
    }
}

#[test]
fn a_damaged_pack_is_not_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let (out, sound) = packed(dir.path());
    let mut bytes = fs::read(&out).unwrap();
    bytes[sound.versions[1].record.offset as usize] ^= 1;
    fs::write(&out, &bytes).unwrap();
    let error = unpacked(&Pack::open(&out).unwrap(), dir.path()).unwrap_err();
    assert!(matches!(error, UnpackError::Digest { .. }), "{error}");
    assert!(!dir.path().join("unpacked.gguf").exists() && !dir.path().join("unpacked.gguf.partial").exists());
}

#[test]
fn stopping_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (_, pack) = packed(dir.path());
    let out = dir.path().join("unpacked.gguf");
    let error = unpack(&pack, &out, false, &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert!(matches!(error, UnpackError::Stopped { .. }), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "model and pack");
    assert_eq!(verify(&pack, &mut |_, _| ControlFlow::Break(())).unwrap(), None);
    fs::write(&out, "mine").unwrap();
    let error = unpack(&pack, &out, false, &mut |_, _| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, UnpackError::Exists { .. }), "{error}");
}
