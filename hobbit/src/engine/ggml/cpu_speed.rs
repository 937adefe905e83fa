//! Measures the CPU's products, for forecasts of a model's speed.
//!
//! The CPU is found through ggml's registry, as every device is: a build that loads its backends at run time offers no
//! other access to it.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use ggml_sys::llama;

use crate::engine::ggml::params::default_threads;
use crate::engine::ggml::quantise::Ggml;
use crate::engine::ggml::{Context, Cpu};
use hobbit_core::gguf::{GgmlType, Recode};

/// Bytes per second of weights of a type that the CPU multiplies with one row, on a session's default number of
/// threads. Measured now, within `budget` without set-up. `None` for a type without a product.
pub fn cpu_bytes_per_second(element_type: GgmlType, budget: Duration) -> Option<f64> {
    crate::engine::ggml::log::install();
    let threads = u32::try_from(default_threads()).unwrap_or(1).max(1);
    let seconds = cpu_expert(element_type, threads, budget).ok()?;
    (seconds.is_finite() && seconds > 0.0).then(|| 1.0 / seconds)
}

/// Row length and rows of a matrix: those of an expert of a large model.
const SHAPE: [u64; 2] = [4096, 2048];
/// Bytes of all matrices together: too large for a core's caches, because experts come from memory.
const BYTES: u64 = 32 << 20;
/// Fill byte of the weights. As a scale or value of any type it is a small number, neither zero nor NaN.
const WEIGHT_BYTE: u8 = 0x11;

/// Seconds per weight byte of `MUL_MAT` with one row, on `threads` threads.
fn cpu_expert(dtype: GgmlType, threads: u32, budget: Duration) -> Result<f64, String> {
    let started = Instant::now();
    // ggml's own check accepts types without a product, such as i64.
    Ggml.supports(dtype).map_err(|error| error.to_string())?;
    let bytes = dtype.tensor_bytes(&SHAPE).ok_or("no expert has rows of such a type")?;
    let n_matrices = (BYTES / bytes).max(1) as usize;
    let mut cpu = Cpu::new().ok_or("ggml refuses a CPU backend")?;
    cpu.set_n_threads(c_int::try_from(threads.max(1)).unwrap_or(c_int::MAX));
    let backend = cpu.stream.raw();
    // A graph also counts weights and the row as nodes.
    let n_nodes = 2 * n_matrices + 1;
    let context = Context::new(n_nodes, n_nodes).ok_or("ggml refuses a context")?;
    let [ne0, ne1] = SHAPE.map(|ne| ne as i64);
    let row = context.tensor(llama::GGML_TYPE_F32, [ne0, 1, 1]);
    // SAFETY: the context has room for these tensors and the graph; shapes match; the type id is one of current
    // llama.cpp, and its rows are whole blocks.
    let (graph, buft) = unsafe {
        let graph = llama::ggml_new_graph_custom(context.raw(), n_nodes, false);
        for _ in 0..n_matrices {
            let product = llama::ggml_mul_mat(context.raw(), context.tensor(dtype.id(), [ne0, ne1, 1]), row);
            if !llama::ggml_backend_supports_op(backend, product) {
                return Err("the CPU backend does not multiply it".to_owned());
            }
            llama::ggml_build_forward_expand(graph, product);
        }
        (graph, llama::ggml_backend_get_default_buffer_type(backend))
    };
    let buffer = context.allocate(buft).ok_or("ggml refuses memory for an expert")?;
    buffer.fill(WEIGHT_BYTE);
    let ones = [1.0_f32; SHAPE[0] as usize];
    // SAFETY: the row lies in the buffer and has as many elements as `ones`.
    unsafe { llama::ggml_backend_tensor_set(row, ones.as_ptr().cast(), 0, size_of_val(&ones)) };

    let run = || {
        let started = Instant::now();
        // SAFETY: every tensor of the graph has memory in `buffer`, which is live.
        let status = unsafe { llama::ggml_backend_graph_compute(backend, graph) };
        match status {
            llama::GGML_STATUS_SUCCESS => Ok(started.elapsed()),
            status => Err(format!("ggml failed with status {status}")),
        }
    };
    // The first run wakes the threads. The fastest run counts: beside a busy program, runs with waiting threads take
    // many times as long now and then, and that program may be gone when experts are multiplied.
    let mut last = run()?;
    let mut best = Duration::MAX;
    while best == Duration::MAX || started.elapsed() + last < budget {
        last = run()?;
        best = best.min(last);
    }
    Ok(best.as_secs_f64() / (bytes * n_matrices as u64) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weight_byte_is_valid_in_every_type() {
        for dtype in GgmlType::all().filter(|dtype| Ggml.supports(*dtype).is_ok()) {
            let words = vec![u64::from_ne_bytes([WEIGHT_BYTE; 8]); dtype.row_bytes(4096).unwrap() as usize / 8];
            // SAFETY: as many bytes as said, aligned for every block type.
            let valid = unsafe { llama::ggml_validate_row_data(dtype.id(), words.as_ptr().cast(), words.len() * 8) };
            assert!(valid, "{dtype:?}");
        }
    }

    #[test]
    fn types_without_a_product_are_named() {
        for name in ["f32", "f16", "q8_0", "q4_K", "iq2_xxs", "mxfp4"] {
            let seconds = cpu_expert(GgmlType::from_name(name).unwrap(), 2, Duration::ZERO).unwrap();
            assert!(seconds > 0.0 && seconds.is_finite(), "{name}: {seconds}");
        }
        for dtype in [GgmlType::I64, GgmlType::I8, GgmlType::from_name("q8_1").unwrap()] {
            let error = cpu_expert(dtype, 1, Duration::ZERO).unwrap_err();
            assert!(error.contains(dtype.name()), "{error}");
        }
    }
}
