//! Grammars that a text must follow, token by token: the tokens of a vocabulary that may come next. Pure: rules come
//! parsed.
//!
//! The result is llama.cpp's (`src/llama-grammar.cpp`), bit for bit. The search differs: llama.cpp walks
//! every stack of places by itself, so a token of n characters that can each be read in two ways takes 2^n steps, and
//! nothing can interrupt them. Here stacks share what lies
//! below their tops (`stacks`), a set of stacks is a state that is met once (`automaton`), and whatever is done is
//! counted first.

mod automaton;
mod joined;
mod pattern;
mod rules;
mod stacks;
mod text;

use std::sync::Arc;

use automaton::{Automaton, State};
pub use joined::either;
pub use pattern::{Pattern, REPETITIONS_MAX};
pub use rules::{Element, Rules};
use stacks::Steps;
pub use stacks::TooMany;
use text::Part;

/// Steps before the automaton is rebuilt with the part of it that is still needed.
const KEPT_STEPS: u64 = 1 << 22;

const NODES_MAX: usize = 1 << 20;

/// A grammar, and its state after a text.
pub struct Grammar {
    automaton: Automaton,
    /// Steps of `automaton` since it was rebuilt, and of that.
    taken: u64,
    kept: u64,
    first: State,
    now: State,
    part: Part,
    characters: Vec<u32>,
}

impl Grammar {
    /// A grammar at its beginning.
    ///
    /// # Errors
    /// More than `limit` steps to find the beginnings, or none.
    pub fn new(rules: Arc<Rules>, limit: u64) -> Result<Self, TooMany> {
        let mut automaton = Automaton::new(rules);
        let mut steps = Steps::new(limit);
        let first = automaton.begin(&mut steps)?.ok_or(TooMany)?;
        Ok(Self {
            automaton,
            taken: steps.taken(),
            kept: 0,
            first,
            now: first,
            part: Part::NONE,
            characters: Vec::new(),
        })
    }

    pub fn reset(&mut self) {
        (self.now, self.part) = (self.first, Part::NONE);
    }

    /// Finds the `tokens` that may not come next, and calls `refused` with their companions.
    ///
    /// # Errors
    /// More than `limit` steps.
    pub fn allows<'a, T>(
        &mut self,
        tokens: impl IntoIterator<Item = (T, Candidate<'a>)>,
        limit: u64,
        mut refused: impl FnMut(T),
    ) -> Result<(), TooMany> {
        self.counted(limit, |grammar, steps| {
            for (name, token) in tokens {
                if !grammar.allows_token(&token, steps)? {
                    refused(name);
                }
            }
            Ok(())
        })
    }

    /// Advances by tokens. False if the grammar does not allow them; the state is then unchanged.
    ///
    /// # Errors
    /// More than `limit` steps; the state is then unchanged.
    pub fn accept(&mut self, tokens: &[Candidate<'_>], limit: u64) -> Result<bool, TooMany> {
        self.counted(limit, |grammar, steps| {
            let before = (grammar.now, grammar.part);
            for token in tokens {
                match grammar.accept_token(token, steps) {
                    Ok(true) => {}
                    other => {
                        (grammar.now, grammar.part) = before;
                        return other;
                    }
                }
            }
            Ok(true)
        })
    }

    /// Whether the text may end here.
    pub(crate) fn may_end(&self) -> bool {
        self.automaton.may_end(self.now)
    }

    fn counted<T>(
        &mut self,
        limit: u64,
        work: impl FnOnce(&mut Self, &mut Steps) -> Result<T, TooMany>,
    ) -> Result<T, TooMany> {
        if self.taken > KEPT_STEPS.max(2 * self.kept) || self.automaton.n_nodes() > NODES_MAX {
            [self.first, self.now] = self.automaton.shrink([self.first, self.now]);
            self.taken = 0;
            self.kept = stacks::MADE * self.automaton.n_nodes() as u64;
        }
        if self.automaton.n_nodes() > NODES_MAX {
            return Err(TooMany);
        }
        let mut steps = Steps::new(limit);
        let done = work(self, &mut steps);
        self.taken += steps.taken();
        done
    }

    fn allows_token(&mut self, token: &Candidate<'_>, steps: &mut Steps) -> Result<bool, TooMany> {
        if token.is_end {
            return Ok(self.may_end());
        }
        if token.piece.first().is_none_or(|byte| *byte == 0) {
            return Ok(false);
        }
        let Some(rest) = self.part.decode(token.piece, &mut self.characters) else { return Ok(false) };
        let mut at = self.now;
        for &character in &self.characters {
            // To llama.cpp that is where a text ends, written in two bytes, too.
            if character == 0 {
                break;
            }
            if self.automaton.wants_token(at, token.id) {
                return Ok(true);
            }
            match self.automaton.follow(at, character, steps)? {
                Some(next) => at = next,
                None => return Ok(false),
            }
        }
        if rest == Part::NONE { Ok(true) } else { self.automaton.goes_on_with(at, rest, steps) }
    }

    fn accept_token(&mut self, token: &Candidate<'_>, steps: &mut Steps) -> Result<bool, TooMany> {
        if token.is_end {
            return Ok(self.may_end());
        }
        let by_token = self.automaton.after_token(self.now, token.id, steps)?;
        // Invalid UTF-8 changes nothing, and nothing can come after it.
        let rest = self.part.decode(token.piece, &mut self.characters);
        let mut at =
            if self.characters.is_empty() { self.automaton.of_characters(self.now, steps)? } else { Some(self.now) };
        for &character in &self.characters {
            let Some(from) = at else { break };
            at = self.automaton.follow(from, character, steps)?;
        }
        let Some(next) = self.automaton.either(at, by_token, steps)? else { return Ok(false) };
        (self.now, self.part) = (next, rest.unwrap_or(Part::BROKEN));
        Ok(true)
    }
}

/// A token of the vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Its number, by which rules name it.
    pub id: u32,
    /// The text it adds.
    pub piece: &'a [u8],
    /// Whether it ends the text instead.
    pub is_end: bool,
}

#[cfg(test)]
mod tests;
