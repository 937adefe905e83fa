//! Low versions of one file beside the high ones of another.

use super::*;
use crate::expert::{Precision, SliceKind};
use crate::gguf::Catalog;

fn low_pack(dir: &Path) -> (PathBuf, Pack) {
    let (path, out) = (model(dir, &spec()), dir.join("low.gguf"));
    pack(&path, &out, &PackSpec { low: Some("q8_0,down=q4_0".parse().unwrap()), ..PackSpec::new(PackKind::Low) });
    (path, Pack::open(&out).unwrap())
}

#[test]
fn a_low_pack_serves_beside_its_model() {
    let dir = tempfile::tempdir().unwrap();
    let (path, low) = low_pack(dir.path());
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
}

#[test]
fn another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, low) = low_pack(dir.path());
    for (spec, part) in [
        (Spec { experts: 8, ..spec() }, "found [64, 96, 4], expected [64, 96, 8]"),
        (Spec { layers: 4, ..spec() }, "tensor 'blk.3.ffn_gate_exps.weight': no such tensor"),
        (Spec { ff: 64, ..spec() }, "[64, 96, 4]"),
        (Spec { fused: true, arch: "granite_swa".to_owned(), ..spec() }, "blk.0.ffn_gate_up_exps.weight"),
    ] {
        let other = tempfile::tempdir().unwrap();
        let source = Gguf::open(&model(other.path(), &spec)).unwrap();
        assert!(!low.has_header_of(&source));
        let mut catalog = Catalog::plain(&source.experts().unwrap());
        let before = catalog.clone();
        let message = catalog.add_low_of(&low.experts, &low.catalog, 1).unwrap_err().to_string();
        let part = part.trim_start_matches("found ");
        assert!(message.contains(part), "{message}");
        assert_eq!(catalog, before);
    }
}

/// Slices of the source that are small enough already are copied; versions that would be copies are left out.
#[test]
fn low_versions_are_smaller_or_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let formats = vec![Format::Q8_0, Format::F16, Format::F16];
    let path = model(dir.path(), &Spec { types: formats, down_types: vec![Format::Q8_0], ..spec() });
    let out = dir.path().join("pack.gguf");
    pack(&path, &out, &PackSpec { low: Some("q8_0".parse().unwrap()), ..PackSpec::new(PackKind::Full) });
    let pack = Pack::open(&out).unwrap();
    let has_low: Vec<bool> = pack.catalog.layers.iter().map(|l| l.low.iter().all(Option::is_some)).collect();
    assert_eq!(has_low, [false, true, true]);
    assert!(pack.catalog.layers[0].low.iter().all(Option::is_none));
    assert!(pack.raw.tensor("blk.0.ffn_exps.low").is_none());
}
