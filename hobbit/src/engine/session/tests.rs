//! What llama.cpp asserts while it prepares a batch is an error of that batch.

use super::*;
use crate::options::ModelOptions;

#[test]
fn an_assertion_before_anything_is_computed_is_an_error() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
    let model = Model::open(&path, &ModelOptions::default(), |_| true).unwrap();
    let options = SessionOptions { n_ctx: 64, n_batch: 8, threads: Some(1), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    let n_batch = session.n_batch();
    let mut tokens: Vec<Token> = vec![1; n_batch + 1];
    // Past the check of `evaluate`, to the assertion itself.
    // SAFETY: the batch borrows `tokens`, which outlive its evaluation.
    let batch = unsafe { llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32) };
    let error = session.decode(batch, &[(0, 0)]).unwrap_err();
    assert!(matches!(&error, Error::Decode(reason) if reason.contains("n_tokens_all <= cparams.n_batch")), "{error}");
    session.feed(&tokens[..n_batch]).unwrap();
}
