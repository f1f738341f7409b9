"""SmolLM2 from its GGUF, read by transformers in f32: log-probs, greedy continuations, LoRA gradients. Rerun: see README.md."""

import argparse
import hashlib
import json

from common import HERE, greedy_cached, nine, policy_loss, token_logprobs, top5, write_json

import gguf
import numpy as np
import torch
from tokenizer_ids import STARTER_SHA256, read_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

PROSE = (HERE / "starter_text.txt").read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "How do I keep a pot of basil alive on a windowsill?"}]
PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
RANK, ALPHA = 4, 8


def unpermute(rows, heads):
    """GGUF keeps the two halves of a head interleaved, for rotation of neighbours; back to halves."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def read_model(path):
    reader = gguf.GGUFReader(path)

    def key(name):
        return reader.fields[f"llama.{name}"].contents()

    heads, kv = key("attention.head_count"), key("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=key("vocab_size"), hidden_size=key("embedding_length"), intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"), num_attention_heads=heads, num_key_value_heads=kv,
        max_position_embeddings=key("context_length"), rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")}, tie_word_embeddings=True)
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if name == "token_embd":
            name = "model.embed_tokens"
        elif name == "output_norm":
            name = "model.norm"
        else:
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                values = unpermute(values, heads if part == "attn_q" else kv)
            name = f"model.layers.{layer}.{PARTS[part]}"
        weights[name + ".weight"] = torch.from_numpy(np.ascontiguousarray(values))
    model = LlamaForCausalLM(config).float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def mixed(count, number):
    """Numbers in [-0.5, 0.5) that any language can make alike (FORMAT.md)."""
    x = (np.arange(1, count + 1, dtype=np.uint64) * 2654435761 + (number + 1) * 2654445111) % 2**32
    x ^= x >> 16
    x = x * 2246822519 % 2**32
    x ^= x >> 13
    return x.astype(np.float64) / 2**32 - 0.5


class Lora(torch.nn.Module):
    """A linear layer plus its low-rank part, written out here so that PEFT is not needed to read the formula."""

    def __init__(self, base, number):
        super().__init__()
        self.base = base
        for name, shape, place, size in (("lora_A", (RANK, base.in_features), 0, 0.05), ("lora_B", (base.out_features, RANK), 1, 0.02)):
            values = mixed(shape[0] * shape[1], 2 * number + place) * size
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(values.astype(np.float32).reshape(shape))))

    def forward(self, x):
        return self.base(x) + ALPHA / RANK * (x @ self.lora_A.T) @ self.lora_B.T


def lora_part(model, ids):
    """Loss and gradients with the computed adapter on every projection."""
    model.requires_grad_(False)
    for index, layer in enumerate(model.model.layers):
        for place, path in enumerate(PROJECTIONS):
            block, name = path.split(".")
            owner = getattr(layer, block)
            setattr(owner, name, Lora(getattr(owner, name), 7 * index + place))
    gen = torch.Generator().manual_seed(7)
    advantages = [round(a, 2) for a in torch.randn(32, generator=gen).tolist()]
    loss = policy_loss(model, ids, advantages)
    loss.backward()
    grads = {f"base_model.model.{n}.weight": p.grad for n, p in model.named_parameters() if p.requires_grad}
    shown = {n: {"shape": list(g.shape), "norm": nine(g.double().norm().item()), "first": nine(g.flatten()[:4])}
             for n, g in grads.items() if any(f".layers.{layer}." in n for layer in (0, 14, 29))}
    with torch.no_grad():
        logprobs = token_logprobs(model, ids)[-32:]
    return {"rank": RANK, "alpha": ALPHA, "advantages": advantages, "loss": nine(loss.item()), "logprobs": nine(logprobs),
            "gradient_norm": nine(sum(g.double().pow(2).sum() for g in grads.values()).sqrt().item()), "gradients": shown}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", help="SmolLM2-135M-Instruct.Q4_1.gguf")
    path = parser.parse_args().gguf
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == STARTER_SHA256, f"{path} is not the file these numbers are of: {found}"
    model, tokenizer = read_model(path), read_tokenizer(path)
    out = {"gguf_sha256": found}
    ids = tokenizer(PROSE)["input_ids"]
    assert len(ids) >= 512, len(ids)
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    parts = {"text": {"text": tokenizer.decode(ids[:512]), "ids": ids[:512]},
             "chat": {"messages": MESSAGES, "rendered": chat, "ids": tokenizer(chat)["input_ids"]}}
    for name, part in parts.items():
        with torch.no_grad():
            part |= {"logprobs": nine(token_logprobs(model, part["ids"])), "top5": top5(model, part["ids"]),
                     "greedy": greedy_cached(model, part["ids"], 64)}
        print(name, sum(part["logprobs"]) / len(part["logprobs"]), part["greedy"]["smallest_lead"], repr(tokenizer.decode(part["greedy"]["ids"])))
        out[name] = part
    out["chat"]["greedy_text"] = tokenizer.decode(out["chat"]["greedy"]["ids"])
    out["lora"] = lora_part(model, out["text"]["ids"])
    print("lora", out["lora"]["loss"], out["lora"]["gradient_norm"])
    write_json(HERE / "starter.json", out)


main()
