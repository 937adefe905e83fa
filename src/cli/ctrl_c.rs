//! Ctrl-C: the first stops what is being computed, the next ends the program.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

use super::run::INTERRUPTED;
use crate::Interrupt;

#[derive(Default)]
struct State {
    /// Something is being computed that a Ctrl-C should stop.
    busy: AtomicBool,
    /// A Ctrl-C came while it was.
    pressed: AtomicBool,
    session: Mutex<Option<Interrupt>>,
}

/// The handler's other end.
#[derive(Clone)]
pub struct CtrlC(Arc<State>);

impl CtrlC {
    /// Installs the handler, once per process. With `colour` it ends the colour before it ends the program.
    ///
    /// # Errors
    /// The system refuses.
    pub fn install(colour: bool) -> Result<Self> {
        let state = Arc::new(State::default());
        let handler = Arc::clone(&state);
        ctrlc::set_handler(move || {
            let first = handler.busy.load(Ordering::SeqCst) && !handler.pressed.swap(true, Ordering::SeqCst);
            if !first {
                if colour {
                    let _ = writeln!(std::io::stdout(), "{}", anstyle::Reset);
                }
                std::process::exit(i32::from(INTERRUPTED));
            }
            if let Some(session) = &*handler.session.lock().unwrap_or_else(PoisonError::into_inner) {
                session.set();
            }
        })
        .context("cannot handle Ctrl-C")?;
        Ok(Self(state))
    }

    /// From now on a Ctrl-C stops this session.
    pub fn attach(&self, session: Interrupt) {
        *self.0.session.lock().unwrap_or_else(PoisonError::into_inner) = Some(session);
    }

    /// Runs `work`, during which the first Ctrl-C only interrupts.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.0.pressed.store(false, Ordering::SeqCst);
        if let Some(session) = &*self.0.session.lock().unwrap_or_else(PoisonError::into_inner) {
            session.clear();
        }
        self.0.busy.store(true, Ordering::SeqCst);
        let result = work();
        self.0.busy.store(false, Ordering::SeqCst);
        result
    }

    /// Whether a Ctrl-C came during the work that runs, or ran last.
    pub fn was_pressed(&self) -> bool {
        self.0.pressed.load(Ordering::SeqCst)
    }
}
