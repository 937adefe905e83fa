//! Choices that follow from memory: run mode, default context, and rearranged experts.

use serde::Serialize;

use super::ExpertCache;
use crate::gguf::GgmlType;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "name")]
pub enum RunMode {
    /// Everything fits: plain llama.cpp on the mapped file, with no hobbit code in between.
    Passthrough {
        /// Rearrange weights for the CPU while loading, as llama.cpp does by default; there is room for both copies.
        repack: bool,
        /// Everything fits only while tokens decode: what a prompt needs beyond that is given back after it.
        gives_back: bool,
    },
    /// Experts do not fit, or a flag asks for their cache: they stay in the file, and hobbit computes their products.
    Seam,
}

/// Memory that plain llama.cpp needs for a model, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Needs {
    /// The tensors, mapped from the file.
    pub mapped: u64,
    /// Copies of tensors that are rearranged for the CPU; the mapped originals are dropped only after all copies are
    /// made.
    pub repacked: u64,
    pub kv: u64,
    pub compute: u64,
    pub runtime: u64,
    /// Part of `compute` and `runtime` that need not be in memory while tokens decode, where the kernel takes back
    /// what is mapped: activations of prompts, given back after them, and code.
    pub gives_way: u64,
}

/// Memory that plain llama.cpp may use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    pub bytes: u64,
    /// The limit of the control group: the kernel keeps it by taking mapped pages back. 0 without one, or below a given
    /// budget, which nothing but the plan keeps.
    pub enforced: u64,
}

impl Needs {
    /// Needs with as many weights rearranged as llama.cpp would.
    fn most(&self) -> u64 {
        self.least().saturating_add(self.repacked)
    }

    /// Needs with no weights rearranged, and the page tables of what is mapped.
    pub fn least(&self) -> u64 {
        let page_tables = self.mapped / 512;
        [self.mapped, page_tables, self.kv, self.compute, self.runtime].into_iter().fold(0, u64::saturating_add)
    }
}

impl RunMode {
    /// The run mode for a model with these needs. Mapped memory gives way under pressure, so no margin stays free.
    /// In a control group it gives way to prompts, too: these read some experts again, but tokens, of which there are
    /// more, find all of them.
    pub fn of(needs: &Needs, room: Room) -> Self {
        let decoding = needs.least().saturating_sub(needs.gives_way);
        match room.bytes {
            bytes if needs.most() <= bytes => Self::Passthrough { repack: true, gives_back: false },
            bytes if needs.least() <= bytes => Self::Passthrough { repack: false, gives_back: false },
            _ if needs.gives_way > 0 && decoding <= room.enforced => {
                Self::Passthrough { repack: false, gives_back: true }
            }
            _ => Self::Seam,
        }
    }

    /// The run mode for needs between two bounds; `None` if the bounds have different modes.
    pub fn within(least: &Needs, most: &Needs, room: Room) -> Option<Self> {
        let run_mode = Self::of(least, room);
        (run_mode == Self::of(most, room)).then_some(run_mode)
    }

    /// Whether llama.cpp runs the model by itself.
    pub fn is_passthrough(self) -> bool {
        matches!(self, Self::Passthrough { .. })
    }
}

/// Minimum tokens of a default context, if the model was trained on as many: llama.cpp's own minimum when it fits a
/// context to memory (`--fit-ctx`).
pub const CONTEXT_TOKENS_MIN: u32 = 4096;

/// A default context takes at most one part in this many of the memory. Experts get the rest, because each of their
/// bytes is used more often.
const CONTEXT_PART: u64 = 8;

/// Default context length of a model that was trained on `trained` tokens and does not fit in `room` bytes together
/// with all of them. Each token takes `token_bytes`. The context is as many tokens as an eighth of the room holds, in
/// steps of 256.
pub fn context_tokens(trained: u32, token_bytes: u64, room: u64) -> u32 {
    let most = u32::try_from((room / CONTEXT_PART).checked_div(token_bytes).unwrap_or(u64::MAX)).unwrap_or(u32::MAX);
    (most / 256 * 256).max(CONTEXT_TOKENS_MIN).min(trained)
}

/// Types whose products gain more than rearranging costs on arrival: 1.15x and more in batches, and for single tokens
/// if most experts are resident. K-quants gain nothing; benches/README.md has the figures.
const GAINING: [GgmlType; 3] = [GgmlType::MXFP4, GgmlType::Q4_0, GgmlType::IQ4_NL];

/// Minimum percentage of experts with slots. Each miss pays for rearranging on arrival: with fewer slots single tokens
/// become slower.
const SLOTS_PERCENT_MIN: u64 = 50;

/// Input of the default for rearranging experts for the CPU. Sizes are bytes. The
/// rule is fixed, because rearranging changes the last bits of results, which must not depend on the load of the
/// machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RepackInput {
    /// All experts in high precision.
    pub expert_bytes: u64,
    pub expert_cache: ExpertCache,
    /// Memory that plain llama.cpp could take for the model.
    pub room: u64,
    /// Memory that the model needs besides the experts.
    pub besides: u64,
}

impl RepackInput {
    /// Whether experts of these types (the types of every matrix of every expert) are rearranged.
    pub fn pays(&self, types: impl IntoIterator<Item = GgmlType>) -> bool {
        let slots =
            self.expert_cache.of(self.expert_bytes).unwrap_or(u64::MAX).min(self.room.saturating_sub(self.besides));
        let mut types = types.into_iter().peekable();
        types.peek().is_some()
            && types.all(|dtype| GAINING.contains(&dtype))
            && u128::from(slots) * 100 >= u128::from(self.expert_bytes) * u128::from(SLOTS_PERCENT_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, MIB};

    fn needs(mapped: u64, repacked: u64) -> Needs {
        let (kv, compute, runtime) = (10 * MIB, 20 * MIB, 30 * MIB);
        Needs { mapped: mapped * MIB, repacked: repacked * MIB, kv, compute, runtime, gives_way: 0 }
    }

    fn room(mib: u64) -> Room {
        Room { bytes: mib * MIB, enforced: 0 }
    }

    #[test]
    fn the_mode_follows_from_the_room() {
        let needs = needs(512, 400); // 573 MiB with page tables
        for (mib, expected) in [
            (572, RunMode::Seam),
            (573, RunMode::Passthrough { repack: false, gives_back: false }),
            (972, RunMode::Passthrough { repack: false, gives_back: false }),
            (973, RunMode::Passthrough { repack: true, gives_back: false }),
            (1 << 20, RunMode::Passthrough { repack: true, gives_back: false }),
            (0, RunMode::Seam),
        ] {
            assert_eq!(RunMode::of(&needs, room(mib)), expected, "{mib} MiB");
        }
    }

    #[test]
    fn prompts_may_exceed_what_the_kernel_keeps() {
        let needs = Needs { gives_way: 15 * MIB, ..needs(512, 400) }; // 558 MiB while tokens decode
        let tight = RunMode::Passthrough { repack: false, gives_back: true };
        for (bytes, enforced, expected) in [
            (500, 557, RunMode::Seam),
            (500, 558, tight),
            (572, 600, tight),
            (573, 600, RunMode::Passthrough { repack: false, gives_back: false }),
            (572, 0, RunMode::Seam),
        ] {
            let room = Room { bytes: bytes * MIB, enforced: enforced * MIB };
            assert_eq!(RunMode::of(&needs, room), expected, "{bytes} MiB, {enforced} MiB");
            let stays = RunMode::of(&Needs { gives_way: 0, ..needs }, room);
            assert_eq!(stays, if expected == tight { RunMode::Seam } else { expected }, "nothing is given back");
        }
    }

    #[test]
    fn bounds_decide_where_they_agree() {
        let (least, most) = (needs(512, 0), Needs { kv: 110 * MIB, ..needs(512, 512) });
        let alone = RunMode::Passthrough { repack: true, gives_back: false };
        assert_eq!(RunMode::within(&least, &most, room(500)), Some(RunMode::Seam));
        assert_eq!(RunMode::within(&least, &most, room(600)), None);
        assert_eq!(RunMode::within(&least, &most, room(1100)), None, "with or without rearranged weights");
        assert_eq!(RunMode::within(&least, &most, room(1200)), Some(alone));
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let absurd = Needs { mapped: u64::MAX, repacked: u64::MAX, kv: u64::MAX, compute: 1, runtime: 1, gives_way: 0 };
        assert_eq!(RunMode::of(&absurd, Room { bytes: u64::MAX - 1, enforced: u64::MAX }), RunMode::Seam);
    }

    #[test]
    fn an_eighth_of_the_room() {
        // Qwen3-30B-A3B: 48 layers, 4 heads of 128 for keys and for values, 2 bytes each.
        let token_bytes = 48 * 4 * 256 * 2;
        let of = |gib| context_tokens(40960, token_bytes, gib * GIB);
        assert_eq!([4, 6, 8, 64].map(of), [5376, 8192, 10752, 40960]);
        assert_eq!(of(1), 4096, "fewer are no context");
        assert_eq!(context_tokens(2048, token_bytes, GIB), 2048, "more than it was trained on is for who asks for it");
        assert_eq!(context_tokens(1 << 20, 0, GIB), 1 << 20);
    }

    const INPUT: RepackInput =
        RepackInput { expert_bytes: 1000, expert_cache: ExpertCache::Auto, room: 700, besides: 200 };

    #[test]
    fn half_of_the_experts_must_have_slots() {
        let types = [GgmlType::MXFP4, GgmlType::Q4_0];
        assert!(INPUT.pays(types));
        assert!(!RepackInput { besides: 201, ..INPUT }.pays(types));
        assert!(!RepackInput { besides: 701, ..INPUT }.pays(types), "no room at all");
        let with = |expert_cache| RepackInput { expert_cache, ..INPUT };
        assert!(with(ExpertCache::Percent(50.0)).pays(types));
        assert!(!with(ExpertCache::Percent(49.0)).pays(types));
        assert!(with(ExpertCache::Bytes(500)).pays(types));
        assert!(!with(ExpertCache::Bytes(499)).pays(types));
        assert!(!RepackInput { besides: 300, ..with(ExpertCache::Percent(100.0)) }.pays(types), "asked for, not there");
        let huge = RepackInput { expert_bytes: u64::MAX, room: u64::MAX, besides: 0, ..INPUT };
        assert!(huge.pays(types));
    }

    #[test]
    fn every_type_must_gain() {
        assert!(INPUT.pays([GgmlType::IQ4_NL]));
        assert!(!INPUT.pays([GgmlType::MXFP4, GgmlType::Q8_0]));
        assert!(!INPUT.pays([]), "no experts");
    }
}
