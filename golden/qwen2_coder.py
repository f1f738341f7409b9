"""A real Qwen2.5-Coder (0.5B) from a GGUF file: log-probs of a text and ids of conversations by transformers, greedy text by llama.cpp.
Rerun: see README.md."""

import argparse
import hashlib
from pathlib import Path

from common import HERE, nine, real_greedy, token_logprobs, write_json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
STEPS = 48
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "fn main() {\n    let words: Vec<&str> = ", "Ein Rezept für Apfelkuchen:\n\n1."]
CODE = "\n\n```python\ndef area(r):\n    if r < 0:\n\t\traise ValueError(f\"r={r!r}\")\n    return 3.14159 * r ** 2\n```\n\n"
CONVERSATIONS = {
    "one question": [{"role": "user", "content": "Why is the sky blue?"}],
    "own system prompt": [{"role": "system", "content": "You answer in one sentence."}, {"role": "user", "content": "What is rust?"}],
    "several turns": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello. How can I help?"},
                      {"role": "user", "content": "Add 1234567890 and 3.14 in 東京, naïvely:" + CODE}],
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path, help="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M")
    args = parser.parse_args()
    assert hashlib.sha256(args.gguf.read_bytes()).hexdigest() == SHA256, "another file"
    source = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    prose = (HERE / "starter_text.txt").read_text()
    texts = PROMPTS + [prose + CODE + prose]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert len(ids[-1]) >= 512
    talks = []
    for name, messages in CONVERSATIONS.items():
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        talks.append({"name": name, "messages": messages, "ids": tokenizer.encode(rendered, add_special_tokens=False)})
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager").eval()
    assert model.config.model_type == "qwen2" and model.dtype == torch.float32
    with torch.no_grad():
        logprobs = nine(token_logprobs(model, ids[-1]))
    out = {"gguf_sha256": SHA256, "text": texts[-1], "ids": ids[-1], "logprobs": logprobs, "conversations": talks, "prompts": real_greedy(model, args.gguf, zip(PROMPTS, ids), STEPS)}
    write_json(HERE / "qwen2_coder.json", out)


main()
