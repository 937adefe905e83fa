//! Norms of the experts' weights, computed beside the tokens.

use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::engine::ggml::log;
use crate::engine::ggml::quantise::Ggml;
use hobbit_core::files;
use hobbit_core::gguf::{Catalog, LayerCatalog, Stored};
use hobbit_core::profile::{LayerNorms, NormsFile, layer_norms};
use hobbit_core::residency::VirtualExperts;
use hobbit_core::stats::NormsSource;
use hobbit_core::store::{Original, advise_unneeded, threads};

/// Time that the thread rests, in times of its work: tokens keep three quarters of the disk.
const REST: u32 = 3;

/// A thread that reads every expert once. Dropping stops it and keeps what is done.
pub(crate) struct NormsJob {
    layers: Receiver<LayerNorms>,
    /// Layers that are still to come.
    n_left: usize,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Input and output of the background job.
pub(crate) struct NormsTask {
    pub(crate) catalog: Catalog,
    /// The files that the catalog refers to.
    pub(crate) files: Vec<Original>,
    /// The first layers' norms, which an earlier run computed.
    pub(crate) file: NormsFile,
    /// Where the norms are kept.
    pub(crate) keep: Option<PathBuf>,
    /// Experts bypass the page cache, so that the job leaves nothing there.
    pub(crate) is_direct: bool,
    /// Tokens wait for the norms.
    pub(crate) is_awaited: bool,
}

impl NormsJob {
    /// # Errors
    /// The system's error if it starts no thread.
    pub(crate) fn start(mut task: NormsTask) -> io::Result<Self> {
        let (sender, layers) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let n_left = task.catalog.layers.len() - task.file.norms.len();
        let work = move || {
            threads::register();
            let before = task.file.norms.len();
            task.compute(&stopped, &sender);
            if let Some(path) = task.keep.filter(|_| task.file.norms.len() > before)
                && let Err(error) = files::replace(&path, task.file.to_json().as_bytes())
            {
                let path = path.display();
                log::notice(format_args!(
                    "norms of experts: cannot write {path}: {error}; the next run computes them again"
                ));
            }
        };
        let thread = Some(thread::Builder::new().name("hobbit-norms".to_owned()).spawn(work)?);
        Ok(Self { layers, n_left, stop, thread })
    }

    /// Hands over what is there; with `waits`, all. Whether more is to come.
    pub(crate) fn hand_over(&mut self, to: &mut VirtualExperts, waits: bool) -> bool {
        while self.n_left > 0 {
            let next = match waits {
                true => self.layers.recv().map_err(|_| TryRecvError::Disconnected),
                false => self.layers.try_recv(),
            };
            match next {
                Ok(LayerNorms { layer, norms }) => to.set_norms(layer, norms),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => {
                    to.set_norms_from(NormsSource::None);
                    return false;
                }
            }
            self.n_left -= 1;
        }
        to.set_norms_from(NormsSource::Computed);
        false
    }
}

impl NormsTask {
    /// Computes the norms of the layers that have none, and sends them.
    fn compute(&mut self, stopped: &AtomicBool, to: &Sender<LayerNorms>) {
        if !self.is_awaited {
            lower_priority();
        }
        let rest = if self.is_awaited { 0 } else { REST };
        let pace = |_, took: Duration| {
            thread::sleep(took * rest);
            if stopped.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        for layer in &self.catalog.layers[self.file.norms.len()..] {
            match layer_norms(&self.catalog, layer, &self.files, &Ggml, 1, &pace) {
                Ok(Some(norms)) => {
                    self.file.norms.push(norms.clone());
                    let _ = to.send(norms);
                }
                Ok(None) => return,
                Err(error) => return log::notice(format_args!("norms of experts: {error}; they count as 1")),
            }
            if self.is_direct {
                forget(layer, &self.files);
            }
        }
    }
}

impl Drop for NormsJob {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Drops a layer's experts from the page cache.
fn forget(layer: &LayerCatalog, files: &[Original]) {
    for slice in layer.high.iter().flat_map(|source| &source.slices) {
        let low = if let Stored::Both { low } = slice.stored { Some(low) } else { None };
        for extent in [Some(slice.extent), low].into_iter().flatten() {
            advise_unneeded(&files[extent.file as usize].file, extent.offset, extent.len);
        }
    }
}

/// Lets every other thread go first.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    // SAFETY: takes no memory; 0 is the calling thread. A refusal costs speed only.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19)
    };
}
