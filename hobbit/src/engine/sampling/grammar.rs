//! Grammars that the output must follow: at once, or from a trigger on.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char};

use ggml_sys::llama::{llama_token_data, llama_token_data_array};

use super::gbnf;
use super::raw::Raw;
use crate::engine::error::Error;
use crate::engine::log;
use crate::engine::model::Model;
use crate::options::{GrammarKind, GrammarTrigger, SamplingOptions, Token};

/// The longest text in bytes in which patterns look for a trigger. Each token has them look through all of it again, and the
/// C++ library's regular expressions recurse with the length of what they match, by some 350 bytes of stack for each.
pub(super) const SEARCHED_BYTES_MAX: usize = 2 << 10;

/// Tokens, and their bytes, at the end of that text that are kept when it grows too long: a trigger may have begun there.
const TAIL_TOKENS: usize = 64;
const TAIL_BYTES: usize = SEARCHED_BYTES_MAX / 2;

/// What llama.cpp may do to go on by one character: stacks that it copies, entry by entry, and stacks that it compares with. Nothing can
/// interrupt it, and all requests wait meanwhile: this many take some 60 ms on a Xeon. Grammars that are not ambiguous take a few hundred.
const STEPS_MAX: usize = 1 << 25;

/// A grammar in its state.
pub(super) struct Grammar {
    raw: Raw,
    /// What the template has said for the model, if the grammar describes that, too.
    prefill: Vec<Token>,
    /// Sleeps until a trigger, and while the model thinks.
    pub(super) is_lazy: bool,
    has_patterns: bool,
    /// What patterns look through; `None` where there are none, and once the grammar is awake.
    searched: Option<Searched>,
}

/// What was said since a lazy grammar began to wait.
#[derive(Default)]
struct Searched {
    bytes: usize,
    /// Its last tokens.
    tail: VecDeque<Token>,
}

impl Grammar {
    /// The grammar of `options`, if it has one. `prefill` are the tokens of the generation prompt.
    ///
    /// # Errors
    /// [`Error::Grammar`] for one that llama.cpp refuses, or that does not go with the generation prompt.
    pub(super) fn new(
        model: &Model,
        options: &SamplingOptions,
        preserved: &[Token],
        prefill: &[Token],
    ) -> Result<Option<Self>, Error> {
        let Some(text) = options.grammar.as_deref().filter(|text| !text.is_empty()) else { return Ok(None) };
        if text.starts_with("%llguidance") {
            return Err(Error::Grammar("llguidance is not built in; write it in GBNF".into()));
        }
        gbnf::check(text)?;
        let text = c_text(text)?;
        let triggers = if options.grammar_lazy {
            Triggers::new(model, &options.grammar_triggers, preserved)?
        } else {
            Triggers::default()
        };
        let patterns: Vec<*const c_char> = triggers.patterns.iter().map(|pattern| pattern.as_ptr()).collect();
        let made = made(model, &text, options.grammar_lazy, &patterns, &triggers.tokens)?;
        let is_prefilled = options.grammar_kind == GrammarKind::Template && !options.grammar_lazy;
        let mut grammar = Self {
            raw: made,
            prefill: if is_prefilled { prefill.to_vec() } else { Vec::new() },
            is_lazy: options.grammar_lazy,
            has_patterns: !patterns.is_empty(),
            searched: (!patterns.is_empty()).then(Searched::default),
        };
        grammar.accept_prefill()?;
        Ok(Some(grammar))
    }

    /// Goes on with a token that the grammar allows.
    ///
    /// # Errors
    /// [`Error::Grammar`] where llama.cpp has lost its place: the grammar then begins anew.
    pub(super) fn accept(&mut self, model: &Model, token: Token) -> Result<(), Error> {
        self.accept_raw(token)?;
        let Some(searched) = &mut self.searched else { return Ok(()) };
        searched.bytes += model.piece(token, true).len();
        if searched.tail.len() == TAIL_TOKENS {
            searched.tail.pop_front();
        }
        searched.tail.push_back(token);
        if searched.bytes <= SEARCHED_BYTES_MAX {
            return Ok(());
        }
        if !self.is_asleep() {
            self.searched = None;
            return Ok(());
        }
        self.shorten(model)
    }

    /// Starts anew.
    ///
    /// # Errors
    /// A generation prompt that does not go with the grammar.
    pub(super) fn reset(&mut self) -> Result<(), Error> {
        self.raw.reset();
        self.searched = self.has_patterns.then(Searched::default);
        self.accept_prefill()
    }

    /// Masks the tokens that the grammar does not allow: their logits become minus infinity.
    ///
    /// # Errors
    /// A grammar that is too ambiguous to tell in bearable time.
    pub(super) fn mask(&self, candidates: &mut llama_token_data_array) -> Result<(), Error> {
        // SAFETY: the sampler is one of grammars, and live; the array's data is valid for its size.
        match unsafe { ggml_sys::grammar::hobbit_grammar_mask(self.raw.as_ptr(), candidates, STEPS_MAX) } {
            true => Ok(()),
            false => Err(too_ambiguous()),
        }
    }

    /// Whether the grammar can go on with `token`.
    ///
    /// # Errors
    /// As of [`Self::mask`].
    pub(super) fn allows(&self, token: Token) -> Result<bool, Error> {
        let mut single = llama_token_data { id: token, logit: 1.0, p: 0.0 };
        self.mask(&mut llama_token_data_array { data: &raw mut single, size: 1, selected: -1, sorted: false })?;
        Ok(single.logit != f32::NEG_INFINITY)
    }

    fn accept_prefill(&mut self) -> Result<(), Error> {
        for at in 0..self.prefill.len() {
            // It may hold what the caller says for the model, and is followed within the same bound.
            if !self.follow(self.prefill[at])? {
                self.raw.reset();
                let reason = "it does not allow what the chat template says for the model (the generation prompt)";
                return Err(Error::Grammar(reason.into()));
            }
        }
        Ok(())
    }

    /// Has llama.cpp go on with a token, if it can in a bearable number of steps. False where it has lost its place: to be reset.
    fn follow(&mut self, token: Token) -> Result<bool, Error> {
        // SAFETY: the sampler is one of grammars, and live.
        match unsafe { ggml_sys::grammar::hobbit_grammar_accept(self.raw.as_ptr(), token, STEPS_MAX) } {
            0 => Ok(true),
            1 => Err(too_ambiguous()),
            _ => Ok(false),
        }
    }

    fn accept_raw(&mut self, token: Token) -> Result<(), Error> {
        if self.follow(token)? {
            return Ok(());
        }
        // A grammar without a state would abort the process at its next use.
        self.raw.reset();
        Err(Error::Grammar(format!("llama.cpp lost its place in it at token {token}")))
    }

    /// Whether a lazy grammar waits for its trigger: it then refuses no token at all.
    fn is_asleep(&self) -> bool {
        // SAFETY: the sampler is one of grammars, and live.
        unsafe { ggml_sys::grammar::hobbit_grammar_is_asleep(self.raw.as_ptr()) }
    }

    /// Has patterns look through the last tokens only, from one on that begins with a letter: a pattern for the beginning of all
    /// that was said must not take this for it.
    fn shorten(&mut self, model: &Model) -> Result<(), Error> {
        self.raw.reset();
        let Some(searched) = &mut self.searched else { return Ok(()) };
        let pieces: Vec<Vec<u8>> = searched.tail.iter().map(|token| model.piece(*token, true)).collect();
        let mut bytes = 0;
        let fits = |piece: &&Vec<u8>| {
            bytes += piece.len();
            bytes <= TAIL_BYTES
        };
        let n_fitting = pieces.iter().rev().take_while(fits).count();
        let begins = |piece: &Vec<u8>| piece.first().is_some_and(u8::is_ascii_alphabetic);
        let skipped = pieces.len() - n_fitting;
        let first = pieces[skipped..].iter().position(begins).map_or(pieces.len(), |at| skipped + at);
        searched.tail.drain(..first);
        searched.bytes = pieces[first..].iter().map(Vec::len).sum();
        let tail = Vec::from(searched.tail.clone());
        tail.into_iter().try_for_each(|token| self.accept_raw(token))
    }
}

fn too_ambiguous() -> Error {
    let reason = "it is too ambiguous to be followed: what was said so far can be read in too many ways at once";
    Error::Grammar(reason.into())
}

/// A sampler of llama.cpp's for a grammar.
fn made(
    model: &Model,
    text: &CString,
    is_lazy: bool,
    patterns: &[*const c_char],
    tokens: &[Token],
) -> Result<Raw, Error> {
    log::clear_errors();
    let mut message: [c_char; 256] = [0; 256];
    // SAFETY: the model's vocabulary is live, the strings are NUL-terminated, the arrays have as many entries as is said and outlive
    // the call, which copies; the message buffer is valid for its capacity.
    let (made, message) = unsafe {
        let made = ggml_sys::grammar::hobbit_grammar_init(
            model.vocab(),
            text.as_ptr(),
            is_lazy,
            patterns.as_ptr(),
            patterns.len(),
            tokens.as_ptr(),
            tokens.len(),
            STEPS_MAX,
            message.as_mut_ptr(),
            message.len(),
        );
        (made, CStr::from_ptr(message.as_ptr()).to_string_lossy())
    };
    if !made.is_null() {
        return Raw::new(made, "grammar");
    }
    let what = if patterns.is_empty() { "it" } else { "it or the patterns that wake it" };
    Err(Error::Grammar(match (message, log::take_errors()) {
        (message, reason) if message.is_empty() && reason.is_empty() => format!("llama.cpp cannot parse {what}"),
        (message, reason) if message.is_empty() => reason,
        (message, _) => message.into_owned(),
    }))
}

/// What wakes a lazy grammar, as llama.cpp takes it.
#[derive(Default)]
struct Triggers {
    patterns: Vec<CString>,
    tokens: Vec<Token>,
}

impl Triggers {
    /// As llama-server reads them: a word that is one token is that token.
    fn new(model: &Model, triggers: &[GrammarTrigger], preserved: &[Token]) -> Result<Self, Error> {
        if triggers.is_empty() {
            return Err(Error::Grammar("it is lazy and nothing would wake it; give it a trigger".into()));
        }
        let mut all = Self::default();
        for trigger in triggers {
            match trigger {
                GrammarTrigger::Token(token) => all.tokens.push(*token),
                GrammarTrigger::Pattern(pattern) => all.patterns.push(c_text(pattern)?),
                GrammarTrigger::PatternFull(pattern) => all.patterns.push(c_text(&anchored(pattern))?),
                GrammarTrigger::Word(word) => match model.tokenize(word, false, true)?[..] {
                    [token] if preserved.contains(&token) => all.tokens.push(token),
                    [_] => {
                        let reason =
                            format!("its trigger '{word}' is one token, and must be among the preserved tokens");
                        return Err(Error::Grammar(reason));
                    }
                    _ => all.patterns.push(c_text(&escaped(word))?),
                },
            }
        }
        Ok(all)
    }
}

/// A pattern for all of a text.
fn anchored(pattern: &str) -> String {
    if pattern.is_empty() {
        return "^$".to_owned();
    }
    let front = if pattern.starts_with('^') { "" } else { "^" };
    let back = if pattern.ends_with('$') { "" } else { "$" };
    format!("{front}{pattern}{back}")
}

/// A text as a pattern that matches it (`regex_escape`).
pub(super) fn escaped(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if ".^$|()*+?[]{}\\".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

fn c_text(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::Grammar("it contains a NUL byte".into()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::Rng as _;
    use proptest::test_runner::{RngAlgorithm, TestRng};

    use super::super::Sampler;
    use super::super::tests::model;
    use super::*;

    #[test]
    fn patterns_of_triggers() {
        assert_eq!(escaped("<tool_call>"), "<tool_call>");
        assert_eq!(escaped("{\"a\": [1|2]}"), "\\{\"a\": \\[1\\|2\\]\\}");
        assert_eq!(["", "a", "^a", "a$", "^a$"].map(anchored), ["^$", "^a$", "^a$", "^a$", "^a$"]);
    }

    fn grammar(text: &str) -> Grammar {
        let options = SamplingOptions { grammar: Some(text.to_owned()), ..SamplingOptions::greedy() };
        Grammar::new(model(), &options, &[], &[]).unwrap().unwrap()
    }

    fn allowed(mask: impl FnOnce(&mut llama_token_data_array)) -> Vec<Token> {
        let mut all: Vec<llama_token_data> =
            (0..).take(model().n_vocab()).map(|id| llama_token_data { id, logit: 1.0, p: 0.0 }).collect();
        let (data, size) = (all.as_mut_ptr(), all.len());
        mask(&mut llama_token_data_array { data, size, selected: -1, sorted: false });
        all.iter().filter(|token| token.logit != f32::NEG_INFINITY).map(|token| token.id).collect()
    }

    #[test]
    fn masks_are_llama_cpps() {
        let json = Sampler::json_schema_to_grammar(
            r#"{"type": "object", "properties": {"name": {"type": "string"}, "n": {"enum": ["--", "-", 1.5, null]}}}"#,
        );
        let json = json.unwrap();
        let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        for text in [
            json.as_str(),
            "root ::= .*",
            "root ::= [^a-z]+ \"é\"?",
            "root ::= ([à-ü] | \"日本\" | [😀-😎] | \"x\"){1,8}",
            "root ::= [^\\x00-\\x7f]* | [^à-ü日]*",
            "root ::= (\"a\" | \"an\" | \"and\" | [a-d] \" \"?)* \"\\n\"",
            "root ::= s\ns ::= \" \" s | [ ] s | \"x\" s? | \"\"",
            "root ::= <[300]> [a-z ]* (<[301]> | !<[302]>)* \".\"",
        ] {
            let mut grammar = grammar(text);
            for n in 0..24 {
                let theirs = allowed(|candidates| grammar.raw.apply(candidates));
                let ours = allowed(|candidates| grammar.mask(candidates).unwrap());
                assert_eq!(ours, theirs, "{text} after {n} tokens");
                let on: Vec<Token> = ours.into_iter().filter(|token| !model().is_eog(*token)).collect();
                let Some(token) = on.get(rng.next_u32() as usize % on.len().max(1)) else { break };
                assert!(grammar.allows(*token).unwrap());
                grammar.accept(model(), *token).unwrap();
            }
        }
    }

    /// A token of 36 characters that fails at its last, after 34 that may each be read in two ways.
    #[test]
    fn long_tokens_are_refused_in_little_time() {
        let grammar = grammar("root ::= \"\\n\" a{34} \"x\"\na ::= \" \" | [ ]");
        let expected = format!("\n{}x", " ".repeat(34));
        let pieces = (0..model().n_vocab() as Token).map(|token| (token, model().piece(token, true)));
        let begins = |piece: &Vec<u8>| !piece.is_empty() && expected.as_bytes().starts_with(piece);
        let expected: Vec<Token> = pieces.clone().filter(|(_, piece)| begins(piece)).map(|(token, _)| token).collect();
        assert!(pieces.clone().any(|(_, piece)| piece.len() > 35 && piece.ends_with(&[b' '; 35])));
        assert_eq!(allowed(|candidates| grammar.mask(candidates).unwrap()), expected);
    }

    #[test]
    fn what_wakes_a_grammar_is_followed_within_the_bound() {
        // Whatever was said since the pattern's group can be read in twice as many ways with every character.
        let options = SamplingOptions {
            grammar: Some("root ::= s\ns ::= [^!] s \"b\"? | [^!] s \"c\"? | [^!]".to_owned()),
            grammar_lazy: true,
            grammar_triggers: vec![GrammarTrigger::Pattern("^([^!]{30})".to_owned())],
            ..SamplingOptions::greedy()
        };
        let mut grammar = Grammar::new(model(), &options, &[], &[]).unwrap().unwrap();
        let x = (0..model().n_vocab() as Token).find(|token| model().piece(*token, true) == b"x").unwrap();
        for _ in 0..29 {
            grammar.accept(model(), x).unwrap();
        }
        assert!(grammar.is_asleep());
        assert!(grammar.accept(model(), x).unwrap_err().to_string().contains("too ambiguous to be followed"));
    }
}
