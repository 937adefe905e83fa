//! Every logit that hobbit computes is, bit for bit, llama.cpp's.
//!
//! A model is evaluated twice in this process: by llama.cpp as it is, which holds all experts in memory, and by hobbit,
//! with all experts cached, a quarter of them, and none (every product streams through one staging slot). Both get the
//! same batches, and every row of logits is compared: bit-identity holds only at equal batch width and equal kernels,
//! so like is compared with like (`use_extra_bufts` off, one thread, same context settings).

mod adapters;
mod packs;
mod phases;
mod sharing;
mod variants;

use hobbit::options::{Repack, RouteOptions};
use hobbit::{Model, ModelOptions};
use hobbit_core::cache::Allocation;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_core::store::IoMode;
use hobbit_synth::{Format, Spec};

use crate::fixture::cases::{self, Case, all_architectures, part};
use crate::fixture::compare::{ALL, HALF, NONE, Placed, QUARTER, Reference, assert_none, each, options};
use crate::fixture::{self, ends, optional, routing};
use packs::Thorough;
use variants::{Variant, check, check_altered};

/// Architectures with recurrent layers.
const HYBRID: [&str; 10] = [
    "lfm2moe",
    "granitehybrid",
    "qwen3next",
    "qwen35moe",
    "nemotron_h_moe",
    "jamba",
    "kimi-linear",
    "minimax-01",
    "bailingmoe3",
    "kimi-k3",
];

fn check_all(cases: impl IntoIterator<Item = Case>, variants: &[Variant]) {
    each(cases, |case| check(&case, variants));
}

/// Tests that compare the logits of cases at every cache size.
macro_rules! at_all_sizes {
    ($($name:ident: $cases:expr;)*) => { $(
        #[test]
        fn $name() {
            check_all($cases, &Variant::SIZES);
        }
    )* };
}

// Two halves of architectures, so that two cores share them.
at_all_sizes! {
    architectures_of_the_first_half: part(0, 2);
    architectures_of_the_second_half: part(1, 2);
    recent_architectures: cases::recent();
    recent_architectures_with_other_layouts: cases::recent_layouts();
    recurrent_states_of_several_sequences: cases::recurrent_sequences();
    expert_types: cases::expert_types();
    router_and_tensor_layouts: cases::layouts();
    context_settings: cases::settings();
    several_sequences_in_one_batch: cases::two_sequences();
    the_bundled_models: cases::bundled();
    two_threads: cases::two_threads();
    every_subset_of_scales: optional::scales();
}

#[test]
fn random_subsets_of_optional_tensors() {
    let sizes = [Variant::ALL, Variant::HALF, Variant::QUARTER, Variant::ONE_SLOT];
    for (seed, shuffle) in [(0, None), (10_000, Some(1))] {
        check_all(optional::random(seed, 50), &sizes.map(|size| Variant { shuffle, ..size }));
    }
}

#[test]
fn lora_adapters_and_control_vectors() {
    // llama.cpp multiplies the matrices of kimi-k3 without regard to adapters.
    let recent = cases::recent().into_iter().filter(|case| case.name != "kimi-k3");
    let optional = optional::scales().step_by(5);
    each(all_architectures().into_iter().chain(recent).chain(optional), |case| adapters::check(&case));
}

#[test]
fn reads_ahead_change_no_logit() {
    use PredictorKind::{CrossLayer, PathTable, StackedGate};
    for (at, predictor) in [StackedGate, CrossLayer, PathTable].into_iter().enumerate() {
        let with = |size| Variant { ahead: Some(predictor), shuffle: Some(at as u64), ..size };
        let cases = part(at, 3).into_iter().chain(cases::recent().into_iter().skip(at).step_by(3));
        check_all(cases, &[Variant::QUARTER, Variant::HALF, Variant::ONE_SLOT].map(with));
    }
}

#[test]
fn slots_by_layer() {
    let kinds = [1, 2, 4].map(|layers| Allocation::ShallowFirst { layers });
    for (at, slots) in kinds.into_iter().enumerate() {
        let with = |size| Variant { slots, shuffle: Some(at as u64), ..size };
        check_all(part(at, 3), &[Variant::HALF, Variant::QUARTER].map(with));
        // Pools of their own for layers of other types, and layers without experts between others.
        let layouts = cases::expert_types().into_iter().chain(cases::layouts());
        check_all(layouts.skip(at).step_by(3), &[with(Variant::HALF)]);
        check_all([cases::plain()], &[Variant::ALL, Variant::ONE_SLOT].map(with));
    }
    let ahead = Some(PredictorKind::StackedGate);
    check_all([cases::plain()], &kinds.map(|slots| Variant { slots, ahead, ..Variant::HALF }));
}

/// Where a result that lies between two products is read elsewhere, they are computed in ggml's order.
#[test]
fn layers_that_are_computed_in_order_are_counted() {
    fixture::quiet_llama_cpp();
    let scaled = optional::scales().find(|case| case.name.ends_with("without [\"ffn_gate_exps.scale\"]"));
    for (case, in_order) in [(scaled.expect("one without the gate's scale"), true), (cases::plain(), false)] {
        let options = ModelOptions { repack: Repack::Off, ..options(QUARTER) };
        let stats = Reference::new(&case, &Placed::default()).check(&options, None).unwrap().stats();
        assert_eq!(stats.decode.in_order > 0, in_order, "{}: {:?}", case.name, stats.decode);
    }
}

fn check_ends(cases: impl IntoIterator<Item = Case>) {
    let sizes = [ExpertCache::Percent(60.0), QUARTER, NONE].map(|size| (ExpertCache::Auto, size));
    each(cases, |case| ends::check(&case, &[], &sizes, Repack::Ordinary));
}

#[test]
fn dynamic_precision_at_its_ends_in_the_first_half_of_architectures() {
    check_ends(part(0, 2));
}

#[test]
fn dynamic_precision_at_its_ends_in_the_second_half_of_architectures() {
    check_ends(part(1, 2));
}

#[test]
fn dynamic_precision_at_its_ends_with_other_layouts() {
    check_ends(cases::layouts().into_iter().map(Case::brief).chain(cases::recent_q8_0()));
}

/// Cases, and whether they are checked in all ways: what an architecture adds lies outside of its experts.
fn packed() -> impl Iterator<Item = (Case, Thorough)> {
    let some = part(0, 4).into_iter().chain(cases::layouts()).map(Case::brief).chain([cases::plain()]);
    let others = (1..4).flat_map(|at| part(at, 4)).chain(cases::expert_types()).map(Case::brief);
    some.map(|case| (case, Thorough(true)))
        .chain(others.chain(cases::recent_q8_0()).map(|case| (case, Thorough(false))))
}

#[test]
fn full_packs() {
    fixture::quiet_llama_cpp();
    assert_none(packed().flat_map(|(case, thorough)| packs::check(&case, thorough)));
}

#[test]
fn nested_packs() {
    fixture::quiet_llama_cpp();
    let is_q8_0 = |case: &Case| {
        let spec = case.spec();
        spec.types == [Format::Q8_0] && spec.down_types.iter().all(|dtype| *dtype == Format::Q8_0)
    };
    let cases: Vec<_> = packed().filter(|(case, _)| is_q8_0(case)).collect();
    assert!(cases.len() > 5);
    assert_none(cases.into_iter().flat_map(|(case, thorough)| packs::check_nested(&case, thorough)));
}

#[test]
fn packs_of_experts_of_unequal_types() {
    each(cases::two_sequences().into_iter().chain([cases::plain()]), |case| packs::check_widths(&case));
}

/// Weights in the order of bytes that ggml multiplies fastest: in slots of every number, staged, and out of a pack.
#[test]
fn rearranged_experts() {
    each(cases::rearranged(), |case| packs::check_rearranged(&case));
}

/// Weights that are no experts have llama.cpp's order for this CPU, and experts the file's.
#[test]
fn ordinary_weights_are_rearranged_alone() {
    each(cases::rearranged(), |case| {
        let reference = Reference::new(&case, &Placed { repack: Repack::Ordinary, ..Placed::default() });
        let failed = |size| {
            let options = ModelOptions { repack: Repack::Ordinary, ..options(size) };
            reference.failure(format!("{size:?}"), reference.check(&options, None))
        };
        [ALL, QUARTER, NONE].into_iter().filter_map(failed).collect()
    });
}

/// Without a flag, types that gain are rearranged where at least half of the experts have slots.
#[test]
fn experts_that_are_rearranged_by_default() {
    let gains = |case: &Case| case.name.contains("mxfp4") || case.name.ends_with("rearranged q4_0");
    let cases: Vec<Case> = cases::rearranged().into_iter().filter(gains).collect();
    assert_eq!(cases.len(), 2);
    each(cases, |case| packs::check_rearranged_by_default(&case));
}

#[test]
fn rearranged_experts_in_low_precision() {
    let sizes = [ExpertCache::Percent(60.0), QUARTER].map(|size| (ExpertCache::Auto, size));
    each(cases::rearranged(), |case| ends::check(&case, &[], &sizes, Repack::On));
}

#[test]
fn decode_batches_of_2_to_16_sequences() {
    let ahead = [PredictorKind::StackedGate, PredictorKind::CrossLayer];
    let ahead = ahead.map(|kind| Variant { ahead: Some(kind), ..Variant::HALF });
    let shuffled = Variant { shuffle: Some(3), ..Variant::QUARTER };
    check_all(cases::many_sequences(), &[&Variant::SIZES[..], &ahead, &[shuffled]].concat());
}

/// The comparison notices one altered weight.
#[test]
fn an_altered_weight_is_noticed() {
    fixture::quiet_llama_cpp();
    let noticed = check_altered(&cases::plain(), &Variant::SIZES);
    assert_eq!(noticed.len(), Variant::SIZES.len(), "{noticed:?}");
    assert!(noticed.iter().all(|message| message.contains("rows of logits differ")), "{noticed:?}");
}

/// Reads may be answered in any order, by either engine.
#[test]
fn any_order_of_answers() {
    let beside_the_models = tempfile::NamedTempFile::new().expect("a temporary directory");
    fixture::reads_directly("exactness: any order of answers", beside_the_models.path());
    for io in [IoMode::Buffered, IoMode::Direct] {
        for seed in 0..2 {
            check_all([cases::plain()], &Variant::SIZES.map(|size| Variant { io, shuffle: Some(seed), ..size }));
        }
    }
}

/// Recorded routes through every architecture, at every cache size, with guesses that are wrong half of the time.
#[test]
fn recorded_routes() {
    let used_early = ["llama4", "grovemoe"];
    let mut all = [ALL, QUARTER, NONE, HALF].map(|size| ModelOptions { repack: Repack::Off, ..options(size) });
    all[3].caching.predictor = Some(PredictorKind::StackedGate);
    let cases = all_architectures().into_iter().chain(cases::two_sequences()).chain(cases::recent_q8_0());
    let cases = cases.filter(|case| !used_early.contains(&case.name.as_str()));
    each(cases, |case| routing::check_recorded(&case, &[], &all));
    // Where the choice is used before the seam, and where the recording has another shape, routes are refused.
    let dir = tempfile::tempdir().unwrap();
    let refusal = |model: &std::path::Path, routes: RouteOptions| {
        let options = ModelOptions { routes: Some(routes), ..ModelOptions::default() };
        Model::open(model, &options).err().expect("refused").to_string()
    };
    for arch in used_early {
        let path = fixture::write(dir.path(), &Spec::tiny(arch));
        let error = refusal(&path, routing::record(&path, dir.path()));
        assert!(error.contains("cannot be followed") && error.contains(arch), "{error}");
    }
    let small = Spec::tiny("qwen3moe");
    let routes = routing::record(&fixture::write(dir.path(), &small), dir.path());
    let wide = fixture::write(dir.path(), &Spec { topk: small.topk + 1, ..small });
    let error = refusal(&wide, routes);
    assert!(error.contains("routes.trace: these routes cannot be followed: layer 0 used"), "{error}");
}

fn check_rerouted(cases: impl IntoIterator<Item = Case>) {
    let used_early = ["llama4", "grovemoe"];
    let is_used_early = |case: &Case| used_early.iter().any(|name| case.name.starts_with(name));
    let (refused, cases): (Vec<_>, Vec<_>) = cases.into_iter().partition(is_used_early);
    let sizes = [HALF, QUARTER].map(|size| (ExpertCache::Auto, size));
    each(cases, |case| routing::check_rerouted(&case, &[], &sizes));
    for case in refused {
        let arch = &case.spec().arch;
        let dir = tempfile::tempdir().unwrap();
        let path = fixture::write(dir.path(), &Spec::tiny(arch));
        let open = |routing| Model::open(&path, &ModelOptions { routing, ..ModelOptions::default() });
        let error = open(routing::strongest()).err().expect("refused").to_string();
        assert!(error.contains("cannot be sent") && error.contains(arch.as_str()), "{error}");
        open(hobbit::options::RoutingOptions { drop: 0.5, ..Default::default() }).expect("--drop works");
    }
}

#[test]
fn rerouted_tokens_in_the_first_half_of_architectures() {
    check_rerouted(part(0, 2));
}

#[test]
fn rerouted_tokens_in_the_second_half_of_architectures() {
    check_rerouted(part(1, 2));
}

#[test]
fn rerouted_tokens_with_other_layouts() {
    check_rerouted(cases::layouts().into_iter().chain(cases::two_sequences()).chain(cases::recent_q8_0()));
}

#[test]
fn sessions_side_by_side() {
    sharing::sessions_side_by_side(&cases::plain());
}

#[test]
fn dynamic_sessions_side_by_side() {
    let scaled = cases::layouts().into_iter().filter(|case| case.name.contains("scales per expert"));
    scaled.chain([cases::plain()]).for_each(|case| sharing::dynamic_sessions_side_by_side(&case));
}

#[test]
fn an_interrupted_batch() {
    sharing::an_interrupted_batch(&cases::plain());
}
