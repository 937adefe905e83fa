//! Progress bars on standard error, and Ctrl-C.

use std::ops::ControlFlow;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar of bytes; hidden by indicatif where standard error is not a terminal.
pub struct Bar {
    bar: ProgressBar,
    stage: String,
}

impl Bar {
    /// An empty one.
    ///
    /// # Errors
    /// Ctrl-C cannot be watched.
    pub fn new() -> anyhow::Result<Self> {
        watch()?;
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let template = "{prefix:<9} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
        bar.set_style(ProgressStyle::with_template(template)?);
        Ok(Self { bar, stage: String::new() })
    }

    /// Shows `done` of `total` bytes; says to stop after Ctrl-C.
    pub fn show(&mut self, stage: &str, done: u64, total: u64) -> ControlFlow<()> {
        if self.stage != stage {
            stage.clone_into(&mut self.stage);
            self.bar.reset();
            self.bar.set_prefix(stage.to_owned());
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
        match is_stopped() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

static STOP: AtomicBool = AtomicBool::new(false);

/// The first Ctrl-C asks the work to stop where it can be taken up again, the second ends the process.
///
/// # Errors
/// Ctrl-C cannot be watched.
pub fn watch() -> anyhow::Result<()> {
    static WATCHING: OnceLock<Result<(), String>> = OnceLock::new();
    let handler = || {
        if STOP.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    let watching = WATCHING.get_or_init(|| ctrlc::set_handler(handler).map_err(|error| error.to_string()));
    watching.clone().map_err(anyhow::Error::msg).context("cannot watch for Ctrl-C")
}

/// Ctrl-C was pressed.
pub fn is_stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}
