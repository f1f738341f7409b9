//! Futures and streams without a runtime: just enough for tests.

use crate::{BoxFuture, BoxStream};
use futures_core::Stream;
use std::{
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::Thread,
};

/// A future that is done.
pub fn ready<'a, T: Send + 'a>(value: T) -> BoxFuture<'a, T> {
    Box::pin(std::future::ready(value))
}

struct Iter<I>(I);

impl<I: Iterator + Unpin> Stream for Iter<I> {
    type Item = I::Item;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<I::Item>> {
        Poll::Ready(self.0.next())
    }
}

/// A stream of what an iterator yields.
pub fn iter<'a, I>(items: I) -> BoxStream<'a, I::Item>
where
    I: IntoIterator,
    I::IntoIter: Unpin + Send + 'a,
{
    Box::pin(Iter(items.into_iter()))
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread to its end.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Runs a stream on this thread to its end.
pub fn collect<T>(mut stream: BoxStream<'_, T>) -> Vec<T> {
    let mut items = Vec::new();
    while let Some(item) = block_on(std::future::poll_fn(|cx| stream.as_mut().poll_next(cx))) {
        items.push(item);
    }
    items
}
