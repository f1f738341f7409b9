"""The tiny checkpoints with their adapters merged in by Chela, in transformers and llama.cpp. Makes nothing: fails where they differ."""

import argparse
import json
from pathlib import Path

from common import HERE, greedy, greedy_by_llama_cpp, token_logprobs

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 24


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="what the test merged_tiny_files wrote")
    folder = parser.parse_args().folder
    for name in sorted(p.name for p in (HERE / "tiny").iterdir() if p.is_dir()):
        texts = [t["ids"] for t in json.loads((HERE / "tiny" / f"{name}.json").read_text())["texts"]]
        tuned = PeftModel.from_pretrained(load(HERE / "tiny" / name), HERE / "tiny" / name / "adapter", autocast_adapter_dtype=False).eval()
        merged = load(folder / name)
        AutoTokenizer.from_pretrained(folder / name)
        with torch.no_grad():
            gap = max((token_logprobs(tuned, ids) - token_logprobs(merged, ids)).abs().max().item() for ids in texts)
        assert gap < 1e-4, (name, gap)
        if not (folder / f"{name}.gguf").exists():
            print(name, f"folder within {gap:.1e}; no GGUF file, llama.cpp has no words for it")
            continue
        for ids, (tokens, _, shown) in zip(texts, greedy_by_llama_cpp(folder / f"{name}.gguf", texts, STEPS, 512)):
            want = greedy(tuned, ids, STEPS)
            assert tokens == want["ids"][:len(tokens)], (name, tokens, want)
            with torch.no_grad():
                each = iter(zip(tokens, token_logprobs(tuned, ids + tokens)[-len(tokens):].tolist()))
            off = [abs(logprob - next(ours for token, ours in each if token == id)) for id, logprob in shown]
            print(name, f"folder within {gap:.1e}; llama.cpp: {len(tokens)} tokens equal, {len(off)} log-probs within {max(off):.1e},",
                  "smallest lead", want["smallest_lead"])
            # It stops at the end tokens of the file, which these checkpoints say now and then.
            # Its GELU is a table of 16-bit floats.
            assert len(tokens) >= 4 and max(off) < (2e-3 if "gemma" in name else 1e-4), name


main()
