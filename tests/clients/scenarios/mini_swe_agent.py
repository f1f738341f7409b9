"""mini-swe-agent: a step without a call, which it drops from its history, a step with one, and the end."""

from harness import install as put
from harness.case import call, main

QUICK = False
PINS = ["mini-swe-agent==2.4.6"]
END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SCRIPT = [
    {"when": r"The word is kiwi", "text": "The note says kiwi.\n" + call("bash", command=END)},
    {"when": r"Tool call error", "text": "I look.\n" + call("bash", command="cat note.txt")},
    {"when": r"ALPHA what does the note say", "text": "I only talk."},
]


def install():
    return put.pip("mini-swe-agent", PINS)


def scenario(case):
    (case.work / "note.txt").write_text("The word is kiwi.\n")
    env = {
        "OPENAI_API_BASE": f"{case.url}/v1",
        "OPENAI_API_KEY": "local",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
    }
    case.run(["mini", "-m", "openai/my-model", "-t", "ALPHA what does the note say?", "-y", "--exit-immediately"], env)
    # The answer that it dropped is in no later request, so that nothing follows it; the rest goes on in the same session.
    case.expect([[main("default"), main("default"), main("default", 1, True)]])
    case.audit()
