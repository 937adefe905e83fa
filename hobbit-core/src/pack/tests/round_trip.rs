//! A pack holds the model and restores it.

use std::collections::HashMap;

use super::*;
use crate::expert::{ExpertId, Precision, SliceKind};
use crate::gguf::{Catalog, HeaderBuilder, Piece, VirtualGguf};
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

/// Packs with the source's types and low versions, and checks everything that must be restored.
fn check(dir: &Path, path: &Path) {
    let out = dir.join("pack.gguf");
    let source = Gguf::open(path).unwrap();
    let files: Vec<_> = source.files.iter().map(|f| fs::read(&f.path).unwrap()).collect();
    for spec in [low_spec(), PackSpec::new(PackKind::Full)] {
        let written = pack(path, &out, &PackSpec { force: true, ..spec });
        let pack = Pack::open(&out).unwrap();
        let plain = read_all(&source.one_file(), &files);
        assert!(unpacked(&pack, dir).unwrap() == plain, "{}", path.display());
        assert_eq!(pack.info.plain_sha256, Some(pack.info.source_sha256));
        assert_eq!(written.source_sha256, pack.info.source_sha256);
        assert_eq!((written.bytes, pack.info.source_size), (fs::metadata(&out).unwrap().len(), plain.len() as u64));
        assert_eq!(verified(&pack).faults, []);

        // llama.cpp sees the same file without the experts.
        let (theirs, own) = (source.virtual_file(), pack.plain.virtual_file());
        assert_eq!((&theirs.header, theirs.len), (&own.header, own.len));
        let (mut theirs_bytes, own_bytes) = (read_all(&theirs, &files), read_all(&own, &[fs::read(&out).unwrap()]));
        for segment in theirs.segments.iter().filter(|s| s.in_file) {
            theirs_bytes[segment.start as usize..segment.end() as usize].fill(0);
        }
        assert!(theirs_bytes == own_bytes, "{}", path.display());
        assert!(own.segments.iter().all(|s| s.in_file == s.source.is_none()));
        let n_experts = |view: &VirtualGguf| view.segments.iter().filter(|s| s.in_file).count();
        assert_eq!(n_experts(&own), n_experts(&theirs));

        // The rest of the model is unchanged.
        assert_eq!(pack.plain.architecture(), source.architecture());
        assert_eq!(pack.plain.tensors.len(), source.tensors.len());
        assert!(pack.has_header_of(&source));
        let shapes = |map: &crate::gguf::ExpertMap| -> Vec<_> {
            let tensors = map.layers.iter().flat_map(|layer| &layer.tensors);
            tensors.map(|t| (t.name.clone(), t.dtype, t.ne0, t.ne1, t.n_expert)).collect()
        };
        assert_eq!(shapes(&pack.experts), shapes(&source.experts().unwrap()));
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
            for ((tensor, slice), part) in tensors.iter().zip(&class.slices).zip(&version.slices) {
                let extent = tensor.extent(index);
                let wanted = recoded(tensor.dtype, slice.dtype, cut(&files[extent.file as usize], extent));
                expected[slice.region as usize..][..wanted.len()].copy_from_slice(&wanted);
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
        check(dir.path(), &model(dir.path(), &spec));
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
        ("trailing zeros", Box::new(|b| b.resize(b.len() + 10_000, 0))),
        (
            "two tensors exchanged",
            Box::new(|b| {
                // The last tensor's offset is the header's last field; add space between the first two tensors' data.
                let end = layout.header.len();
                b.extend([0; 64]);
                let last = u64::from_le_bytes(b[end - 8..end].try_into().unwrap());
                b[end - 8..end].copy_from_slice(&(last + 64).to_le_bytes());
                let at = norm + last as usize;
                b.copy_within(at..at + 20, at + 64);
                b[at..at + 20].fill(0);
            }),
        ),
    ] {
        let mut file = bytes.clone();
        edit(&mut file);
        fs::write(&path, &file).unwrap();
        check(dir.path(), &path);
        assert!(fs::read(dir.path().join("unpacked.gguf")).unwrap() == file, "{what}");
    }
    // Bytes between tensors are not packed: they are zero in the plain model, and its digest is of that form.
    let (mut padded, mut longer) = (bytes.clone(), bytes.clone());
    padded[norm - 1..norm].fill(9);
    padded[norm + 12..norm + 64].fill(0xee);
    longer.extend(b"appended by hand");
    let zeros = [&bytes[..], &[0; 16]].concat();
    for (file, plain) in [(padded, &bytes), (longer, &zeros)] {
        fs::write(&path, &file).unwrap();
        let out = dir.path().join("gaps.gguf");
        pack(&path, &out, &PackSpec { force: true, ..PackSpec::new(PackKind::Full) });
        let pack = Pack::open(&out).unwrap();
        assert_ne!(pack.info.plain_sha256, Some(pack.info.source_sha256));
        assert!(unpacked(&pack, dir.path()).unwrap() == *plain && verified(&pack).faults.is_empty());
    }
}

#[test]
fn uniform_high_types_unpack_to_a_plain_model_of_these_types() {
    let dir = tempfile::tempdir().unwrap();
    let high = PackSpec { high: Some("q8_0,down=f32".parse().unwrap()), ..PackSpec::new(PackKind::Full) };
    let (path, _, pack) = packed(dir.path(), &spec(), &high);
    assert_eq!((pack.info.high.as_deref(), pack.info.low.as_deref()), (Some("q8_0,down=f32"), None));
    assert_ne!(pack.info.plain_sha256, Some(pack.info.source_sha256));
    let bytes = unpacked(&pack, dir.path()).unwrap();

    let (plain, source) = (Gguf::open(&dir.path().join("unpacked.gguf")).unwrap(), Gguf::open(&path).unwrap());
    assert!(plain.is_contiguous);
    assert_eq!(plain.metadata.keys().collect::<Vec<_>>(), source.metadata.keys().collect::<Vec<_>>());
    let source_bytes = fs::read(&path).unwrap();
    for (own, theirs) in plain.tensors.iter().zip(&source.tensors) {
        assert_eq!((&own.name, &own.dims), (&theirs.name, &theirs.dims));
        let to = match own.name.rsplit_once("_exps") {
            None => theirs.dtype,
            Some((stem, _)) if stem.ends_with("down") => GgmlType::F32,
            Some(_) => GgmlType::Q8_0,
        };
        assert_eq!(own.dtype, to);
        assert!(
            cut(&bytes, own.extent) == recoded(theirs.dtype, to, cut(&source_bytes, theirs.extent)),
            "{}",
            own.name
        );
    }
    check_records(&pack, &source, &[source_bytes]);
}

#[test]
fn experts_of_a_layer_may_differ_but_not_in_a_plain_model() {
    let dir = tempfile::tempdir().unwrap();
    let expert = ExpertId { layer: 1, index: 2 };
    let widths: Widths = HashMap::from([(expert, SliceTypes::from_iter([(SliceKind::Up, GgmlType::Q8_0)]))]);
    let own = PackSpec { widths: Some(widths), low: Some(GgmlType::Q8_0.into()), ..PackSpec::new(PackKind::Full) };
    let (path, _, pack) = packed(dir.path(), &spec(), &own);
    assert_eq!(pack.info.plain_sha256, None);
    let types = pack.versions.iter().find(|v| v.version.expert == expert).unwrap().types;
    assert_eq!([SliceKind::Up, SliceKind::Gate].map(|kind| types.get(kind).unwrap()), [GgmlType::Q8_0, GgmlType::F16]);
    assert_eq!(pack.catalog.classes.len(), 3);
    check_records(&pack, &Gguf::open(&path).unwrap(), &[fs::read(&path).unwrap()]);
    let message = unpacked(&pack, dir.path()).unwrap_err().to_string();
    for part in ["layer 1: expert 2", "f16,up=q8_0", "expert 0 has f16", "use the pack as it is"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn metadata_is_kept_and_threads_change_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let own = PackSpec { thresholds: Some((0.5, 0.75)), norms: Some("{}".to_owned()), ..low_spec() };
    let (path, out, pack) = packed(dir.path(), &spec(), &own);
    assert_eq!((pack.info.t1, pack.info.t2, pack.info.norms.as_deref()), (Some(0.5), Some(0.75), Some("{}")));
    assert_eq!((pack.info.low.as_deref(), pack.info.source_name.as_str()), (Some("q8_0,down=iq4_nl"), "model.gguf"));
    // The source's own keys are there for other readers, and records are aligned for direct reads.
    assert_eq!(pack.raw.architecture(), "qwen3moe");
    assert_eq!((pack.raw.alignment, pack.raw.is_contiguous), (BLOCK_BYTES, true));
    assert!(pack.raw.tensors.iter().all(|t| t.extent.offset % BLOCK_BYTES == 0));
    assert!(!pack.raw.tensors.iter().any(|t| t.name.contains("_exps.weight")));
    let other = dir.path().join("other.gguf");
    let written = super::pack(&path, &other, &PackSpec { threads: 5, ..own });
    assert!(fs::read(out).unwrap() == fs::read(other).unwrap());
    // Rows of 96 are no whole blocks of q2_K, in all three layers.
    assert_eq!(written.fallbacks.len(), 3);
    assert_eq!((written.fallbacks[0].wanted.name(), written.fallbacks[0].taken.name()), ("q2_K", "iq4_nl"));
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out, _) = packed(dir.path(), &spec(), &low_spec());
    let wide = dir.path().join("wide");
    fs::create_dir(&wide).unwrap();
    let wide = model(&wide, &Spec { embd: 256, ff: 256, ..spec() });
    let low = |text: &str| PackSpec { low: Some(text.parse().unwrap()), ..PackSpec::new(PackKind::Full) };
    let x = dir.path().join("x");
    for (source, out, spec, part) in [
        (&path, &x, low("f32"), "nowhere smaller"),
        (&path, &x, PackSpec::new(PackKind::Low), "needs the types of its low versions"),
        (&path, &x, low("i8"), "nothing can be quantised to type i8"),
        (&wide, &x, low("iq4_xs"), "needs an importance matrix"),
        (&path, &out, low_spec(), "exists already"),
        (&out, &x, low_spec(), "is an expert pack already"),
    ] {
        let error = try_pack(source, out, &spec).unwrap_err().to_string();
        assert!(error.contains(part) && !x.exists() && !partial_path(&x).exists(), "{error}");
    }
    let error = Pack::open(&path).unwrap_err();
    assert!(error.to_string().contains("not an expert pack"), "{error}");
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
fn importance_reaches_its_expert() {
    let dir = tempfile::tempdir().unwrap();
    let name = "blk.1.ffn_down_exps.weight";
    let made = |out: &str, ne0, values| {
        let importance = imatrix(&dir.path().join("imatrix.gguf"), name, ne0, values);
        let own = PackSpec { importance: Some(&importance), ..low_spec() };
        try_pack(&model(dir.path(), &spec()), &dir.path().join(out), &own)?;
        Ok::<_, WriteError>(Pack::open(&dir.path().join(out)).unwrap().versions)
    };
    let (one, other) =
        (made("one.gguf", 96, [0.5; 4]).unwrap(), made("other.gguf", 96, [0.5, 0.25, 0.5, 0.5]).unwrap());
    let differ: Vec<_> = one.iter().zip(&other).filter(|(a, b)| a.checksum != b.checksum).collect();
    let [(version, _)] = differ.as_slice() else { panic!("{differ:?}") };
    assert_eq!(version.version, crate::expert::Version::low(ExpertId { layer: 1, index: 1 }));
    let error = made("wrong.gguf", 95, [0.5; 4]).unwrap_err().to_string();
    assert!(error.contains("computed from another model"), "{error}");
}

#[test]
fn a_low_pack_serves_beside_its_model_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let only_low = PackSpec { low: Some("q8_0,down=q4_0".parse().unwrap()), ..PackSpec::new(PackKind::Low) };
    let (path, _, low) = packed(dir.path(), &spec(), &only_low);
    let source = Gguf::open(&path).unwrap();
    assert_eq!((low.kind, low.info.high.clone()), (PackKind::Low, None));
    assert!(low.has_header_of(&source) && low.require_full().is_err());
    assert!(low.raw.tensors.iter().all(|t| t.name.ends_with(".ffn_exps.low") || t.name.starts_with("hobbit.")));
    assert_eq!(verified(&low).faults, []);
    let message = unpacked(&low, dir.path()).unwrap_err().to_string();
    assert!(message.contains("holds only low-precision experts") && message.contains("model.gguf"), "{message}");

    let mut catalog = Catalog::plain(&source.experts().unwrap());
    catalog.add_low_of(&low.experts, &low.catalog, 1).unwrap();
    assert_eq!(catalog.layers.len(), 3);
    for layer in &catalog.layers {
        for index in 0..layer.n_expert {
            let (high, low) = (layer.source(index, Precision::High), layer.source(index, Precision::Low).unwrap());
            let class = &catalog.classes[usize::from(low.class)];
            assert_eq!(class.slice(SliceKind::Down).unwrap().dtype.name(), "q4_0");
            assert_eq!((high.unwrap().record, low.record.unwrap().file), (None, 1));
            assert!(low.slices.iter().all(|slice| slice.extent.file == 1));
        }
    }
    // The shape of the pack's records is not that of the plain file's windows.
    assert_eq!(catalog.classes.len(), 2);

    for (spec, part) in [
        (Spec { experts: 8, ..spec() }, "[64, 96, 4], expected [64, 96, 8]"),
        (Spec { layers: 4, ..spec() }, "tensor 'blk.3.ffn_gate_exps.weight': no such tensor"),
        (Spec { ff: 64, ..spec() }, "[64, 96, 4]"),
        (Spec { fused: true, arch: "granite_swa".to_owned(), ..spec() }, "blk.0.ffn_gate_up_exps.weight"),
    ] {
        let other = Gguf::open(&model(dir.path(), &spec)).unwrap();
        assert!(!low.has_header_of(&other));
        let mut catalog = Catalog::plain(&other.experts().unwrap());
        let before = catalog.clone();
        let message = catalog.add_low_of(&low.experts, &low.catalog, 1).unwrap_err().to_string();
        assert!(message.contains(part) && catalog == before, "{message}");
    }
}

/// Slices of the source that are small enough already are copied; versions that would be copies are left out.
#[test]
fn low_versions_are_smaller_or_absent() {
    let dir = tempfile::tempdir().unwrap();
    let types = vec![Format::Q8_0, Format::F16, Format::F16];
    let mixed = Spec { types, down_types: vec![Format::Q8_0], ..spec() };
    let low = PackSpec { low: Some("q8_0".parse().unwrap()), ..PackSpec::new(PackKind::Full) };
    let (.., pack) = packed(dir.path(), &mixed, &low);
    let has_low: Vec<bool> = pack.catalog.layers.iter().map(|l| l.low.iter().all(Option::is_some)).collect();
    assert_eq!(has_low, [false, true, true]);
    assert!(pack.catalog.layers[0].low.iter().all(Option::is_none));
    assert!(pack.raw.tensor("blk.0.ffn_exps.low").is_none());
}
