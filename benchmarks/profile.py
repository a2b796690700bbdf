"""Where a step's time goes, by the library's own parts.

python -m benchmarks.profile                 # one book-keeping step of the paper's CNN on the CPU, b = 256
python -m benchmarks.profile --stacked 90:512    # GPU kernels of a stacked step
"""

from __future__ import annotations

import argparse
import time
from collections import Counter


def timed(cls, name, times):
    """Add up the seconds that a method takes."""
    original = getattr(cls, name)

    def measured(*args, **kwargs):
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            times[f"{cls.__name__}.{name}"] += time.perf_counter() - start

    setattr(cls, name, measured)


def cpu(contender, steps=8):
    import torch

    from benchmarks.step import make_step
    from dpivon.optim.ivon import IVON
    from dpivon.privacy.gradients.bookkeeping import BookKeeper
    from dpivon.privacy.layers import registry
    from dpivon.privacy.optimizer import DPOptimizer

    torch.set_num_threads(2)
    times = Counter()
    for cls, name in ((BookKeeper, "_record"), (BookKeeper, "clipped_sums"), (DPOptimizer, "_release")):
        timed(cls, name, times)
    for name in ("_draw", "_perturb", "_evidence", "_update"):
        timed(IVON, name, times)
    for layer, rule in list(registry.RULES.items()):

        def measured(module, inputs, g, rule=rule):
            start = time.perf_counter()
            uses = rule(module, inputs, g)
            times[f"  rule {type(module).__name__} {tuple(module.weight.shape)}"] += time.perf_counter() - start
            return uses

        registry.RULES[layer] = measured
    step = make_step(contender, "cnn", 256, "cpu")
    for _ in range(3):
        step()
    times.clear()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    print(f"{contender}, b = 256, two threads: {1e3 * (time.perf_counter() - start) / steps:.0f} ms a step, of which")
    for name, seconds in times.most_common():
        print(f"{name:44s} {1e3 * seconds / steps:7.1f} ms")


def gpu(runs, batch, steps=8):
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.stacked import data
    from dpivon.stacked import PaperNetwork, Run, Stack

    all_runs = [Run("dp-ivon-gradsq", i, 1.0, 10.0, 0.1, batch) for i in range(runs)]
    stack = Stack(all_runs, PaperNetwork(), *data(), dtype=torch.bfloat16, block=steps)
    for _ in stack.train(steps):
        pass
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in stack.train(steps):
            pass
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda e: -e.device_time_total)
    print(
        f"{runs} runs, b = {batch}: {sum(e.device_time_total for e in events) / steps / 1e3:.1f} ms a step in kernels"
    )
    for e in events[:30]:
        print(f"{e.device_time_total / steps / 1e3:8.3f} ms {e.count / steps:6.1f} x {e.key[:90]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", default="ours-cl-64")
    parser.add_argument("--stacked", metavar="K:b")
    chosen = parser.parse_args()
    if chosen.stacked:
        gpu(*map(int, chosen.stacked.split(":")))
    else:
        cpu(chosen.contender)
