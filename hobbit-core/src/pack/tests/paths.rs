//! Path tables inside of packs.

use super::*;
use crate::predict::{PathLimits, PathTable, PathTableBuilder, PredictShape};

fn shape_of(model: &Path) -> PredictShape {
    let gguf = Gguf::open(model).unwrap();
    PredictShape::of_header(&gguf, &gguf.experts().unwrap(), None)
}

/// Expert e is followed by expert e + 1.
fn table(shape: &PredictShape) -> PathTable {
    let mut builder = PathTableBuilder::new(shape.clone(), PathLimits::default());
    for token in 0..12u16 {
        builder.begin_token();
        for (step, &(layer, n_expert, _)) in (0u16..).zip(&shape.layers) {
            builder.observe(layer, [(token + step) % n_expert]);
        }
    }
    builder.build()
}

/// The model of [`spec`], packed with its table.
fn packed_with_paths(dir: &Path) -> (PathBuf, PathBuf, PathTable) {
    let (model, out) = (model(dir, &spec()), dir.join("paths.gguf"));
    let table = table(&shape_of(&model));
    pack(&model, &out, &PackSpec { path_table: Some(table.clone()), ..low_spec() });
    (model, out, table)
}

#[test]
fn a_table_comes_back_and_changes_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, out, table) = packed_with_paths(dir.path());
    let with = Pack::open(&out).unwrap();
    assert_eq!(with.path_table().unwrap().as_ref(), Some(&table));
    assert_eq!(verified(&with).faults, []);
    assert!(unpacked(&with, dir.path()).unwrap() == fs::read(&plain).unwrap());

    // Readers without support for path tables find everything else unchanged.
    let (.., without) = packed(dir.path(), &spec(), &low_spec());
    assert_eq!(without.path_table().unwrap(), None);
    let checksums = |pack: &Pack| pack.versions.iter().map(|v| (v.version, v.checksum)).collect::<Vec<_>>();
    assert_eq!(checksums(&without), checksums(&with));
    // Index and header have other offsets; ordinary tensors, the plain header and gaps are the same.
    let n = with.checksums.len();
    assert_eq!((without.checksums.len(), &without.checksums[..n - 3]), (n, &with.checksums[..n - 3]));
    assert_eq!(without.checksums[n - 2], with.checksums[n - 2]);
}

#[test]
fn a_damaged_table_is_named_and_the_rest_can_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, _) = packed_with_paths(dir.path());
    let sound = fs::read(&out).unwrap();
    let extent = Pack::open(&out).unwrap().raw.tensor("hobbit.paths").unwrap().extent;
    for at in extent.offset..extent.end() {
        let mut damaged = sound.clone();
        damaged[at as usize] ^= 0x10;
        fs::write(&out, &damaged).unwrap();
        let pack = Pack::open(&out).unwrap();
        let message = pack.path_table().unwrap_err().to_string();
        assert!(
            message.contains("paths.gguf: tensor 'hobbit.paths'") && message.contains("pack it again"),
            "{message}"
        );
        if at % 64 == 0 {
            let faults: Vec<String> = verified(&pack).faults.iter().map(Fault::to_string).collect();
            assert!(faults.len() == 1 && faults[0].starts_with("tensor 'hobbit.paths': "), "{faults:?}");
        }
    }
}

#[test]
fn a_table_of_another_model_is_refused_by_writer_and_reader() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, out, _) = packed_with_paths(dir.path());
    let (source, shape) = (Gguf::open(&plain).unwrap(), shape_of(&plain));
    // Same length, other layers.
    let other = table(&PredictShape {
        layers: shape.layers.iter().map(|&(layer, n_expert, k)| (layer + 1, n_expert, k)).collect(),
    });
    let larger = table(&PredictShape { layers: shape.layers.iter().map(|&(layer, n, k)| (layer, n + 1, k)).collect() });
    for (wrong, part) in
        [(&other, "block number of a layer with experts: found 1, expected 0"), (&larger, "found 5, expected 4")]
    {
        let spec = PackSpec { path_table: Some(wrong.clone()), force: true, ..low_spec() };
        let error = write(&source, &dir.path().join("no.gguf"), &spec, &Toy, &mut quietly).unwrap_err().to_string();
        assert!(error.contains("model.gguf: path table") && error.contains(part), "{error}");
    }
    let mut bytes = fs::read(&out).unwrap();
    let extent = Pack::open(&out).unwrap().raw.tensor("hobbit.paths").unwrap().extent;
    bytes[extent.offset as usize..extent.end() as usize].copy_from_slice(&other.to_bytes());
    fs::write(&out, bytes).unwrap();
    let message = Pack::open(&out).unwrap().path_table().unwrap_err().to_string();
    assert!(message.contains("made of another model"), "{message}");
}

#[test]
fn a_table_of_another_type_is_no_table() {
    let dir = tempfile::tempdir().unwrap();
    let (_, out, _) = packed_with_paths(dir.path());
    let mut bytes = fs::read(&out).unwrap();
    // Behind the name: number of dimensions (4), dimension (8), type (4). F32 has four bytes an element.
    let at = find(&bytes, b"hobbit.paths") + 16;
    let dimension = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    bytes[at..at + 8].copy_from_slice(&(dimension / 4).to_le_bytes());
    bytes[at + 8..at + 12].fill(0);
    fs::write(&out, bytes).unwrap();
    let message = Pack::open(&out).unwrap_err().to_string();
    assert!(message.contains("tensor 'hobbit.paths': found f32"), "{message}");
}
