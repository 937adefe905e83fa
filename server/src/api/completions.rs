//! `/v1/completions`: a text to continue, in OpenAI's shape.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use axum::response::Response;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::dialect::{Dialect, Framing, Whole, answer};
use super::native::{self, Candidates};
use super::openai::{self, Stamp, Usage, finish_reason};
use crate::app::App;
use crate::error::ApiError;
use crate::http::Asked;
use crate::job::{Candidate, Done, Event, Probabilities};
use crate::json::{Fields, boolean, get, text, whole as integer};
use crate::request::params::{Params, n_answers};
use crate::request::prompts::{self, Prompts};
use crate::request::{Texts, refuse_embedding_server};

/// `POST /v1/completions`
pub async fn completions(Asked { app, backend, body, held }: Asked) -> Result<Response, ApiError> {
    refuse_embedding_server(&app)?;
    let (prompts, params, form) = app.work(|| read(body, &app)).await?;
    let texts = Texts { backend, params, prompts };
    let scheduled = texts.schedule(Default::default(), &Arc::new(held)).await?;
    let stamp = Stamp::new(&texts.backend.name, "text_completion");
    let states = scheduled.running.iter().map(|_| Streamed::default()).collect();
    answer(&app, scheduled, Text { texts, stamp, form, states }).await
}

/// Fields of OpenAI's endpoint that llama-server's own lacks.
#[derive(Debug, Default)]
struct Form {
    /// Answers per prompt that are returned.
    n: usize,
    /// Candidates for each token; `None`: no `logprobs`.
    n_top: Option<usize>,
    /// The prompts' texts, if answers begin with them.
    echoed: Vec<String>,
}

/// The prompts of a body, and the parameters.
fn read(mut body: Fields, app: &App) -> Result<(Prompts, Params, Form), ApiError> {
    let n_top = logprobs(&mut body)?;
    let n = candidates(&mut body, app)?;
    let suffix = text(&body, "suffix")?.filter(|suffix| !suffix.is_empty());
    let echoes = boolean(&body, "echo")?.unwrap_or(false);
    if echoes && suffix.is_some() {
        return Err(ApiError::field("echo", "a prompt with a suffix is not repeated: leave one of both out"));
    }
    let prompt = prompts::given(&body)?;
    let prompts = match suffix {
        Some(suffix) => around(prompt, suffix, &body, app)?,
        None => prompts::prompts(prompt, &body, app)?,
    };
    let mut params = Params::of(&body, app)?;
    let mut form = Form { n, n_top, echoed: Vec::new() };
    if echoes {
        let backend = app.backend()?;
        let text = |(given, tokens): (&Value, &Arc<[_]>)| match given {
            Value::String(text) => text.clone(),
            _ => backend.spelled(tokens),
        };
        form.echoed = prompts::each(prompt).iter().zip(&prompts).map(text).collect();
        params.echoed_bytes = 2 * params.n * form.echoed.iter().map(String::len).sum::<usize>();
        params.generate.scores_prompt = n_top.is_some();
        // Every token of the prompt needs its logits.
        params.cache_prompt &= n_top.is_none();
    }
    Ok((prompts, params, form))
}

/// `logprobs` becomes `n_probs`. OpenAI's 0 asks for the chosen tokens only.
fn logprobs(body: &mut Fields) -> Result<Option<usize>, ApiError> {
    let is_only = get(body, "n_probs").is_none();
    let n = integer(body, &["n_probs", "logprobs"], 0..=i64::from(i32::MAX))?.filter(|n| is_only || *n > 0);
    if let Some(n) = n {
        body.insert("n_probs".to_owned(), json!(n.max(1)));
    }
    Ok(n.map(|n| n as usize))
}

/// `best_of` becomes `n`; returns how many of the answers to a prompt are returned.
fn candidates(body: &mut Fields, app: &App) -> Result<usize, ApiError> {
    let n = n_answers(body, app)?;
    let Some(best_of) = integer(body, &["best_of"], n as i64..=app.settings.n_slots as i64)? else { return Ok(n) };
    if best_of as usize > n {
        if boolean(body, "stream")?.unwrap_or(false) {
            return Err(ApiError::field("best_of", "the best answer is known at the end only: leave stream out"));
        }
        // Answers are compared by their tokens' probabilities.
        body.entry("n_probs").or_insert(json!(1));
        body.remove("n_cmpl");
        body.insert("n".to_owned(), json!(best_of));
    }
    Ok(n)
}

/// Prompts whose answers stand before `suffix`.
fn around(prompt: &Value, suffix: &str, body: &Fields, app: &App) -> Result<Prompts, ApiError> {
    let list = prompts::each(prompt);
    prompts::check(list.len().saturating_mul(n_answers(body, app)?), app)?;
    // Once for all prompts.
    let suffix = prompts::encode(&app.backend()?.model, suffix, false, false)?;
    let one = |given: &Value| {
        let Value::String(prefix) = given else {
            return Err(ApiError::field("suffix", "\"prompt\" must be a string, or an array of strings"));
        };
        let mut gap = Fields::new();
        gap.insert("input_prefix".to_owned(), json!(prefix));
        let tokens = prompts::gap(app, &gap, &suffix).map_err(|error| ApiError::field("suffix", error.message))?;
        Ok(tokens.into())
    };
    match list {
        [] => Err(ApiError::invalid("\"prompt\" must not be empty")),
        list => list.iter().map(one).collect(),
    }
}

/// The `n` most probable of every `of` answers, by the mean logarithm of their tokens' probabilities: their places.
fn best(results: &[Whole], of: usize, n: usize) -> Vec<usize> {
    let mean = |answer: &Whole| {
        let sum: f64 = answer.probabilities.iter().map(|token| f64::from(token.chosen.log)).sum();
        sum / answer.probabilities.len().max(1) as f64
    };
    let mut places = Vec::new();
    for first in (0..results.len()).step_by(of) {
        let mut group: Vec<usize> = (first..first + of).collect();
        if n < of {
            group.sort_by(|a, b| mean(&results[*b]).total_cmp(&mean(&results[*a])));
        }
        places.extend(group.into_iter().take(n));
    }
    places
}

#[derive(Serialize)]
struct Choice<'a> {
    text: Cow<'a, str>,
    index: usize,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
}

/// `logprobs`: OpenAI's lists, and llama-server's `content` for the generated tokens.
struct Logprobs<'a> {
    /// The text of the prompt's first token, which has no probability.
    first: Option<Vec<u8>>,
    prompt: &'a [Probabilities],
    generated: &'a [Probabilities],
    /// Characters before the first token.
    offset: usize,
    /// Characters that the prompt's tokens have beyond its text: of a token for the beginning, or a space.
    n_beyond: usize,
    n_top: usize,
}

impl Logprobs<'_> {
    /// The tokens' texts and candidates, in order.
    fn tokens(&self) -> impl Iterator<Item = (&[u8], Option<&Probabilities>)> {
        let first = self.first.iter().map(|bytes| (bytes.as_slice(), None));
        let others = self.prompt.iter().chain(self.generated);
        first.chain(others.map(|scored| (scored.chosen.bytes.as_slice(), Some(scored))))
    }
}

/// Characters that begin in a text.
fn n_chars(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| !(0x80..0xc0).contains(*byte)).count()
}

/// A token's text as OpenAI writes it: `bytes:\xe2` if it is a part of a character.
fn token_text(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")).into(),
    }
}

/// The most probable candidates and the chosen one by their texts.
struct Top<'a>(&'a Probabilities, usize);

impl Serialize for Top<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seen = HashSet::new();
        let all = self.0.top.iter().take(self.1).chain([&self.0.chosen]);
        let all = all.map(|candidate| (token_text(&candidate.bytes), log_of(candidate)));
        serializer.collect_map(all.filter(|(text, _)| seen.insert(text.clone())).collect::<Vec<_>>())
    }
}

/// JSON has no infinity.
fn log_of(candidate: &Candidate) -> f32 {
    candidate.log.max(f32::MIN)
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(None)?;
        fields.serialize_entry("content", &Candidates { all: self.generated, n_top: self.n_top })?;
        fields.serialize_entry("tokens", &self.tokens().map(|(bytes, _)| token_text(bytes)).collect::<Vec<_>>())?;
        let chosen = self.tokens().map(|(_, scored)| scored.map(|scored| log_of(&scored.chosen)));
        fields.serialize_entry("token_logprobs", &chosen.collect::<Vec<_>>())?;
        let top = self.tokens().map(|(_, scored)| scored.map(|scored| Top(scored, self.n_top)));
        fields.serialize_entry("top_logprobs", &(self.n_top > 0).then(|| top.collect::<Vec<_>>()))?;
        let offsets = self.tokens().scan(self.offset, |end, (bytes, _)| {
            let begin = *end;
            *end += n_chars(bytes);
            Some(begin.saturating_sub(self.n_beyond))
        });
        fields.serialize_entry("text_offset", &offsets.collect::<Vec<_>>())?;
        fields.end()
    }
}

/// State of one answer in a stream.
#[derive(Debug, Default)]
struct Streamed {
    /// Candidates of the prompt's tokens, until the first event.
    scores: Vec<Probabilities>,
    has_begun: bool,
    /// Characters so far.
    offset: usize,
}

/// OpenAI's form.
struct Text {
    texts: Texts,
    stamp: Stamp,
    form: Form,
    states: Vec<Streamed>,
}

impl Text {
    /// The text of the prompt of answer `at`; empty if it is not repeated.
    fn echoed(&self, at: usize) -> &str {
        self.form.echoed.get(at / self.texts.params.n).map_or("", String::as_str)
    }

    /// `logprobs` of the prompt and the text of answer `at`.
    fn logprobs<'a>(
        &self,
        at: usize,
        prompt: &'a [Probabilities],
        generated: &'a [Probabilities],
    ) -> Option<Logprobs<'a>> {
        let n_top = self.form.n_top?;
        let text = self.echoed(at);
        let first = self.texts.prompt(at).first().filter(|_| self.texts.params.generate.scores_prompt);
        let first = first.map(|token| self.texts.backend.model.piece(*token, true));
        let rest: usize = prompt.iter().map(|scored| n_chars(&scored.chosen.bytes)).sum();
        // Without the prompt's tokens, those of the text begin behind it.
        let offset = if first.is_some() { 0 } else { n_chars(text.as_bytes()) };
        let n_beyond =
            first.as_ref().map_or(0, |first| (n_chars(first) + rest).saturating_sub(n_chars(text.as_bytes())));
        Some(Logprobs { first, prompt, generated, offset, n_beyond, n_top })
    }

    /// The choice `index`, which is the complete answer `at`.
    fn choice<'a>(&'a self, index: usize, at: usize, whole: &'a Whole) -> Choice<'a> {
        let text = match self.echoed(at) {
            "" => whole.text.as_str().into(),
            prompt => format!("{prompt}{}", whole.text).into(),
        };
        let logprobs = self.logprobs(at, &whole.scores, &whole.probabilities);
        let finish_reason = Some(finish_reason(&whole.done.stop, false));
        Choice { text, index, logprobs, finish_reason }
    }

    /// A part of a stream.
    fn part(&self, text: &str, index: usize, logprobs: Option<Logprobs<'_>>, done: Option<&Done>) -> Value {
        let finish_reason = done.map(|done| finish_reason(&done.stop, false));
        self.stamp.part(json!([Choice { text: text.into(), index, logprobs, finish_reason }]))
    }

    /// The part with the prompt, if it is repeated and was not sent yet.
    fn begin(&mut self, index: usize) -> Option<Value> {
        let offset = n_chars(self.echoed(index).as_bytes());
        let state = &mut self.states[index];
        if std::mem::replace(&mut state.has_begun, true) || self.form.echoed.is_empty() {
            return None;
        }
        let scores = std::mem::take(&mut state.scores);
        state.offset = offset;
        let logprobs = self.logprobs(index, &scores, &[]).filter(|lists| lists.first.is_some());
        Some(self.part(self.echoed(index), index, logprobs, None))
    }
}

impl Dialect for Text {
    const FRAMING: Framing = Framing::UntilDone;

    fn event(&mut self, index: usize, event: Event) -> Vec<Value> {
        let mut parts = Vec::new();
        match event {
            Event::Scores(scores) => self.states[index].scores.extend(scores),
            Event::Progress(progress) => {
                let mut part = self.part("", index, None, None);
                self.texts.params.add_progress(&mut part, &progress);
                parts.push(part);
            }
            Event::Token(token) => {
                parts.extend(self.begin(index));
                let (generated, offset) = (token.probabilities.as_slice(), self.states[index].offset);
                let n_top = self.form.n_top.filter(|_| !generated.is_empty());
                let new = |n_top| Logprobs { first: None, prompt: &[], generated, offset, n_beyond: 0, n_top };
                let mut part = self.part(&token.text, index, n_top.map(new), None);
                self.texts.params.add_timings(&mut part, &token.timings);
                let n_new: usize = generated.iter().map(|scored| n_chars(&scored.chosen.bytes)).sum();
                self.states[index].offset += n_new;
                parts.push(part);
            }
            Event::Done(done) => {
                parts.extend(self.begin(index));
                if !done.rest.is_empty() {
                    parts.push(self.part(&done.rest, index, None, None));
                }
                let mut last = self.part("", index, None, Some(&done));
                last["usage"] = Usage::of(&done).json();
                last["timings"] = done.timings.json();
                if let Some(verbose) = native::verbose(&self.texts, &done, index, "") {
                    last["__verbose"] = verbose;
                }
                parts.push(last);
            }
            _ => {}
        }
        parts
    }

    fn whole(self, answers: Vec<Whole>) -> Response {
        let verbose = native::verbose(&self.texts, &answers[0].done, 0, &answers[0].text);
        let n = self.texts.params.n;
        let chosen = best(&answers, n, self.form.n).into_iter().enumerate();
        let choices = chosen.map(|(index, at)| self.choice(index, at, &answers[at])).collect();
        openai::whole(&self.stamp, n, &answers, choices, verbose)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(token: &str, log: f32, top: &[(&str, f32)]) -> Probabilities {
        let candidate = |text: &str, log| Candidate { token: 1, bytes: text.as_bytes().to_vec(), log };
        let top = top.iter().map(|(text, log)| candidate(text, *log)).collect();
        Probabilities { chosen: candidate(token, log), top, is_post_sampling: false }
    }

    #[test]
    fn logprobs_become_candidates() {
        let read = |value: Value| {
            let Value::Object(mut body) = value else { panic!("a body is an object") };
            let n_top = logprobs(&mut body).map_err(|error| error.message)?;
            Ok::<_, String>((n_top, body.remove("n_probs")))
        };
        assert_eq!(read(json!({"logprobs": 3})), Ok((Some(3), Some(json!(3)))));
        assert_eq!(read(json!({"logprobs": 0})), Ok((Some(0), Some(json!(1)))));
        assert_eq!(read(json!({"logprobs": 3, "n_probs": 2})), Ok((Some(2), Some(json!(2)))));
        assert_eq!(read(json!({"n_probs": 0})), Ok((None, Some(json!(0)))));
        assert_eq!(read(json!({"suffix": null})), Ok((None, None)));
        assert!(read(json!({"logprobs": -1})).unwrap_err().contains("'logprobs'"));
    }

    #[test]
    fn lists_of_openai() {
        let prompt = [scored(" Ä", -1.0, &[("x", -0.5), (" Ä", -1.0)])];
        let generated = [scored("b", f32::NEG_INFINITY, &[("x", -0.5), ("y", -0.75)])];
        let first = Some(b"<s>".to_vec());
        let own = Logprobs { first, prompt: &prompt, generated: &generated, offset: 0, n_beyond: 4, n_top: 1 };
        let mut value = json!(own);
        assert_eq!(value["content"].take()[0]["token"], "b");
        let expected = json!({
            "content": null,
            "tokens": ["<s>", " Ä", "b"],
            "token_logprobs": [null, -1.0, f32::MIN],
            "top_logprobs": [null, {"x": -0.5, " Ä": -1.0}, {"x": -0.5, "b": f32::MIN}],
            "text_offset": [0, 0, 1],
        });
        assert_eq!(value, expected);
        let none = Logprobs { first: None, prompt: &prompt, generated: &[], offset: 2, n_beyond: 0, n_top: 0 };
        assert_eq!((&json!(none)["top_logprobs"], &json!(none)["text_offset"]), (&Value::Null, &json!([2])));
        assert_eq!(token_text(b"\xe2\x80"), "bytes:\\xe2\\x80");
    }

    #[test]
    fn the_best_answers_of_each_prompt() {
        let whole = |logs: &[f32]| Whole {
            text: String::new(),
            tokens: Vec::new(),
            scores: Vec::new(),
            probabilities: logs.iter().map(|log| scored("a", *log, &[])).collect(),
            done: Done::default(),
        };
        // A longer answer is not worse for its length.
        let results = [whole(&[-2.0]), whole(&[-1.0, -1.5]), whole(&[-0.5]), whole(&[-3.0])];
        assert_eq!(best(&results, 2, 1), [1, 2]);
        assert_eq!(best(&results, 4, 2), [2, 1]);
        assert_eq!(best(&results, 2, 2), [0, 1, 2, 3]);
    }
}
