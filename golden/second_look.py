"""A second, separate reading of the tiny checkpoints: numpy in float64, gradients by finite differences, AdamW by hand.
It reads what tiny_models.py wrote and fails on a difference. With the path of the starter's GGUF it looks at the starter's
files as well. Rerun: see README.md."""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

TINY = Path(__file__).resolve().parent / "tiny"


def bf16_file(path):
    """Tensors as float64, bf16 widened by hand since numpy has no such type."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    header.pop("__metadata__", None)
    out = {}
    for name, t in header.items():
        assert t["dtype"] == "BF16", name
        begin, end = t["data_offsets"]
        half = np.frombuffer(raw[8 + size + begin:8 + size + end], "<u2").astype(np.uint32)
        out[name] = (half << 16).view(np.float32).astype(np.float64).reshape(t["shape"])
    for at in {n.split(".experts.")[0] for n in out if ".experts." in n}:
        take = lambda part: np.stack([out.pop(f"{at}.experts.{e}.{part}_proj.weight") for e in range(len(out[f"{at}.gate.weight"]))])
        gate, up, down = take("gate"), take("up"), take("down")
        # as transformers names and stacks them
        out[f"{at}.experts.gate_up_proj"], out[f"{at}.experts.down_proj"] = np.concatenate([gate, up], 1), down
    return out


def is_gemma(config):
    return config.get("model_type") == "gemma3_text"


def slides(config, layer):
    """Whether a layer sees the window only: no others than Gemma's do here."""
    if not is_gemma(config):
        return False
    kinds = config.get("layer_types")
    return kinds[layer] == "sliding_attention" if kinds else (layer + 1) % config["sliding_window_pattern"] != 0


def frequencies(config, width, layer):
    if slides(config, layer):
        rope = config.get("rope_parameters", {}).get("sliding_attention") or {"rope_theta": config["rope_local_base_freq"]}
    else:
        rope = config.get("rope_parameters") or (config.get("rope_scaling") or {}) | {"rope_theta": config["rope_theta"]}
        rope = rope.get("full_attention", rope)
    inv = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
    if rope.get("rope_type", "default") == "default":
        return inv
    if rope["rope_type"] == "linear":
        return inv / rope["factor"]
    assert rope["rope_type"] == "llama3"
    turns = rope["original_max_position_embeddings"] * inv / (2 * np.pi)  # full turns within the context trained on
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * inv + (1 - keep) * inv / rope["factor"]


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turn(x, angles):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def mixture(config, w, at, h):
    """Row by row: the likeliest experts, each a gated unit, added up with their probabilities."""
    out = np.zeros_like(h)
    for row, x in enumerate(h):
        p = np.exp(log_softmax(w[at + "gate.weight"] @ x))
        chosen = np.argsort(-p)[:config["num_experts_per_tok"]]
        total = p[chosen].sum() if config["norm_topk_prob"] else 1.0
        for e in chosen:
            gate, up = np.split(w[at + "experts.gate_up_proj"][e] @ x, 2)
            out[row] += p[e] / total * (w[at + "experts.down_proj"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def logits(config, w, ids, lora=None, scale=2.0):
    eps, heads, kv = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    gemma = is_gemma(config)
    if gemma:  # each norm's factor is 1 + w
        w = {n: 1 + t if n.endswith("norm.weight") else t for n, t in w.items()}

    def linear(name, x):
        y = x @ w[name + ".weight"].T
        if name + ".bias" in w:
            y = y + w[name + ".bias"]
        if lora is not None:
            key = "base_model.model." + name
            y = y + scale * (x @ lora[key + ".lora_A.weight"].T) @ lora[key + ".lora_B.weight"].T
        return y

    x = w["model.embed_tokens.weight"][ids]  # [T, H]
    if gemma:
        x = x * np.sqrt(config["hidden_size"])
    scalar = config.get("query_pre_attn_scalar", width)
    back = np.arange(len(ids))[:, None] - np.arange(len(ids))  # how far a key lies before a query
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        angles = np.arange(len(ids))[:, None] * frequencies(config, width, layer)
        mask = np.where((back < 0) | (slides(config, layer) & (back >= (config.get("sliding_window") or len(ids)))), -np.inf, 0)
        h = norm(x, w[at + "input_layernorm.weight"], eps)
        q = linear(at + "self_attn.q_proj", h).reshape(len(ids), heads, width)
        k = linear(at + "self_attn.k_proj", h).reshape(len(ids), kv, width)
        v = linear(at + "self_attn.v_proj", h).reshape(len(ids), kv, width)
        if at + "self_attn.q_norm.weight" in w:
            q = norm(q, w[at + "self_attn.q_norm.weight"], eps)
            k = norm(k, w[at + "self_attn.k_norm.weight"], eps)
        q, k = turn(q, angles), turn(k, angles)
        mixed = []
        for head in range(heads):
            g = head * kv // heads
            s = q[:, head] @ k[:, g].T / np.sqrt(scalar) + mask
            p = np.exp(s - s.max(-1, keepdims=True))
            mixed.append(p / p.sum(-1, keepdims=True) @ v[:, g])
        added = linear(at + "self_attn.o_proj", np.concatenate(mixed, -1))
        x = x + (norm(added, w[at + "post_attention_layernorm.weight"], eps) if gemma else added)
        h = norm(x, w[at + ("pre_feedforward" if gemma else "post_attention") + "_layernorm.weight"], eps)
        if at + "mlp.experts.down_proj" in w:
            x = x + mixture(config, w, at + "mlp.", h)
            continue
        gate = linear(at + "mlp.gate_proj", h)
        if gemma:
            act = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
        else:
            act = gate / (1 + np.exp(-gate))
        added = linear(at + "mlp.down_proj", act * linear(at + "mlp.up_proj", h))
        x = x + (norm(added, w[at + "post_feedforward_layernorm.weight"], eps) if gemma else added)
    return norm(x, w["model.norm.weight"], eps) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def logprobs(config, w, ids, lora=None):
    return log_softmax(logits(config, w, ids, lora)[:-1])[np.arange(len(ids) - 1), ids[1:]]


def slope(loss, tensor, index, step=1e-5):
    """Central difference of the loss by one element."""
    kept = tensor[index]
    tensor[index] = kept + step
    above = loss()
    tensor[index] = kept - step
    below = loss()
    tensor[index] = kept
    return (above - below) / (2 * step)


def adamw(grad, m, v, t):
    m, v = 0.9 * m + 0.1 * grad, 0.98 * v + 0.02 * grad * grad
    return -2e-4 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.98**t)) + 1e-8), m, v


def check(path):
    gold = json.loads(path.read_text())
    folder = path.with_suffix("")
    config = json.loads((folder / "config.json").read_text())
    w = bf16_file(folder / "model.safetensors")
    lora = {n: t.astype(np.float64) for n, t in load_file(folder / "adapter" / "adapter_model.safetensors").items()}
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert adapter["lora_alpha"] / adapter["r"] == 2.0
    worst = {"logprob": 0.0, "top5": 0.0, "adapter": 0.0, "gradient": 0.0}
    for number, text in enumerate(gold["texts"]):
        ids = np.array(text["ids"])
        worst["logprob"] = max(worst["logprob"], np.abs(logprobs(config, w, ids) - text["logprobs"]).max())
        worst["adapter"] = max(worst["adapter"], np.abs(logprobs(config, w, ids, lora) - gold["adapter_logprobs"][number]).max())
        last = log_softmax(logits(config, w, ids)[-1])
        order = np.argsort(-last)[:5]
        assert order.tolist() == text["top5"]["ids"], path
        worst["top5"] = max(worst["top5"], np.abs(last[order] - text["top5"]["logprobs"]).max())
        for token in text["greedy"]["ids"]:
            assert logits(config, w, ids)[-1].argmax() == token, path
            ids = np.append(ids, token)

    ids, weights = np.array(gold["texts"][1]["ids"]), np.array(gold["advantages"])

    def loss(adapter):
        return -(weights * logprobs(config, w, ids, adapter)[-len(weights):]).mean()

    assert abs(loss(None) - gold["full_loss"]) < 1e-5 and abs(loss(lora) - gold["lora_losses"][0]) < 1e-5, path
    rng = np.random.default_rng(0)
    grads = load_file(path.with_name(path.stem + ".lora_gradients.safetensors"))
    for name, grad in grads.items():
        assert abs(np.linalg.norm(grad.astype(np.float64)) / gold["lora_gradients"][name]["norm"] - 1) < 1e-6
        index = tuple(rng.integers(0, n) for n in grad.shape)
        seen = slope(lambda: loss(lora), lora[name], index)
        worst["gradient"] = max(worst["gradient"], abs(seen - grad[index]) / np.sqrt((grad.astype(np.float64) ** 2).mean()))
    for name, summary in gold["full_gradients"].items():
        index = np.unravel_index(int(rng.integers(0, 4)), summary["shape"])
        size = summary["norm"] / np.sqrt(np.prod(summary["shape"]))
        seen = slope(lambda: loss(None), w[name], index)
        worst["gradient"] = max(worst["gradient"], abs(seen - summary["first"][np.ravel_multi_index(index, summary["shape"])]) / size)
    with safe_open(path.with_name(path.stem + ".full_gradients.safetensors"), "np") as f:
        for name in f.keys():
            assert abs(np.linalg.norm(f.get_tensor(name).astype(np.float64)) / gold["full_gradients"][name]["norm"] - 1) < 1e-6

    moved = 0.0
    for name, grad in grads.items():
        step, _, _ = adamw(grad.astype(np.float64), 0, 0, 1)
        moved += (step**2).sum()
        after = (lora[name] + step).flatten()[:4]
        assert np.abs(after - gold["adamw"][0]["parameters_first"][name]).max() < 1e-7, name
        lora[name] += step
    assert abs(np.sqrt(moved) / gold["adamw"][0]["moved_norm"] - 1) < 1e-5, path
    assert abs(loss(lora) - gold["lora_losses"][1]) < 1e-5, path
    print(path.stem, {k: f"{v:.1e}" for k, v in worst.items()})
    # f32 against f64: what is left grows with the position, as the rounding of its angle does. A tenth of what engines may differ.
    assert max(worst["logprob"], worst["adapter"], worst["top5"]) < 1e-4 and worst["gradient"] < 1e-4, path


def q4_1(block):
    """One block of 32 by hand: two f16 (scale, minimum), then 16 bytes, low halves first."""
    scale, least = np.frombuffer(block[:4], "<f2").astype(np.float64)
    packed = np.frombuffer(block[4:20], np.uint8)
    return scale * np.concatenate([packed & 15, packed >> 4]) + least


def q8_0(block):
    """One block of 32 by hand: an f16 scale, then 32 signed bytes."""
    return np.frombuffer(block[:2], "<f2").astype(np.float64) * np.frombuffer(block[2:34], np.int8)


def starter_weights(reader):
    """Dequantised by hand; q and k rows sorted from interleaved pairs to halves by index."""
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    out = {}
    for t in reader.tensors:
        shape = [int(n) for n in reversed(t.shape)]
        kind = t.tensor_type.name
        if kind == "F32":
            values = np.array(t.data, np.float64)
        else:
            raw = np.ascontiguousarray(t.data).reshape(-1, 20 if kind == "Q4_1" else 34)
            assert kind in ("Q4_1", "Q8_0"), kind
            if kind == "Q4_1":
                head = np.ascontiguousarray(raw[:, :4]).view("<f2").astype(np.float64)
                values = head[:, :1] * np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], 1) + head[:, 1:]
                assert (values[7] == q4_1(raw[7].tobytes())).all()
            else:
                values = np.ascontiguousarray(raw[:, :2]).view("<f2").astype(np.float64) * np.ascontiguousarray(raw[:, 2:]).view(np.int8)
                assert (values[7] == q8_0(raw[7].tobytes())).all()
        values = values.reshape(shape)
        if t.name == "token_embd.weight":
            name = "model.embed_tokens"
        elif t.name == "output_norm.weight":
            name = "model.norm"
        else:
            _, layer, part, _ = t.name.split(".")
            if part in ("attn_q", "attn_k"):
                rows = np.arange(shape[0])
                within = rows % 64
                values = values[rows - within + np.where(within < 32, 2 * within, 2 * (within - 32) + 1)]
            block, short = part.split("_")
            name = f"model.layers.{layer}." + parts.get(part, ("self_attn." if block == "attn" else "mlp.") + short + "_proj")
        out[name + ".weight"] = values
    return out


def mixed(k, n):
    x = ((k + 1) * 2654435761 + (n + 1) * 2654445111) % 2**32
    x ^= x >> 16
    x = x * 2246822519 % 2**32
    return (x ^ x >> 13) / 2**32 - 0.5


def starter_adapter(w):
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    lora = {}
    for layer in range(30):
        for place, name in enumerate(names):
            rows, columns = w[f"model.layers.{layer}.{name}.weight"].shape
            s, key = 7 * layer + place, f"base_model.model.model.layers.{layer}.{name}"
            for part, shape, n, size in (("A", (4, columns), 2 * s, 0.05), ("B", (rows, 4), 2 * s + 1, 0.02)):
                values = [mixed(k, n) * size for k in range(shape[0] * shape[1])]
                lora[f"{key}.lora_{part}.weight"] = np.array(values, np.float32).astype(np.float64).reshape(shape)
    return lora


def check_starter(reader):
    gold = json.loads((TINY.parent / "starter.json").read_text())
    config = {"rms_norm_eps": 1e-5, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30,
              "rope_parameters": {"rope_theta": 100000.0}}
    w = starter_weights(reader)
    for name in ("text", "chat"):
        ids = np.array(gold[name]["ids"] + gold[name]["greedy"]["ids"])
        n = len(gold[name]["ids"])
        seen = log_softmax(logits(config, w, ids))
        apart = np.abs(seen[np.arange(n - 1), ids[1:n]] - gold[name]["logprobs"])
        assert (seen[n - 1:-1].argmax(-1) == ids[n:]).all(), name
        assert np.argsort(-seen[n - 1])[:5].tolist() == gold[name]["top5"]["ids"], name
        print(f"starter {name}: log-probs differ by {apart.mean():.1e} mean, {apart.max():.1e} max")
        assert apart.max() < 1e-4, name
    gold_lora, ids, lora = gold["lora"], np.array(gold["text"]["ids"]), starter_adapter(w)
    weights = np.array(gold_lora["advantages"])

    def chosen():
        return logprobs(config, w, ids, lora)[-32:]

    assert np.abs(chosen() - gold_lora["logprobs"]).max() < 1e-4
    for name in ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "base_model.model.model.layers.29.mlp.down_proj.lora_B.weight"):
        summary = gold_lora["gradients"][name]
        seen = slope(lambda: -(weights * chosen()).mean(), lora[name], (0, 1))
        apart = abs(seen - summary["first"][1]) / (summary["norm"] / np.sqrt(np.prod(summary["shape"])))
        print(f"starter gradient {name}: {seen:.6e}, differs by {apart:.1e} of the usual element")
        assert apart < 1e-3, name


def check_tokens(reader):
    """Byte-level BPE written out: lowest-ranked pair first."""
    import regex

    words, kinds, merges = (reader.fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "token_type", "merges"))
    ids = {w: i for i, w in enumerate(words)}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in plain)}
    special = regex.compile("(" + "|".join(regex.escape(w) for w, k in zip(words, kinds) if k == 3) + ")")
    pieces = regex.compile(r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def bpe(piece):
        parts = [letters[b] for b in piece.encode()]
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(zip(parts, parts[1:])))
            if rank == len(ranks):
                break
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        return [ids[p] for p in parts]

    def encode(text):
        out = []
        for chunk in special.split(text):
            if special.fullmatch(chunk):
                out.append(ids[chunk])
                continue
            for part in regex.split(r"(\p{N})", chunk):
                out += [i for piece in pieces.findall(part) for i in bpe(piece)]
        return out

    gold = json.loads((TINY.parent / "chat_starter.json").read_text())
    for c in gold["conversations"]:
        first = c["messages"][0]["role"] == "system"
        text = "" if first else "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        text += "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in c["messages"])
        text += "<|im_start|>assistant\n" * c["add_generation_prompt"]
        assert c["rendered"] == text and c["ids"] == encode(text), c["name"]
    for t in gold["texts"]:
        assert t["ids"] == encode(t["text"]), t
    starter = json.loads((TINY.parent / "starter.json").read_text())
    assert starter["text"]["ids"] == encode(starter["text"]["text"]) and starter["chat"]["ids"] == encode(starter["chat"]["rendered"])
    print(len(gold["conversations"]), "conversations and", len(gold["texts"]), "texts agree")


def main():
    files = sorted(TINY.glob("*.json"))
    for file in files:
        check(file)
    print(f"{len(files)} checkpoints agree")
    if len(sys.argv) > 1:
        import gguf

        reader = gguf.GGUFReader(sys.argv[1])
        check_tokens(reader)
        check_starter(reader)


main()
