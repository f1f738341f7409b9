"""Claude Code: a tool round trip, a continued session, a sub-agent, /compact and what comes after it."""

from harness import install as put
from harness.case import RESULT, asked, call, check, main, side

QUICK = True
PINS = ["@anthropic-ai/claude-code@2.1.332"]
HELPER = call(
    "Agent", description="Find the word", prompt="DELTA find the word", subagent_type="general-purpose", run_in_background=False
)
SCRIPT = [
    {"when": r"Respond with TEXT ONLY", "text": "<analysis>All was said.</analysis>\n<summary>The note said kiwi.</summary>"},
    {"when": r"GAMMA and now\?", "text": "Now all is done."},
    {"when": rf"BETA ask a helper(.|\n)*{RESULT}", "text": "The helper found plum.", "token_ms": 2},
    {"when": r"BETA ask a helper", "times": 1, "text": HELPER},
    {"when": r"DELTA find the word", "text": "The word is plum."},
    {"when": rf"kiwi(.|\n)*{RESULT}", "text": "The note says kiwi.", "token_ms": 2},
    {"when": r"ALPHA", "times": 1, "text": "I look.\n" + call("Bash", command="cat note.txt", description="Read the note")},
]


def install():
    return put.npm("claude-code", PINS)


def scenario(case):
    (case.work / "note.txt").write_text("kiwi\n")
    env = {
        "ANTHROPIC_BASE_URL": case.url,
        "ANTHROPIC_AUTH_TOKEN": "local",
        "ANTHROPIC_MODEL": "my-model",
        "ANTHROPIC_SMALL_FAST_MODEL": "my-model",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }

    def claude(text, *more):
        return case.run(["claude", "-p", "--dangerously-skip-permissions", *more, text], env).strip()

    check(claude("ALPHA what does the note say?") == "The note says kiwi.", "the first answer is not shown")
    check(claude("BETA ask a helper", "--continue") == "The helper found plum.", "the second answer is not shown")
    claude("/compact", "--continue")
    check(claude("GAMMA and now?", "--continue") == "Now all is done.", "the answer after /compact is not shown")
    case.expect(
        [
            [
                main("claude-code"),
                main("claude-code", 0, True),
                main("claude-code", 1, True),
                main("claude-code", 2, True),
                # It asks for the summary without our last answer: the newest that stands in the request is the call before.
                side("claude-code: compaction", 2),
                main("claude-code", 3, False),
            ],
            [side("claude-code: sub-agent")],
        ]
    )
    case.audit()
