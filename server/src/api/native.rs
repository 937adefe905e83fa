//! `/completion`: a text to continue, in llama-server's own shape.

use std::sync::Arc;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::dialect::{Dialect, Framing, Whole, answer};
use crate::app::App;
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Asked;
use crate::job::{Candidate, Done, Event, Probabilities, Stop};
use crate::json::{Fields, SHOWN_BYTES_MAX, text};
use crate::request::params::{Params, shown};
use crate::request::{Texts, prompts, refuse_embedding_server};

/// `POST /infill`
pub async fn infill(Asked { app, backend, body, held }: Asked) -> Result<Response, ApiError> {
    let read = || {
        let suffix = text(&body, "input_suffix")?;
        let suffix = suffix.ok_or_else(|| ApiError::invalid("\"input_suffix\" is required"))?;
        let suffix = prompts::encode(&backend.model, suffix, false, false)?;
        let prompts = vec![prompts::gap(&app, &body, &suffix)?.into()];
        Ok::<_, ApiError>((prompts, Params::of(&body, &app)?))
    };
    let (prompts, params) = app.work(read).await?;
    prompts::check(params.n, &app)?;
    drop(body);
    complete(&app, Texts { backend, params, prompts }, held).await
}

/// `POST /completion`
pub async fn completion(Asked { app, backend, body, held }: Asked) -> Result<Response, ApiError> {
    let read = || {
        let prompts = prompts::prompts(prompts::given(&body)?, &body, &app)?;
        Ok::<_, ApiError>((prompts, Params::of(&body, &app)?))
    };
    let (prompts, params) = app.work(read).await?;
    drop(body);
    complete(&app, Texts { backend, params, prompts }, held).await
}

/// Continues prompts.
async fn complete(app: &App, texts: Texts, held: Held) -> Result<Response, ApiError> {
    refuse_embedding_server(app)?;
    let scheduled = texts.schedule(Default::default(), &Arc::new(held)).await?;
    let slots = vec![0; scheduled.running.len()];
    answer(app, scheduled, Native { texts, slots }).await
}

/// llama-server's form.
struct Native {
    texts: Texts,
    /// The slot of each answer.
    slots: Vec<usize>,
}

impl Native {
    /// A part of answer `index`.
    fn part(&self, index: usize, content: &str, tokens: &[i32], n_decoded: usize) -> Value {
        json!({
            "index": index,
            "content": content,
            "tokens": tokens,
            "stop": false,
            "id_slot": self.slots[index],
            "tokens_predicted": n_decoded,
            "tokens_evaluated": self.texts.prompt(index).len(),
        })
    }

    /// Answer `index` as text of JSON.
    fn written(&self, index: usize, whole: &Whole) -> serde_json::Result<String> {
        let params = &self.texts.params;
        let mut answer = last(&self.texts, &whole.done, index, &whole.text);
        if params.return_tokens {
            answer["tokens"] = json!(whole.tokens);
        }
        let fields = &params.response_fields;
        let tells = params.generate.n_probs > 0
            && (fields.is_empty() || fields.iter().any(|field| field == "completion_probabilities"));
        let completion_probabilities = tells.then_some(Candidates::new(&whole.probabilities));
        serde_json::to_string(&Answer { answer: select(answer, fields), completion_probabilities })
    }
}

impl Dialect for Native {
    const FRAMING: Framing = Framing::Unnamed;

    fn event(&mut self, index: usize, event: Event) -> Vec<Value> {
        let params = &self.texts.params;
        vec![match event {
            Event::Started(started) => {
                self.slots[index] = started.slot;
                return Vec::new();
            }
            Event::Progress(progress) => {
                let mut part = self.part(index, "", &[], 0);
                params.add_progress(&mut part, &progress);
                part
            }
            Event::Token(token) => {
                let mut part = self.part(index, &token.text, &[token.token], token.timings.n_predicted);
                params.add_timings(&mut part, &token.timings);
                if let Some(probabilities) = token.probabilities {
                    part["completion_probabilities"] = json!(Candidates::new(&[probabilities]));
                }
                part
            }
            Event::Done(done) => last(&self.texts, &done, index, &done.rest),
            _ => return Vec::new(),
        }]
    }

    fn whole(self, answers: Vec<Whole>) -> Response {
        // Serialise one answer at a time: JSON values of all would take far more memory.
        let answers = answers.iter().enumerate().map(|(index, whole)| self.written(index, whole));
        match answers.collect::<Result<Vec<String>, _>>() {
            Ok(answers) => {
                let text = if let [one] = &answers[..] { one.clone() } else { format!("[{}]", answers.join(",")) };
                ([(CONTENT_TYPE, "application/json")], text).into_response()
            }
            Err(error) => ApiError::server(error.to_string()).into_response(),
        }
    }
}

/// An answer with the probabilities of its tokens.
#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    answer: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Candidates<'a>>,
}

/// The beginning of the prompt of answer `index`, as answers repeat it.
fn shown_prompt(texts: &Texts, index: usize) -> String {
    let (tokens, mut n_bytes) = (texts.prompt(index), 0);
    let shown = tokens.iter().take_while(|token| {
        n_bytes += texts.backend.model.piece(**token, true).len();
        n_bytes <= SHOWN_BYTES_MAX
    });
    let n = shown.count();
    let text = texts.backend.spelled(&tokens[..n]);
    if n == tokens.len() { text } else { format!("{text}… [truncated, {} tokens]", tokens.len()) }
}

/// Details of answer `index` for `__verbose`; `None` if not requested.
pub fn verbose(texts: &Texts, done: &Done, index: usize, content: &str) -> Option<Value> {
    texts.params.verbose.then(|| last(texts, done, index, content))
}

/// The last event of answer `index`, complete.
fn last(texts: &Texts, done: &Done, index: usize, content: &str) -> Value {
    let Texts { backend, params, .. } = texts;
    // Seeds differ among the answers to a prompt.
    let generate = params.generate_of(index % params.n);
    let settings = shown(&generate, &backend.model, params.stream, params.timings_per_token, true);
    let (stop_type, word) = match &done.stop {
        Stop::Eos => ("eos", ""),
        Stop::Word(word) => ("word", word.as_str()),
        Stop::Limit => ("limit", ""),
    };
    json!({
        "index": index,
        "content": content,
        "tokens": [],
        "id_slot": done.slot,
        "stop": true,
        "model": backend.name,
        "tokens_predicted": done.timings.n_predicted,
        "tokens_evaluated": done.n_prompt,
        "generation_settings": settings,
        "prompt": shown_prompt(texts, index),
        "has_new_line": done.has_new_line,
        "truncated": done.truncated,
        "stop_type": stop_type,
        "stopping_word": word,
        "tokens_cached": done.n_held,
        "timings": done.timings.json(),
    })
}

/// The `n_top` most probable candidates of each token, with the fields of llama-server and OpenAI.
pub struct Candidates<'a> {
    pub all: &'a [Probabilities],
    pub n_top: usize,
}

impl<'a> Candidates<'a> {
    /// As many as the request asked for.
    fn new(all: &'a [Probabilities]) -> Self {
        Self { all, n_top: usize::MAX }
    }
}

impl Serialize for Candidates<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entry = |of| Entry { of, candidate: &of.chosen, n_top: Some(self.n_top) };
        serializer.collect_seq(self.all.iter().map(entry))
    }
}

/// A candidate; the chosen one contains the others.
struct Entry<'a> {
    of: &'a Probabilities,
    candidate: &'a Candidate,
    /// Candidates that the chosen one shows.
    n_top: Option<usize>,
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (of, candidate) = (self.of, self.candidate);
        let (one, many) = if of.is_post_sampling { ("prob", "top_probs") } else { ("logprob", "top_logprobs") };
        // Probability 0 becomes the lowest float, because JSON has no infinity.
        let value = if of.is_post_sampling { candidate.log.exp() } else { candidate.log.max(f32::MIN) };
        let mut fields = serializer.serialize_map(None)?;
        fields.serialize_entry("id", &candidate.token)?;
        fields.serialize_entry("token", &String::from_utf8_lossy(&candidate.bytes))?;
        fields.serialize_entry("bytes", &candidate.bytes)?;
        fields.serialize_entry(one, &value)?;
        if let Some(n_top) = self.n_top {
            let top = of.top.iter().take(n_top).filter(|candidate| !of.is_post_sampling || candidate.log.exp() > 0.0);
            let top: Vec<_> = top.map(|candidate| Entry { of, candidate, n_top: None }).collect();
            fields.serialize_entry(many, &top)?;
        }
        fields.end()
    }
}

/// The requested fields of an answer, where `a/b` is `b` of `a`; all fields if none are named.
fn select(answer: Value, fields: &[String]) -> Value {
    if fields.is_empty() {
        return answer;
    }
    let mut selected = Fields::new();
    for path in fields {
        let found = path.split('/').try_fold(&answer, |value, name| value.get(name));
        if let Some(found) = found.filter(|_| !selected.contains_key(path)) {
            selected.insert(path.clone(), found.clone());
        }
    }
    Value::Object(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_selected_by_path() {
        let answer = json!({"content": "x", "timings": {"prompt_n": 3}});
        let fields = ["content".to_owned(), "timings/prompt_n".to_owned(), "none/such".to_owned()];
        assert_eq!(select(answer.clone(), &fields), json!({"content": "x", "timings/prompt_n": 3}));
        assert_eq!(select(answer.clone(), &[]), answer);
    }

    #[test]
    fn probabilities_have_no_infinity() {
        let candidate = |probability: f32| Candidate { token: 1, bytes: b"a".to_vec(), log: probability.ln() };
        let own = Probabilities {
            chosen: candidate(0.0),
            top: vec![candidate(1.0), candidate(0.0)],
            is_post_sampling: false,
        };
        let value = json!(Candidates::new(std::slice::from_ref(&own)))[0].take();
        assert_eq!(value["logprob"], json!(f32::MIN));
        assert_eq!(value["top_logprobs"][0]["logprob"], json!(0.0));
        let own = Probabilities { is_post_sampling: true, ..own };
        assert_eq!(json!(Candidates::new(&[own]))[0]["top_probs"].as_array().unwrap().len(), 1);
    }
}
