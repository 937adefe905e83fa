//! Virtual experts where a device computes: tokens use the experts that the device holds.

use std::sync::Arc;

use hobbit::options::{RoutingOptions, VirtualExperts, VirtualUpdate};
use hobbit::{BatchToken, DeviceOptions, Model, ModelOptions, Session};
use hobbit_core::plan::ExpertCache;
use hobbit_synth::Spec;
use lagging_device::Order;

use super::compare::{ALL, HALF, NONE, QUARTER, options};
use super::fixture::script::bits;
use super::fixture::stores::{Gate, Held, OpenAtLast};
use super::fixture::{one_thread, write};
use super::{assert_sound, on, ordered};

fn evaluate(session: &mut Session, positions: std::ops::Range<i32>) -> Vec<u32> {
    let entry = |position: i32| {
        let token = (position * 37) % 300 + 3 + position / 20;
        BatchToken { token, position, sequence: 0, logits: position == positions.end - 1 }
    };
    let batch: Vec<BatchToken> = positions.clone().map(entry).collect();
    session.evaluate(&batch).expect("nothing fails");
    bits(session.logits(batch.len() - 1).expect("asked for"))
}

fn decode(session: &mut Session, positions: std::ops::Range<i32>) -> Vec<Vec<u32>> {
    positions.map(|position| evaluate(session, position..position + 1)).collect()
}

#[test]
fn tokens_use_resident_experts_as_virtual_ones() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = ordered(order);
        let dir = tempfile::tempdir().expect("a temporary directory");
        let spec = Spec { experts: 16, topk: 4, ff: 64, seed: 11, ..Spec::tiny("qwen3moe") };
        let path = write(dir.path(), &spec);
        let open = |cache, host, virtual_experts, held: &Arc<Held>| {
            let virtual_update = VirtualUpdate::Tokens(1);
            let options = ModelOptions {
                device: DeviceOptions { cache, ..on(&[&device]) },
                routing: RoutingOptions { virtual_experts, virtual_update, ..RoutingOptions::default() },
                ..options(host)
            };
            Model::open_with_store(&path, &options, Gate::wrap(held)).and_then(|model| model.session(&one_thread(512)))
        };
        let held = Arc::default();
        let mut session = open(QUARTER, HALF, VirtualExperts::Auto, &held).expect("the model opens");
        evaluate(&mut session, 0..40);
        decode(&mut session, 40..60);
        let before = session.stats();
        assert_eq!(before.decode.rerouted.refused, 0, "every choice is explained");
        let at_last = OpenAtLast(Arc::clone(&held));
        // A token that waited for a read would wait for ever.
        held.close();
        decode(&mut session, 60..100);
        let after = session.stats();
        let waited = |stats: &hobbit::Stats| (stats.decode.io_wait_seconds, stats.decode.misses);
        assert_eq!(waited(&after), waited(&before));
        assert!(after.decode.rerouted.uses > before.decode.rerouted.uses, "{:?}", after.decode);
        held.open();
        let replaced = |session: &Session| session.stats().virtual_experts.expect("they are virtual").replacements;
        let n = replaced(&session);
        let last = (100..512).find(|&position| {
            decode(&mut session, position..position + 1);
            replaced(&session) > n
        });
        assert!(last.is_some(), "no expert is replaced");
        drop((at_last, session));
        // The host has every expert: the device's are the present ones, and change while the link is idle.
        let mut session = open(QUARTER, ALL, VirtualExperts::Auto, &Arc::default()).expect("the model opens");
        // The prompt leaves the experts of its one token; those of the others, again and again, are then wanted more.
        let entry = |token| move |position| BatchToken { token, position, sequence: 0, logits: true };
        session.evaluate(&(0..40).map(entry(5)).collect::<Vec<_>>()).expect("nothing fails");
        for (position, token) in (40..).zip([9, 77, 130, 201].into_iter().flat_map(|token| [token; 60])) {
            session.evaluate(&[entry(token)(position)]).expect("nothing fails");
        }
        let stats = session.stats();
        assert!(stats.decode.rerouted.uses > 0 && stats.devices[0].promoted > 0, "{:?}", stats.devices);
        drop(session);
        // Where the device has a slot for each, nothing gives way.
        let run = |virtual_experts| {
            let mut session = open(ALL, ExpertCache::Auto, virtual_experts, &Arc::default()).expect("the model opens");
            (evaluate(&mut session, 0..40), decode(&mut session, 40..60))
        };
        assert!(run(VirtualExperts::Auto) == run(VirtualExperts::Off), "{order:?}");
        let none = open(QUARTER, NONE, VirtualExperts::Auto, &Arc::default());
        let refused = none.map(drop).expect_err("no expert is resident").to_string();
        assert!(refused.contains("the expert cache has no room"), "{refused}");
        assert_sound(&device);
    }
}
