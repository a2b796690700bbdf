"""What it takes to compile a captured step for a Hopper GPU, and how fast its convolutions' kernels could be; no GPU is needed,
but Triton.

    python -m benchmarks.compiling --model wrn --batch 256           # the kernels' binaries: seconds, registers, spills
    python -m benchmarks.compiling --model wrn --batch 256 --roofline
    python -m benchmarks.compiling --model compact --batch 512 --rows 2

Layers are read off the trace, so they are those of the network. There is one configuration a shape, chosen by rule
(``conv_ops.tile_for``): nothing is tuned. The roofline is the longer of bytes at 4.3 TB/s and operations at 700 TFLOP/s. Every
operand is read once, which a good cache makes true; the statistics write a few numbers an example and channel, the sums write
their chunks. Beside it stands what the tiles ask of that cache, at 5.5 TB/s: a tile of rows reads all output gradients, one of
columns all patches, tap by tap, and statistics of standardised weights read the weights' directions for every example.
"""

from __future__ import annotations

import argparse
import math

import torch

from benchmarks.traffic import private_program
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.conv_ops import Geometry

BANDWIDTH, PRODUCTS, CACHE = 4.3e12, 700e12, 5.5e12


def seconds(moved: float, flops: float) -> float:
    """At the roofline, of bytes and operations."""
    return max(moved / BANDWIDTH, flops / PRODUCTS)


def delivered(kind, x, g, geometry, standardised) -> int:
    """Bytes that a launch's programs load, whoever else has loaded them before."""
    tile, d, out = conv_ops._tile(x, g, geometry), conv_ops._fan_in(x, geometry), g.shape[1]
    across, down = -(-out // tile.bo), -(-d // tile.bd)
    loaded = (d * across + out * down) * math.prod(g.shape[2:]) * x.itemsize
    return len(x) * (loaded + (4 * d * out if standardised and kind == "conv_statistics" else 0))


def launches(model, batch):
    """(how many, kind, x, g, geometry, standardised, result) of every distinct layer, as the compiler finds them."""
    found = {}
    for node in private_program(model, batch, kernels=True).graph.nodes:
        kind = str(node.target).removeprefix("dpivon.").removesuffix(".default")
        if kind not in ("conv_statistics", "conv_sums"):
            continue
        x, g = (t.meta["val"] for t in node.args[:2])
        fixed = node.args[2 if kind == "conv_statistics" else 3]
        made = node.meta["val"]
        key = kind, tuple(x.shape), x.stride(), tuple(g.shape), g.stride(), tuple(node.args[-2]), fixed is not None
        count = found[key][0] + 1 if key in found else 1
        found[key] = count, kind, x, g, Geometry.of(node.args[-2]), fixed is not None, made
    return list(found.values())


def binaries(model, batch, rows):
    from benchmarks.hopper import conv_binary, made
    from dpivon.privacy.kernels import convs

    kernels = {
        "conv_statistics": (convs.gradient_statistics, convs.combine_statistics),
        "conv_sums": (convs.gradient_sums,),
    }
    total, known = 0.0, set()
    for count, kind, x, g, geometry, standardised, _ in launches(model, batch):
        tile = conv_ops._tile(x, g, geometry)
        for kernel in kernels[kind]:
            wanted = conv_binary(kernel, x, g, geometry, rows, standardised)
            if (key := f"{kernel.__name__} {wanted}") in known:
                continue
            known.add(key)
            found = made(kernel, **wanted)
            total += found.seconds
            print(f"{kernel.__name__:20s} {_name(x, g, geometry):28s} x{count} {tile.bt}x{tile.bd}x{tile.bo} span {tile.span} "
                  f"{wanted['warps']} warps: {found.registers:3d} registers, {found.spilled:3d} bytes spilled, "
                  f"{found.shared:6d} shared, {found.seconds:.2f} s", flush=True)  # fmt: skip
    print(f"{model}, b = {batch}: {len(known)} binaries, {total:.1f} s of one core")


def roofline(model, batch):
    sums, loads = (dict.fromkeys(("conv_statistics", "conv_sums"), 0.0) for _ in range(2))
    print(
        f"{model}, b = {batch}: a layer's MB, GFLOP, µs at the roofline, what bounds it, and µs of the cache; norms, then sums"
    )
    for count, kind, x, g, geometry, standardised, made in launches(model, batch):
        read = (x.numel() + g.numel()) * x.itemsize
        written = made.numel() * made.itemsize
        flops = 2.0 * g.numel() * x.shape[1] * math.prod(geometry.kernel)
        least, bound = (
            seconds(read + written, flops),
            "memory" if seconds(0, flops) < seconds(read + written, 0) else "products",
        )
        sums[kind] += count * least
        cached = delivered(kind, x, g, geometry, standardised) / CACHE
        loads[kind] += count * max(least, cached)
        what = f"| {kind.removeprefix('conv_'):10s} | {_name(x, g, geometry):28s} | {count} "
        print(
            f"{what}| {(read + written) / 1e6:6.1f} | {flops / 1e9:6.2f} | {1e6 * least:6.1f} | {bound} | {1e6 * cached:6.1f} |"
        )
    norms, added = (1e6 * s for s in sums.values())
    print(
        f"{norms:.0f} µs for norms, {added:.0f} for sums, {norms + added:.0f} in all, of {len(x)} rows with spare ones; "
        f"bounded by the cache too, {1e6 * loads['conv_statistics']:.0f} and {1e6 * loads['conv_sums']:.0f}"
    )


def _name(x, g, geometry):
    (kh, kw), (sh, _) = geometry.kernel, geometry.stride
    return f"{kh}x{kw} {x.shape[1]}->{g.shape[1]} {'x'.join(str(n) for n in g.shape[2:])} /{sh}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("wrn", "vit", "text", "compact"), default="wrn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1, help="views of an example")
    parser.add_argument(
        "--roofline", action="store_true", help="what the kernels could take, instead of compiling them"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.roofline:
        roofline(args.model, args.batch)
    else:
        binaries(args.model, args.batch, args.rows)


if __name__ == "__main__":
    main()
