"""LoRA steps of Chela beside PyTorch with transformers and PEFT: the same model, texts, rank and threads, in turns. See README.md."""

import json
import sys

from common import alternate, arguments, chela, finish, peer, rates, versions

CASES = ["train:1x1024", "train:ragged", "train:shared"]
# How far the first step's mean log-prob may be from Chela's: the same weights, dequantised, summed in another order.
CLOSE = 5e-3


def main():
    args = arguments(__doc__, CASES)
    results = []
    machine = None
    for case in args.only:
        # Processes of their own for each case, so that nothing of another case stays in memory.
        ours, theirs = chela(args), peer(args, "torch")
        machine = machine or rates(args, ours)

        def ask(head):
            return lambda described: theirs.ask(json.dumps({"do": "train", "head": head, "texts": described["texts"]}))

        others = {"torch": ask("all")}
        if case in ("train:ragged", "train:shared"):  # elsewhere every row is scored
            others["torch, head on reply rows"] = ask("reply")
        result = alternate(case, ours, others, args.times)
        first = {name: found["mean_logprob"] for name, found in result["warm_up"].items()}
        if any(abs(first["chela"] - other) > CLOSE for other in first.values()):
            sys.exit(f"{case}: before the first step the mean log-prob is {first}: the sides do not compute the same")
        results.append(result)
        ours.end()
        theirs.end()
    finish(args, machine, versions("torch", "transformers", "peft"), results)
    for result in results:
        work, took = result["work"], sorted(m["seconds"] for m in result["measured"]["chela"])[args.times // 2]
        gflop = work["gflop_maps"] + work["gflop_attention"]
        print(f"{result['case']}: {work['rows']} rows, {work['scored']} scored; needs {work['gflop_maps']:.0f} GFLOP in maps, adapter and head and "
              f"{work['gflop_attention']:.0f} in attention; Chela does it at {gflop / took:.1f} GFLOP/s, {gflop / took / machine['sgemm_gflops']:.0%} of sgemm")


main()
