"""Template and token ids of the starter, by transformers over a tokenizer rebuilt from the GGUF. Rerun: see README.md."""

import argparse

from common import HERE, write_json

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

STARTER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3  # token type of special tokens


def read_tokenizer(path):
    """Byte-level BPE that takes digits one by one: what `tokenizer.ggml.pre = "smollm"` stands for."""
    reader = gguf.GGUFReader(path, "r")

    def key(name):
        return reader.fields[f"tokenizer.{name}"].contents()

    assert key("ggml.model") == "gpt2" and key("ggml.pre") == "smollm"
    words, types = key("ggml.tokens"), key("ggml.token_type")
    merges = [tuple(m.split(" ")) for m in key("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    special = [w for w, kind in zip(words, types) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in special])
    assert tokenizer.get_vocab_size() == len(words)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[key("ggml.eos_token_id")], clean_up_tokenization_spaces=False)
    fast.chat_template = key("chat_template")
    return fast


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CODE = "```python\ndef area(r):\n    if r < 0:\n\t\traise ValueError(f\"r={r!r}\")\n    return 3.14159 * r ** 2\n```"
CONVERSATIONS = [
    ("one question", [user("Why is the sky blue?")], True),
    ("own system prompt", [system("You answer in one sentence."), user("What is rust?")], True),
    ("several turns", [user("Hello!"), assistant("Hello. How can I help?"), user("Name three rivers."), assistant("Danube, Nile, Amazon."), user("And a lake?")], True),
    ("finished, no generation prompt", [user("Ping"), assistant("Pong")], False),
    ("continues the reply", [system("Be kind."), user("Say hi"), assistant("Hi there"), user("Again")], False),
    ("digits", [user("Add 1234567890 and 3.14, then 2024-11-30 12:05:09 and 1e-5 and ½ and ١٢٣.")], True),
    ("unicode", [user("Grüße aus Köln, 東京 and Кишинёв: naïve café, e\u0301 vs é, 👩‍👩‍👧 🏳️‍🌈, ‏שלום‏, ﬁ")], True),
    ("white space", [user("  two before, two after  "), assistant("\n\nlines\n\n\n and\ttabs\t\t \r\n end"), user("a  b   c    d \n \n e\u00a0f\u3000g")], True),
    ("empty messages", [system(""), user(""), assistant(""), user(" ")], True),
    ("code", [user("What does this do?\n" + CODE), assistant("It computes an area."), user("x+=1;//y\n#include <a.h>\n<div class=\"q\">&amp;</div>")], True),
    ("contractions and capitals", [user("I'm sure they'll say we've what's HE'S can't 'tis o'clock DON'T I’d")], True),
    ("special tokens in the text", [user("Write <|im_end|> and <|im_start|>system\nhi, <|endoftext|>, <|im_start |>")], True),
    ("roles no one expects", [{"role": "tool", "content": "{\"a\": [1, 2]}"}, user("Go on")], True),
    ("system in the middle", [user("First"), system("Now be brief."), user("Second")], True),
]
TEXTS = ["", " ", "\n", "a", " a", "  a", "a ", "Hello world", "Hello  world", "1", "12", " 12", "a1b22c333", "x\n\ny", "\t\tx", "...", "?!?!",
         "don't", "naïve", "日本語", "🙂", "\u200b", "\ufeffx", "\x00\x07", "<|im_end|>", "a<|im_end|>b", " <|im_end|> ", "<|im_end|", "ﷺ", "e\u0301", "x" * 70,
         "     indented\n        more", "line\r\nline", "https://example.org/a?b=1&c=%20", "1,234.56€", "ΑΒΓ αβγ", "\u2028\u0085 end"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", help="SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer = read_tokenizer(parser.parse_args().gguf)
    out = {"template": tokenizer.chat_template, "conversations": [], "texts": []}
    for name, messages, prompt in CONVERSATIONS:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=prompt, return_dict=False)
        assert ids == tokenizer(rendered)["input_ids"] and tokenizer.decode(ids) == rendered, name
        out["conversations"].append({"name": name, "messages": messages, "add_generation_prompt": prompt, "rendered": rendered, "ids": ids})
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text, text
        out["texts"].append({"text": text, "ids": ids})
    write_json(HERE / "chat_starter.json", out)
    print(len(out["conversations"]), "conversations,", len(out["texts"]), "texts")


if __name__ == "__main__":
    main()
