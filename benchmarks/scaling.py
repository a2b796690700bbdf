"""How the cost of a private step grows with the batch, with the parameters, and with the number of stacked runs.

    python -m benchmarks.scaling                        # this machine's CPU
    python -m benchmarks.scaling --device cuda --json scaling.json

Whole DP-IVON steps as ``dpivon.fit`` makes them. Each sweep changes one size and fits cost ∝ sizeᵏ to the larger half of it:
k = 1 is linear, below 1 a unit costs less in the larger problem. Ratios are within one run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time

import torch

from dpivon.models import PaperCNN
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack

SWEEPS = {
    "cpu": {
        "batch": [32, 64, 128, 256, 512],
        "parameters": [0.5, 1.0, 1.5, 2.0],
        "runs": [1, 2, 4, 8],
    },
    "cuda": {
        "batch": [128, 512, 2048, 8192],
        "parameters": [1.0, 2.0, 4.0],
        "runs": [1, 8, 32, 128],
    },
}
BATCH = {"cpu": 64, "cuda": 512}  # where it is not what is swept


def seconds(network, runs, batch, device, examples, steps):
    """Median seconds of a step."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(examples, 3, 32, 32, device=device, generator=generator)
    y = torch.randint(0, 10, (examples,), device=device, generator=generator)
    all_runs = [Run("dp-ivon-gradsq", i, 1.0, 1.0, 1e-3, batch) for i in range(runs)]
    stack = Stack(all_runs, network, x, y, dtype=dtype, block=steps)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in stack.train(steps):
            pass
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times[1:])  # the first block compiles


def wide(factor):
    """The paper's CNN with all widths multiplied: parameters and work grow with the square."""
    widths = tuple(8 * round(w * factor / 8) for w in (32, 64, 128))
    return AnyNetwork(lambda: PaperCNN(widths=widths, hidden=round(128 * factor)))


def exponent(sizes, times):
    """k of cost ∝ sizeᵏ, by least squares on logarithms over the larger half of the sweep."""
    half = len(sizes) // 2
    x, y = [math.log(s) for s in sizes[half:]], [math.log(t) for t in times[half:]]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sweep", nargs="*", choices=["batch", "parameters", "runs"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, default = args.device, BATCH[args.device]
    examples, steps = (50_000, 16) if device == "cuda" else (4_000, 2)
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    print(f"{hardware}, torch {torch.__version__}")
    facts = {"hardware": hardware, "torch": torch.__version__, "threads": args.threads}
    facts |= {"command": " ".join(["python -m benchmarks.scaling", *sys.argv[1:]]), "sweeps": {}}
    for sweep in args.sweep or ["batch", "parameters", "runs"]:
        sizes, times = [], []
        for value in SWEEPS[device][sweep]:
            network = wide(value) if sweep == "parameters" else PaperNetwork()
            runs, batch = (value if sweep == "runs" else 1), (value if sweep == "batch" else default)
            times.append(seconds(network, runs, batch, device, examples, steps))
            sizes.append(network.size if sweep == "parameters" else value)
            print(f"{sweep:10s} {sizes[-1]:9d}: {1e3 * times[-1]:9.3f} ms a step", flush=True)
        k = exponent(sizes, times)
        print(f"{sweep:10s} cost grows as size^{k:.2f}", flush=True)
        facts["sweeps"][sweep] = {"size": sizes, "ms": [1e3 * t for t in times], "exponent": k}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(facts, file, indent=1)


if __name__ == "__main__":
    main()
