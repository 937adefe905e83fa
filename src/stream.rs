//! One generation, printed as it comes.

use anyhow::Result;

use super::advice;
use super::console::{Screen, Voice};
use super::ctrl_c::CtrlC;
use super::exit::in_words;
use super::log::{Level, Log};
use super::memory;
use super::progress::TokenBar;
use super::prompt_cache::PromptCache;
use super::resolve::HiArgs;
use super::text::StopMatcher;
use super::text::Utf8Decoder;
use hobbit::engine::{ChatDelta, ChatParser, ChatStream, Encoder, MediaPrompt, Projector};
use hobbit::{ChatError, EvalError, Model, Sampler, Session, StopReason, Token};

/// The state shared by a run's generations.
pub struct Desk<'a> {
    pub args: &'a HiArgs,
    pub model: &'a Model,
    pub session: Session,
    pub sampler: Sampler,
    /// The sampler's seed, drawn if none was given.
    pub seed: u32,
    pub screen: Screen,
    pub log: &'a Log,
    pub ctrl_c: &'a CtrlC,
    /// Whether a message got no answer.
    pub failed: bool,
    /// The file that keeps the state after the prompt.
    pub cache: Option<PromptCache>,
    /// The encoder of images and sound.
    pub projector: Option<Projector>,
    /// Keeps it open from the first image or sound that is read until the prompt is evaluated.
    pub encoder: Option<Encoder>,
}

/// The error message if `tokens` tokens of `what` do not fit in a context of `n_ctx`; `None` if they fit.
pub fn too_long(what: &str, tokens: usize, n_ctx: u32) -> Option<String> {
    let larger = (tokens + 1).next_multiple_of(256);
    (tokens > n_ctx as usize).then(|| {
        format!("the {what} has {tokens} tokens, but the context holds {n_ctx}; give -c {larger} or a shorter {what}")
    })
}

/// Why a generation ended, as `--stats-json` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The model ended the text.
    Eog,
    /// The requested number of tokens was generated.
    Length,
    /// The context is full.
    ContextFull,
    /// Ctrl-C.
    Interrupted,
    /// A reverse prompt, or no more input.
    Stopped,
}

/// The result of a generation.
pub struct Spoken {
    /// Generated tokens, those of a reverse prompt included.
    pub tokens: Vec<Token>,
    /// Text without the reverse prompt and without reasoning.
    pub text: String,
    /// The reasoning before the text, if it is parsed separately.
    pub reasoning: String,
    /// The reverse prompt that ended it.
    pub stop: Option<String>,
    pub end: End,
}

impl Desk<'_> {
    /// Reads `prompt` into the context, then prints the model's output, at most `limit` tokens.
    ///
    /// # Errors
    /// Failed evaluation or output. Interrupts and a full context are ends, not errors.
    pub fn speak(&mut self, prompt: &MediaPrompt, limit: Option<usize>, reading: &Reading) -> Result<Spoken> {
        let ctrl_c = self.ctrl_c.clone();
        let spoken = ctrl_c.during(|| self.feed_and_generate(prompt, limit, reading))?;
        if let Some(cache) = &mut self.cache {
            cache.note(&spoken.tokens);
        }
        if spoken.end == End::ContextFull {
            let n_ctx = self.session.context().n_ctx();
            self.screen.end_line()?;
            let way_out = match self.session.sequences().no_shift() {
                Some(reason) => format!("give a larger -c ({})", advice::no_shift(reason)),
                None if self.args.run.session_options.context_shift => "give a larger -c".to_owned(),
                None => "give a larger -c or use --context-shift".to_owned(),
            };
            let line = format!("warning: the context of {n_ctx} tokens is full; {way_out}");
            self.log.line(Level::Warning, line);
        }
        Ok(spoken)
    }

    /// Reads `prompt` and shows progress on a terminal.
    fn feed(&mut self, prompt: &MediaPrompt, from: usize) -> Result<(), EvalError> {
        if let (Some(projector), false) = (&self.projector, prompt.chunks.is_empty()) {
            return self.session.feed_prompt(projector, prompt, from, self.encoder.take());
        }
        let prompt = &prompt.tokens[from..];
        let n_ubatch = self.session.context().n_ubatch();
        let model = self.model.clone();
        let share = move || model.evaluated_share();
        match TokenBar::new("reading the prompt", prompt.len(), n_ubatch, self.screen.is_mid_line(), share, self.log) {
            Some(bar) => self.session.feed_with(prompt, |done| bar.set(done)),
            None => self.session.feed(prompt),
        }
    }

    fn feed_and_generate(&mut self, prompt: &MediaPrompt, limit: Option<usize>, reading: &Reading) -> Result<Spoken> {
        let mut spoken =
            Spoken { tokens: Vec::new(), text: String::new(), reasoning: String::new(), stop: None, end: End::Length };
        let tokens = &prompt.tokens;
        for &token in tokens {
            self.sampler.accept(token);
        }
        let known = match &mut self.cache {
            Some(cache) => cache.restore(&mut self.session, tokens, self.log)?,
            None => 0,
        };
        if !tokens.is_empty() {
            match self.feed(prompt, known) {
                Ok(()) => {}
                Err(EvalError::Interrupted) => return Ok(Spoken { end: End::Interrupted, ..spoken }),
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(cache) = &mut self.cache {
            cache.keep_prompt(&mut self.session, tokens)?;
        }
        let mut decoder = Utf8Decoder::default();
        let mut matcher = StopMatcher::new(&[&self.args.input.stops[..], &reading.stops].concat());
        let mut reader = Reader::new(reading.parser.clone())?;
        let preserved = if reading.keeps_tags { self.sampler.preserved_tokens().to_vec() } else { Vec::new() };
        let mut generation = self.session.generate(&mut self.sampler, limit);
        for token in generation.by_ref() {
            let token = token?;
            memory::obey(self.model, self.log);
            spoken.tokens.push(token);
            let special = self.args.output.special.0 || preserved.contains(&token);
            let (text, stop) = matcher.push(&decoder.push(&self.model.piece(token, special)));
            reader.push(&text, stop.is_some(), &mut self.screen, self.log)?;
            if let Some(stop) = stop {
                // A stop text of the template's does not open the user's turn.
                let is_users = self.args.input.stops.contains(&stop);
                (spoken.text, spoken.reasoning) = reader.finish();
                let end = if is_users { End::Stopped } else { End::Eog };
                return Ok(Spoken { stop: is_users.then_some(stop), end, ..spoken });
            }
        }
        spoken.end = match generation.stop_reason() {
            Some(StopReason::Eog(_)) => End::Eog,
            Some(StopReason::ContextFull) => End::ContextFull,
            Some(StopReason::Interrupted) => End::Interrupted,
            Some(StopReason::Length) | None => End::Length,
        };
        let mut rest = matcher.push(decoder.finish()).0;
        rest.push_str(&matcher.finish());
        // An answer that was cut off may not parse.
        reader.push(&rest, spoken.end == End::Eog, &mut self.screen, self.log)?;
        (spoken.text, spoken.reasoning) = reader.finish();
        Ok(spoken)
    }

    /// The text of tokens, without control tokens unless `--special`.
    pub fn text_of(&self, tokens: &[Token]) -> String {
        let mut decoder = Utf8Decoder::default();
        let mut text: String =
            tokens.iter().map(|&token| decoder.push(&self.model.piece(token, self.args.output.special.0))).collect();
        text.push_str(decoder.finish());
        text
    }

    /// For `--verbose-prompt`: every token with its text.
    pub fn explain(&self, tokens: &[Token]) {
        if !self.args.input.flags.verbose_prompt.0 {
            return;
        }
        self.log.line(Level::Info, format!("prompt of {} tokens:", tokens.len()));
        for &token in tokens {
            let piece = self.model.piece(token, true);
            self.log.line(Level::Info, format!("{token:6} -> {:?}", String::from_utf8_lossy(&piece)));
        }
    }
}

/// How an answer is parsed.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// Parses the answer; without a parser it is printed as it arrives.
    pub parser: Option<ChatParser>,
    /// Keep control tokens that the template names, such as the tags of reasoning.
    pub keeps_tags: bool,
    /// Texts at which the answer ends, in addition to the user's.
    pub stops: Vec<String>,
}

/// An answer that is being printed.
struct Reader {
    parts: Option<ChatStream>,
    /// The answer.
    text: String,
    reasoning: String,
    voice: Voice,
}

impl Reader {
    fn new(parser: Option<ChatParser>) -> Result<Self> {
        // No tools are offered here, so no calls need ids.
        let parts = parser.map(|parser| ChatStream::new(parser, String::new)).transpose()?;
        Ok(Self { parts, text: String::new(), reasoning: String::new(), voice: Voice::Model })
    }

    /// Prints the text that `piece` adds. `ends`: it is the last piece.
    fn push(&mut self, piece: &str, ends: bool, screen: &mut Screen, log: &Log) -> Result<()> {
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
                    self.speak_as(Voice::Reasoning, screen)?;
                    screen.print(Voice::Reasoning, &text)?;
                    self.reasoning.push_str(&text);
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

    /// The answer, and the reasoning before it.
    fn finish(self) -> (String, String) {
        (self.text, self.reasoning)
    }

    /// Headings as in llama-cli.
    fn speak_as(&mut self, voice: Voice, screen: &mut Screen) -> Result<()> {
        if voice == self.voice {
            return Ok(());
        }
        screen.end_line()?;
        let heading = if voice == Voice::Reasoning { "[Start thinking]\n\n" } else { "[End thinking]\n\n" };
        screen.print(Voice::Reasoning, heading)?;
        self.voice = voice;
        Ok(())
    }

    /// Prints the rest of the answer unparsed.
    fn give_up(&mut self, error: ChatError, screen: &mut Screen, log: &Log) -> Result<()> {
        let text = self.parts.take().map(|parts| parts.text().to_owned()).unwrap_or_default();
        screen.end_line()?;
        let reason = in_words(&error.into());
        log.line(Level::Warning, format!("warning: {reason}; the whole answer, unparsed:"));
        screen.print(Voice::Model, &text)?;
        self.voice = Voice::Model;
        (self.text, self.reasoning) = (text, String::new());
        Ok(())
    }
}
