//! Completion: continues a text, which is typed, from a file or from standard input, with the user taking turns if
//! requested.

use std::io::{self, IsTerminal, Read};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::console::{Answer, Keyboard, Voice};
use super::ctrl_c::CtrlC;
use super::demo;
use super::log::{Level, Log};
use super::media;
use super::resolve::{Bytes, HiArgs, as_typed};
use super::signals::Interrupted;
use super::stream::{Desk, End, Reading, too_long};
use super::surroundings::Surroundings;
use super::text::unescape;
use hobbit::Token;
use hobbit::engine::MediaPrompt;

/// Continues a text by at most `predict` tokens at a time.
pub fn run(desk: &mut Desk, prompt: &Bytes, predict: Option<usize>) -> Result<End> {
    let args = desk.args;
    let attached = media::read_all(desk, &args.input.attached)?;
    let text = match attached.len() {
        0 => prompt.0.clone(),
        n => media::placed(String::from_utf8_lossy(&prompt.0).into_owned(), n).into_bytes(),
    };
    let mut prompt = media::tokens(desk.model, desk.projector.as_ref(), &text, &attached)?;
    desk.explain(&prompt.tokens);
    if let Some(error) = too_long("prompt", prompt.n_cells(), desk.session.context().n_ctx()) {
        bail!(error);
    }
    if args.input.flags.display_prompt.0 {
        let text = desk.text_of(&prompt.tokens);
        desk.screen.print(Voice::Prompt, &text)?;
    }
    let mut keyboard = Keyboard::new(args.output.simple_io.0, args.chat.multiline_input.0, None);
    if args.chat.interactive.0 && io::stdin().is_terminal() {
        desk.log.line(Level::Info, "hobbit: interactive; Ctrl-C takes the turn, and ends when it is yours");
    }
    let mut users_turn = args.chat.interactive_first.0;
    loop {
        if users_turn {
            match ask(desk, &mut keyboard)? {
                Some(input) => prompt.tokens.extend(input),
                None => return Ok(End::Stopped),
            }
        }
        if prompt.tokens.is_empty() && desk.session.n_past() == 0 {
            bail!("the prompt is empty; give a text with -p or a file with -f");
        }
        let spoken = desk.speak(&prompt, predict, &Reading::default())?;
        prompt = MediaPrompt::default();
        // llama-completion prints the reverse prompt: it opens the user's turn.
        desk.screen.print(Voice::Model, spoken.stop.as_deref().unwrap_or_default())?;
        if !args.chat.interactive.0 || spoken.end == End::ContextFull || desk.ctrl_c.is_ending() {
            desk.screen.end_line()?;
            return Ok(spoken.end);
        }
        if spoken.end != End::Stopped {
            desk.screen.end_line()?;
        }
        desk.sampler.reset();
        users_turn = true;
    }
}

/// The user's input between its affixes; `None` at the end of input. Ctrl-C here ends the program.
fn ask(desk: &mut Desk, keyboard: &mut Keyboard) -> Result<Option<Vec<Token>>> {
    let affixes = &desk.args.input.affixes;
    let typed = match keyboard.ask(&affixes.prefix, &mut desk.screen, desk.ctrl_c)? {
        Answer::Text(typed) => typed,
        Answer::End => return Ok(None),
        Answer::Interrupted => return Err(Interrupted.into()),
    };
    desk.screen.print(Voice::Model, &affixes.suffix)?;
    let typed = if desk.args.input.flags.text.escape.0 { unescape(typed.as_bytes()) } else { typed.into_bytes() };
    let mut tokens = desk.model.tokenize(&affixes.prefix, affixes.bos, true)?;
    tokens.extend(desk.model.tokenize(&typed, false, false)?);
    tokens.extend(desk.model.tokenize(&affixes.suffix, false, true)?);
    Ok(Some(tokens))
}

/// Time without input after which a notice says that standard input is awaited.
const PATIENCE: Duration = Duration::from_secs(2);

/// The text to continue, and the number of tokens to generate; `None`: until the model or the context ends. Without a
/// text on the command line, the standard input is read, unless it is a terminal or the run is a conversation.
pub fn text(args: &HiArgs, around: &dyn Surroundings, log: &Log, ctrl_c: &CtrlC) -> Result<(Bytes, Option<usize>)> {
    if let Some(prompt) = &args.input.prompt {
        return Ok((prompt.clone(), args.input.predict));
    }
    if args.chat.interactive.0 || around.is_typed_in() {
        return Ok((Bytes::default(), args.input.predict));
    }
    let found = if around.has_input() { read_patiently(log, ctrl_c)? } else { Vec::new() };
    if !found.is_empty() {
        return Ok((as_typed(found, args.input.flags.text.escape.0), args.input.predict));
    }
    if !args.run.is_demo {
        bail!("the standard input is empty, expected a prompt there; give a text with -p, or a file with -f");
    }
    log.line(Level::Warning, "warning: the standard input is empty: the demo model continues its own text");
    Ok((Bytes(demo::PROMPT.into()), args.input.demo_predict))
}

/// Reads the standard input, handles signals meanwhile, and prints a notice if no input arrives for a while.
fn read_patiently(log: &Log, ctrl_c: &CtrlC) -> Result<Vec<u8>> {
    let (send, found) = crossbeam_channel::bounded(1);
    let reader = std::thread::Builder::new().name("prompt".to_owned()).spawn(move || send.send(read()));
    reader.context("cannot read the standard input: no thread for it")?;
    let found = ctrl_c.while_asking(|signals| {
        let mut patience = crossbeam_channel::after(PATIENCE);
        loop {
            crossbeam_channel::select! {
                recv(found) -> found => return Some(found),
                recv(signals) -> _ => return None,
                recv(patience) -> _ => log.line(Level::Info, "hobbit: reading the prompt from standard input"),
            }
            patience = crossbeam_channel::never();
        }
    });
    match found {
        Some(found) => found?.context("cannot read the prompt from the standard input"),
        None => Err(Interrupted.into()),
    }
}

/// All of the standard input.
pub fn read() -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes)?;
    Ok(bytes)
}
