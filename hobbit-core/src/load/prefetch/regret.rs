//! What it costs that somebody had to leave for a guess.

use crate::expert::Version;

/// How likely a resident that left for a read ahead is missed before it would have left anyway. The first expert of its
/// layer that is read on demand would have taken its place: what is not asked for by then was no loss.
#[derive(Clone, Debug, Default)]
pub struct Regret {
    /// Who left, and is neither missed nor forgotten yet.
    left: Vec<Version>,
    missed: f64,
    seen: f64,
}

impl Regret {
    /// Cases that what is presumed counts as.
    const PRIOR: f64 = 4.0;
    /// At so many cases, what was seen counts half.
    const SEEN_MAX: f64 = 512.0;
    /// Most that are remembered; of more than these, who left first was no loss.
    const LEFT_MAX: usize = 1024;

    /// A resident leaves.
    pub fn leaves(&mut self, version: Version) {
        if self.left.len() >= Self::LEFT_MAX {
            self.left.remove(0);
            self.count(false);
        }
        self.left.push(version);
    }

    /// A layer uses these versions. `reads`: some of them are read on demand.
    pub fn used(&mut self, layer: u16, used: &[Version], reads: bool) {
        let mut left = std::mem::take(&mut self.left);
        left.retain(|version| {
            let is_here = version.expert.layer == layer;
            let is_missed = is_here && used.contains(version);
            if is_missed || is_here && reads {
                self.count(is_missed);
            }
            !(is_missed || is_here && reads)
        });
        self.left = left;
    }

    /// The probability, `0.0..=1.0`; as long as little was seen, mostly what is `presumed`.
    pub fn chance(&self, presumed: f64) -> f64 {
        (self.missed + Self::PRIOR * presumed) / (self.seen + Self::PRIOR)
    }

    fn count(&mut self, is_missed: bool) {
        self.seen += 1.0;
        self.missed += f64::from(u8::from(is_missed));
        if self.seen >= Self::SEEN_MAX {
            (self.seen, self.missed) = (self.seen / 2.0, self.missed / 2.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::ExpertId;

    fn version(layer: u16, index: u16) -> Version {
        Version::high(ExpertId { layer, index })
    }

    #[test]
    fn who_is_asked_for_before_the_next_read_is_missed() {
        let mut regret = Regret::default();
        assert_eq!(regret.chance(0.75), 0.75);
        regret.leaves(version(1, 0));
        regret.leaves(version(1, 1));
        regret.leaves(version(2, 0));
        // Nothing is known of anybody while the layer finds all it asks for.
        regret.used(1, &[version(1, 5)], false);
        assert_eq!(regret.chance(0.75), 0.75);
        // One is asked for, and has to be read; whom that drives out would have been the other.
        regret.used(1, &[version(1, 1)], true);
        assert_eq!(regret.chance(0.75), (1.0 + 3.0) / 6.0);
        // The other layer's is still out.
        regret.used(2, &[version(2, 1)], true);
        assert_eq!(regret.chance(0.75), 4.0 / 7.0);
        regret.used(2, &[version(2, 0)], true);
        assert_eq!(regret.chance(0.75), 4.0 / 7.0, "that was long ago");
    }

    #[test]
    fn what_changes_is_believed_and_nothing_grows() {
        let mut regret = Regret::default();
        for i in 0..4000u16 {
            regret.leaves(version(1, i));
            regret.used(1, &[version(1, i)], true);
        }
        assert!(regret.chance(0.0) > 0.98);
        (0..4000).for_each(|i| regret.leaves(version(1, i)));
        assert_eq!(regret.left.len(), Regret::LEFT_MAX);
        assert!(regret.chance(1.0) < 0.1);
    }
}
