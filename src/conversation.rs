//! Conversation: messages formatted by the model's chat template.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};

use super::commands::{COMMANDS, Input};
use super::console::{self, Answer, Keyboard, Voice};
use super::exit::in_words;
use super::log::Level;
use super::media::{self, MARKER};
use super::output::write_json;
use super::prompt_cache::common_prefix;
use super::report;
use super::run;
use super::signals::Interrupted;
use super::stream::{Desk, End, Reading, too_long};
use hobbit::engine::{ChatInputs, ChatPrompt, ChatTemplates, Media, MediaPrompt};
use hobbit::{EvalError, Sampler, SamplingOptions, Token};

const PROMPT: &str = "> ";

/// Advice for a full context.
fn room(desk: &Desk) -> String {
    let by_itself =
        if desk.args.run.session_options.context_shift { "" } else { " (--context-shift does so by itself)" };
    format!("forget the oldest turns with /forget N or all with /clear{by_itself}")
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    System,
    User,
    Assistant,
}

/// A message in the form that templates take.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Message {
    role: Role,
    content: String,
    /// Reasoning before the answer. Templates decide how long the model sees it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    /// Images and sound, in order of their places in the content.
    #[serde(skip)]
    media: Vec<Media>,
}

impl Message {
    fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning_content: String::new(), media: Vec::new() }
    }
}

/// The file of `/save`.
#[derive(Deserialize)]
struct Saved {
    messages: Vec<Message>,
}

/// A conversation formatted as a prompt.
struct Written {
    tokens: MediaPrompt,
    prompt: ChatPrompt,
}

struct Conversation {
    system: Option<String>,
    messages: Vec<Message>,
    /// Number of answers to the last message.
    n_answers: u32,
    /// Tokens in the context, unless it was shifted.
    in_context: Vec<Token>,
    templates: ChatTemplates,
    /// Template inputs other than the messages.
    inputs: ChatInputs,
}

/// Attachments of the next message: texts of /read, markers of /image, and the media.
#[derive(Default)]
struct Attached {
    text: String,
    media: Vec<Media>,
}

/// Runs the conversation until the user ends it, or for one turn with `-st`.
pub fn run(desk: &mut Desk) -> Result<End> {
    let args = desk.args;
    let mut talk = Conversation::begin(desk)?;
    let history = args.chat.history.0.then(|| console::history(|name| std::env::var_os(name))).flatten();
    let mut keyboard = Keyboard::new(args.output.simple_io.0, args.chat.multiline_input.0, history);
    let mut given = args.input.prompt.as_ref().map(|prompt| text_of(&prompt.0, "the prompt", desk));
    if std::io::stdin().is_terminal() && (given.is_none() || !args.chat.single_turn.0) {
        let line = "hobbit: conversation; Ctrl-C stops an answer, /help lists commands, /exit ends";
        desk.log.line(Level::Info, line);
    }
    let mut attached = Attached { text: String::new(), media: media::read_all(desk, &args.input.attached)? };
    if let Some(text) = given.take() {
        given = Some(media::placed(text, attached.media.len()));
    } else {
        attached.text = MARKER.repeat(attached.media.len());
    }
    loop {
        // Printed once the message is known to fit.
        let mut echo = None;
        let message = match given.take() {
            Some(message) => {
                echo = args.input.flags.display_prompt.0.then(|| format!("{PROMPT}{message}\n"));
                Input::Message(message)
            }
            None => match keyboard.ask(PROMPT, &mut desk.screen, desk.ctrl_c)? {
                Answer::Text(text) => Input::of(text),
                Answer::End => return Ok(End::Stopped),
                Answer::Interrupted => return Err(Interrupted.into()),
            },
        };
        let has_answer = talk.messages.last().is_some_and(|last| last.role == Role::Assistant);
        match message {
            Input::Exit => return Ok(End::Stopped),
            Input::Forget(n) => {
                let done = talk.forget(n, desk)?;
                desk.log.line(Level::Info, format!("hobbit: {done}"));
            }
            Input::Help => desk.log.line(Level::Error, COMMANDS),
            Input::System(text) if text.is_empty() => {
                desk.log.line(Level::Error, talk.system.as_deref().unwrap_or("there is no system prompt"));
            }
            Input::Regenerate if !has_answer => desk.log.line(Level::Error, "error: there is no answer to replace"),
            Input::Message(text) if text.is_empty() && attached.text.is_empty() => {}
            Input::Message(_) | Input::Regenerate => {
                if let Input::Message(text) = message {
                    let Attached { text: before, media } = std::mem::take(&mut attached);
                    talk.messages.push(Message { media, ..Message::new(Role::User, before + &text) });
                    talk.n_answers = 0;
                } else {
                    talk.messages.pop();
                }
                let end = talk.answer(&echo.unwrap_or_default(), desk)?;
                talk.n_answers += 1;
                if args.chat.single_turn.0 || desk.ctrl_c.is_ending() {
                    return Ok(end);
                }
            }
            command => match talk.obey(command, &mut attached, desk) {
                Ok(line) => desk.log.line(Level::Info, format!("hobbit: {line}")),
                Err(error) => {
                    desk.failed = true;
                    desk.log.line(Level::Error, format!("error: {}", in_words(&error)));
                }
            },
        }
    }
}

impl Conversation {
    /// A conversation without messages but the system's.
    fn begin(desk: &mut Desk) -> Result<Self> {
        let args = desk.args;
        let templates = run::templates(desk.model, &args.run.model, args.chat.template.chat_template.as_deref())?;
        let kwargs = &args.reasoning.template_kwargs;
        let template_thinks = args.chat.template.jinja.0 && templates.supports_thinking();
        let inputs = ChatInputs {
            json_schema: args.json_schema.clone(),
            reasoning_format: args.reasoning.format,
            enable_thinking: args.reasoning.enable_thinking(kwargs, template_thinks)?,
            template_kwargs: kwargs.clone(),
            use_jinja: args.chat.template.jinja.0,
            ..ChatInputs::default()
        };
        let system = args.chat.system_prompt.clone();
        let mut talk = Self { system, messages: Vec::new(), n_answers: 0, in_context: Vec::new(), templates, inputs };
        talk.clear(desk);
        if args.chat.template.chat_template.is_none() && desk.model.info().chat_template.is_none() {
            desk.log.line(Level::Warning, "warning: the model has no chat template: using chatml; see --chat-template");
        }
        Ok(talk)
    }

    /// Carries out a command; returns what was done.
    fn obey(&mut self, command: Input, attached: &mut Attached, desk: &mut Desk) -> Result<String> {
        match command {
            Input::Clear => {
                self.clear(desk);
                *attached = Attached::default();
                desk.encoder = None;
                Ok("the conversation is forgotten".to_owned())
            }
            Input::Read(path) => {
                let text = text_of(&read(&path)?, &path, desk);
                let n = text.chars().count();
                attached.text += &(text + "\n");
                Ok(format!("{path}: {n} characters go with the next message"))
            }
            Input::System(text) => Ok(self.instruct(text)),
            Input::Load(path) => self.load(Path::new(&path)).map(|n| format!("{n} messages are loaded from {path}")),
            Input::Save(path) => self.save(Path::new(&path)).map(|()| format!("the conversation is saved in {path}")),
            Input::Attach(path) => {
                attached.media.push(media::read(desk, Path::new(&path))?);
                attached.text += MARKER;
                Ok(format!("{path} goes with the next message"))
            }
            Input::Unknown(command) => {
                Err(anyhow!("unknown command {command}; /help lists them, and '/{command}' sends it as a message"))
            }
            Input::Exit | Input::Forget(_) | Input::Help | Input::Regenerate | Input::Message(_) => {
                unreachable!("handled by the caller")
            }
        }
    }

    fn clear(&mut self, desk: &mut Desk) {
        desk.session.reset();
        self.in_context.clear();
        self.messages.clear();
        if let Some(system) = &self.system {
            self.messages.push(Message::new(Role::System, system.as_str()));
        }
    }

    /// Replaces the system prompt, here and after `/clear`; returns what was done.
    fn instruct(&mut self, text: String) -> String {
        self.messages.drain(..self.first_turn());
        self.messages.insert(0, Message::new(Role::System, text.as_str()));
        self.system = Some(text);
        "the system prompt is replaced".to_owned()
    }

    /// Writes the messages as OpenAI's JSON.
    fn save(&self, path: &Path) -> Result<()> {
        if self.messages.iter().any(|message| !message.media.is_empty()) {
            bail!("a conversation with images or sound cannot be saved");
        }
        write_json(path, &serde_json::json!({ "messages": self.messages }), "conversation")
    }

    /// Replaces the conversation by a saved one; returns its number of messages.
    fn load(&mut self, path: &Path) -> Result<usize> {
        let wrong = || format!("{}: expected {{\"messages\": [{{\"role\", \"content\"}}, ...]}}", path.display());
        let Saved { messages } = serde_json::from_slice(&read(&path.to_string_lossy())?).with_context(wrong)?;
        self.messages = messages;
        self.system =
            self.messages.first().filter(|message| message.role == Role::System).map(|message| message.content.clone());
        self.n_answers = 0;
        Ok(self.messages.len())
    }

    /// Forgets the `n` oldest turns, user messages with their answers; returns what was done.
    fn forget(&mut self, n: usize, desk: &Desk) -> Result<String> {
        let first = self.first_turn();
        let mut begins: Vec<usize> =
            (first..self.messages.len()).filter(|&at| self.messages[at].role == Role::User).collect();
        begins.push(self.messages.len());
        let n = n.min(begins.len() - 1);
        self.messages.drain(first..begins[n]);
        let (left, tokens) = (begins.len() - 1 - n, self.written(&self.messages, desk)?.tokens.n_cells());
        let n_ctx = desk.session.context().n_ctx();
        let turns = if n == 1 { "1 turn is".to_owned() } else { format!("{n} turns are") };
        Ok(format!("{turns} forgotten, {left} are left: {tokens} of {n_ctx} tokens"))
    }

    /// The sampler of the answer to `prompt`. The first answer to a message uses the run's seed, each further one the
    /// next seed: the same seed would repeat the answer.
    fn sampler(&self, prompt: &ChatPrompt, desk: &Desk) -> Result<Sampler> {
        let seed = desk.seed.wrapping_add(self.n_answers) % SamplingOptions::RANDOM_SEED;
        let reasoning = desk.args.reasoning.sampled();
        let mut options = SamplingOptions { seed, reasoning, ..desk.args.sampling.clone() };
        prompt.constrain(&mut options);
        Ok(Sampler::new(desk.model, &options)?)
    }

    /// Prints the model's next message after `echo`, and stores it.
    fn answer(&mut self, echo: &str, desk: &mut Desk) -> Result<End> {
        let (Written { tokens: all, prompt }, n_dropped) = self.fitting(desk)?;
        if let Some(error) = self.excess(all.n_cells(), n_dropped, desk) {
            desk.log.line(Level::Error, format!("error: {error}"));
            desk.failed = true;
            desk.encoder = None;
            self.messages.pop();
            return Ok(End::ContextFull);
        }
        if n_dropped > 0 {
            let first = self.first_turn();
            self.messages.drain(first..first + n_dropped);
            desk.log.line(
                Level::Warning,
                format!("warning: the context is full: the {n_dropped} oldest messages are forgotten"),
            );
        }
        desk.screen.print(Voice::User, echo)?;
        desk.explain(&all.tokens);
        let common = self.keep_common(&all, desk);
        desk.sampler = self.sampler(&prompt, desk)?;
        // Penalties count the whole prompt, including the part kept in the context.
        all.tokens[..common].iter().for_each(|token| desk.sampler.accept(*token));
        // Without reasoning there is nothing to parse.
        let keeps_tags = prompt.thinking.is_some();
        let parser = Some(prompt.parser).filter(|_| keeps_tags && !desk.args.reasoning.skip_parsing);
        let reading = Reading { parser, keeps_tags, stops: prompt.additional_stops };
        let before = desk.session.stats().decode;
        let spoken = match desk.speak(&all.rest(common), desk.args.input.predict, &reading) {
            Ok(spoken) => spoken,
            Err(error) if matches!(error.downcast_ref(), Some(EvalError::ContextFull { .. })) => {
                desk.log.line(Level::Error, format!("error: {}; {}", in_words(&error), room(desk)));
                desk.failed = true;
                self.withdraw(desk);
                return Ok(End::ContextFull);
            }
            Err(error) => return Err(error),
        };
        desk.screen.end_line()?;
        if spoken.tokens.is_empty() && spoken.end == End::Interrupted {
            self.withdraw(desk);
            return Ok(spoken.end);
        }
        // Otherwise the next message makes room.
        if spoken.end == End::ContextFull && !desk.args.run.session_options.context_shift {
            let line = format!("warning: there is no room for another message: {}", room(desk));
            desk.log.line(Level::Warning, line);
        }
        if desk.args.output.closing.perf.0 && !desk.args.chat.single_turn.0 {
            let line = report::answer(&before, &desk.session.stats().decode);
            line.iter().for_each(|line| desk.log.line(Level::Info, format!("hobbit: {line}")));
        }
        self.in_context = all.tokens;
        self.in_context.extend(&spoken.tokens);
        if !desk.args.chat.single_turn.0 {
            desk.screen.print(Voice::Model, "\n")?;
        }
        self.messages
            .push(Message { reasoning_content: spoken.reasoning, ..Message::new(Role::Assistant, spoken.text) });
        Ok(spoken.end)
    }

    /// Removes a message that got no answer. The evaluated part is unknown, so the next message starts from an empty
    /// context.
    fn withdraw(&mut self, desk: &mut Desk) {
        self.messages.pop();
        self.in_context.clear();
        desk.session.reset();
    }

    /// Index of the oldest turn, after the system prompt.
    fn first_turn(&self) -> usize {
        self.messages.iter().take_while(|message| message.role == Role::System).count()
    }

    /// The formatted conversation, and the number of oldest messages left out so that it fits with room for an
    /// answer: whole turns, only with `--context-shift`, and never the last message.
    fn fitting(&self, desk: &Desk) -> Result<(Written, usize)> {
        let n_ctx = desk.session.context().n_ctx() as usize;
        let room = desk.args.input.predict.unwrap_or(usize::MAX).min(n_ctx / 4);
        let mut wanted = self.written(&self.messages, desk)?;
        let first = self.first_turn();
        let turns = (first + 1..self.messages.len()).filter(|&at| self.messages[at].role == Role::User);
        let mut n_dropped = 0;
        for next in turns {
            if !desk.args.run.session_options.context_shift || wanted.tokens.n_cells() + room <= n_ctx {
                break;
            }
            n_dropped = next - first;
            let left = [&self.messages[..first], &self.messages[next..]].concat();
            wanted = self.written(&left, desk)?;
        }
        Ok((wanted, n_dropped))
    }

    /// The reason why the conversation without `n_dropped` messages does not fit, if it does not.
    fn excess(&self, tokens: usize, n_dropped: usize, desk: &Desk) -> Option<String> {
        let n_ctx = desk.session.context().n_ctx();
        if self.messages.len() - self.first_turn() - n_dropped <= 1 {
            return too_long("message", tokens, n_ctx);
        }
        (tokens > n_ctx as usize).then(|| {
            format!(
                "the conversation would have {tokens} tokens, but the context holds {n_ctx}; the message is taken \
                 back: {}, and send it again",
                room(desk)
            )
        })
    }

    /// Messages formatted by the template, up to the opening of the model's turn.
    fn written(&self, messages: &[Message], desk: &Desk) -> Result<Written> {
        let inputs = ChatInputs { messages: serde_json::to_string(messages)?, ..self.inputs.clone() };
        let prompt = self.templates.apply(&inputs)?;
        let media: Vec<Media> = messages.iter().flat_map(|message| message.media.iter().cloned()).collect();
        let mut tokens = media::tokens(desk.model, desk.projector.as_ref(), prompt.prompt.as_bytes(), &media)?;
        // Some templates write the BOS token that tokenizing adds as well.
        if desk.model.adds_bos() && tokens.tokens.len() > 1 && tokens.tokens[0] == tokens.tokens[1] {
            tokens = tokens.rest(1);
        }
        Ok(Written { tokens, prompt })
    }

    /// Makes the context the longest possible proper prefix of `wanted`; returns its length in tokens. A template may
    /// rewrite earlier messages, and text does not always tokenize to the generated tokens.
    fn keep_common(&self, wanted: &MediaPrompt, desk: &mut Desk) -> usize {
        let is_shifted = desk.session.n_past() != self.in_context.len();
        let n = common_prefix(&self.in_context, &wanted.tokens).min(wanted.tokens.len().saturating_sub(1));
        let common = wanted.chunks.whole(n);
        desk.session.keep(if is_shifted { 0 } else { common })
    }
}

fn read(path: &str) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("{path}: cannot read this file"))
}

/// Bytes as a message. Chat templates take text: bytes that are not UTF-8 are replaced, with a warning.
fn text_of(bytes: &[u8], what: &str, desk: &Desk) -> String {
    let text = String::from_utf8_lossy(bytes);
    if let std::borrow::Cow::Owned(_) = text {
        let warning = format!("warning: {what}: not UTF-8, which a conversation needs: other bytes become \u{FFFD}");
        desk.log.line(Level::Warning, warning);
    }
    text.into_owned()
}
