"""One client against one server: the server's start, the client's surroundings, and what must hold afterwards."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

from . import words
from .tape import Tape

MODEL = "my-model"
PORT_WAIT = 60
# Said where no line of a scenario's script fits; never expected.
NO_LINE = "No line of the script fits."
# To the server a variable CHELA_… is a configuration key.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("CHELA_")}
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)


class Failed(Exception):
    """A check did not hold."""


def check(holds, text):
    if not holds:
        raise Failed(text)


def call(name, **arguments):
    """What the model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(text):
    """`when`: this stands in the last thing that was said before the reply."""
    return rf"{re.escape(text)}[^\n]*\nassistant\n$"


# `when`: the last thing is the result of a tool.
RESULT = r"</tool_response>\s*assistant\n$"


def main(reason, parent=None, extends=False):
    return ("main", reason, parent, extends)


def side(reason, parent=None):
    return ("side", reason, parent, None)


class Case:
    """`folder` is a new folder for this run."""

    def __init__(self, name, folder, binary, model, tokenizer, script, bins):
        self.name, self.folder, self.binary, self.tokenizer = name, folder, binary, tokenizer
        self.home, self.work, self.data = folder / "home", folder / "work", folder / "data"
        for one in (self.home, self.work, folder / "tmp"):
            one.mkdir(parents=True)
        self.script = folder / "script.jsonl"
        self.script.write_text("".join(json.dumps(line) + "\n" for line in [*script, {"text": NO_LINE}]))
        self.env = {
            "PATH": os.pathsep.join([*map(str, bins), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self.home),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "DO_NOT_TRACK": "1",
            "GIT_AUTHOR_NAME": "Tester",
            "GIT_AUTHOR_EMAIL": "tester@example.org",
            "GIT_COMMITTER_NAME": "Tester",
            "GIT_COMMITTER_EMAIL": "tester@example.org",
            "GIT_CONFIG_NOSYSTEM": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.log = folder / "server.log"
        command = [binary, "serve", "--engine", f"script:{self.script}", "--model", model]
        command += ["--data-dir", self.data, "--port", "0", "--learn", "off"]
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=CLEAN)
        note, until = self.data / "server.json", time.time() + PORT_WAIT
        while not note.exists() or not note.read_text().endswith("}"):
            if self.server.poll() is not None or time.time() > until:
                self.server.kill()
                raise Failed(f"the server did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.direct = json.loads(note.read_text())["address"]
        self.key = (self.data / "admin.key").read_text().strip()
        self.tape = Tape(int(self.direct.rsplit(":", 1)[1]))
        self.url = self.tape.url
        self.background = []
        # What each turn's kind and reason should be, for recordings.
        self.wanted = {}

    # --- the client

    def spawn(self, command, env=None, log="client.log", **more):
        """A program that runs beside the test, in a process group of its own."""
        with (self.folder / log).open("ab") as out:
            program = subprocess.Popen(
                list(map(str, command)), cwd=self.work, env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True, **more,
            )
        self.background.append(program)
        return program

    def run(self, command, env=None, timeout=180, cwd=None, stdin=None, ok=True):
        """A program that ends; its stdout. Everything it says is kept beside the server's log."""
        command = list(map(str, command))
        program = subprocess.Popen(
            command, cwd=cwd or self.work, env={**self.env, **(env or {})}, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        try:
            out, err = program.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            end_group(program)
            out, err = program.communicate()
            err += f"\n(ended after {timeout} s)"
        with (self.folder / "client.log").open("a") as log:
            log.write(f"$ {' '.join(command)[:2000]}\n{out}\n{err}\n(exit {program.returncode})\n")
        if ok:
            check(program.returncode == 0, f"{pathlib.Path(command[0]).name} ended with {program.returncode}:\n{(out + err)[-3000:]}")
        return out

    def git(self, *arguments):
        return self.run(["git", *arguments])

    def wait_said(self, text, seconds=90):
        """Until this reply has been given to the end."""
        until = time.time() + seconds
        while not any(e.complete and e.status == 200 and e.seen()[0] == text for e in self.tape.turns()):
            check(time.time() < until, f"{text!r} was not said within {seconds} s")
            time.sleep(0.2)

    def settle(self, quiet=2, seconds=60):
        """Until everything asked is answered and nothing new comes."""
        until, last, since = time.time() + seconds, None, 0.0
        while time.time() < until:
            turns = self.tape.turns()
            state = (len(turns), sum(e.complete for e in turns))
            if state != last or state[0] != state[1]:
                last, since = state, time.time()
            elif time.time() - since > quiet:
                return
            time.sleep(0.2)
        raise Failed(f"the client was still busy after {seconds} s")

    # --- the server's side

    def get(self, path):
        request = urllib.request.Request(self.direct + path, headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def session(self, name):
        return self.get(f"/v1/sessions/{urllib.parse.quote(name, safe='')}")["turns"]

    def sessions(self):
        """[(id, turns)] by their first turns, those with nothing but side calls last; in each the side calls that continue nothing
        come first. Clients ask for titles and recaps beside their turns, so that no order of theirs can be expected."""
        names = [row["id"] for row in self.get("/v1/sessions")["sessions"]]
        found = []
        for name in names:
            turns = sorted(self.session(name), key=lambda t: (t["kind"] == "main" or t["parent"] is not None, when(t)))
            found.append((name, turns))
        return sorted(found, key=lambda one: (all(t["kind"] == "side" for t in one[1]), min(map(when, one[1]))))

    def export(self, name, style="individual"):
        """The rows of a session: one a turn through the command, one a segment through the route."""
        if style == "individual":
            command = [self.binary, "session", "export", name, "--data-dir", self.data]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60, env=CLEAN)
            return json.loads(done.stdout)["rows"]
        body = json.dumps({"session_id": name, "style": style}).encode()
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        request = urllib.request.Request(self.direct + "/rl/export_trajectories", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["rows"]

    def shape(self):
        """What is recorded, as `expect` takes it."""
        return [(name, [self.described(turns, t, self.rows(name)) for t in turns]) for name, turns in self.sessions()]

    def rows(self, name):
        return {row["interaction_id"]: row for row in self.export(name)}

    @staticmethod
    def described(turns, turn, rows):
        place = {t["id"]: i for i, t in enumerate(turns)}
        parent = place.get(turn["parent"]) if turn["parent"] else None
        extends = None
        if turn["kind"] == "main":
            mine, before = (rows.get(t) or {"input_ids": None} for t in (turn["id"], turn["parent"]))
            both = mine["input_ids"] and before["input_ids"]
            extends = bool(both) and mine["input_ids"][: len(before["input_ids"])] == before["input_ids"]
        return (turn["kind"], turn["reason"], parent, extends)

    def expect(self, sessions, ids=None, beside=()):
        """The recorded sessions, oldest first, each a list of `main(…)` and `side(…)`; `ids`: checks of their names.

        `beside`: lone side calls of which there must be one at least and may be any number: a client asks when it has time."""
        found = self.shape()
        for one in beside:
            check([one] in [turns for _, turns in found], f"no session holds only {one}")
        found = [(name, turns) for name, turns in found if turns not in [[one] for one in beside]]
        if [len(turns) for _, turns in found] == [len(turns) for turns in sessions]:
            recorded = dict(self.sessions())
            for (name, _), wanted in zip(found, sessions):
                turns = recorded[name]
                self.wanted |= {turn["id"]: kind[:2] for turn, kind in zip(turns, wanted)}
        text = "\n".join(f"  {name}\n" + "".join(f"    {i}: {t}\n" for i, t in enumerate(turns)) for name, turns in found)
        wanted = "\n".join("  (session)\n" + "".join(f"    {i}: {t}\n" for i, t in enumerate(turns)) for turns in sessions)
        check([turns for _, turns in found] == sessions, f"recorded (kind, reason, parent, extends):\n{text}expected:\n{wanted}")
        for (name, _), wanted in zip(found, ids or []):
            check(wanted in (None, name), f"a session is named {name!r}, not {wanted!r}")
        for name, turns in found:
            self.check_export(name, turns)
            self.check_next(name)

    def check_next(self, name):
        """A turn has a next state if a main turn goes on from it, and what side calls say is in none."""
        turns = self.session(name)
        followed = {t["parent"] for t in turns if t["kind"] == "main"}
        for turn in turns:
            has = bool(turn["next_state"])
            check(has == (turn["id"] in followed), f"{name}: {turn['id']} has next state {turn['next_state']}")

    def check_export(self, name, shape):
        """Rows hold exactly the main turns, their tokens, and one row a segment when joined."""
        turns, rows = dict(self.sessions())[name], self.rows(name)
        mains = [t for t in turns if t["kind"] == "main" and t["state"] not in ("superseded", "abandoned")]
        check(set(rows) == {t["id"] for t in mains}, f"{name}: rows of {sorted(rows)}, main turns are {[t['id'] for t in mains]}")
        joined = self.export(name, "concat")
        extending = {i for i, turn in enumerate(shape) if turn[3]}
        extended = {shape[i][2] for i in extending}
        leaves = [i for i, turn in enumerate(turns) if turn in mains and i not in extended]
        check(len(joined) == len(leaves), f"{name}: {len(joined)} joined rows for {len(leaves)} segments")
        sampled = sum(sum(row["loss_mask"]) for row in rows.values())
        check(sum(sum(row["loss_mask"]) for row in joined) == sampled, f"{name}: joined rows lose or repeat sampled tokens")
        for turn in mains:
            row = rows[turn["id"]]
            prompt, reply = turn["prompt_tokens"], turn["reply_tokens"]
            check(row["loss_mask"] == [0] * prompt + [1] * reply, f"{name}: the mask of {turn['id']} is not its reply")
            check(len(row["input_ids"]) == prompt + reply, f"{name}: {turn['id']} has {len(row['input_ids'])} ids")
            check(all(x < 0 for x in row["logprobs"][prompt:]), f"{name}: {turn['id']} lacks log-probs")

    def audit(self, refused=0):
        """What holds for every client: what it saw is what was sampled, every answer was kept, nothing went wrong.

        `refused`: how many of its requests must have been answered with 400."""
        exchanges = self.tape.turns()
        check(exchanges, "the client asked nothing")
        bad = [f"{e.method} {e.target} -> {e.status}: {e.reply[:300].decode(errors='replace')}" for e in exchanges if e.status != 200]
        check(len(bad) == refused and all(e.status in (200, 400) for e in exchanges), f"{len(bad)} requests were not answered with 200, {refused} expected:\n" + "\n".join(bad))
        answered = [e for e in exchanges if e.status == 200]
        stored = {t["id"]: t for _, turns in self.sessions() for t in turns}
        lost = [json.dumps(e.body)[-500:] for e in answered if e.seen()[0] == NO_LINE]
        check(not lost, "no line of the script was meant for:\n" + "\n".join(lost))
        cut = [e for e in answered if not e.complete]
        check(not cut, f"{len(cut)} replies were cut")
        check(len(stored) == len(answered), f"{len(stored)} turns are stored, {len(answered)} were answered")
        counted = sum(row["count"] for row in self.get("/v1/status")["turns"])
        check(counted == len(answered), f"the status counts {counted} turns, {len(answered)} were answered")
        rows = {key: row for name, _ in self.sessions() for key, row in self.rows(name).items()}
        for one in answered:
            turn = stored.get(one.turn)
            check(turn is not None, f"turn {one.turn} was answered and is not stored")
            check(one.reply_headers["x-chela-turn-kind"] == turn["kind"], f"{one.turn}: kind of header and record differ")
            self.same_words(one, turn, rows.get(one.turn))
        log = self.log.read_text()
        wrong = [line for line in log.splitlines() if re.search(r"\b(ERROR|WARN)\b|panicked", line)]
        check(not wrong, "the server's log says:\n" + "\n".join(wrong[:20]))
        check(self.server.poll() is None, f"the server ended with {self.server.poll()}")

    def same_words(self, exchange, turn, row):
        text, calls = exchange.seen()
        recorded = [(c["name"], json.loads(c["arguments"] or "{}")) for c in turn["reply"]["tool_calls"]]
        check(text.strip() == turn["reply"]["content"].strip(), f"the client saw {text!r}, recorded is {turn['reply']['content']!r}")
        check(calls == recorded, f"the client saw calls {calls}, recorded are {recorded}")
        if row is None:
            return
        sampled = [i for i, of in zip(row["input_ids"], row["loss_mask"]) if of]
        said = words.decode(self.tokenizer, sampled).removesuffix("<|im_end|>")
        written = [json.loads(inner) for inner in CALL.findall(said)]
        check(CALL.sub("", said).strip() == text.strip(), f"sampled {said!r}, the client saw {text!r}")
        check([(w["name"], w["arguments"]) for w in written] == calls, f"sampled {said!r}, the client saw calls {calls}")

    def keep_tape(self):
        """All requests and replies, to read after a failure."""
        with (self.folder / "tape.jsonl").open("w") as file:
            for one in self.tape.exchanges():
                file.write(json.dumps({**vars(one), "reply": one.reply.decode(errors="replace")}) + "\n")

    def close(self):
        for program in self.background:
            end_group(program)
        self.tape.close()
        self.server.terminate()
        try:
            self.server.wait(20)
        except subprocess.TimeoutExpired:
            self.server.kill()
            raise Failed("the server did not end within 20 s") from None
        check(self.server.returncode == 0, f"the server ended with {self.server.returncode}")


def when(turn):
    return (turn["created"], turn["id"])


def end_group(program):
    """Ends a program and all that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(program.pid, how)
        except ProcessLookupError:
            return
        try:
            program.wait(5)
        except subprocess.TimeoutExpired:
            continue


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def patient(request, seconds=180):
    """The answer of a server that may still be starting."""
    until = time.time() + seconds
    while True:
        try:
            return urllib.request.urlopen(request, timeout=120)
        except urllib.error.HTTPError as error:
            raise Failed(f"{error.url} -> {error.code}: {error.read()[:500]}") from None
        except OSError:
            if time.time() > until:
                raise Failed(f"nothing answers: {getattr(request, 'full_url', request)}") from None
            time.sleep(0.2)
