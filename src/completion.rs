//! Completion: continues a text, with the user taking turns if requested.

use std::io::IsTerminal;

use anyhow::{Result, bail};

use super::console::{Answer, Keyboard, Voice};
use super::escape::unescape;
use super::log::Level;
use super::resolve::Bytes;
use super::signals::Interrupted;
use super::stream::{Desk, End, too_long};
use hobbit::Token;

/// Continues a text by at most `predict` tokens at a time.
///
/// # Errors
/// An empty prompt, failed evaluation, failed output.
pub fn run(desk: &mut Desk, prompt: &Bytes, predict: Option<usize>) -> Result<End> {
    let args = desk.args;
    let mut tokens = desk.model.tokenize(&prompt.0, true, true)?;
    desk.explain(&tokens);
    if let Some(error) = too_long("prompt", tokens.len(), desk.session.n_ctx()) {
        bail!(error);
    }
    if args.display_prompt {
        let text = desk.text_of(&tokens);
        desk.screen.print(Voice::Prompt, &text)?;
    }
    let mut keyboard = Keyboard::new(args.simple_io, args.multiline_input);
    if args.interactive && std::io::stdin().is_terminal() {
        desk.log.line(Level::Info, "hobbit: interactive; Ctrl-C takes the turn, and ends when it is yours");
    }
    let mut users_turn = args.interactive_first;
    loop {
        if users_turn {
            match ask(desk, &mut keyboard)? {
                Some(input) => tokens.extend(input),
                None => return Ok(End::Stopped),
            }
        }
        if tokens.is_empty() && desk.session.n_past() == 0 {
            bail!("the prompt is empty; give a text with -p or a file with -f");
        }
        let spoken = desk.speak(&tokens, predict)?;
        tokens.clear();
        // llama-completion prints the reverse prompt: it opens the user's turn.
        desk.screen.print(Voice::Model, spoken.stop.as_deref().unwrap_or_default())?;
        if !args.interactive || spoken.end == End::ContextFull || desk.ctrl_c.is_ending() {
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
    let affixes = &desk.args.affixes;
    let typed = match keyboard.ask(&affixes.prefix, &mut desk.screen, desk.ctrl_c)? {
        Answer::Text(typed) => typed,
        Answer::End => return Ok(None),
        Answer::Interrupted => return Err(Interrupted.into()),
    };
    desk.screen.print(Voice::Model, &affixes.suffix)?;
    let typed = if desk.args.escape { unescape(typed.as_bytes()) } else { typed.into_bytes() };
    let mut tokens = desk.model.tokenize(&affixes.prefix, affixes.bos, true)?;
    tokens.extend(desk.model.tokenize(&typed, false, false)?);
    tokens.extend(desk.model.tokenize(&affixes.suffix, false, true)?);
    Ok(Some(tokens))
}
