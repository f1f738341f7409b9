"""OpenClaw: a tool round trip of its local agent, then turns, a compaction and a heartbeat of its gateway."""

import json
import urllib.request

from harness import install as put
from harness.case import call, check, end_group, free_port, main, patient, side

QUICK = True
PINS = ["openclaw@2026.9.6"]
FIRST, SECOND = "agent:main:main", "agent:main:second"
SCRIPT = [
    {"when": r"Write an Activity recap", "text": "Looked at a note."},
    {"when": r"You are a context summarization assistant", "text": "The word was plum."},
    {"when": r"ZETA after the heartbeat", "text": "Welcome back."},
    {"when": r"Telegram reaction added", "text": "NO_REPLY"},
    {"when": r"EPSILON after the summary", "text": "All is summed up."},
    {"when": r"GAMMA and now", "text": "Now all is done."},
    {"when": r"BETA and again", "text": "Still here.", "token_ms": 2},
    {"when": r"DELTA good day", "text": "Good day to you."},
    {"when": r"The word is kiwi", "text": "The note says kiwi.", "token_ms": 2},
    {"when": r"ALPHA what", "times": 1, "text": "I look.\n" + call("exec", command="cat note.txt")},
]


def install():
    return put.npm("openclaw", PINS)


def configure(case, port, api="openai-completions"):
    # Anthropic's API is told the address without version.
    url = case.url if api == "anthropic-messages" else f"{case.url}/v1"
    model = {
        "id": "my-model",
        "name": "My model",
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": 30000,
        "maxTokens": 2048,
        "compat": {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True},
    }
    provider = {"baseUrl": url, "apiKey": "local", "api": api, "timeoutSeconds": 120, "models": [model]}
    defaults = {
        "workspace": str(case.work),
        "model": {"primary": "local/my-model"},
        "models": {"local/my-model": {}},
        "utilityModel": "local/my-model",
    }
    config = {
        "models": {"mode": "merge", "providers": {"local": provider}},
        "agents": {"defaults": defaults},
        "gateway": {
            "mode": "local",
            "port": port,
            "auth": {"mode": "token", "token": "local"},
            "http": {"endpoints": {"chatCompletions": {"enabled": True}}},
        },
    }
    folder = case.home / ".openclaw"
    folder.mkdir(exist_ok=True)
    (folder / "openclaw.json").write_text(json.dumps(config))


def local(case, text, session=FIRST):
    """What the agent shows for a message, without a gateway."""
    command = ["openclaw", "agent", "--local", "--session-key", session, "--json", "--message", text]
    return [one["text"] for one in json.loads(case.run(command, timeout=400))["payloads"]]


def scenario(case):
    (case.work / "note.txt").write_text("The word is kiwi.\n")
    port = free_port()
    configure(case, port)

    remote = ["--url", f"ws://127.0.0.1:{port}", "--token", "local"]

    def gateway(text, session=SECOND):
        """A turn of the running gateway, asked through its own chat completions."""
        body = {"model": "openclaw", "messages": [{"role": "user", "content": text}]}
        headers = {
            "content-type": "application/json",
            "authorization": "Bearer local",
            "x-openclaw-session-key": session,
        }
        where = f"http://127.0.0.1:{port}/v1/chat/completions"
        with patient(urllib.request.Request(where, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    def ask(method, **params):
        """A call over the gateway's own socket."""
        command = ["openclaw", "gateway", "call", method, "--params", json.dumps(params), "--json", *remote]
        return json.loads(case.run(command))

    # The agent alone, with a tool.
    check(local(case, "ALPHA what does the note say?") == ["The note says kiwi."], "the first answer is not shown")

    # In another session a turn over the gateway's socket, two by its chat completions, a compaction, and a turn
    # after it; beside them recaps.
    running = case.spawn(["openclaw", "gateway", "run", "--port", port], log="gateway.log")
    patient(f"http://127.0.0.1:{port}/health").close()
    ask("chat.send", sessionKey=SECOND, message="DELTA good day", idempotencyKey="one")
    case.wait_said("Good day to you.")
    check(gateway("BETA and again?") == "Still here.", "the gateway's second answer is not shown")
    check(gateway("GAMMA and now?") == "Now all is done.", "the gateway's third answer is not shown")
    check(ask("sessions.compact", key=SECOND)["compacted"] is True, "nothing was compacted")
    check(gateway("EPSILON after the summary") == "All is summed up.", "the answer after the compaction is not shown")

    # A heartbeat in the first session, that answers nothing, and the person's next words there.
    event = "Telegram reaction added: thumbs down by Alice on msg 42"
    case.run(["openclaw", "system", "event", "--mode", "now", "--text", event, *remote])
    case.wait_said("NO_REPLY")
    check(gateway("ZETA after the heartbeat", FIRST) == "Welcome back.", "the answer after the heartbeat is not shown")
    case.wait_said("Looked at a note.")
    case.settle()
    end_group(running)

    turns = case.tape.turns()
    names = [e.headers["session_id"] for e in turns if "session_id" in e.headers]
    first, second = names[0], names[2]
    check(first.endswith(":0") and second.endswith(":0"), f"session headers are {first} and {second}")
    bare = second.removesuffix(":0")
    # Every request ends in a message that is in no later one, so that no turn's tokens go on in the next.
    case.expect(
        [
            [
                main("openclaw"),
                main("openclaw", 0),
                side("openclaw: heartbeat", 1),
                # The silent heartbeat is not in the history: the person answers what they saw.
                main("openclaw", 1),
            ],
            [main("openclaw"), main("openclaw", 0), main("openclaw", 1)],
            [main("openclaw")],
            [side("openclaw: compaction")],
        ],
        ids=[first, second, f"{bare}:1", bare],
        beside=[side("openclaw: activity recap")],
    )
    said = [m["content"] for m in dict(case.sessions())[first][1]["next_state"]]
    check(len(said) == 1 and said[0].endswith("ZETA after the heartbeat"), f"what followed the answer is {said}")
    case.audit()
