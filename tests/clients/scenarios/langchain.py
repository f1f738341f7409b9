"""langchain-openai: a tool round trip and streaming."""

from harness import install as put
from harness.case import call, main

from .python_sdks import SDK

QUICK = True
PINS = ["langchain-openai==1.7.4"]
SCRIPT = [
    {"when": r"\ncount\n", "text": "one two three four five", "token_ms": 5},
    {"when": r"weather result", "text": "It is sunny in Ulm."},
    {"when": r"weather in Ulm", "times": 1, "text": "Let me look.\n" + call("get_weather", city="Ulm")},
]


def install():
    return put.pip("langchain", PINS)


def scenario(case):
    case.run([case.installed / "bin" / "python", SDK / "langchain_client.py", case.url])
    # No id, so that the history alone says which session it is; the header names the other one.
    case.expect([[main("default"), main("default", 0, True), main("default", 1, True)], [main("default")]], ids=[None, "named"])
    case.audit()
