//! Every header byte cut off, every field made huge, random damage: an error that names the file, never a panic, and
//! an accepted header never points outside the file.

use std::path::Path;

use proptest::prelude::*;

use super::super::{Gguf, HeaderBuilder, Value};
use super::{N_EXPERT, file, tensors};

/// A header of a few hundred bytes with every kind of field.
fn small() -> Vec<u8> {
    let mut header = HeaderBuilder::new(64).unwrap();
    header.key("general.architecture", "toy").unwrap();
    header.key("toy.expert_count", N_EXPERT as u32).unwrap();
    header.key("f", 0.5f64).unwrap().key("b", true).unwrap();
    header.key("strings", Value::array(["one", "", "three"])).unwrap();
    header.key("numbers", Value::array([1i64, -2, 3])).unwrap();
    header.key("none", Value::array::<u8>([])).unwrap();
    file(header, &tensors()[..4])
}

fn header_len(bytes: &[u8]) -> usize {
    Gguf::parse_header(bytes, bytes.len() as u64, Path::new("m")).unwrap().0.header_len() as usize
}

/// Whether the header was accepted.
fn check(bytes: &[u8], file_len: u64) -> bool {
    let name = Path::new("dir/some-model.gguf");
    match Gguf::parse_header(bytes, file_len, name) {
        Ok((header, metadata)) => {
            assert!(header.tensors.iter().all(|t| t.extent.end() <= file_len));
            assert_eq!(metadata.keys().count(), header.kv.len());
            true
        }
        Err(e) => {
            assert!(e.to_string().contains("some-model.gguf"), "{e}");
            false
        }
    }
}

#[test]
fn cut_at_every_byte_of_the_header() {
    let bytes = small();
    for n in 0..header_len(&bytes) {
        assert!(!check(&bytes[..n], n as u64), "file of {n} bytes");
        assert!(!check(&bytes[..n], bytes.len() as u64), "source that ends after {n} bytes");
    }
    assert!(check(&bytes, bytes.len() as u64));
}

#[test]
fn every_field_made_huge_and_every_byte_changed() {
    let bytes = small();
    let huge = [u64::MAX, i64::MAX as u64, 1 << 62, 1 << 40, 1 << 32, u64::from(u32::MAX), 1 << 31, 1 << 20, 0];
    for at in 0..header_len(&bytes) {
        let words = huge.iter().flat_map(|value| [8, 4].map(|width| value.to_le_bytes()[..width].to_vec()));
        for with in words.chain([1, 0x80, 0xff].map(|flip| vec![bytes[at] ^ flip])) {
            let mut mutant = bytes.clone();
            mutant[at..at + with.len()].copy_from_slice(&with);
            // A sparse file may be as long as it likes.
            for file_len in [mutant.len() as u64, i64::MAX as u64, u64::MAX] {
                check(&mutant, file_len);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn several_bytes_changed(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12)) {
        let mut bytes = small();
        let n = header_len(&bytes);
        for (at, value) in edits {
            bytes[at.index(n)] = value;
        }
        check(&bytes, bytes.len() as u64);
    }

    #[test]
    fn noise_after_the_counts(noise in prop::collection::vec(any::<u8>(), 0..400), n in 0u64..9, kv in 0u64..9) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(n.to_le_bytes());
        bytes.extend(kv.to_le_bytes());
        bytes.extend(noise);
        check(&bytes, bytes.len() as u64);
    }
}
