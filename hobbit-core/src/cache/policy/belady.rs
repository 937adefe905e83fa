//! Policies of the simulator that know the future: Belady's MIN, the optimum, and one that knows the next few tokens.

use super::{Candidate, Now, Policy, Use, lowest};
use crate::cache::ShareId;
use crate::cache::slots::ByExpert;
use crate::expert::{ExpertId, Precision, Version};
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upcoming {
    /// When: an index that never falls, in any unit; the token's number over all sequences, say.
    pub time: u64,
    pub expert: ExpertId,
    /// The precision that the use asks for if the expert is missing; `None` if it does without.
    pub demand: Option<Precision>,
}

/// Evicts the version that is needed last. [`Policy::on_use`] must report the uses of the future in its order: each one
/// removes the expert's next use.
///
/// If misses cost differently, it evicts the lowest cost per distance, a heuristic: the optimum is a flow problem. The
/// loss of a high version costs 1 at the next use that asks for high precision, and `low_cost` at the next one that
/// asks for low precision unless the low version is resident; the more pressing one counts. The loss of a low version
/// costs `low_cost` at the next use that asks for low precision, and nothing beside its high version.
#[derive(Clone, Debug)]
pub struct Belady {
    low_cost: f64,
    clock: u64,
    future: ByExpert<Future>,
    resident: ByExpert<[bool; Precision::COUNT]>,
}

/// Times of an expert's uses to come, soonest first.
#[derive(Clone, Debug, Default)]
struct Future {
    /// By [`Precision::index`] of the demand.
    demands: [VecDeque<u64>; Precision::COUNT],
    skips: VecDeque<u64>,
}

impl Belady {
    /// For uses with a precision each, in order of time. `low_cost` as in [`super::Shape`].
    pub fn new(future: impl IntoIterator<Item = Upcoming>, low_cost: f32) -> Self {
        let mut by_expert = ByExpert::<Future>::default();
        for Upcoming { time, expert, demand } in future {
            let Future { demands, skips } = by_expert.entry(expert);
            demand.map_or(skips, |precision| &mut demands[precision.index()]).push_back(time);
        }
        Self { low_cost: f64::from(low_cost), clock: 0, future: by_expert, resident: ByExpert::default() }
    }

    /// 1 / distance of the next use that asks for this precision; 0 for none.
    fn urgency(&self, expert: ExpertId, demand: Precision) -> f64 {
        let next = self.future.get(expert).and_then(|future| future.demands[demand.index()].front());
        next.map_or(0.0, |time| 1.0 / time.saturating_sub(self.clock).max(1) as f64)
    }

    /// Whether any use of the expert that cannot be skipped comes within such a time.
    pub(super) fn is_needed_within(&self, expert: ExpertId, reach: u64) -> bool {
        let demands = self.future.get(expert).into_iter().flat_map(|future| &future.demands);
        demands.filter_map(VecDeque::front).any(|time| time.saturating_sub(self.clock) <= reach)
    }

    fn worth(&self, Version { expert, precision }: Version) -> f64 {
        let is_resident = |other: Precision| self.resident.get(expert).is_some_and(|resident| resident[other.index()]);
        let of_low = self.low_cost * self.urgency(expert, Precision::Low);
        match precision {
            Precision::High if is_resident(Precision::Low) => self.urgency(expert, Precision::High),
            Precision::High => self.urgency(expert, Precision::High).max(of_low),
            Precision::Low if is_resident(Precision::High) => 0.0,
            Precision::Low => of_low,
        }
    }

    fn set_resident(&mut self, version: Version, is_resident: bool) {
        self.resident.entry(version.expert)[version.precision.index()] = is_resident;
    }
}

impl Policy for Belady {
    fn on_insert(&mut self, version: Version, _now: Now) {
        self.set_resident(version, true);
    }

    fn on_use(&mut self, expert: ExpertId, _usage: Use, _now: Now) {
        let Future { demands: [high, low], skips } = self.future.entry(expert);
        let soonest = [high, low, skips].into_iter().filter(|times| !times.is_empty()).min_by_key(|times| times[0]);
        if let Some(time) = soonest.and_then(VecDeque::pop_front) {
            self.clock = self.clock.max(time);
        }
    }

    fn on_remove(&mut self, version: Version, _now: Now) {
        self.set_resident(version, false);
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], _now: Now) -> usize {
        let position = lowest(candidates, |version| self.worth(version));
        self.set_resident(candidates[position].version, false);
        position
    }
}

/// A policy that knows the next few tokens. It evicts as another policy does among candidates that are not needed soon;
/// where all are needed sooner, as [`Belady`] does. Its misses show the worth of seeing that far ahead.
pub struct Near {
    belady: Belady,
    other: Box<dyn Policy>,
    reach: u64,
}

impl Near {
    pub fn new(belady: Belady, other: Box<dyn Policy>, reach: u64) -> Self {
        Self { belady, other, reach }
    }
}

impl Policy for Near {
    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        self.other.on_share(share, members);
    }

    fn on_insert(&mut self, version: Version, now: Now) {
        self.belady.on_insert(version, now);
        self.other.on_insert(version, now);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.belady.on_use(expert, usage, now);
        self.other.on_use(expert, usage, now);
    }

    fn on_scores(&mut self, layer: u16, scores: &[f32], now: Now) {
        self.other.on_scores(layer, scores, now);
    }

    fn on_remove(&mut self, version: Version, now: Now) {
        self.belady.on_remove(version, now);
        self.other.on_remove(version, now);
    }

    fn begin_sequence(&mut self) {
        self.other.begin_sequence();
    }

    fn victim(&mut self, incoming: Version, candidates: &[Candidate], now: Now) -> usize {
        let is_far = |candidate: &Candidate| !self.belady.is_needed_within(candidate.version.expert, self.reach);
        let (places, far): (Vec<usize>, Vec<Candidate>) =
            candidates.iter().copied().enumerate().filter(|(_, candidate)| is_far(candidate)).unzip();
        if far.is_empty() {
            let victim = self.belady.victim(incoming, candidates, now);
            self.other.on_remove(candidates[victim].version, now);
            return victim;
        }
        let victim = places[self.other.victim(incoming, &far, now)];
        self.belady.on_remove(candidates[victim].version, now);
        victim
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::Lru;
    use crate::cache::policy::scripts::{aged, at, high, insert, low, token, victim_of};

    #[test]
    fn whoever_is_needed_last_goes() {
        let future = [0, 1, 2, 1, 0, 2, 0].iter().zip(10..).map(|(&index, time)| Upcoming {
            time,
            expert: high(index).expert,
            demand: Some(Precision::High),
        });
        let mut belady = aged(Belady::new(future, 1.0));
        insert(&mut belady, &[0, 1, 2]);
        let mut step = |index: u16| {
            token(&mut belady, 0, &[index]);
            victim_of(&mut belady, &[0, 1, 2])
        };
        assert_eq!(step(0), 0, "at 10: 0 comes at 14, 1 at 11, 2 at 12");
        assert_eq!([1, 2].map(&mut step), [0, 2]);
        assert_eq!(step(1), 1, "never again");
        assert_eq!(step(0), 1);
        assert_eq!([2, 0].map(&mut step), [1, 1], "1 and 2 are over, 1 longer");
    }

    #[test]
    fn a_low_reload_is_worth_less() {
        let demands = [(1, 0, Precision::Low), (3, 1, Precision::High), (5, 0, Precision::High)];
        let future =
            demands.map(|(time, index, demand)| Upcoming { time, expert: high(index).expert, demand: Some(demand) });
        let victim = |low_cost: f32, residents: &[Version], candidates: &[Version]| {
            let mut belady = aged(Belady::new(future, low_cost));
            residents.iter().for_each(|&version| belady.on_insert(version, at(0)));
            candidates[belady.victim(high(9), candidates, at(0))]
        };
        let both = [high(0), high(1)];
        assert_eq!(victim(0.5, &both, &both), high(1), "1/2 at 1 is more than 1 at 3");
        assert_eq!(victim(0.25, &both, &both), high(0), "1/4 at 1 is less");
        assert_eq!(victim(0.5, &[high(0), high(1), low(0)], &both), high(0), "the low version is there for that");
        let all = [high(0), high(1), low(0)];
        assert_eq!(victim(0.5, &all, &all), low(0), "useless beside its high version");
        assert_eq!(victim(0.5, &[low(0), high(1)], &[low(0), high(1)]), high(1));
        assert_eq!(victim(0.5, &[low(0), low(1)], &[low(0), low(1)]), low(1), "only high precision is asked of 1");
    }

    #[test]
    fn skipped_uses_pass() {
        let expert = high(0).expert;
        let future = [(1, None), (2, Some(Precision::High))].map(|(time, demand)| Upcoming { time, expert, demand });
        let mut belady = aged(Belady::new(future, 1.0));
        belady.on_use(expert, Use::by_one(false, None, 0.1), at(0));
        assert_eq!((belady.clock, belady.urgency(expert, Precision::High)), (1, 1.0));
        token(&mut belady, 1, &[0]);
        assert_eq!(belady.urgency(expert, Precision::High), 0.0);
    }

    #[test]
    fn beyond_its_sight_another_policy_decides() {
        let victim = |reach| {
            let uses = [(1, 1), (2, 2), (3, 0), (4, 1), (6, 2), (9, 0)];
            let future =
                uses.map(|(time, index)| Upcoming { time, expert: high(index).expert, demand: Some(Precision::High) });
            let mut near = aged(Near::new(Belady::new(future, 1.0), Box::new(Lru), reach));
            insert(&mut near, &[0, 1, 2]);
            [1, 2, 0].into_iter().zip(0..).for_each(|(index, time)| token(&mut near, time, &[index]));
            victim_of(&mut near, &[0, 1, 2])
        };
        assert_eq!(victim(0), 1, "the least recently used");
        assert_eq!([1, 2].map(victim), [2; 2], "at 3, 1 comes at 4");
        assert_eq!([3, 5].map(victim), [0; 2], "and 2 at 6");
        assert_eq!(victim(6), 0, "all are in sight, 0 comes last");
    }
}
