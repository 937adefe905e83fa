//! Graphs that a layer's experts take while tokens decode, and copies that only measure the link.

use std::path::Path;

use hobbit::options::CpuHelper;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, Session};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use lagging_device::{Device, Options};

use super::compare::{ALL, QUARTER, WAVES, options};
use super::fixture::write;
use super::overlap::{batch, chatter, measure, session_options, spec};
use super::{assert_sound, on, register};

/// Experts that a token uses in the one layer, each with three slices.
const N_USED: u64 = 4;
/// Graphs of a token before and after the layer's experts.
const OTHERS: u64 = 2;

fn session(path: &Path, device: &Device, cache: ExpertCache) -> Session {
    let caching = CachingOptions { policy: PolicyKind::Lru, fill: false, ..CachingOptions::default() };
    let device_options = DeviceOptions { cache, cpu_helper: CpuHelper::Auto, ..on(&[device]) };
    let options = ModelOptions { caching, device: device_options, ..options(ALL) };
    Model::open(path, &options).unwrap().session(&session_options()).unwrap()
}

/// Hits, experts copied, and graphs of experts, of each token of a text.
fn graphs(path: &Path, device: &Device, cache: ExpertCache) -> Vec<(u64, u64, u64)> {
    let mut session = session(path, device, cache);
    // Fills host memory, and measures copies and products.
    chatter(96).iter().for_each(|token| session.feed(&[*token]).unwrap());
    session.reset();
    let mut found = Vec::new();
    for (at, token) in chatter(24).iter().enumerate() {
        let before = session.stats().devices[0];
        let report = measure(device, || session.evaluate(&batch(at, &[*token])).unwrap());
        let own = session.stats().devices[0] - before;
        found.push((own.hits, own.misses - own.helper_experts, report.graph_computes - OTHERS));
    }
    found
}

#[test]
fn arriving_experts_take_two_submissions() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(16, 1, N_USED as u32));
    // As on graphics cards: products take a small part of the time of copies. The CPU is too slow to help.
    let slow = Options { host_bandwidth: 1e6, ..Options::default() };
    let device = register(Options { link_bandwidth: 1e9, compute_bandwidth: 4e10, ..slow.clone() });
    for cache in [WAVES, QUARTER] {
        let tokens = graphs(&path, &device, cache);
        for &(hits, copied, graphs) in &tokens {
            // Gates and ups before the host knows the experts, if the layer has slots; then those that arrive, with
            // the downs that are there, and the other downs.
            let early = u64::from(cache == QUARTER);
            let rest = if copied > 0 { 2 } else { 1 };
            assert_eq!(graphs, early + rest, "{cache:?}: {hits} hits, {copied} copied");
        }
        let (hits, copied) = tokens.iter().fold((0, 0), |(hits, copied), own| (hits + own.0, copied + own.1));
        assert!(copied > 0 && (hits > 0) == (cache == QUARTER));
    }
    // Where products take as long as copies, each slice is multiplied as it lands.
    let even = register(Options { link_bandwidth: 1e10, compute_bandwidth: 1e10, ..slow });
    assert!(graphs(&path, &even, WAVES).iter().all(|&own| own == (0, N_USED, 3 * N_USED)));
    assert_sound(&device);
    assert_sound(&even);
}

/// A CPU that is faster than the link computes every miss. The link is measured now and then, by one copy.
#[test]
fn the_link_is_probed_rarely() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(16, 1, N_USED as u32));
    let device =
        register(Options { link_bandwidth: 1e9, compute_bandwidth: 4e10, host_bandwidth: 4e10, ..Options::default() });
    let mut session = session(&path, &device, QUARTER);
    // The first text fills host memory, the second lets the costs settle.
    let mut before = session.stats().devices[0];
    for _ in 0..3 {
        session.reset();
        before = session.stats().devices[0];
        (0..256).for_each(|i| session.feed(&[3 + i * 37 % 500]).unwrap());
    }
    let own = session.stats().devices[0] - before;
    assert_sound(&device);
    let on_demand = own.uploads / 3 - own.promoted;
    assert_eq!((on_demand, own.misses - own.helper_experts), (1, 1), "{own:?}");
}
