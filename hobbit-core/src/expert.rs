//! The field's smallest nouns: which expert, which slice of it, and where its bytes lie in a file.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub struct ExpertId {
    /// Block number as in `blk.<layer>.`.
    pub layer: u16,
    /// Row of the router's output, `0..n_expert`.
    #[serde(rename = "expert")]
    pub index: u16,
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.index)
    }
}

/// Which version of an expert's weights: the one that counts, or a smaller one that may stand in for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// The model's own weights.
    #[default]
    High = 0,
    /// Fewer bits per weight.
    Low = 1,
}

impl Precision {
    pub const COUNT: usize = 2;
    /// Every precision, best first.
    pub const ALL: [Precision; Self::COUNT] = [Self::High, Self::Low];

    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::High => "high",
            Self::Low => "low",
        })
    }
}

/// One expert at one precision: what a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub struct Version {
    #[serde(flatten)]
    pub expert: ExpertId,
    pub precision: Precision,
}

impl Version {
    pub const fn high(expert: ExpertId) -> Self {
        Self { expert, precision: Precision::High }
    }

    pub const fn low(expert: ExpertId) -> Self {
        Self { expert, precision: Precision::Low }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.expert, self.precision)
    }
}

/// One matrix of an expert's feed-forward network. The order is the order in which slices are loaded:
/// what the graph multiplies first comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SliceKind {
    /// `ffn_gate_exps`, `[n_embd, n_ff]`.
    Gate = 0,
    /// `ffn_gate_up_exps`, gate and up fused, `[n_embd, 2 * n_ff]`.
    GateUp = 1,
    /// `ffn_up_exps`, `[n_embd, n_ff]`.
    Up = 2,
    /// `ffn_down_exps`, `[n_ff, n_embd]`.
    Down = 3,
}

impl SliceKind {
    pub const COUNT: usize = 4;
    /// Every kind, in load order.
    pub const ALL: [SliceKind; Self::COUNT] = [Self::Gate, Self::GateUp, Self::Up, Self::Down];

    pub const fn index(self) -> usize {
        self as usize
    }

    /// The tensor name's middle part: `ffn_gate_exps` and so on.
    pub const fn tensor_stem(self) -> &'static str {
        match self {
            Self::Gate => "ffn_gate_exps",
            Self::GateUp => "ffn_gate_up_exps",
            Self::Up => "ffn_up_exps",
            Self::Down => "ffn_down_exps",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceId {
    pub version: Version,
    pub kind: SliceKind,
}

impl fmt::Display for SliceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExpertId { layer, index } = self.version.expert;
        write!(f, "blk.{layer}.{}.weight[{index}]", self.kind.tensor_stem())?;
        match self.version.precision {
            Precision::High => Ok(()),
            Precision::Low => f.write_str(" (low)"),
        }
    }
}

/// A range of bytes in one of a model's source files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Index into the model's list of files.
    pub file: u32,
    /// First byte, counted from the start of that file.
    pub offset: u64,
    pub len: u64,
}

impl Extent {
    /// One past the last byte.
    ///
    /// # Panics
    /// Never for extents that came from a checked header: the reader refuses overflowing ranges.
    pub const fn end(&self) -> u64 {
        self.offset + self.len
    }
}
