//! Tokens to evaluate, from a text or random. The same for every engine.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rand_mt::Mt64;

use super::case::{Source, Task, Test};
use super::engine::Engine;
use hobbit::Token;

/// llama-bench's random numbers use C's default seed; ours use the same seed with another generator.
const SEED: u64 = 1;

/// All tokens to evaluate: each repetition takes the next piece, and starts over after the last.
#[derive(Debug)]
pub struct Tokens {
    test: Test,
    row: Vec<Token>,
}

/// The tokens of one repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    test: Test,
    tokens: &'a [Token],
}

impl<'a> Piece<'a> {
    /// Tokens in the context beforehand.
    pub fn depth(self) -> &'a [Token] {
        &self.tokens[..self.test.n_depth as usize]
    }

    /// The prompt.
    pub fn prompt(self) -> &'a [Token] {
        &self.tokens[self.test.n_depth as usize..][..self.test.n_prompt as usize]
    }

    /// Tokens evaluated one by one.
    pub fn singles(self) -> &'a [Token] {
        &self.tokens[(self.test.n_depth + self.test.n_prompt) as usize..]
    }
}

impl Tokens {
    /// Reads and tokenises the task's source.
    ///
    /// # Errors
    /// Unreadable files, texts that are too short.
    pub fn of(task: &Task, engine: &dyn Engine) -> Result<Self> {
        let test = task.case.test;
        let n = test.n_tokens();
        let mut row = match &task.source {
            Source::Random => {
                let (mut random, n_vocab) = (Mt64::new(SEED), engine.n_vocab().max(1) as u64);
                let n_pieces = (task.first_rep + task.reps + 1) as usize;
                (0..n * n_pieces).map(|_| (random.next_u64() % n_vocab) as Token).collect::<Vec<_>>()
            }
            Source::Text(path) => engine.tokenize(&read(path)?)?,
        };
        ensure!(
            row.len() >= n,
            "the text has {} tokens, and a repetition takes {n}: give a longer --prompt-file, or smaller -p, -n, -pg and -d",
            row.len()
        );
        if let Some(bos) = engine.bos() {
            row.iter_mut().step_by(n).for_each(|first| *first = bos);
        }
        Ok(Self { test, row })
    }

    /// The tokens of a repetition.
    pub fn rep(&self, rep: u32) -> Piece<'_> {
        let n = self.test.n_tokens();
        let first = rep as usize % (self.row.len() / n) * n;
        Piece { test: self.test, tokens: &self.row[first..first + n] }
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{}: cannot read this file as text", path.display()))
}

#[cfg(test)]
mod tests {
    use super::super::args::Who;
    use super::super::case::Case;
    use super::super::record::Record;
    use super::*;

    /// A byte is a token; BOS is 1000.
    struct Bytes;

    impl Engine for Bytes {
        fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
            Ok(text.bytes().map(Token::from).collect())
        }
        fn bos(&self) -> Option<Token> {
            Some(1000)
        }
        fn n_vocab(&self) -> usize {
            256
        }
        fn feed(&mut self, _: &[Token]) -> Result<()> {
            Ok(())
        }
        fn logits(&self) -> Option<&[f32]> {
            None
        }
        fn clear(&mut self) {}
        fn describe(&self) -> Record {
            Record::default()
        }
    }

    fn tokens(text: Option<&str>, test: Test) -> Result<Tokens> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        let source = match text {
            None => Source::Random,
            Some(text) => {
                std::fs::write(&path, text).unwrap();
                Source::Text(path)
            }
        };
        let case = Case {
            model: "m".into(),
            words: Vec::new(),
            limit: None,
            n_batch: 8,
            n_ubatch: 8,
            type_k: "f16".into(),
            type_v: "f16".into(),
            no_kv_offload: false,
            flash_attn: "auto".into(),
            threads: 1,
            test,
        };
        let task = Task {
            who: Who::Hobbit,
            case,
            source,
            reps: 2,
            first_rep: 0,
            warmup: true,
            delay: 0,
            with_hashes: false,
            load_mode: String::new(),
            repack: false,
            started_ns: 0,
            verbose: false,
        };
        Tokens::of(&task, &Bytes)
    }

    const TEST: Test = Test { n_prompt: 2, n_gen: 1, n_depth: 1 };

    #[test]
    fn a_text_goes_on_from_repetition_to_repetition() {
        let tokens = tokens(Some("abcdefghij"), TEST).unwrap();
        let first = tokens.rep(0);
        assert_eq!((first.depth(), first.prompt(), first.singles()), (&[1000][..], &[98, 99][..], &[100][..]));
        assert_eq!(tokens.rep(1).prompt(), [102, 103]);
        assert_eq!(tokens.rep(2), first, "it begins again");
    }

    #[test]
    fn random_tokens_are_the_same_each_time_and_differ_by_repetition() {
        let (a, b) = (tokens(None, TEST).unwrap(), tokens(None, TEST).unwrap());
        assert_eq!(a.rep(1), b.rep(1));
        assert_ne!(a.rep(0), a.rep(1));
        assert!(a.rep(2).prompt().iter().all(|token| (0..256).contains(token)), "the warm-up's");
    }

    #[test]
    fn a_text_that_is_too_short() {
        let error = tokens(Some("abc"), TEST).unwrap_err().to_string();
        assert!(error.contains("has 3 tokens, and a repetition takes 4"), "{error}");
    }
}
