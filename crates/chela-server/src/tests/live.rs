//! Over a real connection: a client that hangs up, and the orderly end.

use super::*;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    thread::{self, JoinHandle},
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle as Task};

struct Live {
    api: Api,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    served: Task<std::io::Result<()>>,
}

/// The API on a real port. Only its fakes are shared with the server that runs.
async fn live(grace: Duration) -> Live {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let api = api_with(|app| {
        app.config.grace = grace;
        app.config.bound_names = vec!["127.0.0.1".to_owned()];
    });
    let (stop, stopped) = oneshot::channel::<()>();
    let app = api.server.app.clone();
    let served = tokio::spawn(crate::serve(listener, app, async move {
        let _ = stopped.await;
    }));
    Live {
        api,
        address,
        stop: Some(stop),
        served,
    }
}

fn post(address: SocketAddr, body: &Value) -> TcpStream {
    let mut socket = TcpStream::connect(address).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let body = body.to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    socket
}

fn probe(address: SocketAddr) -> String {
    let mut socket = TcpStream::connect(address).unwrap();
    let head = format!("GET /ready HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    socket.write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    text
}

/// Everything the server says until it hangs up.
fn read_all(address: SocketAddr, body: Value) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut text = String::new();
        let mut socket = post(address, &body);
        // A connection that is cut still gives what came before.
        let _ = socket.read_to_string(&mut text);
        text
    })
}

async fn joined(reader: JoinHandle<String>) -> String {
    tokio::task::spawn_blocking(move || reader.join().unwrap())
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_is_noticed_while_nothing_is_said() {
    for stream in [true, false] {
        let live = live(Duration::from_secs(1)).await;
        live.api.engine.hold();
        let address = live.address;
        let socket = tokio::task::spawn_blocking(move || {
            let socket = post(address, &ask(json!({"stream": stream})));
            if stream {
                let mut line = String::new();
                BufReader::new(socket.try_clone().unwrap())
                    .read_line(&mut line)
                    .unwrap();
                assert!(line.contains("200"), "{line}");
            }
            socket
        });
        let socket = socket.await.unwrap();
        until("sampling", || live.api.engine.running() == 1).await;
        drop(socket);
        until("cancelled", || live.api.engine.cancelled() == 1).await;
        until("sealed", || {
            live.api.recorder.finishes() == [(0, FinishReason::Aborted)]
        })
        .await;
        drop(live.stop);
        live.served.await.unwrap().unwrap();
        assert_eq!(live.api.recorder.finishes().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_replies_finish_and_new_requests_are_refused_at_the_end() {
    let mut live = live(Duration::from_secs(20)).await;
    live.api.engine.hold();
    live.api.reply("still here");
    let running = read_all(live.address, ask(json!({"stream": true})));
    until("sampling", || live.api.engine.running() == 1).await;
    drop(live.stop.take());
    // Probes are still answered: they tell when the end has begun.
    loop {
        let address = live.address;
        let ready = tokio::task::spawn_blocking(move || probe(address))
            .await
            .unwrap();
        if ready.starts_with("HTTP/1.1 503") {
            break;
        }
    }
    let refused = joined(read_all(live.address, ask(json!({})))).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(
        refused.to_ascii_lowercase().contains("retry-after: 5"),
        "{refused}"
    );
    live.api.engine.go_on();
    let text = joined(running).await;
    assert!(
        text.contains("\"finish_reason\":\"stop\"") && text.contains("[DONE]"),
        "{text}"
    );
    live.served.await.unwrap().unwrap();
    assert_eq!(live.api.recorder.finishes(), [(0, FinishReason::End)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_grace_time_streams_end_with_an_error_frame() {
    let live = live(Duration::from_millis(20)).await;
    live.api.engine.hold();
    let running = read_all(live.address, ask(json!({"stream": true})));
    until("sampling", || live.api.engine.running() == 1).await;
    drop(live.stop);
    let text = joined(running).await;
    assert!(
        text.contains("the reply was cut") && !text.contains("[DONE]"),
        "{text}"
    );
    live.served.await.unwrap().unwrap();
    // Serving is over only when the turn is kept.
    assert_eq!(live.api.recorder.finishes(), [(0, FinishReason::Aborted)]);
}
