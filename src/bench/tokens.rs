//! What is evaluated: a text's tokens, requests' tokens, or random ones. The same for every engine.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rand_mt::Mt64;
use serde::Deserialize;

use super::case::{Source, Task};
use super::engine::Engine;
use super::workload::Test;
use hobbit::Token;

/// llama-bench's random numbers begin with C's default seed; so do these, from another generator.
const SEED: u64 = 1;

/// Pieces of the token source, one for each repetition.
#[derive(Debug)]
pub struct Tokens {
    test: Test,
    /// Repetitions, if they lie ready: requests.
    requests: Vec<Vec<Token>>,
    /// Otherwise a long row, of which each repetition takes the next piece.
    row: Vec<Token>,
    bos: Option<Token>,
}

/// What one repetition evaluates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    test: Test,
    tokens: Vec<Token>,
}

impl Piece {
    /// What is in the context before.
    pub fn depth(&self) -> &[Token] {
        &self.tokens[..self.test.n_depth as usize]
    }

    /// The prompt.
    pub fn prompt(&self) -> &[Token] {
        &self.tokens[self.test.n_depth as usize..][..self.test.n_prompt as usize]
    }

    /// What is evaluated one by one.
    pub fn singles(&self) -> &[Token] {
        &self.tokens[(self.test.n_depth + self.test.n_prompt) as usize..]
    }
}

/// One line of a file of requests.
#[derive(Deserialize)]
struct Request {
    prompt: String,
    #[serde(default)]
    output: String,
}

impl Tokens {
    /// Reads and tokenises what the task names.
    ///
    /// # Errors
    /// Files that cannot be read, texts that are too short.
    pub fn of(task: &Task, engine: &dyn Engine) -> Result<Self> {
        let test = task.case.test;
        let mut tokens = Self { test, requests: Vec::new(), row: Vec::new(), bos: engine.bos() };
        match &task.source {
            Source::Random => {
                let n = test.n_tokens() * (task.first_rep + task.reps + 1) as usize;
                let (mut random, n_vocab) = (Mt64::new(SEED), engine.n_vocab().max(1) as u64);
                tokens.row = (0..n).map(|_| (random.next_u64() % n_vocab) as Token).collect();
            }
            Source::Text(path) => tokens.row = engine.tokenize(&read(path)?)?,
            Source::Requests(path) => tokens.requests = requests(path, test, engine)?,
        }
        Ok(tokens)
    }

    /// The tokens of a repetition; beyond the end of a text it begins again.
    ///
    /// # Errors
    /// A text that is shorter than one repetition.
    pub fn rep(&self, rep: u32) -> Result<Piece> {
        let n = self.test.n_tokens();
        let mut tokens = if self.requests.is_empty() {
            let n_pieces = self.row.len() / n.max(1);
            ensure!(
                n_pieces > 0,
                "the text has {} tokens, and a repetition takes {n}: give a longer --prompt-file, or smaller -p, -n, -pg and -d",
                self.row.len()
            );
            let first = (rep as usize % n_pieces) * n;
            self.row[first..first + n].to_vec()
        } else {
            self.requests[rep as usize % self.requests.len()].clone()
        };
        if let (Some(bos), Some(first)) = (self.bos, tokens.first_mut()) {
            *first = bos;
        }
        Ok(Piece { test: self.test, tokens })
    }
}

/// Requests that are long enough, as tokens of one repetition each.
fn requests(path: &Path, test: Test, engine: &dyn Engine) -> Result<Vec<Vec<Token>>> {
    let (n_before, n_single) = ((test.n_depth + test.n_prompt) as usize, test.n_gen as usize);
    let mut all = Vec::new();
    for (number, line) in (1..).zip(read(path)?.lines().filter(|line| !line.trim().is_empty())) {
        let request: Request = serde_json::from_str(line).with_context(|| {
            format!("{}: request {number} is no object with \"prompt\" and \"output\"", path.display())
        })?;
        let (prompt, output) = (engine.tokenize(&request.prompt)?, engine.tokenize(&request.output)?);
        if prompt.len() >= n_before && output.len() >= n_single {
            all.push([&prompt[..n_before], &output[..n_single]].concat());
        }
    }
    if all.is_empty() {
        bail!(
            "{}: no request has a prompt of {n_before} tokens and an output of {n_single}; give smaller -p, -n, -pg and -d",
            path.display()
        );
    }
    Ok(all)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{}: cannot read this file as text", path.display()))
}

#[cfg(test)]
mod tests {
    use super::super::args::Who;
    use super::super::case::Case;
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
        fn describe(&self) -> (String, u64, u64) {
            Default::default()
        }
        fn piece(&self, _: Token) -> Vec<u8> {
            Vec::new()
        }
    }

    fn tokens(text: Option<(&str, bool)>, test: Test) -> Result<Tokens> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        let source = match text {
            None => Source::Random,
            Some((text, is_requests)) => {
                std::fs::write(&path, text).unwrap();
                if is_requests { Source::Requests(path) } else { Source::Text(path) }
            }
        };
        let case = Case {
            model: "m".into(),
            words: Vec::new(),
            limit: None,
            busy: 0,
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
        let tokens = tokens(Some(("abcdefghij", false)), TEST).unwrap();
        let first = tokens.rep(0).unwrap();
        assert_eq!((first.depth(), first.prompt(), first.singles()), (&[1000][..], &[98, 99][..], &[100][..]));
        assert_eq!(tokens.rep(1).unwrap().prompt(), [102, 103]);
        assert_eq!(tokens.rep(2).unwrap(), first, "it begins again");
    }

    #[test]
    fn random_tokens_are_the_same_each_time_and_differ_by_repetition() {
        let (a, b) = (tokens(None, TEST).unwrap(), tokens(None, TEST).unwrap());
        assert_eq!(a.rep(1).unwrap(), b.rep(1).unwrap());
        assert_ne!(a.rep(0).unwrap(), a.rep(1).unwrap());
        assert!(a.rep(2).unwrap().prompt().iter().all(|token| (0..256).contains(token)), "the warm-up's");
    }

    #[test]
    fn requests_that_are_long_enough_take_turns() {
        let text = "{\"prompt\":\"abc\",\"output\":\"x\"}\n\n{\"prompt\":\"ab\",\"output\":\"x\"}\n{\"prompt\":\"defg\",\"output\":\"yz\"}\n";
        let all = tokens(Some((text, true)), TEST).unwrap();
        assert_eq!(all.rep(0).unwrap().tokens, [1000, 98, 99, 120]);
        assert_eq!(all.rep(1).unwrap().tokens, [1000, 101, 102, 121]);
        assert_eq!(all.rep(2).unwrap(), all.rep(0).unwrap());
        let error = tokens(Some(("{\"prompt\":\"a\"}", true)), TEST).unwrap_err().to_string();
        assert!(error.contains("no request has a prompt of 3 tokens"), "{error}");
        assert!(tokens(Some(("[]", true)), TEST).unwrap_err().to_string().contains("request 1"));
    }

    #[test]
    fn a_text_that_is_too_short() {
        let error = tokens(Some(("abc", false)), TEST).unwrap().rep(0).unwrap_err().to_string();
        assert!(error.contains("has 3 tokens, and a repetition takes 4"), "{error}");
    }
}
