//! Any bytes as an expert pack: no panic, no huge allocation, and what is accepted lies within the file.
//! `fuzz/run pack_reader`; packs made by `gguf-tools pack` are good seeds.

#![no_main]

use hobbit_core::expert::Precision;
use hobbit_core::gguf::Stored;
use hobbit_core::pack::Pack;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    // A pack is read piece by piece, from a file; each process of the fuzzer has its own.
    let path = std::env::temp_dir().join(format!("hobbit-fuzzed-pack-{}", std::process::id()));
    std::fs::write(&path, input).expect("the fuzzer's own file");
    match Pack::open(&path) {
        Ok(pack) => {
            let catalog = &pack.catalog;
            for layer in &catalog.layers {
                let of = |precision| (0..layer.n_expert).filter_map(move |index| layer.source(index, precision));
                for source in Precision::ALL.into_iter().flat_map(of) {
                    for slice in &source.slices {
                        let end =
                            slice.extent.offset.checked_add(slice.extent.len).expect("an extent that was accepted");
                        assert!(end <= input.len() as u64);
                        if let Stored::Both { low } = slice.stored {
                            let end = low.offset.checked_add(low.len).expect("an extent that was accepted");
                            assert!(end <= input.len() as u64);
                        }
                    }
                }
            }
            let _ = pack.plain.virtual_file();
        }
        Err(error) => assert!(error.to_string().contains("hobbit-fuzzed-pack"), "{error}"),
    }
});
