//! A text model behind an OpenAI-compatible address.

use crate::workers::Workers;
use chela_core::{BoxFuture, JudgeError, TextModel, TextRequest};
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Duration};

/// Calls at the same time: three votes on a few turns.
const THREADS: usize = 8;
/// Calls that may wait for a thread.
const QUEUE: usize = 256;
/// Characters of an error body that are shown.
const SHOWN: usize = 200;
/// Most bytes read of an answer.
const MOST_BYTES: u64 = 8 << 20;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: Vec<Line<'a>>,
    max_tokens: usize,
    temperature: f32,
    seed: u64,
}

#[derive(Serialize)]
struct Line<'a> {
    role: &'a str,
    content: &'a str,
}

#[derive(Deserialize)]
struct Answer {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    message: Said,
}

#[derive(Deserialize)]
struct Said {
    content: Option<String>,
}

/// Asks `<base_url>/chat/completions`.
pub struct OpenAiTextModel {
    endpoint: Arc<Endpoint>,
    workers: Workers,
}

struct Endpoint {
    agent: ureq::Agent,
    url: String,
    /// Never logged; see the tests.
    authorization: Option<String>,
    model: String,
    timeout: Duration,
}

impl OpenAiTextModel {
    /// `base_url` ends in `/v1` as a rule; `timeout` bounds one whole call. Fails when no thread can be started.
    pub fn new(
        base_url: &str,
        api_key: Option<String>,
        model: impl Into<String>,
        timeout: Duration,
    ) -> Result<Self, JudgeError> {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .build();
        let endpoint = Endpoint {
            agent: config.into(),
            url: format!("{}/chat/completions", base_url.trim_end_matches('/')),
            authorization: api_key.map(|key| format!("Bearer {key}")),
            model: model.into(),
            timeout,
        };
        Ok(Self {
            endpoint: Arc::new(endpoint),
            workers: Workers::start(THREADS, QUEUE)?,
        })
    }
}

impl TextModel for OpenAiTextModel {
    fn complete(&self, request: TextRequest) -> BoxFuture<'_, Result<String, JudgeError>> {
        let endpoint = self.endpoint.clone();
        self.workers.call(move || endpoint.ask(&request))
    }
}

impl Endpoint {
    fn ask(&self, request: &TextRequest) -> Result<String, JudgeError> {
        let messages = request
            .messages
            .iter()
            .map(|m| Line {
                role: m.role.as_str(),
                content: &m.content,
            })
            .collect();
        let body = Body {
            model: &self.model,
            messages,
            max_tokens: request.max_tokens,
            temperature: request.temperature,
            seed: request.seed,
        };
        let mut call = self.agent.post(&self.url);
        if let Some(authorization) = &self.authorization {
            call = call.header("authorization", authorization);
        }
        let mut response = call.send_json(&body).map_err(|e| self.failed(&e))?;
        let status = response.status();
        let text = response
            .body_mut()
            .with_config()
            .limit(MOST_BYTES)
            .lossy_utf8(true)
            .read_to_string()
            .map_err(|e| self.failed(&e))?;
        if !status.is_success() {
            return Err(JudgeError::Failed(format!(
                "{}: {status}: {}",
                self.url,
                first_line(&text)
            )));
        }
        content(&text).map_err(|why| JudgeError::Failed(format!("{}: {why}", self.url)))
    }

    fn failed(&self, error: &ureq::Error) -> JudgeError {
        match error {
            ureq::Error::Timeout(_) => {
                JudgeError::Timeout(u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX))
            }
            other => JudgeError::Failed(format!("{}: {other}", self.url)),
        }
    }
}

/// What was said; an answer without text is an empty text, which no judge takes for a verdict.
fn content(body: &str) -> Result<String, String> {
    let answer: Answer = serde_json::from_str(body).map_err(|e| {
        format!(
            "the answer is no chat completion: {e}: {}",
            first_line(body)
        )
    })?;
    let choice = answer
        .choices
        .into_iter()
        .next()
        .ok_or("the answer has no choice")?;
    Ok(choice.message.content.unwrap_or_default())
}

fn first_line(text: &str) -> String {
    text.trim()
        .lines()
        .next()
        .unwrap_or_default()
        .chars()
        .take(SHOWN)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::Message;
    use futures_executor::block_on;
    use std::{
        io::{BufRead, BufReader, Read, Write},
        net::{TcpListener, TcpStream},
        sync::mpsc::{Receiver, channel},
        thread,
    };

    /// Answers one request with this text and tells what was asked; `None` = never answers.
    fn server(answer: Option<&'static str>) -> (String, Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/", listener.local_addr().unwrap());
        let (asked, request) = channel();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            asked.send(read(&stream)).unwrap();
            match answer {
                Some(answer) => (&stream).write_all(answer.as_bytes()).unwrap(),
                // Until the client goes away.
                None => drop((&stream).read(&mut [0; 1])),
            }
        });
        (url, request)
    }

    fn read(stream: &TcpStream) -> String {
        let mut reader = BufReader::new(stream);
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if line == "\r\n" {
                break;
            }
            if let Some(n) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = n.trim().parse().unwrap();
            }
            head.push_str(&line);
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        format!("{head}{}", String::from_utf8(body).unwrap())
    }

    fn ask(url: &str, key: Option<&str>, timeout: u64) -> Result<String, JudgeError> {
        let timeout = Duration::from_millis(timeout);
        let model = OpenAiTextModel::new(url, key.map(str::to_owned), "judge-1", timeout).unwrap();
        block_on(model.complete(TextRequest {
            messages: vec![Message::system("grade"), Message::user("this")],
            max_tokens: 64,
            temperature: 0.5,
            seed: 7,
        }))
    }

    #[test]
    fn asks_and_reads_an_answer() {
        let (url, request) = server(Some(
            "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{\"choices\":[{\"message\":{\"content\":\"\\\\boxed{1}\"}}]}",
        ));
        assert_eq!(
            ask(&url, Some("sk-secret"), 20_000),
            Ok("\\boxed{1}".to_owned())
        );
        let asked = request.recv().unwrap();
        assert!(asked.starts_with("POST /v1/chat/completions "), "{asked}");
        assert!(asked.contains("Bearer sk-secret"), "{asked}");
        let (_, body) = asked.split_at(asked.find('{').unwrap());
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(
            body,
            serde_json::json!({
                "model": "judge-1",
                "messages": [
                    {"role": "system", "content": "grade"},
                    {"role": "user", "content": "this"},
                ],
                "max_tokens": 64,
                "temperature": 0.5,
                "seed": 7,
            })
        );
    }

    #[test]
    fn errors_say_status_and_first_line_and_never_the_key() {
        let (url, _request) = server(Some(
            "HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\n\r\nslow down\nsecond line",
        ));
        let error = ask(&url, Some("sk-secret"), 20_000)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("429") && error.contains("slow down"),
            "{error}"
        );
        assert!(
            !error.contains("second line") && !error.contains("secret"),
            "{error}"
        );
    }

    #[test]
    fn what_is_no_completion_is_an_error() {
        for body in ["<html>", "{\"choices\":[]}", "{}"] {
            assert!(content(body).is_err(), "{body}");
        }
        assert_eq!(
            content("{\"choices\":[{\"message\":{\"content\":null}}]}"),
            Ok(String::new())
        );
    }

    #[test]
    fn nobody_there_and_nobody_answering_are_errors() {
        let free = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let error = ask(&format!("http://{free}/v1"), Some("sk-secret"), 20_000).unwrap_err();
        assert!(
            matches!(&error, JudgeError::Failed(why) if !why.contains("secret")),
            "{error}"
        );
        let (url, _request) = server(None);
        assert_eq!(ask(&url, None, 100), Err(JudgeError::Timeout(100)));
    }
}
