"""Adapters written by Chela, loaded by PEFT on the tiny checkpoints: log-probs. Rerun: see README.md."""

import argparse
import hashlib
import json
from pathlib import Path

from common import HERE, nine, token_logprobs, write_json

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def golden(name, folder):
    base = AutoModelForCausalLM.from_pretrained(HERE / "tiny" / name, dtype=torch.float32, attn_implementation="eager").eval()
    tuned = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()
    # PEFT only warns of tensors that it did not find or did not want: what it holds must be what the file has.
    held, stored = get_peft_model_state_dict(tuned), load_file(folder / FILES[1])
    assert held.keys() == stored.keys() and all(torch.equal(held[n], stored[n]) for n in stored), name
    texts = json.loads((HERE / "tiny" / f"{name}.json").read_text())["texts"]
    with torch.no_grad():
        logprobs = [nine(token_logprobs(tuned, text["ids"])) for text in texts]
    config = tuned.peft_config["default"]
    print(name, "r", config.r, "alpha", config.lora_alpha, "tensors", len(stored), sorted(config.target_modules))
    return {"sha256": {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in FILES}, "logprobs": logprobs}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="what the test peft_export_folders wrote")
    folder = parser.parse_args().folder
    names = sorted(p.name for p in (HERE / "tiny").iterdir() if p.is_dir())
    write_json(HERE / "peft_export.json", {name: golden(name, folder / name) for name in names})


main()
