//! Which slot takes a prompt, and how much of the prompt it can reuse. Pure.

use hobbit::options::Token;

use hobbit_programs::prompt_cache::common_prefix;

/// State of a slot.
#[derive(Clone, Copy, Debug)]
pub struct SlotView<'a> {
    pub is_free: bool,
    /// Tokens that the slot has evaluated and keeps.
    pub tokens: &'a [Token],
    /// Order in which slots became free; smaller is earlier.
    pub last_used: u64,
}

/// The slot for a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub slot: usize,
    /// Tokens of the prompt that `from` has evaluated; at least one token is left to evaluate.
    pub n_shared: usize,
    /// The slot that holds them, if it is another one.
    pub from: Option<usize>,
}

/// Chooses a slot for `prompt`: the `wanted` one; else the free slot with the longest common beginning, if that is at
/// least `similarity` (0..=1) of the prompt; else the slot that has been free the longest. `None` if no slot is free.
/// With `reuses`, evaluated tokens are reused: the common beginning with this slot, or a longer one with another slot.
/// A slot that is to keep its first `n` tokens keeps `reach(slot, n)` of them.
pub fn place(
    slots: &[SlotView<'_>],
    prompt: &[Token],
    wanted: Option<usize>,
    similarity: f32,
    reuses: bool,
    reach: impl Fn(usize, usize) -> usize,
) -> Option<Placement> {
    let n_most = prompt.len().saturating_sub(1);
    let common: Vec<usize> = slots.iter().map(|slot| common_prefix(slot.tokens, prompt).min(n_most)).collect();
    let common: Vec<usize> = common.into_iter().enumerate().map(|(at, n)| reach(at, n)).collect();
    let slot = match wanted {
        Some(slot) => Some(slot).filter(|slot| slots.get(*slot).is_some_and(|slot| slot.is_free)),
        None => {
            let free = || slots.iter().enumerate().filter(|(_, slot)| slot.is_free);
            let is_similar = |at: usize| common[at] as f32 > similarity * prompt.len() as f32;
            let similar = free().filter(|(at, _)| is_similar(*at)).max_by_key(|(at, slot)| {
                // On a tie, prefer the slot that loses the fewest tokens.
                (common[*at], std::cmp::Reverse(slot.tokens.len()), std::cmp::Reverse(*at))
            });
            similar.or_else(|| free().min_by_key(|(at, slot)| (slot.last_used, *at))).map(|(at, _)| at)
        }
    }?;
    let own = common[slot];
    if !reuses {
        return Some(Placement { slot, n_shared: 0, from: None });
    }
    match (0..slots.len()).filter(|at| *at != slot).max_by_key(|at| common[*at]) {
        Some(at) if common[at] > own => Some(Placement { slot, n_shared: common[at], from: Some(at) }),
        _ => Some(Placement { slot, n_shared: own, from: None }),
    }
}

/// A run of tokens that the context holds at `from` and the prompt needs at `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub from: usize,
    pub to: usize,
    pub n: usize,
}

/// Runs of at least `n_min` tokens that occur in `held` in the order of `prompt`, after `n_shared` common first
/// tokens. They can be moved instead of evaluated, up to the first gap in the prompt.
pub fn reusable(held: &[Token], prompt: &[Token], n_shared: usize, n_min: usize) -> Vec<Run> {
    let mut runs = Vec::new();
    if n_min == 0 {
        return runs;
    }
    let (mut from, mut to) = (n_shared, n_shared);
    while from < held.len() && to + 1 < prompt.len() {
        // At least one token is evaluated.
        let n = common_prefix(&held[from..], &prompt[to..prompt.len() - 1]);
        if n >= n_min {
            runs.push(Run { from, to, n });
            (from, to) = (from + n, to + n);
        } else {
            from += 1;
        }
    }
    runs
}

/// The tokens that a full context drops, as (first, count): `n_discard` tokens from `n_keep` on, half of the rest if
/// 0. `None` if nothing may be dropped.
pub fn shift(n_held: usize, n_keep: usize, n_discard: usize) -> Option<(usize, usize)> {
    let n_keep = n_keep.min(n_held.saturating_sub(1));
    let most = n_held - n_keep;
    let n = if n_discard == 0 { most / 2 } else { n_discard.min(most) };
    (n > 0).then_some((n_keep, n))
}

/// A slot's share of the common context.
#[derive(Clone, Copy, Debug)]
pub struct Holding {
    /// Tokens that it holds or is about to.
    pub n: usize,
    pub holder: Holder,
}

/// The use that a slot makes of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// Keeps them for a later prompt; a smaller number is an earlier time.
    Idle { since: u64 },
    /// Reads a prompt.
    Prompt,
    /// Generates, maybe until the context ends.
    Generation { is_unlimited: bool },
}

/// The slot that gives way where the shared context is full, `but` for one: of those that are idle the one that was so
/// the longest; else the largest of those beyond their fair share, unlimited generations before all others. A slot
/// within its fair share never gives way. `None` where none is left.
pub fn gives_way(slots: &[Holding], fair_share: usize, but: Option<usize>) -> Option<usize> {
    let others = || slots.iter().enumerate().filter(|(at, slot)| slot.n > 0 && Some(*at) != but);
    let longest_idle = others().filter_map(|(at, slot)| match slot.holder {
        Holder::Idle { since } => Some((since, at)),
        _ => None,
    });
    let is_unlimited = |slot: &Holding| slot.holder == Holder::Generation { is_unlimited: true };
    let largest =
        || others().filter(|(_, slot)| slot.n > fair_share).max_by_key(|(_, slot)| (is_unlimited(slot), slot.n));
    longest_idle.min().map(|(_, at)| at).or_else(|| largest().map(|(at, _)| at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(is_free: bool, tokens: &[Token], last_used: u64) -> SlotView<'_> {
        SlotView { is_free, tokens, last_used }
    }

    /// Every slot goes back to any of its tokens.
    fn whole(_: usize, n: usize) -> usize {
        n
    }

    #[test]
    fn slots_count_by_tokens_they_can_rewind_to() {
        let slots = [view(true, &[1, 2, 3, 4], 0), view(false, &[1, 2, 3], 0)];
        let with_checkpoint = |slot: usize, n: usize| if slot == 0 { 0 } else { n.min(2) };
        let found = place(&slots, &[1, 2, 3, 4, 5], None, 0.1, true, with_checkpoint);
        assert_eq!(found, Some(Placement { slot: 0, n_shared: 2, from: Some(1) }));
    }

    #[test]
    fn the_longest_beginning_decides_then_age() {
        let slots = [view(true, &[1, 2, 3], 5), view(true, &[1, 2, 3, 4], 9), view(true, &[], 1)];
        let at = |prompt: &[Token]| place(&slots, prompt, None, 0.1, true, whole).unwrap();
        assert_eq!(at(&[1, 2, 3, 4, 5]), Placement { slot: 1, n_shared: 4, from: None });
        assert_eq!(at(&[9, 9]), Placement { slot: 2, n_shared: 0, from: None });
        // As much in both: the shorter one loses less.
        assert_eq!(at(&[1, 2, 8]), Placement { slot: 0, n_shared: 2, from: None });
    }

    #[test]
    fn one_token_is_left_to_evaluate() {
        let slots = [view(true, &[1, 2, 3], 0)];
        assert_eq!(place(&slots, &[1, 2, 3], None, 0.1, true, whole).unwrap().n_shared, 2);
        assert_eq!(place(&slots, &[1, 2, 3], None, 0.1, false, whole).unwrap().n_shared, 0);
        assert_eq!(place(&slots, &[], None, 0.1, true, whole).unwrap().n_shared, 0);
    }

    #[test]
    fn beginnings_come_from_busy_slots_too() {
        let slots = [view(false, &[1, 2, 3, 4], 0), view(true, &[1], 0)];
        assert_eq!(
            place(&slots, &[1, 2, 3, 9], None, 0.5, true, whole),
            Some(Placement { slot: 1, n_shared: 3, from: Some(0) })
        );
        assert_eq!(place(&slots, &[1], Some(0), 0.1, true, whole), None, "a slot that is wanted is waited for");
        assert_eq!(place(&slots[..1], &[1], None, 0.1, true, whole), None);
        assert_eq!(place(&slots, &[1], Some(7), 0.1, true, whole), None);
    }

    #[test]
    fn runs_are_moved_in_order() {
        let held = [1, 2, 3, 7, 7, 4, 5, 6, 8];
        let prompt = [1, 2, 3, 4, 5, 6, 9];
        assert_eq!(reusable(&held, &prompt, 3, 2), [Run { from: 5, to: 3, n: 3 }]);
        assert_eq!(reusable(&held, &prompt, 3, 4), []);
        assert_eq!(reusable(&held, &prompt, 3, 0), []);
        assert_eq!(reusable(&[1, 2], &[1, 2], 1, 1), [], "the last token is evaluated");
    }

    #[test]
    fn half_of_what_may_go_goes() {
        assert_eq!(shift(256, 1, 0), Some((1, 127)));
        assert_eq!(shift(10, 0, 3), Some((0, 3)));
        assert_eq!(shift(10, 100, 0), None);
        assert_eq!(shift(0, 0, 0), None);
    }

    #[test]
    fn idle_slots_give_way_then_the_largest_beyond_its_share() {
        let idle = |n, since| Holding { n, holder: Holder::Idle { since } };
        let prompt = |n| Holding { n, holder: Holder::Prompt };
        let limited = |n| Holding { n, holder: Holder::Generation { is_unlimited: false } };
        let unlimited = |n| Holding { n, holder: Holder::Generation { is_unlimited: true } };
        let of = |slots: &[Holding]| gives_way(slots, 100, None);
        assert_eq!(of(&[unlimited(180), idle(10, 7), idle(90, 3), idle(0, 1)]), Some(2), "idle the longest");
        assert_eq!(of(&[unlimited(120), limited(20), unlimited(150), prompt(110)]), Some(2));
        assert_eq!(
            of(&[unlimited(101), limited(190), prompt(100)]),
            Some(0),
            "an unlimited one before a larger limited one"
        );
        assert_eq!(of(&[unlimited(99), limited(150), prompt(140)]), Some(1), "within its share it stays");
        assert_eq!(of(&[unlimited(99), limited(101), prompt(140)]), Some(2));
        assert_eq!(of(&[unlimited(100), limited(100), prompt(100)]), None);
        assert_eq!(gives_way(&[idle(50, 1), unlimited(150)], 100, Some(0)), Some(1));
        assert_eq!(gives_way(&[idle(50, 1), unlimited(150)], 100, Some(1)), Some(0));
    }
}
