//! What the CPU helper computes beside a device with other arithmetic: no farther from the device's own results than the
//! CPU's are, and close to them (the tolerance that README states).

use std::path::Path;

use hobbit::options::{CpuHelper, DeviceChoice};
use hobbit::{DeviceOptions, Model, ModelOptions, SessionOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::Options;

use super::check::WAVES;
use super::compare::BUDGET;
use super::fixture;

/// Mean KL divergence of the next token's distribution, in nats.
const KL_MAX: f64 = 1e-3;
const N_TOKENS: usize = 64;

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit - max) - sum.ln()).collect()
}

fn divergence(from: &[Vec<f32>], to: &[Vec<f32>]) -> f64 {
    let of_row = |(p, q): (&Vec<f32>, &Vec<f32>)| -> f64 {
        let (p, q) = (log_softmax(p), log_softmax(q));
        p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    from.iter().zip(to).map(of_row).sum::<f64>() / from.len() as f64
}

/// Logits of a text that is evaluated token by token, and experts that the helper computed.
fn run(devices: DeviceChoice, cpu_helper: CpuHelper) -> (Vec<Vec<f32>>, u64) {
    // Trained: close decisions of random routers flip with the last bit.
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let device = DeviceOptions { devices, headroom: 0.0, cache: WAVES, cpu_helper, ..DeviceOptions::default() };
    let expert_cache = ExpertCache::Percent(100.0);
    let options = ModelOptions { budget: BUDGET, expert_cache, device, ..ModelOptions::default() };
    let model = Model::open(&models.join("demo.gguf"), &options).unwrap();
    let options = SessionOptions { n_ctx: 512, threads: Some(1), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    let text = std::fs::read_to_string(models.join("demo-heldout-prose.txt")).unwrap();
    let tokens = model.tokenize(&text[..2048], true, false).unwrap();
    let logits = tokens[..N_TOKENS].chunks(1).map(|token| {
        session.feed(token).unwrap();
        session.logits(0).unwrap().to_vec()
    });
    let logits = logits.collect();
    (logits, session.stats().devices.first().map_or(0, |device| device.helper_experts))
}

#[test]
fn is_as_close_as_the_two_backends_are() {
    let device = lagging_device::register(Options { memory: 1 << 30, rounds_products: true, ..Options::default() });
    fixture::quiet_llama_cpp();
    let named = || DeviceChoice::Named(vec![device.name().into()]);
    let (on_cpu, _) = run(DeviceChoice::None, CpuHelper::Off);
    let (on_device, _) = run(named(), CpuHelper::Off);
    let (both, helped) = run(named(), CpuHelper::On);
    assert!(helped > 0);
    let (apart, found) = (divergence(&on_device, &on_cpu), divergence(&on_device, &both));
    println!("KL divergence of the two backends {apart:.2e}, with the helper {found:.2e}");
    assert!(apart > 0.0 && found > 0.0, "the two backends do not differ");
    assert!(apart < KL_MAX && found < KL_MAX && found <= 2.0 * apart, "{found}, backends {apart} apart");
}
