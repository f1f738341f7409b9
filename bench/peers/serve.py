"""Replies and prompts of Chela beside llama.cpp, prompts also beside PyTorch: the same file, ids and threads, in turns. See README.md."""

import json
import os

from common import alternate, arguments, chela, finish, peer, rates, versions

CASES = ["decode:1", "decode:8", "decode:32", "prefill:512"]
# Tokens of a reply of llama.cpp. Chela times 48 steps while all replies run; both end up about as deep in their texts.
TOKENS = 64
# Of each prompt before it.
PROMPT = 32


def main():
    args = arguments(__doc__, CASES)
    ours = chela(args)
    machine = rates(args, ours)
    results = []
    for case in args.only:
        kind, number = case.split(":")
        lanes, context = (int(number), PROMPT + TOKENS) if kind == "decode" else (1, int(number) + 1)
        llama = peer(args, "llama.cpp", "--lanes", str(lanes), "--context", str(context))
        sides = {"llama.cpp": llama}
        if kind == "prefill":
            sides["torch"] = peer(args, "torch")

        def ask(side):
            return lambda described: side.ask(json.dumps({"do": kind, "tokens": TOKENS, "texts": described["texts"]}))

        results.append(alternate(case, ours, {name: ask(side) for name, side in sides.items()}, args.times))
        for side in sides.values():
            side.end()
    ours.end()
    finish(args, machine, versions("xllamacpp", "torch", "transformers"), results)
    size = os.path.getsize(args.model) / 1e9
    for result in results:
        rate = sorted(m["rate"] for m in result["measured"]["chela"])[args.times // 2]
        if result["case"] == "decode:1":
            print(f"decode:1: {size * rate:.1f} GB/s of the file's {size * 1e3:.0f} MB, {size * rate / machine['memory_gbs']:.0%} of memory's rate")
        work = result["work"]["gflop_maps"] + result["work"]["gflop_attention"]
        if result["case"].startswith("prefill:"):
            gflops = work * rate / result["work"]["rows"]
            print(f"{result['case']}: needs {work:.0f} GFLOP; Chela does it at {gflops:.1f} GFLOP/s, {gflops / machine['sgemm_gflops']:.0%} of sgemm")


main()
