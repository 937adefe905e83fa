//! Prints a model's output, with thoughts separate from the answer if the chat template defines them.

use anyhow::Result;

use super::console::{Screen, Voice};
use super::exit::in_words;
use super::log::{Level, Log};
use hobbit::Error;
use hobbit::engine::{ChatDelta, ChatParser, ChatStream};

/// How an answer is parsed.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// Parses the answer; without a parser it is printed as it arrives.
    pub parser: Option<ChatParser>,
    /// Keep control tokens that the template names, such as the tags of thoughts.
    pub keeps_tags: bool,
    /// Texts at which the answer ends, in addition to the user's.
    pub stops: Vec<String>,
}

/// An answer that is being printed.
pub struct Reader {
    parts: Option<ChatStream>,
    /// The answer.
    text: String,
    thought: String,
    voice: Voice,
}

impl Reader {
    pub fn new(parser: Option<ChatParser>) -> Result<Self> {
        // No tools are offered here, so no calls need ids.
        let parts = parser.map(|parser| ChatStream::new(parser, String::new)).transpose()?;
        Ok(Self { parts, text: String::new(), thought: String::new(), voice: Voice::Model })
    }

    /// Prints the text that `piece` adds. `ends`: it is the last piece.
    pub fn push(&mut self, piece: &str, ends: bool, screen: &mut Screen, log: &Log) -> Result<()> {
        let Some(parts) = &mut self.parts else {
            self.text.push_str(piece);
            return Ok(screen.print(Voice::Model, piece)?);
        };
        let changes = match parts.push(piece, !ends) {
            Ok(changes) => changes,
            Err(error) => return self.give_up(error, screen, log),
        };
        for change in changes {
            match change {
                ChatDelta::Reasoning(text) => {
                    self.speak_as(Voice::Thought, screen)?;
                    screen.print(Voice::Thought, &text)?;
                    self.thought.push_str(&text);
                }
                ChatDelta::Content(text) => {
                    self.speak_as(Voice::Model, screen)?;
                    screen.print(Voice::Model, &text)?;
                    self.text.push_str(&text);
                }
                ChatDelta::ToolCall(_) => {}
            }
        }
        Ok(())
    }

    /// The answer, and the thoughts before it.
    pub fn finish(self) -> (String, String) {
        (self.text, self.thought)
    }

    /// Headings as in llama-cli.
    fn speak_as(&mut self, voice: Voice, screen: &mut Screen) -> Result<()> {
        if voice == self.voice {
            return Ok(());
        }
        screen.end_line()?;
        let heading = if voice == Voice::Thought { "[Start thinking]\n\n" } else { "[End thinking]\n\n" };
        screen.print(Voice::Thought, heading)?;
        self.voice = voice;
        Ok(())
    }

    /// Prints the rest of the answer unparsed.
    fn give_up(&mut self, error: Error, screen: &mut Screen, log: &Log) -> Result<()> {
        let said = self.parts.take().map(|parts| parts.text().to_owned()).unwrap_or_default();
        screen.end_line()?;
        let reason = in_words(&error.into());
        log.line(Level::Warning, format!("warning: {reason}. Here is all of it as it is:"));
        screen.print(Voice::Model, &said)?;
        self.voice = Voice::Model;
        (self.text, self.thought) = (said, String::new());
        Ok(())
    }
}
