//! LoRA adapters and control vectors: what llama.cpp makes of them, bit for bit, wherever experts are.

use std::path::Path;

use hobbit::options::{AdapterOptions, Repack, ScaledFile};
use hobbit::{Model, ModelOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::ExpertCache;

use super::cases::{Case, Source};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture::{self, adapters};
use super::script::Row;
use super::stock::{Placed, Stock};

const SIZES: [ExpertCache; 3] = [ExpertCache::Percent(100.0), ExpertCache::Percent(25.0), ExpertCache::Bytes(0)];

/// Matrices that llama.cpp multiplies with an adapter in mind, in every architecture that has them.
const CHANGED: [&str; 9] =
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_shexp", "ffn_up", "ffn_down", "ffn_gate"];

fn is_changed(name: &str) -> bool {
    let stem =
        name.strip_prefix("blk.").and_then(|name| name.strip_suffix(".weight")).and_then(|name| name.split_once('.'));
    stem.is_some_and(|(_, stem)| CHANGED.contains(&stem)) || name == "output.weight"
}

/// What is wrong with a case, one message per setting; empty when every logit is llama.cpp's and the adapter changes some.
pub fn check(case: &Case) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let path = fixture::write(dir.path(), spec);
    let lora = adapters::lora(&path, dir.path().join("lora.gguf"), 3, is_changed);
    let n_layer = Gguf::open(&path).expect("it was just written");
    let n_layer =
        n_layer.metadata.get_u64(&format!("{}.block_count", n_layer.architecture())).expect("a model has layers");
    let vector = adapters::control_vector(&path, dir.path().join("vector.gguf"), 1..=n_layer as u32 - 1);
    let settings = [
        AdapterOptions { lora: vec![ScaledFile { path: lora.clone(), scale: 0.7 }], ..AdapterOptions::default() },
        AdapterOptions {
            lora: vec![ScaledFile::whole(&lora), ScaledFile { path: lora, scale: -0.3 }],
            control_vectors: vec![ScaledFile { path: vector, scale: 0.5 }],
            control_layers: Some((1, 2)),
        },
    ];
    let mut failures = Vec::new();
    for settings in settings {
        if let Err(error) = check_setting(case, &path, &settings) {
            failures.push(format!("{}, {settings:?}: {error}", case.name));
        }
    }
    failures
}

fn check_setting(case: &Case, path: &Path, adapters: &AdapterOptions) -> Result<(), String> {
    let n_batch = case.options.n_batch as usize;
    let stock = |adapters: AdapterOptions| {
        let mut stock = Stock::open_placed(path, &case.options, &Placed { adapters, ..Placed::default() })?;
        case.script.run(&mut stock, n_batch)
    };
    let (expected, plain) = (stock(adapters.clone())?, stock(AdapterOptions::default())?);
    if same(&expected, &plain).is_ok() {
        return Err("the adapters change nothing".to_owned());
    }
    for expert_cache in SIZES {
        let found = run(case, path, expert_cache, adapters)?;
        same(&expected, &found).map_err(|error| format!("{expert_cache:?}: {error}"))?;
    }
    Ok(())
}

fn run(case: &Case, path: &Path, expert_cache: ExpertCache, adapters: &AdapterOptions) -> Result<Vec<Row>, String> {
    let (budget, repack) = (BUDGET, Repack::Off);
    let options = ModelOptions { budget, repack, expert_cache, adapters: adapters.clone(), ..ModelOptions::default() };
    let model = Model::open(path, &options).map_err(|error| error.to_string())?;
    let session = model.session(&case.options).map_err(|error| error.to_string())?;
    case.script.run(&mut Hobbit::new(session), case.options.n_batch as usize)
}
