//! Which text goes on from here? Questions made of any text that a model has not seen.

use rand_mt::Mt;

use super::Alternatives;
use crate::options::Token;
use crate::perplexity::random::below;

/// Texts to choose from: the true continuation, and others from elsewhere in the text.
pub const N_CONTINUATIONS: usize = 4;
/// Tokens before the continuation.
pub const CONTEXT_TOKENS: usize = 64;
/// Tokens of a continuation.
pub const CONTINUATION_TOKENS: usize = 16;

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// [`N_CONTINUATIONS`] texts of [`CONTEXT_TOKENS`] and [`CONTINUATION_TOKENS`]; all have the same context.
    pub texts: Alternatives,
    /// Number of the text that was written.
    pub gold: usize,
}

/// At most `n` questions about a text, in its order: fewer where the text is too short for as many whose continuations
/// are no one else's. `start` takes the place of each context's first token, for models that begin a text with one. The
/// same text, number and `seed` give the same questions.
///
/// The text is cut into continuations; of each that is asked about, what goes before it is the context. The other three
/// are drawn from those that neither are, nor overlap with, the context.
pub fn continuations(text: &[Token], start: Option<Token>, n: usize, seed: u32) -> Vec<Continuation> {
    let n_places = text.len().saturating_sub(CONTEXT_TOKENS) / CONTINUATION_TOKENS;
    let at = |place: usize| CONTEXT_TOKENS + place * CONTINUATION_TOKENS;
    let continuation = |place: usize| &text[at(place)..at(place) + CONTINUATION_TOKENS];
    let mut random = Mt::new(seed);

    let mut left: Vec<usize> = (0..n_places).collect();
    let mut asked: Vec<usize> = (0..n.min(n_places)).map(|_| draw(&mut random, &mut left)).collect();
    asked.sort_unstable();
    let question = |place: usize| {
        // Places are counted from behind the first context: a context covers so many of them before its continuation.
        let first = place.saturating_sub(CONTEXT_TOKENS / CONTINUATION_TOKENS);
        let mut elsewhere: Vec<usize> = (0..n_places).filter(|other| !(first..=place).contains(other)).collect();
        let mut chosen = vec![continuation(place)];
        while chosen.len() < N_CONTINUATIONS && !elsewhere.is_empty() {
            let other = continuation(draw(&mut random, &mut elsewhere));
            if !chosen.contains(&other) {
                chosen.push(other);
            }
        }
        if chosen.len() < N_CONTINUATIONS {
            return None;
        }
        let gold = below(&mut random, N_CONTINUATIONS);
        chosen.swap(0, gold);
        let mut context = text[at(place) - CONTEXT_TOKENS..at(place)].to_vec();
        context[0] = start.unwrap_or(context[0]);
        let texts = chosen.into_iter().map(|ending| [context.as_slice(), ending].concat()).collect();
        Some(Continuation { texts: Alternatives::new(place + 1, texts).ok()?, gold })
    };
    asked.into_iter().filter_map(question).collect()
}

/// One of those that are left, of which there is at least one.
fn draw(random: &mut Mt, left: &mut Vec<usize>) -> usize {
    let drawn = below(random, left.len());
    left.swap_remove(drawn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const BOS: Token = -7;

    /// Every token its own position.
    fn text(n: usize) -> Vec<Token> {
        (0..n as Token).collect()
    }

    #[test]
    fn one_of_four_continuations_is_the_texts_own() {
        let text = text(3000);
        let questions = continuations(&text, Some(BOS), 150, 1);
        assert_eq!(questions.len(), 150);
        for Continuation { texts, gold } in &questions {
            assert_eq!((texts.sequences.len(), texts.common_prefix), (4, CONTEXT_TOKENS));
            assert!(texts.sequences.iter().all(|text| text.len() == CONTEXT_TOKENS + CONTINUATION_TOKENS));
            assert!(texts.sequences.iter().all(|text| text[0] == BOS));
            let begins = texts.sequences[0][1] as usize - 1;
            for (i, ending) in texts.sequences.iter().map(|text| &text[CONTEXT_TOKENS..]).enumerate() {
                assert!(ending.windows(2).all(|pair| pair[1] == pair[0] + 1), "a piece of the text");
                let at = ending[0] as usize;
                let is_true = at == begins + CONTEXT_TOKENS;
                assert_eq!(is_true, i == *gold);
                // No other one says what was read in the context.
                assert!(
                    is_true || at + CONTINUATION_TOKENS <= begins || at >= begins + CONTEXT_TOKENS,
                    "{begins} {at}"
                );
            }
        }
        let golds: HashSet<usize> = questions.iter().map(|question| question.gold).collect();
        assert_eq!(golds.len(), N_CONTINUATIONS, "the true one stands anywhere");
        let firsts: Vec<Token> = questions.iter().map(|question| question.texts.sequences[0][1]).collect();
        assert!(firsts.windows(2).all(|pair| pair[0] < pair[1]), "each is asked about once, in order");
    }

    #[test]
    fn the_same_seed_asks_the_same() {
        let text = text(2000);
        let asked = |seed| continuations(&text, None, 20, seed);
        assert_eq!(asked(3), asked(3));
        assert_ne!(asked(3), asked(4));
        assert_eq!(asked(3)[0].texts.sequences[0][0] + 1, asked(3)[0].texts.sequences[0][1], "no start token");
    }

    #[test]
    fn a_short_text_gives_what_it_can() {
        assert_eq!(continuations(&text(CONTEXT_TOKENS), None, 9, 1), []);
        // Five places: of the last one only the context's are elsewhere.
        let found = continuations(&text(CONTEXT_TOKENS + 5 * CONTINUATION_TOKENS), None, 9, 1);
        assert!(
            found.iter().all(|question| question.texts.sequences[0][0] < CONTINUATION_TOKENS as Token * 2),
            "{found:?}"
        );
        assert_eq!(
            continuations(&text(1000), None, usize::MAX, 1).len(),
            (1000 - CONTEXT_TOKENS) / CONTINUATION_TOKENS
        );
        assert_eq!(continuations(&[5; 1000], None, 9, 1), [], "nothing to choose from");
    }
}
