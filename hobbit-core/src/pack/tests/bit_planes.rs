//! Packs of bit planes: both precisions in the model's own bytes.

use super::*;
use crate::expert::{ExpertId, Precision, Version};
use crate::gguf::Stored;
use crate::pack::format::VERSION_BIT_PLANES;
use crate::planes;
use crate::store::BLOCK_BYTES;

#[test]
fn both_versions_are_bits_of_the_source() {
    for spec in [
        q8_spec(),
        Spec { fused: true, arch: "granite_swa".to_owned(), ..q8_spec() },
        Spec { shards: 3, ..q8_spec() },
        // Planes longer than one merge step.
        Spec { embd: 2048, ff: 2048, experts: 2, layers: 1, ..q8_spec() },
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (path, out, pack) = packed(dir.path(), &spec, &plane_spec());
        assert_eq!((pack.version(), pack.info.bit_planes), (VERSION_BIT_PLANES, true));
        assert_eq!((pack.info.high.as_deref(), pack.info.low.as_deref()), (Some("q8_0"), Some("q4_1")));
        assert_eq!(pack.versions.len() as u32, 2 * spec.experts * spec.layers);
        assert_eq!(verified(&pack).faults, []);
        let (source, plain) = (Gguf::open(&path).unwrap(), unpacked(&pack, dir.path()).unwrap());
        assert!(source.files.len() > 1 || fs::read(&path).unwrap() == plain);
        assert_eq!(pack.info.plain_sha256, Some(pack.info.source_sha256));
        check_versions(&pack, &source, &fs::read(out).unwrap());
    }
}

/// Both versions are where the catalog points: a low one is Q4_1 made of the high one's bits.
fn check_versions(pack: &Pack, source: &Gguf, bytes: &[u8]) {
    let map = source.experts().unwrap();
    let files: Vec<_> = source.files.iter().map(|file| fs::read(&file.path).unwrap()).collect();
    for layer in &pack.catalog.layers {
        let tensors = &map.layer(layer.layer).unwrap().tensors;
        for index in 0..layer.n_expert {
            let [high, low] = Precision::ALL.map(|precision| layer.source(index, precision).unwrap());
            let (record, first) = (high.record.unwrap(), low.record.unwrap());
            assert_eq!((record.offset, record.offset % BLOCK_BYTES, record.len % BLOCK_BYTES), (first.offset, 0, 0));
            assert!(first.len < record.len && first.len * 100 / record.len < 60);
            let classes = [high, low].map(|version| &pack.catalog.classes[usize::from(version.class)]);
            for (i, tensor) in tensors.iter().enumerate() {
                let (own, alone) = (high.slices[i], low.slices[i]);
                let Stored::Both { low: low_plane } = own.stored else { panic!("{own:?}") };
                assert_eq!((own.extent, alone.stored), (alone.extent, Stored::High));
                assert_eq!((own.bytes(), alone.bytes()), (tensor.slice_bytes, tensor.slice_bytes / 34 * 18));
                assert_eq!(classes.map(|class| class.slices[i].dtype), [GgmlType::Q8_0, GgmlType::Q4_1]);
                let mut merged = vec![0; tensor.slice_bytes as usize];
                assert!(planes::merge(cut(bytes, own.extent), cut(bytes, low_plane), &mut merged));
                let extent = tensor.extent(index);
                assert!(merged == cut(&files[extent.file as usize], extent), "{}[{index}]", tensor.name);
            }
        }
    }
    // No byte is stored twice.
    assert_eq!(pack.catalog.stored_bytes(), map.bytes());
    assert_eq!(pack.catalog.read_bytes(Precision::Low), map.bytes() / 34 * 18);
}

#[test]
fn other_types_become_q8_0_first_if_asked() {
    let dir = tempfile::tempdir().unwrap();
    let plain = [plane_spec(), PackSpec::new(PackKind::Full)].map(|spec| {
        let (.., pack) =
            packed(dir.path(), &super::spec(), &PackSpec { high: Some(GgmlType::Q8_0.into()), force: true, ..spec });
        unpacked(&pack, dir.path()).unwrap()
    });
    assert!(plain[0] == plain[1]);
}

#[test]
fn weights_without_planes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("pack.gguf");
    let refused = |path: &Path, spec: &PackSpec<'_>, parts: &[&str]| {
        let error = try_pack(path, &out, spec).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(!out.exists() && !partial_path(&out).exists());
    };
    let half = model(dir.path(), &spec());
    refused(&half, &plane_spec(), &["tensor 'blk.0.ffn_gate_exps.weight' is f16", "expected q8_0"]);
    let path = model(dir.path(), &q8_spec());
    let low = Some("q4_0".parse().unwrap());
    refused(&path, &PackSpec { low, ..plane_spec() }, &["and q4_0 asks for others"]);
    refused(&path, &PackSpec { kind: PackKind::Low, ..plane_spec() }, &["low versions only"]);

    // A scale that Q4_1 cannot represent.
    let extent = Gguf::open(&path).unwrap().experts().unwrap().layers[1].tensors[1].extent(2);
    let mut bytes = fs::read(&path).unwrap();
    for scale in [0x7c00u16, 0x6040, 0xfe01] {
        bytes[extent.offset as usize + 34..][..2].copy_from_slice(&scale.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        refused(&path, &plane_spec(), &["blk.1.ffn_up_exps.weight[2]", "543.5"]);
    }
}

/// Every byte of a record is in exactly one version's own part.
#[test]
fn damage_is_named_by_the_part_it_is_in() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, opened) = packed(dir.path(), &q8_spec(), &plane_spec());
    let sound = fs::read(&out).unwrap();
    let record = |version: Version| opened.versions.iter().find(|packed| packed.version == version).unwrap().record;
    let expert = ExpertId { layer: 1, index: 2 };
    for version in [Version::high(expert), Version::low(expert)] {
        let mut damaged = sound.clone();
        damaged[record(version).offset as usize + 40] ^= 1;
        fs::write(&out, &damaged).unwrap();
        let faults = verified(&Pack::open(&out).unwrap()).faults;
        assert_eq!(faults.len(), 1, "{faults:?}");
        let expected = format!("tensor 'blk.1.ffn_exps.nested', {version}: its checksum differs");
        assert!(faults[0].to_string().contains(&expected), "{faults:?}");
        let error = unpacked(&Pack::open(&out).unwrap(), dir.path()).unwrap_err();
        assert!(matches!(error, UnpackError::Digest { .. }), "{error}");
    }
    // Swap the planes of one expert, up to the length of the shorter one.
    let (high, low) = (record(Version::high(expert)), record(Version::low(expert)));
    let mut swapped = sound.clone();
    let n = high.len as usize;
    swapped[low.offset as usize..][..n].copy_from_slice(cut(&sound, high));
    swapped[high.offset as usize..][..n].copy_from_slice(&sound[low.offset as usize..][..n]);
    fs::write(&out, &swapped).unwrap();
    let pack = Pack::open(&out).unwrap();
    assert_eq!(verified(&pack).faults.iter().filter(|fault| fault.expert == Some(2)).count(), 2);
    assert!(unpacked(&pack, dir.path()).is_err());
    let end = opened.raw.tensor("hobbit.checksums").unwrap().extent.end() as usize;
    for n in [end - 1, low.offset as usize + 1, high.offset as usize + 1] {
        fs::write(&out, &sound[..n]).unwrap();
        let message = Pack::open(&out).map(drop).unwrap_err().to_string();
        assert!(message.contains("pack.gguf"), "{message}");
    }
}

/// An index with the two parts of an expert swapped, a part missing or a part elsewhere; unknown versions and planes.
#[test]
fn a_header_or_index_without_planes_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, opened) = packed(dir.path(), &q8_spec(), &plane_spec());
    let sound = fs::read(&out).unwrap();
    let index = opened.raw.tensor("hobbit.index").unwrap().extent;
    let row = |i: usize| index.offset as usize + 64 * i;
    let elsewhere = (opened.versions[0].record.offset + 4096).to_le_bytes();
    let version = find(&sound, b"hobbit.pack.version") + 19 + 4;
    let planes = find(&sound, b"q8_0/q4_1");
    let swap = |bytes: &mut Vec<u8>, a: usize, b: usize, n: usize| {
        bytes[a..a + n].copy_from_slice(&sound[b..b + n]);
        bytes[b..b + n].copy_from_slice(&sound[a..a + n]);
    };
    type Edit<'a> = Box<dyn Fn(&mut Vec<u8>) + 'a>;
    let cases: Vec<(&str, Edit<'_>)> = vec![
        // Rows 0 and 1 are expert 0's, low and high; row 3 is the high part of another expert.
        ("expert 0 (low): bytes of the record", Box::new(|b| swap(b, row(0) + 24, row(1) + 24, 16))),
        ("expert 0 (low): types", Box::new(|b| swap(b, row(0) + 40, row(1) + 40, 8))),
        ("right behind it", Box::new(|b| swap(b, row(1) + 24, row(3) + 24, 8))),
        ("right behind it", Box::new(|b| b[row(0) + 24..][..8].copy_from_slice(&elsewhere))),
        ("expert 0 (high): types", Box::new(|b| b[row(0) + 16..][..8].fill(0))),
        ("version 3, expected 1 to 2", Box::new(|b| b[version] = 3)),
        ("'hobbit.pack.nested': found 'q8_0/q4_1', expected nothing", Box::new(|b| b[version] = 1)),
        ("'hobbit.pack.nested': found 'x8_0/q4_1', expected 'q8_0/q4_1'", Box::new(|b| b[planes] = b'x')),
    ];
    for (part, edit) in cases {
        let mut bytes = sound.clone();
        edit(&mut bytes);
        fs::write(&out, &bytes).unwrap();
        let message = Pack::open(&out).map(drop).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains("pack.gguf"), "{part}: {message}");
    }
}
