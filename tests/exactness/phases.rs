//! Slots follow the phase: decoding tokens get the memory that only prompts need.

use std::cell::Cell;

use anyhow::Result;
use hobbit::options::{PrecisionOptions, Repack};
use hobbit::stats::{MemoryPlan, rss_bytes};
use hobbit::{BatchToken, Budget, ExpertCache, IoMode, Model, ModelOptions, OpenError, Session, SessionOptions};
use hobbit_core::plan::PlanError;
use hobbit_synth::Spec;

use super::HYBRID;
use crate::fixture::cases::{Case, all_architectures, case, part, recent};
use crate::fixture::compare::{Placed, QUARTER, Reference, assert_none, each, options, same};
use crate::fixture::script::{Evaluate, Script};
use crate::fixture::{in_own_process, least_budget};

/// A session, with the slots and the resident bytes after each batch.
struct Watched {
    session: Session,
    seen: Vec<(usize, u64, u64)>,
}

impl Watched {
    fn plan(&self) -> &MemoryPlan {
        &self.session.description().plan
    }

    fn slots(&self) -> u64 {
        self.session.stats().layers.iter().map(|layer| u64::from(layer.slots)).sum()
    }
}

impl Evaluate for Watched {
    fn n_vocab(&self) -> usize {
        Evaluate::n_vocab(&self.session)
    }

    fn evaluate(&mut self, batch: &[BatchToken]) -> Result<Vec<Vec<f32>>> {
        let rows = Evaluate::evaluate(&mut self.session, batch)?;
        self.seen.push((batch.len(), self.slots(), rss_bytes()));
        Ok(rows)
    }
}

/// 102 MiB of experts, so that llama.cpp cannot run the model alone, and wide ubatches with a large compute buffer.
fn wide_case() -> Case {
    let spec = Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff: 512, seed: 31, ..Spec::tiny("qwen3moe") };
    let case = case("qwen3moe", spec);
    let options = SessionOptions { n_batch: 2048, n_ubatch: 2048, n_ctx: 2048, ..case.options };
    Case { script: Script::Phases, options, ..case }
}

/// A session with about `more` bytes more than the least budget, and the budget. This process counts too, and what
/// earlier models leave with its allocator, so that the first answer may be too low.
fn tight(reference: &Reference, options: &ModelOptions, more: u64) -> (Watched, u64) {
    let options = ModelOptions { expects: reference.case.options.clone(), overcommit: true, ..options.clone() };
    let empty = ModelOptions { budget: Budget::Bytes(1 << 40), expert_cache: ExpertCache::Bytes(0), ..options.clone() };
    let session = Model::open(&reference.path, &empty).unwrap().session(&reference.case.options).unwrap();
    let mut budget = least_budget(&session.description().plan) + more;
    drop(session);
    for _ in 0..8 {
        let options = ModelOptions { budget: Budget::Bytes(budget), ..options.clone() };
        let opened = Model::open(&reference.path, &options);
        match opened.and_then(|model| model.session(&reference.case.options)) {
            Ok(session) => return (Watched { session, seen: Vec::new() }, budget),
            Err(OpenError::Plan(PlanError::TooSmall { minimum, .. })) => budget = minimum + more,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("{budget} bytes are too few although they were asked for");
}

#[cfg_attr(not(target_os = "linux"), ignore = "only Linux tells which pages of a buffer are in memory")]
#[test]
fn slots_grow_after_a_prompt_and_shrink_before_the_next() {
    if !in_own_process("exactness::phases::slots_grow_after_a_prompt_and_shrink_before_the_next") {
        return;
    }
    let case = wide_case();
    let reference = Reference::new(&case, &Placed::default());
    let (mut watched, budget) = tight(&reference, &options(ExpertCache::Auto), 16 << 20);
    same(&reference.expected, &case.run(&mut watched).unwrap()).unwrap();
    let plan = watched.plan().clone();
    let decode = plan.decode.clone().unwrap_or_else(|| panic!("no slots more: {plan}"));
    assert!(plan.n_slots + 8 < decode.n_slots, "{plan}");
    let mut n_decoded = 0;
    for &(n_tokens, slots, resident) in &watched.seen {
        // 64 tokens until the pages are given back, one more batch to see how many come back.
        let has_grown = n_tokens <= 16 && n_decoded >= 64;
        n_decoded = if n_tokens > 16 { 0 } else { n_decoded + n_tokens };
        let expected = match has_grown {
            true => decode.n_slots..=decode.n_slots,
            // A short prompt needs a part of the buffer, the first one, too.
            false => plan.n_slots + 1..=decode.n_slots - 1,
        };
        assert!(expected.contains(&slots), "{slots} slots, {expected:?} expected after {n_decoded} tokens");
        assert!(resident <= budget, "{resident} bytes are resident, {budget} are allowed");
    }
    let n_grown = watched.seen.iter().filter(|(_, slots, _)| *slots == decode.n_slots).count();
    assert_eq!(n_grown, 80 + 1 - 64 + 1, "20 steps and three batches of 16 are 64 tokens, too");
    let stats = watched.session.stats();
    assert!(stats.peak_rss_bytes <= budget, "{} bytes, {budget} are allowed", stats.peak_rss_bytes);

    // Two sessions have two compute buffers.
    let model = watched.session.model().clone();
    let mut second = Watched { session: model.session(&case.options).unwrap(), seen: Vec::new() };
    assert_eq!(second.slots(), plan.n_slots);
    same(&reference.expected, &case.run(&mut second).unwrap()).unwrap();
    assert!(second.seen.iter().all(|(_, slots, _)| *slots == plan.n_slots));
    drop(watched);
    let mut third = Watched { session: model.session(&case.options).unwrap(), seen: Vec::new() };
    drop(second);
    same(&reference.expected, &case.run(&mut third).unwrap()).unwrap();
    assert_eq!(third.slots(), decode.n_slots);
    // Half of them, whatever the phase.
    let half = model.set_host_cache(ExpertCache::Bytes(model.host_cache_bytes() / 2));
    assert!(half > 0 && third.slots() <= decode.n_slots / 2, "{} slots", third.slots());
    model.set_host_cache(ExpertCache::Auto);
    assert_eq!(third.slots(), decode.n_slots);

    // A new context has touched nothing of its buffer yet; a prompt of full width takes all of it.
    drop(third);
    let mut fourth = Watched { session: model.session(&case.options).unwrap(), seen: Vec::new() };
    assert_eq!(fourth.slots(), decode.n_slots);
    let token = |position| BatchToken { token: position % 200, position, sequence: 0, logits: true };
    fourth.evaluate(&(0..2040).map(token).collect::<Vec<_>>()).unwrap();
    assert!(fourth.seen[0].1 < plan.n_slots + 8, "{} slots after 2040 tokens", fourth.seen[0].1);
}

/// Recurrent states, latent attention, windows: no graph needs what a batch left in the compute buffer.
#[cfg_attr(not(target_os = "linux"), ignore = "only Linux tells which pages of a buffer are in memory")]
#[test]
fn no_architecture_needs_a_discarded_buffer() {
    if !in_own_process("exactness::phases::no_architecture_needs_a_discarded_buffer") {
        return;
    }
    let hybrid = all_architectures().into_iter().chain(recent()).filter(|case| HYBRID.contains(&case.name.as_str()));
    let plain = part(0, 6).into_iter().chain(recent().into_iter().step_by(4));
    let n_grown = Cell::new(0);
    each(hybrid.chain(plain), |case| {
        let wide = SessionOptions { n_batch: 2048, n_ubatch: 2048, n_ctx: 2048, ..case.options.clone() };
        let case = Case { script: Script::Phases, options: wide, ..case };
        let reference = Reference::new(&case, &Placed::default());
        // Any flag about reading keeps llama.cpp from running the model alone.
        let options = ModelOptions { io: IoMode::Buffered, repack: Repack::Off, ..options(ExpertCache::Auto) };
        let (mut watched, _) = tight(&reference, &options, 1 << 19);
        let result = case.run(&mut watched).and_then(|found| same(&reference.expected, &found));
        let n_slots = watched.plan().n_slots;
        n_grown.set(n_grown.get() + u32::from(watched.seen.iter().any(|(_, slots, _)| *slots > n_slots)));
        reference.failure("with slots that follow the phase", result).into_iter().collect()
    });
    assert!(n_grown.get() > 12, "slots followed the phase in {} architectures", n_grown.get());
}

#[test]
fn given_slots_and_repeatable_runs_stay() {
    if !in_own_process("exactness::phases::given_slots_and_repeatable_runs_stay") {
        return;
    }
    let case = wide_case();
    let reference = Reference::new(&case, &Placed::default());
    let deterministic = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
    let trace = reference.dir.path().join("trace");
    let auto = options(ExpertCache::Auto);
    let open = |cache| Model::open(&reference.path, &options(cache)).unwrap().session(&case.options).unwrap();
    let fixed = [
        Watched { session: open(QUARTER), seen: Vec::new() },
        tight(&reference, &ModelOptions { precision: deterministic, ..auto.clone() }, 16 << 20).0,
        tight(&reference, &ModelOptions { trace: Some(trace), ..auto }, 16 << 20).0,
    ];
    for mut watched in fixed {
        same(&reference.expected, &case.run(&mut watched).unwrap()).unwrap();
        let n_slots = watched.plan().n_slots;
        assert!(watched.plan().decode.is_none() && !watched.plan().is_fully_resident(), "{}", watched.plan());
        assert!(watched.seen.iter().all(|(_, slots, _)| *slots == n_slots), "{}", watched.plan());
    }
}

/// 2,600 rows of 7 KiB are more than 16 MiB.
#[test]
fn many_rows_of_one_expert_are_multiplied_in_parts() {
    if !in_own_process("exactness::phases::many_rows_of_one_expert_are_multiplied_in_parts") {
        return;
    }
    let spec = Spec { layers: 1, experts: 2, topk: 2, embd: 1024, ff: 768, seed: 32, ..Spec::tiny("qwen3moe") };
    let case = case("qwen3moe", spec);
    let session = SessionOptions { n_batch: 2624, n_ubatch: 2624, n_ctx: 2624, ..case.options };
    let case = Case { script: Script::Long, options: session, ..case };
    let reference = Reference::new(&case, &Placed::default());
    let checks = [ExpertCache::Bytes(0), ExpertCache::Bytes(3 << 20)]
        .map(|cache| reference.failure(format!("with a cache of {cache:?}"), reference.check(&options(cache), None)));
    assert_none(checks.into_iter().flatten());
}

/// Whatever widths were chosen, logits are those of a session of fixed width that gets the same ubatches.
#[cfg_attr(not(target_os = "linux"), ignore = "only Linux tells which pages of a buffer are in memory")]
#[test]
fn wide_prompts_have_the_bits_of_their_width() {
    if !in_own_process("exactness::phases::wide_prompts_have_the_bits_of_their_width") {
        return;
    }
    let case = wide_case();
    let options_of = |n_ubatch: u32| SessionOptions { n_batch: 256, n_ubatch, ..case.options.clone() };
    let auto = Case { options: SessionOptions { n_ubatch_max: 1024, ..options_of(256) }, ..wide_case() };
    let reference = Reference::new(&auto, &Placed::default());
    let (mut watched, budget) = tight(&reference, &options(ExpertCache::Auto), 24 << 20);
    let tokens: Vec<i32> = (0..1900).map(|at| at % 200).collect();
    let mut ends = Vec::new();
    watched.session.feed_with(&tokens, |done| ends.push(done)).unwrap();
    let report = watched.session.stats().prompt_width.expect("the width is chosen");
    assert!(report.usual == 256 && ends[0] >= 256, "{report:?}, {ends:?}");
    assert!(report.widest > 256 && report.costs.is_some_and(|costs| costs.bytes_per_pass > 0.0), "{report:?}");
    assert!(rss_bytes() <= budget);

    let mut fixed = Model::open(&reference.path, &options(QUARTER)).unwrap().session(&case.options).unwrap();
    let (mut begin, mut last) = (0, 0);
    for end in ends {
        let is_last = |at: usize| at + 1 == tokens.len();
        let entry = |at| BatchToken { token: tokens[at], position: at as i32, sequence: 0, logits: is_last(at) };
        fixed.evaluate(&(begin..end).map(entry).collect::<Vec<_>>()).unwrap();
        (begin, last) = (end, end - begin - 1);
    }
    let logits = |session: &Session| session.logits(last).expect("the last token's").to_vec();
    assert_eq!(logits(&watched.session), logits(&fixed), "in ubatches up to {:?}", report.last);

    // A fixed width, and runs that repeat, keep it.
    let deterministic = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
    let repeats = ModelOptions { precision: deterministic, ..options(QUARTER) };
    for (model, session) in [(options(QUARTER), options_of(256)), (repeats, auto.options.clone())] {
        let session = Model::open(&reference.path, &model).unwrap().session(&session).unwrap();
        assert_eq!((session.stats().prompt_width, session.context().n_ubatch()), (None, 256));
    }
}
