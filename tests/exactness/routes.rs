//! Recorded routes: hobbit's seam and plain llama.cpp's evaluation callback send tokens the same way.

use std::path::Path;

use gguf_tools::synth::Spec;
use hobbit::options::{Repack, RouteOptions};
use hobbit::{Model, ModelOptions};
use hobbit_core::gguf::Gguf;
use hobbit_core::trace::{Header, Layer, LayerRecord, ModelDescription, Phase, TraceWriter};

use super::cases::{Case, Source, Variant};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::stock::Stock;

/// Tokens of the recording: fewer than are evaluated, so that they come again.
const N_TOKENS: usize = 50;

/// A recording of no particular way through a model of this shape.
pub fn record(model: &Path, to: &Path) {
    let gguf = Gguf::open(model).unwrap();
    let n_used = gguf.metadata.get_u64(&format!("{}.expert_used_count", gguf.architecture())).unwrap() as u16;
    let layer = |number: u16, n_expert: u16| Layer {
        layer: number,
        n_expert,
        n_used,
        bytes_high: 1,
        bytes_low: 0,
        bytes_rest: 0,
        slots_high: 0,
        slots_low: 0,
    };
    let layers: Vec<Layer> =
        gguf.experts().unwrap().layers.iter().map(|at| layer(at.layer, at.n_expert as u16)).collect();
    let model = ModelDescription { name: "toy".into(), architecture: "toy".into(), layers: layers.clone() };
    let mut writer = TraceWriter::new(Vec::new(), &Header { model, ..Header::default() }).unwrap();
    for token in 0..N_TOKENS {
        for layer in &layers {
            let mut record = LayerRecord::new(layer.layer, n_used);
            let chosen = (0..n_used).map(|rank| (rank + 3 * token as u16 + layer.layer) % layer.n_expert);
            let weights = (0..n_used).map(|rank| 0.5 / f32::from(1 + rank));
            record.push_token(&chosen.collect::<Vec<_>>(), &weights.collect::<Vec<_>>(), None, 0);
            writer.layer(&record).unwrap();
        }
        writer.batch(Phase::Decode, 1, 0.0).unwrap();
    }
    std::fs::write(to, writer.finish().unwrap()).unwrap();
}

/// What is wrong with a case, one message per variant.
pub fn check(case: &Case, variants: &[Variant]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let path = fixture::write(dir.path(), spec);
    let trace = dir.path().join("routes.trace");
    record(&path, &trace);
    let routes = RouteOptions { trace, recall: 0.5 };
    let n_batch = case.options.n_batch as usize;
    let stock = |routes: Option<&RouteOptions>| {
        case.script.run(&mut Stock::open_on_routes(&path, &case.options, routes).unwrap(), n_batch).unwrap()
    };
    let expected = stock(Some(&routes));
    let mut wrong = Vec::new();
    if same(&stock(None), &expected).is_ok() {
        wrong.push(format!("{}: plain llama.cpp follows no route", case.name));
    }
    for &variant in variants {
        let mut options = ModelOptions {
            budget: BUDGET,
            repack: Repack::Off,
            expert_cache: variant.expert_cache,
            ..ModelOptions::default()
        };
        options.routes = Some(routes.clone());
        options.caching.predictor = variant.ahead.unwrap_or_default();
        let model = Model::open(&path, &options).unwrap();
        let mut hobbit = Hobbit::new(model.session(&case.options).unwrap());
        let found = case.script.run(&mut hobbit, n_batch);
        if let Err(error) = found.and_then(|found| same(&expected, &found)) {
            wrong.push(format!("{}, {variant:?}: {error}", case.name));
        }
    }
    wrong
}

/// Where the choice is used before the seam, nothing is followed half.
pub fn used_before_the_seam(arch: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny(arch));
    let trace = dir.path().join("routes.trace");
    record(&path, &trace);
    let options = ModelOptions { routes: Some(RouteOptions { trace, recall: 0.8 }), ..ModelOptions::default() };
    let error = Model::open(&path, &options).err().expect("refused").to_string();
    assert!(error.contains("cannot be followed") && error.contains(arch), "{error}");
}

/// A recording of another shape is refused by its name.
pub fn another_shape() {
    let dir = tempfile::tempdir().unwrap();
    let small = fixture::write(dir.path(), &Spec::tiny("qwen3moe"));
    let trace = dir.path().join("routes.trace");
    record(&small, &trace);
    let wide = dir.path().join("wide");
    std::fs::create_dir(&wide).unwrap();
    let spec = Spec::tiny("qwen3moe");
    let wide = fixture::write(&wide, &Spec { topk: spec.topk + 1, ..spec });
    let options = ModelOptions { routes: Some(RouteOptions { trace, recall: 0.8 }), ..ModelOptions::default() };
    let error = Model::open(&wide, &options).err().expect("refused").to_string();
    assert!(error.contains("routes.trace: these routes cannot be followed: layer 0 used"), "{error}");
}
