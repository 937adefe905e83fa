//! The terminal's settings, which a line editor changes while it waits.

use std::io;
use std::sync::{Mutex, PoisonError};

use nix::sys::termios::{self, SetArg, Termios};

/// The settings before an editor changed them.
static SETTINGS: Mutex<Option<Termios>> = Mutex::new(None);

/// Saves the settings for [`restore`].
pub fn remember() {
    *SETTINGS.lock().unwrap_or_else(PoisonError::into_inner) = termios::tcgetattr(io::stdin()).ok();
}

/// Restores the settings that a waiting editor has changed, before the program ends.
pub fn restore() {
    if let Some(settings) = &*SETTINGS.lock().unwrap_or_else(PoisonError::into_inner) {
        let _ = termios::tcsetattr(io::stdin(), SetArg::TCSANOW, settings);
    }
}
