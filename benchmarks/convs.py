"""What the kernels of convolutions cost for every layer of a WRN-16-4, on a GPU.

    python -m benchmarks.convs                      # b = 256, bf16: the tiles that are used
    python -m benchmarks.convs --candidates         # and others, to correct the rule that chooses them
    python -m benchmarks.convs --json convs.json

Beside them: cuDNN's ordinary weight gradient, which is what a step that is not private computes there, and the unfolded rule.
Times are of captured launches, so that only the device counts; the unfolded rule is not compiled here. Every tile is held to
the results of the one that is used, and those to the unfolded rule's. Norms and sums take the same tile: see kernels/convs.py.
The floor is what a roofline gives norms and sums together; benchmarks.compiling says more about it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.compiling import seconds
from dpivon.models import StandardisedConv2d
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.conv_ops import Geometry, Tile, tile_for
from dpivon.privacy.layers.standardised import standardised_conv


@dataclass(frozen=True)
class Layer:
    count: int  # in the network
    into: int
    out: int
    side: int
    kernel: int = 3
    stride: int = 1

    @property
    def name(self) -> str:
        return f"{self.kernel}×{self.kernel} {self.into}→{self.out} {self.side}² /{self.stride}"

    @property
    def rows(self) -> int:
        return self.kernel**2 * self.into

    @property
    def positions(self) -> int:
        return (self.side // self.stride) ** 2

    @property
    def geometry(self) -> Geometry:
        k, s, p = self.kernel, self.stride, self.kernel // 2
        return Geometry((k, k), (s, s), (p, p), (1, 1))

    def floor(self, batch: int, dtype: torch.dtype) -> float:
        """Seconds that norms, or sums, need at least: operands are read once, and multiplied as bf16 are."""
        read = batch * (self.into * self.side**2 + self.out * self.positions) * dtype.itemsize
        return seconds(read, 2.0 * batch * self.rows * self.out * self.positions)


LAYERS = [
    Layer(1, 3, 16, 32),
    Layer(1, 16, 64, 32),
    Layer(1, 16, 64, 32, kernel=1),
    Layer(3, 64, 64, 32),
    Layer(1, 64, 128, 32, stride=2),
    Layer(1, 64, 128, 32, kernel=1, stride=2),
    Layer(3, 128, 128, 16),
    Layer(1, 128, 256, 16, stride=2),
    Layer(1, 128, 256, 16, kernel=1, stride=2),
    Layer(3, 256, 256, 8),
]


def tiles(layer: Layer, dtype: torch.dtype, candidates: bool) -> dict[str, Tile]:
    """The one that is used, and others that may be better."""
    used = tile_for(layer.rows, layer.out, layer.positions, dtype)
    if not candidates or layer.into < 16 or layer.kernel == 1:
        return {"used": used}

    def of(bd: int, bo: int, warps: int, registers: int | None = None) -> Tile:
        return replace(used, bd=bd, bo=bo, warps=warps, registers=registers, span=-(-layer.rows // (3 * bd)))

    others = {
        "two loops": replace(used, flatten=False),
        "short": replace(used, span=1),
        "64×64, 8 warps": of(64, 64, 8, 128),
        "128×64": of(128, 64, 8),
    }
    if layer.out >= 128:
        others["64×128"] = of(64, 128, 8)
    return {"used": used} | {name: tile for name, tile in others.items() if tile != used}


def operands(layer: Layer, batch: int, dtype: torch.dtype):
    """The layer, its input, the gradient of its output, and u in the kernels' order."""
    torch.manual_seed(0)
    k, after = layer.kernel, layer.side // layer.stride
    made = StandardisedConv2d(layer.into, layer.out, k, layer.stride, k // 2, bias=False).cuda()
    x, g = (
        torch.randn(batch, channels, side, side, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        for channels, side in ((layer.into, layer.side), (layer.out, after))
    )
    unit = made.standardised().detach().permute(2, 3, 1, 0).reshape(-1, layer.out).contiguous()
    return made, x, g, unit


def warm(layer: Layer, dtype: torch.dtype, candidates: bool) -> None:
    """Compile a layer's kernels into Triton's cache on disk, from a process of its own."""
    _, x, g, unit = operands(layer, 4, dtype)
    for tile in tiles(layer, dtype, candidates).values():
        try:
            found = conv_ops.statistics(x, g, unit, layer.geometry, 1, tile)
            conv_ops.sums(x, g, torch.ones(4, device="cuda"), found, layer.geometry, 1, tile)
        except Exception as error:  # a tile that does not fit this chip: measure() says so
            print(f"{layer.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def measure(layer: Layer, batch: int, dtype: torch.dtype, candidates: bool) -> dict[str, object]:
    """Microseconds of everything, and how far results differ."""
    from triton.testing import do_bench_cudagraph

    def clock(function) -> float:
        try:
            return 1000 * float(do_bench_cudagraph(function, rep=10))
        except RuntimeError as error:  # one that cannot be captured must not keep the others from being measured
            print(f"{layer.name}: {str(error)[:200]}", flush=True)
            return float("nan")

    made, x, g, unit = operands(layer, batch, dtype)
    c, geometry = torch.rand(batch, device="cuda"), layer.geometry
    weight = made.weight.detach().to(dtype).to(memory_format=torch.channels_last)
    options = (None, geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], 1, [False, True, False])
    row: dict[str, object] = {"layer": layer.name, "count": layer.count, "floor": 2e6 * layer.floor(batch, dtype)}
    row["cudnn"] = clock(lambda: torch.ops.aten.convolution_backward(g, x, weight, *options))
    with conv_ops.kernels(on=False):
        use = standardised_conv(made, (x,), g)[made.weight]
        norms, total = use.squared_norm().double(), use.weighted_sum(c)
        row["unfolded"] = clock(lambda: _whole(made, x, g, c))
    use = standardised_conv(made, (x,), g)[made.weight]
    row["norms off by"] = float((use.squared_norm() / norms - 1).abs().max())
    row["sums off by"] = float((use.weighted_sum(c) - total).norm() / total.norm())
    first = None
    for name, tile in tiles(layer, dtype, candidates).items():
        try:
            found = conv_ops.statistics(x, g, unit, geometry, 1, tile)
            sums = conv_ops.sums(x, g, c, found, geometry, 1, tile).sum(0, dtype=torch.float64)
            first = (found, sums) if first is None else first
            agrees = torch.allclose(found[:, 1], first[0][:, 1], rtol=1e-4)
            agrees &= float((sums - first[1]).norm() / first[1].norm()) < 1e-5
            row[name] = (
                clock(lambda tile=tile: conv_ops.statistics(x, g, unit, geometry, 1, tile)),
                clock(lambda tile=tile, found=found: conv_ops.sums(x, g, c, found, geometry, 1, tile)),
                agrees,
            )
        except Exception as error:
            row[name] = f"{type(error).__name__}: {str(error)[:80]}"
    return row


def _whole(made: nn.Module, x, g, c):
    use = standardised_conv(made, (x,), g)[made.weight]
    return use.squared_norm(), use.weighted_sum(c)


def show(rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    known = ("layer", "count", "floor", "cudnn", "unfolded", "norms off by", "sums off by")
    names = [n for n in names if n not in known]
    print("µs; norms + sums for every tile, × where results differ")
    print(" | ".join(["layer".ljust(22), "n", " floor", " cudnn", "unfolded", *(n.center(15) for n in names)]))
    for row in rows:
        cells = [str(row["layer"]).ljust(22), str(row["count"])]
        cells += [f"{row['floor']:6.1f}", f"{row['cudnn']:6.1f}", f"{row['unfolded']:8.1f}"]
        for name in names:
            cell = row.get(name)
            if isinstance(cell, tuple):
                cells.append(f"{cell[0]:6.1f} +{cell[1]:6.1f}{' ' if cell[2] else '×'}")
            else:
                cells.append(("–" if cell is None else "failed").center(15))
        print(" | ".join(cells))
    for row in rows:
        print(f"{row['layer']}: norms off by {row['norms off by']:.1e}, sums by {row['sums off by']:.1e}", end="; ")
        print(*(f"{n}: {row[n]}" for n in names if isinstance(row.get(n), str)), sep="; ")
    timed = [(row, [row[n] for n in names if isinstance(row.get(n), tuple)]) for row in rows]
    used = [[row["count"] * t for t in pairs[0][:2]] for row, pairs in timed if pairs]
    best = [[row["count"] * t for t in min(pairs, key=lambda p: p[0] + p[1])[:2]] for row, pairs in timed if pairs]
    whole = {name: sum(row["count"] * row[name] for row in rows) / 1000 for name in ("floor", "cudnn", "unfolded")}
    print(
        f"a step, ms: floor {whole['floor']:.2f}, cudnn {whole['cudnn']:.2f}, unfolded {whole['unfolded']:.2f}", end=""
    )
    for name, pairs in (("tiles used", used), ("best tiles", best)):
        print(f", {name} {sum(p[0] for p in pairs) / 1000:.2f} + {sum(p[1] for p in pairs) / 1000:.2f}", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json")
    parser.add_argument("--processes", type=int, default=8, help="that compile, before anything is measured")
    parser.add_argument("--candidates", action="store_true", help="tiles that are not used, too")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(args.processes, len(LAYERS)), mp_context=context) as pool:
        list(pool.map(warm, LAYERS, [dtype] * len(LAYERS), [args.candidates] * len(LAYERS)))
    with conv_ops.kernels(on=True):
        rows = [measure(layer, args.batch, dtype, args.candidates) for layer in LAYERS]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, b = {args.batch}, {args.dtype}")
    show(rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
