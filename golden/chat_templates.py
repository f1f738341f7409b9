"""Token ids of conversations under the real templates and tokenizers of five model families, by transformers. Rerun: see README.md."""

import argparse
import datetime
import json
import pathlib

from common import HERE, write_json

from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

FAMILIES = ["qwen2_5", "qwen3", "llama3_1", "llama3_2", "gemma3"]
NOW = datetime.datetime(2026, 11, 30, 12, 5, 9)

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather at a place: <now> & \"here\", it's 20 °C in 東京.",
    "parameters": {"type": "object", "properties": {
        "zeta": {"type": "string", "description": "a place"}, "alpha": {"type": "number", "default": 1.5, "maximum": 1e20},
        "mid": {"type": "object", "properties": {"y": {"enum": [True, False, None]}, "b": {"type": "array", "items": {}}}}},
        "required": ["zeta"], "additionalProperties": False}}}
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def user(text):
    return say("user", text)


def call(id, name, arguments):
    return {"id": id, "name": name, "arguments": arguments}


def called(*calls, content="", **more):
    return say("assistant", content, tool_calls=list(calls), **more)


def result(id, text):
    return say("tool", text, tool_call_id=id)


HISTORY = [user("2+2?"), say("assistant", "4", reasoning_content="Two and two\n\nare four."), user("And 3+3?")]
LOOP = [user("Weather in Köln?"), called(call("c1", "get_weather", '{"zeta": "Köln", "alpha": 2.0, "mid": {"y": null, "b": []}}')), result("c1", "rain, 9 °C")]
PARALLEL = [say("system", "Use tools."), user("Both!"),
            called(call("c1", "get_weather", '{"zeta":"a"}'), call("c2", "add", "{}"), content="Looking."),
            result("c1", "sun"), result("c2", '{"sum": 3}'), say("assistant", "Sun and 3."), user("Thanks")]
CASES = [
    ("one question", [user("Why is the sky blue?")], [], {}),
    ("system", [say("system", "You answer in one sentence."), user("What is rust?")], [], {}),
    ("several turns", [say("system", "Be kind."), user("Hello!"), say("assistant", "Hello. How can I help?"), user("Name three rivers."),
                       say("assistant", "Danube,\nNile, Amazon."), user("And a lake?")], [], {}),
    ("white space", [user("  two before, two after  "), say("assistant", "\n\nlines\n\n\n and\ttabs\t\t \r\n end"), user("a  b   c    d \n \n e\u00a0f\u3000g")], [], {}),
    ("unicode", [user("Grüße aus Köln, 東京 and Кишинёв: naïve café, e\u0301 vs é, 👩‍👩‍👧 🏳️‍🌈, ‏שלום‏, ﬁ ½ ١٢٣ 1234567890")], [], {}),
    ("code", [user("What?\n```python\ndef f(r):\n    if r < 0:\n\t\traise ValueError(f\"r={r!r}\")\n    return 3.14 * r ** 2\n```"), say("assistant", "x+=1;//y\n#include <a.h>\n<div class=\"q\">&amp;</div>"), user("I'm sure they'll say HE'S can't")], [], {}),
    ("empty messages", [say("system", ""), user(""), say("assistant", ""), user(" ")], [], {}),
    ("thinking of an earlier turn", HISTORY, [], {}),
    ("thinking off", HISTORY, [], {"enable_thinking": False}),
    ("thinking on", [user("Hi")], [], {"enable_thinking": True}),
    ("thinking as text", [user("2+2?"), say("assistant", "<think>\nhm\n</think>\n\n4"), user("And 3+3?")], [], {}),
    ("tools", [say("system", "Use tools."), user("Weather?")], [WEATHER, ADD], {}),
    ("tools without system", [user("Weather?")], [WEATHER], {}),
    ("a tool's result", LOOP, [WEATHER], {}),
    ("thinking in a tool loop", [user("Weather?"), called(call("c1", "add", "{}"), reasoning_content="I must add."), result("c1", "3")], [ADD], {}),
    ("thinking off in a tool loop", LOOP, [WEATHER], {"enable_thinking": False}),
    ("parallel results", PARALLEL, [WEATHER, ADD], {}),
    ("results without tools", LOOP, [], {}),
    ("tools in the system message", LOOP, [WEATHER], {"tools_in_user_message": False}),
    ("a date", [user("Which day?")], [], {"date_string": "26 Jul 2024"}),
    ("two questions in a row", [user("One"), user("Two")], [], {}),
    ("system in the middle", [user("First"), say("assistant", "Yes"), say("system", "Now be brief."), user("Second")], [], {}),
]


def for_transformers(message):
    out = dict(message)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [{"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": json.loads(c["arguments"])}} for c in calls]
    return out


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def load(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {k: config[k] for k in ("bos_token", "eos_token", "pad_token") if config.get(k)}
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False, **named)
    fast.chat_template = config["chat_template"]
    return fast


def render(fast, messages, tools, args):
    messages = [for_transformers(m) for m in messages]
    options = {"tools": tools or None, "add_generation_prompt": True, **args}
    text = fast.apply_chat_template(messages, tokenize=False, **options)
    ids = fast(text, add_special_tokens=False)["input_ids"]
    return ids


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizers", type=pathlib.Path, help="the folder that fetch_tokenizers filled")
    folder = parser.parse_args().tokenizers
    assert hasattr(chat_template_utils, "datetime")
    chat_template_utils.datetime = Clock
    out = {"now": "2026-11-30T12:05:09Z", "families": {}, "cases": [
        {"name": name, "messages": messages, "tools": tools, "args": args} for name, messages, tools, args in CASES]}
    for family in FAMILIES:
        fast = load(folder / family)
        all_ids = []
        for name, messages, tools, args in CASES:
            try:
                all_ids.append(render(fast, messages, tools, args))
            except Exception as error:  # the template's own refusal
                assert "TemplateError" in type(error).__name__ or "UndefinedError" in type(error).__name__, (family, name, repr(error))
                print(f"{family}: {name}: refused: {error}")
                all_ids.append(None)
        out["families"][family] = all_ids
        print(family, sum(ids is not None for ids in all_ids), "of", len(CASES))
    write_json(HERE / "chat_templates.json", out)


if __name__ == "__main__":
    main()
