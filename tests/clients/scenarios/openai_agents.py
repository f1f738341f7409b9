"""The OpenAI Agents SDK over responses and over chat completions, each with a tool and a session of two runs."""

from harness import install as put
from harness.case import call, main

from .python_sdks import SDK

QUICK = True
PINS = ["openai-agents==0.24.0"]
SCRIPT = [
    {"when": r"\ncount\n", "text": "one two three four five", "token_ms": 5},
    {"when": r"weather result", "text": "It is sunny in Ulm."},
    {"when": r"weather in Ulm", "text": "Let me look.\n" + call("get_weather", city="Ulm")},
]


def install():
    return put.pip("openai-agents", PINS)


def scenario(case):
    case.run([case.installed / "bin" / "python", SDK / "agents_client.py", case.url])
    # Responses, then chat completions: the same words, and nothing that names a session.
    one = [main("default"), main("default", 0, True), main("default", 1, True)]
    case.expect([one, one])
    case.audit()
