//! Replays of a few tokens, and the time to the first one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::locality::{LayerRoutes, Locality};
use super::shape::{Shape, UBATCH_TOKENS};
use super::{EXPERT_SECONDS, FRESH_SECONDS_PER_BYTE, Host, OPERATIONS_PER_BYTE, Rooms, Task, USES_SIMULATED};
use crate::cache::policy::PolicyKind;
use crate::expert::{ExpertId, Version};
use crate::random::SplitMix64;
use crate::sim::{
    Batch, Budget, Compute, Config, Device, Event, Eviction, LinkModel, Memory, Recording, Slots, replay,
};
use crate::trace::{Header, Layer, LayerRecord, ModelDescription, Phase, ResidentsRecord};

const SEED: u64 = 15;
const TOKENS: (u64, u64) = (8, 64);

/// Times of a token's products, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Products {
    /// Time of a layer besides its experts; parts outside of layers are divided among them.
    pub layer_seconds: f64,
    /// Time of an expert that is not on the GPU: on the CPU or, if that is sooner, copied to the GPU and computed
    /// there.
    pub expert_seconds: f64,
    /// Time of an expert that is on the GPU.
    pub device_expert_seconds: f64,
    pub n_layers: u64,
    pub n_used: u64,
    /// Seconds of memory bandwidth per byte that arrives.
    pub arrival_seconds: f64,
}

impl Products {
    /// Times for a model on a machine with `n_past` tokens, whose keys and values are read for each new one.
    pub fn of(shape: &Shape, host: &Host, rooms: &Rooms, n_past: u64) -> Self {
        let past = shape.per_token.kv_bytes.saturating_mul(n_past) as f64;
        let n_layers = shape.layers.len().max(1) as u64;
        let n_used = shape
            .layers
            .iter()
            .map(|layer| u64::from(layer.n_expert.min(shape.n_expert_used.min(u16::MAX.into()) as u16)));
        let uses = n_used.sum::<u64>().max(1);
        let on_cpu = host.cpu.seconds(&shape.per_token.experts) / uses as f64 + EXPERT_SECONDS;
        let (ordinary, on_device, missing) = match (host.device, &rooms.device) {
            (Some(device), Some(_)) => {
                let seconds = |weights: &BTreeMap<_, u64>| weights.values().sum::<u64>() as f64 / device.bandwidth;
                let on_device = seconds(&shape.per_token.experts) / uses as f64 + EXPERT_SECONDS;
                let bytes = shape.per_token.experts.values().sum::<u64>() as f64 / uses as f64;
                let copied = device.link.map(|link| bytes / link.min(host.cpu.memory) + on_device);
                let ordinary = seconds(&shape.per_token.ordinary) + past / device.bandwidth;
                (ordinary, on_device.min(on_cpu), copied.unwrap_or(on_cpu).min(on_cpu))
            }
            _ => (host.cpu.seconds(&shape.per_token.ordinary) + past / host.cpu.memory, on_cpu, on_cpu),
        };
        Self {
            layer_seconds: ordinary / n_layers as f64,
            expert_seconds: missing,
            device_expert_seconds: on_device,
            n_layers,
            n_used: uses.div_ceil(n_layers),
            arrival_seconds: 1.0 / host.cpu.memory,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Warm,
    /// Empty slots and a prompt of `n_prompt` tokens; then `n_decoded` tokens are decoded and counted.
    Cold {
        /// Tokens, 0 for none.
        n_prompt: u32,
        /// Tokens, at least 1.
        n_decoded: u32,
    },
}

/// Averages per decoded token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Run {
    pub seconds: f64,
    /// The part of `seconds` without waits for reads and costs of their arrival.
    pub products_seconds: f64,
    pub bytes_read: f64,
    /// Share of needed experts that were in memory, the GPU's or the host's, 0..=1.
    pub hit_rate: f64,
}

/// Replays tokens with a locality, the slots of `rooms`, and a disk with this many bytes per second.
pub fn run(shape: &Shape, rooms: &Rooms, locality: &Locality, products: &Products, disk: f64, start: Start) -> Run {
    let per_token = (products.n_layers * products.n_used).max(1);
    let (n_prompt, n_decoded) = match start {
        Start::Warm => (0, tokens_simulated(per_token)),
        Start::Cold { n_prompt, n_decoded } => (n_prompt, n_decoded.max(1).into()),
    };
    let (recording, residents) = recording(shape, rooms, locality, start == Start::Warm, n_prompt, n_decoded);
    let slots = &rooms.slots;
    let device = rooms.device_slots.iter().any(|n| *n > 0).then(|| Device {
        slots: rooms.device_slots.clone(),
        residents,
        expert_seconds: products.device_expert_seconds,
    });
    let config = Config {
        eviction: Eviction::Policy(PolicyKind::Lru),
        memory: Memory { budget: Budget::Recorded, slots: Slots::default(), low_percent: 0.0 },
        link: LinkModel { bytes_per_second: disk, ..LinkModel::default() },
        compute: Compute::Given { layer_seconds: products.layer_seconds, expert_seconds: products.expert_seconds },
        device,
        ..Config::recorded(&recording).expect("the header has defaults")
    };
    let outcome = replay(&recording, &config, &mut |_, _, _| {}).expect("only low versions can be lacking");
    let decode = outcome.decode;
    let tokens = decode.tokens.max(1) as f64;
    // Experts of different sizes are used with equal frequency.
    let uses = (decode.hits + decode.n_misses()).max(1) as f64;
    let bytes_used: u64 = shape.per_token.experts.values().sum();
    let bytes_read = decode.n_misses() as f64 / uses * bytes_used as f64;
    // Slots left empty by the prompt are filled while tokens decode, needed or not.
    let fresh = match start {
        Start::Warm => 0.0,
        Start::Cold { .. } => {
            let of_slots: u64 =
                shape.layers.iter().zip(slots).map(|(layer, n)| layer.expert_bytes * u64::from(*n)).sum();
            let of_prompt = outcome.prefill.n_misses() as f64 * bytes_used as f64 / per_token as f64;
            (of_slots as f64 - of_prompt).max(0.0) / tokens
        }
    };
    Run {
        seconds: decode.seconds / tokens + bytes_read * products.arrival_seconds + fresh * FRESH_SECONDS_PER_BYTE,
        products_seconds: (decode.seconds - decode.stall_seconds) / tokens,
        bytes_read,
        hit_rate: decode.hits as f64 / uses,
    }
}

pub(super) fn tokens_simulated(uses_per_token: u64) -> u64 {
    (USES_SIMULATED / uses_per_token.max(1)).clamp(TOKENS.0, TOKENS.1)
}

/// The routes that [`run`] draws for [`Start::Cold`] without a prompt.
pub fn routes(shape: &Shape, locality: &Locality, n_decoded: u64) -> Recording {
    let slots = vec![0; shape.layers.len()];
    let rooms = Rooms { plan: None, device: None, device_slots: slots.clone(), slots };
    recording(shape, &rooms, locality, false, 0, n_decoded).0
}

/// Draws tokens, and what the GPU's slots hold before the first one.
pub(super) fn recording(
    shape: &Shape,
    rooms: &Rooms,
    locality: &Locality,
    is_warm: bool,
    n_prompt: u32,
    n_decoded: u64,
) -> (Recording, Vec<Version>) {
    let mut random = SplitMix64::new(SEED);
    let n_used = shape.n_expert_used;
    let mut routes: Vec<LayerRoutes> =
        shape.layers.iter().map(|layer| LayerRoutes::new(layer.n_expert, n_used, locality, &mut random)).collect();
    let layer = |(layer, slots): (&super::ExpertLayer, &u32)| Layer {
        layer: layer.layer,
        n_expert: layer.n_expert,
        n_used: n_used.min(layer.n_expert.into()) as u16, // at most the experts
        bytes_high: layer.expert_bytes,
        slots_high: *slots,
        ..Layer::default()
    };
    let layers: Vec<Layer> = shape.layers.iter().zip(&rooms.slots).map(layer).collect();
    let (mut on_host, mut on_device) = (Vec::new(), Vec::new());
    if is_warm {
        // Layers differ only in their random draws: one stands for all that are alike.
        let mut known: BTreeMap<(u16, u32, u32), Vec<usize>> = BTreeMap::new();
        for ((routes, layer), n_device) in routes.iter().zip(&layers).zip(&rooms.device_slots) {
            let version = |index: u16| Version::high(ExpertId { layer: layer.layer, index });
            let n_host = layer.slots_high;
            on_device.extend(routes.latest(*n_device as usize).iter().rev().map(|index| version(*index)));
            let places = known
                .entry((layer.n_expert, n_host, *n_device))
                .or_insert_with(|| routes.clone().beside_device(n_host as usize, *n_device as usize));
            let experts = routes.latest(layer.n_expert.into());
            on_host.extend(places.iter().rev().map(|place| version(experts[*place])));
        }
    }
    let mut batch = |phase, n_tokens: u32| {
        let record = |(routes, layer): (&mut LayerRoutes, &Layer)| {
            let mut record = LayerRecord::new(layer.layer, layer.n_used);
            for _ in 0..n_tokens {
                routes.token(&mut random, &mut record.chosen);
            }
            record.n_tokens = n_tokens;
            record.weights = vec![1.0 / f32::from(layer.n_used); record.chosen.len()];
            record
        };
        let layers = routes.iter_mut().zip(&layers).map(record).collect();
        Event::Batch(Batch { phase, n_tokens, seconds: 0.0, layers })
    };
    let mut events = vec![Event::Sequence];
    if n_prompt > 0 {
        events.push(batch(Phase::Prompt, n_prompt));
    }
    events.extend((0..n_decoded).map(|_| batch(Phase::Decode, 1)));
    let model = ModelDescription { name: shape.name.clone(), architecture: shape.architecture.clone(), layers };
    let recording = Recording {
        path: PathBuf::from("forecast"),
        header: Header { model, ..Header::default() },
        start: ResidentsRecord { versions: on_host, statistics: Vec::new() },
        events,
        truncated: None,
    };
    (recording, on_device)
}

/// Time to the first token of a model on an idle disk, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FirstToken {
    pub load_seconds: f64,
    pub prompt_seconds: f64,
    /// Reading the prompt's experts, without waits for products.
    pub reading_seconds: f64,
    /// Multiplying the prompt, without waits for reads.
    pub products_seconds: f64,
}

impl FirstToken {
    pub fn seconds(&self) -> f64 {
        self.load_seconds + self.prompt_seconds
    }

    /// A batch reads its experts that are not resident, each once; reads and products overlap. At first
    /// none is resident, and the memory of slots was never used. A GPU whose link is known computes a batch if that is
    /// sooner, and copies of experts that it lacks overlap with its products.
    pub fn of(shape: &Shape, host: &Host, task: &Task, rooms: &Rooms, locality: &Locality) -> Self {
        let on_host = rooms.prompt_share();
        // A batch uses nearly all experts, and leaves those on the GPU there: the host keeps others.
        let on_device = rooms.device_share(shape);
        let share = (on_host + on_device).min(1.0);
        let n_prompt = u64::from(task.n_prompt.max(1));
        let operations = host.cpu.operations.unwrap_or(OPERATIONS_PER_BYTE * host.cpu.memory);
        let device = host.device.filter(|_| rooms.device.is_some());
        let linked = device.and_then(|device| Some((device.bandwidth, device.link?.min(host.cpu.memory))));
        let (mut reading, mut products, mut prompt) = (0.0, 0.0, 0.0);
        let n_whole = n_prompt / UBATCH_TOKENS;
        let rest = n_prompt % UBATCH_TOKENS;
        let mut resident = 0.0;
        let mut batch = |n_tokens: u64, times: u64| {
            if times == 0 {
                return;
            }
            let (bytes, n_distinct) = distinct(shape, n_tokens, locality);
            let wanted = 2.0 * shape.per_token.n_parameters as f64 * n_tokens as f64;
            // With few rows, products take as long as reading their weights.
            let weights = bytes + shape.per_token.ordinary.values().sum::<u64>() as f64;
            let experts = n_distinct as f64 * EXPERT_SECONDS;
            let by_cpu = (wanted / operations).max(weights / host.cpu.memory) + experts;
            for first in [true, false] {
                let times = if first { 1 } else { times - 1 } as f64;
                let seconds = bytes * (1.0 - resident) / host.disk;
                let multiplying = linked.map_or(by_cpu, |(bandwidth, link)| {
                    let copied = bytes * (1.0 - if resident == 0.0 { 0.0 } else { on_device }) / link;
                    let products = (wanted / (OPERATIONS_PER_BYTE * bandwidth)).max(weights / bandwidth);
                    by_cpu.min(copied.max(products) + experts)
                });
                let fresh = if resident == 0.0 { bytes.min(on_host * shape.expert_bytes as f64) } else { 0.0 };
                reading += times * seconds;
                products += times * multiplying;
                prompt += times * (seconds.max(multiplying) + fresh * FRESH_SECONDS_PER_BYTE);
                if times > 0.0 {
                    resident = share;
                }
            }
        };
        batch(UBATCH_TOKENS, n_whole);
        batch(rest, u64::from(rest > 0));
        Self {
            load_seconds: shape.ordinary_bytes as f64 / host.disk,
            prompt_seconds: prompt,
            reading_seconds: reading,
            products_seconds: products,
        }
    }
}

/// Distinct experts of `n_tokens` tokens: bytes and number.
fn distinct(shape: &Shape, n_tokens: u64, locality: &Locality) -> (f64, u64) {
    let mut random = SplitMix64::new(16);
    let (mut bytes, mut n_distinct) = (0.0, 0);
    // Layers differ only in their random draws: one stands for all that are alike.
    let mut known: Vec<(u16, u64)> = Vec::new();
    for layer in &shape.layers {
        let n = known.iter().find(|(n_expert, _)| *n_expert == layer.n_expert).map(|(_, n)| *n).unwrap_or_else(|| {
            let mut routes = LayerRoutes::new(layer.n_expert, shape.n_expert_used, locality, &mut random);
            let (mut chosen, mut seen) = (Vec::new(), vec![false; layer.n_expert.into()]);
            for _ in 0..n_tokens {
                chosen.clear();
                routes.token(&mut random, &mut chosen);
                chosen.iter().for_each(|expert| seen[usize::from(*expert)] = true);
            }
            let n = seen.iter().filter(|seen| **seen).count() as u64;
            known.push((layer.n_expert, n));
            n
        });
        bytes += n as f64 * layer.expert_bytes as f64;
        n_distinct += n;
    }
    (bytes, n_distinct)
}
