//! Files of the writer, and its refusals.

use std::io;
use std::path::Path;

use proptest::prelude::*;

use super::super::{GgmlType, Gguf, HeaderBuilder, Value, WriteError};

fn header() -> HeaderBuilder {
    HeaderBuilder::new(32).unwrap()
}

#[test]
fn bytes_are_as_the_format_says() {
    let mut header = header();
    header.key("k", Value::array([1u16, 2])).unwrap();
    header.tensor("t", GgmlType::F16, &[3]).unwrap();
    let mut bytes = Vec::new();
    header.finish().write(&mut bytes, |_, out| out.write_all(b"abcdef")).unwrap();
    let mut expected = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
    expected.extend(b"\x01\0\0\0\0\0\0\0k\x09\0\0\0\x02\0\0\0\x02\0\0\0\0\0\0\0\x01\0\x02\0");
    expected.extend(b"\x01\0\0\0\0\0\0\0t\x01\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0");
    expected.resize(96, 0);
    expected.extend(b"abcdef");
    expected.resize(128, 0);
    assert_eq!(bytes, expected);
}

#[test]
fn faulty_names_and_shapes_are_refused() {
    let mut h = header();
    h.key("k", 1u8).unwrap().tensor("t", GgmlType::F32, &[1]).unwrap();
    let long = "k".repeat(70000);
    for (key, part) in [
        ("k", "occurs twice"),
        ("", "is empty"),
        (&long, "is too long"),
        ("general.alignment", "is set by the builder"),
    ] {
        assert!(h.key(key, 2u8).unwrap_err().to_string().contains(part), "{part}");
    }
    for (name, part) in [("t", "occurs twice"), (&long[..64], "is too long"), ("a\0b", "contains a NUL byte")] {
        assert!(h.tensor(name, GgmlType::F32, &[1]).unwrap_err().to_string().contains(part), "{part}");
    }
    for (dtype, dims) in [
        (GgmlType::F32, &[][..]),
        (GgmlType::F32, &[1, 1, 1, 1, 1]),
        (GgmlType::F32, &[1 << 62, 4]),
        (GgmlType::F32, &[1 << 61, 4]),
        (GgmlType::Q8_0, &[33]),
    ] {
        assert!(matches!(h.tensor("u", dtype, dims), Err(WriteError::Shape { .. })), "{dims:?}");
    }
    for alignment in [0, 3, 1 << 32] {
        assert!(matches!(HeaderBuilder::new(alignment), Err(WriteError::Alignment(_))), "{alignment}");
    }
}

#[test]
fn data_must_have_the_declared_length() {
    let mut h = header();
    h.tensor("t", GgmlType::F32, &[4]).unwrap();
    let layout = h.finish();
    let with = |n: usize| layout.write(&mut io::sink(), |_, out| out.write_all(&vec![0; n]));
    assert!(with(16).is_ok());
    assert!(matches!(with(15), Err(WriteError::DataLength { expected: 16, found: 15, .. })));
    assert!(matches!(with(17), Err(WriteError::DataLength { expected: 16, found: 17, .. })));
    let swallowed = layout.write(&mut io::sink(), |_, out| {
        let _ = out.write_all(&[0; 17]);
        Ok(())
    });
    assert!(matches!(swallowed, Err(WriteError::DataLength { .. })));
    let failed = layout.write(&mut io::sink(), |_, _| Err(io::Error::other("source gone")));
    assert!(matches!(failed, Err(WriteError::Io(e)) if e.to_string() == "source gone"));
}

#[test]
fn floats_and_odd_strings_survive() {
    let mut h = header();
    h.key("nan", f32::NAN).unwrap().key("inf", f64::INFINITY).unwrap().key("pi", std::f32::consts::PI).unwrap();
    h.key("text", "a\0b \u{1f600} \"quoted\"\n").unwrap().key("min", i64::MIN).unwrap().key("max", u64::MAX).unwrap();
    let bytes = h.finish().header;
    let (_, metadata) = Gguf::parse_header(&bytes, bytes.len() as u64, Path::new("m")).unwrap();
    assert_eq!(metadata.get_f32("nan"), None);
    assert_eq!(metadata.get_f32("inf"), None);
    assert_eq!(metadata.get_f32("pi"), Some(std::f32::consts::PI));
    assert_eq!(metadata.get_str("text"), Some("a\0b \u{1f600} \"quoted\"\n"));
    assert_eq!((metadata.get_i64("min"), metadata.get_u64("min")), (Some(i64::MIN), None));
    assert_eq!((metadata.get_u64("max"), metadata.get_i64("max")), (Some(u64::MAX), None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn written_values_are_read_back(
        ints in prop::collection::btree_map("[a-z.]{1,20}", any::<i64>(), 0..10),
        text in any::<String>(),
        shapes in prop::collection::vec((0usize..35, prop::collection::vec(1u64..5, 1..5)), 0..12),
        alignment in 0u32..13,
    ) {
        let mut header = HeaderBuilder::new(1 << alignment).unwrap();
        for (key, value) in &ints {
            header.key(key, *value).unwrap();
        }
        header.key("TEXT", text.as_str()).unwrap();
        let types: Vec<_> = GgmlType::all().collect();
        let mut expected = Vec::new();
        for (i, (dtype, mut dims)) in shapes.into_iter().enumerate() {
            let dtype = types[dtype];
            dims[0] *= dtype.block_size();
            header.tensor(&format!("t{i}"), dtype, &dims).unwrap();
            expected.push((format!("t{i}"), dtype, dims));
        }
        let layout = header.finish();
        let mut bytes = Vec::new();
        layout.write(&mut bytes, |t, out| out.write_all(&vec![7; t.extent.len as usize])).unwrap();
        prop_assert_eq!(bytes.len() as u64, layout.len);
        let (read, metadata) = Gguf::parse_header(&bytes, layout.len, Path::new("m")).unwrap();
        prop_assert_eq!(read.alignment, 1 << alignment);
        prop_assert!(read.is_contiguous());
        for (key, value) in &ints {
            prop_assert_eq!(metadata.get_i64(key), Some(*value));
        }
        prop_assert_eq!(metadata.get_str("TEXT"), Some(text.as_str()));
        let found: Vec<_> = read.tensors.iter().map(|t| (t.name.clone(), t.dtype, t.dims.clone())).collect();
        prop_assert_eq!(found, expected);
        for t in &read.tensors {
            prop_assert!(bytes[t.extent.offset as usize..t.extent.end() as usize].iter().all(|b| *b == 7));
        }
    }
}
