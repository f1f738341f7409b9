"""aider: two messages of a chat, an edit, and the commit message that it asks for beside it."""

from harness import install as put
from harness.case import check, main, side

QUICK = False
PINS = ["aider-chat==0.86.2"]
EDIT = """note.txt
```
<<<<<<< SEARCH
The word is kiwi.
=======
The word is plum.
>>>>>>> REPLACE
```
"""
SCRIPT = [
    {"when": r"one-line Git commit messages", "text": "docs: change the word"},
    {"when": r"BETA change the word", "text": EDIT, "token_ms": 2},
    {"when": r"ALPHA what does the note say", "text": "The note says kiwi.", "token_ms": 2},
]


def install():
    return put.pip("aider", PINS)


def scenario(case):
    (case.work / "note.txt").write_text("The word is kiwi.\n")
    case.git("init", "-q")
    case.git("add", "note.txt")
    case.git("commit", "-q", "-m", "Begin")
    env = {"OPENAI_API_BASE": f"{case.url}/v1", "OPENAI_API_KEY": "local"}
    flags = ["--model", "openai/my-model", "--yes-always", "--no-analytics", "--no-check-update", "--no-show-release-notes"]
    flags += ["--no-show-model-warnings", "--no-fancy-input", "--no-pretty", "--no-gitignore", "--edit-format", "diff", "--map-tokens", "0"]
    words = "ALPHA what does the note say?\nBETA change the word to plum.\n/exit\n"
    said = case.run(["aider", *flags, "note.txt"], env, stdin=words)
    check("The note says kiwi." in said, "the first answer is not shown")
    check((case.work / "note.txt").read_text() == "The word is plum.\n", "the edit was not made")
    check("docs: change the word" in case.git("log", "-1", "--format=%s"), "the commit message was not taken")
    # It takes its format rules out of the answered message, so that the history is another text and the same conversation.
    case.expect([[main("aider"), main("aider", 0)], [side("aider: commit message")]])
    case.audit()
