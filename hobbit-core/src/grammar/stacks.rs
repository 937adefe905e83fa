//! Stacks of places that share nodes: each pair of a place and the stack below it exists once. Work is counted before
//! it is done.

use std::collections::{HashMap, HashSet};

use super::rules::{Rules, Symbol};

/// A stack by its number. Equal stacks have equal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Stack(u32);

impl Stack {
    /// At the end of the grammar.
    pub(super) const EMPTY: Stack = Stack(0);
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Node {
    below: Stack,
    place: u32,
}

pub(super) struct Stacks {
    /// One for every stack; the first is the empty stack's.
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

    /// The stack with `place` on top of `below`, unless a way ends there.
    pub(super) fn at(&mut self, rules: &Rules, below: Stack, place: u32, steps: &mut Steps) -> Result<Stack, TooMany> {
        if rules.symbol(place) == Symbol::End { Ok(below) } else { self.push(below, place, steps) }
    }

    /// These stacks with the rules on their tops expanded, in order (`llama_grammar_advance_stack`).
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

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Keeps only the nodes of these stacks, which get new numbers.
    pub(super) fn shrink(&mut self, kept: &mut [Vec<Stack>]) {
        let mut is_kept = vec![false; self.nodes.len()];
        for stack in kept.iter().flatten() {
            let mut at = *stack;
            while at != Stack::EMPTY && !std::mem::replace(&mut is_kept[at.0 as usize], true) {
                at = self.nodes[at.0 as usize].below;
            }
        }
        // A node comes after the one below it.
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

/// Cost of one more state, stack or node in memory, in steps.
pub(super) const MADE: u64 = 32;

/// The limit of steps is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooMany;

/// Steps of about 2 ns.
pub(super) struct Steps {
    limit: u64,
    left: u64,
}

impl Steps {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, left: limit }
    }

    pub(super) fn take(&mut self, n: u64) -> Result<(), TooMany> {
        self.left = self.left.checked_sub(n).ok_or(TooMany)?;
        Ok(())
    }

    pub(super) fn taken(&self) -> u64 {
        self.limit - self.left
    }
}
