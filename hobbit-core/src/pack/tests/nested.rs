//! Nested packs: both precisions in the model's own bytes.

use super::stopping::stop_after;
use super::*;
use crate::expert::{ExpertId, Extent, Precision, Version};
use crate::gguf::{GgmlType, Stored};
use crate::planes;
use crate::store::BLOCK_BYTES;

fn q8() -> Spec {
    // Planes of whole blocks, so that high and low ones differ in length.
    Spec { types: vec![Format::Q8_0], embd: 256, ff: 256, ..spec() }
}

fn nested() -> PackSpec<'static> {
    PackSpec { nested: true, threads: 2, ..PackSpec::new(PackKind::Full) }
}

/// Paths of model and pack, and the opened pack.
fn made(dir: &Path) -> (PathBuf, PathBuf, Pack) {
    let (path, out) = (model(dir, &q8()), dir.join("pack.gguf"));
    pack(&path, &out, &nested());
    let opened = Pack::open(&out).unwrap();
    (path, out, opened)
}

#[test]
fn unpacking_gives_the_source_bit_for_bit() {
    for spec in [
        q8(),
        Spec { fused: true, ..Spec { arch: "granite_swa".to_owned(), ..q8() } },
        Spec { shards: 3, ..q8() },
        // Planes longer than one merge step.
        Spec { embd: 2048, ff: 2048, experts: 2, layers: 1, ..q8() },
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (path, out) = (model(dir.path(), &spec), dir.path().join("pack.gguf"));
        let written = pack(&path, &out, &nested());
        let pack = Pack::open(&out).unwrap();
        assert_eq!((pack.version(), pack.info.nested), (VERSION_NESTED, true));
        assert_eq!((pack.info.high.as_deref(), pack.info.low.as_deref()), (Some("q8_0"), Some("q4_1")));
        assert_eq!(written.versions as u32, 2 * spec.experts * spec.layers);
        assert_eq!(verified(&pack).faults, []);
        unpacked(&pack, dir.path()).unwrap();
        let files = Gguf::open(&path).unwrap();
        if files.files.len() == 1 {
            assert!(fs::read(&path).unwrap() == fs::read(dir.path().join("unpacked.gguf")).unwrap());
        }
        assert_eq!(pack.info.plain_sha256, Some(pack.info.source_sha256));
        check_versions(&pack, &files);
    }
}

/// Both versions are where the catalog points: a low one is Q4_1 made of the high one's bits.
fn check_versions(pack: &Pack, source: &Gguf) {
    let bytes = fs::read(&pack.path).unwrap();
    let map = source.experts().unwrap();
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
                assert!(planes::merge(cut(&bytes, own.extent), cut(&bytes, low_plane), &mut merged));
                let extent = tensor.extent(index);
                let file = fs::read(&source.files[extent.file as usize].path).unwrap();
                assert!(merged == cut(&file, extent), "{}[{index}]", tensor.name);
            }
        }
    }
    // No byte is stored twice.
    assert_eq!(pack.catalog.stored_bytes(), map.bytes());
    assert_eq!(pack.catalog.read_bytes(Precision::Low), map.bytes() / 34 * 18);
}

/// The pack is as large as the model, except for alignment: below one percent if matrices are not tiny.
#[test]
fn it_is_no_larger_than_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { embd: 512, ff: 1024, experts: 4, layers: 2, ..q8() };
    let (path, out) = (model(dir.path(), &spec), dir.path().join("pack.gguf"));
    let written = pack(&path, &out, &nested());
    let model = fs::metadata(&path).unwrap().len();
    assert!(written.bytes * 100 < model * 101, "{} of {model}", written.bytes);
}

#[test]
fn other_types_become_q8_0_first_where_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out) = (model(dir.path(), &spec()), dir.path().join("pack.gguf"));
    pack(&path, &out, &PackSpec { high: Some(GgmlType::Q8_0.into()), ..nested() });
    let nested_pack = Pack::open(&out).unwrap();
    let plain = unpacked(&nested_pack, dir.path()).unwrap();
    let other = dir.path().join("other.gguf");
    pack(&path, &other, &PackSpec { high: Some(GgmlType::Q8_0.into()), ..PackSpec::new(PackKind::Full) });
    assert!(unpacked(&Pack::open(&other).unwrap(), dir.path()).unwrap() == plain);
}

#[test]
fn what_has_no_planes_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("pack.gguf");
    let fault = |path: &Path, spec: &PackSpec<'_>| {
        let error = write(&Gguf::open(path).unwrap(), &out, spec, &Toy, &mut quietly).unwrap_err();
        assert!(!out.exists());
        error.to_string()
    };
    let half = model(dir.path(), &spec());
    let message = fault(&half, &nested());
    for part in ["tensor 'blk.0.ffn_gate_exps.weight' is f16", "expected q8_0"] {
        assert!(message.contains(part), "{message}");
    }
    let path = model(dir.path(), &q8());
    let low = Some("q4_0".parse().unwrap());
    assert!(fault(&path, &PackSpec { low: low.clone(), ..nested() }).contains("and q4_0 asks for others"));
    assert!(fault(&path, &PackSpec { kind: PackKind::Low, ..nested() }).contains("low versions only"));

    // A scale that Q4_1 cannot represent.
    let source = Gguf::open(&path).unwrap();
    let extent = source.experts().unwrap().layers[1].tensors[1].extent(2);
    let mut bytes = fs::read(&path).unwrap();
    for scale in [0x7c00u16, 0x6040, 0xfe01] {
        bytes[extent.offset as usize + 34..][..2].copy_from_slice(&scale.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let message = fault(&path, &nested());
        assert!(message.contains("blk.1.ffn_up_exps.weight[2]") && message.contains("543.5"), "{message}");
        assert!(!partial_path(&out).exists());
    }
}

#[test]
fn stopped_anywhere_it_is_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out, opened) = made(dir.path());
    let expected = fs::read(&out).unwrap();
    let jobs = opened.versions.len() + opened.ordinary().count();
    for n in (1..jobs).step_by(5) {
        fs::remove_file(&out).unwrap();
        assert!(stop_after(&path, &out, &nested(), n) >= n);
        pack(&path, &out, &nested());
        assert!(fs::read(&out).unwrap() == expected, "{n}");
    }
}

/// Every byte of a record is in exactly one version's own part.
#[test]
fn damage_is_named_by_the_part_it_is_in() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, opened) = made(dir.path());
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
    let (from, to) = (cut(&sound, high).to_vec(), sound[low.offset as usize..][..n].to_vec());
    swapped[low.offset as usize..][..n].copy_from_slice(&from);
    swapped[high.offset as usize..][..n].copy_from_slice(&to);
    fs::write(&out, &swapped).unwrap();
    let pack = Pack::open(&out).unwrap();
    assert_eq!(verified(&pack).faults.iter().filter(|fault| fault.expert == Some(2)).count(), 2);
    assert!(unpacked(&pack, dir.path()).is_err());
    // Cut anywhere.
    let end = opened.raw.tensor("hobbit.checksums").unwrap().extent.end() as usize;
    for n in [end - 1, low.offset as usize + 1, high.offset as usize + 1] {
        fs::write(&out, &sound[..n]).unwrap();
        let message = Pack::open(&out).map(drop).unwrap_err().to_string();
        assert!(message.contains("pack.gguf"), "{message}");
    }
}

/// The index with the two parts of an expert swapped, a part missing, or a part elsewhere.
#[test]
fn an_index_that_is_not_nested_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, opened) = made(dir.path());
    let sound = fs::read(&out).unwrap();
    let index = opened.raw.tensor("hobbit.index").unwrap().extent;
    let row = |i: usize| index.offset as usize + 64 * i;
    let swap = |bytes: &mut Vec<u8>, a: usize, b: usize, n: usize| {
        let (left, right) = (bytes[a..a + n].to_vec(), bytes[b..b + n].to_vec());
        bytes[a..a + n].copy_from_slice(&right);
        bytes[b..b + n].copy_from_slice(&left);
    };
    let first: Extent = opened.versions[0].record;
    type Edit<'a> = Box<dyn Fn(&mut Vec<u8>) + 'a>;
    let cases: Vec<(&str, Edit<'_>)> = vec![
        // Rows 0 and 1 are expert 0's, low and high.
        ("bytes of the record", Box::new(|b| swap(b, row(0) + 24, row(1) + 24, 16))),
        ("types", Box::new(|b| swap(b, row(0) + 40, row(1) + 40, 8))),
        // The high part of another expert.
        ("right behind it", Box::new(|b| swap(b, row(1) + 24, row(3) + 24, 8))),
        ("right behind it", Box::new(|b| b[row(0) + 24..][..8].copy_from_slice(&(first.offset + 4096).to_le_bytes()))),
        ("types", Box::new(|b| b[row(0) + 16..][..8].copy_from_slice(&0u64.to_le_bytes()))),
    ];
    for (part, edit) in cases {
        let mut bytes = sound.clone();
        edit(&mut bytes);
        fs::write(&out, &bytes).unwrap();
        let message = Pack::open(&out).map(drop).unwrap_err().to_string();
        assert!(message.contains(part), "{part}: {message}");
        assert!(message.contains("pack.gguf") && message.contains("expert"), "{message}");
    }
}

/// Readers from before nested packs refuse them by their version; this reader refuses unknown versions and planes.
#[test]
fn other_versions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, _) = made(dir.path());
    let sound = fs::read(&out).unwrap();
    let find = |text: &[u8]| sound.windows(text.len()).position(|window| window == text).unwrap();
    let version = find(b"hobbit.pack.version") + 19 + 4;
    let planes = find(b"q8_0/q4_1");
    for (at, value, part) in [
        (version, 3, "version 3, expected 1 to 2"),
        (version, 1, "'hobbit.pack.nested': found 'q8_0/q4_1', expected nothing"),
        (planes, b'x', "'hobbit.pack.nested': found 'x8_0/q4_1', expected 'q8_0/q4_1'"),
    ] {
        let mut bytes = sound.clone();
        bytes[at] = value;
        fs::write(&out, &bytes).unwrap();
        let message = Pack::open(&out).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}
