//! A bar of runs over the text on standard error, and Ctrl-C.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Counts units of work of one stage; hidden by indicatif where standard error is not a terminal.
pub struct Progress {
    bar: ProgressBar,
}

static STOP: AtomicBool = AtomicBool::new(false);

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
        anyhow::ensure!(!STOP.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn watch() -> anyhow::Result<()> {
    static WATCHING: OnceLock<Result<(), String>> = OnceLock::new();
    let handler = || {
        if STOP.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    let watching = WATCHING.get_or_init(|| ctrlc::set_handler(handler).map_err(|error| error.to_string()));
    watching.clone().map_err(anyhow::Error::msg).context("cannot watch for Ctrl-C")
}
