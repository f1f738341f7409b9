"""A real Gemma 3 (270M) from a GGUF file: log-probs of a text longer than its window by transformers, greedy text by llama.cpp. Rerun: see
README.md."""

import argparse
import hashlib
from pathlib import Path

from common import HERE, nine, real_greedy, token_logprobs, write_json

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
STEPS = 48
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n    ", "Ein Rezept für Apfelkuchen:\n\n1."]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path, help="gemma3-270m, Q4_K_M")
    parser.add_argument("tokenizer", type=Path, help="the folder of Gemma 3 that fetch_tokenizers took")
    args = parser.parse_args()
    assert hashlib.sha256(args.gguf.read_bytes()).hexdigest() == SHA256, "another file"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    prose = (HERE / "starter_text.txt").read_text()
    texts = PROMPTS + [prose + "\n\n" + prose]
    ids = [tokenizer.encode(text) for text in texts]
    assert all(i[0] == tokenizer.bos_token_id for i in ids) and len(ids[-1]) > 700
    model = AutoModelForCausalLM.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32, attn_implementation="eager").eval()
    assert model.config.sliding_window == 512 and model.config.layer_types.count("full_attention") == 3
    with torch.no_grad():
        logprobs = nine(token_logprobs(model, ids[-1]))
    out = {"gguf_sha256": SHA256, "text": texts[-1], "ids": ids[-1], "logprobs": logprobs, "prompts": real_greedy(model, args.gguf, zip(PROMPTS, ids), STEPS)}
    write_json(HERE / "gemma3_270m.json", out)


main()
