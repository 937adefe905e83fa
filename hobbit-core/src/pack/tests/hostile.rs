//! Truncated or changed parts of a pack give an error that names the file, or a pack whose records all lie where the
//! index may point; never a panic.

use proptest::prelude::*;

use super::*;
use crate::gguf::{HeaderBuilder, Stored};
use crate::store::BLOCK_BYTES;

/// A pack of a model without vocabulary, so that every byte of its headers can be tried, and a path for mutants.
struct Small {
    _dir: tempfile::TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
    /// Ranges where a change has an effect: the header and the format's own tensors.
    sensitive: Vec<std::ops::Range<usize>>,
    index: std::ops::Range<usize>,
}

impl Small {
    fn new(bit_planes: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [model, path] = ["model.gguf", "mutant.gguf"].map(|name| dir.path().join(name));
        let mut header = HeaderBuilder::new(32).unwrap();
        header.key("general.architecture", "toy").unwrap().key("toy.expert_count", 2u32).unwrap();
        header.tensor("norm.weight", GgmlType::F32, &[3]).unwrap();
        // High planes of whole blocks of the file, so that they are longer than the low ones.
        let (dtype, rows) = if bit_planes { (GgmlType::Q8_0, 256) } else { (GgmlType::F16, 32) };
        for stem in ["down", "gate", "up"] {
            header.tensor(&format!("blk.0.ffn_{stem}_exps.weight"), dtype, &[rows, rows, 2]).unwrap();
        }
        let mut bytes = Vec::new();
        header.finish().write(&mut bytes, |t, out| out.write_all(&vec![1; t.extent.len as usize])).unwrap();
        fs::write(&model, &bytes).unwrap();
        let low = (!bit_planes).then(|| GgmlType::Q8_0.into());
        let thresholds = Some((0.5, 0.9));
        pack(&model, &path, &PackSpec { low, bit_planes, thresholds, ..PackSpec::new(PackKind::Full) });
        let bytes = fs::read(&path).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let own = ["hobbit.header", "hobbit.index", "hobbit.checksums"].map(|name| {
            let extent = gguf.tensor(name).unwrap().extent;
            extent.offset as usize..extent.end() as usize
        });
        let index = own[1].clone();
        let sensitive = std::iter::once(0..gguf.header_bytes.len()).chain(own).collect();
        let small = Self { _dir: dir, path, bytes, sensitive, index };
        assert!(small.accepts(&small.bytes));
        small
    }

    /// The bytes with `with` at a position.
    fn mutant(&self, at: usize, with: &[u8]) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    }

    /// Opens the bytes as a pack and uses all of it; whether it was accepted.
    fn accepts(&self, bytes: &[u8]) -> bool {
        fs::write(&self.path, bytes).unwrap();
        let Ok(true) = Gguf::open(&self.path).map(|gguf| Pack::is_pack(&gguf)) else { return false };
        let pack = match Pack::open(&self.path) {
            Ok(pack) => pack,
            Err(error) => {
                assert!(error.to_string().contains("mutant.gguf"), "{error}");
                return false;
            }
        };
        let catalog = &pack.catalog;
        for version in catalog.layers.iter().flat_map(|l| l.high.iter().chain(l.low.iter().flatten())) {
            let (class, record) = (&catalog.classes[usize::from(version.class)], version.record.unwrap());
            assert!(record.offset % BLOCK_BYTES == 0 && (pack.info.bit_planes || record.len == class.stride));
            assert!(record.end() <= bytes.len() as u64);
            for (slice, shape) in version.slices.iter().zip(&class.slices) {
                assert!(slice.extent.end() <= record.end() && slice.extent.offset >= record.offset);
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
        }
        let view = pack.plain.virtual_file();
        assert!(view.segments.iter().filter_map(|s| s.source).all(|e| e.end() <= bytes.len() as u64));
        // A wild source size makes a file of zeros of up to exabytes; unpacking checks for free space first.
        let short = |_, total| if total < 1 << 20 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
        let _ = unpack::digest(&pack, &mut { short });
        let _ = verified(&pack);
        true
    }
}

#[test]
fn cut_in_every_region() {
    let small = Small::new(false);
    // The last tensor's padding may be missing.
    let end = small.sensitive.iter().map(|range| range.end).max().unwrap();
    let in_ranges = small.sensitive.iter().flat_map(|range| range.clone().step_by(7));
    for n in in_ranges.chain((0..end).step_by(1024)) {
        assert!(!small.accepts(&small.bytes[..n]), "{n}");
    }
}

#[test]
fn every_sensitive_byte_changed() {
    for bit_planes in [false, true] {
        let small = Small::new(bit_planes);
        let step = if bit_planes { 5 } else { 1 };
        let [version, planes] = [&b"hobbit.pack.version"[..], b"hobbit.pack."].map(|text| find(&small.bytes, text));
        let keys = (version..version + 40).chain(planes..planes + 60);
        for at in keys.chain(small.sensitive.iter().cloned().flatten().step_by(step)) {
            for flip in [1, 0x80] {
                small.accepts(&small.mutant(at, &[small.bytes[at] ^ flip]));
            }
        }
    }
}

#[test]
fn wild_words_in_the_index() {
    for bit_planes in [false, true] {
        let small = Small::new(bit_planes);
        for at in small.index.clone().step_by(8) {
            let column = (at - small.index.start) / 8 % 8;
            let own = u64::from_le_bytes(small.bytes[at..at + 8].try_into().unwrap());
            let wild = [u64::MAX, i64::MAX as u64, 1 << 63, 1 << 40];
            let near = [1, 4096].into_iter().flat_map(|by| [own.wrapping_add(by), own.wrapping_sub(by)]);
            for value in wild.into_iter().chain(near) {
                let is_sound = small.accepts(&small.mutant(at, &value.to_le_bytes()));
                // Another expert's place within the layer's tensor is a record like any other, and types of equally
                // long records are exchangeable; checksums find these.
                let is_exchangeable = matches!(column, 3 | 5) && !bit_planes || column == 6;
                assert!(!is_sound || is_exchangeable, "column {column}: {own} to {value}");
            }
        }
        let start = small.index.start;
        assert!(!small.accepts(&small.mutant(start + 64, &small.bytes[start..start + 64])));
        let message = Pack::open(&small.path).unwrap_err().to_string();
        let precision = if bit_planes { "low" } else { "high" };
        assert!(message.contains(&format!("layer 0 expert 0 ({precision}): found two of them")), "{message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn several_words_changed(
        edits in prop::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![any::<u64>(), 0..300u64, Just(1 << 32)], 1..9usize), 1..6)
    ) {
        thread_local! {
            static SMALL: Small = Small::new(false);
        }
        SMALL.with(|small| {
            let places: Vec<usize> = small.sensitive.iter().cloned().flatten().collect();
            let mut mutant = small.bytes.clone();
            for (at, value, width) in edits {
                let at = *at.get(&places);
                let width = width.min(mutant.len() - at);
                mutant[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
            small.accepts(&mutant);
        });
    }
}
