//! The least of an HTTP client: one request at a time on a connection that stays.

use anyhow::{Context, Result, bail};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const PATIENCE: Duration = Duration::from_secs(120);

/// A connection.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// A whole request as it goes over the wire.
pub fn post(path: &str, session: Option<&str>, body: &str) -> Vec<u8> {
    let session = session.map_or_else(String::new, |id| format!("x-session-id: {id}\r\n"));
    format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{session}content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

impl Connection {
    /// Opens one.
    pub async fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)
            .await
            .with_context(|| format!("no server at {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: Vec::with_capacity(16 << 10),
        })
    }

    /// Sends and reads the whole answer; its body comes back.
    pub async fn ask(&mut self, request: &[u8]) -> Result<String> {
        self.stream.write_all(request).await?;
        timeout(PATIENCE, self.answer())
            .await
            .context("no answer in time")?
    }

    /// Sends, and reads until the first bytes of the answer's body.
    pub async fn begin(&mut self, request: &[u8]) -> Result<()> {
        self.stream.write_all(request).await?;
        self.head().await.map(|_| ())
    }

    async fn more(&mut self) -> Result<()> {
        if self.stream.read_buf(&mut self.buffer).await? == 0 {
            bail!("the server closed the connection");
        }
        Ok(())
    }

    async fn head(&mut self) -> Result<(u16, String)> {
        loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                let rest = self.buffer.split_off(at + 4);
                let head = std::mem::replace(&mut self.buffer, rest);
                let head = String::from_utf8(head)?;
                let status = head.split(' ').nth(1).context("no status")?.parse()?;
                return Ok((status, head.to_ascii_lowercase()));
            }
            self.more().await?;
        }
    }

    async fn answer(&mut self) -> Result<String> {
        let (status, head) = self.head().await?;
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .context("an answer without a length")?;
        let length: usize = length.trim().parse()?;
        while self.buffer.len() < length {
            self.more().await?;
        }
        let rest = self.buffer.split_off(length);
        let body = String::from_utf8(std::mem::replace(&mut self.buffer, rest))?;
        if status != 200 {
            bail!("status {status}: {body}");
        }
        Ok(body)
    }
}
