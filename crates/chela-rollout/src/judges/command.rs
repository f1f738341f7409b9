//! The judge that is a program: one JSON turn on its standard input, one JSON verdict on its standard output.

use chela_core::{BoxFuture, Judge, JudgeCase, JudgeError, Message, Verdict, VerdictSource};
use serde::{Deserialize, Serialize};
use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Most bytes read of a program's output.
const MOST_OUTPUT: u64 = 1 << 20;

/// What the program reads.
#[derive(Serialize)]
struct Input<'a> {
    turn: String,
    profile: &'a str,
    session: &'a str,
    messages: Vec<Line<'a>>,
    tools: Vec<&'a str>,
    reply: Line<'a>,
    truncated: bool,
    next: Vec<Line<'a>>,
}

#[derive(Serialize)]
struct Line<'a> {
    role: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_error: bool,
}

#[derive(Serialize)]
struct Call<'a> {
    id: &'a str,
    name: &'a str,
    arguments: &'a str,
}

/// What the program writes; nothing, or `null`, when it has nothing to say.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Output {
    #[serde(default)]
    reward: Option<f32>,
    #[serde(default)]
    hint: Option<String>,
    #[serde(default)]
    evidence: Option<String>,
}

fn line(message: &Message) -> Line<'_> {
    Line {
        role: message.role.as_str(),
        content: &message.content,
        tool_calls: message
            .tool_calls
            .iter()
            .map(|c| Call {
                id: &c.id,
                name: &c.name,
                arguments: &c.arguments,
            })
            .collect(),
        tool_call_id: message.tool_call_id.as_deref(),
        is_error: message.is_error,
    }
}

fn failed(why: impl Into<String>) -> JudgeError {
    JudgeError::Failed(why.into())
}

/// See the module. It writes `{"reward": 1 | 0 | -1, "hint": "…", "evidence": "…"}`, all optional.
#[derive(Clone, Debug)]
pub struct CommandJudge {
    command: Vec<String>,
    limit: Duration,
}

impl CommandJudge {
    /// Program and arguments; the program is ended when it takes longer than `limit`.
    pub fn new(command: Vec<String>, limit: Duration) -> Self {
        Self { command, limit }
    }

    fn ask(&self, input: Vec<u8>) -> Result<Option<Verdict>, JudgeError> {
        let (program, arguments) = self
            .command
            .split_first()
            .ok_or_else(|| failed("judge.command is empty"))?;
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| failed(format!("{program}: cannot be started: {e}")))?;
        let stdin = child.stdin.take();
        // Each pipe has its thread: a program may write before it has read everything.
        let writing = thread::spawn(move || {
            if let Some(mut stdin) = stdin {
                // A program that does not want its input may close it.
                let _ = stdin.write_all(&input);
            }
        });
        let stdout = reader(child.stdout.take());
        let stderr = reader(child.stderr.take());
        let status = wait(&mut child, self.limit)?;
        let _ = writing.join();
        let out = stdout.join().unwrap_or_default();
        let err = stderr.join().unwrap_or_default();
        if !status.success() {
            let why = String::from_utf8_lossy(&err)
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned();
            return Err(failed(format!("{program}: {status}: {why}")));
        }
        verdict(&out).map_err(|why| failed(format!("{program}: {why}")))
    }
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            let _ = pipe.take(MOST_OUTPUT).read_to_end(&mut bytes);
        }
        bytes
    })
}

fn wait(child: &mut Child, limit: Duration) -> Result<std::process::ExitStatus, JudgeError> {
    let end = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(10)),
            outcome => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(match outcome {
                    Err(error) => failed(error.to_string()),
                    Ok(_) => {
                        JudgeError::Timeout(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX))
                    }
                });
            }
        }
    }
}

fn verdict(output: &[u8]) -> Result<Option<Verdict>, String> {
    let text = std::str::from_utf8(output).map_err(|_| "its output is not UTF-8".to_owned())?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    let no_verdict = |why: &dyn std::fmt::Display| {
        format!("its output is no verdict ({{\"reward\", \"hint\", \"evidence\"}}): {why}")
    };
    // Serde would take a list for the fields in their order.
    if text.trim().starts_with('[') {
        return Err(no_verdict(&"it is a list"));
    }
    let output: Option<Output> = serde_json::from_str(text.trim()).map_err(|e| no_verdict(&e))?;
    let Some(output) = output else {
        return Ok(None);
    };
    if let Some(reward) = output.reward
        && ![1.0, 0.0, -1.0].contains(&reward)
    {
        return Err(format!("reward {reward} must be 1, 0 or -1"));
    }
    let hints: Vec<String> = output
        .hint
        .into_iter()
        .filter(|h| !h.trim().is_empty())
        .collect();
    if output.reward.is_none() && hints.is_empty() {
        return Ok(None);
    }
    Ok(Some(Verdict {
        judge: "command".to_owned(),
        source: VerdictSource::Rules,
        reward: output.reward,
        hints,
        evidence: output.evidence,
        votes: Vec::new(),
        group: None,
    }))
}

impl Judge for CommandJudge {
    fn name(&self) -> &str {
        "command"
    }

    fn judge<'a>(
        &'a self,
        case: &'a JudgeCase,
    ) -> BoxFuture<'a, Result<Option<Verdict>, JudgeError>> {
        Box::pin(async move {
            let input = Input {
                turn: case.turn.to_string(),
                profile: case.profile.as_str(),
                session: case.session.as_str(),
                messages: case.messages.iter().map(line).collect(),
                tools: case.tools.iter().map(|t| t.definition.as_str()).collect(),
                reply: line(&case.answer),
                truncated: case.truncated,
                next: case.next.messages.iter().map(line).collect(),
            };
            let mut input = serde_json::to_vec(&input).map_err(|e| failed(e.to_string()))?;
            input.push(b'\n');
            let judge = self.clone();
            tokio::task::spawn_blocking(move || judge.ask(input))
                .await
                .map_err(|e| failed(e.to_string()))?
        })
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn ask(script: &str, limit: u64) -> Result<Option<Verdict>, JudgeError> {
        let command = ["sh", "-c", script].map(str::to_owned).to_vec();
        CommandJudge::new(command, Duration::from_millis(limit)).ask(b"{\"turn\":\"t\"}\n".to_vec())
    }

    #[test]
    fn a_program_reads_a_turn_and_writes_a_verdict() {
        let script =
            r#"grep -q '"turn":"t"' && echo '{"reward": -1, "hint": "Run the tests first."}'"#;
        let verdict = ask(script, 20_000).unwrap().unwrap();
        assert_eq!((verdict.reward, verdict.hints.len()), (Some(-1.0), 1));
        assert_eq!(ask("cat >/dev/null", 20_000), Ok(None));
        assert_eq!(ask("echo null", 20_000), Ok(None));
    }

    proptest::proptest! {
        /// Whatever a program prints: a verdict of 1, 0, −1 or a hint, nothing, or an error; never a panic.
        #[test]
        fn any_output_is_a_verdict_nothing_or_an_error(bytes in proptest::prelude::any::<Vec<u8>>(), number in proptest::prelude::any::<f32>()) {
            let json = format!("{{\"reward\": {number}}}");
            for output in [bytes.as_slice(), json.as_bytes()] {
                if let Ok(Some(said)) = super::verdict(output) {
                    proptest::prop_assert!(said.reward.is_none_or(|r| [1.0, 0.0, -1.0].contains(&r)));
                    proptest::prop_assert!(said.reward.is_some() || !said.hints.is_empty());
                }
            }
        }
    }

    #[test]
    fn what_is_no_verdict_is_an_error_not_a_score() {
        for script in [
            "echo 1",
            "echo '{\"reward\": 5}'",
            "echo '{\"score\": 1}'",
            "echo '{\"reward\": NaN}'",
            "echo '{\"reward\": 1e999}'",
            "echo '{\"reward\": -1e38}'",
            "echo '{\"reward\": \"1\"}'",
            "echo '[1]'",
            "echo '{\"reward\": 1}{\"reward\": -1}'",
            "printf '\\377\\376'",
            "echo no >&2; exit 3",
        ] {
            assert!(
                matches!(ask(script, 20_000), Err(JudgeError::Failed(_))),
                "{script}"
            );
        }
        assert_eq!(ask("exec sleep 60", 50), Err(JudgeError::Timeout(50)));
    }
}
