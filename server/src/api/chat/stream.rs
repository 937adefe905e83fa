//! OpenAI's stream of a chat answer.

use hobbit::engine::ChatDelta;
use serde_json::{Value, json};

use super::Talk;
use super::answer::{Reader, delta_json};
use crate::api::openai::{Logprobs, Stamp, Usage, finish_reason};
use crate::app::Listed;
use crate::error::ApiError;
use crate::http::stream::{Frame, Shape, done as end, unnamed};
use crate::job::{Done, Event, Probabilities, Progress, Timings, TokenEvent};

/// OpenAI's stream.
pub struct Chat {
    talk: Talk,
    stamp: Stamp,
    answers: Vec<Answer>,
    usage: Usage,
    /// Timings of the answer that ended last.
    timings: Timings,
    /// Listed for control requests while the stream lasts.
    _listed: Listed,
}

/// State of one answer.
struct Answer {
    reader: Reader,
    /// The role has been sent.
    has_begun: bool,
    has_calls: bool,
    /// Probabilities of tokens whose text is not sent yet.
    probabilities: Vec<Probabilities>,
}

impl Chat {
    pub fn new(talk: Talk) -> Result<Self, ApiError> {
        let stamp = Stamp::new(&talk.app, "chat.completion.chunk");
        let answer = |_| {
            let reader = Reader::new(&talk.prompt)?;
            Ok(Answer { reader, has_begun: false, has_calls: false, probabilities: Vec::new() })
        };
        let answers = (0..talk.params.n).map(answer).collect::<Result<_, ApiError>>()?;
        let listed = talk.app.controls.list(stamp.id(), talk.params.generate.end_reasoning.clone());
        let (usage, timings) = (Usage::default(), Timings::default());
        Ok(Self { talk, stamp, answers, usage, timings, _listed: listed })
    }

    fn chunk(&self, index: usize, delta: Value, finish_reason: Option<&str>) -> Value {
        self.stamp.part(json!([{"finish_reason": finish_reason, "index": index, "delta": delta}]))
    }

    /// The role, unless it was sent already.
    fn begin(&mut self, index: usize) -> Option<Value> {
        let is_first = !std::mem::replace(&mut self.answers[index].has_begun, true);
        is_first.then(|| self.chunk(index, json!({"role": "assistant", "content": null}), None))
    }

    /// Chunks for the new deltas; the last one carries their tokens' probabilities.
    fn chunks(&mut self, index: usize, deltas: &[ChatDelta]) -> Vec<Value> {
        let mut chunks: Vec<Value> = deltas.iter().map(|delta| self.chunk(index, delta_json(delta), None)).collect();
        let answer = &mut self.answers[index];
        answer.has_calls |= deltas.iter().any(|delta| matches!(delta, ChatDelta::ToolCall(_)));
        if let Some(last) = chunks.last_mut()
            && !answer.probabilities.is_empty()
        {
            let probabilities = std::mem::take(&mut answer.probabilities);
            last["choices"][0]["logprobs"] = json!(Logprobs::new(&probabilities, self.talk.n_top));
        }
        chunks
    }

    fn progress(&mut self, index: usize, progress: &Progress) -> Value {
        self.answers[index].has_begun = true;
        let mut chunk = self.chunk(index, json!({"role": "assistant", "content": null}), None);
        self.talk.params.add_progress(&mut chunk, progress);
        chunk
    }

    fn token(&mut self, index: usize, token: TokenEvent) -> Vec<Value> {
        let mut chunks: Vec<Value> = self.begin(index).into_iter().collect();
        let answer = &mut self.answers[index];
        answer.probabilities.extend(token.probabilities);
        let deltas = answer.reader.push(&token.text);
        let mut new = self.chunks(index, &deltas);
        if let Some(last) = new.last_mut() {
            self.talk.params.add_timings(last, &token.timings);
        }
        chunks.append(&mut new);
        chunks
    }

    fn done(&mut self, index: usize, done: &Done) -> Result<Vec<Value>, ApiError> {
        let mut chunks: Vec<Value> = self.begin(index).into_iter().collect();
        let n_before = chunks.len();
        let answer = &mut self.answers[index];
        answer.probabilities.truncate(answer.probabilities.len().saturating_sub(done.n_swallowed));
        let deltas = answer.reader.finish(&done.rest, &done.stop);
        chunks.append(&mut self.chunks(index, &deltas));
        let answer = &self.answers[index];
        let reason = finish_reason(&done.stop, answer.has_calls && answer.reader.cut().is_none());
        let mut last = self.chunk(index, json!({}), Some(reason));
        if !self.talk.include_usage {
            last["timings"] = done.timings.json();
        }
        chunks.push(last);
        if let Some(verbose) = self.talk.verbose(done, index, "") {
            chunks[n_before]["__verbose"] = verbose;
        }
        self.usage.add(Usage::of(done), index, self.talk.params.n);
        self.timings = done.timings;
        Ok(chunks)
    }
}

impl Shape for Chat {
    fn event(&mut self, index: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let chunks = match event {
            Event::Progress(progress) if self.talk.params.return_progress => vec![self.progress(index, &progress)],
            Event::Token(token) => self.token(index, *token),
            Event::Done(done) => self.done(index, &done)?,
            _ => Vec::new(),
        };
        Ok(chunks.iter().map(unnamed).collect())
    }

    fn end(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        if self.talk.include_usage {
            let mut last = self.stamp.part(json!([]));
            last["usage"] = self.usage.json();
            last["timings"] = self.timings.json();
            frames.push(unnamed(&last));
        }
        frames.push(end());
        frames
    }
}
