"""A peer that measures when told: loads the model once, then answers each line of JSON on standard input with one measurement.

Started by train.py and serve.py. `torch` trains and reads prompts with PyTorch, transformers and PEFT in float32, `llama.cpp` makes
replies and reads prompts through xllamacpp."""

import argparse
import json
import os
import sys
import time

RANK = 16
ALPHA = 32
MAPS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Torch:
    def __init__(self, args):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(args.threads)
        self.torch = torch
        folder, file = os.path.split(args.model)
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = None
        self.warm = set()

    def adapt(self):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MAPS, lora_dropout=0.0, task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)
        self.model.config.use_cache = False
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        assert all(p.dtype == self.torch.float32 for p in self.model.parameters())
        self.optimizer = self.torch.optim.AdamW(self.trained, lr=1e-5, weight_decay=0.0, fused=True)

    def padded(self, texts):
        """Ids and labels [B, T], padded on the right, and the mask, where anything is padded at all."""
        torch, longest = self.torch, max(len(t["ids"]) for t in texts)
        ids = torch.zeros((len(texts), longest), dtype=torch.long)
        labels = torch.full((len(texts), longest), -100)
        mask = torch.zeros((len(texts), longest), dtype=torch.long)
        for row, text in enumerate(texts):
            n, start = len(text["ids"]), text["start"]
            ids[row, :n] = torch.tensor(text["ids"])
            labels[row, start:n] = ids[row, start:n]
            mask[row, :n] = 1
        return ids, labels, None if bool(mask.all()) else mask

    def loss(self, texts, head):
        """Mean negative log-prob of the scored tokens."""
        ids, labels, mask = self.padded(texts)
        if head == "all":
            return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        # By hand, what a careful trainer does: only rows that predict a scored token go through the head.
        inner = self.model.get_base_model()
        hidden = inner.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
        labels = labels[:, 1:]
        logits = inner.lm_head(hidden[labels != -100])
        return self.torch.nn.functional.cross_entropy(logits, labels[labels != -100])

    def train(self, ask):
        if self.optimizer is None:
            self.adapt()
        # The step that warms up moves nothing, so that each way through the head first speaks of the weights as they were read.
        self.optimizer.param_groups[0]["lr"] = 1e-5 if ask["head"] in self.warm else 0.0
        self.warm.add(ask["head"])
        started = time.perf_counter()
        loss = self.loss(ask["texts"], ask["head"])
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "rate": sum(len(t["ids"]) for t in ask["texts"]) / seconds, "mean_logprob": -loss.item()}

    def prefill(self, ask):
        ids = self.torch.tensor([ask["texts"][0]["ids"]])
        started = time.perf_counter()
        with self.torch.inference_mode():
            # Keys and values are kept, as for a reply; only the last row goes through the head.
            self.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "rate": ids.shape[1] / seconds}


class LlamaCpp:
    def __init__(self, args):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = args.model
        params.n_parallel = args.lanes
        params.n_ctx = args.lanes * -(-args.context // 128) * 128
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
        params.cache_ram_mib = 0
        params.verbosity = -1
        self.server = xllamacpp.Server(params)

    def complete(self, texts, most):
        """Its own clock: what its server adds around the model does not count."""
        ask = {"prompt": [t["ids"] for t in texts], "max_tokens": most, "n_predict": most, "temperature": 0.0, "top_k": 1,
               "repeat_penalty": 1.0, "ignore_eos": True, "cache_prompt": False}
        answer = self.server.handle_completions(ask)
        took = answer["timings"]
        assert (took["cache_n"], took["prompt_n"], took["predicted_n"]) == (0, len(texts[0]["ids"]), most), took
        return took

    def prefill(self, ask):
        took = self.complete(ask["texts"], 1)
        seconds = took["prompt_ms"] / 1e3
        return {"seconds": seconds, "rate": took["prompt_n"] / seconds}

    def decode(self, ask):
        # All prompts come in one request and are read in one batch, so that the replies run in step from the first token, when its
        # clock starts.
        took = self.complete(ask["texts"], ask["tokens"])
        seconds = took["predicted_ms"] / 1e3
        return {"seconds": seconds, "rate": len(ask["texts"]) * (took["predicted_n"] - 1) / seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["torch", "llama.cpp"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each lane at least")
    args = parser.parse_args()
    # Libraries print; the answers must stay alone on standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = {"torch": Torch, "llama.cpp": LlamaCpp}[args.peer](args)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(getattr(peer, ask["do"])(ask)), file=answers, flush=True)


main()
