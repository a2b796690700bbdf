"""What privacy noise costs a stack: one draw for all runs, from 32 random bits per normal and from 64, and its share of a step.

    python -m benchmarks.noise                            # on a GPU: K = 90 runs of the paper's CNN
    python -m benchmarks.noise --device cpu --runs 2 --batch 8 --examples 200   # the same program at toy size

Stacks draw privacy noise from 64 bits, in double. The draw from 32 bits, in single precision, is what samples of θ are made
from. Each is timed with the addition to the sums in double, the division and the rounding.
"""

from __future__ import annotations

import argparse
import time

import torch

from dpivon.privacy.precision import compiled
from dpivon.privacy.stack import _combine
from dpivon.privacy.streams import PRIVACY, Streams
from dpivon.stacked import PaperNetwork, Run, Stack


def milliseconds(action, device, repeats):
    for _ in range(3):
        action()
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    _wait(device)
    return 1e3 * (time.perf_counter() - start) / repeats


def draws(runs, parameters, device, repeats):
    """Milliseconds of a release, by the type that noise is drawn in; of the draw alone, and with the sum."""
    streams, step = Streams(range(runs), device), torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.randn(runs, parameters, dtype=torch.float64, device=device)
    column = torch.ones(runs, 1, dtype=torch.float64, device=device)
    found = {}
    for dtype in (torch.float32, torch.float64):
        out, combine = torch.empty(runs, parameters, dtype=dtype, device=device), compiled(_combine, device)

        def draw(out=out):
            return streams.normal(out, step, PRIVACY)

        def release(out=out, combine=combine):
            combine(sums, streams.normal(out, step, PRIVACY), column, column)

        found[dtype] = milliseconds(draw, device, repeats), milliseconds(release, device, repeats)
    return found


def step(runs, batch, examples, device, steps):
    """Milliseconds of a whole step: sampling, θ, forward, backward, clipping, noise, update."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(examples, 3, 32, 32, device=device, generator=generator)
    labels = torch.randint(0, 10, (examples,), device=device, generator=generator)
    made = [Run("dp-ivon-gradsq", i, 1.0, 10.0, 0.1, batch) for i in range(runs)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stack = Stack(made, PaperNetwork(), images, labels, dtype=dtype, block=min(32, steps))
    for _ in stack.train(2 * stack.block):
        pass
    _wait(device)
    start = time.perf_counter()
    for _ in stack.train(steps):
        pass
    _wait(device)
    return 1e3 * (time.perf_counter() - start) / steps, stack.mean.shape[1]


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--runs", type=int, default=90)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--repeats", type=int)
    args = parser.parse_args()
    device = torch.device(args.device)
    repeats = args.repeats or (96 if device.type == "cuda" else 1)
    whole, parameters = step(args.runs, args.batch, args.examples, device, repeats)
    found = draws(args.runs, parameters, device, repeats)
    print(f"a step of K = {args.runs}, P = {parameters}, b = {args.batch}: {whole:.3f} ms")
    for dtype, bits in ((torch.float32, 32), (torch.float64, 64)):
        alone, release = found[dtype]
        share = f"{100 * release / whole:.2f} % of a step"
        print(f"{bits} bits per normal: {alone:.3f} ms per draw, {release:.3f} ms with the sum, {share}")
    extra = found[torch.float64][1] - found[torch.float32][1]
    print(f"64 bits in place of 32: {extra:+.3f} ms, {100 * extra / whole:+.2f} % of a step")


if __name__ == "__main__":
    main()
