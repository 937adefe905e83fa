//! A grammar's rules, as llama.cpp's parser gives them (`llama_grammar_element`).

use std::collections::HashMap;

/// A part of a rule: `llama_grammar_element`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Element {
    /// `llama_gretype`.
    pub kind: u32,
    /// A character, a rule or a token.
    pub value: u32,
}

/// `llama_gretype`.
mod kind {
    pub const END: u32 = 0;
    pub(crate) const ALT: u32 = 1;
    pub(crate) const RULE: u32 = 2;
    pub(crate) const CHAR: u32 = 3;
    pub(crate) const CHAR_NOT: u32 = 4;
    pub(crate) const RANGE_UPPER: u32 = 5;
    pub(crate) const CHAR_ALT: u32 = 6;
    pub(crate) const ANY: u32 = 7;
    pub const TOKEN: u32 = 8;
    pub(crate) const TOKEN_NOT: u32 = 9;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Symbol {
    /// The end of a way through a rule.
    End,
    Rule(u32),
    Character(u32),
    /// An index into the classes.
    Class(u32),
    Token(u32),
    NotToken(u32),
}

/// Characters between bounds, or all others.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Class {
    /// First and last, in order and apart from each other.
    ranges: Vec<(u32, u32)>,
    /// Ranges whose last character precedes the first. They contain nothing, but llama.cpp lets them overlap others.
    reversed: Vec<(u32, u32)>,
    is_negated: bool,
}

impl Class {
    fn new(mut ranges: Vec<(u32, u32)>, is_negated: bool) -> Self {
        let reversed = ranges.extract_if(.., |(first, last)| first > last).collect();
        ranges.sort_unstable();
        let mut apart: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match apart.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
                _ => apart.push((first, last)),
            }
        }
        Self { ranges: apart, reversed, is_negated }
    }

    pub(super) fn has(&self, character: u32) -> bool {
        self.is_within(character, character) != self.is_negated
    }

    /// Whether a character between these may belong to it. As in llama.cpp, a negated class overlaps only if none of
    /// its characters is between them.
    pub(super) fn overlaps(&self, first: u32, last: u32) -> bool {
        let is_reversed = self.reversed.iter().any(|range| range.0 <= last && first <= range.1);
        (is_reversed || self.is_within(first, last)) != self.is_negated
    }

    fn is_within(&self, first: u32, last: u32) -> bool {
        let at = self.ranges.partition_point(|range| range.1 < first);
        self.ranges.get(at).is_some_and(|range| range.0 <= last)
    }

    pub(super) fn ranges(&self) -> &[(u32, u32)] {
        &self.ranges
    }
}

/// The rules of a grammar, and where it begins.
pub struct Rules {
    /// Every way through every rule, one after another, each with its end.
    symbols: Vec<Symbol>,
    /// Where the ways through each rule begin.
    ways: Vec<Vec<u32>>,
    classes: Vec<Class>,
    root: u32,
}

impl Rules {
    /// # Errors
    /// Elements that are not llama.cpp's, a rule that begins with itself.
    pub fn new(rules: &[Vec<Element>], root: u32) -> Result<Self, String> {
        let mut made = Self { symbols: Vec::new(), ways: Vec::with_capacity(rules.len()), classes: Vec::new(), root };
        let mut known = HashMap::new();
        for rule in rules {
            made.add(rule, rules.len(), &mut known)?;
        }
        if root as usize >= rules.len() {
            return Err("it has no root rule".to_owned());
        }
        if made.has_left_recursion() {
            return Err("a rule begins with itself".to_owned());
        }
        Ok(made)
    }

    fn add(&mut self, rule: &[Element], n_rules: usize, known: &mut HashMap<Class, u32>) -> Result<(), String> {
        let too_long = |_| "it is too long".to_owned();
        let mut ways = vec![u32::try_from(self.symbols.len()).map_err(too_long)?];
        let mut rest = rule;
        while let [first, after @ ..] = rest {
            rest = after;
            let symbol = match first.kind {
                kind::END => break,
                kind::ALT => Symbol::End,
                kind::RULE if (first.value as usize) < n_rules => Symbol::Rule(first.value),
                kind::CHAR | kind::CHAR_NOT | kind::ANY => self.characters(*first, &mut rest, known),
                kind::TOKEN => Symbol::Token(first.value),
                kind::TOKEN_NOT => Symbol::NotToken(first.value),
                _ => return Err("llama.cpp has parsed it in a way that is not known here".to_owned()),
            };
            self.symbols.push(symbol);
            if symbol == Symbol::End {
                ways.push(u32::try_from(self.symbols.len()).map_err(too_long)?);
            }
        }
        self.symbols.push(Symbol::End);
        self.ways.push(ways);
        Ok(())
    }

    /// A character or a class, with what follows of it (`llama_grammar_match_char`).
    fn characters(&mut self, first: Element, rest: &mut &[Element], known: &mut HashMap<Class, u32>) -> Symbol {
        let mut ranges = Vec::new();
        let mut at = first;
        loop {
            let upper = rest.first().filter(|next| next.kind == kind::RANGE_UPPER);
            if upper.is_some() {
                *rest = &rest[1..];
            }
            ranges.push(match upper {
                Some(upper) => (at.value, upper.value),
                None if at.kind == kind::ANY => (0, u32::MAX),
                None => (at.value, at.value),
            });
            match rest.first() {
                Some(next) if next.kind == kind::CHAR_ALT => at = *next,
                _ => break,
            }
            *rest = &rest[1..];
        }
        match ranges[..] {
            [(first_of, last)] if first_of == last && first.kind != kind::CHAR_NOT => Symbol::Character(first_of),
            _ => {
                let class = Class::new(ranges, first.kind == kind::CHAR_NOT);
                let next = self.classes.len() as u32;
                Symbol::Class(*known.entry(class).or_insert_with_key(|class| {
                    self.classes.push(class.clone());
                    next
                }))
            }
        }
    }

    pub(super) fn symbol(&self, place: u32) -> Symbol {
        self.symbols[place as usize]
    }

    pub(super) fn ways(&self, rule: u32) -> &[u32] {
        &self.ways[rule as usize]
    }

    pub(super) fn class(&self, index: u32) -> &Class {
        &self.classes[index as usize]
    }

    pub(super) fn root(&self) -> u32 {
        self.root
    }

    /// Whether a rule begins with itself, as far as llama.cpp looks: past rules with an explicit empty alternative.
    fn has_left_recursion(&self) -> bool {
        let may_be_empty: Vec<bool> =
            self.ways.iter().map(|ways| ways.iter().any(|way| self.symbol(*way) == Symbol::End)).collect();
        let beginnings: Vec<Vec<u32>> = self.ways.iter().map(|ways| self.beginnings(ways, &may_be_empty)).collect();
        // Takes off rules that no other rule begins with, until only circles are left.
        let mut n_before = vec![0_usize; self.ways.len()];
        for rule in beginnings.iter().flatten() {
            n_before[*rule as usize] += 1;
        }
        let mut free: Vec<u32> = (0..self.ways.len() as u32).filter(|rule| n_before[*rule as usize] == 0).collect();
        let mut n_taken = 0;
        while let Some(rule) = free.pop() {
            n_taken += 1;
            for next in &beginnings[rule as usize] {
                n_before[*next as usize] -= 1;
                if n_before[*next as usize] == 0 {
                    free.push(*next);
                }
            }
        }
        n_taken < self.ways.len()
    }

    /// The rules with which a rule of these ways may begin.
    fn beginnings(&self, ways: &[u32], may_be_empty: &[bool]) -> Vec<u32> {
        let mut found = Vec::new();
        for way in ways {
            for symbol in &self.symbols[*way as usize..] {
                let Symbol::Rule(rule) = symbol else { break };
                found.push(*rule);
                if !may_be_empty[*rule as usize] {
                    break;
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_have_what_is_between() {
        let class = Class::new(vec![(5, 7), (1, 2), (3, 3), (20, 30), (25, 26)], false);
        assert_eq!(class.ranges(), [(1, 3), (5, 7), (20, 30)]);
        let has: Vec<u32> = (0..40).filter(|character| class.has(*character)).collect();
        assert_eq!(has, (1..4).chain(5..8).chain(20..31).collect::<Vec<_>>());
        assert!(
            class.overlaps(8, 20) && class.overlaps(0, 99) && !class.overlaps(8, 19) && !class.overlaps(31, u32::MAX)
        );
        let others = Class { is_negated: true, ..class };
        assert!(others.has(4) && !others.has(5) && !others.overlaps(8, 20));
        let none = Class::new(vec![(9, 8)], false);
        assert!(!none.has(8) && !none.has(9) && none.overlaps(7, 10) && !none.overlaps(4, 7));
        assert!(Class::new(vec![(0, u32::MAX), (3, 4)], false).has(u32::MAX));
    }
}
