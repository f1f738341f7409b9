"""A byte-for-byte tap between client and server: it changes nothing, and reads requests and replies from what went by."""

import dataclasses
import json
import socket
import threading
import time

GENERATE = ("/chat/completions", "/responses", "/messages")


@dataclasses.dataclass
class Exchange:
    """One request and what the client got for it."""

    at: float
    method: str
    target: str
    headers: dict
    body: object
    status: int | None
    reply_headers: dict
    reply: bytes
    complete: bool

    @property
    def path(self):
        return self.target.split("?")[0]

    @property
    def generates(self):
        return self.method == "POST" and self.path.endswith(GENERATE)

    @property
    def turn(self):
        return self.reply_headers.get("x-chela-turn")

    def events(self):
        """The JSON of each server-sent event."""
        for block in self.reply.decode().replace("\r\n", "\n").split("\n\n"):
            data = "\n".join(line[5:].strip() for line in block.split("\n") if line.startswith("data:"))
            if data and data != "[DONE]":
                yield json.loads(data)

    def seen(self):
        """Text and calls that the client was given: (text, [(name, arguments), ...])."""
        streamed = "event-stream" in self.reply_headers.get("content-type", "")
        if self.path.endswith("/chat/completions"):
            return seen_chat(list(self.events()) if streamed else None, self.reply)
        if self.path.endswith("/responses"):
            if not streamed:
                return seen_items(json.loads(self.reply)["output"])
            ends = [e for e in self.events() if e["type"] == "response.completed"]
            assert len(ends) == 1, f"{len(ends)} response.completed events"
            text = "".join(e["delta"] for e in self.events() if e["type"] == "response.output_text.delta")
            last = seen_items(ends[0]["response"]["output"])
            assert last[0] == text, "the deltas differ from the completed response"
            return last
        return seen_blocks(list(self.events()) if streamed else None, self.reply)


def seen_chat(chunks, reply):
    if chunks is None:
        message = json.loads(reply)["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        return message.get("content") or "", [called(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    text, calls = "", {}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or []:
            name, arguments = calls.setdefault(call["index"], ["", ""])
            more = call["function"]
            calls[call["index"]] = [name + (more.get("name") or ""), arguments + (more.get("arguments") or "")]
    return text, [called(*calls[i]) for i in sorted(calls)]


def seen_items(items):
    text = "".join(part["text"] for i in items if i["type"] == "message" for part in i["content"])
    return text, [called(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]


def seen_blocks(events, reply):
    if events is None:
        blocks = json.loads(reply)["content"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        return text, [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    text, blocks = "", {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = [event["content_block"].get("name"), ""]
            text += event["content_block"].get("text", "")
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            blocks[event["index"]][1] += event["delta"].get("partial_json", "")
    return text, [called(name, a) for name, a in (blocks[i] for i in sorted(blocks)) if name]


def called(name, arguments):
    try:
        return name, json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return name, arguments


class Tape:
    """Listens on a port of its own and hands every byte on."""

    def __init__(self, port):
        self.server = ("127.0.0.1", port)
        self.lock = threading.Lock()
        self.lines = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.server)
            except OSError:
                client.close()
                continue
            line = {"up": bytearray(), "down": bytearray(), "times": []}
            with self.lock:
                self.lines.append(line)
            threading.Thread(target=self.pump, args=(client, server, line, "up"), daemon=True).start()
            threading.Thread(target=self.pump, args=(server, client, line, "down"), daemon=True).start()

    def pump(self, source, sink, line, way):
        try:
            while data := source.recv(1 << 16):
                with self.lock:
                    if way == "up":
                        line["times"].append((len(line["up"]), time.time()))
                    line[way] += data
                sink.sendall(data)
        except OSError:
            pass
        # Half a close goes on as half a close; the other direction ends by itself.
        for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            try:
                end.shutdown(how)
            except OSError:
                pass

    def close(self):
        self.listener.close()

    def exchanges(self):
        """All requests so far, oldest first."""
        with self.lock:
            copies = [(bytes(one["up"]), bytes(one["down"]), list(one["times"])) for one in self.lines]
        found = [exchange for copy in copies for exchange in read_line(*copy)]
        return sorted(found, key=lambda e: e.at)

    def turns(self):
        """The requests that made a turn."""
        return [e for e in self.exchanges() if e.generates]


def read_line(up, down, times):
    at = back = 0
    while (request := read_message(up, at, None)) is not None:
        (first, headers, body, end, _) = request
        began = max((t for offset, t in times if offset <= at), default=0.0)
        at = end
        method, target = first.split(" ")[:2]
        status, reply_headers, reply, complete = None, {}, b"", False
        while (answer := read_message(down, back, method)) is not None:
            line, reply_headers, reply, back, complete = answer
            status = int(line.split(" ")[1])
            if status >= 200:
                break
        yield Exchange(began, method, target, headers, as_json(body), status, reply_headers, reply, complete)


def as_json(body):
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="replace")


def read_message(data, at, asked):
    """(first line, headers, body, end, complete) or None. `asked` = the method when this is a reply."""
    head_end = data.find(b"\r\n\r\n", at)
    if head_end < 0:
        return None
    first, *rows = data[at:head_end].decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, value in (row.split(":", 1) for row in rows)}
    at = head_end + 4
    if "chunked" in headers.get("transfer-encoding", ""):
        body, at, complete = read_chunks(data, at)
        return first, headers, body, at, complete
    if "content-length" in headers:
        end = at + int(headers["content-length"]) * (asked != "HEAD")
        return first, headers, data[at:end], min(end, len(data)), end <= len(data)
    no_body = asked is None or first.split(" ")[1] in ("204", "304") or first.split(" ")[1].startswith("1")
    if no_body:
        return first, headers, b"", at, True
    return first, headers, data[at:], len(data), True


def read_chunks(data, at):
    body = b""
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return body, len(data), False
        size = int(data[at:line_end].split(b";")[0], 16)
        at = line_end + 2
        if at + size + 2 > len(data):
            return body + data[at:], len(data), False
        body += data[at : at + size]
        at += size + 2
        if size == 0:
            return body, at, True
