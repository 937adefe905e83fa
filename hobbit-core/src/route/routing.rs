//! The routing of one batch: the router's ids, regrouped by expert, and as rows of slots. Pure.

use half::f16;

/// A router weight or score in half precision, as a trace keeps it. Policies get rounded
/// weights, so that they decide alike in a run and in its replay.
pub fn rounded(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

/// The (token, rank) pairs of a batch by expert.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// Experts per token.
    pub n_used: usize,
    /// Tokens in the batch.
    pub n_tokens: usize,
    /// The router's choice, `[n_tokens][n_used]`.
    pub ids: Vec<u16>,
    /// Needed experts, each once: in the router's order for a single token, by falling popularity for a batch.
    pub needed: Vec<u16>,
    /// `pairs[starts[e]..starts[e + 1]]` belong to expert `e`, in token order.
    starts: Vec<u32>,
    pairs: Vec<Pair>,
}

/// Token `token` uses an expert as its `rank`-th.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pair {
    /// Position in the batch.
    pub token: u32,
    /// Position in the token's choice, `0..n_used`.
    pub rank: u32,
}

impl Routing {
    /// Regroups `ids`, `[n_tokens][n_used]`, of a layer with `n_expert` experts. Reuses the memory of `self`.
    pub fn set(&mut self, ids: impl Iterator<Item = i32>, n_used: usize, n_expert: usize) -> Result<(), i32> {
        self.ids.clear();
        for id in ids {
            match u16::try_from(id) {
                Ok(index) if usize::from(index) < n_expert => self.ids.push(index),
                _ => return Err(id),
            }
        }
        self.n_used = n_used;
        self.n_tokens = self.ids.len() / n_used.max(1);
        self.starts.clear();
        self.starts.resize(n_expert + 1, 0);
        for &id in &self.ids {
            self.starts[usize::from(id) + 1] += 1;
        }
        for e in 0..n_expert {
            self.starts[e + 1] += self.starts[e];
        }
        self.pairs.clear();
        self.pairs.resize(self.ids.len(), Pair::default());
        let mut next = self.starts.clone();
        for (position, &id) in self.ids.iter().enumerate() {
            let place = &mut next[usize::from(id)];
            self.pairs[*place as usize] = Pair { token: (position / n_used) as u32, rank: (position % n_used) as u32 };
            *place += 1;
        }
        self.needed.clear();
        if self.n_tokens == 1 {
            for &id in &self.ids {
                if !self.needed.contains(&id) {
                    self.needed.push(id);
                }
            }
        } else {
            let mut needed = std::mem::take(&mut self.needed);
            needed.extend((0..n_expert as u16).filter(|&e| !self.pairs_of(e).is_empty()));
            needed.sort_by_key(|&e| std::cmp::Reverse(self.pairs_of(e).len()));
            self.needed = needed;
        }
        Ok(())
    }

    /// Tokens that chose an expert, and tokens after the last of them. At least one token chose it, even if a hostile
    /// trace needs the expert without any.
    ///
    /// # Panics
    /// If the layer has no such expert.
    pub(crate) fn uses_of(&self, expert: u16) -> (u32, u32) {
        let pairs = self.pairs_of(expert);
        let since = pairs.last().map_or(0, |last| (self.n_tokens as u32).saturating_sub(last.token + 1));
        ((pairs.len() as u32).max(1), since)
    }

    /// The expert's fraction of the router's weights, summed over tokens; the fractions of one token sum to 1.
    /// `weights` is `[n_tokens][n_used]`; if it is empty, all experts weigh alike.
    pub fn fraction(&self, expert: u16, weights: &[f32]) -> f32 {
        let position = |pair: &Pair| pair.token as usize * self.n_used + pair.rank as usize;
        self.pairs_of(expert).iter().map(|pair| self.fraction_of_pair(position(pair), weights)).sum()
    }

    /// Each token's experts, in its router's order, and their fractions of its weight. `weights` as in
    /// [`Routing::fraction`].
    pub fn tokens(&self, weights: &[f32]) -> Vec<Vec<(u16, f32)>> {
        let n_used = self.n_used.max(1);
        let of_token = |(token, ids): (usize, &[u16])| {
            let fraction = |rank: usize| self.fraction_of_pair(token * n_used + rank, weights);
            ids.iter().enumerate().map(|(rank, &id)| (id, fraction(rank))).collect()
        };
        self.ids.chunks(n_used).enumerate().map(of_token).collect()
    }

    /// One expert's fraction of a token's weights, in the precision of traces: that of the choice at `position` of
    /// `[n_tokens][n_used]`.
    pub fn fraction_of_pair(&self, position: usize, weights: &[f32]) -> f32 {
        let start = position - position % self.n_used;
        let sum: f32 = weights.get(start..start + self.n_used).map_or(0.0, |row| row.iter().sum());
        rounded(if sum > 0.0 { weights[position] / sum } else { 1.0 / self.n_used as f32 })
    }

    /// Takes `skipped` experts out of the router's weights, `[n_tokens][n_used]`: `without` changes the weights of each
    /// token that chose one of them, and gets a flag for each skipped expert.
    pub(crate) fn leave_out(&self, skipped: &[u16], weights: &mut [f32], without: impl Fn(&mut [f32], &[bool])) {
        let mut left_out = vec![false; self.n_used];
        for (ids, weights) in self.ids.chunks(self.n_used).zip(weights.chunks_mut(self.n_used)) {
            for (flag, id) in left_out.iter_mut().zip(ids) {
                *flag = skipped.contains(id);
            }
            if left_out.contains(&true) {
                without(weights, &left_out);
            }
        }
    }

    /// The ids for a product whose tensor has a row per slot: `out` is replaced by `[n_tokens][n_used]` rows. `rows`
    /// gives the row of each expert of a layer with `n_expert` that has one; an expert without a row gets -1.
    /// `by_expert` is scratch.
    ///
    /// # Panics
    /// If an expert in `rows`, or one that was chosen, is not of the layer.
    pub fn remap(
        &self,
        rows: impl IntoIterator<Item = (u16, i32)>,
        n_expert: usize,
        by_expert: &mut Vec<i32>,
        out: &mut Vec<i32>,
    ) {
        by_expert.clear();
        by_expert.resize(n_expert, -1);
        for (index, row) in rows {
            by_expert[usize::from(index)] = row;
        }
        out.clear();
        out.extend(self.ids.iter().map(|&id| by_expert[usize::from(id)]));
    }

    /// Every use of an expert.
    ///
    /// # Panics
    /// If the layer has no such expert.
    pub fn pairs_of(&self, expert: u16) -> &[Pair] {
        let e = usize::from(expert);
        &self.pairs[self.starts[e] as usize..self.starts[e + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_grouped_by_expert_and_sorted_by_popularity() {
        let mut routing = Routing::default();
        routing.set([3, 1, 1, 0, 1, 3].into_iter(), 2, 4).unwrap();
        assert_eq!(routing.n_tokens, 3);
        assert_eq!(routing.needed, [1, 3, 0]);
        assert_eq!(routing.pairs_of(3), [Pair { token: 0, rank: 0 }, Pair { token: 2, rank: 1 }]);
        assert_eq!(routing.pairs_of(2), []);
        assert_eq!([0, 1, 2, 3].map(|expert| routing.uses_of(expert)), [(1, 1), (3, 0), (1, 0), (2, 0)]);
    }

    #[test]
    fn a_single_token_keeps_the_routers_order() {
        let mut routing = Routing::default();
        routing.set([5, 2, 7].into_iter(), 3, 8).unwrap();
        assert_eq!(routing.needed, [5, 2, 7]);
    }

    #[test]
    fn only_tokens_with_a_skipped_expert_get_new_weights() {
        let mut routing = Routing::default();
        routing.set([3, 1, 0, 2, 1, 0].into_iter(), 2, 4).unwrap();
        let mut weights = [0.75, 0.25, 0.5, 0.5, 0.625, 0.375];
        let zero = |weights: &mut [f32], left_out: &[bool]| {
            weights.iter_mut().zip(left_out).filter(|(_, out)| **out).for_each(|(weight, _)| *weight = 0.0);
        };
        routing.leave_out(&[1], &mut weights, zero);
        assert_eq!(weights, [0.75, 0.0, 0.5, 0.5, 0.0, 0.375]);
    }

    #[test]
    fn ids_become_rows_of_slots() {
        let mut routing = Routing::default();
        routing.set([3, 1, 1, 0].into_iter(), 2, 4).unwrap();
        let (mut by_expert, mut rows) = (vec![7; 9], vec![7]);
        routing.remap([(1, 5), (3, 0), (2, 9)], 4, &mut by_expert, &mut rows);
        assert_eq!(rows, [0, 5, 5, -1]);
    }

    #[test]
    fn ids_that_are_no_experts_are_refused() {
        let mut routing = Routing::default();
        assert_eq!(routing.set([0, 8].into_iter(), 2, 8), Err(8));
        assert_eq!(routing.set([-1, 0].into_iter(), 2, 8), Err(-1));
    }
}
