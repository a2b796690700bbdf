"""Forward passes a second in evaluation: torch's own operations against the fast ways, on the same rows and images.

    python -m benchmarks.evaluation --device cuda --json evaluation.json      # 33 rows of parameters and 2,000 images
    python -m benchmarks.evaluation --device cuda --tiles                     # other tiles for the kernels, block by block
    python -m benchmarks.evaluation --rows 3 --images 128 --only paper      # on a CPU there is the eager way alone

Every way is timed after a first call that compiles, and held to the eager one as a study holds it: "off" is the mean of half
the summed differences of probabilities, beside what would be allowed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from dpivon.metrics import batch_scores
from dpivon.models import CompactCNN, WideResNet
from dpivon.stacked import AnyNetwork, PaperNetwork
from dpivon.study.run.predict import EagerPasses, apart, draw_rows, fast_ways, predict_row
from dpivon.study.run.work import hardware

NETWORKS = {
    "paper": PaperNetwork,
    "compact": lambda: AnyNetwork(CompactCNN),
    "wrn": lambda: AnyNetwork(lambda: WideResNet(16, 4)),
}


def best(function, device, rounds):
    """Seconds of the fastest of some calls, and of the first one, which compiles."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]), seconds[0]


@torch.no_grad()
def measure(name, device, rows, images, rounds):
    """A row of the table for each way."""
    network = NETWORKS[name]()
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(images, 3, 32, 32, device=device, generator=generator)
    mean = network.initial(0).to(device)
    std = torch.full_like(mean, 0.02)
    theta, eager = draw_rows(mean, std, samples=rows - 1, seed=0), EagerPasses(network, device)
    found = []
    for make in [lambda: eager, *(fast_ways(network, mean) if device.type == "cuda" else [])]:
        row = {"network": name, "rows": rows, "images": images}
        try:
            way = make()
            row["way"] = way.name

            def whole(way=way):
                predict_row(network, mean, std, [x], samples=rows - 1, seed=0, passes=way)

            seconds, first = best(whole, device, rounds)
            off, allowed = apart(way, eager, theta, x)
            row |= {"passes_per_s": rows * images / seconds, "first_s": first, "off": off, "allowed": allowed}
        except Exception as error:  # a way that fails is passed over in a study too
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        found.append(row)
        print(shown(row, found[0]), flush=True)
        if device.type == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()
    return found


def shown(row, eager):
    title = f"{row['network']:8s} {row.get('way', ''):36s}"
    if "failed" in row:
        return f"{title} {row['failed']}"
    ratio = row["passes_per_s"] / eager["passes_per_s"] if "passes_per_s" in eager else float("nan")
    speed = f"{row['passes_per_s'] / 1e6:9.4f} M passes/s, {ratio:5.2f} x eager, first call {row['first_s']:6.1f} s"
    return f"{title} {speed}, off by {row['off']:.1e} of {row['allowed']:.1e}"


@torch.no_grad()
def tiles(device, rows, images, rounds):
    """Passes a second of the paper's kernels with other tiles in one block at a time; all must say the same."""
    from dpivon.privacy.kernels.paper import forward  # needs Triton

    network = PaperNetwork()
    theta = torch.stack([network.initial(i) for i in range(rows)]).to(device)
    x = torch.randn(images, 3, 32, 32, device=device, generator=torch.Generator(device).manual_seed(0))
    program, first, found = forward.Forward(network.layout, device), None, []
    for block, (side, *_) in enumerate(network.layout.convs):
        used = forward.TUNING["forward_fp32"][block]
        others = [{"BM": bm, "num_warps": warps} for bm in (64, 128, 256) if bm <= side**2 for warps in (4, 8)]
        for options in [used, *(o for o in others if o != used)]:
            forward.TUNING["forward_fp32"][block] = options
            row = {"block": block, "used": options is used} | options
            try:
                said = program.logits(theta, x)
                first = said if first is None else first
                seconds, _ = best(lambda: program.logits(theta, x), device, rounds)
                row |= {"passes_per_s": rows * images / seconds, "off": float((said - first).abs().max())}
            except Exception as error:  # a tile that does not fit this chip
                row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            found.append(row)
            print(row, flush=True)
        forward.TUNING["forward_fp32"][block] = used
    return found


def scoring(images):
    """Milliseconds of a set's scores on the host, beside its forward passes."""
    probs, labels = torch.randn(images, 10).softmax(-1), torch.randint(0, 10, (images,))
    return 1e3 * best(lambda: batch_scores(probs[None], labels), torch.device("cpu"), 20)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=33)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    device = torch.device(args.device)
    facts = {
        "hardware": hardware(device),
        "torch": torch.__version__,
        "command": " ".join(["python -m benchmarks.evaluation", *sys.argv[1:]]),
        "scores_ms": scoring(args.images),
    }
    print(f"{facts['hardware']}, torch {facts['torch']}: {args.rows} rows, {args.images} images")
    sizes = device, args.rows, args.images, args.rounds
    rows = tiles(*sizes) if args.tiles else [row for name in args.only for row in measure(name, *sizes)]
    print(f"scores of {args.images} images on the host: {facts['scores_ms']:.2f} ms")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(facts | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
