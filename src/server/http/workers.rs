//! Work that takes long, beside the threads that serve connections.

use tokio::sync::Semaphore;

/// Requests processed at once: the engine needs the cores, too.
const WORKERS: usize = 2;

/// Bounds how many requests are processed at once.
#[derive(Debug)]
pub struct Workers(Semaphore);

impl Default for Workers {
    fn default() -> Self {
        Self(Semaphore::new(WORKERS))
    }
}

impl Workers {
    /// Runs slow work of a request, such as parsing JSON, applying a template or tokenizing, while another thread
    /// serves connections.
    pub async fn work<T>(&self, work: impl FnOnce() -> T) -> T {
        let _permit = self.0.acquire().await.expect("it is never closed");
        tokio::task::block_in_place(work)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// The first waits for what the second sends, and the runtime has one thread.
    #[test]
    fn work_leaves_the_thread_to_others() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let workers = Arc::new(Workers::default());
        let (sender, receiver) = mpsc::channel();
        let own = Arc::clone(&workers);
        let waits = runtime
            .spawn(async move { own.work(move || receiver.recv_timeout(Duration::from_secs(60)).is_ok()).await });
        let sends = runtime.spawn(async move { workers.work(move || sender.send(()).is_ok()).await });
        assert_eq!(runtime.block_on(async { (waits.await.unwrap(), sends.await.unwrap()) }), (true, true));
    }
}
