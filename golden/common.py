"""What the golden programs share: rounding, log-probs, greedy reading, and LoRA gradients."""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

HERE = Path(__file__).resolve().parent
torch.set_num_threads(1)
torch.manual_seed(0)


def nine(value):
    """A float (or nested lists of floats) with nine significant digits: every f32 comes back exactly."""
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, list):
        return [nine(v) for v in value]
    return float(f"{value:.9g}")


def write_json(path, data):
    """One key a line, so that a diff names the field."""
    body = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in data.items())
    Path(path).write_text("{\n" + body + "\n}\n", encoding="utf-8")


def token_logprobs(model, ids):
    """log p(ids[t + 1] | ids[..= t]) for each t: one less than there are ids. The softmax over f32 logits is taken in f64: torch's
    log_softmax in f32 adds up the many small terms of a large vocabulary badly (each log-prob of the starter 1.7e-5 too high)."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def top5(model, ids):
    """The five most likely next tokens after all ids."""
    with torch.no_grad():
        last = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)
    values, tokens = last.topk(5)
    return {"ids": tokens.tolist(), "logprobs": nine(values)}


def greedy(model, ids, steps):
    """Greedy continuation without a cache, end ids not heeded. Also the smallest lead of the first over the second token:
    where it is small, another order of summation may choose otherwise."""
    ids, lead = list(ids), float("inf")
    start = len(ids)
    with torch.no_grad():
        for _ in range(steps):
            values, tokens = model(torch.tensor([ids])).logits[0, -1].float().topk(2)
            lead = min(lead, (values[0] - values[1]).item())
            ids.append(tokens[0].item())
    return {"ids": ids[start:], "smallest_lead": nine(lead)}


def greedy_cached(model, ids, steps):
    """As `greedy`, with a cache, for models too slow to read everything again for each token. One uncached reading of the
    whole confirms each choice."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=steps, do_sample=False, eos_token_id=None)[0].tolist()
    with torch.no_grad():
        values, tokens = model(torch.tensor([out])).logits[0, len(ids) - 1:-1].float().topk(2)
    assert tokens[:, 0].tolist() == out[len(ids):]
    return {"ids": out[len(ids):], "smallest_lead": nine((values[:, 0] - values[:, 1]).min().item())}


def greedy_by_llama_cpp(path, prompts, steps, context):
    """After each prompt of ids: llama.cpp's greedy ids, their text, and (id, log-prob) of each token that ends a character."""
    import xllamacpp  # only where it is asked for: it is not needed for the other golden numbers

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    ask = {"max_tokens": steps, "temperature": 0.0, "top_k": 1, "repeat_penalty": 1.0, "cache_prompt": False, "logprobs": 1,
           "return_tokens": True, "verbose": True}
    for ids in prompts:
        answer = server.handle_completions(ask | {"prompt": ids})
        choice = answer["choices"][0]
        # Tokens that end no character have no log-prob of their own.
        yield answer["__verbose"]["tokens"], choice["text"], [(c["id"], c["logprob"]) for c in choice["logprobs"]["content"]]


def real_greedy(model, gguf, prompts, steps):
    """Of a real model: llama.cpp's greedy text after each (text, ids), by how much each of its tokens leads in transformers, how many are
    transformers' too, and transformers' own."""
    out, prompts = [], list(prompts)
    said_there = greedy_by_llama_cpp(gguf, [ids for _, ids in prompts], steps, 1024)
    for (text, prompt), (said, words, _) in zip(prompts, said_there):
        with torch.no_grad():
            values, tokens = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1:-1].topk(2)
        same = next((i for i, (a, b) in enumerate(zip(tokens[:, 0].tolist(), said)) if a != b), len(said))
        lead = (values[:, 0] - values[:, 1]).tolist()
        print(repr(text), "->", repr(words), "transformers agrees for", same, "of", len(said), "smallest lead", min(lead[:same], default=0))
        out.append({"prompt": text, "ids": prompt, "greedy": said, "text": words, "leads": nine(lead), "same_in_transformers": same,
                    "exact": greedy_cached(model, prompt, steps)})
    return out


def policy_loss(model, ids, advantages):
    """-mean(A_t * logprob_t) over the last len(advantages) tokens of the text."""
    chosen = token_logprobs(model, ids)[-len(advantages):]
    return -(torch.tensor(advantages, dtype=torch.float64) * chosen).mean()


def short_name(name):
    """PEFT's name of a LoRA parameter as it stands in adapter_model.safetensors."""
    return name.replace(".default.weight", ".weight")
