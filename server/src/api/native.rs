//! `/completion`: a text to continue, in llama-server's own shape.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use hobbit::Model;
use hobbit::engine::{Chunks, Encoder};
use hobbit::options::Token;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::media;
use super::params::{self, Params, SHOWN_BYTES_MAX};
use super::prompts::{self, Prompts, prompts};
use super::{Fields, get, text};
use crate::app::{App, Loaded};
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Body;
use crate::http::stream::{Frame, Shape, Whole, all, respond, unnamed};
use crate::job::{Candidate, Done, Event, Probabilities, Running, Stop, Work};

/// `POST /infill`
pub async fn infill(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let read = || {
        let suffix = text(&body, "input_suffix")?;
        let suffix = suffix.ok_or_else(|| ApiError::invalid("\"input_suffix\" is required"))?;
        let suffix = prompts::encode(&app.loaded()?.model, suffix, false, false)?;
        Ok::<_, ApiError>((prompts::gap(&app, &body, &suffix)?, Params::of(&body, &app)?))
    };
    let (prompt, params) = app.work(read).await?;
    prompts::check(params.n, &app)?;
    drop(body);
    complete(&app, params, vec![prompt.into()], held).await
}

/// `POST /completion`
pub async fn completion(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let (prompts, params) = app.work(|| read(body, &app)).await?;
    complete(&app, params, prompts, held).await
}

/// The prompts of a body, and the generation parameters.
pub fn read(body: Fields, app: &App) -> Result<(Prompts, Params), ApiError> {
    let prompt = get(&body, "prompt").ok_or_else(|| ApiError::invalid("\"prompt\" is required"))?;
    Ok((prompts(prompt, &body, app)?, Params::of(&body, app)?))
}

/// Continues prompts and answers in llama-server's shape.
pub async fn complete(app: &Arc<App>, params: Params, prompts: Prompts, held: Held) -> Result<Response, ApiError> {
    refuse_embedding_server(app)?;
    let running = start(app.loaded()?, &params, &prompts, Default::default(), &Arc::new(held)).await?;
    if params.stream {
        let ping = params.ping;
        let shape = Native {
            app: Arc::clone(app),
            slots: vec![0; running.len()],
            n_prompt: running.iter().map(|own| own.n_prompt).collect(),
            params,
            prompts,
        };
        return respond(running, shape, ping).await;
    }
    let results = all(running).await?;
    let answer = |index: usize, own: &Whole| {
        let mut answer = last(app, &params, &own.done, index, &prompts[index / params.n], &own.text);
        if params.return_tokens {
            answer["tokens"] = json!(own.tokens);
        }
        let fields = &params.response_fields;
        let tells = params.generate.n_probs > 0
            && (fields.is_empty() || fields.iter().any(|field| field == "completion_probabilities"));
        let completion_probabilities = tells.then_some(Candidates::new(&own.probabilities));
        serde_json::to_string(&Answer { answer: select(answer, fields), completion_probabilities })
    };
    // Serialise one answer at a time: JSON values of all would take far more memory.
    let answers = || results.iter().enumerate().map(|(index, own)| answer(index, own)).collect();
    let answers: Result<Vec<String>, _> = app.work(answers).await;
    let mut answers = answers.map_err(|error| ApiError::server(error.to_string()))?;
    let text = if answers.len() == 1 { answers.remove(0) } else { format!("[{}]", answers.join(",")) };
    Ok(([(CONTENT_TYPE, "application/json")], text).into_response())
}

/// An answer with the probabilities of its tokens.
#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    answer: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Candidates<'a>>,
}

/// Bytes per prompt while it is answered, besides its tokens: its job, a sampler, the answer's text.
const TEXT_BYTES: usize = 16 << 10;

/// Hands prompts to the engine, each once per requested answer. Returns most of the memory that reading the request
/// took.
pub async fn start(
    loaded: &Loaded,
    params: &Params,
    prompts: &[Arc<[Token]>],
    (chunks, encoder): (Chunks, Option<Encoder>),
    held: &Arc<Held>,
) -> Result<Vec<Running>, ApiError> {
    let n_tokens: usize = prompts.iter().map(|prompt| prompt.len()).sum();
    let n_answers = prompts.len() * params.n;
    let candidates = params.check_answers(prompts, loaded.n_ctx)?;
    let bytes = n_tokens * size_of::<Token>()
        + params.bytes(n_answers)
        + n_answers * TEXT_BYTES
        + candidates
        + media::bytes(&chunks);
    held.grow_to(bytes).await?;
    held.shrink_to(bytes);
    let generate: Vec<_> = (0..params.n).map(|index| Arc::new(params.generate_of(index))).collect();
    let texts = prompts.iter().flat_map(|prompt| generate.iter().map(move |generate| (prompt, generate)));
    let start = |(prompt, generate): (&Arc<[Token]>, &Arc<_>)| {
        let work = Work::Generate(Arc::clone(generate));
        loaded.start(
            (Arc::clone(prompt), chunks.clone(), encoder.clone()),
            work,
            params.slot,
            params.cache_prompt,
            held,
        )
    };
    Ok(texts.map(start).collect())
}

/// Refuses requests for text on a server for embeddings.
pub fn refuse_embedding_server(app: &App) -> Result<(), ApiError> {
    if app.settings.slots.embeddings.0 {
        let message = "This server does not support completions. Start it without `--embeddings`";
        return Err(ApiError::unsupported(message));
    }
    Ok(())
}

/// A prompt as its tokens spell it, special ones too.
pub fn text_of(model: &Model, tokens: &[Token]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| model.piece(*token, true)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The beginning of a prompt, as answers repeat it.
fn shown_prompt(model: &Model, tokens: &[Token]) -> String {
    let mut n_bytes = 0;
    let shown = tokens.iter().take_while(|token| {
        n_bytes += model.piece(**token, true).len();
        n_bytes <= SHOWN_BYTES_MAX
    });
    let n = shown.count();
    let text = text_of(model, &tokens[..n]);
    if n == tokens.len() { text } else { format!("{text}… [truncated, {} tokens]", tokens.len()) }
}

/// llama-server's stream.
struct Native {
    app: Arc<App>,
    params: Params,
    prompts: Prompts,
    slots: Vec<usize>,
    n_prompt: Vec<usize>,
}

impl Shape for Native {
    fn event(&mut self, index: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let part = |content: &str, tokens: &[Token], n_decoded: usize| {
            json!({
                "index": index,
                "content": content,
                "tokens": tokens,
                "stop": false,
                "id_slot": self.slots[index],
                "tokens_predicted": n_decoded,
                "tokens_evaluated": self.n_prompt[index],
            })
        };
        let value = match event {
            Event::Started(started) => {
                self.slots[index] = started.slot;
                return Ok(Vec::new());
            }
            Event::Progress(progress) if self.params.return_progress => {
                let mut value = part("", &[], 0);
                self.params.add_progress(&mut value, &progress);
                value
            }
            Event::Token(token) => {
                let mut value = part(&token.text, &[token.token], token.n_decoded);
                self.params.add_timings(&mut value, &token.timings);
                if let Some(probabilities) = token.probabilities {
                    value["completion_probabilities"] = json!(Candidates::new(&[probabilities]));
                }
                value
            }
            Event::Done(done) => {
                let prompt = &self.prompts[index / self.params.n];
                last(&self.app, &self.params, &done, index, prompt, &done.rest)
            }
            _ => return Ok(Vec::new()),
        };
        Ok(vec![unnamed(&value)])
    }
}

/// The last event of a generation, complete.
pub fn last(app: &App, params: &Params, done: &Done, index: usize, prompt: &[Token], content: &str) -> Value {
    // Seeds differ among the answers to a prompt.
    let generate = params.generate_of(index % params.n);
    let model = app.loaded.get().map(|loaded| &loaded.model);
    let settings = model.map(|model| params::shown(&generate, model, params.stream, params.timings_per_token, true));
    let prompt = model.map(|model| shown_prompt(model, prompt));
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
        "model": app.model_name(),
        "tokens_predicted": done.n_decoded,
        "tokens_evaluated": done.n_prompt,
        "generation_settings": settings,
        "prompt": prompt,
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
