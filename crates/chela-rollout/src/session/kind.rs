//! Main or side, and why: what the client says, else what is known of the client (one table), else main.

use crate::session::normal;
use chela_core::{ChatRequest, DeclaredKind, Message, Role, TurnKind};
use serde_json::Value;

/// What turns of clients without rules are, when they say nothing themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownClients {
    /// They may be trained on.
    #[default]
    Main,
    /// They are served and kept.
    Side,
}

/// One thing that can be seen in a request.
enum Sign {
    /// It offers no tools.
    NoTools,
    /// The first system message begins so.
    System(&'static str),
    /// A system message holds this.
    SystemHolds(&'static str),
    /// The first thing the user says begins so.
    FirstUser(&'static str),
    /// The last thing the user says begins so.
    LastUser(&'static str),
    /// The last thing the user says holds this.
    LastUserHolds(&'static str),
    /// A header is there.
    Header(&'static str),
    /// A header has this value.
    HeaderIs(&'static str, &'static str),
    /// A header is a JSON object with this text under this name.
    HeaderSays(&'static str, &'static str, &'static str),
    /// A header begins so.
    HeaderBegins(&'static str, &'static str),
}

/// All signs seen = the rule holds.
struct Rule {
    client: &'static str,
    what: &'static str,
    kind: TurnKind,
    signs: &'static [Sign],
}

const fn side(client: &'static str, what: &'static str, signs: &'static [Sign]) -> Rule {
    Rule {
        client,
        what,
        kind: TurnKind::Side,
        signs,
    }
}

const fn main(client: &'static str, signs: &'static [Sign]) -> Rule {
    Rule {
        client,
        what: "",
        kind: TurnKind::Main,
        signs,
    }
}

use Sign::*;

const CODEX_META: &str = "x-codex-turn-metadata";
/// In every system prompt of ZeroClaw that comes with tools.
const ZEROCLAW: Sign = SystemHolds("## CRITICAL: Tool Honesty\n");

/// The first that holds decides. Side calls first: a main rule only names a client.
const RULES: &[Rule] = &[
    side(
        "openclaw",
        "activity recap",
        &[NoTools, System("Write an Activity recap")],
    ),
    side(
        "openclaw",
        "title",
        &[NoTools, System("Generate a concise session title")],
    ),
    side(
        "openclaw",
        "compaction",
        &[NoTools, System("You are a context summarization assistant")],
    ),
    side(
        "openclaw",
        "memory flush",
        &[LastUser("Pre-compaction memory flush.")],
    ),
    side(
        "openclaw",
        "memory flush",
        &[HeaderIs("x-trigger", "memory")],
    ),
    side(
        "openclaw",
        "heartbeat",
        &[LastUser("Follow the heartbeat monitor scratch context")],
    ),
    side(
        "openclaw",
        "heartbeat",
        &[LastUser("[OpenClaw heartbeat poll]")],
    ),
    side(
        "openclaw",
        "heartbeat",
        &[HeaderIs("x-trigger", "heartbeat")],
    ),
    side("zeroclaw", "cron", &[ZEROCLAW, LastUser("[cron:")]),
    side("openclaw", "cron", &[FirstUser("[cron:")]),
    side("openclaw", "cron", &[HeaderIs("x-trigger", "cron")]),
    side("openclaw", "sub-agent", &[FirstUser("[Subagent Context]")]),
    side(
        "openclaw",
        "sub-agent announce",
        &[
            LastUserHolds("[Inter-session message]"),
            LastUserHolds("isUser=false"),
        ],
    ),
    side("codex", "sub-agent", &[Header("x-openai-subagent")]),
    side("codex", "memory", &[Header("x-openai-memgen-request")]),
    side(
        "codex",
        "compaction",
        &[HeaderSays(CODEX_META, "request_kind", "compaction")],
    ),
    side(
        "codex",
        "sub-agent",
        &[HeaderSays(CODEX_META, "thread_source", "subagent")],
    ),
    side(
        "codex",
        "compaction",
        &[
            NoTools,
            LastUser("You are performing a CONTEXT CHECKPOINT COMPACTION"),
        ],
    ),
    side(
        "opencode",
        "title",
        &[NoTools, System("You are a title generator")],
    ),
    side(
        "opencode",
        "compaction",
        &[NoTools, System("You are a context summarization agent")],
    ),
    side(
        "claude-code",
        "compaction",
        &[LastUser(
            "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
        )],
    ),
    side("opencode", "sub-agent", &[Header("x-parent-session-id")]),
    side(
        "claude-code",
        "sub-agent",
        &[Header("x-claude-code-agent-id")],
    ),
    side(
        "claude-code",
        "notification",
        &[LastUser("[SYSTEM NOTIFICATION - NOT USER INPUT]")],
    ),
    side(
        "aider",
        "commit message",
        &[NoTools, SystemHolds("one-line Git commit messages")],
    ),
    side(
        "zeroclaw",
        "memory consolidation",
        &[NoTools, System("You are a memory consolidation engine")],
    ),
    side(
        "zeroclaw",
        "heartbeat",
        &[ZEROCLAW, LastUserHolds("[Heartbeat Task | ")],
    ),
    side(
        "zeroclaw",
        "reply intent",
        &[
            NoTools,
            LastUser("Decide whether the assistant should send any visible reply"),
        ],
    ),
    side(
        "zeroclaw",
        "skill",
        &[
            NoTools,
            System("You convert a completed task execution into a reusable agent skill"),
        ],
    ),
    main("openclaw", &[HeaderIs("x-trigger", "user")]),
    main("openclaw", &[Header("session_id"), Header("traceparent")]),
    // Without a plugin, and over the APIs that carry no session header.
    main("openclaw", &[System("<!-- openclaw:attempt:")]),
    main("codex", &[HeaderSays(CODEX_META, "request_kind", "turn")]),
    main("opencode", &[HeaderBegins("user-agent", "opencode/")]),
    main("claude-code", &[HeaderBegins("user-agent", "claude-cli/")]),
    main("aider", &[SystemHolds("SEARCH/REPLACE")]),
    main("zeroclaw", &[ZEROCLAW]),
];

/// What decides beside the request itself.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings {
    /// Earlier turns of the session had tools.
    pub session_has_tools: bool,
    /// The key is a session key: a trainer asks, and what it asks is to be trained on.
    pub session_key: bool,
    /// What to do with clients that no rule knows.
    pub unknown: UnknownClients,
}

/// Main or side, and the reason as people read it. `Private` is settled before.
pub fn kind(request: &ChatRequest, around: Surroundings) -> (TurnKind, String) {
    match request.hints.kind {
        Some(DeclaredKind::Main) => return (TurnKind::Main, "X-Turn-Type: main".to_owned()),
        Some(DeclaredKind::Side | DeclaredKind::Private) => {
            return (TurnKind::Side, "X-Turn-Type: side".to_owned());
        }
        None => {}
    }
    let rule = RULES
        .iter()
        .find(|r| r.signs.iter().all(|s| s.seen(request)));
    match rule {
        Some(rule) if rule.kind == TurnKind::Side => {
            return (TurnKind::Side, format!("{}: {}", rule.client, rule.what));
        }
        _ if around.session_has_tools && request.conversation.tools.is_empty() => {
            let why = "a call without tools in a session whose others have them";
            return (TurnKind::Side, why.to_owned());
        }
        Some(rule) => return (TurnKind::Main, rule.client.to_owned()),
        None => {}
    }
    match around.unknown {
        _ if around.session_key => (TurnKind::Main, "session key".to_owned()),
        UnknownClients::Main => (TurnKind::Main, "default".to_owned()),
        UnknownClients::Side => (
            TurnKind::Side,
            "no X-Turn-Type from a client without rules".to_owned(),
        ),
    }
}

impl Sign {
    fn seen(&self, request: &ChatRequest) -> bool {
        let messages = &request.conversation.messages;
        let header = |name: &str| {
            request
                .hints
                .headers
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, v)| v.as_str())
        };
        match self {
            NoTools => request.conversation.tools.is_empty(),
            System(text) => of(messages, Role::System)
                .next()
                .is_some_and(|t| t.starts_with(text)),
            SystemHolds(text) => of(messages, Role::System).any(|t| t.contains(text)),
            FirstUser(text) => of(messages, Role::User)
                .next()
                .is_some_and(|t| t.starts_with(text)),
            LastUser(text) => last_user(messages).is_some_and(|t| t.starts_with(text)),
            LastUserHolds(text) => last_user(messages).is_some_and(|t| t.contains(text)),
            Header(name) => header(name).is_some(),
            HeaderIs(name, value) => header(name).is_some_and(|v| v.eq_ignore_ascii_case(value)),
            HeaderBegins(name, begin) => header(name).is_some_and(|v| v.starts_with(begin)),
            HeaderSays(name, field, value) => header(name)
                .and_then(|v| serde_json::from_str::<Value>(v).ok())
                .is_some_and(|v| v.get(field).and_then(Value::as_str) == Some(*value)),
        }
    }
}

/// What this role says, without times before it, oldest first; passing messages left out.
fn of(messages: &[Message], role: Role) -> impl DoubleEndedIterator<Item = &str> {
    messages
        .iter()
        .filter(move |m| m.role == role && !normal::is_passing(m))
        .map(|m| normal::spoken(&m.content))
}

/// The last thing a user says; it stays the last while tools answer, so a heartbeat with tool calls stays a heartbeat.
fn last_user(messages: &[Message]) -> Option<&str> {
    of(messages, Role::User).next_back()
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::{Conversation, RequestHints, Tool};

    fn around() -> Surroundings {
        Surroundings {
            session_has_tools: false,
            session_key: false,
            unknown: UnknownClients::Main,
        }
    }

    fn request(messages: Vec<Message>, tools: usize, headers: &[(&str, &str)]) -> ChatRequest {
        let tool = Tool {
            name: "t".to_owned(),
            definition: "{}".to_owned(),
        };
        ChatRequest {
            conversation: Conversation {
                messages,
                tools: vec![tool; tools],
                template_args: None,
            },
            hints: RequestHints {
                headers: headers
                    .iter()
                    .map(|(n, v)| ((*n).into(), (*v).into()))
                    .collect(),
                ..RequestHints::default()
            },
            choices: 1,
            ..ChatRequest::default()
        }
    }

    #[test]
    fn known_side_calls_are_named() {
        let meta = r#"{"request_kind":"compaction","thread_source":"user"}"#;
        let sub = r#"{"request_kind":"turn","thread_source":"subagent"}"#;
        let say = |s: &str, u: &str| vec![Message::system(s), Message::user(u)];
        let claw =
            "## CRITICAL: No Tool Narration\n\nNever.\n\n## CRITICAL: Tool Honesty\n\n- Never.";
        let claw_beat = "[Memory context]\n- fruit: kiwi\n[/Memory context]\n\n[2026-11-30 02:07:00 +00:00] [Heartbeat Task | decision] You are";
        let beat = "[Mon 2026-11-30 02:07 UTC] Follow the heartbeat monitor scratch context now";
        let cases = [
            (
                request(say("Write an Activity recap of", "x"), 0, &[]),
                "openclaw: activity recap",
            ),
            (request(say("s", beat), 12, &[]), "openclaw: heartbeat"),
            (
                request(say("s", "Pre-compaction memory flush. Go"), 2, &[]),
                "openclaw: memory flush",
            ),
            (
                request(say("s", "[cron:1 x] do"), 12, &[]),
                "openclaw: cron",
            ),
            (
                request(say("s", "x"), 3, &[("x-codex-turn-metadata", meta)]),
                "codex: compaction",
            ),
            (
                request(say("s", "x"), 3, &[("x-codex-turn-metadata", sub)]),
                "codex: sub-agent",
            ),
            (
                request(say("You are a title generator. Be", "x"), 0, &[]),
                "opencode: title",
            ),
            (
                request(
                    say("generates concise, one-line Git commit messages", "d"),
                    0,
                    &[],
                ),
                "aider: commit message",
            ),
            (
                request(say(claw, claw_beat), 44, &[]),
                "zeroclaw: heartbeat",
            ),
            (
                request(
                    say(claw, "[2026-11-30 02:07:00 +00:00] [cron:1 x] do"),
                    39,
                    &[],
                ),
                "zeroclaw: cron",
            ),
            (
                request(
                    say(
                        "## Your Task",
                        "Decide whether the assistant should send any visible reply to",
                    ),
                    0,
                    &[],
                ),
                "zeroclaw: reply intent",
            ),
            (
                request(
                    say("You are a memory consolidation engine. Given", "x"),
                    0,
                    &[],
                ),
                "zeroclaw: memory consolidation",
            ),
        ];
        for (request, reason) in cases {
            assert_eq!(
                kind(&request, around()),
                (TurnKind::Side, reason.to_owned())
            );
        }
    }

    #[test]
    fn what_the_client_says_wins() {
        let mut one = request(vec![Message::system("You are a title generator.")], 0, &[]);
        one.hints.kind = Some(DeclaredKind::Main);
        assert_eq!(kind(&one, around()).0, TurnKind::Main);
        let mut two = request(vec![Message::user("hi")], 0, &[]);
        two.hints.kind = Some(DeclaredKind::Side);
        assert_eq!(kind(&two, around()).0, TurnKind::Side);
    }

    #[test]
    fn no_tools_where_others_have_them_is_side() {
        let plain = request(vec![Message::user("hi")], 0, &[]);
        assert_eq!(
            kind(&plain, around()),
            (TurnKind::Main, "default".to_owned())
        );
        let with = Surroundings {
            session_has_tools: true,
            ..around()
        };
        assert_eq!(kind(&plain, with).0, TurnKind::Side);
        assert_eq!(
            kind(&request(vec![Message::user("hi")], 1, &[]), with).0,
            TurnKind::Main
        );
    }

    #[test]
    fn unknown_clients_follow_the_configuration() {
        let strict = Surroundings {
            unknown: UnknownClients::Side,
            ..around()
        };
        let plain = request(vec![Message::user("hi")], 0, &[]);
        assert_eq!(kind(&plain, strict).0, TurnKind::Side);
        let known = request(
            vec![Message::user("hi")],
            1,
            &[("user-agent", "opencode/1.18")],
        );
        assert_eq!(
            kind(&known, strict),
            (TurnKind::Main, "opencode".to_owned())
        );
        let claw = Message::system("Think.\n\n## CRITICAL: Tool Honesty\n\n- Never.");
        assert_eq!(
            kind(&request(vec![claw, Message::user("hi")], 44, &[]), strict),
            (TurnKind::Main, "zeroclaw".to_owned())
        );
        let keyed = Surroundings {
            session_key: true,
            ..strict
        };
        assert_eq!(kind(&plain, keyed).0, TurnKind::Main);
    }
}
