//! Control of answers that are being generated.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A request that the model end its current thought. Cheap to clone; the first to take it consumes it.
#[derive(Clone, Debug, Default)]
pub struct Nudge(Arc<AtomicBool>);

impl Nudge {
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Takes the request, if there is one.
    pub fn take(&self) -> bool {
        // Usually unset: avoid the write.
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }
}

/// Running streamed answers by client-visible id; `None` if their thoughts cannot be ended.
#[derive(Debug, Default)]
pub struct Controls(Mutex<BTreeMap<String, Option<Nudge>>>);

/// Keeps an answer in the list for as long as this lives.
#[derive(Debug)]
pub struct Listed {
    controls: Arc<Controls>,
    id: String,
}

impl Controls {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Option<Nudge>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an answer.
    pub fn list(self: &Arc<Self>, id: &str, nudge: Option<Nudge>) -> Listed {
        self.lock().insert(id.to_owned(), nudge);
        Listed { controls: Arc::clone(self), id: id.to_owned() }
    }

    /// Asks an answer to end its thought.
    ///
    /// # Errors
    /// The reason why it cannot, in llama-server's words.
    pub fn end_thought(&self, id: &str) -> Result<(), &'static str> {
        match self.lock().get(id) {
            None => Err("no active completion for this id"),
            Some(None) => Err("reasoning control not enabled for this completion"),
            Some(Some(nudge)) => {
                nudge.set();
                Ok(())
            }
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.controls.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_known_while_they_last() {
        let controls = Arc::new(Controls::default());
        let nudge = Nudge::default();
        let listed = controls.list("a", Some(nudge.clone()));
        let _deaf = controls.list("b", None);
        assert_eq!(controls.end_thought("a"), Ok(()));
        assert!(nudge.take() && !nudge.take());
        assert!(controls.end_thought("b").unwrap_err().contains("not enabled"));
        drop(listed);
        assert!(controls.end_thought("a").unwrap_err().contains("no active"));
    }
}
