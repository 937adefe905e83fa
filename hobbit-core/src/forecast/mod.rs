//! How fast a model will run on a machine, before it is downloaded or the machine bought.
//!
//! ```text
//! header -> Shape --plan--> slots            (as the engine divides memory)
//! recorded hit rates -> Expectation -> routes --sim--> reads, waits, seconds
//! ```
//!
//! Memory is divided by [`crate::plan`], as the engine does; what llama.cpp takes besides is estimated. Routes of the
//! expected locality are drawn and replayed through [`crate::sim`], so that reads and products overlap as they do in the
//! engine. Pure: a machine is a few numbers ([`Host`]). What is simulated is bounded ([`USES_SIMULATED`]), whatever a
//! header says.
//!
//! What a token takes: weights by memory bandwidth (or by what products of their type were measured at), [`EXPERT_SECONDS`]
//! for each expert, reads by the disk's speed as far as nothing is left to multiply, and what arrives takes memory
//! bandwidth once more.

mod known;
mod locality;
mod prompt;
mod routes;
mod shape;
mod steady;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cache::{Allocation, LayerDemand, allocate};
use crate::gguf::GgmlType;
use crate::options::DeviceOptions;
use crate::plan::{
    Budget, DevicePlan, DevicePlanInput, ExpertCache, LowShare, MemoryLimits, MemoryPlan, Needs, PlanError, PlanInput,
    Regime,
};

pub use known::{Expectation, Known, TRAINED, UNTRAINED};
pub use locality::{Locality, SHARES};
pub use prompt::FirstToken;
pub use shape::{ExpertLayer, Shape, ShapeError, TypeBytes};
pub use steady::{Products, Run, Start, run};

/// Uses of experts that are simulated for one figure, about: more change nothing but the last digit.
pub const USES_SIMULATED: u64 = 16_384;
/// What an expert's products take beside their weights: three products are divided among threads and awaited. On the host
/// of the records two shapes with everything resident agree on memory bandwidth with it, and differ by a sixth without.
pub const EXPERT_SECONDS: f64 = 30e-6;
/// What a byte costs that goes where no slot was before: the system clears the page first. As cold runs of the records show
/// (125 to 260 µs a MiB, 2 cores in a virtual machine); a run that has filled its slots pays nothing of it.
pub const FRESH_SECONDS_PER_BYTE: f64 = 170e-12;
/// Products of many rows, in operations per byte of memory bandwidth, where only that is known: as measured on the host of
/// the records (2 cores, AVX-512). Machines with more cores for their bandwidth do better.
pub const OPERATIONS_PER_BYTE: f64 = 4.3;

/// A machine. Rates are per second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Host {
    /// Bytes that the process may take.
    pub memory: u64,
    /// Bytes of random reads of an expert's size.
    pub disk: f64,
    /// Who multiplies.
    pub cpu: Cpu,
    /// A GPU beside it.
    pub device: Option<Device>,
}

/// Products on the CPU. Rates are per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cpu {
    /// Bytes from memory.
    pub memory: f64,
    /// Bytes of weights of a type multiplied with one row, where that was measured and is less.
    #[serde(skip)]
    pub by_type: BTreeMap<GgmlType, f64>,
    /// Operations (two for each weight) of products with many rows; `None` where it was not measured.
    pub operations: Option<f64>,
}

impl Cpu {
    /// Seconds for one row times these weights.
    fn seconds(&self, weights: &TypeBytes) -> f64 {
        let rate = |dtype| self.by_type.get(dtype).copied().unwrap_or(self.memory).min(self.memory);
        weights.iter().map(|(dtype, bytes)| *bytes as f64 / rate(dtype)).sum()
    }
}

/// A GPU. No figure of one was ever measured for hobbit: what it brings follows from bandwidths alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Bytes.
    pub memory: u64,
    /// Bytes per second of its memory.
    pub bandwidth: f64,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Task {
    /// Tokens that there is room for.
    pub n_ctx: u64,
    /// Tokens of the prompt, at least 1.
    pub n_prompt: u32,
}

/// What makes a token wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Reading what is missing takes longer than all products.
    Disk,
    /// Products take longer: memory bandwidth, or cores.
    Products,
}

/// Why there is no forecast.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ForecastError {
    /// The memory cannot hold the model even with no expert cached.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A rate that is no positive number.
    #[error("{what} of {found} bytes per second, expected a number above 0")]
    Rate {
        /// Of what.
        what: &'static str,
        /// As given.
        found: f64,
    },
}

/// How fast tokens come with some locality.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Speed {
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Share of needed experts that are resident, 0..=1.
    pub hit_rate: f64,
    /// Bytes read per token.
    pub bytes_read: f64,
    /// Seconds of all products of a token, nothing missing.
    pub products_seconds: f64,
    /// Seconds of a token's reads alone.
    pub reading_seconds: f64,
}

impl Speed {
    fn of(run: &Run, disk: f64, products: &Products) -> Self {
        Self {
            tokens_per_second: 1.0 / run.seconds.max(f64::MIN_POSITIVE),
            hit_rate: run.hit_rate,
            bytes_read: run.bytes_read,
            products_seconds: products.token_seconds(),
            reading_seconds: run.bytes_read / disk,
        }
    }

    /// How near it comes to reading and multiplying without waiting for each other; [`crate::stats::efficiency`].
    pub fn efficiency(&self) -> f64 {
        self.products_seconds.max(self.reading_seconds) * self.tokens_per_second
    }

    /// What takes longer.
    pub fn limit(&self) -> Limit {
        if self.reading_seconds > self.products_seconds { Limit::Disk } else { Limit::Products }
    }
}

/// What low precision was seen to save of missing bytes within a loss of 1 % in perplexity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LowEvidence {
    /// Experts as they are, and what stands in for them.
    pub types: &'static str,
    /// Of the bytes read in exact precision, how many are left.
    pub bytes_left: f64,
    /// Increase in perplexity against those experts in exact precision, 0.01 for 1 %.
    pub loss: f64,
}

/// The demo model (11.7 M parameters), prose, 25 % of its experts' bytes in memory, T1 0.6, T2 0.9: the dearer of two
/// texts. `benches/results/*/quality-demo.json`, and docs/PRECISION.md; no larger model was judged.
pub const LOW_EVIDENCE: [LowEvidence; 2] = [
    LowEvidence { types: "q8_0+q2_K", bytes_left: 0.68, loss: 0.0026 },
    LowEvidence { types: "q4_K+q2_K", bytes_left: 0.76, loss: 0.0011 },
];

/// What was seen that speaks for experts of these types; `None` where nothing does.
pub fn low_evidence(experts: &TypeBytes) -> Option<&'static LowEvidence> {
    let all = |names: &[&str]| !experts.is_empty() && experts.keys().all(|dtype| names.contains(&dtype.name()));
    match () {
        () if all(&["q8_0"]) => Some(&LOW_EVIDENCE[0]),
        // A mixture with wider ones saves more of those.
        () if all(&["q4_K", "q5_K", "q6_K"]) => Some(&LOW_EVIDENCE[1]),
        () => None,
    }
}

/// What is to be expected.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Everything fits, and llama.cpp runs by itself.
    pub stands_aside: bool,
    /// Where the memory goes; `None` where llama.cpp runs by itself.
    pub plan: Option<MemoryPlan>,
    /// The same of the GPU.
    pub device: Option<DevicePlan>,
    /// Share of the experts that have slots, 0..=1.
    pub share: f64,
    /// Warm, exact, with the mean of what was recorded.
    pub expected: Speed,
    /// With the least.
    pub low: Speed,
    /// With the most.
    pub high: Speed,
    /// With a policy that knows the future.
    pub optimum: Speed,
    /// With a router that chooses blindly.
    pub random: Speed,
    /// Tokens per second with low versions within 1 % of perplexity, as far as anything is known ([`LOW_EVIDENCE`]).
    pub at_one_percent: Option<f64>,
    /// From an idle disk to the first token.
    pub first_token: FirstToken,
}

/// Forecasts a model on a machine.
///
/// # Errors
/// The memory does not suffice, or a rate is no rate.
pub fn forecast(shape: &Shape, host: &Host, task: &Task, expectation: &Expectation) -> Result<Forecast, ForecastError> {
    check(host)?;
    let room = rooms(shape, host, task)?;
    let products = Products::of(shape, host, &room, &expectation.expected, task.n_prompt.into());
    let with = |locality: &Locality, disk: f64| {
        let run = run(shape, &room.slots, locality, &products, disk, Start::Warm);
        Speed::of(&run, disk, &products)
    };
    let expected = with(&expectation.expected, host.disk);
    let at_one_percent = low_evidence(&shape.experts_per_token)
        .map(|evidence| with(&expectation.expected, host.disk / evidence.bytes_left).tokens_per_second);
    Ok(Forecast {
        share: room.share(shape),
        low: with(&expectation.low, host.disk),
        high: with(&expectation.high, host.disk),
        optimum: with(&expectation.optimum, host.disk),
        random: with(&Locality::random(), host.disk),
        first_token: FirstToken::of(shape, host, task, &room, &expectation.expected, true),
        expected,
        at_one_percent,
        stands_aside: room.plan.is_none(),
        plan: room.plan,
        device: room.device,
    })
}

/// Only what is expected: for tables.
///
/// # Errors
/// As [`forecast`].
pub fn expected_speed(
    shape: &Shape,
    host: &Host,
    task: &Task,
    expectation: &Expectation,
) -> Result<(f64, Speed), ForecastError> {
    check(host)?;
    let room = rooms(shape, host, task)?;
    let products = Products::of(shape, host, &room, &expectation.expected, task.n_prompt.into());
    let run = run(shape, &room.slots, &expectation.expected, &products, host.disk, Start::Warm);
    Ok((room.share(shape), Speed::of(&run, host.disk, &products)))
}

fn check(host: &Host) -> Result<(), ForecastError> {
    let device = host.device.map_or(1.0, |device| device.bandwidth);
    let rates = [("a disk", host.disk), ("memory", host.cpu.memory), ("a GPU's memory", device)];
    match rates.into_iter().find(|(_, rate)| !(rate.is_finite() && *rate > 0.0)) {
        Some((what, found)) => Err(ForecastError::Rate { what, found }),
        None => Ok(()),
    }
}

/// Who has room for what.
#[derive(Clone, Debug, PartialEq)]
pub struct Rooms {
    /// `None` where everything fits and llama.cpp runs by itself.
    pub plan: Option<MemoryPlan>,
    /// The GPU's.
    pub device: Option<DevicePlan>,
    /// Slots of each layer, in the order of [`Shape::layers`].
    pub slots: Vec<u32>,
}

impl Rooms {
    /// Share of the experts that have slots in the host's memory, 0..=1.
    pub fn share(&self, shape: &Shape) -> f64 {
        let all: u64 = shape.layers.iter().map(|layer| u64::from(layer.n_expert)).sum();
        self.slots.iter().map(|n| u64::from(*n)).sum::<u64>() as f64 / all.max(1) as f64
    }

    /// The same of the GPU's.
    fn device_share(&self, shape: &Shape) -> f64 {
        let all: u64 = shape.layers.iter().map(|layer| u64::from(layer.n_expert)).sum();
        let slots = |plan: &DevicePlan| plan.pools.iter().map(|pool| u64::from(pool.n_slots)).sum::<u64>();
        self.device.as_ref().map_or(0.0, |plan| slots(plan) as f64 / all.max(1) as f64)
    }
}

/// Divides the machine's memory for a model.
///
/// # Errors
/// The memory does not suffice.
pub fn rooms(shape: &Shape, host: &Host, task: &Task) -> Result<Rooms, ForecastError> {
    let mut fixed = shape.fixed_costs(task.n_ctx);
    let device = host.device.and_then(|device| device_plan(shape, &device, fixed.weights + fixed.kv, fixed.compute));
    if device.is_some() {
        // They are there.
        (fixed.weights, fixed.kv) = (0, 0);
    }
    let needs =
        Needs { mapped: shape.tensor_bytes, repacked: 0, kv: fixed.kv, compute: fixed.compute, runtime: fixed.runtime };
    if device.is_none() && Regime::of(&needs, host.memory).stands_aside() {
        let slots = shape.layers.iter().map(|layer| layer.n_expert.into()).collect();
        return Ok(Rooms { plan: None, device, slots });
    }
    let plan = MemoryPlan::new(&PlanInput {
        budget: Budget::Bytes(host.memory),
        limits: MemoryLimits::default(),
        overcommit: true,
        expert_cache: ExpertCache::Auto,
        low_share: LowShare::Auto,
        fixed,
        margin: None,
        pools: shape.pools.clone(),
        n_expert_used: shape.n_expert_used,
        staging: shape.staging,
    })?;
    let mut slots = vec![0; shape.layers.len()];
    for (pool, planned) in plan.pools.iter().enumerate() {
        let members: Vec<usize> = (0..slots.len()).filter(|at| shape.layers[*at].pool == pool).collect();
        let demand = |at: &usize| LayerDemand {
            depth: *at as u16, // layers are numbered with 16 bits
            members: shape.layers[*at].n_expert.into(),
            needs: shape.n_expert_used,
            ..LayerDemand::default()
        };
        let demands: Vec<LayerDemand> = members.iter().map(demand).collect();
        for (at, n) in members.into_iter().zip(allocate(Allocation::Even, planned.n_slots, &demands)) {
            slots[at] = n;
        }
    }
    Ok(Rooms { plan: Some(plan), device, slots })
}

/// With all ordinary weights and the context there; `None` where they do not fit, and the GPU is left aside.
fn device_plan(shape: &Shape, device: &Device, resident: u64, scratch: u64) -> Option<DevicePlan> {
    DevicePlan::new(&DevicePlanInput {
        name: "the GPU".to_owned(),
        free: device.memory.checked_sub(resident)?,
        total: device.memory,
        headroom_percent: DeviceOptions::HEADROOM,
        wanted: ExpertCache::Auto,
        pools: shape.pools.clone(),
        n_expert_used: shape.n_expert_used,
        scratch,
        staging: shape.staging,
        low_share: LowShare::Auto,
    })
    .ok()
}
