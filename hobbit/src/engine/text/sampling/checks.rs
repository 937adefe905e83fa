//! Limits on the settings of a sampler, and on grammars.
//!
//! llama.cpp's parser of grammars (`llama_grammar_parser` in `src/llama-grammar.cpp`) does not survive some texts:
//!
//! * For a repetition `{m,n}` with `n` below `m` it makes endless rules (`handle_repetitions` subtracts unsigned
//!   numbers), and llama.cpp itself writes such a repetition for a schema that wants an integer of 2^53 or more.
//! * It writes out repeated elements, again for every repetition that follows, and names each rule it makes.
//! * It recurses for every parenthesis.

use crate::engine::error::SamplerError;
use hobbit_core::options::SamplingOptions;

/// Maximum tokens that penalties may look back over: bounds the memory that one number can claim (64 MiB).
const LOOK_BACK_TOKENS_MAX: i32 = 1 << 24;

/// Maximum texts that end repetitions (DRY): the whole vocabulary is searched for each.
const SEQUENCE_BREAKERS_MAX: usize = 64;

/// Maximum of their bytes together: the rest of a text after each of its bytes is tokenized.
const SEQUENCE_BREAKER_BYTES_MAX: usize = 512;

/// Maximum bytes of the message that ends reasoning, which is tokenized.
const REASONING_MESSAGE_BYTES_MAX: usize = 16 << 10;

/// Refuses settings that would make llama.cpp abort, exhaust memory or choose at random.
pub(super) fn validate(options: &SamplingOptions) -> Result<(), SamplerError> {
    let fail = |setting: &str, expected: &str, found: &dyn std::fmt::Display| {
        Err(SamplerError::Settings(format!("{setting} must be {expected}, not {found}")))
    };
    let penalty = options.repeat_penalty;
    if !penalty.is_finite() || penalty <= 0.0 || !(1.0 / penalty).is_finite() {
        return fail("repeat_penalty", "finite and greater than 0", &penalty);
    }
    for (setting, value) in [
        ("frequency_penalty", options.frequency_penalty),
        ("presence_penalty", options.presence_penalty),
        ("dry_multiplier", options.dry.multiplier),
        ("dry_base", options.dry.base),
    ] {
        if !value.is_finite() {
            return fail(setting, "finite", &value);
        }
    }
    for (setting, value) in [
        ("temp", options.temp),
        ("dynatemp_range", options.dynatemp_range),
        ("dynatemp_exponent", options.dynatemp_exponent),
        ("top_p", options.top_p),
        ("min_p", options.min_p),
        ("typical_p", options.typical_p),
        ("top_n_sigma", options.top_n_sigma),
        ("xtc_probability", options.xtc.probability),
        ("xtc_threshold", options.xtc.threshold),
        ("adaptive_target", options.adaptive_target),
        ("adaptive_decay", options.adaptive_decay),
        ("mirostat_tau", options.mirostat.tau),
        ("mirostat_eta", options.mirostat.eta),
    ] {
        if value.is_nan() {
            return fail(setting, "a number", &value);
        }
    }
    for (setting, tokens) in
        [("repeat_last_n", options.repeat_last_n), ("dry_penalty_last_n", options.dry.penalty_last_n)]
    {
        if tokens > LOOK_BACK_TOKENS_MAX {
            return fail(setting, &format!("at most {LOOK_BACK_TOKENS_MAX} tokens"), &tokens);
        }
    }
    // Each sampler has its own memory and its own pass over the vocabulary.
    for (at, kind) in options.samplers.iter().enumerate() {
        if options.samplers[..at].contains(kind) {
            return fail("samplers", "samplers of different names", &format!("{} twice", kind.name()));
        }
    }
    let breakers = &options.dry.sequence_breakers;
    if breakers.len() > SEQUENCE_BREAKERS_MAX {
        let expected = format!("at most {SEQUENCE_BREAKERS_MAX} texts");
        return fail("dry_sequence_breakers", &expected, &breakers.len());
    }
    let n_bytes: usize = breakers.iter().map(String::len).sum();
    if n_bytes > SEQUENCE_BREAKER_BYTES_MAX {
        let expected = format!("at most {SEQUENCE_BREAKER_BYTES_MAX} bytes together");
        return fail("dry_sequence_breakers", &expected, &n_bytes);
    }
    let n_bytes = options.reasoning.message.len();
    if n_bytes > REASONING_MESSAGE_BYTES_MAX {
        let expected = format!("at most {REASONING_MESSAGE_BYTES_MAX} bytes");
        return fail("reasoning_budget_message", &expected, &n_bytes);
    }
    if options.mirostat.version > 2 {
        return fail("mirostat", "0, 1 or 2", &options.mirostat.version);
    }
    for (token, bias) in &options.logit_bias {
        if bias.is_nan() || *bias == f32::INFINITY {
            return fail(&format!("the logit bias of token {token}"), "below infinity (-inf excludes a token)", bias);
        }
    }
    Ok(())
}

// Grammars.

/// Maximum bytes of a grammar.
const TEXT_MAX: usize = 1 << 20;

/// Deepest nesting of parentheses.
const NESTING_MAX: usize = 256;

/// Maximum characters, classes and references that repetitions may make.
const REPEATED_MAX: u64 = 1 << 22;

/// Maximum bytes of the rules made for repetitions and parentheses; the next constant is the size of one, without its
/// name.
const RULES_BYTES_MAX: u64 = 32 << 20;
const RULE_BYTES: u64 = 128;

/// Bytes per element: llama.cpp's, which its vectors hold up to twice while they grow, and ours.
const ELEMENT_BYTES: u64 = 32;

/// llama.cpp refuses more repetitions, and treats more as unbounded.
const REPETITIONS_MAX: u64 = 2000;

/// Refuses a grammar in GBNF that llama.cpp's parser would not survive. Leaves other errors to that parser. Returns the
/// bytes that the parsed grammar takes at most.
///
/// # Errors
/// [`SamplerError::Grammar`] with the repetition whose bounds are reversed, or the exceeded limit.
pub(super) fn check_grammar(grammar: &str) -> Result<u64, SamplerError> {
    if grammar.len() > TEXT_MAX {
        return Err(SamplerError::Grammar(format!("it is longer than {TEXT_MAX} bytes")));
    }
    let mut made = Made::default();
    let mut rest = grammar;
    let mut depth = 0_usize;
    while let Some(first) = rest.chars().next() {
        let after = &rest[first.len_utf8()..];
        rest = match first {
            '"' | '[' => {
                let rest = after_closing(after, if first == '"' { '"' } else { ']' });
                made.last = (after.len() - rest.len()).saturating_sub(1) as u64;
                rest
            }
            '#' => after_comment(after),
            '<' => {
                made.last = 1;
                after.split_once('>').map_or("", |(_, rest)| rest)
            }
            '(' => {
                depth += 1;
                made.rules += 1;
                if depth > NESTING_MAX {
                    return Err(SamplerError::Grammar(format!("more than {NESTING_MAX} parentheses are open at once")));
                }
                after
            }
            ')' => {
                depth = depth.saturating_sub(1);
                made.last = 1;
                after
            }
            '*' | '+' | '?' => {
                made.repeat(u64::from(first == '+'), (first == '?').then_some(1));
                after
            }
            '{' => {
                let Some((least, most, rest)) = repetition(after) else { break };
                if most.is_some_and(|most| most < least) {
                    let message = format!("the repetition {{{least},{}}} ends before it begins", most.unwrap_or(0));
                    return Err(SamplerError::Grammar(message));
                }
                made.repeat(least, most.filter(|most| *most <= REPETITIONS_MAX));
                rest
            }
            _ if is_word_character(first) => {
                let end = rest.find(|character| !is_word_character(character)).unwrap_or(rest.len());
                made.longest_name = made.longest_name.max(end as u64);
                made.last = 1;
                &rest[end..]
            }
            _ if first.is_whitespace() => after,
            _ => {
                made.last = 1;
                after
            }
        };
    }
    made.check()?;
    Ok(made.bytes(grammar.len()))
}

/// Bytes that samplers take for each token that they look back over, penalties and DRY.
const PENALTIES_BYTES: u64 = 4;
const DRY_BYTES: u64 = 8;

/// Bytes that a sampler with these options takes, besides those that all samplers of a model take.
pub(super) fn bytes(options: &SamplingOptions) -> u64 {
    let grammar = options.grammar.as_deref().and_then(|grammar| check_grammar(grammar).ok());
    let tokens = |n: i32| u64::try_from(n).unwrap_or(0);
    let look_back = PENALTIES_BYTES * tokens(options.repeat_last_n) + DRY_BYTES * tokens(options.dry.penalty_last_n);
    look_back + grammar.unwrap_or(0)
}

/// Counts of elements and rules that llama.cpp makes for repetitions and parentheses.
#[derive(Default)]
struct Made {
    elements: u64,
    rules: u64,
    longest_name: u64,
    /// Elements in the operand of the next repetition.
    last: u64,
}

impl Made {
    /// `S{m,n}` becomes S m times, and a rule with S for each of the others; without `n`, a rule that refers to itself.
    fn repeat(&mut self, least: u64, most: Option<u64>) {
        let least = least.min(REPETITIONS_MAX);
        let n_rules = most.map_or(1, |most| most.saturating_sub(least));
        let written = least.saturating_sub(1).saturating_mul(self.last);
        let in_rules = n_rules.saturating_mul(self.last.saturating_add(3));
        self.elements = self.elements.saturating_add(written).saturating_add(in_rules);
        self.rules = self.rules.saturating_add(n_rules);
        self.last = least.saturating_mul(self.last).saturating_add(u64::from(n_rules > 0));
    }

    /// Bytes of the parsed grammar, whose text has `n_bytes`.
    fn bytes(&self, n_bytes: usize) -> u64 {
        (n_bytes as u64 + self.elements) * ELEMENT_BYTES + self.rules * (RULE_BYTES + self.longest_name)
    }

    fn check(&self) -> Result<(), SamplerError> {
        if self.elements > REPEATED_MAX {
            return Err(SamplerError::Grammar(format!("its repetitions make more than {REPEATED_MAX} characters")));
        }
        if self.rules.saturating_mul(RULE_BYTES + self.longest_name) > RULES_BYTES_MAX {
            let message =
                format!("its repetitions make {} rules, too many for names of {}", self.rules, self.longest_name);
            return Err(SamplerError::Grammar(message + " characters"));
        }
        Ok(())
    }
}

fn is_word_character(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-'
}

fn after_comment(text: &str) -> &str {
    text.find(['\r', '\n']).map_or("", |end| &text[end..])
}

fn after_space(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        match text.strip_prefix('#') {
            Some(comment) => text = after_comment(comment),
            None => return text,
        }
    }
}

/// The text after a literal or class of characters; `text` begins inside it.
fn after_closing(text: &str, closing: char) -> &str {
    let mut is_escaped = false;
    for (at, character) in text.char_indices() {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == closing => return &text[at + character.len_utf8()..],
            _ => {}
        }
    }
    ""
}

/// The numbers of `m}`, `m,}` or `m,n}`, and the text after; `None` for anything else.
fn repetition(text: &str) -> Option<(u64, Option<u64>, &str)> {
    let (least, rest) = number(after_space(text))?;
    let rest = after_space(rest);
    if let Some(rest) = rest.strip_prefix('}') {
        return Some((least, Some(least), rest));
    }
    let rest = after_space(rest.strip_prefix(',')?);
    let (most, rest) = number(rest).map_or((None, rest), |(most, rest)| (Some(most), rest));
    Some((least, most, after_space(rest).strip_prefix('}')?))
}

/// An overflowing number is too large for any repetition.
fn number(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    (end > 0).then(|| (text[..end].parse().unwrap_or(u64::MAX), &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::options::SamplerKind;

    fn refusal(change: impl FnOnce(&mut SamplingOptions)) -> String {
        let mut options = SamplingOptions::default();
        change(&mut options);
        validate(&options).unwrap_err().to_string()
    }

    #[test]
    fn defaults_and_extremes_are_valid() {
        for options in [SamplingOptions::default(), SamplingOptions::greedy()] {
            assert!(validate(&options).is_ok());
        }
        let extreme = SamplingOptions {
            temp: f32::INFINITY,
            repeat_last_n: -1,
            top_p: -1.0,
            logit_bias: vec![(-5, f32::NEG_INFINITY), (i32::MAX, 1e30)],
            ..SamplingOptions::default()
        };
        assert!(validate(&extreme).is_ok());
    }

    #[test]
    fn refusals_name_the_setting_and_the_value() {
        for value in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39] {
            let message = refusal(|o| o.repeat_penalty = value);
            assert!(message.contains("repeat_penalty must be finite and greater than 0"), "{message}");
        }
        let refusals = [
            (refusal(|o| o.presence_penalty = f32::INFINITY), "presence_penalty must be finite, not inf"),
            (refusal(|o| o.frequency_penalty = f32::NAN), "frequency_penalty must be finite, not NaN"),
            (refusal(|o| o.temp = f32::NAN), "temp must be a number, not NaN"),
            (refusal(|o| o.repeat_last_n = i32::MAX), "repeat_last_n must be at most 16777216 tokens, not 2147483647"),
            (refusal(|o| o.dry.penalty_last_n = i32::MAX), "dry_penalty_last_n must be at most 16777216 tokens"),
            (
                refusal(|o| o.samplers = vec![SamplerKind::TopK, SamplerKind::Dry, SamplerKind::TopK]),
                "samplers must be samplers of different names, not top_k twice",
            ),
            (
                refusal(|o| o.dry.sequence_breakers = vec!["a".to_owned(); 65]),
                "dry_sequence_breakers must be at most 64 texts, not 65",
            ),
            (
                refusal(|o| o.dry.sequence_breakers = vec!["a".repeat(1 << 20)]),
                "dry_sequence_breakers must be at most 512 bytes together",
            ),
            (
                refusal(|o| o.reasoning.message = "a".repeat(20_000)),
                "reasoning_budget_message must be at most 16384 bytes, not 20000",
            ),
            (refusal(|o| o.mirostat.version = 3), "mirostat must be 0, 1 or 2, not 3"),
            (refusal(|o| o.logit_bias = vec![(7, f32::INFINITY)]), "the logit bias of token 7 must be below infinity"),
        ];
        for (message, expected) in refusals {
            assert!(message.starts_with("cannot sample: ") && message.contains(expected), "{message}");
        }
    }

    #[test]
    fn reversed_repetitions_are_refused() {
        for refused in [
            r#"root ::= "a"{3,2}"#,
            "root ::= [0-9]{16,15}",
            "root ::= (\"a\" | b){ 2 , 1 }\nb ::= \"b\"",
            "root ::= \"{1,2\" \"a\"{5,4}",
            "root ::= \"\\\"\" \"a\"{5,4}",
            "root ::= [\\]{] \"a\"{5,4}",
            "# \"\nroot ::= \"a\"{5,4}",
            "# \"\rroot ::= \"a\"{5,4}",
            "root ::= (\"a\"{5,#}\n4})",
            "root ::= (\"a\"{5 #}\r,4})",
            "root ::= <|\"|> \"a\"{5,4}",
            "root ::= !<[7]> \"a\"{5,4}",
        ] {
            let error = check_grammar(refused).unwrap_err().to_string();
            assert!(error.contains("ends before it begins"), "{refused}: {error}");
        }
        for allowed in [
            "root ::= \"a\"{2,3}",
            "root ::= \"a\"{3}",
            "root ::= \"a\"{3,}",
            "root ::= \"a\"{2,2} # \"a\"{3,2}",
            "root ::= \"a{3,2}\" [{3,2}] \"\\\"{3,2}\"",
            "root ::= \"a\"{x,y}",
            "root ::= \"unclosed {3,2}",
            "root ::= <|{3,2}|> \"a\"",
            "root ::= \"a\"{",
            "",
            "root ::= ((\"a\") (\"b\"))",
        ] {
            assert!(check_grammar(allowed).is_ok(), "{allowed}");
        }
    }

    #[test]
    fn repeated_elements_are_bounded() {
        let literal = "a".repeat(1 << 19);
        for again in ["{2000}", "{0,8}", "{9,}", "{99999999999999999999}", "+{2000}", "{3}{4}", "{3}+{3}"] {
            let error = check_grammar(&format!("root ::= \"{literal}\" {again}")).unwrap_err().to_string();
            assert!(error.contains("repetitions make more than"), "{again}: {error}");
        }
        let comment = format!("root ::= (\"{literal}\"{{#}}\n2000}})");
        assert!(check_grammar(&comment).is_err());
        let class = format!("root ::= [{literal}]{{10}}");
        assert!(check_grammar(&class).is_err());
        for allowed in ["{2}", "* + {9}", " b{2000}", " (\"b\"){2000}", "", "?", "+", "<|\"|>{9}"] {
            assert!(check_grammar(&format!("root ::= \"{literal}\"{allowed}\nb ::= \"b\"")).is_ok(), "{allowed}");
        }
        // Each repeats everything that the previous one made.
        assert!(check_grammar(&format!("root ::= \"a\"{}", "+".repeat(10_000))).is_err());
        assert!(check_grammar(&format!("root ::= \"a\"{}", "+".repeat(100))).is_ok());
        assert!(check_grammar(&"root ::= [a-z]{2000} ".repeat(100)).is_ok());
    }

    #[test]
    fn made_rules_are_bounded() {
        let error = check_grammar(&format!("root ::= {}", "a{0,2000} ".repeat(400))).unwrap_err().to_string();
        assert!(error.contains("make 800000 rules"), "{error}");
        assert!(check_grammar(&format!("root ::= {}", "a{0,2000} ".repeat(20))).is_ok());
        let name = "n".repeat(1 << 16);
        assert!(check_grammar(&format!("{name} ::= {}", "x? ".repeat(1000))).is_err());
        assert!(check_grammar(&format!("{name} ::= {}", "x ".repeat(1000))).is_ok());
        assert!(check_grammar(&"x ".repeat(TEXT_MAX)).unwrap_err().to_string().contains("it is longer than"));
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |n: usize| format!("root ::= {}\"a\"{}", "(".repeat(n), ")".repeat(n));
        assert!(check_grammar(&nested(NESTING_MAX)).is_ok());
        assert!(check_grammar(&nested(NESTING_MAX + 1)).is_err());
        assert!(check_grammar(&"(".repeat(1 << 20)).is_err());
        assert!(check_grammar(&format!("#\rroot ::= {}", "(".repeat(1000))).is_err());
        assert!(check_grammar(&"root ::= (\"a\") ".repeat(1000)).is_ok());
        assert!(check_grammar("root ::= \"((((\" [(((]").is_ok());
    }
}
