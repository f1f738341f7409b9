"""What train.py and serve.py share: sides that measure when told, one at a time, and the table of what came of it."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STARTER = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Threads of a side that has just measured spin for a while; the other side must not share the cores with them.
PAUSE = 0.5


def arguments(about, cases):
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chela", default=str(HERE.parent.parent / "target/release/chela"), help="the program (default: %(default)s)")
    parser.add_argument("--model", help="GGUF file (default: the starter in Chela's cache)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side (default: all cores, %(default)s)")
    parser.add_argument("--times", type=int, default=5, help="measurements of each side after one that warms up (default: %(default)s)")
    parser.add_argument("--only", default=",".join(cases), help="cases as chela bench names them, separated by commas (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was measured to this file")
    args = parser.parse_args()
    if args.times < 1 or args.threads < 1:
        parser.error("--times and --threads are at least 1")
    if not os.access(args.chela, os.X_OK):
        parser.error(f"{args.chela} is no program: build it with cargo build --release, or name it with --chela")
    args.model = args.model or starter()
    if not os.path.isfile(args.model):
        parser.error(f"{args.model} is not there: run {args.chela} bench once, which fetches the starter, or name a GGUF file with --model")
    args.only = [name for name in args.only.split(",") if name]
    kinds = {name.split(":")[0] for name in cases}
    unknown = [name for name in args.only if name.split(":")[0] not in kinds]
    if unknown or not args.only:  # the rest of a name is Chela's to judge
        parser.error(f"--only {','.join(unknown)}: name cases like {', '.join(cases)}")
    return args


def starter():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "chela", STARTER)


class Side:
    """A process that loads a model once and then answers each line with the line of one measurement."""

    def __init__(self, name, command, threads):
        self.name = name
        one = str(threads)
        environment = os.environ | {"OMP_NUM_THREADS": one, "MKL_NUM_THREADS": one, "OPENBLAS_NUM_THREADS": one,
                                    "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, line):
        """The answer, with the peak of resident memory during the measurement."""
        self.reset_peak()
        before = self.worked()
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.process.kill()
            sys.exit(f"{self.name} ended with {self.process.wait()} at {line[:80]!r}; what it said stands above")
        found = json.loads(answer)
        found["peak_mib"] = self.status("VmHWM")
        after = self.worked()
        found["processor_seconds"] = None if None in (before, after) else after - before
        return found

    def worked(self):
        """Seconds of processor time so far, all threads."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def reset_peak(self):
        """Loading reads and converts whole files, which says nothing of a step: the peak counts from here."""
        try:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        except OSError:
            pass  # then it counts from the start, for this side as for the other

    def status(self, key):
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":")), None)

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def chela(args):
    return Side("chela", [args.chela, "bench", "--only", "-", "--json", "--threads", str(args.threads), "--model", args.model], args.threads)


def peer(args, name, *more):
    command = [sys.executable, str(HERE / "worker.py"), name, "--model", args.model, "--threads", str(args.threads), *more]
    return Side(name, command, args.threads)


def alternate(case, ours, others, times):
    """Measures Chela and the others in turn; `others` maps a name to a function from what Chela said of the case to a measurement.

    Everybody goes first equally often, since a machine's speed drifts. The first round warms up and does not count."""
    described = ours.ask(case)
    if "texts" not in described:
        sys.exit(f"{case}: Chela did not describe its texts; is this a newer script than the program?")
    turns = {"chela": lambda: ours.ask(case)} | {name: (lambda ask=ask: ask(described)) for name, ask in others.items()}
    warm = {"chela": described} | {name: turns[name]() for name in others}
    measured = {name: [] for name in turns}
    for round in range(times):
        order = list(turns) if round % 2 == 0 else list(reversed(turns))
        for name in order:
            time.sleep(PAUSE)
            found = turns[name]()
            measured[name].append(found)
            print(f"  {case} {round + 1}/{times} {name}: {found['rate']:.1f} {described['unit']}", file=sys.stderr, flush=True)
    return {"case": case, "unit": described["unit"], "work": described["work"], "warm_up": {n: slim(w) for n, w in warm.items()},
            "measured": {n: [slim(m) for m in all] for n, all in measured.items()}}


def slim(found):
    return {key: value for key, value in found.items() if key not in ("texts", "work", "case", "unit", "warm_up")}


def rates(args, ours):
    """The machine, in this run: what Chela's own products and reads reach."""
    for case in ("sgemm", "memory"):
        ours.ask(case)
    return {"sgemm_gflops": ours.ask("sgemm")["rate"], "memory_gbs": ours.ask("memory")["rate"]}


def cores():
    """Seconds that all cores have worked, and how much of it was for this program and what it started and waited for."""
    try:
        fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    user, nice, system, _, _, interrupt, soft, steal = (fields + [0] * 8)[:8]
    busy = (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
    return busy, sum(os.times()[:4]), time.monotonic() * os.cpu_count()


BEFORE = cores()


def taken_by_others():
    """Part of the cores that other programs, or other guests of the host, took since the start: of a run with more than a few per
    cent of it nothing should be believed. Counts what is started here only once it has ended."""
    after = cores()
    if BEFORE is None or after is None:
        return "an unknown part"
    busy, own, all = (b - a for a, b in zip(BEFORE, after))
    return f"{max(0.0, busy - own) / all:.0%}"


def spread(values):
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def processor_ratio(ours, theirs):
    """How many times the processor time of Chela a peer took: what stays true on one thread while other programs run. With more
    threads it would count those that wait by spinning."""
    pairs = [(a["processor_seconds"], b["processor_seconds"]) for a, b in zip(ours, theirs)]
    if any(not a or not b for a, b in pairs):
        return "unknown"
    return spread([b / a for a, b in pairs])


def table(results, threads):
    """One row for each case and peer: rates, and the ratio of each round, ours over theirs."""
    rows = [("case", "peer", "chela", "peer's rate", "unit", "ratio, median (min to max)", "peak MiB", "memory ratio")]
    if threads == 1:
        rows[0] += ("processor time, theirs to ours",)
    for result in results:
        ours = result["measured"]["chela"]
        for name, theirs in result["measured"].items():
            if name == "chela":
                continue
            ratios = [a["rate"] / b["rate"] for a, b in zip(ours, theirs)]
            peaks = [[m["peak_mib"] for m in side] for side in (ours, theirs)]
            known = None not in peaks[0] + peaks[1]
            rows.append((
                result["case"], name, spread([m["rate"] for m in ours]), spread([m["rate"] for m in theirs]), result["unit"], spread(ratios),
                f"{max(peaks[0]):.0f} / {max(peaks[1]):.0f}" if known else "unknown",
                f"{max(peaks[0]) / max(peaks[1]):.2f}" if known else "unknown"))
            if threads == 1:  # a decode case counts less than it does, so nothing can be said of it
                rows[-1] += ("" if result["case"].startswith("decode:") else processor_ratio(ours, theirs),)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def finish(args, machine, versions, results):
    print(f"machine: sgemm {machine['sgemm_gflops']:.1f} GFLOP/s, memory {machine['memory_gbs']:.1f} GB/s, {args.threads} threads each; "
          f"{args.times} rounds; other programs took {taken_by_others()} of the cores; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    table(results, args.threads)
    if args.json:
        everything = {"threads": args.threads, "times": args.times, "model": os.path.basename(args.model), "machine": machine,
                      "versions": versions, "results": results}
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n")


def versions(*names):
    from importlib.metadata import version
    return {name: version(name) for name in names}
