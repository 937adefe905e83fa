//! Failed llama.cpp assertions during batch preparation become errors of that batch.

use super::*;
use hobbit_core::options::ModelOptions;

#[test]
fn an_assertion_before_anything_is_computed_is_an_error() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
    let model = Model::open(&path, &ModelOptions::default(), |_| true).unwrap();
    let options = SessionOptions { n_ctx: 64, n_batch: 8, threads: Some(1), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    let n_batch = session.n_batch();
    let mut tokens: Vec<Token> = vec![1; n_batch + 1];
    // Bypasses the check of `evaluate` to reach the assertion itself.
    // SAFETY: the batch borrows `tokens`, which outlive its evaluation.
    let batch = unsafe { llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32) };
    let error = session.decode(batch, &[(0, 0)]).unwrap_err();
    assert!(matches!(&error, Error::Decode(reason) if reason.contains("n_tokens_all <= cparams.n_batch")), "{error}");
    session.feed(&tokens[..n_batch]).unwrap();
}

#[test]
fn a_copied_sequence_is_in_place_of_what_was_there() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
    let model = Model::open(&path, &ModelOptions::default(), |_| true).unwrap();
    let base = SessionOptions { n_ctx: 64, n_seq_max: 2, threads: Some(1), ..SessionOptions::default() };
    for kv_unified in [true, false] {
        let mut session = model.session(&SessionOptions { kv_unified, ..base.clone() }).unwrap();
        let text = |tokens: &[Token], sequence| -> Vec<BatchToken> {
            let entry = |(at, token): (usize, &Token)| BatchToken {
                token: *token,
                position: at as i32,
                sequence,
                logits: true,
            };
            tokens.iter().enumerate().map(entry).collect()
        };
        session.evaluate(&text(&[5, 6, 7], 0)).unwrap();
        session.evaluate(&text(&[80, 90, 100], 1)).unwrap();
        session.copy_sequence(0, 1).unwrap();
        let next = |sequence| [BatchToken { token: 8, position: 3, sequence, logits: true }];
        session.evaluate(&next(0)).unwrap();
        let expected = session.logits(0).unwrap().to_vec();
        session.evaluate(&next(1)).unwrap();
        assert_eq!(session.logits(0).unwrap(), expected, "unified: {kv_unified}");
    }
}

#[test]
fn a_session_that_ranks_has_a_score_for_each_class() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
    let model = Model::open(&path, &ModelOptions::default(), |_| true).unwrap();
    let embeddings = Some(Some(hobbit_core::options::Pooling::Rank));
    let mut session = model
        .session(&SessionOptions { n_ctx: 64, embeddings, threads: Some(1), ..SessionOptions::default() })
        .unwrap();
    let entry = |at: i32| BatchToken { token: 5 + at, position: at, sequence: 0, logits: true };
    session.evaluate(&[entry(0), entry(1)]).unwrap();
    assert_eq!(session.embedding_of_sequence(0).map(<[f32]>::len), Some(1));
}
