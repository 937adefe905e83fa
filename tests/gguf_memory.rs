//! No length found in a file decides an allocation: damaged headers are read under a cap on the whole process's heap.

use std::alloc;
use std::path::Path;

use cap::Cap;
use hobbit_core::gguf::{GgmlType, Gguf, HeaderBuilder, Value};

/// Far below any length written below, far above what the test itself needs. Beyond it, allocation fails and the
/// process aborts.
const HEAP_BYTES_MAX: usize = 32 << 20;

#[global_allocator]
static HEAP: Cap<alloc::System> = Cap::new(alloc::System, usize::MAX);

fn header() -> Vec<u8> {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap();
    header.key("strings", Value::array(["one", "two"])).unwrap();
    header.key("numbers", Value::array([1u8, 2, 3])).unwrap();
    header.tensor("blk.0.ffn_up_exps.weight", GgmlType::Q8_0, &[32, 2, 2]).unwrap();
    let mut bytes = Vec::new();
    header.finish().write(&mut bytes, |t, out| out.write_all(&vec![0; t.extent.len as usize])).unwrap();
    bytes
}

#[test]
fn lengths_in_a_file_do_not_decide_allocations() {
    HEAP.set_limit(HEAP.allocated() + HEAP_BYTES_MAX).unwrap();
    let bytes = header();
    let name = Path::new("model.gguf");
    for at in 8..bytes.len() - 8 {
        for value in [1u64 << 62, 1 << 40, 1 << 30, 1 << 26, 1 << 24, 1 << 20, 1 << 16] {
            let mut mutant = bytes.clone();
            mutant[at..at + 8].copy_from_slice(&value.to_le_bytes());
            // As long as it is, and as a sparse file in which every length would fit.
            for file_len in [mutant.len() as u64, 1 << 60] {
                let _ = Gguf::parse_header(&mutant, file_len, name);
            }
        }
    }
    // An array of bytes as long as the file: read, but not turned into values.
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("bytes", Value::array(std::iter::repeat_n(7u8, 4 << 20))).unwrap();
    let bytes = header.finish().header;
    let (_, metadata) = Gguf::parse_header(&bytes, bytes.len() as u64, name).unwrap();
    assert_eq!(metadata.get_arr_len("bytes"), Some(4 << 20));
}
