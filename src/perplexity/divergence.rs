//! A model's predictions beside those of another, read from a base file.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::json;

use super::evaluate::{self, on_all_cpus, start_token};
use super::{Desk, Measurement, format};
use hobbit::perplexity::base::{BaseHead, BaseReader};
use hobbit::perplexity::divergence::{Divergence, TOKENS_MIN, compare};
use hobbit::perplexity::quantised::{Row, row_words};
use hobbit::{Model, Token};

/// Prepares it.
///
/// # Errors
/// A file that is no complete base, or one of another vocabulary or another text.
pub fn divergence<'a>(desk: &'a Desk, model: &Model, path: &Path) -> Result<Measurement<'a>> {
    let bos = start_token(model)?;
    let mut base = BaseReader::open(path)?;
    let head = &base.head;
    if head.n_vocab != model.n_vocab() {
        bail!(
            "{}: inconsistent vocabulary ({} vs {}): the base is another model's; make one with a model of the same family",
            path.display(),
            head.n_vocab,
            model.n_vocab()
        );
    }
    let n_ctx = desk.args.session_options.n_ctx as usize;
    if head.n_ctx > n_ctx {
        bail!(
            "{} has been computed with {}, while the current context is {n_ctx}. Increase it with -c and retry",
            path.display(),
            head.n_ctx
        );
    }
    if desk.args.text.is_some() {
        let tokens = model.tokenize(desk.text()?.as_str()?, true, false)?;
        is_of_text(head, &tokens, path)?;
    }
    let windows = desk.windows(head.n_ctx, head.n_chunk());
    base.holds(windows.n_chunk)?;
    Ok(Measurement::of_windows(&windows, move |session| {
        desk.log_windows("kl_divergence: computing", &windows);
        let tokens = base.head.tokens.clone();
        let n_vocab = session.model().n_vocab();
        let n_words = row_words(n_vocab);
        let mut all = Divergence::default();
        let mut words = Vec::new();
        for pass in windows.passes() {
            let started = Instant::now();
            let mut compared = vec![Vec::new(); pass.len()];
            let bar = desk.bar(session, &windows, &pass);
            evaluate::pass(session, &windows, pass.clone(), &tokens, bos, bar.as_ref(), |rows| {
                words.resize(rows.len() * n_words, 0u16);
                base.rows(rows[0].chunk, rows[0].row, &mut words)?;
                let pairs = rows.iter().zip(words.chunks_exact(n_words)).collect();
                let found = on_all_cpus(pairs, |(row, words)| compare(row.logits, Row::new(words, n_vocab)?, row.next));
                // Vocabulary and tokens were checked: every token has its place.
                compared[rows[0].chunk - pass.start].extend(found.into_iter().flatten());
                Ok(())
            })?;
            drop(bar);
            if pass.start == 0 {
                desk.print_eta("kl_divergence", started.elapsed(), &windows)?;
                desk.print(format::DIVERGENCE_HEAD)?;
            }
            for (chunk, compared) in pass.zip(&compared) {
                compared.iter().for_each(|one| all.add(one));
                desk.print(&format::divergence_line(chunk + 1, &all.means()))?;
            }
        }
        desk.print("\n")?;
        if all.count() >= TOKENS_MIN {
            desk.print(&format::divergence_table(&all))?;
        }
        Ok(json!({
            "n_tokens_scored": all.count(),
            "means": all.means(),
            "kld": all.klds(),
            "p_diff": all.p_diffs(),
        }))
    }))
}

/// Whether a base was made from this text.
fn is_of_text(head: &BaseHead, tokens: &[Token], path: &Path) -> Result<()> {
    let equal = head.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
    if equal < head.tokens.len() {
        bail!(
            "{} was computed on another text: token {equal} of {} differs; give the base's text with -f, or none",
            path.display(),
            head.tokens.len()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_recognised_by_its_tokens() {
        let head = BaseHead { n_ctx: 2, n_vocab: 9, tokens: vec![1, 2, 3, 4] };
        let path = Path::new("base");
        is_of_text(&head, &[1, 2, 3, 4, 5], path).unwrap();
        let error = is_of_text(&head, &[1, 2, 7, 4], path).unwrap_err().to_string();
        assert!(error.contains("base was computed on another text: token 2 of 4 differs"), "{error}");
        assert!(is_of_text(&head, &[1, 2], path).is_err());
    }
}
