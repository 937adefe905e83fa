//! Signals while a model works. The first Ctrl-C stops an answer, the next one ends the program. SIGTERM, SIGHUP, and
//! Ctrl-C without an answer to stop end it in order: computing stops at the next token, and everything is written.
//! One more signal ends it at once, as does a timeout: a main thread that hangs in C++ or in a write does not react
//! to the first signal.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use crossbeam_channel::{Receiver, Sender};

use super::console::restore_terminal;
use super::signals::{self, Signal};
use hobbit::Interrupt;

/// Time to react to a request to end; after it the program is ended at once.
const PATIENCE: Duration = Duration::from_millis(2500);

struct State {
    /// A computation is running that a signal should stop.
    busy: AtomicBool,
    /// A signal came during the computation.
    pressed: AtomicBool,
    /// SIGTERM or SIGHUP came, or Ctrl-C without a computation: begin nothing new.
    ending: AtomicBool,
    /// The main thread has seen the request and ends the program in order.
    obeyed: AtomicBool,
    /// The program waits for the user's input, and a signal counts as an answer.
    asking: AtomicBool,
    answers: Sender<()>,
    session: Mutex<Option<Interrupt>>,
}

impl State {
    fn stop_session(&self) {
        if let Some(session) = &*self.session.lock().unwrap_or_else(PoisonError::into_inner) {
            session.set();
        }
    }

    /// Ends the program after a while if the main thread does not.
    fn watch_over(self: &Arc<Self>) {
        let state = Arc::clone(self);
        end_later(move || !state.obeyed.load(Ordering::SeqCst));
    }

    /// Handles a signal; returns whether the program continues.
    fn take(&self, signal: Signal) -> bool {
        if self.ending.load(Ordering::SeqCst) {
            return false;
        }
        let (is_busy, is_asking) = (self.busy.load(Ordering::SeqCst), self.asking.load(Ordering::SeqCst));
        // Between computations, and while the model loads, only the program itself can be ended.
        let has_session = self.session.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let ends = signal != Signal::Interrupt || !(is_asking || is_busy && has_session);
        self.ending.store(ends, Ordering::SeqCst);
        if is_asking {
            // One message is enough.
            let _ = self.answers.try_send(());
            return true;
        }
        let was_pressed = self.pressed.swap(true, Ordering::SeqCst);
        self.stop_session();
        ends || !was_pressed
    }
}

/// The program's handle on the signal handler.
#[derive(Clone)]
pub struct CtrlC {
    state: Arc<State>,
    answers: Receiver<()>,
}

impl CtrlC {
    /// Installs the handler, once per process. With `colour`, the handler resets the colour before it ends the
    /// program.
    pub fn install(colour: bool) -> Result<Self> {
        let ctrl_c = Self::new();
        let state = Arc::clone(&ctrl_c.state);
        signals::watch(move |signal| {
            let was_ending = state.ending.load(Ordering::SeqCst);
            let goes_on = state.take(signal);
            if !was_ending && state.ending.load(Ordering::SeqCst) {
                state.watch_over();
            }
            if !goes_on {
                // The main thread may hang in a write while it holds the lock that the next write needs.
                end_later(|| true);
                if colour {
                    let _ = writeln!(std::io::stdout(), "{}", anstyle::Reset);
                }
                // Destructors of C++ would take what other threads still compute with.
                end_at_once();
            }
        })?;
        Ok(ctrl_c)
    }

    fn new() -> Self {
        let (send, answers) = crossbeam_channel::bounded(1);
        let state = State {
            busy: AtomicBool::new(false),
            pressed: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            obeyed: AtomicBool::new(false),
            asking: AtomicBool::new(false),
            answers: send,
            session: Mutex::new(None),
        };
        Self { state: Arc::new(state), answers }
    }

    /// From now on a signal stops this session.
    pub fn attach(&self, session: Interrupt) {
        *self.state.session.lock().unwrap_or_else(PoisonError::into_inner) = Some(session);
    }

    /// Runs `work`; meanwhile the first Ctrl-C only interrupts it.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let state = &*self.state;
        state.pressed.store(false, Ordering::SeqCst);
        if let Some(session) = &*state.session.lock().unwrap_or_else(PoisonError::into_inner) {
            session.clear();
        }
        state.busy.store(true, Ordering::SeqCst);
        // Keep a pending request to end.
        if self.is_ending() {
            state.pressed.store(true, Ordering::SeqCst);
            state.stop_session();
        }
        let result = work();
        state.busy.store(false, Ordering::SeqCst);
        self.is_ending();
        result
    }

    /// Whether a signal came during the current or last work.
    pub fn was_pressed(&self) -> bool {
        self.is_ending();
        self.state.pressed.load(Ordering::SeqCst)
    }

    /// Whether the program itself was asked to end, not only its computation. A caller that sees this ends the
    /// program in order, and may take the time it needs.
    pub fn is_ending(&self) -> bool {
        let is_ending = self.state.ending.load(Ordering::SeqCst);
        if is_ending {
            self.obey();
        }
        is_ending
    }

    /// Declares that the program is ending in order, without a time limit.
    pub fn obey(&self) {
        self.state.obeyed.store(true, Ordering::SeqCst);
    }

    /// Runs `ask` for the user's turn; signals are sent to its channel meanwhile.
    pub fn while_asking<T>(&self, ask: impl FnOnce(&Receiver<()>) -> T) -> T {
        while self.answers.try_recv().is_ok() {}
        self.state.asking.store(true, Ordering::SeqCst);
        if self.is_ending() {
            let _ = self.state.answers.try_send(());
        }
        let answer = ask(&self.answers);
        self.state.asking.store(false, Ordering::SeqCst);
        answer
    }
}

/// Ends the program after a while, if `ends` then returns true.
fn end_later(ends: impl FnOnce() -> bool + Send + 'static) {
    let wait = move || {
        std::thread::sleep(PATIENCE);
        if ends() {
            end_at_once();
        }
    };
    if std::thread::Builder::new().name("end".into()).spawn(wait).is_err() {
        end_at_once();
    }
}

/// Exits without cleanup: other threads may hold any lock, and C++ code may be running.
fn end_at_once() {
    restore_terminal();
    signals::end_at_once(signals::status());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the program continues after each of `signals` during a computation.
    fn while_busy(signals: &[Signal]) -> Vec<bool> {
        let ctrl_c = CtrlC::new();
        let session = Interrupt::default();
        ctrl_c.attach(session.clone());
        let went_on = ctrl_c.during(|| signals.iter().map(|&signal| ctrl_c.state.take(signal)).collect());
        assert!(session.is_set() && ctrl_c.was_pressed());
        went_on
    }

    #[test]
    fn the_first_signal_stops_and_the_second_ends() {
        use Signal::{HangUp, Interrupt, Terminate};
        for signals in [[Interrupt, Interrupt], [Terminate, Terminate], [HangUp, Terminate], [Terminate, Interrupt]] {
            assert_eq!(while_busy(&signals), [true, false], "{signals:?}");
        }
        // Ctrl-C stops the answer; the next signal is the first request to end the program.
        assert_eq!(while_busy(&[Interrupt, Terminate, HangUp]), [true, true, false]);
    }

    #[test]
    fn only_a_request_to_end_outlives_the_work() {
        let ctrl_c = CtrlC::new();
        let session = Interrupt::default();
        ctrl_c.attach(session.clone());
        ctrl_c.during(|| ctrl_c.state.take(Signal::Interrupt));
        ctrl_c.during(|| assert!(!session.is_set() && !ctrl_c.was_pressed()));
        ctrl_c.during(|| ctrl_c.state.take(Signal::HangUp));
        ctrl_c.during(|| assert!(session.is_set() && ctrl_c.was_pressed()));
        assert!(ctrl_c.is_ending());
    }

    #[test]
    fn between_two_works_any_signal_ends_in_order() {
        for signal in [Signal::Interrupt, Signal::Terminate] {
            let ctrl_c = CtrlC::new();
            assert!(ctrl_c.state.take(signal), "{signal:?}");
            assert!(!ctrl_c.state.obeyed.load(Ordering::SeqCst), "the main thread has not looked yet");
            assert!(ctrl_c.is_ending() && ctrl_c.state.obeyed.load(Ordering::SeqCst));
            ctrl_c.during(|| assert!(ctrl_c.was_pressed()));
            assert!(!ctrl_c.state.take(signal), "the second ends at once: {signal:?}");
        }
        let loading = CtrlC::new();
        assert!(loading.during(|| loading.state.take(Signal::Interrupt)) && loading.is_ending(), "without a session");
    }

    #[test]
    fn a_signal_is_an_answer_to_a_question() {
        let ctrl_c = CtrlC::new();
        for signal in [Signal::Interrupt, Signal::Terminate] {
            assert!(ctrl_c.while_asking(|answers| ctrl_c.state.take(signal) && answers.try_recv().is_ok()));
        }
        assert!(ctrl_c.while_asking(|answers| answers.try_recv().is_ok()), "it came before the question");
    }
}
