//! `--cache-state` with a device: its slots are filled again, and it computes the same.

use gguf_tools::synth::Spec;
use hobbit::options::DeviceChoice;
use hobbit::stats::WarmStart;
use hobbit::{DeviceOptions, Model, ModelOptions, SessionOptions};
use hobbit_core::cache::CacheState;
use lagging_device::{Options, Order};

use super::check::QUARTER;
use super::compare::BUDGET;
use super::fixture;

#[test]
fn what_was_on_the_device_is_there_again() {
    let device = lagging_device::register(Options { memory: 1 << 30, order: Order::CopiesLate, ..Options::default() });
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { experts: 32, layers: 3, seed: 11, ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    let run = |state: Option<&str>| {
        let devices = DeviceChoice::Named(vec![device.name().into()]);
        let options = ModelOptions {
            budget: BUDGET,
            expert_cache: QUARTER,
            device: DeviceOptions { devices, cache: QUARTER, headroom: 0.0, ..DeviceOptions::default() },
            cache_state: state.map(|name| dir.path().join(name)),
            ..ModelOptions::default()
        };
        let model = Model::open(&path, &options).unwrap();
        let options = SessionOptions { n_ctx: 256, threads: Some(1), ..SessionOptions::default() };
        let mut session = model.session(&options).unwrap();
        let mut logits = Vec::new();
        for token in 10..50 {
            session.feed(&[token]).unwrap();
            logits.extend_from_slice(session.logits(0).unwrap());
        }
        (logits, session.warm_start(), session.stats().devices[0])
    };
    let (expected, none, cold) = run(Some("state"));
    assert_eq!(none, None);
    let (logits, restored, warm) = run(Some("state"));
    assert!(logits == expected);
    let WarmStart { saved, experts, .. } = restored.unwrap();
    assert_eq!((saved, experts), (48, 48), "a quarter of 3 layers of 32 here, and there");
    assert!(run(None).0 == expected);

    // A hostile file: every resident twice, strangers among them, and each cache again.
    let path_of_state = dir.path().join("state");
    let mut hostile = CacheState::from_bytes(&std::fs::read(&path_of_state).unwrap()).unwrap();
    for saved in &mut hostile.caches {
        let mut twice: Vec<_> = saved.residents.iter().flat_map(|version| [*version; 2]).collect();
        let mut stranger = saved.residents[0];
        stranger.expert.index = u16::MAX;
        twice.extend([stranger, saved.residents[0]]);
        saved.residents = twice;
    }
    hostile.caches.extend(hostile.caches.clone());
    assert_eq!(hostile.caches.len(), 4);
    std::fs::write(dir.path().join("hostile"), hostile.to_bytes()).unwrap();
    let (logits, restored, _) = run(Some("hostile"));
    assert!(logits == expected);
    assert_eq!(restored.unwrap().experts, 48);
    let faults = device.faults();
    assert!(faults.is_empty(), "{faults:?}");
    assert!(warm.hits > cold.hits, "{cold:?}, {warm:?}");
}
