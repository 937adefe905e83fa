//! Stacks of places that share what lies below their tops: each pair of a place and what is below it is there once.

use std::collections::{HashMap, HashSet};

use super::rules::{Rules, Symbol};
use super::steps::{MADE, Steps, TooMany};

/// A stack; equal ones are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Stack(u32);

impl Stack {
    /// With nothing more to come.
    pub(super) const EMPTY: Stack = Stack(0);
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Node {
    below: Stack,
    place: u32,
}

pub(super) struct Stacks {
    /// Of every stack but the empty one, which comes first.
    nodes: Vec<Node>,
    known: HashMap<Node, Stack>,
}

impl Stacks {
    pub(super) fn new() -> Self {
        let empty = Node { below: Stack::EMPTY, place: 0 };
        Self { nodes: vec![empty], known: HashMap::new() }
    }

    /// The place on top, and what is below it.
    pub(super) fn top(&self, stack: Stack) -> Option<(u32, Stack)> {
        let node = self.nodes[stack.0 as usize];
        (stack != Stack::EMPTY).then_some((node.place, node.below))
    }

    fn push(&mut self, below: Stack, place: u32, steps: &mut Steps) -> Result<Stack, TooMany> {
        let node = Node { below, place };
        steps.take(8)?;
        if let Some(stack) = self.known.get(&node) {
            return Ok(*stack);
        }
        steps.take(MADE)?;
        let stack = Stack(u32::try_from(self.nodes.len()).map_err(|_| TooMany)?);
        self.nodes.push(node);
        self.known.insert(node, stack);
        Ok(stack)
    }

    /// With `place` on top, unless a way ends there.
    pub(super) fn at(&mut self, rules: &Rules, below: Stack, place: u32, steps: &mut Steps) -> Result<Stack, TooMany> {
        if rules.symbol(place) == Symbol::End { Ok(below) } else { self.push(below, place, steps) }
    }

    /// The stacks to which these lead, without rules on their tops, in order (`llama_grammar_advance_stack`).
    pub(super) fn advance(
        &mut self,
        rules: &Rules,
        mut from: Vec<Stack>,
        steps: &mut Steps,
    ) -> Result<Vec<Stack>, TooMany> {
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        while let Some(stack) = from.pop() {
            steps.take(1)?;
            if !seen.insert(stack) {
                continue;
            }
            steps.take(MADE)?;
            let rule = self.top(stack).and_then(|(place, below)| match rules.symbol(place) {
                Symbol::Rule(rule) => Some((rule, place, below)),
                _ => None,
            });
            let Some((rule, place, below)) = rule else {
                found.push(stack);
                continue;
            };
            let below = self.at(rules, below, place + 1, steps)?;
            for way in rules.ways(rule) {
                steps.take(4)?;
                let next = self.at(rules, below, *way, steps)?;
                from.push(next);
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// What is needed of all for these, which become others.
    pub(super) fn shrink(&mut self, kept: &mut [Vec<Stack>]) {
        let mut is_kept = vec![false; self.nodes.len()];
        for stack in kept.iter().flatten() {
            let mut at = *stack;
            while at != Stack::EMPTY && !std::mem::replace(&mut is_kept[at.0 as usize], true) {
                at = self.nodes[at.0 as usize].below;
            }
        }
        // What lies below was there first.
        let mut names = vec![Stack::EMPTY; self.nodes.len()];
        let mut made = Self::new();
        for (name, node) in self.nodes.iter().enumerate().filter(|(name, _)| is_kept[*name]) {
            let node = Node { below: names[node.below.0 as usize], place: node.place };
            names[name] = Stack(made.nodes.len() as u32);
            made.nodes.push(node);
            made.known.insert(node, names[name]);
        }
        for set in kept {
            for stack in set.iter_mut() {
                *stack = names[stack.0 as usize];
            }
            set.sort_unstable();
        }
        *self = made;
    }
}
