"""OpenCode: its title call, a tool round trip, a continued session, a sub-agent, a compaction and the turn after it."""

import json

from harness import install as put
from harness.case import RESULT, asked, call, check, main, side

QUICK = True
PINS = ["opencode-ai@1.18.33"]
HELPER = call("task", description="Find the word", prompt="EPSILON find the word", subagent_type="general")
# Tokens of its system prompt and tools, about; and of a reply, at most.
BASE = 7200
OUTPUT = 2048
SCRIPT = [
    {"when": r"You are a title generator", "text": "About a note"},
    {"when": r"context summarization agent", "text": "The note said kiwi."},
    {"when": "GAMMA and now|Continue if you have next steps", "text": "Now all is done."},
    {"when": rf"DELTA(.|\n)*{RESULT}", "text": "The helper found plum."},
    {"when": asked("EPSILON find the word"), "text": "The word is plum."},
    {"when": r"DELTA ask a helper", "times": 1, "text": HELPER},
    {"when": r"BETA and again\?[^\n]*\nassistant\n$", "text": "Still kiwi.", "token_ms": 2},
    {"when": rf"kiwi(.|\n)*{RESULT}", "text": "The note says kiwi.", "token_ms": 2},
    {"when": r"ALPHA", "times": 1, "text": "I look.\n" + call("bash", command="cat note.txt", description="Read the note")},
]


def install():
    return put.npm("opencode", PINS)


def configure(case, context):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Local",
        "options": {"baseURL": f"{case.url}/v1", "apiKey": "local"},
        "models": {"my-model": {"limit": {"context": context, "output": OUTPUT}, "tool_call": True}},
    }
    config = {"provider": {"local": provider}, "model": "local/my-model", "autoupdate": False, "share": "disabled"}
    (case.work / "opencode.json").write_text(json.dumps(config))


def scenario(case):
    (case.work / "note.txt").write_text("The word is kiwi.\n" * 500)
    configure(case, 30000)
    env = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}

    def opencode(text, *how):
        return case.run(["opencode", "run", "--auto", *how, text], env).strip()

    first = opencode("ALPHA what does the note say?")
    check("The note says kiwi." in first, f"the first answer is not shown: {first}")
    check("Still kiwi." in opencode("BETA and again?", "--continue"), "the second answer is not shown")
    helped = opencode("DELTA ask a helper", "--continue")
    check("The helper found plum." in helped, f"the helper's answer is not shown: {helped}")
    # With so small a context the long note does not fit any more, and it compacts before it asks.
    configure(case, BASE + 1500 + OUTPUT)
    check("Now all is done." in opencode("GAMMA and now?", "--continue"), "the answer after the compaction is not shown")
    turns = case.tape.turns()
    case.expect(
        [
            [
                side("opencode: title"),
                side("opencode: compaction"),
                main("opencode"),
                main("opencode", 2, True),
                main("opencode", 3, True),
                main("opencode", 4, True),
                main("opencode", 5, True),
                # Its summary stands before what it kept of the history.
                main("opencode", 6, False),
            ],
            [side("opencode: sub-agent")],
        ],
        ids=[turns[0].headers["x-session-id"]],
    )
    case.audit()
