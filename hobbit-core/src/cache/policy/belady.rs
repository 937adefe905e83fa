//! The simulator's policy that knows the future: Belady's MIN, the optimum.

use super::{Candidate, Now, Policy, Use, lowest};
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::tests::scripts::{aged, at, high, insert, low, token, victim_of};

    #[test]
    fn the_expert_needed_last_is_evicted() {
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
}
