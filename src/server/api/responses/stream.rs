//! OpenAI's stream of a Responses answer.

use serde_json::{Value, json};

use super::Header;
use super::items::Items;
use crate::server::api::chat::Talk;
use crate::server::api::chat::answer::Reader;
use crate::server::http::error::ApiError;
use crate::server::http::stream::{Frame, Shape};
use crate::server::job::{Done, Event};

/// OpenAI's stream of Responses.
pub struct Events {
    talk: Talk,
    header: Header,
    reader: Reader,
    items: Items,
    /// Events sent so far.
    n: usize,
}

impl Events {
    /// # Errors
    /// As [`Reader::new`].
    pub fn new(talk: Talk, header: Header) -> Result<Self, ApiError> {
        let reader = Reader::new(&talk.prompt)?;
        Ok(Self { talk, header, reader, items: Items::default(), n: 0 })
    }

    fn begun(&self, kind: &str) -> Value {
        json!({"type": kind, "response": self.header.begun()})
    }

    fn done(&mut self, done: &Done) -> Result<Vec<Value>, ApiError> {
        let mut events = Vec::new();
        for delta in self.reader.finish(&done.rest, &done.stop)? {
            self.items.add(&delta, &mut events);
        }
        self.items.close(&mut events);
        let response = self.header.whole(self.items.output(), done);
        events.push(json!({"type": "response.completed", "response": response, "timings": done.timings.json()}));
        Ok(events)
    }
}

impl Shape for Events {
    fn event(&mut self, _: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let shows_timings = self.talk.params.timings_per_token;
        let mut events = Vec::new();
        match event {
            Event::Started(_) => {
                events.push(self.begun("response.created"));
                events.push(self.begun("response.in_progress"));
            }
            Event::Progress(progress) if self.talk.params.return_progress => {
                let mut event = self.begun("response.in_progress");
                event["prompt_progress"] = json!(progress);
                if shows_timings {
                    event["timings"] = progress.timings.json();
                }
                events.push(event);
            }
            Event::Token(token) => {
                for delta in self.reader.push(&token.text) {
                    self.items.add(&delta, &mut events);
                }
                if let Some(last) = events.last_mut().filter(|_| shows_timings) {
                    last["timings"] = token.timings.json();
                }
            }
            Event::Done(done) => events = self.done(&done)?,
            Event::Progress(_) | Event::Embedding(_) | Event::Failed(_) => {}
        }
        Ok(events.into_iter().map(|event| self.frame(event)).collect())
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Frame> {
        let mut response = self.header.begun();
        response["status"] = json!("failed");
        response["error"] = error.json();
        // llama-server's error, in the event that OpenAI's clients wait for.
        let event = json!({"type": "response.failed", "response": response, "error": error.json()});
        vec![self.frame(event)]
    }
}

impl Events {
    /// A numbered event, named after its type.
    fn frame(&mut self, mut event: Value) -> Frame {
        const NAMES: [&str; 14] = [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.reasoning_text.delta",
            "response.function_call_arguments.delta",
            "response.output_text.done",
            "response.reasoning_text.done",
            "response.function_call_arguments.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
            "response.failed",
        ];
        event["sequence_number"] = json!(self.n);
        self.n += 1;
        let name = NAMES.into_iter().find(|name| event["type"] == *name);
        Frame { name, data: event.to_string() }
    }
}
