//! Both forms, as llama-quantize understands them, and files that want to be trusted.

use super::*;

use crate::gguf::{HeaderBuilder, Value};

const DOWN: &str = "blk.0.ffn_down_exps.weight";

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A GGUF importance matrix: (tensor name, shape, values).
fn gguf(kind: &str, tensors: &[(&str, [u64; 2], &[f32])]) -> Vec<u8> {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.type", kind).unwrap();
    header.key("imatrix.datasets", Value::array(["text.txt"])).unwrap();
    header.key("imatrix.chunk_count", 7u32).unwrap();
    header.key("imatrix.chunk_size", 512u32).unwrap();
    for (name, dims, _) in tensors {
        header.tensor(name, GgmlType::F32, dims).unwrap();
    }
    let mut file = Vec::new();
    let mut data = tensors.iter();
    header.finish().write(&mut file, |_, out| out.write_all(&f32s(data.next().unwrap().2))).unwrap();
    file
}

/// A legacy importance matrix: (tensor name, calls, values).
fn legacy(entries: &[(&str, i32, &[f32])], trailer: bool) -> Vec<u8> {
    let int = |n: usize| (n as i32).to_le_bytes();
    let mut file = Vec::from(int(entries.len()));
    for (name, calls, values) in entries {
        file.extend_from_slice(&int(name.len()));
        file.extend_from_slice(name.as_bytes());
        file.extend_from_slice(&calls.to_le_bytes());
        file.extend_from_slice(&int(values.len()));
        file.extend_from_slice(&f32s(values));
    }
    if trailer {
        file.extend_from_slice(&int(9));
        file.extend_from_slice(&int(4));
        file.extend_from_slice(b"text");
    }
    file
}

fn open(bytes: &[u8]) -> Result<Imatrix, ImatrixError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    // The open file outlives its name.
    Imatrix::open(file.path())
}

#[test]
fn sums_are_divided_by_the_expert_s_own_count() {
    let file = gguf(
        "imatrix",
        &[
            ("blk.0.ffn_down_exps.weight.in_sum2", [2, 3], &[2.0, 4.0, 5.0, 6.0, 9.0, 12.0]),
            ("blk.0.ffn_down_exps.weight.counts", [1, 3], &[2.0, 0.0, 3.0]),
            ("blk.0.ffn_down_exps.weight.in_sum", [2, 3], &[0.0; 6]),
            ("blk.0.attn_q.weight.in_sum2", [2, 1], &[8.0, 4.0]),
            ("blk.0.attn_q.weight.counts", [1, 1], &[4.0]),
        ],
    );
    let imatrix = open(&file).unwrap();
    assert_eq!((imatrix.entries.len(), imatrix.chunks), (2, Some(7)));
    let of = |expert| imatrix.importance(DOWN, 2, 3, expert).unwrap();
    assert_eq!(of(0), Some(vec![1.0, 2.0]));
    assert_eq!(of(1), Some(vec![1.0, 1.0]), "an expert that no token reached");
    assert_eq!(of(2), Some(vec![3.0, 4.0]));
    assert_eq!(imatrix.importance("blk.0.attn_q.weight", 2, 1, 0).unwrap(), Some(vec![2.0, 1.0]));
    assert_eq!(imatrix.importance("blk.1.attn_q.weight", 2, 1, 0).unwrap(), None);
}

#[test]
fn one_count_serves_all_experts() {
    let file = gguf(
        "imatrix",
        &[
            ("blk.0.ffn_down_exps.weight.in_sum2", [4, 1], &[2.0, 4.0, 6.0, 8.0]),
            ("blk.0.ffn_down_exps.weight.counts", [1, 1], &[2.0]),
        ],
    );
    let imatrix = open(&file).unwrap();
    assert_eq!(imatrix.importance(DOWN, 2, 2, 1).unwrap(), Some(vec![3.0, 4.0]));
}

#[test]
fn the_legacy_form_has_calls() {
    let file = legacy(&[(DOWN, 2, &[2.0, 4.0, 6.0, 8.0]), ("output.weight", 0, &[5.0, 3.0])], true);
    let imatrix = open(&file).unwrap();
    assert_eq!((imatrix.entries.len(), imatrix.chunks), (2, Some(9)));
    assert_eq!(imatrix.importance(DOWN, 2, 2, 1).unwrap(), Some(vec![3.0, 4.0]));
    assert_eq!(imatrix.importance("output.weight", 2, 1, 0).unwrap(), Some(vec![5.0, 3.0]), "means already");
    assert_eq!(open(&legacy(&[(DOWN, 1, &[1.0])], false)).unwrap().chunks, None);
}

#[test]
fn another_model_s_matrix_is_refused() {
    let sums = ("blk.0.ffn_down_exps.weight.in_sum2", [2, 2], [1.0; 4].as_slice());
    let imatrix = open(&gguf("imatrix", &[sums, ("blk.0.ffn_down_exps.weight.counts", [1, 2], &[1.0; 2])])).unwrap();
    for (n_per_row, n_expert) in [(4, 1), (1, 4), (2, 3), (u64::MAX, 2)] {
        let refused = imatrix.importance(DOWN, n_per_row, n_expert, 0).unwrap_err();
        assert!(matches!(&refused, ImatrixError::Shape { tensor, .. } if tensor == DOWN), "{refused}");
    }
    let three = open(&gguf("imatrix", &[sums, ("blk.0.ffn_down_exps.weight.counts", [1, 3], &[1.0; 3])])).unwrap();
    let refused = three.importance(DOWN, 2, 2, 0).unwrap_err();
    assert!(refused.to_string().contains("4 (counts: 3) values, expected 2 for each of 2 experts"), "{refused}");
}

#[test]
fn values_that_are_no_squares_are_refused() {
    let with = |value: f32, count: f32| {
        let sums: &[f32] = &[1.0, 1.0, 1.0, value];
        let file = gguf(
            "imatrix",
            &[
                ("blk.0.ffn_down_exps.weight.in_sum2", [2, 2], sums),
                ("blk.0.ffn_down_exps.weight.counts", [1, 2], &[1.0, count]),
            ],
        );
        let imatrix = open(&file).unwrap();
        assert!(imatrix.importance(DOWN, 2, 2, 0).is_ok());
        imatrix.importance(DOWN, 2, 2, 1).unwrap_err().to_string()
    };
    for value in [f32::NAN, f32::INFINITY, -1.0] {
        assert!(with(value, 1.0).contains("expert 1: column 1 is"), "{value}");
        assert!(with(1.0, value).contains("expert 1: count is"), "{value}");
    }
}

#[test]
fn files_of_another_kind_are_refused() {
    let sums = ("a.in_sum2", [2, 1], [1.0; 2].as_slice());
    let counts = ("a.counts", [1, 1], [1.0].as_slice());
    let message = |bytes: &[u8]| open(bytes).unwrap_err().to_string();
    assert!(open(&gguf("imatrix", &[sums, counts])).is_ok());
    assert!(message(&gguf("model", &[sums, counts])).contains("general.type: found 'model', expected 'imatrix'"));
    assert!(message(&gguf("imatrix", &[sums])).contains("'a.counts': found none"));
    assert!(message(&gguf("imatrix", &[counts])).contains("'<weight>.in_sum2': found none"));
    assert!(message(&gguf("imatrix", &[])).contains("found none"));
    assert!(message(b"").contains("end of the file at byte 0"));
    assert!(message(b"a text file").contains("number of entries: found"));
    assert!(Imatrix::open(&std::env::temp_dir()).unwrap_err().to_string().contains("expected a regular file"));
}

#[test]
fn a_truncated_file_is_an_error_wherever_it_ends() {
    let whole = legacy(&[(DOWN, 2, &[2.0, 4.0]), ("b", 1, &[1.0])], false);
    for len in 0..whole.len() {
        assert!(matches!(open(&whole[..len]), Err(ImatrixError::Malformed { .. })), "{len} bytes");
    }
    let whole = gguf("imatrix", &[("a.in_sum2", [8, 1], &[1.0; 8]), ("a.counts", [1, 1], &[1.0])]);
    let end = whole.len() - 28; // padding of the last tensor is not needed
    for len in 4..end {
        assert!(matches!(open(&whole[..len]), Err(ImatrixError::Gguf(_))), "{len} bytes");
    }
}

#[test]
fn lengths_found_in_a_file_are_not_trusted() {
    let sound = legacy(&[("abc", 1, &[1.0])], false);
    // Byte positions of: entries, length of the name, calls, values.
    for at in [0, 4, 11, 15] {
        for value in [-1, i32::MIN, i32::MAX, 0] {
            let mut file = sound.clone();
            file[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let harmless = at == 11 && value >= 0;
            assert_eq!(open(&file).is_ok(), harmless, "{value} at {at}");
        }
    }
    let twice = legacy(&[("abc", 1, &[1.0]), ("abc", 1, &[1.0])], false);
    assert!(open(&twice).unwrap_err().to_string().contains("entry 'abc': found two"));
    let mut name = sound;
    name[8] = 0xff;
    assert!(open(&name).unwrap_err().to_string().contains("expected UTF-8"));
}
