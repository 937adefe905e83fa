//! A bar of runs over the text on standard error, and Ctrl-C.

use hobbit_programs::signals;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::bar::watch;

/// Counts units of work of one stage; hidden by indicatif where standard error is not a terminal.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar of `total` units. The first Ctrl-C makes the next [`Progress::step`] fail, so that temporary files are removed;
    /// the second ends the process.
    ///
    /// # Errors
    /// Ctrl-C cannot be watched.
    pub fn new(stage: impl Into<String>, total: u64) -> anyhow::Result<Self> {
        watch()?;
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template("{prefix:<24} {wide_bar} {pos}/{len} {eta}")?);
        bar.set_prefix(stage.into());
        Ok(Self { bar })
    }

    /// One unit is done.
    ///
    /// # Errors
    /// Ctrl-C was pressed.
    pub fn step(&self) -> anyhow::Result<()> {
        self.bar.inc(1);
        Ok(signals::check()?)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
