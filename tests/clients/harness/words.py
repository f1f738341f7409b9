"""Token ids back to text, from tokenizer.json alone."""

import functools
import json


def byte_letters():
    """The letter by which a byte-level tokenizer writes each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}


@functools.cache
def vocabulary(file):
    spec = json.loads(file.read_text())
    letters = byte_letters()
    words = {i: bytes(letters[c] for c in word) for word, i in spec["model"]["vocab"].items()}
    return words | {added["id"]: added["content"].encode() for added in spec["added_tokens"]}


def decode(folder, ids):
    words = vocabulary(folder / "tokenizer.json")
    return b"".join(words[i] for i in ids).decode()
