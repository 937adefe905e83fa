//! Any bytes as a GGUF header: no panic, no huge allocation, and what is accepted lies within the file.
//! `fuzz/run gguf_reader`

#![no_main]

use std::path::Path;

use hobbit_core::gguf::Gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    // The fuzzer chooses the file's length too: the first byte is its logarithm, the rest the header.
    let Some((shift, bytes)) = input.split_first() else { return };
    let file_len = (bytes.len() as u64).max(1 << (shift & 63));
    match Gguf::parse_header(bytes, file_len, Path::new("fuzzed.gguf")) {
        Ok((header, metadata)) => {
            assert!(header.alignment.is_power_of_two());
            assert!(header.data_start >= header.header_len());
            for t in &header.tensors {
                assert!(t.extent.offset >= header.data_start && t.extent.end() <= file_len);
            }
            for key in metadata.keys() {
                let _ =
                    (metadata.get_u64(key), metadata.get_f32(key), metadata.get_str(key), metadata.get_u64_arr(key));
            }
        }
        Err(e) => assert!(e.to_string().starts_with("fuzzed.gguf: ")),
    }
});
