//! LoRA adapters and control vectors give llama.cpp's logits at every cache size.

use anyhow::{Result, ensure};
use hobbit::ModelOptions;
use hobbit::options::{AdapterOptions, Repack, ScaledFile};
use hobbit_core::gguf::Gguf;

use crate::fixture::adapters::{control_vector, lora};
use crate::fixture::cases::Case;
use crate::fixture::compare::{ALL, NONE, Placed, QUARTER, Reference, options, same};

/// Matrices that llama.cpp multiplies with an adapter in mind, in every architecture that has them.
const CHANGED: [&str; 9] =
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_shexp", "ffn_up", "ffn_down", "ffn_gate"];

fn is_changed(name: &str) -> bool {
    let inner = name.strip_prefix("blk.").and_then(|name| name.strip_suffix(".weight"));
    let stem = inner.and_then(|name| name.split_once('.'));
    stem.is_some_and(|(_, stem)| CHANGED.contains(&stem)) || name == "output.weight"
}

/// Messages about a case, one per setting; none if every logit is llama.cpp's and the adapter changes some.
pub fn check(case: &Case) -> Vec<String> {
    let reference = Reference::new(case, &Placed::default());
    let (path, dir) = (&reference.path, reference.dir.path());
    let adapter = lora(path, dir.join("lora.gguf"), 3, is_changed);
    let gguf = Gguf::open(path).expect("it was just written");
    let n_layer = gguf.metadata.get_u64(&format!("{}.block_count", gguf.architecture())).expect("it has layers");
    let vector = control_vector(path, dir.join("vector.gguf"), 1..=n_layer as u32 - 1);
    let scaled = |scale| ScaledFile { path: adapter.clone(), scale };
    let settings = [
        AdapterOptions { lora: vec![scaled(0.7)], ..AdapterOptions::default() },
        AdapterOptions {
            lora: vec![ScaledFile::whole(&adapter), scaled(-0.3)],
            control_vectors: vec![ScaledFile { path: vector, scale: 0.5 }],
            control_layers: Some((1, 2)),
        },
    ];
    let check = |adapters: &AdapterOptions| -> Result<()> {
        let expected = case.stock(path, &Placed { adapters: adapters.clone(), ..Placed::default() });
        ensure!(same(&expected, &reference.expected).is_err(), "the adapters change nothing");
        for size in [ALL, QUARTER, NONE] {
            let options = ModelOptions { repack: Repack::Off, adapters: adapters.clone(), ..options(size) };
            same(&expected, &case.hobbit(path, &options, None)?.0)?;
        }
        Ok(())
    };
    settings.iter().filter_map(|setting| reference.failure(format!("{setting:?}"), check(setting))).collect()
}
