//! Runs the server on a listener, and ends it: running replies finish, new requests are told to come back, then streams are cut.

use crate::server::{App, Phase, Server, build};
use axum::serve::ListenerExt;
use std::{future::Future, io, sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    sync::oneshot,
    time::{sleep, timeout},
};

/// What is left to do after a stream was cut takes no longer than this, or is given up.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Serves until `shutdown` resolves and the replies then running are over or [`crate::ServerConfig::grace`] has passed. Turns are
/// sealed when it returns.
pub async fn serve(
    listener: TcpListener,
    app: App,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let server = Server::new(app);
    let router = build(&server);
    // Tokens are small packets: without this each waits for the one before to be acknowledged.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY was refused");
        }
    });
    let (drained, is_drained) = oneshot::channel();
    let ending = server.clone();
    let graceful = axum::serve(listener, router).with_graceful_shutdown(async move {
        shutdown.await;
        drain(&ending).await;
        // The other side waits below; it is gone only when serving itself failed.
        let _ = drained.send(());
    });
    let result = tokio::select! {
        result = async { graceful.await } => result,
        // A client that neither reads nor leaves must not keep the process.
        () = async {
            if is_drained.await.is_ok() { sleep(LAST_WORDS).await } else { std::future::pending().await }
        } => Ok(()),
    };
    if timeout(LAST_WORDS, server.tasks.join()).await.is_err() {
        tracing::error!("turns were still being sealed when the server ended");
    }
    result
}

/// New requests get 503 from now on, so the listener stays open meanwhile.
async fn drain(server: &Arc<Server>) {
    server.phase.send_replace(Phase::Draining);
    let grace = server.app.config.grace;
    if timeout(grace, server.open.idle()).await.is_err() {
        tracing::warn!(?grace, "replies were cut: the grace time is over");
        server.phase.send_replace(Phase::Cut);
        if timeout(LAST_WORDS, server.open.idle()).await.is_err() {
            tracing::warn!(
                "a client does not take the end of its reply; its connection is dropped"
            );
        }
    }
}
