"""Examples a second of stacked private training, against the number of runs and the batch; and one run against plain training.

    python -m benchmarks.stacked                     # on a GPU: the paper's CNN, whole DP-IVON steps, captured
    python -m benchmarks.stacked --json stacked.json

A step is everything: Poisson sampling, posterior sample, forward, backward, clipping, noise, update. Ratios are within one run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from benchmarks.plain import plain_step
from dpivon.models import PaperCNN
from dpivon.stacked import PaperNetwork, Run, Stack
from dpivon.study.run.work import clear

SIZES = [(1, 128), (1, 512), (9, 512), (30, 512), (90, 128), (90, 256), (90, 512)]


def data(n=50_000):
    generator = torch.Generator(device="cuda").manual_seed(0)
    images = torch.randn(n, 3, 32, 32, device="cuda", generator=generator)
    return images, torch.randint(0, 10, (n,), device="cuda", generator=generator)


def stacked(runs, batch, images, labels, steps, block):
    stack = Stack(
        [Run("dp-ivon-gradsq", i, 1.0, 10.0, 0.1, batch) for i in range(runs)],
        PaperNetwork(), images, labels, dtype=torch.bfloat16, block=block,
    )  # fmt: skip
    for _ in stack.train(2 * block):
        pass
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in stack.train(steps):
        pass
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30
    del stack
    clear(images.device)  # or the next one's peak would hold this one's graph
    return {"ms": 1e3 * seconds, "examples_per_s": runs * batch / seconds, "peak_gb": peak}


def plain(batch, compiled, channels_last, captured, steps=200):
    """Milliseconds of a non-private SGD step in bf16 on one fixed batch."""
    torch.manual_seed(0)
    model = PaperCNN().cuda()
    x, y = torch.randn(batch, 3, 32, 32, device="cuda"), torch.randint(0, 10, (batch,), device="cuda")
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    step = plain_step(model, x, y, compiled=compiled, captured=captured)
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--sizes", nargs="*", help="K:b pairs, such as 90:512")
    args = parser.parse_args()
    sizes = [tuple(map(int, s.split(":"))) for s in args.sizes] if args.sizes else SIZES
    images, labels = data()
    rows, best = [], {}
    if not args.no_plain:
        for batch in (128, 512):
            times = {}
            for compiled in (False, True):
                for channels_last in (False, True):
                    for captured in (False, True):
                        name = "compiled" if compiled else "eager"
                        name += " channels_last" * channels_last + " captured" * captured
                        try:
                            times[name] = plain(batch, compiled, channels_last, captured)
                        except Exception as error:  # a combination torch cannot capture is no contender
                            print(f"plain b={batch} {name}: {type(error).__name__}", file=sys.stderr)
            best[batch] = min(times.values())
            print(f"non-private bf16, b={batch}: " + ", ".join(f"{n} {t:.3f} ms" for n, t in times.items()), flush=True)
    for runs, batch in sizes:
        row = {"runs": runs, "batch": batch} | stacked(runs, batch, images, labels, args.steps, args.block)
        if runs == 1 and batch in best:
            row["over_best_plain"] = row["ms"] / best[batch]
        rows.append(row)
        ratio = f", {row['over_best_plain']:.2f} x best non-private" if "over_best_plain" in row else ""
        print(
            f"K={runs:3d} b={batch:4d}: {row['ms']:8.3f} ms a step, {row['examples_per_s'] / 1e6:.3f} M examples/s, "
            f"peak {row['peak_gb']:.1f} GB{ratio}", flush=True,
        )  # fmt: skip
    if args.json:
        facts = {
            "hardware": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "command": " ".join(["python -m benchmarks.stacked", *sys.argv[1:]]),
        }
        with open(args.json, "w") as file:
            json.dump(facts | {"best_non_private_ms": best, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
