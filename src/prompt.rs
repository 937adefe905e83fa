//! The text to continue: typed, from a file, or from the standard input.

use std::io::{self, Read};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::ctrl_c::CtrlC;
use super::demo;
use super::log::{Level, Log};
use super::resolve::{Bytes, HiArgs, Surroundings, as_typed};
use super::signals::Interrupted;

/// Time without input after which a notice says that standard input is awaited.
const PATIENCE: Duration = Duration::from_secs(2);

/// The text to continue, and the number of tokens to generate; `None`: until the model or the context ends. Without a
/// text on the command line, the standard input is read, unless it is a terminal or the run is a conversation.
///
/// # Errors
/// An input that is empty or cannot be read; an ending signal.
pub fn text(args: &HiArgs, around: &dyn Surroundings, log: &Log, ctrl_c: &CtrlC) -> Result<(Bytes, Option<usize>)> {
    if let Some(prompt) = &args.prompt {
        return Ok((prompt.clone(), args.predict));
    }
    if args.interactive || around.is_typed_in() {
        return Ok((Bytes::default(), args.predict));
    }
    let found = if around.has_input() { read_patiently(log, ctrl_c)? } else { Vec::new() };
    if !found.is_empty() {
        return Ok((as_typed(found, args.escape), args.predict));
    }
    if !args.is_demo {
        bail!("the standard input is empty, expected a prompt there; give a text with -p, or a file with -f");
    }
    log.line(Level::Warning, "warning: the standard input is empty: the demo model continues its own text");
    Ok((Bytes(demo::PROMPT.into()), args.demo_predict))
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
                recv(patience) -> _ => log.line(Level::Info, "hobbit: reading the prompt from the standard input, to its end"),
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
