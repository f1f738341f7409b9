"""ZeroClaw: a tool round trip and the skill it makes of it, a conversation with a helper that is taken up again, then its daemon: a task of its
clock and a heartbeat."""

import os
import pathlib
import shutil
import subprocess

from harness import install as put
from harness.case import RESULT, asked, call, check, end_group, main, side

QUICK = False
VERSION = "0.8.7"
BUILD = f"cargo +nightly install zeroclaw@{VERSION} --locked --no-default-features --features agent-runtime"
# It takes a text for one with tool calls when there are values in tags, and makes a skill of two and more.
STEPS = 'The note says kiwi. <step>{"n": 1}</step><step>{"n": 2}</step>'
SKILL = "---\nname: read-a-note\ndescription: Reads a note to the person.\n---\n\nRead the note and say its word to the person."
SCRIPT = [
    {"when": r"You convert a completed task", "text": SKILL},
    {"when": r"You are a heartbeat scheduler", "text": "run: 1"},
    {"when": asked("ETA what is my favourite fruit?"), "text": "NO_REPLY"},
    {"when": asked("ZETA look at the clock"), "text": "It is time."},
    {"when": asked("GAMMA and now?"), "text": "Now all is done."},
    {"when": rf"DELTA ask a helper(.|\n)*{RESULT}", "text": "The helper found plum.", "token_ms": 2},
    {"when": asked("EPSILON find the word"), "text": "The word is plum."},
    {"when": asked("DELTA ask a helper"), "text": "I ask.\n" + call("spawn_subagent", prompt="EPSILON find the word")},
    {"when": rf"BETA keep(.|\n)*{RESULT}", "text": "I keep it.", "token_ms": 2},
    {"when": asked("BETA keep that my favourite fruit is kiwi"), "text": call("memory_store", key="favourite_fruit", content="The favourite fruit is kiwi.", category="core")},
    {"when": rf"kiwi(.|\n)*{RESULT}", "text": STEPS},
    {"when": r"ALPHA", "times": 1, "text": "I look.\n" + call("shell", command="cat note.txt")},
]
CONFIG = """
schema_version = 3
[providers.models.custom.local]
uri = "{url}/v1"
api_key = "local"
model = "my-model"
native_tools = true
[risk_profiles.main]
level = "full"
[agents.main]
enabled = true
model_provider = "custom.local"
risk_profile = "main"
[memory]
min_relevance_score = 0.0
[heartbeat]
enabled = true
agent = "main"
interval_minutes = 1
[skills.skill_creation]
enabled = true
reflection_enabled = true
"""


def install():
    """A folder with the program that $ZEROCLAW names, else the one on PATH: it is too long in building to be built for a test."""
    program = os.environ.get("ZEROCLAW") or shutil.which("zeroclaw")
    if program is None:
        raise put.Absent(f"$ZEROCLAW names no program and PATH has none; build it with: {BUILD}")
    said = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    if VERSION not in said:
        raise RuntimeError(f"{program} is {said.strip()}, not {VERSION}; build it with: {BUILD}")
    link = put.cache() / "zeroclaw" / "bin" / "zeroclaw"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(pathlib.Path(program).resolve())
    return link.parent.parent


def scenario(case):
    folder = case.home / ".zeroclaw"
    workspace = folder / "agents" / "main" / "workspace"
    workspace.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(url=case.url))
    (workspace / "note.txt").write_text("The word is kiwi.\n")
    (workspace / "HEARTBEAT.md").write_text("- [high] ETA what is my favourite fruit?\n")
    agent = ["zeroclaw", "agent", "-a", "main"]
    kept = ["--session-state-file", case.work / "kept.json"]

    # One message, not streamed; then a conversation that is streamed, ended, and taken up again.
    check("The note says kiwi." in case.run([*agent, "-m", "ALPHA what does the note say?"]), "the first answer is not shown")
    said = case.run([*agent, *kept], stdin="BETA keep that my favourite fruit is kiwi\nDELTA ask a helper\n/quit\n")
    check("I keep it." in said and "The helper found plum." in said, f"not all answers are shown: {said}")
    check("Now all is done." in case.run([*agent, *kept], stdin="GAMMA and now?\n/quit\n"), "the answer after the pause is not shown")

    case.run(["zeroclaw", "cron", "once", "1s", "ZETA look at the clock", "--agent", "main", "--prompt"])
    running = case.spawn(["zeroclaw", "daemon", "-p", "0"], log="daemon.log")
    case.wait_said("It is time.")
    case.wait_said("NO_REPLY", 120)
    case.settle()
    end_group(running)
    # What it recalls stands before what it is asked.
    heartbeats = [e for e in case.tape.turns() if "[Heartbeat Task | " in e.body["messages"][-1]["content"]]
    recalled = [e.body["messages"][-1]["content"].startswith("[Memory context]\n") for e in heartbeats]
    check(recalled == [True, True], f"heartbeats that recall something: {recalled}")
    case.expect(
        [
            [main("zeroclaw"), main("zeroclaw", 0, True)],
            [main("zeroclaw"), *[main("zeroclaw", i, True) for i in range(4)]],
            # Nothing tells a helper from its agent.
            [main("zeroclaw")],
            [side("zeroclaw: skill")],
            [side("zeroclaw: cron")],
            [side("zeroclaw: heartbeat")],
            [side("zeroclaw: heartbeat")],
        ]
    )
    case.audit()
