//! Grammars that the output must follow: from the start, or after a trigger.

use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Arc;

use ggml_sys::llama::llama_token_data;
use ggml_sys::shim;

use super::checks::check_grammar;
use crate::engine::error::SamplerError;
use crate::engine::ggml::raw::Owned;
use crate::engine::ggml::{limits, log};
use crate::engine::model::Model;
use hobbit_core::grammar::{Candidate, Element, Grammar as Rooted, Rules, TooMany};
use hobbit_core::options::{GrammarKind, GrammarTrigger, SamplingOptions, Token};

/// Maximum steps to find the tokens that a grammar allows, or to advance it. Nothing interrupts that, and all requests
/// wait meanwhile: this many take 70 to 140 ms on a Xeon. Unambiguous grammars take some thousands, a choice of 5,000
/// words two million.
const STEPS_MAX: u64 = 1 << 25;

/// A grammar and its state.
pub(super) struct Grammar {
    own: Rooted,
    /// The generation prompt's tokens, if the grammar covers them.
    prefill: Vec<Token>,
    /// Waits for a trigger, and is inactive during reasoning.
    pub(super) is_lazy: bool,
    triggers: Triggers,
    /// The text generated while it waits for a trigger; `None` once it is active.
    waiting: Option<Waiting>,
}

impl Grammar {
    /// The grammar of `options`, if any. `prefill` are the tokens of the generation prompt.
    ///
    /// # Errors
    /// [`SamplerError::Grammar`] if llama.cpp cannot parse it, if it cannot be followed, or if it rejects the
    /// generation prompt.
    pub(super) fn new(
        model: &Model,
        options: &SamplingOptions,
        preserved: &[Token],
        prefill: &[Token],
    ) -> Result<Option<Self>, SamplerError> {
        let Some(text) = options.grammar.as_deref().filter(|text| !text.is_empty()) else { return Ok(None) };
        if text.starts_with("%llguidance") {
            return Err(SamplerError::Grammar("llguidance is not built in; write it in GBNF".into()));
        }
        check_grammar(text)?;
        let triggers = if options.grammar_lazy {
            Triggers::new(model, &options.grammar_triggers, preserved)?
        } else {
            Triggers::default()
        };
        let rules = Arc::new(parsed(model, text)?);
        let own = Rooted::new(rules, STEPS_MAX).map_err(|TooMany| {
            SamplerError::Grammar("it begins in too many ways at once, or goes round without a character".into())
        })?;
        let is_prefilled = options.grammar_kind == GrammarKind::Template && !options.grammar_lazy;
        let mut grammar = Self {
            own,
            prefill: if is_prefilled { prefill.to_vec() } else { Vec::new() },
            is_lazy: options.grammar_lazy,
            triggers,
            waiting: options.grammar_lazy.then(Waiting::default),
        };
        grammar.accept_prefill(model)?;
        Ok(Some(grammar))
    }

    /// Masks the tokens that the grammar does not allow: their logits become minus infinity. Allows all while it waits
    /// for its trigger.
    ///
    /// # Errors
    /// A grammar that is too ambiguous to evaluate within the limit of steps.
    pub(super) fn mask(&mut self, model: &Model, candidates: &mut [llama_token_data]) -> Result<(), SamplerError> {
        if self.waiting.is_some() {
            return Ok(());
        }
        let tokens = candidates.iter_mut().map(|token| {
            let candidate = candidate(model, token.id);
            (token, candidate)
        });
        self.own.allows(tokens, STEPS_MAX, |token| token.logit = f32::NEG_INFINITY).map_err(too_ambiguous)
    }

    /// Whether it waits for its trigger.
    pub(super) fn waits(&self) -> bool {
        self.waiting.is_some()
    }

    /// Whether the grammar allows `token` next. If it waits for its trigger, that is any token that does not complete
    /// the trigger, or goes on as the grammar does.
    ///
    /// # Errors
    /// As [`Self::mask`].
    pub(super) fn allows(&mut self, model: &Model, token: Token) -> Result<bool, SamplerError> {
        if let Some(waiting) = &self.waiting {
            let mut trial = waiting.clone();
            let begun = begin(&mut self.own, &self.triggers, &mut trial, token, candidate(model, token));
            self.own.reset();
            return begun.unwrap_or(Ok(true)).map_err(too_ambiguous);
        }
        let mut single = [llama_token_data { id: token, logit: 1.0, p: 0.0 }];
        self.mask(model, &mut single)?;
        Ok(single[0].logit != f32::NEG_INFINITY)
    }

    /// Advances by a token that the grammar allows.
    ///
    /// # Errors
    /// [`SamplerError::Grammar`] if it does not allow the token, or cannot decide: its state is then unchanged, or if
    /// it is lazy it waits for its trigger again.
    pub(super) fn accept(&mut self, model: &Model, token: Token) -> Result<(), SamplerError> {
        let own = candidate(model, token);
        let is_allowed = match &mut self.waiting {
            None => self.own.accept(&[own], STEPS_MAX),
            Some(waiting) => match begin(&mut self.own, &self.triggers, waiting, token, own) {
                Some(is_allowed) => is_allowed,
                None => return Ok(()),
            },
        };
        if !is_allowed.map_err(too_ambiguous)? {
            if self.is_lazy {
                self.rewind();
            }
            return Err(SamplerError::Grammar(format!("it does not allow token {token}")));
        }
        self.waiting = None;
        Ok(())
    }

    /// Restarts.
    ///
    /// # Errors
    /// The grammar rejects the generation prompt.
    pub(super) fn reset(&mut self, model: &Model) -> Result<(), SamplerError> {
        self.rewind();
        self.accept_prefill(model)
    }

    fn rewind(&mut self) {
        self.own.reset();
        self.waiting = self.is_lazy.then(Waiting::default);
    }

    fn accept_prefill(&mut self, model: &Model) -> Result<(), SamplerError> {
        // The prompt may hold text chosen by the caller, so it has the same limit.
        let tokens: Vec<Candidate<'_>> = self.prefill.iter().map(|token| candidate(model, *token)).collect();
        if self.own.accept(&tokens, STEPS_MAX).map_err(too_ambiguous)? {
            return Ok(());
        }
        let reason = "it does not allow the generation prompt, which the chat template writes for the model";
        Err(SamplerError::Grammar(reason.into()))
    }
}

/// Adds a token to the text before the trigger. `None` if it does not complete the trigger; otherwise whether `grammar`
/// allows the text since, and has advanced by it.
fn begin(
    grammar: &mut Rooted,
    triggers: &Triggers,
    waiting: &mut Waiting,
    token: Token,
    own: Candidate<'_>,
) -> Option<Result<bool, TooMany>> {
    if triggers.tokens.contains(&token) {
        return Some(grammar.accept(&[Candidate { is_end: false, ..own }], STEPS_MAX));
    }
    waiting.push(token, own.piece);
    let start = triggers.patterns.iter().find_map(|pattern| pattern.find(waiting.text()))?;
    let replayed = waiting.since(start).into_iter();
    let replayed: Vec<Candidate<'_>> =
        replayed.map(|(token, piece)| Candidate { id: token as u32, piece, is_end: false }).collect();
    Some(grammar.accept(&replayed, STEPS_MAX))
}

fn candidate(model: &Model, token: Token) -> Candidate<'_> {
    let pieces = model.shared.pieces();
    Candidate { id: token as u32, piece: pieces.piece(token), is_end: pieces.is_end(token) }
}

fn too_ambiguous(_: TooMany) -> SamplerError {
    let reason = "it is too ambiguous to be followed: its text so far has too many readings";
    SamplerError::Grammar(reason.into())
}

/// The rules of a grammar, by llama.cpp's parser.
fn parsed(model: &Model, text: &str) -> Result<Rules, SamplerError> {
    unsafe extern "C" fn add(rules: *mut c_void, elements: *const shim::hobbit_grammar_element, n: usize) {
        // SAFETY: the context is the vector below, the elements are valid during the call.
        let (rules, elements) =
            unsafe { (&mut *rules.cast::<Vec<Vec<Element>>>(), std::slice::from_raw_parts(elements, n)) };
        rules.push(elements.iter().map(|own| Element { kind: own.kind, value: own.value }).collect());
    }
    let text = c_text(text)?;
    let mut rules: Vec<Vec<Element>> = Vec::new();
    log::clear_errors();
    // SAFETY: the vocabulary is live, the text NUL-terminated; the callback gets the vector that it expects.
    let root: c_int = unsafe {
        shim::hobbit_grammar_parse(model.shared.raw.vocab(), text.as_ptr(), Some(add), (&raw mut rules).cast())
    };
    match u32::try_from(root) {
        Ok(root) => Rules::new(&rules, root).map_err(SamplerError::Grammar),
        Err(_) if root == -2 => Err(SamplerError::Grammar("grammar does not contain a 'root' symbol".into())),
        Err(_) => {
            let reason = log::take_errors();
            Err(SamplerError::Grammar(if reason.is_empty() { "failed to parse grammar".into() } else { reason }))
        }
    }
}

/// The triggers of a lazy grammar.
#[derive(Default)]
struct Triggers {
    patterns: Vec<Pattern>,
    tokens: Vec<Token>,
}

impl Triggers {
    /// As llama-server reads them: a word that is one token is that token.
    fn new(model: &Model, triggers: &[GrammarTrigger], preserved: &[Token]) -> Result<Self, SamplerError> {
        if triggers.is_empty() {
            return Err(SamplerError::Grammar("it is lazy and has no trigger".into()));
        }
        let mut all = Self::default();
        for trigger in triggers {
            match trigger {
                GrammarTrigger::Token(token) => all.tokens.push(*token),
                GrammarTrigger::Pattern(pattern) => all.patterns.push(Pattern::new(pattern)?),
                GrammarTrigger::PatternFull(pattern) => all.patterns.push(Pattern::new(&anchored(pattern))?),
                GrammarTrigger::Word(word) => match model.tokenize(word, false, true)?[..] {
                    // The model may also write it with other tokens.
                    [token] if preserved.contains(&token) => {
                        all.tokens.push(token);
                        all.patterns.push(Pattern::new(&escaped(word))?);
                    }
                    [_] => {
                        let reason =
                            format!("its trigger '{word}' is one token, and must be among the preserved tokens");
                        return Err(SamplerError::Grammar(reason));
                    }
                    _ => all.patterns.push(Pattern::new(&escaped(word))?),
                },
            }
        }
        Ok(all)
    }
}

/// A pattern that must match a whole text.
fn anchored(pattern: &str) -> String {
    if pattern.is_empty() {
        return "^$".to_owned();
    }
    let front = if pattern.starts_with('^') { "" } else { "^" };
    let back = if pattern.ends_with('$') { "" } else { "$" };
    format!("{front}{pattern}{back}")
}

/// Escapes a text for use in a pattern (`regex_escape`).
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

fn c_text(text: &str) -> Result<CString, SamplerError> {
    CString::new(text).map_err(|_| SamplerError::Grammar("it contains a NUL byte".into()))
}

// Triggers that are regular expressions.

/// Stack per byte of an expression: the C++ library parses it recursively.
const STACK_PER_BYTE: usize = 1 << 10;

struct Pattern(Owned<shim::hobbit_pattern>);

// SAFETY: memory without ties to a thread, immutable after its construction.
unsafe impl Send for Pattern {}

impl Pattern {
    /// # Errors
    /// [`SamplerError::Grammar`] for an invalid expression (ECMAScript).
    fn new(text: &str) -> Result<Self, SamplerError> {
        let pattern = c_text(text)?;
        // SAFETY: the text is NUL-terminated and outlives the call, which copies.
        let made = || Owned::new(unsafe { shim::hobbit_pattern_init(pattern.as_ptr()) }).map(Self);
        limits::with_stack(text.len() * STACK_PER_BYTE, made)
            .map_err(SamplerError::Grammar)?
            .ok_or_else(|| SamplerError::Grammar(format!("llama.cpp cannot parse its trigger's pattern: {text}")))
    }

    /// Start of the text that the grammar must match, if `text` contains the trigger.
    fn find(&self, text: &[u8]) -> Option<usize> {
        // SAFETY: the pattern is live, the text valid for its length.
        let start = unsafe { shim::hobbit_pattern_find(self.0.as_ptr(), text.as_ptr().cast::<c_char>(), text.len()) };
        (start <= text.len()).then_some(start)
    }
}

// The text generated while a lazy grammar waits for its trigger.

/// Longest text, in bytes, that patterns search for a trigger. Each token makes them search all of it again, and the
/// C++ library's regular expressions recurse with the length of a match, using about 350 bytes of stack per byte.
pub(super) const SEARCHED_BYTES_MAX: usize = 2 << 10;

/// Tokens, and their bytes, kept from the end of a text that grows too long: a trigger may have begun there.
const TAIL_TOKENS: usize = 64;
const TAIL_BYTES: usize = SEARCHED_BYTES_MAX / 2;

/// Maximum tokens of a trigger.
const TRIGGER_TOKENS: usize = 16;

#[derive(Default, Clone)]
struct Waiting {
    text: Vec<u8>,
    /// Its tokens, and the start of each.
    tokens: VecDeque<(Token, usize)>,
}

impl Waiting {
    fn text(&self) -> &[u8] {
        &self.text
    }

    fn push(&mut self, token: Token, piece: &[u8]) {
        self.tokens.push_back((token, self.text.len()));
        self.text.extend_from_slice(piece);
        if self.text.len() > SEARCHED_BYTES_MAX {
            self.shorten();
        }
    }

    /// The tokens that end after `start`; the first one without the bytes before it.
    fn since(&self, start: usize) -> Vec<(Token, &[u8])> {
        let ends = self.tokens.iter().skip(1).map(|(_, begin)| *begin).chain([self.text.len()]);
        let tokens = self.tokens.iter().zip(ends).filter(|(_, end)| *end > start);
        tokens.map(|((token, begin), end)| (*token, &self.text[start.max(*begin)..end])).collect()
    }

    /// Keeps only the last tokens, starting with one that begins with a letter, so that a pattern for the beginning of
    /// the text does not match here. A trigger in progress is not cut: that letter must be well before the end, or else
    /// any token is the first.
    fn shorten(&mut self) {
        let len = self.text.len();
        let fits = |begin: usize| len - begin <= TAIL_BYTES;
        let begins = |begin: usize| self.text.get(begin).is_some_and(u8::is_ascii_alphabetic);
        let earliest = self.tokens.len().saturating_sub(TAIL_TOKENS);
        let mut fitting =
            (earliest..).zip(self.tokens.iter().skip(earliest)).filter(|(_, (_, begin))| fits(*begin)).peekable();
        let any = fitting.peek().map_or(self.tokens.len(), |(at, _)| *at);
        let with_letter = fitting.find(|(_, (_, begin))| begins(*begin)).map(|(at, _)| at);
        let first = with_letter.filter(|at| at + TRIGGER_TOKENS <= self.tokens.len()).unwrap_or(any);
        let start = self.tokens.get(first).map_or(len, |(_, begin)| *begin);
        self.tokens.drain(..first);
        self.text.drain(..start);
        for (_, begin) in &mut self.tokens {
            *begin -= start;
        }
    }
}

#[cfg(test)]
mod tests {
    use ggml_sys::llama;
    use ggml_sys::llama::llama_token_data_array;
    use proptest::prelude::Rng as _;
    use proptest::test_runner::{RngAlgorithm, TestRng};

    use super::super::Sampler;
    use super::super::chain::Raw;
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

    fn llama_cpps(text: &str) -> Raw {
        let text = c_text(text).unwrap();
        // SAFETY: the vocabulary is live, the texts are NUL-terminated and outlive the call, which copies.
        let made =
            unsafe { llama::llama_sampler_init_grammar(model().shared.raw.vocab(), text.as_ptr(), c"root".as_ptr()) };
        Raw::new(made, "grammar").unwrap()
    }

    fn allowed(mask: impl FnOnce(&mut [llama_token_data])) -> Vec<Token> {
        let mut all: Vec<llama_token_data> =
            (0..).take(model().n_vocab()).map(|id| llama_token_data { id, logit: 1.0, p: 0.0 }).collect();
        mask(&mut all);
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
            "root ::= [é-à]* | [^日-à]+ | [é-à]",
            "root ::= <[300]> [a-z ]* (<[301]> | !<[302]>)* \".\"",
        ] {
            let mut own = grammar(text);
            let mut llama_cpp = llama_cpps(text);
            for n in 0..24 {
                let theirs = allowed(|candidates| {
                    let (data, size) = (candidates.as_mut_ptr(), candidates.len());
                    llama_cpp.apply(&mut llama_token_data_array { data, size, selected: -1, sorted: false }).unwrap();
                });
                let ours = allowed(|candidates| own.mask(model(), candidates).unwrap());
                assert_eq!(ours, theirs, "{text} after {n} tokens");
                let on: Vec<Token> = ours.into_iter().filter(|token| !model().is_eog(*token)).collect();
                let Some(token) = on.get(rng.next_u32() as usize % on.len().max(1)) else { break };
                assert!(own.allows(model(), *token).unwrap());
                own.accept(model(), *token).unwrap();
                assert!(llama_cpp.accept(*token));
            }
        }
    }

    /// A token of 36 characters that fails at its last, after 34 with two readings each.
    #[test]
    fn long_tokens_are_refused_in_little_time() {
        let mut own = grammar("root ::= \"\\n\" a{34} \"x\"\na ::= \" \" | [ ]");
        let expected = format!("\n{}x", " ".repeat(34));
        let pieces = (0..model().n_vocab() as Token).map(|token| (token, model().piece(token, true)));
        let begins = |piece: &Vec<u8>| !piece.is_empty() && expected.as_bytes().starts_with(piece);
        let expected: Vec<Token> = pieces.clone().filter(|(_, piece)| begins(piece)).map(|(token, _)| token).collect();
        assert!(pieces.clone().any(|(_, piece)| piece.len() > 35 && piece.ends_with(&[b' '; 35])));
        assert_eq!(allowed(|candidates| own.mask(model(), candidates).unwrap()), expected);
    }

    #[test]
    fn triggers_are_followed_within_the_limit() {
        // The text since the pattern's group has twice as many readings with every character.
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
        assert!(grammar.waiting.is_some());
        assert!(grammar.accept(model(), x).unwrap_err().to_string().contains("too ambiguous to be followed"));
    }

    #[test]
    fn the_text_after_a_place() {
        let mut waiting = Waiting::default();
        for (token, piece) in [(1, "ab"), (2, ""), (3, "cde"), (4, "f")] {
            waiting.push(token, piece.as_bytes());
        }
        assert_eq!(waiting.text(), b"abcdef");
        assert_eq!(waiting.since(3), [(3, &b"de"[..]), (4, b"f")]);
        assert_eq!(waiting.since(0).len(), 4);
        assert_eq!(waiting.since(6), []);
    }

    #[test]
    fn the_end_of_a_long_text_is_kept() {
        let mut waiting = Waiting::default();
        for n in 0..400 {
            waiting.push(n, b" 12 word"[..8 - 4 * (n as usize % 2)].as_ref());
            assert!(waiting.text.len() <= SEARCHED_BYTES_MAX);
            waiting.push(1000 + n, b"word");
        }
        assert!(waiting.text().starts_with(b"word") && waiting.text().ends_with(b"word"));
        assert_eq!(waiting.since(0).iter().map(|(_, piece)| piece.len()).sum::<usize>(), waiting.text().len());
        // Cut at various points within a trigger.
        for n_before in 0..40 {
            let mut waiting = Waiting::default();
            for n in 0..SEARCHED_BYTES_MAX as Token - n_before {
                waiting.push(n, b"1");
            }
            for piece in ["<", "tool", "_", "call", ">"] {
                waiting.push(9, piece.as_bytes());
            }
            assert!(waiting.text().ends_with(b"<tool_call>"), "{n_before}");
        }
        waiting.push(7, &[b' '; 5000]);
        assert!(waiting.text().is_empty() && waiting.tokens.is_empty());
    }
}
