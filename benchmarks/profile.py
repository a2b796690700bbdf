"""Where a step's time goes, by the library's own parts.

python -m benchmarks.profile                 # one book-keeping step of the paper's CNN on the CPU, b = 256
python -m benchmarks.profile --stacked 90:512    # GPU kernels of a stacked step
python -m benchmarks.profile --model wrn:256     # GPU kernels of captured steps of a model of `benchmarks.step`, private or not
python -m benchmarks.profile --transformer roberta-large:16x128:adamw    # GPU kernels of a step of `benchmarks.transformers`
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

    from benchmarks.stacked import data
    from dpivon.stacked import PaperNetwork, Run, Stack

    all_runs = [Run("dp-ivon-gradsq", i, 1.0, 10.0, 0.1, batch) for i in range(runs)]
    stack = Stack(all_runs, PaperNetwork(), *data(), dtype=torch.bfloat16, block=steps)

    def block():
        for _ in stack.train(steps):
            pass

    block()
    report(f"{runs} runs, b = {batch}", kernels(block, steps))


#: What a kernel is for, by what its name holds; the first that fits.
PARTS = (
    ("layout changes", ("nchwtonhwc", "nhwctonchw", "convert_layout")),
    ("conv statistics (our kernels)", ("gradient_statistics", "combine_statistics")),
    ("conv sums (our kernels)", ("gradient_sums",)),
    ("sums over positions and chunks (our kernel)", ("add_positions",)),
    ("norms and sums of the paper's network (our kernels)", ("weight_norms", "weight_sums")),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("convolutions (cuDNN)", ("cudnn", "fprop", "dgrad", "wgrad", "convolve", "implicit")),
    ("products of matrices", ("gemm", "cutlass", "nvjet", "triton_tem", "splitk", "bmm")),
    ("compiled reductions", ("triton_red", "triton_per")),
    ("compiled elementwise", ("triton_poi", "triton_for")),
    ("noise and sampling", ("philox", "normal", "random", "poisson")),
    ("copies", ("memcpy", "memset", "copy")),
)


SHORT = 4e-3  # ms of a kernel whose work is mostly to be launched


def kernels(function, steps):
    """(name, ms a step, launches a step) of what the device did while the function ran, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda e: -e.device_time_total)
    return [(e.key, e.device_time_total / steps / 1e3, e.count / steps) for e in events if e.device_time_total]


def part(name):
    low = name.lower()
    return next((label for label, words in PARTS if any(word in low for word in words)), "other")


def report(title, found, most=30):
    print(f"{title}: {sum(ms for _, ms, _ in found):.2f} ms a step in {sum(n for *_, n in found):.0f} kernels")
    parts = Counter()
    for name, ms, _ in found:
        parts[part(name)] += ms
    for name, ms in parts.most_common():
        print(f"{ms:8.3f} ms  {name}")
    short = [(ms, count) for _, ms, count in found if ms < count * SHORT]
    launches = sum(count for _, count in short)
    print(f"{sum(ms for ms, _ in short):8.3f} ms  of these in {launches:.0f} kernels of less than {1e3 * SHORT:.0f} µs")
    for name, ms, count in found[:most]:
        print(f"{ms:8.3f} ms {count:6.1f} x {name[:110]}")


CAPTURED = ("plain-bf16-compiled-captured", "plain-bf16-cl-compiled-captured", "ours-captured")


def captured(model, batch, contenders=CAPTURED):
    from benchmarks.step import make_step
    from dpivon.privacy.kernels import conv_ops

    print(f"norms and sums of convolutions and linear layers by kernels: {'yes' if conv_ops.enabled else 'no'}")
    for contender in contenders:
        step = make_step(contender, model, batch, "cuda")
        for _ in range(3):
            step()
        report(f"{contender}, {model}, b = {batch}", kernels(step, getattr(step, "count", 1)))


def transformer(model, shape, contender, steps=2):
    from benchmarks.transformer_steps import make_step

    rows, length = map(int, shape.split("x"))
    step = make_step(contender, model, rows, length, "cuda", False)
    for _ in range(6):
        step()
    report(f"{model}-{contender}, {shape}", kernels(lambda: [step() for _ in range(steps)], steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", default="ours-cl-64")
    parser.add_argument("--stacked", metavar="K:b")
    parser.add_argument("--model", metavar="MODEL:b")
    parser.add_argument("--transformer", metavar="MODEL:SHAPE:CONTENDER")
    parser.add_argument("--only", nargs="+", choices=CAPTURED, default=CAPTURED, help="of the captured steps")
    chosen = parser.parse_args()
    if chosen.transformer:
        transformer(*chosen.transformer.split(":"))
    elif chosen.model:
        model, batch = chosen.model.split(":")
        captured(model, int(batch), chosen.only)
    elif chosen.stacked:
        gpu(*map(int, chosen.stacked.split(":")))
    else:
        cpu(chosen.contender)
