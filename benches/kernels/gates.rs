//! The stacked gate of one token: hobbit's product of several layers' routers, against ggml's of the same rows in one matrix.
//!
//! Ours is [`GateStack::scores`] as the engine calls it, which makes probabilities of the logits as well; of ggml's only the
//! evaluation is timed, not what builds its graph. Stacks come from memory, or with few MiB of them from a cache.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use hobbit_core::gguf::GgmlType;
use hobbit_core::predict::{Gate, GateRows, GateStack, Gating};
use serde::Serialize;

use super::ggml::{Cpu, Matrices, Operation, Shape};
use super::measure::{Settings, difference, floats, median};

/// Width of the gating input, and experts of a layer: Mixtral's, Qwen3-30B-A3B's, gpt-oss-120b's, DeepSeek-V3's.
const GATES: [(usize, usize); 4] = [(4096, 8), (2048, 128), (2880, 128), (7168, 256)];
/// Layers ahead: HOBBIT's p.
const LAYERS: [u16; 4] = [1, 2, 3, 4];
/// Floats of a cache line.
const LINE: usize = 16;
/// A MiB: stacks of at most so much stay in a core's cache when they are used again and again.
const CACHED_BYTES: usize = 1 << 20;

/// A shape of gates and how many layers of them. Medians in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Stacked {
    pub width: usize,
    pub n_expert: usize,
    pub n_layers: u16,
    pub bytes: usize,
    /// Whether stacks were used that fit in a core's cache; else each came from memory.
    pub is_cached: bool,
    /// With the probabilities, on one thread.
    pub ours: f64,
    /// The product alone, on as many threads as the bench has.
    pub ggml: f64,
    /// The greatest difference of a probability's logarithm.
    pub difference: f64,
}

/// One gate among all.
struct Part {
    all: Arc<Vec<f32>>,
    floats: Range<usize>,
}

impl GateRows for Part {
    fn rows(&self) -> &[f32] {
        &self.all[self.floats.clone()]
    }
}

/// Every shape from memory, and those from a cache that fit there.
pub fn measure(cpu: &Cpu, settings: &Settings) -> Result<Vec<Stacked>> {
    let mut all = Vec::new();
    for (width, n_expert) in GATES {
        for n_layers in LAYERS {
            all.push(stacked(cpu, settings, (width, n_expert), n_layers, false)?);
            let bytes = width * n_expert * usize::from(n_layers) * size_of::<f32>();
            if bytes <= CACHED_BYTES {
                all.push(stacked(cpu, settings, (width, n_expert), n_layers, true)?);
            }
        }
    }
    Ok(all)
}

fn stacked(
    cpu: &Cpu,
    settings: &Settings,
    (width, n_expert): (usize, usize),
    n_layers: u16,
    is_cached: bool,
) -> Result<Stacked> {
    let n_rows = n_expert * usize::from(n_layers);
    let shape = Shape { dtype: GgmlType::F32, n_per_row: width, n_rows };
    let bytes = shape.bytes().context("floats are whole blocks")?;
    // Both ways have matrices of their own.
    let n = if is_cached { 1 } else { (settings.bytes / 2).div_ceil(bytes).max(2) };
    let layers: Vec<u16> = (0..n_layers).collect();
    let mut random = rand_mt::Mt::new(1);
    let rows: Vec<Vec<f32>> = layers.iter().map(|_| floats(&mut random, n_expert * width)).collect();
    let matrices = Matrices::new(shape, n, cpu.plain())?;
    let stacked_bytes: Vec<u8> = rows.iter().flatten().flat_map(|value| value.to_ne_bytes()).collect();
    (0..n).try_for_each(|index| matrices.set(index, &stacked_bytes))?;
    // In one piece and on cache lines, as ggml's are.
    let (n_floats, mut all) = (n_expert * width, Vec::<f32>::with_capacity(n * n_rows * width + LINE));
    let start = all.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
    all.resize(start, 0.0);
    (0..n).for_each(|_| rows.iter().for_each(|rows| all.extend_from_slice(rows)));
    let all = Arc::new(all);
    let stack = |index: usize| {
        let mut stack = GateStack::default();
        for (at, &layer) in layers.iter().enumerate() {
            let first = start + (index * layers.len() + at) * n_floats;
            let rows = Arc::new(Part { all: all.clone(), floats: first..first + n_floats });
            let gate = Gate { rows, bias: None, choice_bias: None, gating: Gating::Softmax, groups: None };
            ensure!(stack.add(layer, width, gate), "a gate of {n_expert} x {width} is refused");
        }
        Ok(stack)
    };
    let mut stacks: Vec<GateStack> = (0..n).map(stack).collect::<Result<_>>()?;

    let mut x = floats(&mut random, width);
    let mut logits = vec![0.0; n_rows];
    let (mut ours, mut ggml, mut scores) = (Vec::new(), Vec::new(), Vec::new());
    // In turns. The first time pays for ggml's scratch memory.
    for turn in 0..=settings.tries * n.clamp(8, 64) {
        let at = turn % n;
        let ggml_time = cpu.multiply(Operation::Plain, &matrices.tensors[at..=at], &mut x, &mut logits)?;
        let started = Instant::now();
        scores = stacks[at].scores(&x, &layers);
        let own_time = started.elapsed();
        if turn > 0 {
            ggml.push(ggml_time);
            ours.push(own_time);
        }
    }
    let mut found = 0f64;
    for ((_, own), logits) in scores.iter().zip(logits.chunks(n_expert)) {
        let shift = logits.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>().ln();
        let logs: Vec<f32> = logits.iter().map(|logit| (f64::from(*logit) - shift) as f32).collect();
        let own: Vec<f32> = own.iter().map(|score| score.ln()).collect();
        found = found.max(difference(&logs, &own));
    }
    let (ours, ggml) = (median(ours), median(ggml));
    Ok(Stacked { width, n_expert, n_layers, bytes, is_cached, ours, ggml, difference: found })
}

/// As a table.
pub fn print(all: &[Stacked]) {
    println!("\n| gates | layers | from | hobbit, µs | GB/s | ggml, µs | GB/s | ggml to hobbit | difference |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for one in all {
        let speed = |seconds: f64| one.bytes as f64 / seconds / 1e9;
        println!(
            "| {} x {} | {} | {} | {:.1} | {:.0} | {:.1} | {:.0} | {:.2} | {:.1e} |",
            one.n_expert,
            one.width,
            one.n_layers,
            if one.is_cached { "cache" } else { "memory" },
            one.ours * 1e6,
            speed(one.ours),
            one.ggml * 1e6,
            speed(one.ggml),
            one.ggml / one.ours,
            one.difference,
        );
    }
}
