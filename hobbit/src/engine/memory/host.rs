//! Where the host's slots are allocated.

use ggml_sys::llama::ggml_backend_dev_t;

use crate::engine::error::Error;
use crate::engine::ggml;
use crate::engine::log;
use crate::engine::pinned::{HostMemory, Reach};
use crate::engine::tier::Tier;

/// Where host slots are allocated.
pub(super) struct HostSlots(Option<(ggml_backend_dev_t, Reach)>);

impl HostSlots {
    /// For the first device that reaches host memory better than by copying.
    pub(super) fn of(tiers: &[Tier], pinned: bool) -> Self {
        // A device that computes in host memory can do nothing without it.
        let unified = tiers.iter().find(|tier| tier.is_unified()).map(|tier| (tier.dev, Reach::of(tier.dev)));
        let pins = |tier: &&Tier| pinned && Reach::of(tier.dev) == Reach::Pinned;
        Self(unified.or_else(|| tiers.iter().find(pins).map(|tier| (tier.dev, Reach::Pinned))))
    }

    /// Copies from memory that is not pinned take a detour, which is worth a word.
    pub(super) fn tell_of_refusal(&self, memory: &[HostMemory]) {
        let Some((dev, Reach::Pinned)) = self.0 else { return };
        let plain: u64 = memory.iter().filter(|memory| !memory.pinned).map(|memory| memory.arena.len() as u64).sum();
        if plain > 0 {
            let name = ggml::name(dev);
            let mib = plain.div_ceil(1 << 20);
            log::notice(format_args!(
                "{name} cannot pin {mib} MiB of host memory: copies to it will be slower; a smaller --host-cache may help, --no-pinned does \
                 not ask"
            ));
        }
    }

    pub(super) fn memory(&self, bytes: usize, slot_bytes: usize) -> Result<HostMemory, Error> {
        match self.0 {
            Some((dev, reach)) => HostMemory::of(dev, reach, bytes, slot_bytes),
            None => HostMemory::plain(bytes),
        }
    }
}
