//! Who takes part: llama.cpp, and hobbit in many ways.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hobbit::cache::policy::PolicyKind;
use hobbit::predict::PredictorKind;
use hobbit::{CachingOptions, LowSource, PrecisionMode, PrecisionOptions, Prefetch};
use serde::{Deserialize, Serialize};

/// A way to run the model; the letter names it in `--order`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contestant {
    /// A: plain llama.cpp.
    Stock,
    /// B: every expert in high precision.
    Exact,
    /// C: low-precision versions in a second plain GGUF.
    Dynamic,
    /// D: high and low versions in a pack.
    PackDynamic,
    /// E: the pack, every expert in high precision.
    PackExact,
    /// F: as C, nothing is skipped.
    NoSkip,
    /// G: as C, with T1 = 0.5: of two experts, the second never comes in high precision.
    LowerT1,
    /// H: as B, with LRU and without looking ahead.
    ExactLru,
    /// I: as H, and all experts of a layer are waited for before any is computed.
    ExactLruNoOverlap,
    /// J: as H, with prefetching.
    ExactLruPrefetch,
    /// K: as B, with prefetching.
    ExactPrefetch,
    /// L: as B, and what was in memory when another text had been read is there at the start.
    ExactWarm,
    /// M: as C, with LRU and without looking ahead.
    DynamicLru,
    /// N: as M, with prefetching.
    DynamicLruPrefetch,
    /// O: as C, with prefetching.
    DynamicPrefetch,
}

use Contestant::{
    Dynamic, DynamicLru, DynamicLruPrefetch, DynamicPrefetch, Exact, ExactLru, ExactLruNoOverlap, ExactLruPrefetch,
    ExactPrefetch, ExactWarm, LowerT1, NoSkip, PackDynamic, PackExact, Stock,
};

/// The files there are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Files {
    pub model: PathBuf,
    /// The same with experts of fewer bits.
    pub low: Option<PathBuf>,
    /// Both in one.
    pub pack: Option<PathBuf>,
}

impl Contestant {
    pub const ALL: [Self; 15] = [
        Stock,
        Exact,
        Dynamic,
        PackDynamic,
        PackExact,
        NoSkip,
        LowerT1,
        ExactLru,
        ExactLruNoOverlap,
        ExactLruPrefetch,
        ExactPrefetch,
        ExactWarm,
        DynamicLru,
        DynamicLruPrefetch,
        DynamicPrefetch,
    ];

    pub fn letter(self) -> char {
        char::from(b'A' + Self::ALL.iter().position(|one| *one == self).unwrap_or_default() as u8)
    }

    pub fn from_letter(letter: char) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.letter() == letter.to_ascii_uppercase())
    }

    pub fn name(self) -> &'static str {
        match self {
            Stock => "llama.cpp",
            Exact => "hobbit exact",
            Dynamic => "hobbit dynamic",
            PackDynamic => "dynamic, pack",
            PackExact => "exact, pack",
            NoSkip => "dynamic, no skip",
            LowerT1 => "dynamic, T1 0.5",
            ExactLru => "exact, LRU",
            ExactLruNoOverlap => "exact, LRU, no overlap",
            ExactLruPrefetch => "exact, LRU, prefetch",
            ExactPrefetch => "exact, prefetch",
            ExactWarm => "exact, warm",
            DynamicLru => "dynamic, LRU",
            DynamicLruPrefetch => "dynamic, LRU, prefetch",
            DynamicPrefetch => "dynamic, prefetch",
        }
    }

    pub fn is_hobbit(self) -> bool {
        self != Stock
    }

    /// Whether logits are llama.cpp's, bit for bit.
    pub fn is_exact(self) -> bool {
        match self {
            Stock | Exact | PackExact | ExactLru | ExactLruNoOverlap | ExactLruPrefetch | ExactPrefetch | ExactWarm => {
                true
            }
            Dynamic | PackDynamic | NoSkip | LowerT1 | DynamicLru | DynamicLruPrefetch | DynamicPrefetch => false,
        }
    }

    pub fn needs_low(self) -> bool {
        !self.is_exact() && !self.needs_pack()
    }

    pub fn needs_pack(self) -> bool {
        matches!(self, PackDynamic | PackExact)
    }

    /// What is opened, and where low versions come from.
    pub fn sources(self, files: &Files) -> Result<(&Path, Option<LowSource>)> {
        if self.needs_pack() {
            return Ok((files.pack.as_deref().context("no pack was given")?, None));
        }
        let low = || Ok::<_, anyhow::Error>(LowSource::File(files.low.clone().context("no low file was given")?));
        Ok((&files.model, self.needs_low().then(low).transpose()?))
    }

    /// Every file that is read.
    pub fn reads(self, files: &Files) -> Vec<&Path> {
        let (model, low) = (Some(files.model.as_path()), files.low.as_deref().filter(|_| self.needs_low()));
        let pack = files.pack.as_deref().filter(|_| self.needs_pack());
        pack.map_or_else(|| model.into_iter().chain(low).collect(), |pack| vec![pack])
    }

    /// What the engine does by default, or without some of it.
    pub fn caching(self) -> CachingOptions {
        let defaults = CachingOptions::default();
        let lru = CachingOptions { policy: PolicyKind::Lru, predictor: PredictorKind::None, ..defaults };
        let prefetch = |off| CachingOptions { predictor: PredictorKind::StackedGate, prefetch: Prefetch::Auto, ..off };
        match self {
            ExactLru | DynamicLru => lru,
            ExactLruNoOverlap => CachingOptions { overlap: false, ..lru },
            ExactLruPrefetch | DynamicLruPrefetch => prefetch(lru),
            ExactPrefetch | DynamicPrefetch => prefetch(defaults),
            Stock | Exact | PackExact | ExactWarm | Dynamic | PackDynamic | NoSkip | LowerT1 => defaults,
        }
    }

    /// As the engine is told.
    pub fn precision(self) -> PrecisionOptions {
        let defaults = PrecisionOptions {
            mode: Some(if self.is_exact() { PrecisionMode::Exact } else { PrecisionMode::Dynamic }),
            ..PrecisionOptions::default()
        };
        match self {
            NoSkip => PrecisionOptions { t2: Some(1.0), ..defaults },
            LowerT1 => PrecisionOptions { t1: Some(0.5), ..defaults },
            _ => defaults,
        }
    }
}
