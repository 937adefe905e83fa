//! `/completion`: a text to continue, in llama-server's own shape.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hobbit::Model;
use hobbit::options::Token;
use serde_json::{Map, Value, json};

use super::params::{self, Params};
use super::prompts;
use crate::server::app::{App, Asked, Loaded, Running};
use crate::server::http::body::Body;
use crate::server::http::error::ApiError;
use crate::server::http::stream::{Frame, Shape, respond, whole};
use crate::server::job::{Candidate, Done, Event, Probabilities, Stop, Work};

/// `POST /completion`
pub async fn completion(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let prompt = body.get("prompt").ok_or_else(|| ApiError::invalid("\"prompt\" is required"))?;
    let prompts = prompts::prompts(prompt, &loaded.model)?;
    complete(&app, loaded, &body, prompts).await
}

/// Continues prompts, and answers in llama-server's shape.
///
/// # Errors
/// A request that makes no sense, or that fails before it begins.
pub async fn complete(
    app: &Arc<App>,
    loaded: &Loaded,
    body: &Map<String, Value>,
    prompts: Vec<Vec<Token>>,
) -> Result<Response, ApiError> {
    refuse_embedding_server(app)?;
    let params = Params::of(body, app)?;
    let texts: Vec<String> = prompts.iter().map(|tokens| text_of(&loaded.model, tokens)).collect();
    let running = start(loaded, &params, &prompts);
    let texts: Vec<String> = texts.into_iter().flat_map(|text| std::iter::repeat_n(text, params.n)).collect();
    if params.stream {
        let shape = Native {
            app: Arc::clone(app),
            n: running.len(),
            params: params.clone(),
            texts,
            slots: vec![0; running.len()],
            n_prompt: running.iter().map(|own| own.n_prompt).collect(),
        };
        return respond(running, shape, params.ping).await;
    }
    let results = futures_util::future::try_join_all(running.into_iter().map(whole)).await?;
    let mut answers: Vec<Value> = results
        .iter()
        .enumerate()
        .map(|(index, own)| {
            let mut answer = last(app, &params, &own.done, index, &texts[index], &own.text);
            if params.return_tokens {
                answer["tokens"] = json!(own.tokens);
            }
            if params.generate.n_probs > 0 {
                answer["completion_probabilities"] = probabilities_json(&own.probabilities);
            }
            select(answer, &params.response_fields)
        })
        .collect();
    let answer = if answers.len() == 1 { answers.remove(0) } else { Value::Array(answers) };
    Ok(Json(answer).into_response())
}

/// Hands prompts to the engine, each as often as answers are wanted.
pub fn start(loaded: &Loaded, params: &Params, prompts: &[Vec<Token>]) -> Vec<Running> {
    let mut running = Vec::new();
    for prompt in prompts {
        for index in 0..params.n {
            running.push(loaded.start(Asked {
                prompt: prompt.clone(),
                work: Work::Generate(Arc::new(params.generate_of(index))),
                slot: params.slot,
                cache_prompt: params.cache_prompt,
            }));
        }
    }
    running
}

/// # Errors
/// The server computes embeddings.
pub fn refuse_embedding_server(app: &App) -> Result<(), ApiError> {
    match app.settings.embeds {
        true => Err(ApiError::unsupported("This server does not support completions. Start it without `--embeddings`")),
        false => Ok(()),
    }
}

/// A prompt as its tokens spell it, special ones too.
pub fn text_of(model: &Model, tokens: &[Token]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| model.piece(*token, true)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// llama-server's stream.
struct Native {
    app: Arc<App>,
    n: usize,
    params: Params,
    texts: Vec<String>,
    slots: Vec<usize>,
    n_prompt: Vec<usize>,
}

impl Shape for Native {
    fn event(&mut self, index: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let base = |own: &Self, content: &str, tokens: Vec<Token>, n_decoded: usize| {
            json!({
                "index": index,
                "content": content,
                "tokens": tokens,
                "stop": false,
                "id_slot": own.slots[index],
                "tokens_predicted": n_decoded,
                "tokens_evaluated": own.n_prompt[index],
            })
        };
        debug_assert!(index < self.n);
        Ok(match event {
            Event::Started(started) => {
                self.slots[index] = started.slot;
                Vec::new()
            }
            Event::Progress(progress) if self.params.return_progress => {
                let mut value = base(self, "", Vec::new(), 0);
                value["prompt_progress"] = json!(progress);
                if self.params.timings_per_token {
                    value["timings"] = progress.timings.json();
                }
                vec![Frame::data(&value)]
            }
            Event::Token(token) => {
                let mut value = base(self, &token.text, vec![token.token], token.n_decoded);
                if self.params.timings_per_token {
                    value["timings"] = token.timings.json();
                }
                if let Some(probabilities) = token.probabilities {
                    value["completion_probabilities"] = probabilities_json(&[probabilities]);
                }
                vec![Frame::data(&value)]
            }
            Event::Done(done) => {
                let value = last(&self.app, &self.params, &done, index, &self.texts[index], &done.rest);
                vec![Frame::data(&value)]
            }
            Event::Progress(_) | Event::Embedding(_) | Event::Failed(_) => Vec::new(),
        })
    }
}

/// How a generation ended, whole.
pub fn last(app: &App, params: &Params, done: &Done, index: usize, prompt: &str, content: &str) -> Value {
    let generate = params.generate_of(index);
    let model = app.loaded.get().map(|loaded| &loaded.model);
    let settings = model.map(|model| params::shown(&generate, model, params.stream, params.timings_per_token, true));
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

/// Of every token what it was chosen from.
pub fn probabilities_json(all: &[Probabilities]) -> Value {
    all.iter().map(probability_json).collect()
}

/// One entry, in llama-server's and OpenAI's words.
pub fn probability_json(own: &Probabilities) -> Value {
    let (one, many) = if own.is_post_sampling { ("prob", "top_probs") } else { ("logprob", "top_logprobs") };
    let value = |candidate: &Candidate| -> f32 {
        match own.is_post_sampling {
            true => candidate.probability,
            // What cannot be is said with the least number there is, as in llama-server: JSON has no infinity.
            false => candidate.probability.ln().max(f32::MIN),
        }
    };
    let entry = |candidate: &Candidate| {
        json!({
            "id": candidate.token,
            "token": String::from_utf8_lossy(&candidate.bytes),
            "bytes": candidate.bytes,
            one: value(candidate),
        })
    };
    let mut all = entry(&own.chosen);
    let top = own.top.iter().filter(|candidate| !own.is_post_sampling || candidate.probability > 0.0);
    all[many] = top.map(entry).collect();
    all
}

/// The fields of an answer that are wanted, `a/b` being `b` of `a`; all where none are named.
fn select(answer: Value, fields: &[String]) -> Value {
    if fields.is_empty() {
        return answer;
    }
    let find = |path: &String| {
        let found = path.split('/').try_fold(&answer, |value, name| value.get(name))?;
        Some((path.clone(), found.clone()))
    };
    Value::Object(fields.iter().filter_map(find).collect())
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
        let candidate = |probability| Candidate { token: 1, bytes: b"a".to_vec(), probability };
        let own = Probabilities {
            chosen: candidate(0.0),
            top: vec![candidate(1.0), candidate(0.0)],
            is_post_sampling: false,
        };
        let value = probability_json(&own);
        assert_eq!(value["logprob"], json!(f32::MIN));
        assert_eq!(value["top_logprobs"][0]["logprob"], json!(0.0));
        let own = Probabilities { is_post_sampling: true, ..own };
        assert_eq!(probability_json(&own)["top_probs"].as_array().unwrap().len(), 1);
    }
}
