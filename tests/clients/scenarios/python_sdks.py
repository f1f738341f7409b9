"""The openai and anthropic Python SDKs."""

import pathlib

from harness import install as put
from harness.case import check, main

QUICK = True
PINS = ["openai==3.57.0", "anthropic==2.14.0"]
SDK = pathlib.Path(__file__).resolve().parent.parent / "sdk"
SCRIPT = [
    {"when": r"\ncount\n", "text": "one two three four five", "token_ms": 5},
    {"when": "weather result", "text": "It is sunny in Ulm."},
    {"when": "weather", "text": 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'},
]
ONE = [main("default")]
# Asked, answered by the tool; the streamed history ends in a third turn.
TWO = [main("default"), main("default", 0, True)]
THREE = [*TWO, main("default", 1, True)]
# What each part of the client's script leaves behind, in its order: `chat`, `responses`, `messages`.
SESSIONS = [THREE, ONE, THREE, ONE, ONE, TWO, ONE, ONE]
NAMES = ["chat", "chat-stream", "responses", None, None, "messages"]


def install():
    return put.pip("python-sdks", PINS)


def scenario(case):
    case.run([case.installed / "bin" / "python", SDK / "python_sdks.py", case.url])
    checks(case)


def checks(case):
    case.expect(SESSIONS, NAMES)
    for name in ("chat", "responses", "messages"):
        turns = case.session(name)
        check(all(t["next_state"] for t in turns[:-1]), f"{name}: an answered turn has no next state")
        check(not turns[-1]["next_state"], f"{name}: the last turn has a next state")
    case.audit(refused=1)
