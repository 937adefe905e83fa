//! Sets of stacks as states. Each state is made once and keeps its transitions.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::rules::{Rules, Symbol};
use super::stacks::{MADE, Stack, Stacks, Steps, TooMany};
use super::text::Part;

/// A set of stacks, not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct State(u32);

/// A transition, as far as it is known.
#[derive(Clone, Copy)]
enum Next {
    Unknown,
    Nowhere,
    To(State),
}

/// Tokens that stacks accept by id.
#[derive(Default)]
struct Tokens {
    wanted: HashSet<u32>,
    all_but: Option<u32>,
    any: bool,
}

struct Met {
    /// In order.
    stacks: Arc<[Stack]>,
    may_end: bool,
    tokens: Tokens,
    /// First characters of the runs whose characters all lead to the same state, after the run from 0 on; made on first
    /// use.
    runs: Option<Vec<u32>>,
    /// By run.
    next: Vec<Next>,
}

pub(super) struct Automaton {
    rules: Arc<Rules>,
    stacks: Stacks,
    states: Vec<Met>,
    by_stacks: HashMap<Arc<[Stack]>, State>,
    /// The state that stacks lead to, before their rules are expanded.
    after: HashMap<Vec<Stack>, Option<State>>,
    /// Whether states accept a character that begins with these bytes.
    with_part: HashMap<(State, Part), bool>,
}

impl Automaton {
    pub(super) fn new(rules: Arc<Rules>) -> Self {
        Self {
            rules,
            stacks: Stacks::new(),
            states: Vec::new(),
            by_stacks: HashMap::new(),
            after: HashMap::new(),
            with_part: HashMap::new(),
        }
    }

    /// The first state; `None` for a grammar whose rules never reach a character.
    pub(super) fn begin(&mut self, steps: &mut Steps) -> Result<Option<State>, TooMany> {
        let rules = Arc::clone(&self.rules);
        let mut from = Vec::new();
        for way in rules.ways(rules.root()) {
            from.push(self.stacks.at(&rules, Stack::EMPTY, *way, steps)?);
        }
        self.state_after(from, steps)
    }

    pub(super) fn may_end(&self, state: State) -> bool {
        self.met(state).may_end
    }

    /// Whether a stack accepts this token by its id.
    pub(super) fn wants_token(&self, state: State, token: u32) -> bool {
        let Tokens { wanted, all_but, any } = &self.met(state).tokens;
        *any || all_but.is_some_and(|other| other != token) || (!wanted.is_empty() && wanted.contains(&token))
    }

    /// The state after a token that is accepted by its id.
    pub(super) fn after_token(
        &mut self,
        state: State,
        token: u32,
        steps: &mut Steps,
    ) -> Result<Option<State>, TooMany> {
        if !self.wants_token(state, token) {
            return Ok(None);
        }
        self.step(state, steps, |_, symbol| match symbol {
            Symbol::Token(wanted) => wanted == token,
            Symbol::NotToken(other) => other != token,
            _ => false,
        })
    }

    pub(super) fn follow(&mut self, state: State, character: u32, steps: &mut Steps) -> Result<Option<State>, TooMany> {
        if self.met(state).runs.is_none() {
            self.divide(state, steps)?;
        }
        let met = self.met(state);
        let run = met.runs.as_ref().map_or(0, |runs| runs.partition_point(|first| *first <= character));
        match met.next[run] {
            Next::To(next) => return Ok(Some(next)),
            Next::Nowhere => return Ok(None),
            Next::Unknown => {}
        }
        let next = self.step(state, steps, |rules, symbol| match symbol {
            Symbol::Character(wanted) => wanted == character,
            Symbol::Class(class) => rules.class(class).has(character),
            _ => false,
        })?;
        self.states[state.0 as usize].next[run] = next.map_or(Next::Nowhere, Next::To);
        Ok(next)
    }

    /// Whether a stack accepts a character that begins with `part`.
    pub(super) fn goes_on_with(&mut self, state: State, part: Part, steps: &mut Steps) -> Result<bool, TooMany> {
        let Some((first, last)) = part.becomes() else { return Ok(false) };
        if let Some(goes_on) = self.with_part.get(&(state, part)) {
            return Ok(*goes_on);
        }
        let stacks = &self.met(state).stacks;
        steps.take(MADE + 4 * stacks.len() as u64)?;
        let mut tops = stacks.iter().filter_map(|stack| self.stacks.top(*stack));
        let goes_on = tops.any(|(place, _)| match self.rules.symbol(place) {
            Symbol::Character(wanted) => (first..=last).contains(&wanted),
            Symbol::Class(class) => self.rules.class(class).overlaps(first, last),
            _ => false,
        });
        self.with_part.insert((state, part), goes_on);
        Ok(goes_on)
    }

    /// The state of the stacks that accept characters.
    pub(super) fn of_characters(&mut self, state: State, steps: &mut Steps) -> Result<Option<State>, TooMany> {
        let stacks = Arc::clone(&self.met(state).stacks);
        let wants = |stack: &Stack| {
            let top = self.stacks.top(*stack);
            top.is_some_and(|(place, _)| matches!(self.rules.symbol(place), Symbol::Character(_) | Symbol::Class(_)))
        };
        let wanting: Vec<Stack> = stacks.iter().copied().filter(wants).collect();
        self.state_of(wanting, steps)
    }

    /// The union of two states.
    pub(super) fn either(
        &mut self,
        one: Option<State>,
        other: Option<State>,
        steps: &mut Steps,
    ) -> Result<Option<State>, TooMany> {
        let (Some(first), Some(second)) = (one, other) else { return Ok(one.or(other)) };
        let mut both = [self.met(first).stacks.to_vec(), self.met(second).stacks.to_vec()].concat();
        both.sort_unstable();
        both.dedup();
        self.state_of(both, steps)
    }

    /// Forgets all states but these, which get new numbers.
    pub(super) fn shrink(&mut self, kept: [State; 2]) -> [State; 2] {
        let mut sets = kept.map(|state| self.met(state).stacks.to_vec());
        self.stacks.shrink(&mut sets);
        self.states.clear();
        self.by_stacks.clear();
        self.after.clear();
        self.with_part.clear();
        let mut unbounded = Steps::new(u64::MAX);
        sets.map(|set| {
            let state = self.state_of(set, &mut unbounded).unwrap_or_default();
            state.expect("a state's stacks are not empty")
        })
    }

    pub(super) fn n_nodes(&self) -> usize {
        self.stacks.len()
    }

    fn met(&self, state: State) -> &Met {
        &self.states[state.0 as usize]
    }

    /// The state after the stacks whose top is wanted.
    fn step(
        &mut self,
        state: State,
        steps: &mut Steps,
        is_wanted: impl Fn(&Rules, Symbol) -> bool,
    ) -> Result<Option<State>, TooMany> {
        let stacks = Arc::clone(&self.met(state).stacks);
        steps.take(8 * stacks.len() as u64)?;
        let mut from = Vec::new();
        for stack in stacks.iter() {
            if let Some((place, below)) = self.stacks.top(*stack)
                && is_wanted(&self.rules, self.rules.symbol(place))
            {
                from.push(self.stacks.at(&self.rules, below, place + 1, steps)?);
            }
        }
        self.state_after(from, steps)
    }

    fn state_after(&mut self, mut from: Vec<Stack>, steps: &mut Steps) -> Result<Option<State>, TooMany> {
        steps.take(4 * from.len() as u64)?;
        from.sort_unstable();
        from.dedup();
        if let Some(state) = self.after.get(&from) {
            return Ok(*state);
        }
        let found = self.stacks.advance(&self.rules, from.clone(), steps)?;
        let state = self.state_of(found, steps)?;
        steps.take(MADE + from.len() as u64)?;
        self.after.insert(from, state);
        Ok(state)
    }

    fn state_of(&mut self, stacks: Vec<Stack>, steps: &mut Steps) -> Result<Option<State>, TooMany> {
        if stacks.is_empty() {
            return Ok(None);
        }
        steps.take(stacks.len() as u64)?;
        if let Some(state) = self.by_stacks.get(&*stacks) {
            return Ok(Some(*state));
        }
        steps.take(4 * MADE + 4 * stacks.len() as u64)?;
        let state = State(u32::try_from(self.states.len()).map_err(|_| TooMany)?);
        let stacks: Arc<[Stack]> = stacks.into();
        let mut tokens = Tokens::default();
        for stack in stacks.iter() {
            let Some((place, _)) = self.stacks.top(*stack) else { continue };
            match self.rules.symbol(place) {
                Symbol::Token(token) => _ = tokens.wanted.insert(token),
                Symbol::NotToken(token) if tokens.all_but.is_none_or(|other| other == token) => {
                    tokens.all_but = Some(token);
                }
                Symbol::NotToken(_) => tokens.any = true,
                _ => {}
            }
        }
        let may_end = stacks.contains(&Stack::EMPTY);
        self.by_stacks.insert(Arc::clone(&stacks), state);
        self.states.push(Met { stacks, may_end, tokens, runs: None, next: Vec::new() });
        Ok(Some(state))
    }

    /// Finds the runs of characters that lead to the same state.
    fn divide(&mut self, state: State, steps: &mut Steps) -> Result<(), TooMany> {
        let met = self.met(state);
        steps.take(2 * met.stacks.len() as u64)?;
        let tops = met.stacks.iter().filter_map(|stack| self.stacks.top(*stack));
        let mut wanted: Vec<Symbol> = tops.map(|(place, _)| self.rules.symbol(place)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut firsts = Vec::new();
        for symbol in wanted {
            let one;
            let ranges = match symbol {
                Symbol::Character(character) => {
                    one = [(character, character)];
                    &one[..]
                }
                Symbol::Class(class) => self.rules.class(class).ranges(),
                _ => continue,
            };
            steps.take(16 * ranges.len() as u64)?;
            firsts.extend(ranges.iter().flat_map(|(first, last)| [Some(*first), last.checked_add(1)]).flatten());
        }
        firsts.sort_unstable();
        firsts.dedup();
        let met = &mut self.states[state.0 as usize];
        met.next = vec![Next::Unknown; firsts.len() + 1];
        met.runs = Some(firsts);
        Ok(())
    }
}
