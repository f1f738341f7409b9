"""The tiny checkpoints with their adapters merged in by Chela, in transformers and llama.cpp. Makes nothing: fails where they differ."""

import argparse
import json
from pathlib import Path

from common import HERE, greedy, token_logprobs

import torch
import xllamacpp
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 24


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def by_llama_cpp(path, prompts):
    """Greedy ids and their log-probs after each prompt of ids."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    ask = {"max_tokens": STEPS, "temperature": 0.0, "top_k": 1, "repeat_penalty": 1.0, "cache_prompt": False, "logprobs": 1,
           "return_tokens": True, "verbose": True}
    for ids in prompts:
        answer = server.handle_completions(ask | {"prompt": ids})
        # Tokens that end no character have no log-prob of their own.
        content = answer["choices"][0]["logprobs"]["content"]
        yield answer["__verbose"]["tokens"], [(c["id"], c["logprob"]) for c in content]


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
        for ids, (tokens, shown) in zip(texts, by_llama_cpp(folder / f"{name}.gguf", texts)):
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
