use proptest::prelude::*;

use super::*;

const LIMIT: u64 = 1 << 25;

/// Rules in llama.cpp's elements: `a` to `z` are characters, capitals rules of which `S` is the first, `.` any
/// character, `|` and digits are ways and tokens.
fn rules(texts: &[(char, &str)]) -> Result<Arc<Rules>, String> {
    let element = |letter: char| match letter {
        '|' => Element { kind: 1, value: 0 },
        '.' => Element { kind: 7, value: 0 },
        '0'..='9' => Element { kind: 8, value: letter as u32 - '0' as u32 },
        'A'..='Z' => {
            let rule = texts.iter().position(|(name, _)| *name == letter).unwrap_or(99);
            Element { kind: 2, value: rule as u32 }
        }
        _ => Element { kind: 3, value: letter as u32 },
    };
    let end = Element { kind: 0, value: 0 };
    let all: Vec<Vec<Element>> =
        texts.iter().map(|(_, text)| text.chars().map(element).chain([end]).collect()).collect();
    Rules::new(&all, 0).map(Arc::new)
}

fn grammar(texts: &[(char, &str)]) -> Grammar {
    Grammar::new(rules(texts).unwrap(), LIMIT).unwrap()
}

fn says(text: &str) -> Candidate<'_> {
    Candidate { id: 99, piece: text.as_bytes(), is_end: false }
}

fn is_allowed(grammar: &mut Grammar, token: Candidate<'_>) -> bool {
    let mut allowed = true;
    grammar.allows([((), token)], LIMIT, |()| allowed = false).unwrap();
    allowed
}

#[test]
fn continuations_and_ends() {
    let mut own = grammar(&[('S', "aBc|"), ('B', "bB|")]);
    assert!(own.may_end() && is_allowed(&mut own, Candidate { id: 1, piece: b"", is_end: true }));
    assert!(!is_allowed(&mut own, says("")));
    for (text, expected) in [("a", true), ("abb", true), ("abbc", true), ("abca", false), ("b", false)] {
        assert_eq!(is_allowed(&mut own, says(text)), expected, "{text}");
    }
    assert_eq!(own.accept(&[says("ab")], LIMIT), Ok(true));
    assert!(!own.may_end());
    assert_eq!(own.accept(&[says("b"), says("a")], LIMIT), Ok(false));
    assert_eq!(own.accept(&[says("b"), says("c")], LIMIT), Ok(true), "a refused token changes nothing");
    assert!(own.may_end() && !is_allowed(&mut own, says("c")));
    own.reset();
    assert!(is_allowed(&mut own, says("ab")));
}

#[test]
fn tokens_by_name() {
    let mut own = grammar(&[('S', "a3b|xT"), ('T', "4|5")]);
    assert_eq!(own.accept(&[says("a")], LIMIT), Ok(true));
    let named = |id| Candidate { id, piece: b"anything", is_end: false };
    assert!(is_allowed(&mut own, named(3)) && !is_allowed(&mut own, named(4)) && !is_allowed(&mut own, says("b")));
    assert_eq!(own.accept(&[named(3), says("b")], LIMIT), Ok(true));
    assert!(own.may_end());
    own.reset();
    assert_eq!(own.accept(&[says("x")], LIMIT), Ok(true));
    assert!(is_allowed(&mut own, named(4)) && is_allowed(&mut own, named(5)) && !is_allowed(&mut own, named(3)));
}

#[test]
fn rules_that_begin_with_themselves() {
    for refused in [&[('S', "Sa|b")][..], &[('S', "aA"), ('A', "Bx"), ('B', "A")], &[('S', "EaS|ES"), ('E', "e|")]] {
        assert!(rules(refused).is_err(), "{refused:?}");
    }
    assert!(rules(&[('S', "aZ")]).is_err(), "no such rule");
    // A rule that is empty through another rule is not found beforehand, as in llama.cpp, which would recurse without
    // end.
    let hidden = rules(&[('S', "aR"), ('R', "NRx|y"), ('N', "E"), ('E', "")]).unwrap();
    let mut own = Grammar::new(hidden, LIMIT).unwrap();
    assert_eq!(own.accept(&[says("a")], LIMIT), Err(TooMany));
    assert!(Grammar::new(rules(&[('S', "NSx|y"), ('N', "E"), ('E', "")]).unwrap(), LIMIT).is_err());
    // Where nothing is left to come afterwards, it does end; or begins nowhere.
    let mut own = grammar(&[('S', "NS|y"), ('N', "E"), ('E', "e|")]);
    assert!(is_allowed(&mut own, says("eey")));
    assert!(Grammar::new(rules(&[('S', "NS"), ('N', "E"), ('E', "|")]).unwrap(), LIMIT).is_err());
}

#[test]
fn long_tokens_that_may_be_read_in_two_ways() {
    let mut own = grammar(&[('S', "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAx"), ('A', "a|B"), ('B', "a")]);
    assert!(is_allowed(&mut own, says(&"a".repeat(50))) && !is_allowed(&mut own, says(&"a".repeat(51))));
    // Twice as many ways with every character that differ in what comes later.
    let mut own = grammar(&[('S', "aSB|aSC|a"), ('B', "b|"), ('C', "c|")]);
    assert_eq!(own.accept(&[says(&"a".repeat(40))], LIMIT), Err(TooMany));
    assert!(is_allowed(&mut own, says("aa")) && !is_allowed(&mut own, says("ab")), "the state is unchanged");
    let mut refused = 0;
    assert_eq!(own.allows([((), says(&"a".repeat(40)))], LIMIT, |()| refused += 1), Err(TooMany));
    assert_eq!(refused, 0);
}

#[test]
fn unneeded_nodes_are_forgotten() {
    let mut own = grammar(&[('S', "[S]|(S)|aS|x")]);
    let mut most = 0;
    for n in 0..9000 {
        let token = ["[", "(", "a"][n % 3];
        assert_eq!(own.accept(&[says(token)], LIMIT), Ok(true));
        assert!(is_allowed(&mut own, says("a")) && !own.may_end());
        most = most.max(own.taken);
    }
    assert!((KEPT_STEPS / 2..=KEPT_STEPS + (1 << 20)).contains(&most), "{most}");
    assert_eq!(own.accept(&[says("x")], LIMIT), Ok(true));
    for n in (0..9000).rev() {
        let closing = ["]", ")", ""][n % 3];
        if !closing.is_empty() {
            assert!(!is_allowed(&mut own, says(if closing == "]" { ")" } else { "]" })));
            assert_eq!(own.accept(&[says(closing)], LIMIT), Ok(true));
        }
    }
    assert!(own.may_end());
}

#[test]
fn needed_nodes_are_bounded() {
    // Each alternative remembers for itself what is to come.
    let ways = vec!["Ay"; 40_000].join("|");
    let mut own = grammar(&[('S', &ways), ('A', "5Ay")]);
    let token = Candidate { id: 5, piece: b"-", is_end: false };
    let n_followed = (0..1000).take_while(|_| own.accept(&[token], LIMIT) == Ok(true)).count();
    assert!((10..100).contains(&n_followed), "{n_followed}");
    assert!(own.automaton.n_nodes() < 2 * NODES_MAX);
}

/// Whether `text` follows the rules from these symbols on, by trying every way.
fn follows(texts: &[(char, &str)], symbols: &str, text: &str) -> bool {
    let Some(first) = symbols.chars().next() else { return text.is_empty() };
    let rest = &symbols[1..];
    match texts.iter().find(|(name, _)| *name == first) {
        Some((_, ways)) => ways.split('|').any(|way| follows(texts, &format!("{way}{rest}"), text)),
        None => text.starts_with(first) && follows(texts, rest, &text[1..]),
    }
}

proptest! {
    /// Texts of a small alphabet, cut anywhere.
    #[test]
    fn texts_that_follow_are_allowed(
        first in "[abBC]{0,3}\\|[abBC]{0,3}", second in "[ab]{1,2}C?\\|[ab]?", third in "[ab]{1,2}B?\\|[ab]{1,3}|",
        text in "[ab]{1,6}", cut in 0_usize..6,
    ) {
        // The first may go round through others only behind a character.
        let texts = [('S', first.as_str()), ('B', second.as_str()), ('C', third.as_str())];
        let mut own = grammar(&texts);
        let (front, back) = text.split_at(cut.min(text.len()));
        let mut is_followed = true;
        for piece in [front, back].into_iter().filter(|piece| !piece.is_empty()) {
            is_followed = is_followed && is_allowed(&mut own, says(piece));
            prop_assert_eq!(own.accept(&[says(piece)], LIMIT), Ok(is_followed));
            if !is_followed {
                break;
            }
        }
        prop_assert_eq!(is_followed && own.may_end(), follows(&texts, "S", &text));
    }
}
