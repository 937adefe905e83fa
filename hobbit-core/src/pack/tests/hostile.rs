//! Truncated or changed parts of a pack give an error that names the file, or a pack whose records all lie where the
//! index may point; never a panic.

use proptest::prelude::*;

use super::*;
use crate::gguf::{GgmlType, HeaderBuilder, Stored};
use crate::predict::{PathLimits, PathTableBuilder, PredictShape};
use crate::store::BLOCK_BYTES;

/// A pack of a model without vocabulary, so that every byte of its headers can be tried.
fn small(dir: &Path) -> Vec<u8> {
    small_of(dir, false)
}

fn small_of(dir: &Path, nested: bool) -> Vec<u8> {
    let path = dir.join("model.gguf");
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.expert_count", 2u32).unwrap();
    header.tensor("norm.weight", GgmlType::F32, &[3]).unwrap();
    for stem in ["down", "gate", "up"] {
        let dtype = if nested { GgmlType::Q8_0 } else { GgmlType::F16 };
        // Whole blocks of the file for high planes, so that they are longer than the low ones.
        let rows = if nested { 256 } else { 32 };
        header.tensor(&format!("blk.0.ffn_{stem}_exps.weight"), dtype, &[rows, rows, 2]).unwrap();
    }
    let mut bytes = Vec::new();
    header.finish().write(&mut bytes, |t, out| out.write_all(&vec![1; t.extent.len as usize])).unwrap();
    bytes.extend(b"tail");
    fs::write(&path, &bytes).unwrap();
    let out = dir.join("pack.gguf");
    let thresholds = Some((0.5, 0.9));
    let mut builder = PathTableBuilder::new(PredictShape::new([(0, 2)], 1), PathLimits::default());
    builder.observe(0, [1]);
    let (low, path_table) = ((!nested).then(|| GgmlType::Q8_0.into()), Some(builder.build()));
    pack(&path, &out, &PackSpec { low, nested, thresholds, path_table, ..PackSpec::new(PackKind::Full) });
    fs::read(out).unwrap()
}

/// Opens the bytes as a pack; returns whether they were accepted.
fn accepted(path: &Path, bytes: &[u8]) -> bool {
    fs::write(path, bytes).unwrap();
    let gguf = match Gguf::open(path) {
        Ok(gguf) => gguf,
        Err(_) => return false,
    };
    if !Pack::is_pack(&gguf) {
        return false;
    }
    match Pack::open(path) {
        Err(error) => {
            assert!(error.to_string().contains("mutant.gguf"), "{error}");
            false
        }
        Ok(pack) => {
            let catalog = &pack.catalog;
            for version in catalog.layers.iter().flat_map(|l| l.high.iter().chain(l.low.iter().flatten())) {
                let (class, record) = (&catalog.classes[usize::from(version.class)], version.record.unwrap());
                assert!(record.offset % BLOCK_BYTES == 0 && (pack.info.nested || record.len == class.stride));
                for (slice, shape) in version.slices.iter().zip(&class.slices) {
                    let n_blocks = shape.bytes / shape.dtype.type_size();
                    match slice.stored {
                        Stored::Whole => assert_eq!(slice.extent.len, shape.bytes),
                        Stored::High => assert_eq!(slice.extent.len, n_blocks * 18),
                        Stored::Both { low } => {
                            assert_eq!((slice.extent.len, low.len), (n_blocks * 18, n_blocks * 16));
                            assert!(low.offset >= slice.extent.end() && low.end() <= record.end());
                        }
                    }
                }
                assert!(record.end() <= bytes.len() as u64);
                assert!(
                    version.slices.iter().all(|s| s.extent.end() <= record.end() && s.extent.offset >= record.offset)
                );
            }
            let view = pack.plain.virtual_file();
            assert!(view.segments.iter().filter_map(|s| s.source).all(|e| e.end() <= bytes.len() as u64));
            // A wild source size makes a file of zeros of up to exabytes; unpacking checks for free space first.
            let short = |_, total| if total < 1 << 20 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
            let _ = unpack::digest(&pack, &mut { short });
            let _ = verified(&pack);
            let _ = pack.path_table();
            true
        }
    }
}

/// Ranges where a change has an effect: the header and the format's own tensors.
fn sensitive(bytes: &[u8], path: &Path) -> Vec<std::ops::Range<usize>> {
    fs::write(path, bytes).unwrap();
    let gguf = Gguf::open(path).unwrap();
    let header = 0..gguf.header_bytes.len();
    let own = ["hobbit.header", "hobbit.gaps", "hobbit.paths", "hobbit.index", "hobbit.checksums"].map(|name| {
        let extent = gguf.tensor(name).unwrap().extent;
        extent.offset as usize..extent.end() as usize
    });
    std::iter::once(header).chain(own).collect()
}

#[test]
fn cut_in_every_region() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = small(dir.path());
    let path = dir.path().join("mutant.gguf");
    let ranges = sensitive(&bytes, &path);
    assert!(accepted(&path, &bytes));
    for range in &ranges {
        for n in range.clone().step_by(7) {
            assert!(!accepted(&path, &bytes[..n]), "{n}");
        }
    }
    // The last tensor's padding may be missing.
    let end = ranges.iter().map(|range| range.end).max().unwrap();
    for n in (0..end).step_by(1024) {
        assert!(!accepted(&path, &bytes[..n]), "{n}");
    }
}

#[test]
fn every_sensitive_byte_changed() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = small(dir.path());
    let path = dir.path().join("mutant.gguf");
    for at in sensitive(&bytes, &path).into_iter().flatten() {
        for flip in [1, 0x80] {
            let mut mutant = bytes.clone();
            mutant[at] ^= flip;
            accepted(&path, &mutant);
        }
    }
}

#[test]
fn every_sensitive_byte_of_a_nested_pack_changed() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = small_of(dir.path(), true);
    let path = dir.path().join("mutant.gguf");
    assert!(accepted(&path, &bytes));
    // Only the part of the header that nested packs change.
    let places = sensitive(&bytes, &path);
    let own = bytes.windows(18).position(|window| window == b"hobbit.pack.nested").unwrap();
    let version = bytes.windows(19).position(|window| window == b"hobbit.pack.version").unwrap();
    let header = (version..version + 40).chain(own..own + 60);
    for at in header.chain(places.into_iter().skip(1).flatten().step_by(5)) {
        for flip in [1, 0x80] {
            let mut mutant = bytes.clone();
            mutant[at] ^= flip;
            accepted(&path, &mutant);
        }
    }
}

#[test]
fn wild_words_in_the_index() {
    wild_words(false);
}

#[test]
fn wild_words_in_a_nested_index() {
    wild_words(true);
}

fn wild_words(nested: bool) {
    let dir = tempfile::tempdir().unwrap();
    let bytes = small_of(dir.path(), nested);
    let path = dir.path().join("mutant.gguf");
    fs::write(&path, &bytes).unwrap();
    let index = Pack::open(&path).unwrap().raw.tensor("hobbit.index").unwrap().extent;
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    for at in (index.offset as usize..index.end() as usize).step_by(8) {
        let column = (at - index.offset as usize) / 8 % 8;
        let own = word(at);
        for value in [
            u64::MAX,
            i64::MAX as u64,
            1 << 63,
            1 << 40,
            own + 1,
            own.wrapping_sub(1),
            own + 4096,
            own.wrapping_sub(4096),
        ] {
            let mut mutant = bytes.clone();
            mutant[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let sound = accepted(&path, &mutant);
            // Another expert's place within the layer's tensor is a record like any other, and types of equally long
            // records are exchangeable; checksums find these.
            let is_exchangeable = matches!(column, 3 | 5) && !nested || column == 6;
            assert!(!sound || is_exchangeable, "column {column}: {own} to {value}");
        }
    }
    // The same row twice.
    let mut mutant = bytes.clone();
    let start = index.offset as usize;
    mutant.copy_within(start..start + 64, start + 64);
    assert!(!accepted(&path, &mutant));
    let message = Pack::open(&path).unwrap_err().to_string();
    let precision = if nested { "low" } else { "high" };
    assert!(message.contains(&format!("layer 0 expert 0 ({precision}): found two of them")), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn several_words_changed(
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u64>(), 0..300u64, Just(1 << 32)], 1..9usize), 1..6)
    ) {
        thread_local! {
            static SMALL: (tempfile::TempDir, Vec<u8>, Vec<usize>) = {
                let dir = tempfile::tempdir().unwrap();
                let bytes = small(dir.path());
                let places = sensitive(&bytes, &dir.path().join("mutant.gguf")).into_iter().flatten().collect();
                (dir, bytes, places)
            };
        }
        SMALL.with(|(dir, bytes, places)| {
            let mut mutant = bytes.clone();
            for (at, value, width) in edits {
                let at = *at.get(places);
                let width = width.min(mutant.len() - at).min(8);
                mutant[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
            accepted(&dir.path().join("mutant.gguf"), &mutant);
        });
    }
}
