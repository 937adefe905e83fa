//! A pack holds the model and restores it.

use std::collections::HashMap;

use super::toy::{decode, encode};
use super::*;
use crate::expert::{ExpertId, Precision, SliceKind};
use crate::gguf::{GgmlType, HeaderBuilder, Piece, VirtualGguf};
use crate::pack::imatrix::Imatrix;
use crate::store::BLOCK_BYTES;

/// All bytes of a virtual file; absent ones are zeros.
fn read_all(view: &VirtualGguf, files: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    loop {
        match view.segment_at(out.len() as u64) {
            Piece::Header(bytes) => out.extend_from_slice(bytes),
            Piece::Source { source, .. } => out.extend_from_slice(cut(&files[source.file as usize], source)),
            Piece::Zeros(len) | Piece::Absent { len, .. } => out.resize(out.len() + len as usize, 0),
            Piece::End => return out,
        }
    }
}

/// The model at `path` as one file.
fn plain_bytes(path: &Path) -> Vec<u8> {
    let gguf = Gguf::open(path).unwrap();
    let files: Vec<_> = gguf.files.iter().map(|f| fs::read(&f.path).unwrap()).collect();
    read_all(&gguf.one_file(), &files)
}

/// Packs with the source's types and low versions, and checks everything that must be restored.
fn check(dir: &Path, path: &Path) {
    let out = dir.join("pack.gguf");
    let low = PackSpec { force: true, ..low_spec() };
    for spec in [&low, &PackSpec { force: true, ..PackSpec::new(PackKind::Full) }] {
        let written = pack(path, &out, spec);
        let pack = Pack::open(&out).unwrap();
        let plain = plain_bytes(path);
        assert!(unpacked(&pack, dir).unwrap() == plain, "{}", path.display());
        assert_eq!(pack.info.plain_sha256, Some(pack.info.source_sha256));
        assert_eq!(written.source_sha256, pack.info.source_sha256);
        assert_eq!((written.bytes, pack.info.source_size), (fs::metadata(&out).unwrap().len(), plain.len() as u64));
        assert_eq!(verified(&pack).faults, []);
        assert!(!partial_path(&out).exists());

        // llama.cpp sees the same file without the experts.
        let source = Gguf::open(path).unwrap();
        let (theirs, own) = (source.virtual_file(), pack.plain.virtual_file());
        assert_eq!((&theirs.header, theirs.len), (&own.header, own.len));
        let files: Vec<_> = source.files.iter().map(|f| fs::read(&f.path).unwrap()).collect();
        let (mut theirs_bytes, own_bytes) = (read_all(&theirs, &files), read_all(&own, &[fs::read(&out).unwrap()]));
        for segment in theirs.segments.iter().filter(|s| s.expert) {
            theirs_bytes[segment.start as usize..segment.end() as usize].fill(0);
        }
        assert!(theirs_bytes == own_bytes, "{}", path.display());
        assert!(own.segments.iter().all(|s| s.expert == s.source.is_none()));
        assert_eq!(
            own.segments.iter().filter(|s| s.expert).count(),
            theirs.segments.iter().filter(|s| s.expert).count()
        );

        // The rest of the model is unchanged.
        assert_eq!(pack.plain.architecture(), source.architecture());
        assert_eq!(pack.plain.tensors.len(), source.tensors.len());
        assert!(pack.has_header_of(&source));
        let names = |map: &crate::gguf::ExpertMap| -> Vec<_> {
            map.layers
                .iter()
                .flat_map(|l| &l.tensors)
                .map(|t| (t.name.clone(), t.dtype, t.ne0, t.ne1, t.n_expert))
                .collect()
        };
        assert_eq!(names(&pack.experts), names(&source.experts().unwrap()));
        check_records(&pack, &source, &files);
    }
}

/// Every record holds the expert's slices, recoded where the types differ, and zeros.
fn check_records(pack: &Pack, source: &Gguf, files: &[Vec<u8>]) {
    let bytes = fs::read(&pack.path).unwrap();
    let (catalog, map) = (&pack.catalog, source.experts().unwrap());
    for layer in &catalog.layers {
        let tensors = &map.layer(layer.layer).unwrap().tensors;
        for (precision, index) in Precision::ALL.iter().flat_map(|p| (0..layer.n_expert).map(move |i| (*p, i))) {
            let Some(version) = layer.source(index, precision) else {
                assert_eq!((precision, pack.catalog.has_low()), (Precision::Low, false));
                continue;
            };
            let class = &catalog.classes[usize::from(version.class)];
            let record = version.record.unwrap();
            assert_eq!((record.offset % BLOCK_BYTES, record.len), (0, class.stride));
            let mut expected = vec![0; class.stride as usize];
            for (tensor, slice) in tensors.iter().zip(&class.slices) {
                let extent = tensor.extent(index);
                let stored = cut(&files[extent.file as usize], extent);
                let wanted = match precision {
                    _ if tensor.dtype == slice.dtype => stored.to_vec(),
                    _ => {
                        let mut made = Vec::new();
                        encode(slice.dtype, &decode(tensor.dtype, stored).unwrap(), None, &mut made);
                        made
                    }
                };
                expected[slice.region as usize..][..wanted.len()].copy_from_slice(&wanted);
                let part = version.slices[class.slices.iter().position(|s| s.kind == slice.kind).unwrap()];
                assert_eq!((cut(&bytes, part.extent), part.lead), (wanted.as_slice(), 0));
            }
            assert!(cut(&bytes, record) == expected, "layer {} expert {index} {precision}", layer.layer);
        }
    }
}

#[test]
fn unpacking_gives_the_source_bit_for_bit() {
    let q8 = vec![Format::Q8_0];
    for spec in [
        spec(),
        Spec { fused: true, ..Spec { arch: "granite_swa".to_owned(), ..spec() } },
        Spec { shards: 3, ..spec() },
        Spec { types: q8.clone(), down_types: vec![Format::F16, Format::F32], ..spec() },
        Spec { types: q8, dense_lead: Some(1), ..Spec { arch: "deepseek2".to_owned(), embd: 128, ff: 64, ..spec() } },
        Spec { expert_scales: true, ..spec() },
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = model(dir.path(), &spec);
        check(dir.path(), &path);
    }
}

/// Padding that is not zero, bytes after the last tensor, tensors in another order than their data.
#[test]
fn odd_files_come_back_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.gguf");
    let mut header = HeaderBuilder::new(64).unwrap();
    header.key("general.architecture", "toy").unwrap();
    header.tensor("norm.weight", GgmlType::F32, &[3]).unwrap();
    header.tensor("empty.weight", GgmlType::F32, &[4, 0]).unwrap();
    for stem in ["down", "gate", "up"] {
        header.tensor(&format!("blk.0.ffn_{stem}_exps.weight"), GgmlType::F16, &[32, 32, 3]).unwrap();
    }
    header.tensor("tail.weight", GgmlType::F32, &[5]).unwrap();
    let layout = header.finish();
    let mut bytes = Vec::new();
    let fill = |t: &crate::gguf::TensorInfo, out: &mut dyn std::io::Write| {
        out.write_all(&(0..t.extent.len).map(|i| (i * 7 % 50) as u8).collect::<Vec<_>>())
    };
    layout.write(&mut bytes, fill).unwrap();
    let norm = layout.data_start as usize;
    for (what, edit) in [
        ("as it is", Box::new(|_: &mut Vec<u8>| ()) as Box<dyn Fn(&mut Vec<u8>)>),
        ("cut right after the last tensor", Box::new(|b| b.truncate(b.len() - 44))),
        ("padding in use", Box::new(|b| b[norm + 12..norm + 64].fill(0xee))),
        ("some of it", Box::new(|b| b[norm + 20] = 1)),
        ("between header and data", Box::new(|b| b[norm - 1] = 9)),
        ("trailing zeros", Box::new(|b| b.resize(b.len() + 10_000, 0))),
        ("trailing text", Box::new(|b| b.extend(b"\0\0appended by hand\0\0"))),
        (
            "two tensors exchanged",
            Box::new(|b| {
                // The last tensor's offset is the header's last field; add space between the first two tensors' data.
                let end = layout.header.len();
                b.extend([0; 64]);
                let last = u64::from_le_bytes(b[end - 8..end].try_into().unwrap());
                b[end - 8..end].copy_from_slice(&(last + 64).to_le_bytes());
            }),
        ),
    ] {
        let mut file = bytes.clone();
        edit(&mut file);
        fs::write(&path, &file).unwrap();
        check(dir.path(), &path);
        assert!(fs::read(dir.path().join("unpacked.gguf")).unwrap() == file, "{what}");
    }
}

#[test]
fn uniform_high_types_unpack_to_a_plain_model_of_these_types() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let out = dir.path().join("pack.gguf");
    let spec = PackSpec { high: Some("q8_0,down=f32".parse().unwrap()), ..PackSpec::new(PackKind::Full) };
    pack(&path, &out, &spec);
    let pack = Pack::open(&out).unwrap();
    assert_eq!((pack.info.high.as_deref(), pack.info.low.as_deref()), (Some("q8_0,down=f32"), None));
    assert_ne!(pack.info.plain_sha256, Some(pack.info.source_sha256));
    let bytes = unpacked(&pack, dir.path()).unwrap();

    let (plain, source) = (Gguf::open(&dir.path().join("unpacked.gguf")).unwrap(), Gguf::open(&path).unwrap());
    assert!(plain.is_contiguous);
    assert_eq!(plain.metadata.keys().collect::<Vec<_>>(), source.metadata.keys().collect::<Vec<_>>());
    let source_bytes = fs::read(&path).unwrap();
    for (own, theirs) in plain.tensors.iter().zip(&source.tensors) {
        assert_eq!((&own.name, &own.dims), (&theirs.name, &theirs.dims));
        let stored = cut(&source_bytes, theirs.extent);
        let expected = match own.name.rsplit_once("_exps") {
            None => stored.to_vec(),
            Some((stem, _)) => {
                let to = if stem.ends_with("down") { GgmlType::F32 } else { GgmlType::Q8_0 };
                assert_eq!(own.dtype, to);
                let mut made = Vec::new();
                encode(to, &decode(theirs.dtype, stored).unwrap(), None, &mut made);
                made
            }
        };
        assert!(cut(&bytes, own.extent) == expected, "{}", own.name);
    }
    check_records(&pack, &source, &[source_bytes]);
}

#[test]
fn experts_of_a_layer_may_differ_but_not_in_a_plain_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let out = dir.path().join("pack.gguf");
    let expert = ExpertId { layer: 1, index: 2 };
    let widths: Widths = HashMap::from([(expert, SliceTypes::from_iter([(SliceKind::Up, GgmlType::Q8_0)]))]);
    let spec = PackSpec { widths: Some(widths), low: Some(GgmlType::Q8_0.into()), ..PackSpec::new(PackKind::Full) };
    pack(&path, &out, &spec);
    let pack = Pack::open(&out).unwrap();
    assert_eq!(pack.info.plain_sha256, None);
    let types = pack.versions.iter().find(|v| v.version.expert == expert).unwrap().types;
    assert_eq!(types.get(SliceKind::Up), Some(GgmlType::Q8_0));
    assert_eq!(types.get(SliceKind::Gate), Some(GgmlType::F16));
    assert_eq!(pack.catalog.classes.len(), 3);
    check_records(&pack, &Gguf::open(&path).unwrap(), &[fs::read(&path).unwrap()]);
    let message = unpacked(&pack, dir.path()).unwrap_err().to_string();
    for part in ["layer 1: expert 2", "f16,up=q8_0", "expert 0 has f16", "use the pack as it is"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!dir.path().join("unpacked.gguf.partial").exists());
}

#[test]
fn what_pack_says_about_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let out = dir.path().join("pack.gguf");
    let spec = PackSpec { thresholds: Some((0.5, 0.75)), policy: Some("{}".to_owned()), ..low_spec() };
    let written = pack(&path, &out, &spec);
    let pack = Pack::open(&out).unwrap();
    assert_eq!((pack.info.t1, pack.info.t2), (Some(0.5), Some(0.75)));
    assert_eq!(pack.info.policy.as_deref(), Some("{}"));
    assert_eq!(pack.info.low.as_deref(), Some("q8_0,down=iq4_nl"));
    assert_eq!(pack.info.source_name, "model.gguf");
    // Rows of 96 are no whole blocks of q2_K, in all three layers.
    assert_eq!(written.fallbacks.len(), 3);
    assert_eq!((written.fallbacks[0].wanted.name(), written.fallbacks[0].taken.name()), ("q2_K", "iq4_nl"));
    // The source's own keys are there for other readers, and records are aligned for direct reads.
    assert_eq!(pack.raw.architecture(), "qwen3moe");
    assert_eq!((pack.raw.alignment, pack.raw.is_contiguous), (BLOCK_BYTES, true));
    assert!(pack.raw.tensors.iter().all(|t| t.extent.offset % BLOCK_BYTES == 0));
    assert!(!pack.raw.tensors.iter().any(|t| t.name.contains("_exps.weight")));
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let source = Gguf::open(&path).unwrap();
    let out = dir.path().join("pack.gguf");
    let fault = |spec: &PackSpec<'_>, recode: &dyn Recode| {
        let error = write(&source, &out, spec, recode, &mut quietly).unwrap_err();
        assert!(!out.exists() && !partial_path(&out).exists());
        error.to_string()
    };
    let low = |text: &str| PackSpec { low: Some(text.parse().unwrap()), ..PackSpec::new(PackKind::Full) };
    assert!(fault(&low("f32"), &Toy).contains("nowhere smaller"));
    assert!(fault(&PackSpec::new(PackKind::Low), &Toy).contains("needs the types of its low versions"));
    assert!(fault(&low("i8"), &Toy).contains("nothing can be quantised to type i8"));
    assert!(fault(&low("q8_0"), &crate::gguf::CopyOnly).contains("nothing can be quantised to type q8_0"));
    let (dir, spec) = (tempfile::tempdir().unwrap(), Spec { embd: 256, ff: 256, ..spec() });
    let wide = Gguf::open(&model(dir.path(), &spec)).unwrap();
    let error = write(&wide, &out, &low("iq4_xs"), &Toy, &mut quietly).unwrap_err();
    assert!(error.to_string().contains("needs an importance matrix"), "{error}");

    pack(&path, &out, &low_spec());
    let error = write(&source, &out, &low_spec(), &Toy, &mut quietly).unwrap_err();
    assert!(matches!(error, WriteError::Exists { .. }), "{error}");
    let again = Gguf::open(&out).unwrap();
    let error = write(&again, &dir.path().join("x"), &low_spec(), &Toy, &mut quietly).unwrap_err();
    assert!(matches!(error, WriteError::AlreadyPack { .. }), "{error}");
    let error = Pack::open(&path).unwrap_err();
    assert!(matches!(error, PackError::NotAPack { .. }), "{error}");
}

/// The number of threads does not change the bytes.
#[test]
fn packs_are_reproducible() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let made = |threads| {
        let out = dir.path().join(format!("pack-{threads}.gguf"));
        pack(&path, &out, &PackSpec { threads, ..low_spec() });
        fs::read(out).unwrap()
    };
    assert!(made(1) == made(5));
}

/// An importance matrix for one expert tensor, with a value per expert.
fn imatrix(path: &Path, tensor: &str, ne0: u64, values: [f32; 4]) -> Imatrix {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.type", "imatrix").unwrap();
    header.tensor(&format!("{tensor}.in_sum2"), GgmlType::F32, &[ne0, 4]).unwrap();
    header.tensor(&format!("{tensor}.counts"), GgmlType::F32, &[1, 4]).unwrap();
    let mut bytes = Vec::new();
    let data = |t: &crate::gguf::TensorInfo, out: &mut dyn std::io::Write| {
        let sums = values.iter().flat_map(|v| v.to_le_bytes().repeat(ne0 as usize));
        let counts = [1f32; 4].into_iter().flat_map(f32::to_le_bytes);
        let bytes: Vec<u8> = if t.name.ends_with("counts") { counts.collect() } else { sums.collect() };
        out.write_all(&bytes)
    };
    header.finish().write(&mut bytes, data).unwrap();
    fs::write(path, bytes).unwrap();
    Imatrix::open(path).unwrap()
}

#[test]
fn importance_reaches_the_expert_it_is_of() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), &spec());
    let name = "blk.1.ffn_down_exps.weight";
    let made = |out: &str, values| {
        let importance = imatrix(&dir.path().join("imatrix.gguf"), name, 96, values);
        let out = dir.path().join(out);
        pack(&path, &out, &PackSpec { importance: Some(&importance), ..low_spec() });
        Pack::open(&out).unwrap()
    };
    let (one, other) = (made("one.gguf", [0.5; 4]), made("other.gguf", [0.5, 0.25, 0.5, 0.5]));
    let differ: Vec<_> = one.versions.iter().zip(other.versions).filter(|(a, b)| a.checksum != b.checksum).collect();
    let [(version, _)] = differ.as_slice() else { panic!("{differ:?}") };
    assert_eq!(version.version, crate::expert::Version::low(ExpertId { layer: 1, index: 1 }));

    let wrong = imatrix(&dir.path().join("imatrix.gguf"), name, 95, [0.5; 4]);
    let spec = PackSpec { importance: Some(&wrong), ..low_spec() };
    let error = write(&Gguf::open(&path).unwrap(), &dir.path().join("x"), &spec, &Toy, &mut quietly).unwrap_err();
    assert!(error.to_string().contains("computed from another model"), "{error}");
}
