//! Forecasts of a model's speed on a machine, before the model is downloaded or the machine bought.
//!
//! ```text
//! header -> Shape --plan--> slots            (as the engine divides memory)
//! recorded hit rates -> Expectation -> routes --sim--> reads, waits, seconds
//! ```
//!
//! [`crate::plan`] divides the memory, as in the engine; llama.cpp's other memory is estimated. Routes with the
//! expected locality are drawn and replayed through [`crate::sim`], so that reads and products overlap as they do in
//! the engine. No I/O: a machine is a few numbers ([`Host`]). The simulation is bounded (`USES_SIMULATED`), whatever
//! a header claims.
//!
//! Time of a token: weights by memory bandwidth (or by the measured speed of products of their type),
//! [`EXPERT_SECONDS`] for each expert, reads by the disk's speed as far as they do not overlap with products, and
//! memory bandwidth once more for the bytes that arrive.
//!
//! A GPU's slots and the host's count both: an expert on the GPU is not read, and does not count as used on the host,
//! where it ages. One that the GPU has evicted is read again if the host has evicted it too. An expert that is missing
//! on the GPU is multiplied by the CPU, or copied there where the link makes that sooner.

mod known;
mod locality;
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
    PoolPlan, Room, RunMode,
};

pub use known::{Expectation, Known, TRAINED};
pub use locality::Locality;
pub(crate) use shape::TypeBytes;
use shape::UBATCH_TOKENS;
pub use shape::{ExpertLayer, PerToken, Shape, ShapeError};
pub use steady::{FirstToken, Products, Run, Start, routes, run};

/// Approximate number of expert uses simulated for one figure: more change only the last digit.
pub(crate) const USES_SIMULATED: u64 = 16_384;
/// Time of an expert's products besides their weights: three products are divided among threads and awaited. On the
/// host of the records, two shapes with everything resident agree on memory bandwidth with it, and differ by a sixth
/// without.
pub const EXPERT_SECONDS: f64 = 30e-6;
/// Cost per byte read into memory that was never used: the system clears the page first. Measured in cold runs of the
/// records (125 to 260 µs a MiB, 2 cores in a virtual machine); a run that has filled its slots pays nothing.
pub(crate) const FRESH_SECONDS_PER_BYTE: f64 = 170e-12;
/// Operations of products with many rows, per byte of memory bandwidth, if only the bandwidth is known: measured on the
/// host of the records (2 cores, AVX-512). Machines with more cores for their bandwidth do better, and GPUs, too.
pub(crate) const OPERATIONS_PER_BYTE: f64 = 4.3;

/// A machine. Rates are per second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Host {
    pub memory: u64,
    /// Bytes of random reads of an expert's size.
    pub disk: f64,
    pub cpu: Cpu,
    pub device: Option<Device>,
}

/// Products on the CPU. Rates are per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cpu {
    pub memory: f64,
    /// Bytes of weights of a type multiplied with one row, if measured and lower than `memory`.
    #[serde(skip)]
    pub by_type: BTreeMap<GgmlType, f64>,
    /// Operations (two for each weight) of products with many rows; `None` if not measured.
    pub operations: Option<f64>,
}

impl Cpu {
    fn seconds(&self, weights: &TypeBytes) -> f64 {
        let rate = |dtype| self.by_type.get(dtype).copied().unwrap_or(self.memory).min(self.memory);
        weights.iter().map(|(dtype, bytes)| *bytes as f64 / rate(dtype)).sum()
    }
}

/// A GPU. hobbit was never measured on one: forecasts follow from bandwidths alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Device {
    pub memory: u64,
    pub bandwidth: f64,
    /// Bytes per second from host memory to the GPU; `None` leaves out copies: the CPU computes what is missing there.
    pub link: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Task {
    pub n_ctx: u64,
    /// Tokens of the prompt, at least 1.
    pub n_prompt: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Reading missing experts takes longer than all products.
    Disk,
    /// Products take longer: memory bandwidth, or cores.
    Products,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ForecastError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("{what} of {found} bytes per second, expected a number above 0")]
    Rate { what: &'static str, found: f64 },
}

/// Speed of tokens with some locality.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Speed {
    pub tokens_per_second: f64,
    /// Share of needed experts that are in memory, the GPU's or the host's, 0..=1.
    pub hit_rate: f64,
    pub bytes_read: f64,
    /// Seconds of all products of a token without waits for reads.
    pub products_seconds: f64,
    pub reading_seconds: f64,
}

impl Speed {
    fn of(run: &Run, disk: f64) -> Self {
        Self {
            tokens_per_second: 1.0 / run.seconds.max(f64::MIN_POSITIVE),
            hit_rate: run.hit_rate,
            bytes_read: run.bytes_read,
            products_seconds: run.products_seconds,
            reading_seconds: run.bytes_read / disk,
        }
    }

    /// Ratio to reading and multiplying in perfect overlap; [`crate::stats::efficiency`].
    pub fn efficiency(&self) -> f64 {
        self.products_seconds.max(self.reading_seconds) * self.tokens_per_second
    }

    /// The longer of reading and multiplying.
    pub fn limit(&self) -> Limit {
        if self.reading_seconds > self.products_seconds { Limit::Disk } else { Limit::Products }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    pub is_passthrough: bool,
    /// Division of the memory; `None` if llama.cpp runs by itself.
    pub plan: Option<MemoryPlan>,
    pub device: Option<DevicePlan>,
    /// Share of the experts that have room in memory while tokens decode, the GPU's and the host's together, 0..=1.
    pub share: f64,
    /// Warm, exact, with the mean of the recorded localities.
    pub expected: Speed,
    /// With the lowest recorded locality.
    pub low: Speed,
    /// With the highest recorded locality.
    pub high: Speed,
    /// With the optimal policy, which knows the future.
    pub optimum: Speed,
    /// With a router that chooses at random.
    pub random: Speed,
    pub first_token: FirstToken,
}

pub fn forecast(shape: &Shape, host: &Host, task: &Task, expectation: &Expectation) -> Result<Forecast, ForecastError> {
    check(host)?;
    let room = rooms(shape, host, task)?;
    let products = Products::of(shape, host, &room, task.n_prompt.into());
    let with =
        |locality: &Locality| Speed::of(&run(shape, &room, locality, &products, host.disk, Start::Warm), host.disk);
    let expected = with(&expectation.expected);
    Ok(Forecast {
        share: room.share(shape),
        low: with(&expectation.low),
        high: with(&expectation.high),
        optimum: with(&expectation.optimum),
        random: with(&Locality::random()),
        first_token: FirstToken::of(shape, host, task, &room, &expectation.expected),
        expected,
        is_passthrough: room.plan.is_none(),
        plan: room.plan,
        device: room.device,
    })
}

/// Only the expected speed: for tables.
pub fn expected_speed(
    shape: &Shape,
    host: &Host,
    task: &Task,
    expectation: &Expectation,
) -> Result<(f64, Speed), ForecastError> {
    check(host)?;
    let room = rooms(shape, host, task)?;
    let products = Products::of(shape, host, &room, task.n_prompt.into());
    let run = run(shape, &room, &expectation.expected, &products, host.disk, Start::Warm);
    Ok((room.share(shape), Speed::of(&run, host.disk)))
}

fn check(host: &Host) -> Result<(), ForecastError> {
    let device = host.device.map_or(1.0, |device| device.bandwidth);
    let link = host.device.and_then(|device| device.link).unwrap_or(1.0);
    let rates =
        [("a disk", host.disk), ("memory", host.cpu.memory), ("a GPU's memory", device), ("a GPU's link", link)];
    match rates.into_iter().find(|(_, rate)| !(rate.is_finite() && *rate > 0.0)) {
        Some((what, found)) => Err(ForecastError::Rate { what, found }),
        None => Ok(()),
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Rooms {
    /// `None` if everything fits and llama.cpp runs by itself.
    pub plan: Option<MemoryPlan>,
    pub device: Option<DevicePlan>,
    /// Slots of each layer on the host while tokens decode, in the order of [`Shape::layers`].
    pub slots: Vec<u32>,
    /// Slots of each layer on the GPU; 0 without one.
    pub device_slots: Vec<u32>,
}

impl Rooms {
    /// Share of the experts that have room in memory while tokens decode, the GPU's and the host's together, 0..=1.
    pub fn share(&self, shape: &Shape) -> f64 {
        let all: u64 = shape.layers.iter().map(|layer| u64::from(layer.n_expert)).sum();
        let slots =
            self.slots.iter().zip(&self.device_slots).map(|(host, device)| u64::from(*host) + u64::from(*device));
        let with_room = shape.layers.iter().zip(slots).map(|(layer, slots)| slots.min(layer.n_expert.into()));
        with_room.sum::<u64>() as f64 / all.max(1) as f64
    }

    /// Share of the experts in host memory during a prompt.
    fn prompt_share(&self) -> f64 {
        self.plan.as_ref().map_or(1.0, MemoryPlan::cache_share)
    }

    /// Share of the experts in GPU memory.
    fn device_share(&self, shape: &Shape) -> f64 {
        Self { slots: vec![0; self.slots.len()], ..self.clone() }.share(shape)
    }
}

pub fn rooms(shape: &Shape, host: &Host, task: &Task) -> Result<Rooms, ForecastError> {
    let mut fixed = shape.fixed_costs(task.n_ctx);
    let device = host.device.and_then(|device| device_plan(shape, &device, fixed.weights + fixed.kv, fixed.compute));
    if device.is_some() {
        // Weights and KV cache are on the device already.
        (fixed.weights, fixed.kv) = (0, 0);
    }
    let device_slots = slots_by_layer(shape, device.as_ref().map_or(&[], |plan| &plan.pools));
    let needs = Needs {
        mapped: shape.tensor_bytes,
        kv: fixed.kv,
        compute: fixed.compute,
        runtime: fixed.runtime,
        ..Needs::default()
    };
    if device.is_none() && RunMode::of(&needs, Room { bytes: host.memory, enforced: 0 }).is_passthrough() {
        let slots = shape.layers.iter().map(|layer| layer.n_expert.into()).collect();
        return Ok(Rooms { plan: None, device, slots, device_slots });
    }
    let has_all = device.as_ref().is_some_and(|plan| plan.is_fully_resident);
    let mut plan = MemoryPlan::new(&PlanInput {
        budget: Budget::Bytes(host.memory),
        limits: MemoryLimits::default(),
        overcommit: true,
        // The host only passes on experts that the device keeps.
        expert_cache: if has_all { ExpertCache::Bytes(0) } else { ExpertCache::Auto },
        low_share: LowShare::Auto,
        fixed,
        prompt_only: if device.is_some() { 0 } else { fixed.prompt_only(UBATCH_TOKENS as u32) },
        margin: None,
        pools: shape.pools.clone(),
        n_expert_used: shape.n_expert_used,
        staging: shape.staging,
    })?;
    if has_all {
        // Nothing is read twice, however few slots the host has.
        plan.warning = None;
    }
    let slots = slots_by_layer(shape, plan.decode.as_ref().map_or(&plan.pools, |decode| &decode.pools));
    Ok(Rooms { plan: Some(plan), device, slots, device_slots })
}

/// Divides the slots of each pool among its layers; 0 for layers of no planned pool.
fn slots_by_layer(shape: &Shape, pools: &[PoolPlan]) -> Vec<u32> {
    let mut slots = vec![0; shape.layers.len()];
    for (pool, planned) in pools.iter().enumerate() {
        let members: Vec<usize> = (0..slots.len()).filter(|at| shape.layers[*at].pool == pool).collect();
        let demand = |at: &usize| LayerDemand {
            depth: *at as u16, // layers are numbered with 16 bits
            members: shape.layers[*at].n_expert.into(),
            needs: shape.n_expert_used,
        };
        let demands: Vec<LayerDemand> = members.iter().map(demand).collect();
        for (at, n) in members.into_iter().zip(allocate(Allocation::Even, planned.n_slots, &demands)) {
            slots[at] = n;
        }
    }
    slots
}

/// Plan with all ordinary weights and the context on the device; `None` if they do not fit, and the GPU stays unused.
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
