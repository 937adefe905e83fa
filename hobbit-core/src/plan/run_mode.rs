//! Whether a model needs hobbit: if everything fits, plain llama.cpp is fastest.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "name")]
pub enum RunMode {
    /// Everything fits: plain llama.cpp on the mapped file, with no hobbit code in between.
    Passthrough {
        /// Rearrange weights for the CPU while loading, as llama.cpp does by default; there is room for both copies.
        repack: bool,
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
    /// KV cache at its full length.
    pub kv: u64,
    pub compute: u64,
    /// Other memory of the process.
    pub runtime: u64,
}

impl Needs {
    /// Needs with as many weights rearranged as llama.cpp would.
    fn most(&self) -> u64 {
        self.least().saturating_add(self.repacked)
    }

    fn least(&self) -> u64 {
        let page_tables = self.mapped / 512;
        [self.mapped, page_tables, self.kv, self.compute, self.runtime].into_iter().fold(0, u64::saturating_add)
    }
}

impl RunMode {
    /// The run mode for a model with these needs in `room` bytes. Mapped memory gives way under pressure, so no extra
    /// margin stays free.
    pub fn of(needs: &Needs, room: u64) -> Self {
        match room {
            _ if needs.most() <= room => Self::Passthrough { repack: true },
            _ if needs.least() <= room => Self::Passthrough { repack: false },
            _ => Self::Seam,
        }
    }

    /// The same from bounds; `None` if the needs between them decide.
    pub fn within(least: &Needs, most: &Needs, room: u64) -> Option<Self> {
        let run_mode = Self::of(least, room);
        (run_mode == Self::of(most, room)).then_some(run_mode)
    }

    /// Whether llama.cpp runs the model by itself.
    pub fn is_passthrough(self) -> bool {
        matches!(self, Self::Passthrough { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn needs(mapped: u64, repacked: u64) -> Needs {
        Needs { mapped: mapped * MIB, repacked: repacked * MIB, kv: 10 * MIB, compute: 20 * MIB, runtime: 30 * MIB }
    }

    #[test]
    fn what_fits_decides() {
        let needs = needs(512, 400); // 573 MiB with page tables
        for (room, expected) in [
            (572, RunMode::Seam),
            (573, RunMode::Passthrough { repack: false }),
            (972, RunMode::Passthrough { repack: false }),
            (973, RunMode::Passthrough { repack: true }),
            (1 << 20, RunMode::Passthrough { repack: true }),
            (0, RunMode::Seam),
        ] {
            assert_eq!(RunMode::of(&needs, room * MIB), expected, "{room} MiB");
        }
    }

    #[test]
    fn bounds_decide_where_they_agree() {
        let (least, most) = (needs(512, 0), Needs { kv: 110 * MIB, ..needs(512, 512) });
        assert_eq!(RunMode::within(&least, &most, 500 * MIB), Some(RunMode::Seam));
        assert_eq!(RunMode::within(&least, &most, 600 * MIB), None);
        assert_eq!(RunMode::within(&least, &most, 1100 * MIB), None, "with or without rearranged weights");
        assert_eq!(RunMode::within(&least, &most, 1200 * MIB), Some(RunMode::Passthrough { repack: true }));
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let absurd = Needs { mapped: u64::MAX, repacked: u64::MAX, kv: u64::MAX, compute: 1, runtime: 1 };
        assert_eq!(RunMode::of(&absurd, u64::MAX - 1), RunMode::Seam);
    }
}
