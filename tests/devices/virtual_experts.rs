//! Virtual experts where a device computes: what the host holds, and what the device holds, is what tokens use.

use std::sync::Arc;

use gguf_tools::synth::Spec;
use hobbit::options::{RoutingOptions, VirtualExperts, VirtualUpdate};
use hobbit::{BatchToken, DeviceOptions, Model, ModelOptions, Session, SessionOptions};
use hobbit_core::plan::ExpertCache;
use hobbit_core::store::Store;
use lagging_device::{Device, Options, Order};

use super::check::{ALL, QUARTER};
use super::compare::BUDGET;
use super::fixture::{self, gate};
use super::places::named;

const HALF: ExpertCache = ExpertCache::Percent(50.0);

fn options(device: &Device, host: ExpertCache, virtual_experts: VirtualExperts) -> ModelOptions {
    options_with(device, QUARTER, host, virtual_experts)
}

fn options_with(
    device: &Device,
    on_device: ExpertCache,
    host: ExpertCache,
    virtual_experts: VirtualExperts,
) -> ModelOptions {
    let virtual_update = VirtualUpdate::Tokens(1);
    ModelOptions {
        budget: BUDGET,
        expert_cache: host,
        device: DeviceOptions { cache: on_device, ..named(&[device]) },
        routing: RoutingOptions { virtual_experts, virtual_update, ..RoutingOptions::default() },
        ..ModelOptions::default()
    }
}

fn evaluate(session: &mut Session, positions: std::ops::Range<i32>) -> Vec<u32> {
    let entry = |position: i32| {
        let token = (position * 37) % 300 + 3 + position / 20;
        BatchToken { token, position, sequence: 0, logits: position == positions.end - 1 }
    };
    let batch: Vec<BatchToken> = positions.clone().map(entry).collect();
    session.evaluate(&batch).expect("nothing fails");
    session.logits(batch.len() - 1).expect("asked for").iter().map(|logit| logit.to_bits()).collect()
}

fn decode(session: &mut Session, positions: std::ops::Range<i32>) -> Vec<Vec<u32>> {
    positions.map(|position| evaluate(session, position..position + 1)).collect()
}

#[test]
fn tokens_use_what_host_and_device_hold() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = lagging_device::register(Options { memory: 1 << 30, order, ..Options::default() });
        fixture::quiet_llama_cpp();
        let dir = tempfile::tempdir().expect("a temporary directory");
        let spec = Spec { experts: 16, topk: 4, ff: 64, seed: 11, ..Spec::tiny("qwen3moe") };
        let path = fixture::write(dir.path(), &spec);
        let settings = SessionOptions { n_ctx: 512, threads: Some(1), ..SessionOptions::default() };
        let open = |options: &ModelOptions, held: &Arc<gate::Held>| {
            let held = Arc::clone(held);
            let wrap = move |inner| Arc::new(gate::Gate { inner, held: Arc::clone(&held) }) as Arc<dyn Store>;
            Model::open_with_store(&path, options, wrap).and_then(|model| model.session(&settings))
        };
        let held = Arc::default();
        let mut session = open(&options(&device, HALF, VirtualExperts::Auto), &held).expect("the model opens");
        evaluate(&mut session, 0..40);
        decode(&mut session, 40..60);
        let before = session.stats();
        assert_eq!(before.decode.rerouted.refused, 0, "every choice is explained");
        let at_last = gate::OpenAtLast(Arc::clone(&held));
        // A token that waited for a read would wait for ever.
        held.close();
        decode(&mut session, 60..100);
        let after = session.stats();
        let waited = |stats: &hobbit::Stats| (stats.decode.io_wait_seconds, stats.decode.misses);
        assert_eq!(waited(&after), waited(&before));
        assert!(after.decode.rerouted.uses > before.decode.rerouted.uses, "{:?}", after.decode);
        held.open();
        let replaced = |session: &Session| session.stats().virtual_experts.expect("they are virtual").replacements;
        let (n, mut position) = (replaced(&session), 100);
        while replaced(&session) == n {
            decode(&mut session, position..position + 1);
            position += 1;
            assert!(position < 512, "nobody is replaced");
        }
        drop((at_last, session));
        // Where host or device have a place for each, nothing gives way.
        for (on_device, host) in [(QUARTER, ALL), (ALL, ExpertCache::Auto)] {
            let run = |virtual_experts| {
                let options = options_with(&device, on_device, host, virtual_experts);
                let mut session = open(&options, &Arc::default()).expect("the model opens");
                (evaluate(&mut session, 0..40), decode(&mut session, 40..60))
            };
            assert!(run(VirtualExperts::Auto) == run(VirtualExperts::Off), "{order:?} {on_device:?} {host:?}");
        }
        let none = open(&options(&device, ExpertCache::Bytes(0), VirtualExperts::Auto), &Arc::default());
        let refused = none.map(drop).expect_err("there is nothing to go by").to_string();
        assert!(refused.contains("the expert cache has no room"), "{refused}");
        assert_eq!(device.faults(), Vec::<String>::new());
    }
}
