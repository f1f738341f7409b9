//! Measures what the server adds around a model: requests a second and latency with a scripted engine and durable capture, beside a
//! bare echo on loopback and the disk's own sync in the same run.

mod http;
mod load;

use anyhow::{Context, Result, bail};
use clap::Parser;
use http::{Connection, post};
use load::{Kind, Words, closed, open, quantile};
use serde_json::{Value, json};
use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

#[derive(Parser)]
struct Args {
    /// The program.
    #[arg(long, default_value = "target/release/chela")]
    chela: PathBuf,
    /// A folder with tokenizer.json, tokenizer_config.json and config.json, or a model.
    #[arg(long)]
    model: String,
    /// Another server on OpenAI's API (address:port), measured in the same run.
    #[arg(long)]
    beside: Option<String>,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 6)]
    seconds: u64,
    /// Rounds; each measures everything once, in turns.
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// Only the rows whose name holds this.
    #[arg(long)]
    only: Option<String>,
    /// Tokens of the long session.
    #[arg(long, default_value_t = 60_000)]
    long: usize,
}

struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(args: &Args, folder: &Path, said: &Value) -> Result<Server> {
    let script = folder.join("script.jsonl");
    std::fs::write(&script, format!("{said}\n"))?;
    let data = folder.join("data");
    let child = Command::new(&args.chela)
        .args([
            "serve",
            "--port",
            "0",
            "--learn",
            "off",
            "--model",
            &args.model,
            "--engine",
        ])
        .arg(format!("script:{}", script.display()))
        .arg("--data-dir")
        .arg(&data)
        .env("RUST_LOG", "error")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {}", args.chela.display()))?;
    let mut server = Server {
        child,
        address: String::new(),
    };
    for _ in 0..600 {
        if let Ok(text) = std::fs::read_to_string(data.join("server.json")) {
            let note: Value = serde_json::from_str(&text)?;
            let address = note["address"].as_str().context("no address")?;
            server.address = address.trim_start_matches("http://").to_owned();
            return Ok(server);
        }
        if server.child.try_wait()?.is_some() {
            bail!("the server did not start; run it by hand with the same --model");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    bail!("the server did not start in a minute")
}

/// Answers every request with the same few bytes.
async fn echo() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let body = "{\"choices\":[{\"message\":{\"content\":\"Yes, of course.\"}}]}";
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 << 10];
                let mut held = Vec::new();
                loop {
                    match stream.read(&mut buffer).await {
                        Ok(0) | Err(_) => return,
                        Ok(n) => held.extend_from_slice(&buffer[..n]),
                    }
                    let Some(head) = held.windows(4).position(|w| w == b"\r\n\r\n") else {
                        continue;
                    };
                    let text = String::from_utf8_lossy(&held[..head]).to_ascii_lowercase();
                    let length = text.split("content-length: ").nth(1);
                    let length = length.and_then(|t| t.split("\r\n").next()?.parse::<usize>().ok());
                    if held.len() >= head + 4 + length.unwrap_or(0) {
                        held.clear();
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    Ok(address)
}

/// How long this disk takes to sync 4 KB, 99th percentile of 200, in ms.
fn disk(folder: &Path) -> Result<(f64, f64)> {
    let mut file = std::fs::File::create(folder.join("sync"))?;
    let mut taken = Vec::new();
    for _ in 0..200 {
        file.write_all(&[7; 4096])?;
        let begun = Instant::now();
        file.sync_data()?;
        taken.push(begun.elapsed());
    }
    taken.sort_unstable();
    Ok((quantile(&taken, 0.5), quantile(&taken, 0.99)))
}

/// Processor time that a process took so far.
fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after = stat.rsplit_once(')').context("no name")?.1;
    let ticks = |n: usize| after.split_whitespace().nth(n)?.parse::<f64>().ok();
    let (user, system) = (ticks(11), ticks(12));
    // 100 ticks a second on every Linux of today.
    Ok((user.context("no utime")? + system.context("no stime")?) / 100.0)
}

fn resident_kib(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:"));
    let number = line.and_then(|l| l.split_whitespace().nth(1)?.parse().ok());
    number.context("no VmRSS")
}

/// A session of so many tokens: its first turn, then turns of 1,000 new characters at 20 a second. In ms: cold, p50, p99.
async fn long_session(server: &Server, tokens: usize) -> Result<(f64, f64, f64)> {
    let mut words = Words::new(99);
    // More than five letters a token.
    let mut messages = Vec::new();
    for _ in 0..tokens * 27 / 5 / 2000 {
        messages.push(json!({"role": "user", "content": words.text(1000)}));
        messages.push(json!({"role": "assistant", "content": words.text(1000)}));
    }
    let mut connection = Connection::open(&server.address).await?;
    let (mut cold, mut taken) = (0.0, Vec::new());
    for turn in 0..61 {
        messages.push(json!({"role": "user", "content": words.text(1000)}));
        let body = json!({"model": "m", "max_tokens": 8, "messages": messages}).to_string();
        let request = post("/v1/chat/completions", Some("long"), &body);
        let begun = Instant::now();
        let answer = connection.ask(&request).await?;
        let time = begun.elapsed();
        if turn == 0 {
            cold = time.as_secs_f64() * 1e3;
            let body: Value = serde_json::from_str(&answer)?;
            println!(
                "  the long session has {} tokens",
                body["usage"]["prompt_tokens"]
            );
        } else {
            taken.push(time);
        }
        let body: Value = serde_json::from_str(&answer)?;
        messages.push(
            json!({"role": "assistant", "content": body["choices"][0]["message"]["content"]}),
        );
        tokio::time::sleep(Duration::from_millis(50).saturating_sub(time)).await;
    }
    taken.sort_unstable();
    Ok((cold, quantile(&taken, 0.5), quantile(&taken, 0.99)))
}

/// Memory that 1,000 streams take while nothing is said, in MiB.
async fn idle_streams(args: &Args) -> Result<f64> {
    let folder = tempfile::tempdir()?;
    let never = json!({"text": "Never.", "first_ms": 600_000});
    let server = serve(args, folder.path(), &never)?;
    let before = resident_kib(server.child.id())?;
    let body =
        json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let mut held = Vec::new();
    for number in 0..1000 {
        let mut connection = Connection::open(&server.address).await?;
        let id = format!("idle{number}");
        connection
            .begin(&post("/v1/chat/completions", Some(&id), &body.to_string()))
            .await?;
        held.push(connection);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let after = resident_kib(server.child.id())?;
    Ok(after.saturating_sub(before) as f64 / 1024.0)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let args = Args::parse();
    let folder = tempfile::tempdir()?;
    let server = serve(&args, folder.path(), &json!({"text": "Yes, of course."}))?;
    let echo = echo().await?;
    let time = Duration::from_secs(args.seconds);
    let mut first = 1_000_000;
    let mut fresh = || {
        first += 10_000;
        first
    };
    for round in 1..=args.rounds {
        println!("round {round}");
        let (median, p99) = disk(folder.path())?;
        println!("  disk sync                p50 {median:.2} ms, p99 {p99:.2} ms");
        for (name, kind) in [
            ("token ids", Kind::Ids),
            ("200 of 1,000 bytes new", Kind::Next),
            ("1,000 bytes new", Kind::New),
        ] {
            if args
                .only
                .as_ref()
                .is_some_and(|only| !name.contains(only.as_str()))
            {
                continue;
            }
            let bare = closed(&echo, kind, 64, time / 2, fresh()).await?;
            let (cpu, begun) = (cpu_seconds(server.child.id())?, Instant::now());
            let rate = closed(&server.address, kind, 64, time, fresh()).await?;
            // The load generator takes cores too: what two of its own would give follows from the processor time of a request.
            let share = (cpu_seconds(server.child.id())? - cpu) / begun.elapsed().as_secs_f64();
            let alone = 2.0 * rate / share;
            println!(
                "  {name:24} {rate:7.0} requests/s on {share:.2} cores: {alone:.0} on two (echo {bare:.0})"
            );
            if let Some(beside) = &args.beside {
                let other = closed(beside, kind, 64, time, fresh()).await;
                match other {
                    Ok(rate) => println!("  {name:24} {rate:7.0} requests/s beside"),
                    Err(error) => println!("  {name:24} beside: {error:#}"),
                }
            }
        }
        let rates: &[u64] = if args.only.is_some() { &[] } else { &[1000] };
        for &rate in rates {
            let bare = open(&echo, Kind::Next, rate, time, fresh()).await?;
            let taken = open(&server.address, Kind::Next, rate, time, fresh()).await?;
            let (_, after) = disk(folder.path())?;
            println!(
                "  open loop {rate}/s         p50 {:.2} ms, p99 {:.2} ms (echo p99 {:.2}; disk p99 {:.2} to {:.2}; bar {:.2})",
                quantile(&taken, 0.5),
                quantile(&taken, 0.99),
                quantile(&bare, 0.99),
                p99,
                after,
                2.0 + 2.0 * p99.max(after),
            );
        }
    }
    if args.only.is_some() {
        return Ok(());
    }
    let (cold, p50, p99) = long_session(&server, args.long).await?;
    println!(
        "long session               cold {cold:.0} ms, next turn p50 {p50:.1} ms, p99 {p99:.1} ms"
    );
    drop(server);
    let idle = idle_streams(&args).await?;
    println!("1,000 idle streams         {idle:.0} MiB");
    Ok(())
}
