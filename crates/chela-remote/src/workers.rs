//! A few threads that wait for slow answers, so that no async runtime has to.

use chela_core::{BoxFuture, JudgeError};
use futures_channel::oneshot;
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
};

type Job = Box<dyn FnOnce() + Send>;

/// Runs blocking calls on threads of its own; they end when this value and all its calls are gone.
pub(crate) struct Workers {
    jobs: SyncSender<Job>,
}

impl Workers {
    /// Starts `threads` threads; at most `queue` calls wait for one.
    pub(crate) fn start(threads: usize, queue: usize) -> Result<Self, JudgeError> {
        let (jobs, waiting) = sync_channel::<Job>(queue);
        let waiting = Arc::new(Mutex::new(waiting));
        for i in 0..threads.max(1) {
            let waiting = waiting.clone();
            thread::Builder::new()
                .name(format!("chela-remote-{i}"))
                .spawn(move || work(&waiting))
                .map_err(|e| JudgeError::Failed(format!("a thread cannot be started: {e}")))?;
        }
        Ok(Self { jobs })
    }

    /// Runs one call. Dropping the future does not stop the call, but a call whose future is gone before it began is not made.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, JudgeError> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, JudgeError>> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move || {
            if !answer.is_canceled() {
                // Nobody waits any more: then nobody needs the answer.
                let _ = answer.send(call());
            }
        });
        let queued = self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => {
                JudgeError::Failed("too many calls wait for the judge's model already".to_owned())
            }
            TrySendError::Disconnected(_) => gone(),
        });
        Box::pin(async move {
            queued?;
            answered.await.unwrap_or_else(|_| Err(gone()))
        })
    }
}

fn gone() -> JudgeError {
    JudgeError::Failed("the thread that asked the judge's model is gone".to_owned())
}

fn work(waiting: &Mutex<Receiver<Job>>) {
    loop {
        let job = waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .recv();
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;

    #[test]
    fn a_full_queue_refuses_and_an_abandoned_call_is_not_made() {
        let workers = Workers::start(1, 1).unwrap();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let first = workers.call(move || {
            begun.send(()).unwrap();
            wait.recv().unwrap();
            Ok(1)
        });
        has_begun.recv().unwrap();
        let second = workers.call(|| -> Result<i32, JudgeError> { panic!("nobody waits for it") });
        let third = workers.call(|| Ok(3));
        assert!(matches!(block_on(third), Err(JudgeError::Failed(_))));
        drop(second);
        go.send(()).unwrap();
        assert_eq!(block_on(first), Ok(1));
        // The queue has one place: wait until the abandoned call has left it.
        let last = loop {
            let last = block_on(workers.call(|| Ok(4)));
            if last.is_ok() {
                break last;
            }
            thread::yield_now();
        };
        assert_eq!(last, Ok(4));
    }
}
