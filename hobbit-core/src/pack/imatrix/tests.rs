//! Importance matrices as llama-quantize understands them, and damaged ones.

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
    // One entry named "output", as llama-imatrix wrote it before GGUF.
    let old = [&1i32.to_le_bytes()[..], &6i32.to_le_bytes(), b"output"].concat();
    for bytes in [&old[..], b"", b"a text file"] {
        let message = message(bytes);
        assert!(message.contains("convert") && message.contains("llama-imatrix --in-file "), "{message}");
        assert!(message.ends_with("-o imatrix.gguf"), "{message}");
    }
    assert!(Imatrix::open(&std::env::temp_dir()).unwrap_err().to_string().contains("expected a regular file"));
}

#[test]
fn a_truncated_file_is_an_error_wherever_it_ends() {
    let whole = gguf("imatrix", &[("a.in_sum2", [8, 1], &[1.0; 8]), ("a.counts", [1, 1], &[1.0])]);
    let end = whole.len() - 28; // padding of the last tensor is not needed
    for len in 0..4 {
        assert!(matches!(open(&whole[..len]), Err(ImatrixError::NotGguf { .. })), "{len} bytes");
    }
    for len in 4..end {
        assert!(matches!(open(&whole[..len]), Err(ImatrixError::Gguf(_))), "{len} bytes");
    }
}
