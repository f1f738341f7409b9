"""OpenClaw over the two other APIs it speaks: a tool round trip and a second turn with each."""

import re

from harness.case import call, check, free_port, main

from .openclaw import PINS, configure, install, local  # noqa: F401

QUICK = False
SCRIPT = [
    {"when": r"BETA and again", "text": "Still kiwi.", "token_ms": 2},
    {"when": r"The word is kiwi", "text": "The note says kiwi.", "token_ms": 2},
    {"when": r"ALPHA what", "text": "I look.\n" + call("exec", command="cat note.txt")},
]


def scenario(case):
    (case.work / "note.txt").write_text("The word is kiwi.\n")
    for api, session in (("openai-responses", "agent:main:one"), ("anthropic-messages", "agent:main:two")):
        configure(case, free_port(), api)
        check(local(case, "ALPHA what does the note say?", session) == ["The note says kiwi."], f"{api}: first answer")
        check(local(case, "BETA and again?", session) == ["Still kiwi."], f"{api}: second answer")
    # With responses the passing message stays in place while a tool is called.
    kept = [main("openclaw"), main("openclaw", 0, True), main("openclaw", 1)]
    moved = [main("openclaw"), main("openclaw", 0), main("openclaw", 1)]
    turns = case.tape.turns()
    # Responses name the session in the body; messages only in a line of the system prompt.
    runtime = re.search(r"sessionId=([\w-]+)", str(turns[3].body["system"]))
    case.expect([kept, moved], ids=[turns[0].body["prompt_cache_key"], runtime.group(1)])
    case.audit()
