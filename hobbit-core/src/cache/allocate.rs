//! How many slots of a pool each layer gets.

use crate::named::UnknownName;
use std::fmt;
use std::str::FromStr;

/// How a pool's slots are divided among its layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Allocation {
    /// Equally, to within one.
    #[default]
    Even,
    /// Fate's shallow-favouring cache (section 4.4): the first layers get slots for all of their experts, one layer
    /// after the other, and the others share the remaining slots equally. A layer without slots runs on staging.
    ShallowFirst {
        /// How many layers come first.
        layers: u16,
    },
}

impl Allocation {
    /// The layers that Fate found to be predicted worst in Qwen1.5-MoE: 0 to 3.
    pub(crate) const SHALLOW_LAYERS: u16 = 4;
}

impl FromStr for Allocation {
    type Err = UnknownName;

    fn from_str(word: &str) -> Result<Self, UnknownName> {
        let fail = || UnknownName::new("slot allocation", word, "even, shallow-first, shallow-first:LAYERS");
        match word.split_once(':') {
            None if word == "even" => Ok(Self::Even),
            None if word == "shallow-first" => Ok(Self::ShallowFirst { layers: Self::SHALLOW_LAYERS }),
            Some(("shallow-first", layers)) => {
                layers.parse().map(|layers| Self::ShallowFirst { layers }).map_err(|_| fail())
            }
            _ => Err(fail()),
        }
    }
}

impl fmt::Display for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Even => f.write_str("even"),
            Self::ShallowFirst { layers } => write!(f, "shallow-first:{layers}"),
        }
    }
}

/// One layer's experts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerDemand {
    /// Layers with experts before it, of the whole model: 0 is the shallowest.
    pub depth: u16,
    /// Versions that may have slots.
    pub members: u32,
    /// Experts that one token uses. With [`Allocation::Even`] every layer gets this many slots before any gets more:
    /// with fewer, nothing stays resident from one token to the next, whatever the policy.
    pub needs: u32,
}

/// Slots of each layer, in order: at most `n_slots` together, none more than its members, and all slots that members
/// can use. With [`Allocation::Even`], equal demands give shares that differ by at most one, and earlier layers more.
pub fn allocate(kind: Allocation, n_slots: u32, layers: &[LayerDemand]) -> Vec<u32> {
    match kind {
        Allocation::Even => by_needs(n_slots, layers),
        Allocation::ShallowFirst { layers: n_shallow } => shallow_first(n_slots, layers, n_shallow),
    }
}

/// Every layer gets its needs first, or an equal part if there are too few slots; the rest is divided equally.
fn by_needs(n_slots: u32, layers: &[LayerDemand]) -> Vec<u32> {
    let needs: Vec<u32> = layers.iter().map(|layer| layer.needs.min(layer.members)).collect();
    let members: Vec<u32> = layers.iter().map(|layer| layer.members).collect();
    let equal = even(n_slots, &members);
    if equal.iter().zip(&needs).all(|(share, needs)| share >= needs) {
        return equal;
    }
    let mut shares = even(n_slots, &needs);
    let left = n_slots - shares.iter().sum::<u32>();
    add_even(&mut shares, left, layers, |_| true);
    shares
}

/// As equal as possible, none more than its members.
pub(super) fn even(n_slots: u32, members: &[u32]) -> Vec<u32> {
    let mut shares = vec![0; members.len()];
    let mut left = n_slots;
    loop {
        let before = left;
        for (share, members) in shares.iter_mut().zip(members) {
            if left > 0 && *share < *members {
                *share += 1;
                left -= 1;
            }
        }
        if left == before {
            return shares;
        }
    }
}

/// Divides slots equally among the layers that `is_asked` accepts.
fn add_even(shares: &mut [u32], n_slots: u32, layers: &[LayerDemand], is_asked: impl Fn(&LayerDemand) -> bool) {
    let room = |(layer, share): (&LayerDemand, &u32)| if is_asked(layer) { layer.members - share } else { 0 };
    let rooms: Vec<u32> = layers.iter().zip(&*shares).map(room).collect();
    shares.iter_mut().zip(even(n_slots, &rooms)).for_each(|(share, more)| *share += more);
}

fn shallow_first(n_slots: u32, layers: &[LayerDemand], n_shallow: u16) -> Vec<u32> {
    let (mut shares, mut left) = (vec![0; layers.len()], n_slots);
    for (share, layer) in shares.iter_mut().zip(layers).filter(|(_, layer)| layer.depth < n_shallow) {
        *share = left.min(layer.members);
        left -= *share;
    }
    add_even(&mut shares, left, layers, |layer| layer.depth >= n_shallow);
    shares
}

#[cfg(test)]
mod tests;
