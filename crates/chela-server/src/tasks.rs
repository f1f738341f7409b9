//! Work that must outlive the request it came from (sealing a turn whose client left). The only place that spawns.

use std::future::Future;
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{oneshot, watch},
};

/// Counts what is under way and can be waited for.
#[derive(Clone, Debug)]
pub(crate) struct Counter(watch::Sender<usize>);

/// Under way until dropped.
#[derive(Debug)]
pub(crate) struct Busy(watch::Sender<usize>);

impl Counter {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    pub(crate) fn enter(&self) -> Busy {
        self.0.send_modify(|n| *n += 1);
        Busy(self.0.clone())
    }

    /// How much is under way.
    pub(crate) fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Resolves when nothing is under way.
    pub(crate) async fn idle(&self) {
        // Cannot fail: the sender is ours and lives.
        let _ = self.0.subscribe().wait_for(|n| *n == 0).await;
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.saturating_sub(1));
    }
}

/// Bytes from which on reading a request takes long enough to be noticed by others.
const LARGE: usize = 64 << 10;

/// Does work that takes long for large inputs where it holds nobody up: other requests go on meanwhile on other threads.
pub(crate) fn aside<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let several = Handle::try_current()
        .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
    if bytes >= LARGE && several {
        tokio::task::block_in_place(work)
    } else {
        work()
    }
}

/// The tracked tasks of one server.
#[derive(Clone, Debug)]
pub(crate) struct Tasks(Counter);

impl Tasks {
    pub(crate) fn new() -> Self {
        Self(Counter::new())
    }

    /// Runs `work` to its end whatever becomes of the caller. The receiver fails only when there is no runtime any more.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (sender, receiver) = oneshot::channel();
        let busy = self.0.enter();
        match Handle::try_current() {
            Ok(runtime) => {
                runtime.spawn(async move {
                    let _busy = busy;
                    // Nobody waits any more when the client left: that is fine, the work is done.
                    let _ = sender.send(work.await);
                });
            }
            Err(error) => tracing::error!(%error, "the runtime is gone; work was lost"),
        }
        receiver
    }

    /// Resolves when every task is over.
    pub(crate) async fn join(&self) {
        self.0.idle().await;
    }
}
