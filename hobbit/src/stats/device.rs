//! What a session's devices hold and did.

use serde::Serialize;

/// What one device holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceReport {
    /// ggml's name, such as `CUDA0`.
    pub name: String,
    /// What it is, such as `NVIDIA GeForce RTX 4090`.
    pub description: String,
    /// Layers whose ordinary weights are there.
    pub n_layers: u32,
    /// Bytes of its slots; 0 where the CPU computes the experts of its layers.
    pub cache_bytes: u64,
    /// High versions of experts that can be there at once.
    pub slots: u64,
    /// Experts that it computes, of all of its layers; of the layers there where it computes none.
    pub experts: u64,
    /// Slots for slices that pass through.
    pub staging_slots: u32,
    /// Bytes of its memory that stay free.
    pub headroom_bytes: u64,
    /// Whether experts are copied to it from pinned host memory.
    pub pinned: bool,
    /// Whether it computes in host memory: experts are read where they are used, and never copied.
    pub unified: bool,
}

/// What one device did since the model was opened, for all of its sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceCounters {
    /// Experts found in a slot of the device: one for each distinct expert that one of its layers needed in an
    /// evaluated ubatch.
    pub hits: u64,
    /// Experts that were not, counted alike.
    pub misses: u64,
    /// Slices copied to the device.
    pub uploads: u64,
    /// Bytes copied.
    pub uploaded_bytes: u64,
    /// Experts copied before their layer's router had spoken. They count in `uploads`, and as hits where they are used.
    pub ahead: u64,
    /// Of these, used by the layer that they were copied for.
    pub ahead_used: u64,
    /// Missing experts that the CPU computed meanwhile.
    pub helper_experts: u64,
    /// Wall time in which it did.
    pub helper_seconds: f64,
    /// How often the slots became fewer because the device ran out of memory.
    pub cache_shrunk: u32,
}

super::field_by_field!(DeviceCounters: Sub::sub {
    hits, misses, uploads, uploaded_bytes, ahead, ahead_used, helper_experts, helper_seconds, cache_shrunk
});

impl DeviceCounters {
    /// Share of needed experts found on the device, 0..=1; `None` when none was needed.
    pub fn hit_rate(&self) -> Option<f64> {
        super::ratio(self.hits as f64, (self.hits + self.misses) as f64)
    }
}
