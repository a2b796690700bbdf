"""What views of pictures and studies' scores cost, and CompactCNN against the paper's CNN.

    python -m benchmarks.views --device cuda      # views a second of captured stacks
    python -m benchmarks.views                    # on one CPU thread: µs of its time a picture, forward, backward, clipped sums

A step of a stack is everything: sampling, views, forward, backward, clipping, noise, update.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.nn.functional as F

from dpivon import Augmentation
from dpivon.models import CompactCNN, PaperCNN
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.layers.memory import settle_allocator
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.study.predict import predict_row

SIZES = ["compact:1:4096:2", "compact:3:4096:2", "compact:3:4096:4", "compact:3:4096:1", "paper:3:4096:2"]
MODELS = {"compact": CompactCNN, "paper": PaperCNN}


def captured(name, runs, batch, views, steps, examples=50_000):
    generator = torch.Generator(device="cuda").manual_seed(0)
    images = torch.randn(examples, 3, 32, 32, device="cuda", generator=generator)
    labels = torch.randint(0, 10, (examples,), device="cuda", generator=generator)
    stack = Stack(
        [Run("dp-adam", i, 2.0, 1.0, 1e-3, batch) for i in range(runs)],
        AnyNetwork(MODELS[name]), images, labels, dtype=torch.bfloat16, block=4,
        augment=Augmentation(views, flip=True, crop=4),
    )  # fmt: skip
    began = time.perf_counter()
    for _ in stack.train(4):  # compiles, and captures after the third
        pass
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in stack.train(steps):
        pass
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    return {
        "network": name, "runs": runs, "batch": batch, "views": views, "at_once": stack.gradients.at_once,
        "ms": 1e3 * seconds, "views_per_s": runs * batch * views / seconds, "first_four_s": first,
        "peak_gb": torch.cuda.max_memory_reserved() / 2**30,
    }  # fmt: skip


def on_cpu(model, pictures=64, rounds=7):
    """Best of some rounds, µs a picture; the last is of a quarter as many examples with four views each."""
    x = torch.randn(pictures, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (pictures,))
    params = list(model.parameters())

    def backward():
        F.cross_entropy(model(x), y, reduction="sum").backward()

    def forward():
        with torch.no_grad():
            model(x)

    out = {"forward": _best(forward, rounds), "backward": _best(backward, rounds)}
    model.zero_grad(set_to_none=True)
    for name, views in (("sums", 1), ("sums of four views", 4)):
        keeper = BookKeeper(model, batch_first=True, loss_reduction="sum", augmentations=views)

        def private(keeper=keeper):
            backward()
            keeper.clipped_sums(params, FlatClipping(1.0))
            keeper.forget_passes()
            keeper.clear()

        out[name] = _best(private, rounds)
        keeper.detach_from_model()
    return {name: 1e6 * seconds / pictures for name, seconds in out.items()}


def scoring(build, pictures=1000, draws=2):
    """µs a picture and draw of a study's scores: all at once with a model for every draw, and as studies do it."""
    network, x = AnyNetwork(build), torch.randn(pictures, 3, 32, 32)
    mean = network.initial(0)
    std = torch.full_like(mean, 0.01)
    generator = torch.Generator().manual_seed(0)

    def simply():
        with torch.no_grad():
            for row in [mean, *(mean + std * torch.randn(mean.shape, generator=generator) for _ in range(draws))]:
                network.model(row).eval()(x).softmax(-1)

    def studied():
        predict_row(network, mean, std, [x], samples=draws, seed=0)

    each = pictures * (1 + draws)
    return {"scores, simply": 1e6 * _best(simply, 2) / each, "scores": 1e6 * _best(studied, 2) / each}


def _best(function, rounds):
    """Of the processor's time, which others on the machine do not lengthen as they do the clock's."""
    function()
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return min(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="network:runs:batch:views")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    if args.device == "cuda":
        for size in args.sizes:
            name, *numbers = size.split(":")
            rows.append(captured(name, *map(int, numbers), args.steps))
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
            torch.compiler.reset()
            torch.cuda.empty_cache()
    else:
        torch.set_num_threads(1)
        settle_allocator()
        found = {name: [] for name in MODELS}
        for name in list(MODELS) * 3:  # in turns, so that what disturbs one disturbs the other
            torch.manual_seed(0)
            found[name].append(on_cpu(MODELS[name]().to(memory_format=torch.channels_last)) | scoring(MODELS[name]))
        for name, times in found.items():
            rows.append({"network": name} | {key: min(t[key] for t in times) for key in times[0]})
            print({k: round(v) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
