//! Measures copies from host memory to a device, for reports about a machine.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::engine::ggml::{self, Context, Stream};
use crate::engine::memory::pinned::{HostMemory, Reach};
use crate::engine::seam::registration::NAME;
use ggml_sys::llama::{self, ggml_tensor};
use hobbit_core::options::UnifiedMemory;

/// Bytes of a copy: many experts, little of any device's memory.
const BYTES: usize = 64 << 20;

/// Copies to a device, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkSpeed {
    /// From pinned memory; `None` if the device pins none.
    pub pinned: Option<f64>,
    /// From ordinary memory.
    pub pageable: f64,
}

/// The speed of copies to the device that ggml calls `name`, each kind measured for `time`.
///
/// # Errors
/// An unknown device, or one that refuses memory.
pub fn link_speed(name: &str, time: Duration) -> Result<LinkSpeed, String> {
    ggml::ready();
    let dev = ggml::devices().find(|dev| ggml::name(*dev) == name).ok_or_else(|| format!("no device '{name}'"))?;
    let refused = || format!("{name} refuses {} MiB", BYTES >> 20);
    let stream = Stream::new(dev).ok_or_else(refused)?;
    let context = Context::new(1, 0).ok_or_else(refused)?;
    let tensor = context.tensor(llama::GGML_TYPE_I8, [BYTES as i64, 1, 1]);
    // SAFETY: a registered device.
    let _buffer = context.allocate(unsafe { llama::ggml_backend_dev_buffer_type(dev) }).ok_or_else(refused)?;
    let speed = |reach| {
        let memory = HostMemory::of(dev, reach, BYTES, BYTES).map_err(|error| error.to_string())?;
        Ok::<_, String>((memory.pinned, copies(&stream, tensor, &memory, time)))
    };
    let pageable = speed(Reach::Copies)?.1;
    let pins = Reach::of(dev, UnifiedMemory::Off) == Reach::Pinned;
    let pinned = if pins { Some(speed(Reach::Pinned)?).filter(|found| found.0).map(|found| found.1) } else { None };
    Ok(LinkSpeed { pinned, pageable })
}

/// Bytes per second of the fastest copy: other programs disturb some, but not the later run.
fn copies(stream: &Stream, tensor: *mut ggml_tensor, memory: &HostMemory, time: Duration) -> f64 {
    let bytes = memory.arena.len().min(BYTES);
    // SAFETY: the arena has these bytes, and nothing else uses them. Untouched pages would be one shared page of zeros.
    unsafe { memory.arena.as_ptr().write_bytes(1, bytes) };
    let (started, mut best) = (Instant::now(), Duration::MAX);
    while best == Duration::MAX || started.elapsed() < time {
        let round = Instant::now();
        // SAFETY: the tensor has `BYTES` bytes on the stream's device; the memory lives until the copy has run.
        unsafe { stream.set(tensor, memory.arena.as_ptr().cast(), 0, bytes) };
        stream.synchronize();
        best = best.min(round.elapsed());
    }
    bytes as f64 / best.as_secs_f64()
}

/// The backends of this build, as ggml names them, without hobbit's own.
pub fn backends() -> Vec<String> {
    ggml::ready();
    let ours = NAME.to_string_lossy();
    // SAFETY: the registry only grows, and indices below its count are valid.
    let name = |index| unsafe { ggml::text(llama::ggml_backend_reg_name(llama::ggml_backend_reg_get(index))) };
    // SAFETY: takes no arguments.
    let n_backends = unsafe { llama::ggml_backend_reg_count() };
    (0..n_backends).map(name).filter(|name| *name != ours).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_to_the_cpu_have_a_speed() {
        let LinkSpeed { pinned, pageable } = link_speed("CPU", Duration::ZERO).unwrap();
        assert!(pageable > 0.0 && pageable.is_finite() && pinned.is_none(), "{pinned:?} {pageable}");
        assert_eq!(link_speed("XPU9", Duration::ZERO), Err("no device 'XPU9'".to_owned()));
        assert_eq!(backends().iter().filter(|name| *name == "CPU").count(), 1);
    }
}
