//! What is asked, and how fast.

use crate::http::{Connection, post};
use anyhow::Result;
use serde_json::{Value, json};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// Words enough that no two requests are the same.
pub struct Words(u64);

impl Words {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// English-like text of so many bytes.
    pub fn text(&mut self, bytes: usize) -> String {
        const WORDS: [&str; 24] = [
            "the", "river", "question", "of", "small", "answer", "to", "bread", "where", "green",
            "we", "morning", "and", "window", "people", "is", "strange", "letter", "in", "winter",
            "because", "number", "you", "remember",
        ];
        let mut text = String::with_capacity(bytes + 12);
        while text.len() < bytes {
            let n = self.next();
            text.push_str(WORDS[(n % 24) as usize]);
            text.push(if n.is_multiple_of(13) { ',' } else { ' ' });
        }
        text.truncate(bytes);
        text
    }
}

/// What a client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A completion of 250 token ids.
    Ids,
    /// A chat of 1 KB in its session, 200 bytes of it new: the next turn of a conversation.
    Next,
    /// A chat of 1 KB that nobody sent before, in a new session.
    New,
}

/// One client: keeps its conversation.
pub struct Client {
    kind: Kind,
    words: Words,
    number: u64,
    session: u64,
    messages: Vec<Value>,
}

impl Client {
    /// The n-th.
    pub fn new(kind: Kind, number: u64) -> Self {
        Self {
            kind,
            words: Words::new(number + 1),
            number,
            session: 0,
            messages: Vec::new(),
        }
    }

    /// The next request.
    pub fn request(&mut self) -> Vec<u8> {
        match self.kind {
            Kind::Ids => {
                let ids: Vec<u64> = (0..250).map(|_| 100 + self.words.next() % 20_000).collect();
                let body = json!({"model": "m", "prompt": ids, "max_tokens": 2});
                post("/v1/completions", None, &body.to_string())
            }
            Kind::New => {
                let text = self.words.text(1000);
                let body = json!({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": text}]});
                self.session += 1;
                let id = format!("n{}-{}", self.number, self.session);
                post("/v1/chat/completions", Some(&id), &body.to_string())
            }
            Kind::Next => {
                let whole: usize = self
                    .messages
                    .iter()
                    .map(|m| m["content"].as_str().map_or(0, str::len))
                    .sum();
                if self.messages.is_empty() || whole > 1700 {
                    // From 300 bytes on, a conversation grows by 166 a turn: 1 KB on average, and less than 200 of it new.
                    self.session += 1;
                    let (text, asked) = (self.words.text(200), self.words.text(100));
                    self.messages = vec![
                        json!({"role": "system", "content": text}),
                        json!({"role": "user", "content": asked}),
                    ];
                } else {
                    let text = self.words.text(150);
                    self.messages.push(json!({"role": "user", "content": text}));
                }
                let body = json!({"model": "m", "max_tokens": 8, "messages": self.messages});
                let id = format!("c{}-{}", self.number, self.session);
                post("/v1/chat/completions", Some(&id), &body.to_string())
            }
        }
    }

    /// What was answered becomes history.
    pub fn answered(&mut self, body: &str) -> Result<()> {
        if self.kind == Kind::Next {
            let body: Value = serde_json::from_str(body)?;
            self.messages.push(
                json!({"role": "assistant", "content": body["choices"][0]["message"]["content"]}),
            );
        }
        Ok(())
    }
}

/// Requests a second of so many clients that each wait for their answer.
pub async fn closed(
    address: &str,
    kind: Kind,
    clients: u64,
    time: Duration,
    first: u64,
) -> Result<f64> {
    let done = Arc::new(AtomicU64::new(0));
    let mut all = JoinSet::new();
    let begun = Instant::now();
    // The first quarter warms up.
    let (from, until) = (begun + time / 4, begun + time);
    for number in 0..clients {
        let (address, done) = (address.to_owned(), done.clone());
        all.spawn(async move {
            let mut connection = Connection::open(&address).await?;
            let mut client = Client::new(kind, first + number);
            while Instant::now() < until {
                let answer = connection.ask(&client.request()).await?;
                client.answered(&answer)?;
                if Instant::now() >= from && Instant::now() < until {
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
            anyhow::Ok(())
        });
    }
    while let Some(result) = all.join_next().await {
        result??;
    }
    Ok(done.load(Ordering::Relaxed) as f64 / (time * 3 / 4).as_secs_f64())
}

/// Latencies at so many requests a second, sent when they are due whether or not earlier ones were answered: a request that waits
/// for a free connection waits on the clock.
pub async fn open(
    address: &str,
    kind: Kind,
    rate: u64,
    time: Duration,
    first: u64,
) -> Result<Vec<Duration>> {
    const CONNECTIONS: u64 = 128;
    let gap = Duration::from_secs_f64(CONNECTIONS as f64 / rate as f64);
    let begun = Instant::now() + Duration::from_millis(100);
    let mut all = JoinSet::new();
    for number in 0..CONNECTIONS {
        let address = address.to_owned();
        all.spawn(async move {
            let mut connection = Connection::open(&address).await?;
            let mut client = Client::new(kind, first + number);
            let mut taken = Vec::new();
            let mut due = begun + gap.mul_f64(number as f64 / CONNECTIONS as f64);
            while due < begun + time {
                let request = client.request();
                // A timer that fires late is not the server's doing; a connection that is still busy when a request is due is.
                let late = Instant::now() > due;
                tokio::time::sleep_until(due.into()).await;
                let begun = if late { due } else { Instant::now() };
                let answer = connection.ask(&request).await?;
                taken.push(begun.elapsed());
                client.answered(&answer)?;
                due += gap;
            }
            anyhow::Ok(taken)
        });
    }
    let mut all_taken = Vec::new();
    while let Some(result) = all.join_next().await {
        all_taken.extend(result??);
    }
    all_taken.sort_unstable();
    Ok(all_taken)
}

/// The value below which this share of sorted times lies.
pub fn quantile(sorted: &[Duration], share: f64) -> f64 {
    let at = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(f64::NAN, |d| d.as_secs_f64() * 1e3)
}
