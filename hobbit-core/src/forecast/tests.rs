//! Properties of every forecast, and comparisons with measurements.

use std::path::Path;

use super::known::UNTRAINED;
use super::locality::LayerRoutes;
use super::steady::tokens_simulated;
use super::*;
use crate::cache::policy::PolicyKind;
use crate::gguf::{Gguf, HeaderBuilder};
use crate::random::SplitMix64;
use crate::sim::{Budget, Config, Eviction, Memory, replay};
use crate::units::{GIB, MIB};

/// A model with these numbers of layers, experts, and experts per token, `[256, 512]` each, and a few ordinary weights.
fn shape(n_layers: u32, n_expert: u64, n_used: u32) -> Shape {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.expert_used_count", n_used).unwrap();
    for (key, value) in [("block_count", n_layers), ("embedding_length", 512), ("attention.head_count", 8)] {
        header.key(&format!("toy.{key}"), value).unwrap();
    }
    header.tensor("token_embd.weight", GgmlType::Q8_0, &[512, 1000]).unwrap();
    header.tensor("output.weight", GgmlType::Q8_0, &[512, 1000]).unwrap();
    for layer in 0..n_layers {
        header.tensor(&format!("blk.{layer}.attn_q.weight"), GgmlType::Q8_0, &[512, 512]).unwrap();
        for (slice, ne0, ne1) in [("gate", 512, 256), ("up", 512, 256), ("down", 256, 512)] {
            let name = format!("blk.{layer}.ffn_{slice}_exps.weight");
            header.tensor(&name, GgmlType::Q8_0, &[ne0, ne1, n_expert]).unwrap();
        }
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), header.finish().header).unwrap();
    Shape::of(&Gguf::open_partial(file.path()).unwrap()).unwrap()
}

fn host(memory: u64) -> Host {
    let cpu = Cpu { memory: 4e10, ..Cpu::default() };
    Host { memory, disk: 2e9, cpu, device: None }
}

const TASK: Task = Task { n_ctx: 256, n_prompt: 64 };

fn results() -> serde_json::Value {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/results");
    let paths = std::fs::read_dir(all).unwrap().map(|host| host.unwrap().path().join("policies-demo.json"));
    let found = paths.into_iter().find(|path| path.exists()).unwrap();
    serde_json::from_slice(&std::fs::read(found).unwrap()).unwrap()
}

#[test]
fn a_shape_is_what_the_header_says() {
    let shape = shape(4, 16, 2);
    let expert = 3 * 256 * 512 * 34 / 32;
    assert_eq!((shape.layers.len(), shape.n_expert(), shape.n_expert_used), (4, 16, 2));
    assert_eq!((shape.expert_bytes, shape.layers[0].expert_bytes), (4 * 16 * expert, expert));
    assert_eq!(shape.per_token.experts, TypeBytes::from([(GgmlType::Q8_0, 4 * 2 * expert)]));
    // The other rows of the embeddings are not used.
    let ordinary = (1000 * 512 + 4 * 512 * 512) * 34 / 32;
    assert_eq!(shape.per_token.ordinary, TypeBytes::from([(GgmlType::Q8_0, ordinary)]));
    assert_eq!(shape.n_parameters, 2 * 1000 * 512 + 4 * 512 * 512 + 4 * 16 * 3 * 256 * 512);
    assert_eq!(shape.per_token.n_parameters, 1000 * 512 + 4 * 512 * 512 + 4 * 2 * 3 * 256 * 512);
    // Eight heads of 64, keys and values, F16.
    assert_eq!(shape.per_token.kv_bytes, 4 * 8 * (64 + 64) * 2);
}

#[test]
fn absurd_headers_are_refused_or_survived() {
    let shape = |experts: u64, embd: u64, used: u32, n_layers: u32| {
        let mut header = HeaderBuilder::new(32).unwrap();
        header.key("general.architecture", "toy").unwrap().key("toy.expert_used_count", used).unwrap();
        header.key("toy.embedding_length", embd).unwrap().key("toy.attention.head_count", 0u32).unwrap();
        header.key("toy.block_count", u64::MAX).unwrap().key("toy.attention.key_length", u64::MAX).unwrap();
        for (slice, layer) in
            ["up", "down"].into_iter().flat_map(|slice| (0..n_layers).map(move |layer| (slice, layer)))
        {
            header.tensor(&format!("blk.{layer}.ffn_{slice}_exps.weight"), GgmlType::F32, &[32, 32, experts]).unwrap();
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), header.finish().header).unwrap();
        Shape::of(&Gguf::open_partial(file.path()).unwrap())
    };
    for (experts, used, n_layers, what) in [
        (65_535, 1, 1, "experts in a layer"),
        (8, 1, 1025, "layers with experts"),
        (1024, u32::MAX, 17, "uses of experts per token"),
    ] {
        let error = shape(experts, 32, used, n_layers).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("fetch it again"), "{error}");
    }
    assert!(matches!(shape(8, 32, 0, 1), Err(ShapeError::Used { .. })));
    for (embd, used) in [(u64::MAX, u32::MAX), (0, 1)] {
        let shape = shape(8, embd, used, 2).unwrap();
        let refused = forecast(&shape, &host(u64::MAX / 4), &TASK, &Expectation::of(8));
        assert!(refused.is_err() || embd == 0, "{refused:?}");
    }
}

#[test]
fn more_of_anything_is_never_slower() {
    let shape = shape(4, 64, 4);
    let expectation = Expectation::of(64);
    let speed = |host: &Host| expected_speed(&shape, host, &TASK, &expectation).unwrap().1.tokens_per_second;
    let by = |hosts: Vec<Host>| hosts.iter().map(speed).collect::<Vec<_>>();
    let memory = by((0..12).map(|step| host(120 * MIB + step * 8 * MIB)).collect());
    let disk = by((1..8).map(|n| Host { disk: f64::from(n) * 5e8, ..host(150 * MIB) }).collect());
    let processor = by((1..8)
        .map(|n| Host { cpu: Cpu { memory: f64::from(n) * 1e10, ..Cpu::default() }, ..host(150 * MIB) })
        .collect());
    for (what, speeds) in [("memory", memory), ("disk", disk), ("processor", processor)] {
        assert!(
            speeds.is_sorted_by(|a, b| *b >= *a * 0.999) && speeds[0] < speeds[speeds.len() - 1],
            "{what}: {speeds:?}"
        );
    }
}

#[test]
fn a_model_that_fits_reads_nothing() {
    let shape = shape(4, 16, 2);
    let forecast = forecast(&shape, &host(8 * GIB), &TASK, &Expectation::of(16)).unwrap();
    assert!(forecast.is_passthrough && forecast.plan.is_none());
    assert_eq!((forecast.expected.bytes_read, forecast.expected.hit_rate, forecast.share), (0.0, 1.0, 1.0));
    assert_eq!(forecast.expected, forecast.random);
    assert_eq!(forecast.expected.limit(), Limit::Products);
    assert!((forecast.expected.efficiency() - 1.0).abs() < 1e-9, "{}", forecast.expected.efficiency());
}

#[test]
fn too_little_is_refused_or_told() {
    // One token uses more experts than fit into the compute buffer.
    let shape = shape(32, 64, 8);
    let refused = forecast(&shape, &host(16 * MIB), &TASK, &Expectation::of(64)).unwrap_err();
    let ForecastError::Plan(error @ PlanError::TooSmall { minimum, .. }) = refused else { panic!("{refused}") };
    assert!(error.to_string().contains("needs at least"), "{error}");
    let least = forecast(&shape, &host(minimum), &TASK, &Expectation::of(64)).unwrap();
    let warning = least.plan.unwrap().warning.unwrap();
    assert!(
        warning.n_slots < warning.n_cycle && least.expected.hit_rate < 0.2,
        "{warning} {}",
        least.expected.hit_rate
    );
    let bad = Host { disk: 0.0, ..host(GIB) };
    assert!(matches!(forecast(&shape, &bad, &TASK, &Expectation::of(64)), Err(ForecastError::Rate { .. })));
    let bad = Host { cpu: Cpu { memory: f64::NAN, ..Cpu::default() }, ..host(GIB) };
    assert!(forecast(&shape, &bad, &TASK, &Expectation::of(64)).is_err());
}

#[test]
fn a_gpu_that_holds_the_experts_used_most_is_not_slower() {
    let shape = shape(4, 64, 4);
    let expectation = Expectation::of(64);
    let without = forecast(&shape, &host(150 * MIB), &TASK, &expectation).unwrap();
    let device = Some(Device { memory: 200 * MIB, bandwidth: 1e12, link: None });
    let with = forecast(&shape, &Host { device, ..host(150 * MIB) }, &TASK, &expectation).unwrap();
    assert!(with.device.is_some() && with.expected.products_seconds < without.expected.products_seconds);
    let device = Some(Device { memory: MIB, bandwidth: 1e12, link: None });
    let left = forecast(&shape, &Host { device, ..host(150 * MIB) }, &TASK, &expectation).unwrap();
    assert_eq!((left.device, left.expected), (None, without.expected));
}

/// A link matters only where a copy and the product on the GPU are sooner than the product on the CPU.
#[test]
fn missing_experts_take_the_sooner_way() {
    let shape = shape(4, 64, 4);
    let with = |link| {
        let device = Some(Device { memory: 120 * MIB, bandwidth: 1e12, link });
        let cpu = Cpu { memory: 4e10, by_type: BTreeMap::from([(GgmlType::Q8_0, 1e10)]), operations: None };
        let host = Host { cpu, device, disk: 1e12, ..host(150 * MIB) };
        forecast(&shape, &host, &TASK, &Expectation::of(64))
    };
    let [none, slow, fast] = [None, Some(1e8), Some(1e12)].map(|link| with(link).unwrap());
    assert_eq!((none.expected, none.first_token), (slow.expected, slow.first_token));
    assert!(fast.expected.products_seconds < none.expected.products_seconds, "{:?} {:?}", fast.expected, none.expected);
    assert!(fast.first_token.products_seconds < none.first_token.products_seconds, "{fast:?}");
    assert!(with(Some(0.0)).is_err());
}

#[test]
fn slots_of_the_gpu_and_of_the_host_both_count() {
    let shape = shape(4, 64, 4);
    let expectation = Expectation::of(64);
    let with = |memory, gpu: u64| {
        let device = Some(Device { memory: gpu, bandwidth: 1e12, link: None }).filter(|_| gpu > 0);
        expected_speed(&shape, &Host { device, ..host(memory) }, &TASK, &expectation).unwrap()
    };
    // As many slots on the GPU as on the host, and more.
    let (_, alone) = with(120 * MIB, 0);
    let by_gpu: Vec<_> = (4..14).map(|step| with(120 * MIB, step * 16 * MIB)).collect();
    assert!(by_gpu[0].1.bytes_read < 0.9 * alone.bytes_read, "{alone:?} {by_gpu:?}");
    assert!(by_gpu.is_sorted_by(|(_, a), (_, b)| b.bytes_read <= a.bytes_read), "{by_gpu:?}");
    assert!(by_gpu.is_sorted_by(|(a, _), (b, _)| a <= b), "{by_gpu:?}");
    let (share, all) = by_gpu[by_gpu.len() - 1];
    assert_eq!((share, all.bytes_read, all.hit_rate), (1.0, 0.0, 1.0), "a slot for every expert");
}

/// Both memories begin with contents as after many tokens.
#[test]
fn a_warm_start_beside_a_gpu_is_steady() {
    let shape = shape(2, 64, 4);
    let curve = Expectation::of(64).expected;
    let rooms = Rooms { plan: None, device: None, slots: vec![16; 2], device_slots: vec![16; 2] };
    let products = Products::of(&shape, &host(GIB), &rooms, 0);
    let bytes = |start| run(&shape, &rooms, &curve, &products, 2e9, start).bytes_read;
    let (warm, long) = (bytes(Start::Warm), bytes(Start::Cold { n_prompt: 0, n_decoded: 4000 }));
    assert!((warm / long - 1.0).abs() < 0.15, "{warm} {long}");
}

#[test]
fn the_better_the_locality_the_faster() {
    let shape = shape(4, 128, 4);
    let forecast = forecast(&shape, &host(130 * MIB), &TASK, &Expectation::of(128)).unwrap();
    let order = [forecast.random, forecast.low, forecast.expected, forecast.high, forecast.optimum];
    assert!(order.is_sorted_by(|a, b| a.tokens_per_second <= b.tokens_per_second), "{order:?}");
    assert!(forecast.first_token.prompt_seconds >= forecast.first_token.reading_seconds);
}

#[test]
fn curves_lie_between_nothing_and_everything() {
    let curve = Locality::new([(0.25, 0.5), (0.5, 0.4), (0.75, 1.5)]);
    for (share, hit) in
        [(0.0, 0.0), (0.125, 0.25), (0.25, 0.5), (0.5, 0.5), (0.75, 1.0), (1.0, 1.0), (2.0, 1.0), (-1.0, 0.0)]
    {
        assert_eq!(curve.hit(share), hit, "{share}");
    }
    assert_eq!(Locality::random().hit(0.3), 0.3);
}

#[test]
fn drawn_routes_have_the_locality_they_were_drawn_from() {
    let shape = shape(3, 64, 4);
    let curve = Expectation::of(64).expected;
    let drawn = routes(&shape, &curve, 1200);
    let lru = Config { eviction: Eviction::Policy(PolicyKind::Lru), ..Config::recorded(&drawn).unwrap() };
    for share in [0.0625, 0.125, 0.25, 0.5, 0.75] {
        let config = Config { memory: Memory { budget: Budget::Percent(100.0 * share), ..lru.memory }, ..lru.clone() };
        let found = replay(&drawn, &config, &mut |_, _, _| {}).unwrap().decode.hit_rate().unwrap();
        assert!((found - curve.hit(share)).abs() < 0.03, "{share}: {found} {}", curve.hit(share));
    }
}

#[test]
fn a_token_draws_different_experts_whatever_the_curve() {
    let mut random = SplitMix64::new(1);
    for curve in [Locality::random(), Locality::new([(0.01, 0.99)]), Locality::new([(0.9, 0.01)])] {
        for (n_expert, n_used) in [(1, 1), (2, 2), (8, 2), (64, 64), (384, 8)] {
            let mut layer = LayerRoutes::new(n_expert, n_used, &curve, &mut random);
            for _ in 0..50 {
                let mut chosen = Vec::new();
                layer.token(&mut random, &mut chosen);
                chosen.sort_unstable();
                chosen.dedup();
                assert_eq!(chosen.len(), n_used as usize, "{n_expert} {n_used}");
            }
        }
    }
}

/// `benches/policies/run.sh` makes the file.
#[test]
fn curves_of_the_demo_model_are_the_recorded_ones() {
    let results = results();
    for known in TRAINED.iter().filter(|known| known.n_expert < 128).chain(&UNTRAINED[1..]) {
        let traces = results["traces"].as_array().unwrap();
        let figures = &traces.iter().find(|trace| trace["trace"] == known.name).unwrap()["figures"];
        for (share, hit, optimum) in known.points {
            for (policy, expected) in [("learned", hit), ("belady", optimum)] {
                let is_it = |figure: &&serde_json::Value| {
                    let budget = figure["budget"].as_str().unwrap().trim_end_matches('%').parse::<f64>().unwrap();
                    // Records may use the former name.
                    let name =
                        if figure["policy"] == "foresight" { "learned" } else { figure["policy"].as_str().unwrap() };
                    name == policy && budget == 100.0 * share
                };
                let found = figures.as_array().unwrap().iter().find(is_it).unwrap()["hit_rate"].as_f64().unwrap();
                assert!((found - expected).abs() < 1e-4, "{} {policy} {share}: {found}", known.name);
            }
        }
    }
}

#[test]
fn unrecorded_points_are_interpolated() {
    let [eight, between, many] = [8, 32, 128].map(|n| Expectation::of(n).expected.hit(0.25));
    assert!((eight - (0.3651 + 0.4392 + 0.3989) / 3.0).abs() < 1e-9, "{eight}");
    assert!((between - (eight + many) / 2.0).abs() < 1e-9, "{between}");
    assert_eq!((Expectation::of(2), Expectation::of(384)), (Expectation::of(8), Expectation::of(128)));
}

/// Time and memory do not grow with the model: 61 layers of 384 experts, 8 used.
#[test]
fn the_simulation_is_bounded() {
    for (n_layers, n_used) in [(1, 1), (61, 8), (512, 64), (u64::from(u16::MAX), 512)] {
        let uses = n_layers * n_used;
        assert!(tokens_simulated(uses) * uses <= USES_SIMULATED.max(8 * uses), "{uses}");
        assert!((8..=64).contains(&tokens_simulated(uses)));
    }
    let kimi = shape(61, 384, 8);
    let forecast = forecast(&kimi, &host(4 * GIB), &TASK, &Expectation::of(384)).unwrap();
    assert!(forecast.expected.tokens_per_second > forecast.random.tokens_per_second);
}
