"""Requests as small fixtures: structure and marks stay, long texts are cut, what names a machine or a person is replaced."""

import json
import re

KEEP = 120
KEEP_TOOLS = 3
SECRET = re.compile(r"authorization|api-?key|cookie|secret", re.I)
DROPPED = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}
MACHINE = {"device_id", "installation_id", "x-codex-installation-id"}
SYSTEM = re.compile(r"(Linux )\d+\.\d+[^\s;,()]*")
# What tells requests apart although it may stand in the middle of a long text.
MARKS = re.compile(
    r"<!-- openclaw:attempt:\w+|Runtime:[^\n]*sessionId=[^\n]*|<<<(?:BEGIN|END)_OPENCLAW_INTERNAL_CONTEXT>>>|SEARCH/REPLACE|one-line Git commit messages|"
    r"\[Inter-session message\]|isUser=false|x-anthropic-billing-header:[^\n]{0,120}|"
    r"## CRITICAL: Tool Honesty\n|\[/Memory context\]\n\n|\[Heartbeat Task \| \w+\]"
)


def cut(text, keep=KEEP):
    """The beginning and the end, and the marks between; OpenClaw's last line whole."""
    try:
        inner = json.loads(text)
    except ValueError:
        inner = None
    if isinstance(inner, (dict, list)):
        return json.dumps(redact(inner))
    text = SYSTEM.sub(r"\g<1>6.1", text)
    last = text[text.rfind("\n") + 1 :]
    tail = len(last) if last.startswith("Runtime:") else keep
    if len(text) <= keep + tail + 40:
        return text
    middle = text[keep : len(text) - tail]
    marks = list(dict.fromkeys(MARKS.findall(middle)))[:4]
    return "\n".join([text[:keep], f"[… {len(middle)} characters …]", *marks, text[len(text) - tail :]])


def redact(value, key=""):
    if isinstance(value, str):
        if key in MACHINE:
            return re.sub(r"\w", "0", value)
        return cut(value, 40) if key == "description" else cut(value)
    if isinstance(value, list):
        if key == "tools" and len(value) > KEEP_TOOLS:
            left = {"name": f"and_{len(value) - KEEP_TOOLS}_more"}
            like = value[0]
            more = {**like, "function": left} if "function" in like else {**like, **left}
            return [redact(tool) for tool in [*value[:KEEP_TOOLS], more]]
        return [redact(one) for one in value]
    if isinstance(value, dict):
        if key in ("parameters", "input_schema", "schema"):
            return {"type": "object"}
        return {name: redact(inner, name) for name, inner in value.items()}
    return value


def source(one):
    """What names the session, in the order of docs/api.md."""
    head, body = one.headers, one.body
    meta = body.get("metadata") or {}
    if head.get("x-session-id"):
        return "header x-session-id"
    if head.get("thread-id"):
        return "header thread-id"
    if head.get("x-claude-code-session-id"):
        return "header x-claude-code-session-id"
    if head.get("session_id"):
        return "header session_id"
    for name in ("session_id", "prompt_cache_key"):
        if body.get(name):
            return f"body {name}"
    if meta.get("session_id"):
        return "body metadata.session_id"
    if "session_id" in (meta.get("user_id") or ""):
        return "body metadata.user_id"
    for name in ("previous_response_id", "user"):
        if body.get(name):
            return f"body {name}"
    return "Runtime line" if runtime_id(one) else "message prefix"


def runtime_id(one):
    """The session in OpenClaw's line, which stands in the first user message or in the system prompt."""
    said = one.body.get("messages") or one.body.get("input") or []
    first = next((m for m in said if isinstance(m, dict) and m.get("role") == "user"), "")
    found = re.search(r"Runtime:[^\n]*?sessionId=([\w-]+)", f"{one.body.get('system')} {first}")
    return found and found.group(1)


def label(one, turn, after):
    """`after`: a compaction went before it."""
    if turn["kind"] == "side":
        return turn["reason"].split(": ")[-1]
    if after:
        return "turn after compaction"
    said = [m for m in one.body.get("messages") or one.body.get("input") or [] if "OPENCLAW_INTERNAL_CONTEXT" not in str(m)]
    return "tool result" if re.search(r"'(tool|tool_result|function_call_output)'", str(said[-1:])) else "turn"


def save(case, folder):
    """Two of each sort at most, in the order in which they were sent."""
    turns = {t["id"]: (name, t) for name, of in case.sessions() for t in of}
    for old in folder.glob("*.json"):
        old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    places = [(str(case.work), "/work"), (str(case.home), "/home"), (str(case.folder), "/run"), (str(case.installed), "/client")]
    places.append((f":{case.tape.port}", ":30000"))

    def placed(value):
        text = json.dumps(value)
        for place, name in places:
            text = text.replace(place, name)
        return redact(json.loads(text))

    seen, after, number = {}, False, 0
    for one in case.tape.turns():
        if one.status != 200:
            continue
        session, turn = turns[one.turn]
        session = runtime_id(one) if source(one) == "Runtime line" else session
        kind, reason = case.wanted.get(one.turn, (turn["kind"], turn["reason"]))
        turn = {**turn, "kind": kind, "reason": reason}
        what = label(one, turn, after)
        after = what == "compaction" or (after and kind == "side")
        sort = (one.path, source(one), bool(one.body.get("stream")), what)
        seen[sort] = seen.get(sort, 0) + 1
        if seen[sort] > 2:
            continue
        number += 1
        fixture = {
            "method": one.method,
            "path": one.target,
            "headers": {k: "…" if SECRET.search(k) else placed(v) for k, v in one.headers.items() if k not in DROPPED},
            "body": placed(one.body),
            "expect": {"session": source(one), "id": session, "kind": kind, "reason": reason},
        }
        slug = re.sub(r"[^a-z0-9]+", "-", what).strip("-")
        (folder / f"{number:02}-{slug}.json").write_text(json.dumps(fixture, indent=1, ensure_ascii=False) + "\n")
