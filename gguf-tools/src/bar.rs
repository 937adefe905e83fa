//! Progress bars on standard error, and signals that end a program.

use std::ops::ControlFlow;
use std::sync::OnceLock;

use hobbit_programs::signals::{self, Signal};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar; hidden by indicatif where standard error is not a terminal. The first signal asks the work to stop where it can be
/// taken up again, the second ends the process.
pub struct Bar(ProgressBar);

impl Bar {
    /// An empty one, of bytes.
    ///
    /// # Errors
    /// Signals cannot be watched.
    pub fn new() -> anyhow::Result<Self> {
        Self::with_template("{prefix:<9} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}")
    }

    /// One of `total` units of work of one stage.
    ///
    /// # Errors
    /// Signals cannot be watched.
    #[cfg(feature = "engine")]
    pub fn of_units(stage: impl Into<String>, total: u64) -> anyhow::Result<Self> {
        let bar = Self::with_template("{prefix:<24} {wide_bar} {pos}/{len} {eta}")?;
        bar.0.set_length(total);
        bar.0.set_prefix(stage.into());
        Ok(bar)
    }

    fn with_template(template: &str) -> anyhow::Result<Self> {
        watch()?;
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template(template)?);
        Ok(Self(bar))
    }

    /// Shows `done` of `total` bytes; says to stop after a signal.
    pub fn show(&mut self, stage: &str, done: u64, total: u64) -> ControlFlow<()> {
        if self.0.prefix() != stage {
            self.0.reset();
            self.0.set_prefix(stage.to_owned());
        }
        self.0.set_length(total);
        self.0.set_position(done);
        match signals::came() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// One more unit is done. Fails after a signal, so that temporary files are removed.
    ///
    /// # Errors
    /// A signal came.
    #[cfg(feature = "engine")]
    pub fn step(&self) -> anyhow::Result<()> {
        self.0.inc(1);
        Ok(signals::check()?)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn watch() -> anyhow::Result<()> {
    static WATCHING: OnceLock<Result<(), String>> = OnceLock::new();
    let mut was_asked = false;
    let handler = move |signal: Signal| {
        if std::mem::replace(&mut was_asked, true) {
            std::process::exit(i32::from(signal.status()));
        }
    };
    let watching = WATCHING.get_or_init(|| signals::watch(handler).map_err(|error| format!("{error:#}")));
    watching.clone().map_err(anyhow::Error::msg)
}
