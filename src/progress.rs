//! Progress on stderr: hidden without a terminal and in quiet runs.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::log::{Level, Log};
use hobbit_core::units::Seconds;

/// Shorter work needs no bar.
const PATIENCE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(500);
const TOKENS: &str = "{msg} {bar:40} {pos} of {len} tokens {left}";
/// Moves down a line in the same column and back, so that there is a line below, and saves the cursor's position.
const LINE_BELOW: &[u8] = b"\x1bD\x1bM\x1b7\x1bD\r";
/// Restores the saved position.
const BACK: &[u8] = b"\x1b8";

/// A bar of 1000 steps.
pub fn bar(log: &Log, template: &'static str) -> ProgressBar {
    let bar = if log.shows(Level::Info) { ProgressBar::new(1000) } else { ProgressBar::hidden() };
    bar.with_style(ProgressStyle::with_template(template).expect("the template is constant and valid"))
}

/// Estimated time left after `done` of `all` have taken `elapsed`; `None` if there is no estimate.
fn left(done: u64, all: u64, elapsed: Duration) -> Option<Duration> {
    let (done, left) = (u32::try_from(done).ok()?, all.checked_sub(done)?);
    (done > 0).then(|| elapsed.mul_f64(left as f64 / f64::from(done)))
}

/// Shows the number of evaluated tokens, once evaluation has taken a while.
pub struct TokenBar {
    bar: ProgressBar,
    /// Tokens that are evaluated.
    done: Arc<AtomicU64>,
    /// Dropped at the end.
    end: Option<Sender<()>>,
    drawing: Option<JoinHandle<()>>,
}

impl TokenBar {
    /// A bar for `n_tokens`, evaluated in ubatches of `n_ubatch`; `what` names the work. `None` if it would be
    /// invisible. `is_mid_line`: the cursor is behind a text that will continue there. `share` returns the finished
    /// part of the current ubatch, `0..=1`.
    pub fn new(
        what: &'static str,
        n_tokens: usize,
        n_ubatch: usize,
        is_mid_line: bool,
        share: impl Fn() -> f64 + Send + 'static,
        log: &Log,
    ) -> Option<Self> {
        if !log.shows(Level::Info) || !io::stderr().is_terminal() {
            return None;
        }
        let started = Instant::now();
        let write_left = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let left = left(state.pos(), state.len().unwrap_or(0), started.elapsed());
            let _ = left.map(|left| write!(out, "ETA {:.0}", Seconds(left.as_secs_f64().ceil())));
        };
        let style = ProgressStyle::with_template(TOKENS).expect("the template is constant and valid");
        let (all, n_ubatch) = (n_tokens as u64, n_ubatch as u64);
        let bar = ProgressBar::with_draw_target(Some(all), ProgressDrawTarget::hidden());
        bar.set_style(style.with_key("left", write_left));
        bar.set_message(what);
        let done = Arc::new(AtomicU64::new(0));
        let (end, ended) = crossbeam_channel::bounded(0);
        let draw = {
            let (bar, done) = (bar.clone(), Arc::clone(&done));
            let position = move || position(done.load(Ordering::Relaxed), all, n_ubatch, share());
            move || draw(&bar, &position, is_mid_line && io::stdout().is_terminal(), &ended)
        };
        // Without a thread there is no bar.
        let drawing = std::thread::Builder::new().name("progress".to_owned()).spawn(draw).ok();
        Some(Self { bar, done, end: Some(end), drawing })
    }

    /// Sets the number of evaluated tokens.
    pub fn set(&self, done: usize) {
        self.done.store(done as u64, Ordering::Relaxed);
        self.bar.set_position(done as u64);
    }
}

impl Drop for TokenBar {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.drawing.take().map(JoinHandle::join);
    }
}

/// Tokens that count as evaluated: finished ones of `all`, and a share of the next ubatch.
fn position(done: u64, all: u64, n_ubatch: u64, share: f64) -> u64 {
    done + (n_ubatch.min(all.saturating_sub(done)) as f64 * share) as u64
}

/// Draws the bar once the work has taken long enough, and removes it at the end.
fn draw(bar: &ProgressBar, position: &dyn Fn() -> u64, is_mid_line: bool, ended: &Receiver<()>) {
    if ended.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
        return;
    }
    let mut stderr = io::stderr();
    if is_mid_line {
        let _ = stderr.write_all(LINE_BELOW);
    }
    bar.set_draw_target(ProgressDrawTarget::stderr());
    loop {
        bar.set_position(position());
        bar.tick();
        if ended.recv_timeout(TICK) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    bar.finish_and_clear();
    if is_mid_line {
        let _ = stderr.write_all(BACK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_follows_from_the_progress() {
        let second = Duration::from_secs(1);
        assert_eq!(left(0, 100, second), None);
        assert_eq!(left(25, 100, second), Some(3 * second));
        assert_eq!(left(100, 100, second), Some(Duration::ZERO));
        assert_eq!(left(101, 100, second), None);
    }

    #[test]
    fn layers_of_a_ubatch_count_in_part() {
        assert_eq!(position(0, 300, 512, 0.5), 150);
        assert_eq!(position(512, 2000, 512, 0.25), 640);
        assert_eq!(position(300, 300, 512, 0.9), 300);
    }

    #[test]
    fn the_template_is_valid() {
        ProgressStyle::with_template(TOKENS).unwrap();
    }
}
