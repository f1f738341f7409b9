"""Codex over the Responses API: a tool round trip, a resumed thread, a compaction and the turn after it."""

from harness import install as put
from harness.case import RESULT, asked, call, check, main, side

QUICK = True
PINS = ["@openai/codex@0.171.0"]
SCRIPT = [
    {"when": asked("GAMMA and now?"), "text": "Now all is done."},
    {"when": r"CONTEXT CHECKPOINT COMPACTION", "text": "The note said kiwi."},
    {"when": asked("BETA and again?"), "text": "Still kiwi.", "token_ms": 2},
    {"when": rf"kiwi(.|\n)*{RESULT}", "text": "The note says kiwi.", "token_ms": 2},
    {"when": r"ALPHA", "times": 1, "text": "I look.\n" + call("exec_command", cmd="cat note.txt")},
]


def install():
    return put.npm("codex", PINS)


CONFIG = """
model = "my-model"
model_provider = "local"
model_context_window = 30000
model_auto_compact_token_limit = {limit}
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "Local"
base_url = "{url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
"""


def scenario(case):
    (case.work / "note.txt").write_text("The word is kiwi.\n")
    (case.home / ".codex").mkdir()
    env = {"LOCAL_KEY": "local"}
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]

    def codex(text, *how, limit=25000):
        (case.home / ".codex" / "config.toml").write_text(CONFIG.format(url=case.url, limit=limit))
        return case.run(["codex", "exec", *how, *flags, text], env).strip()

    check(codex("ALPHA what does the note say?") == "The note says kiwi.", "the first answer is not shown")
    check(codex("BETA and again?", "resume", "--last") == "Still kiwi.", "the second answer is not shown")
    # So small a limit makes it compact its history before it asks.
    check(codex("GAMMA and now?", "resume", "--last", limit=5000) == "Now all is done.", "the third answer is not shown")
    turns = case.tape.turns()
    case.expect(
        [
            [
                main("codex"),
                main("codex", 0, True),
                main("codex", 1, True),
                side("codex: compaction", 2),
                # The history is a summary now: nothing of ours stands in it.
                main("codex"),
            ]
        ],
        ids=[turns[0].headers["thread-id"]],
    )
    case.audit()
