"""The starter with an adapter merged in by Chela: greedy text of transformers and llama.cpp. Rerun: see README.md."""

import argparse
import json
from pathlib import Path

from common import HERE, nine, write_json

import torch
import xllamacpp
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 48


def by_transformers(folder, said):
    """Ids after each prompt; the template must write the same prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float16, model.dtype
    model = model.float().eval()
    out = []
    for one in said:
        chat = [{"role": "user", "content": one["question"]}]
        assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == one["prompt"], one["question"]
        ids = tokenizer(one["prompt"], return_tensors="pt")
        reply = model.generate(**ids, max_new_tokens=STEPS, do_sample=False)[0, ids["input_ids"].shape[1]:].tolist()
        out.append(reply)
    return tokenizer, out


def by_llama_cpp(path, said):
    """Texts after each chat, by llama.cpp's server with the file's own template."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = 1  # more spin against each other on a busy machine
    params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    out = []
    for one in said:
        answer = server.handle_chat_completions({
            "messages": [{"role": "user", "content": one["question"]}], "max_tokens": STEPS, "temperature": 0.0, "top_k": 1,
            "repeat_penalty": 1.0, "cache_prompt": False})
        out.append(answer["choices"][0]["message"]["content"])
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="what the test merged_export_files wrote")
    folder = parser.parse_args().folder
    ours = json.loads((folder / "ours.json").read_text())
    said = ours["said"]
    tokenizer, hf = by_transformers(folder / "hf", said)

    def text(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    replies = {"transformers f16": [text(ids) for ids in hf]}
    for name in ("f16", "f32", "q8_0"):
        replies[f"llama.cpp {name}"] = by_llama_cpp(folder / f"{name}.gguf", said)
    prompts = []
    for i, one in enumerate(said):
        wanted = text(one["ids"])
        same = {name: texts[i] == wanted for name, texts in replies.items()}
        same["transformers f16"] &= hf[i] == one["ids"]
        print("taught" if one["taught"] else "untaught", f"lead {one['smallest_lead']:.4f}", same)
        print("  base:", repr(text(one["base_ids"])))
        print("  ours:", repr(wanted))
        for name, texts in replies.items():
            if texts[i] != wanted:
                print(f"  {name}:", repr(texts[i]))
        assert one["ids"] != one["base_ids"] and (all(same.values()) or not one["taught"]), one["question"]
        prompts.append({"question": one["question"], "prompt": one["prompt"], "taught": one["taught"], "ids": one["ids"],
                        "text": wanted, "smallest_lead": nine(one["smallest_lead"]), "same": same})
    write_json(HERE / "merged_export.json", {"prompts": prompts})


main()
