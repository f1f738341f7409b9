"""Tiny random checkpoints of each family with log-probs, greedy continuations and gradients. Rerun: see README.md."""

import json
import shutil
import sys

from common import HERE, greedy, nine, policy_loss, short_name, token_logprobs, top5, write_json

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

SIZE = dict(vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
LORA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = dict(head_dim=16, rms_norm_eps=1e-6, moe_intermediate_size=32, num_experts=5, num_experts_per_tok=2)

# name: config class, what differs, is config.json to be written in the words used before transformers 5
MODELS = {
    "llama-tied": (LlamaConfig, dict(head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=PLAIN), False),
    "llama-rope3": (LlamaConfig, dict(head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=LLAMA3), True),
    "qwen2-tied": (Qwen2Config, dict(rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=PLAIN), True),
    "qwen2-untied": (Qwen2Config, dict(rms_norm_eps=1e-6, tie_word_embeddings=False,
                                       rope_parameters=PLAIN | {"rope_theta": 1000000.0}), False),
    # heads wider than hidden / heads, as in every real Qwen3
    "qwen3-tied": (Qwen3Config, dict(head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=True,
                                     rope_parameters=PLAIN | {"rope_theta": 1000000.0}), True),
    "qwen3-untied": (Qwen3Config, dict(head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters=PLAIN), False),
    # texts longer than the window, and both kinds of layer
    "gemma3-tied": (Gemma3TextConfig, dict(head_dim=32, rms_norm_eps=1e-6, num_hidden_layers=3, sliding_window=16, sliding_window_pattern=3,
                                           query_pre_attn_scalar=32,
                                           rope_parameters={"full_attention": PLAIN | {"rope_theta": 1000000.0}, "sliding_attention": LOCAL}), True),
    "gemma3-scaled": (Gemma3TextConfig, dict(head_dim=16, rms_norm_eps=1e-6, sliding_window=24, layer_types=["full_attention", "sliding_attention"],
                                             query_pre_attn_scalar=24, rope_parameters={
                                                 "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                                                 "sliding_attention": LOCAL}), False),
    "qwen3moe-normed": (Qwen3MoeConfig, EXPERTS | dict(norm_topk_prob=True, tie_word_embeddings=False,
                                                       rope_parameters=PLAIN | {"rope_theta": 1000000.0}), True),
    "qwen3moe-plain": (Qwen3MoeConfig, EXPERTS | dict(norm_topk_prob=False, tie_word_embeddings=True, rope_parameters=PLAIN), False),
}


def fill(model, seed):
    """Random weights, large enough that heads attend and logits spread, each a bf16 number."""
    gen = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type == "gemma3_text"
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=gen)
            if name.endswith("norm.weight"):
                # A Gemma's factor is 1 + w; its last one is large, since the embeddings it meets are small.
                noise = 0.2 * noise + ((4 if name == "model.norm.weight" else 0) if gemma else 1)
            elif name.endswith("bias"):
                noise *= 0.3
            elif "embed_tokens" in name or "lm_head" in name:
                noise *= 0.04 if gemma else 0.3  # times 8 on the way in, and a token should not predict itself
            else:
                noise *= 1.5 / p.shape[-1] ** 0.5
            p.copy_(noise.to(torch.bfloat16).float())


def experts(name, stacked):
    """transformers keeps the experts' matrices stacked, gate above up; in a checkpoint each is a tensor of its own."""
    at, kind = name.rsplit(".", 1)
    for number, matrix in enumerate(stacked):
        if kind == "gate_up_proj":
            gate, up = matrix.chunk(2)
            yield f"{at}.{number}.gate_proj.weight", gate
            yield f"{at}.{number}.up_proj.weight", up
        else:
            yield f"{at}.{number}.down_proj.weight", matrix


def write_checkpoint(model, folder, old_words):
    """model.safetensors in BF16 and config.json, the latter with rope_theta and rope_scaling where old_words."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = {}
    for n, p in model.named_parameters():
        p = p.detach().to(torch.bfloat16)
        for name, part in experts(n, p) if ".mlp.experts." in n else [(n, p)]:
            tensors[name] = part.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    if old_words:
        rope = dict(config.pop("rope_parameters"))
        if "sliding_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
            rope = dict(rope["full_attention"])
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        if "num_local_experts" in config:
            config["num_experts"] = config.pop("num_local_experts")
        config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_adapter(folder, name, seed):
    """A LoRA adapter in PEFT's layout whose A and B are both random, so that both have gradients."""
    modules = LORA[:4] if "moe" in name else LORA  # experts take none
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=modules, bias="none", task_type="CAUSAL_LM")
    model = get_peft_model(load(folder), config, autocast_adapter_dtype=False)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in sorted(model.named_parameters()):
            if "lora_" in n:
                p.copy_(torch.randn(p.shape, generator=gen) * (0.3 / p.shape[1] ** 0.5))
    model.peft_config["default"].base_model_name_or_path = name
    adapter = folder / "adapter"  # apart: transformers applies an adapter that lies beside a model without being asked
    model.save_pretrained(adapter, save_embedding_layers=False)
    (adapter / "README.md").unlink(missing_ok=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = modules
    (adapter / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tensor_summary(tensors):
    return {n: {"shape": list(t.shape), "norm": nine(t.double().norm().item()), "first": nine(t.flatten()[:4])} for n, t in tensors.items()}


def gradients(model, ids, advantages, wanted):
    """Loss and its gradient by each parameter whose name `wanted` accepts."""
    for n, p in model.named_parameters():
        p.requires_grad_(wanted(n))
        p.grad = None
    loss = policy_loss(model, ids, advantages)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def lora_steps(model, ids, advantages):
    """Gradient at the given adapter, then two steps of AdamW, each on the gradient where it stands."""
    lora = {n: p for n, p in model.named_parameters() if "lora_" in n}
    before = {n: p.detach().clone() for n, p in lora.items()}
    optimizer = torch.optim.AdamW(lora.values(), lr=2e-4, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    losses, first, steps = [], None, []
    for _ in range(2):
        loss, grads = gradients(model, ids, advantages, lambda n: "lora_" in n)
        losses.append(loss)
        first = first or grads
        optimizer.step()
        moved = {short_name(n): p.detach() - before[n] for n, p in lora.items()}
        steps.append({
            "moved_norm": nine(sum(m.double().pow(2).sum() for m in moved.values()).sqrt().item()),
            "moved": {n: nine(m.double().norm().item()) for n, m in moved.items()},
            "parameters_first": {short_name(n): nine(p.flatten()[:4]) for n, p in lora.items()},
        })
    losses.append(policy_loss(model, ids, advantages).item())
    return losses, {short_name(n): g for n, g in first.items()}, steps


def draw(name, seed):
    """A checkpoint and two texts whose greedy continuations no rounding can turn."""
    config_class, differs, _ = MODELS[name]
    model = AutoModelForCausalLM.from_config(config_class(**SIZE | differs), dtype=torch.float32, attn_implementation="eager").eval()
    while True:
        fill(model, seed)
        gen = torch.Generator().manual_seed(seed + 50)
        texts = [torch.randint(0, 320, (n,), generator=gen).tolist() for n in (12, 80)]
        if all(greedy(model, ids, 32)["smallest_lead"] > 0.01 for ids in texts):
            return model, texts, gen, seed
        seed += 1


def golden(name, number):
    folder = HERE / "tiny" / name
    model, texts, gen, seed = draw(name, 100 * (number + 1))
    write_checkpoint(model, folder, MODELS[name][2])
    advantages = [round(a, 2) for a in torch.randn(20, generator=gen).tolist()]
    reread = load(folder)
    for ids in texts:  # what was written reads back as what was computed with
        assert torch.equal(model(torch.tensor([ids])).logits, reread(torch.tensor([ids])).logits), name
    out = {"seed": seed, "texts": []}
    for ids in texts:
        with torch.no_grad():
            out["texts"].append({"ids": ids, "logprobs": nine(token_logprobs(reread, ids)), "top5": top5(reread, ids),
                                 "greedy": greedy(reread, ids, 32)})
    cached = reread.generate(torch.tensor([texts[0]]), max_new_tokens=32, do_sample=False)[0, 12:].tolist()
    assert cached == out["texts"][0]["greedy"]["ids"], name
    loss, full = gradients(reread, texts[1], advantages, lambda n: True)
    out["advantages"] = advantages
    out["full_loss"] = nine(loss)
    out["full_gradients"] = tensor_summary(full)
    save_file({n: g.contiguous() for n, g in full.items() if ".layers.0.self_attn.q_proj" in n or n.endswith("norm.weight")},
              HERE / "tiny" / f"{name}.full_gradients.safetensors")

    write_adapter(folder, name, seed + 70)
    tuned = PeftModel.from_pretrained(load(folder), folder / "adapter", is_trainable=True, autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        out["adapter_logprobs"] = [nine(token_logprobs(tuned, ids)) for ids in texts]
    losses, grads, steps = lora_steps(tuned, texts[1], advantages)
    assert set(grads) == set(load_file(folder / "adapter" / "adapter_model.safetensors")), name
    out["lora_losses"] = nine(losses)
    out["lora_gradient_norm"] = nine(sum(g.double().pow(2).sum() for g in grads.values()).sqrt().item())
    out["lora_gradients"] = tensor_summary(grads)
    out["adamw"] = steps
    save_file({n: g.contiguous() for n, g in grads.items()}, HERE / "tiny" / f"{name}.lora_gradients.safetensors")
    write_json(HERE / "tiny" / f"{name}.json", out)
    print(name, "seed", seed, "losses", losses, "leads", [t["greedy"]["smallest_lead"] for t in out["texts"]],
          "different tokens", [len(set(t["greedy"]["ids"])) for t in out["texts"]],
          "mean logprob", [sum(t["logprobs"]) / len(t["logprobs"]) for t in out["texts"]])


for number, name in enumerate(MODELS):
    if name in sys.argv[1:] or len(sys.argv) == 1:
        golden(name, number)
