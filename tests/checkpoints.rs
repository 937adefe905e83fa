//! Checkpoints of state that cannot be rewound: a sequence goes back to one, and goes on with the bits of a fresh one.

use hobbit::options::Token;
use hobbit::{BatchToken, Budget, Model, ModelOptions, Session, SessionOptions};
use hobbit_synth::{self as synth, Spec};

use crate::fixture::in_own_process;

const RECURRENT: &str = "\
    lfm2moe granitehybrid qwen3next qwen35moe nemotron_h_moe jamba kimi-linear minimax-01 bailingmoe3 kimi-k3 deepseek4 glm5-next \
    qwen4exp";

const N_BATCH: usize = 64;

fn settings() -> SessionOptions {
    SessionOptions {
        n_ctx: 2048,
        n_batch: N_BATCH as u32,
        n_ubatch: N_BATCH as u32,
        n_seq_max: 2,
        threads: Some(1),
        checkpoints: 8,
        checkpoint_step: 8192,
        ..SessionOptions::default()
    }
}

fn model(dir: &tempfile::TempDir, arch: &str, options: ModelOptions) -> Model {
    let path = dir.path().join(format!("{arch}.gguf"));
    if !path.exists() {
        synth::write(&path, &Spec::tiny(arch)).unwrap();
    }
    let window = format!("{arch}.attention.sliding_window=int:32").parse().unwrap();
    Model::open(&path, &ModelOptions { kv_overrides: vec![window], ..options }).unwrap()
}

/// Tokens of a conversation; the answer opens with `opening`.
fn conversation(model: &Model, turns: &[(&str, &str)], opening: &str) -> Vec<Token> {
    let message = |(role, text): &(&str, &str)| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let text: String = turns.iter().map(message).collect::<String>() + "<|im_start|>assistant\n" + opening;
    model.tokenize(&text, true, true).unwrap()
}

fn common(one: &[Token], other: &[Token]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

/// A sequence of a session, and the ends of the batches that it was evaluated in.
struct Reader<'a> {
    session: &'a mut Session,
    sequence: i32,
    ends: Vec<usize>,
}

impl Reader<'_> {
    /// Evaluates the tokens after the first `n_known`, up to each of `ends`. Returns the last logits.
    fn pieces(&mut self, tokens: &[Token], n_known: usize, ends: &[usize]) -> Vec<f32> {
        let cuts = self.session.sequences().cuts(tokens, n_known);
        let (mut from, sequence, mut last) = (n_known, self.sequence, 0);
        for &end in ends {
            let entry =
                |at: usize| BatchToken { token: tokens[at], position: at as i32, sequence, logits: at + 1 == end };
            let batch: Vec<BatchToken> = (from..end).map(entry).collect();
            self.session.evaluate(&batch).unwrap();
            let cut = cuts.iter().copied().find(|cut| cut.at == end);
            self.session.sequences_mut().evaluated_piece(sequence, cut).unwrap();
            (last, from) = (batch.len() - 1, end);
            self.ends.push(end);
        }
        self.session.logits(last).unwrap().to_vec()
    }

    /// As [`Self::pieces`], with the batches of a prompt.
    fn prompt(&mut self, tokens: &[Token], n_known: usize) -> Vec<f32> {
        let mut ends: Vec<usize> = self.session.sequences().cuts(tokens, n_known).iter().map(|cut| cut.at).collect();
        ends.push(tokens.len());
        let (mut from, mut all) = (n_known, Vec::new());
        for end in ends {
            all.extend((from + 1..end).filter(|at| (at - from).is_multiple_of(N_BATCH)));
            all.push(end);
            from = end;
        }
        self.pieces(tokens, n_known, &all)
    }

    /// Goes back to what the sequence shares with `tokens`; returns the number of tokens kept.
    fn go_back(&mut self, n: usize) -> usize {
        let reach = self.session.sequences().reach(self.sequence, n);
        let kept = self.session.sequences_mut().keep(self.sequence, n).unwrap();
        assert_eq!(kept, reach);
        self.ends.retain(|end| *end <= kept);
        kept
    }
}

const SYSTEM: (&str, &str) = ("system", "You are brief and polite, and you know all that was said before this day.");
const FIRST: (&str, &str) = ("user", "Tell me what the people of the old world knew about the stars above them.");
const OTHER: (&str, &str) = ("user", "How many men does it take to build a house like this one in a year?");

/// Checks one model: the same prompt again, and prompts that share less. `n_answer` tokens follow each prompt.
fn check(model: &Model, n_answer: usize, shares: bool) {
    let arch = &model.info().architecture;
    let options = SessionOptions { kv_unified: false, ..settings() };
    let mut session = model.session(&options).unwrap();
    let first = conversation(model, &[SYSTEM, FIRST], "<think>\n");
    let answer: Vec<Token> = (0..n_answer).map(|at| (at * 7919 % 251) as Token).collect();
    let held = [&first[..], &answer].concat();
    let answered: Vec<usize> =
        (first.len() + 1..held.len()).filter(|at| at.is_multiple_of(48)).chain([held.len()]).collect();
    let mut reader = Reader { session: &mut session, sequence: 0, ends: Vec::new() };
    let logits = reader.prompt(&first, 0);
    reader.pieces(&held, first.len(), &answered);

    // The same prompt again.
    let kept = reader.go_back(first.len() - 1);
    assert!(first.len() - kept <= 2, "{arch}: {kept} of {} tokens", first.len());
    assert!(reader.prompt(&first, kept) == logits, "{arch}: the same prompt");
    reader.pieces(&held, first.len(), &answered);

    // A second turn whose history lost its reasoning: they part in the header of the answer.
    let second = conversation(model, &[SYSTEM, FIRST, ("assistant", "Little."), OTHER], "<think>\n");
    let n_common = common(&held, &second);
    assert!(n_common < first.len());
    let kept = reader.go_back(n_common);
    let header = first.len() - conversation(model, &[], "<think>\n").len() + usize::from(model.adds_bos());
    assert_eq!(kept, header, "{arch}: {n_common} tokens are common");
    let logits = reader.prompt(&second, kept);

    // Evaluated afresh in the same pieces.
    let ends = reader.ends.clone();
    let mut fresh = model.session(&options).unwrap();
    let mut fresh = Reader { session: &mut fresh, sequence: 0, ends: Vec::new() };
    let (before, after) = ends.split_at(ends.iter().position(|end| *end == kept).unwrap() + 1);
    fresh.pieces(&first, 0, before);
    assert!(fresh.pieces(&second, kept, after) == logits, "{arch}: a second turn");

    // Another sequence begins with the same system prompt.
    let other = conversation(model, &[SYSTEM, OTHER], "");
    let n_common = common(&second, &other);
    let mut elsewhere = if shares {
        session.sequences_mut().copy(0, 1).unwrap();
        Reader { session: &mut session, sequence: 1, ends: ends.clone() }
    } else {
        Reader { session: &mut session, sequence: 0, ends: ends.clone() }
    };
    let kept = elsewhere.go_back(n_common);
    assert!(kept > 16 && n_common - kept <= 8, "{arch}: {kept} of {n_common} common tokens");
    let logits = elsewhere.prompt(&other, kept);
    let mut fresh = model.session(&options).unwrap();
    let mut fresh = Reader { session: &mut fresh, sequence: 0, ends: Vec::new() };
    let (before, after) = elsewhere.ends.split_at(elsewhere.ends.iter().position(|end| *end == kept).unwrap() + 1);
    fresh.pieces(&other, 0, before);
    assert!(fresh.pieces(&other, kept, after) == logits, "{arch}: another conversation");
}

#[test]
fn recurrent_models_go_back_to_where_conversations_part() {
    let dir = tempfile::tempdir().unwrap();
    for arch in RECURRENT.split(' ') {
        // llama.cpp by itself, and at the seam.
        for passthrough in [true, false] {
            let model = model(&dir, arch, ModelOptions { passthrough, ..ModelOptions::default() });
            // With a window, a sequence goes back only after its first evaluation as a copy: llama.cpp copies late.
            check(&model, 6, arch != "deepseek4");
        }
    }
}

/// The window has moved on, and its cells were taken for later tokens.
#[test]
fn a_window_goes_back_to_what_it_has_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let windows = "gpt-oss mimo2 exaone-moe afmoe laguna mellum cohere2moe granite_swa gemma4 step35";
    for arch in windows.split(' ') {
        check(&model(&dir, arch, ModelOptions::default()), 480, false);
    }
}

#[test]
fn states_are_kept_within_their_share_of_the_memory() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&dir, "lfm2moe", ModelOptions::default());
    let tokens: Vec<Token> = (0..600).map(|at| at * 7919 % 251).collect();
    let n_checkpoints = |options: &SessionOptions| {
        let mut session = model.session(options).unwrap();
        session.feed(&tokens).unwrap();
        session.sequences().checkpoints(0).iter().map(|own| own.n_tokens).collect::<Vec<_>>()
    };
    let every = SessionOptions { checkpoint_step: 128, ..settings() };
    assert_eq!(n_checkpoints(&every), [128, 256, 384, 512, 598]);
    assert_eq!(n_checkpoints(&SessionOptions { checkpoints: 2, ..every.clone() }).len(), 2);
    assert!(n_checkpoints(&SessionOptions { checkpoints: 0, ..every.clone() }).is_empty());
    // A context that is fed goes back as a sequence does.
    let mut session = model.session(&every).unwrap();
    session.feed(&tokens).unwrap();
    let logits = session.logits(1).unwrap().to_vec();
    assert_eq!((session.keep(599), session.n_past()), (598, 598));
    session.feed(&tokens[598..]).unwrap();
    assert!(session.logits(1).unwrap() == logits);
    assert_eq!(session.keep(300), 256);
    assert_eq!(session.keep(100), 0);
    assert!(session.sequences().checkpoints(0).is_empty());
}

/// A process of its own: the resident set is measured.
#[test]
fn states_take_a_sixteenth_of_the_budget_and_no_more() {
    if !in_own_process("checkpoints::states_take_a_sixteenth_of_the_budget_and_no_more") {
        return;
    }
    const BUDGET: u64 = 256 << 20;
    let dir = tempfile::tempdir().unwrap();
    let options = ModelOptions { budget: Budget::Bytes(BUDGET), passthrough: false, ..ModelOptions::default() };
    let model = model(&dir, "granitehybrid", options);
    // 40 states of 800 KiB are due.
    let often = SessionOptions { checkpoints: 1000, checkpoint_step: 1, n_batch: 4, n_ubatch: 4, ..settings() };
    let mut session = model.session(&often).unwrap();
    let tokens: Vec<Token> = (0..160).map(|at| at * 7919 % 251).collect();
    session.feed(&tokens).unwrap();
    let sizes = session.sequences().checkpoints(0).iter().map(|own| own.state.len() as u64);
    let (state, bytes) = (sizes.clone().max().unwrap(), sizes.sum::<u64>());
    assert!(bytes <= BUDGET / 16 && bytes + state > BUDGET / 16, "{bytes} bytes, {state} each");
    assert!(session.stats().peak_rss_bytes <= BUDGET);
}

/// Bytes that are no state empty the sequence, and harm nothing else.
#[test]
fn a_checkpoint_that_does_not_fit_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    for arch in ["lfm2moe", "qwen3next"] {
        let model = model(&dir, arch, ModelOptions::default());
        let tokens: Vec<Token> = (0..40).map(|at| at * 7919 % 251).collect();
        let mut session = model.session(&settings()).unwrap();
        session.feed(&tokens).unwrap();
        let expected = session.logits(1).unwrap().to_vec();
        let good = session.sequences().checkpoints(0).to_vec();
        assert_eq!(good.len(), 1);
        for at in (0..good[0].state.len().min(128)).step_by(4) {
            for word in [0, 1, 1 << 24, -1] {
                let mut altered = good.clone();
                let mut state = altered[0].state.to_vec();
                state[at..at + 4].copy_from_slice(&i32::to_le_bytes(word));
                state.truncate(if word == 1 { at } else { state.len() });
                altered[0].state = std::sync::Arc::new(state);
                session.sequences_mut().set_checkpoints(0, altered);
                let kept = session.sequences_mut().keep(0, 39).unwrap();
                assert!(kept == 38 || kept == 0, "{kept}");
                session.reset();
                session.feed(&tokens).unwrap();
                assert!(session.logits(1).unwrap() == expected, "{arch}");
            }
        }
    }
}
