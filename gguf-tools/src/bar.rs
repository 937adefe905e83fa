//! Progress bars on standard error, and signals that ask for the end.

use std::ops::ControlFlow;
use std::sync::OnceLock;

use hobbit_programs::signals::{self, Signal};
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
    /// Signals cannot be watched.
    pub fn new() -> anyhow::Result<Self> {
        watch()?;
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let template = "{prefix:<9} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
        bar.set_style(ProgressStyle::with_template(template)?);
        Ok(Self { bar, stage: String::new() })
    }

    /// Shows `done` of `total` bytes; says to stop after a signal.
    pub fn show(&mut self, stage: &str, done: u64, total: u64) -> ControlFlow<()> {
        if self.stage != stage {
            stage.clone_into(&mut self.stage);
            self.bar.reset();
            self.bar.set_prefix(stage.to_owned());
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
        match signals::came() {
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

/// The first signal asks the work to stop where it can be taken up again, the second ends the process.
///
/// # Errors
/// Signals cannot be watched.
pub fn watch() -> anyhow::Result<()> {
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
