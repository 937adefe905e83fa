//! Every logit hobbit computes is, bit for bit, llama.cpp's.
//!
//! A model is evaluated twice in this process: by llama.cpp as it is (`stock`), which holds all experts in memory, and
//! by hobbit, with all experts cached, a quarter of them, and none (every product streams through one staging slot).
//! Both get the same batches, and every row of logits is compared: bit-identity holds only at equal batch width and
//! equal kernels, so like is compared with like (`use_extra_bufts` off, one thread, same context settings).

mod adapters;
mod cases;
mod compare;
mod dynamic;
mod packs;
mod repacked;
mod rerouted;
mod routes;
mod script;
mod sharing;
mod stock;

#[path = "../fixture/mod.rs"]
mod fixture;

use cases::{Case, Variant};
use compare::{check, check_against_altered};
use gguf_tools::synth::Format;
use hobbit_core::cache::Allocation;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_core::store::IoMode;

fn check_all(cases: Vec<Case>, variants: &[Variant]) {
    fixture::quiet_llama_cpp();
    let failures: Vec<String> = cases.iter().flat_map(|case| check(case, variants)).collect();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

/// What is added to ordinary weights is llama.cpp's own affair.
#[test]
fn adapters() {
    fixture::quiet_llama_cpp();
    let failures: Vec<String> = cases::all_architectures().iter().flat_map(adapters::check).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Reads ahead decide what is read, and when; not what comes out.
#[test]
fn looking_ahead() {
    use PredictorKind::{CrossLayer, PathTable, Previous, StackedGate};
    for (part, predictor) in [StackedGate, CrossLayer, Previous, PathTable].into_iter().enumerate() {
        let sizes = [Variant::QUARTER, Variant::HALF, Variant::ONE_SLOT];
        let variants = sizes.map(|size| Variant { ahead: Some(predictor), shuffle: Some(part as u64), ..size });
        check_all(cases::all_architectures().into_iter().skip(part).step_by(4).collect(), &variants);
    }
}

/// Whoever has the slots, the others stream.
#[test]
fn slots_by_layer() {
    let kinds = [Allocation::ShallowFirst { layers: 1 }, Allocation::ByPenalty, Allocation::ShallowFirst { layers: 4 }];
    for (part, slots) in kinds.into_iter().enumerate() {
        let with = |size| Variant { slots, shuffle: Some(part as u64), ..size };
        let cases = cases::all_architectures().into_iter().skip(part).step_by(3);
        check_all(cases.collect(), &[with(Variant::HALF), with(Variant::QUARTER)]);
        // Pools of their own for layers of other types, and layers without experts between others.
        let cases = cases::expert_types().into_iter().chain(cases::layouts()).skip(part).step_by(3);
        check_all(cases.collect(), &[with(Variant::HALF)]);
        check_all(cases::plain(), &[with(Variant::ALL), with(Variant::ONE_SLOT)]);
    }
    let ahead = Some(PredictorKind::StackedGate);
    let variants = kinds.map(|slots| Variant { slots, ahead, ..Variant::HALF });
    check_all(cases::plain(), &variants);
}

// Two halves, so that two cores share them.
#[test]
fn architectures_of_the_first_half() {
    let cases = cases::all_architectures();
    check_all(cases.into_iter().step_by(2).collect(), &Variant::SIZES);
}

#[test]
fn architectures_of_the_second_half() {
    let cases = cases::all_architectures();
    check_all(cases.into_iter().skip(1).step_by(2).collect(), &Variant::SIZES);
}

fn check_ends(cases: &[Case]) {
    fixture::quiet_llama_cpp();
    let sizes = [ExpertCache::Percent(60.0), ExpertCache::Percent(25.0), ExpertCache::Bytes(0)];
    let ends = [dynamic::End::AllHigh, dynamic::End::AllLow];
    let failures: Vec<String> =
        cases.iter().flat_map(|case| ends.iter().flat_map(|&end| dynamic::check(case, end, &sizes))).collect();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn dynamic_precision_at_its_ends_in_the_first_half_of_architectures() {
    check_ends(&cases::all_architectures().into_iter().step_by(2).collect::<Vec<_>>());
}

#[test]
fn dynamic_precision_at_its_ends_in_the_second_half_of_architectures() {
    check_ends(&cases::all_architectures().into_iter().skip(1).step_by(2).collect::<Vec<_>>());
}

#[test]
fn dynamic_precision_at_its_ends_with_other_layouts() {
    let brief = |case: Case| Case { script: script::Script::Brief, ..case };
    check_ends(&cases::layouts().into_iter().map(brief).collect::<Vec<_>>());
}

#[test]
fn packs() {
    fixture::quiet_llama_cpp();
    let brief = |case: Case| Case { script: script::Script::Brief, ..case };
    let mut cases: Vec<Case> = cases::all_architectures().into_iter().step_by(4).map(brief).collect();
    cases.extend(cases::layouts().into_iter().map(brief));
    cases.extend(cases::plain());
    let failures: Vec<String> = cases.iter().flat_map(packs::check).collect();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn nested_packs() {
    fixture::quiet_llama_cpp();
    let brief = |case: Case| Case { script: script::Script::Brief, ..case };
    let is_q8_0 = |case: &Case| {
        let cases::Source::Synth(spec) = &case.model else { return false };
        spec.types == [Format::Q8_0] && spec.down_types.iter().all(|dtype| *dtype == Format::Q8_0)
    };
    let all = cases::all_architectures().into_iter().step_by(4).chain(cases::layouts()).map(brief);
    let cases: Vec<Case> = all.chain(cases::plain()).filter(is_q8_0).collect();
    assert!(cases.len() > 5);
    let failures: Vec<String> = cases.iter().flat_map(packs::check_nested).collect();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn packs_of_experts_of_unequal_types() {
    fixture::quiet_llama_cpp();
    let failures: Vec<String> =
        cases::plain().iter().chain(&cases::two_sequences()).flat_map(packs::check_widths).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn expert_types() {
    check_all(cases::expert_types(), &Variant::SIZES);
}

/// What llama.cpp computes of weights that are rearranged for the CPU: in slots of every number, staged, and out of a pack.
#[test]
fn rearranged_experts() {
    fixture::quiet_llama_cpp();
    let failures: Vec<String> = cases::rearranged().iter().flat_map(repacked::check).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Without a flag: types that gain, where at least half of them have slots.
#[test]
fn experts_that_are_rearranged_unasked() {
    fixture::quiet_llama_cpp();
    let cases = cases::rearranged();
    let gains = |case: &&Case| case.name.contains("mxfp4") || case.name.ends_with("rearranged q4_0");
    let cases: Vec<&Case> = cases.iter().filter(gains).collect();
    assert_eq!(cases.len(), 2);
    let failures: Vec<String> = cases.into_iter().flat_map(repacked::check_auto).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Low versions are rearranged like high ones.
#[test]
fn rearranged_experts_in_low_precision() {
    fixture::quiet_llama_cpp();
    let cases = cases::rearranged();
    let sizes = [ExpertCache::Percent(60.0), ExpertCache::Percent(25.0)];
    let of_end = |end: dynamic::End| cases.iter().flat_map(move |case| dynamic::check_rearranged(case, end, &sizes));
    let failures: Vec<String> = of_end(dynamic::End::AllLow).chain(of_end(dynamic::End::AllHigh)).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn router_and_tensor_layouts() {
    check_all(cases::layouts(), &Variant::SIZES);
}

#[test]
fn context_settings() {
    check_all(cases::settings(), &Variant::SIZES);
}

#[test]
fn several_sequences_in_one_batch() {
    check_all(cases::two_sequences(), &Variant::SIZES);
}

#[test]
fn decode_batches_of_2_to_16_sequences() {
    let ahead = [PredictorKind::StackedGate, PredictorKind::Previous];
    let ahead = ahead.map(|kind| Variant { ahead: Some(kind), ..Variant::HALF });
    let shuffled = Variant { shuffle: Some(3), ..Variant::QUARTER };
    check_all(cases::many_sequences(), &[&Variant::SIZES[..], &ahead, &[shuffled]].concat());
}

#[test]
fn the_bundled_models() {
    check_all(cases::bundled(), &Variant::SIZES);
}

#[test]
fn two_threads() {
    check_all(cases::two_threads(), &Variant::SIZES);
}

/// The comparison is worth something: one altered weight shows.
#[test]
fn an_altered_weight_is_noticed() {
    fixture::quiet_llama_cpp();
    for case in cases::plain() {
        let noticed = check_against_altered(&case, &Variant::SIZES);
        assert_eq!(noticed.len(), Variant::SIZES.len(), "{noticed:?}");
        assert!(noticed.iter().all(|message| message.contains("rows of logits differ")), "{noticed:?}");
    }
}

/// Reads may be answered in any order, by either engine.
#[test]
fn any_order_of_answers() {
    let beside_the_models = tempfile::NamedTempFile::new().expect("a temporary directory");
    fixture::reads_directly("exactness: any order of answers", beside_the_models.path());
    let variants: Vec<Variant> = [IoMode::Buffered, IoMode::Direct]
        .into_iter()
        .flat_map(|io| (0..2).flat_map(move |seed| Variant::SIZES.map(|v| Variant { io, shuffle: Some(seed), ..v })))
        .collect();
    check_all(cases::plain(), &variants);
}

#[test]
fn sessions_side_by_side() {
    fixture::quiet_llama_cpp();
    cases::plain().iter().for_each(sharing::sessions_side_by_side);
}

#[test]
fn dynamic_sessions_side_by_side() {
    fixture::quiet_llama_cpp();
    let scaled = cases::layouts().into_iter().filter(|case| case.name.contains("scales per expert"));
    scaled.chain(cases::plain()).for_each(|case| sharing::dynamic_sessions_side_by_side(&case));
}

/// Of every architecture, at every cache size, with guesses that are wrong half of the time.
#[test]
fn recorded_routes() {
    fixture::quiet_llama_cpp();
    let ahead = Variant { ahead: Some(PredictorKind::StackedGate), ..Variant::HALF };
    let [all, quarter, none] = Variant::SIZES;
    let (later, cases): (Vec<_>, Vec<_>) = cases::all_architectures()
        .into_iter()
        .chain(cases::two_sequences())
        .partition(|case| ["llama4", "grovemoe"].contains(&case.name.as_str()));
    assert_eq!(later.len(), 2);
    later.iter().for_each(|case| routes::used_before_the_seam(&case.name));
    let failures: Vec<String> =
        cases.into_iter().flat_map(|case| routes::check(&case, &[all, quarter, none, ahead])).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    routes::another_shape();
}

fn check_rerouted(cases: Vec<Case>) {
    fixture::quiet_llama_cpp();
    let (refused, cases): (Vec<_>, Vec<_>) = cases.into_iter().partition(|case| {
        ["llama4", "grovemoe", "gemma4", "smallthinker"].iter().any(|name| case.name.starts_with(name))
    });
    assert!(!cases.is_empty());
    refused.iter().for_each(|case| rerouted::used_before_the_seam(case.name.split(',').next().unwrap_or_default()));
    let sizes = [ExpertCache::Percent(50.0), ExpertCache::Percent(25.0)].map(|size| (ExpertCache::Auto, size));
    let failures: Vec<String> = cases.iter().flat_map(|case| rerouted::check(case, &[], &sizes)).collect();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn tokens_sent_elsewhere_in_the_first_half_of_architectures() {
    check_rerouted(cases::all_architectures().into_iter().step_by(2).collect());
}

#[test]
fn tokens_sent_elsewhere_in_the_second_half_of_architectures() {
    check_rerouted(cases::all_architectures().into_iter().skip(1).step_by(2).collect());
}

#[test]
fn tokens_sent_elsewhere_with_other_layouts() {
    check_rerouted(cases::layouts().into_iter().chain(cases::two_sequences()).collect());
}

#[test]
fn an_interrupted_batch() {
    fixture::quiet_llama_cpp();
    cases::plain().iter().for_each(sharing::an_interrupted_batch);
}
