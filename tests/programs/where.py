"""Where the milliseconds of a captured step go, kernel by kernel as torch's compiler makes them; no GPU is needed, but Triton.

    PYTHONPATH=src:tests:. python -m programs.where --model wrn --batch 256 --kernels
    PYTHONPATH=src:tests:. python -m programs.where --model text --batch 512 --kernels --largest 40
    PYTHONPATH=src:tests:. python -m programs.where --model wrn --batch 256 --plain

Every kernel that Inductor would generate for an H200 and every call of a library's is listed with the bytes it reads and
writes, each buffer once, in its own dtype, and the longer of bytes at 4.3 TB/s and products at 700 TFLOP/s (60 in fp32).
Unlike :mod:`programs.traffic`, which counts for a good compiler, this counts what the compiler that is there has joined and
what it has not. Launches cost nothing here, nor do θ, noise and update, which are not in the program. A kernel belongs to the
part that most of what it writes belongs to. What the tiles of the library's own kernels ask of the cache, which is more than
this, is in ``benchmarks.compiling --roofline` of version 0.1`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from dataclasses import dataclass

import torch

from dpivon.privacy.precision import options as told
from programs.inductor import functional, pretend, source
from programs.traffic import EXTERN, FP32_PRODUCTS, PRODUCTS, _flops, _name, _rate, plain_program, private_program

BANDWIDTH, BF16 = 4.3e12, 700e12
LIBRARY = {"conv_statistics": "conv statistics", "conv_sums": "conv sums", "position_sums": "position sums"}


@dataclass(frozen=True)
class Kernel:
    """One launch: what it is for, what it reads and writes, and what it is made of."""

    part: str
    kind: str
    read: dict[str, int]
    written: dict[str, int]
    shapes: tuple[str, ...]  # of what is written, the largest first
    operations: str
    flops: float = 0.0
    rate: float = BF16

    @property
    def bytes(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def seconds(self) -> float:
        return max(self.bytes / BANDWIDTH, self.flops / self.rate)


def kernels(program, options: dict) -> list[Kernel]:
    """What the compiler, told these options, makes of a program, in order."""
    found: list[Kernel] = []
    with pretend(), warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # of products in fp32, and of a CUDA that is not there
        source(
            *functional(program), look=lambda nodes: found.extend(filter(None, map(_kernel, nodes))), options=options
        )
    return found


def _kernel(node) -> Kernel | None:
    """Of a scheduled node; None if it launches nothing."""
    read, written = (
        node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads) for reads in (True, False)
    )
    read = {name: n for name, n in read.items() if name not in written}
    if not written or not sum(written.values()):
        return None
    largest = sorted(written, key=lambda name: -written[name])
    origins = {name: _origins(node.scheduler.name_to_buf[name].node) for name in largest}
    target, flops, rate = _product(node)
    kind = target or ("reduction" if node.is_reduction() else "elementwise")
    part = LIBRARY.get(kind) or _part(origins[largest[0]]) or _part([n for found in origins.values() for n in found])
    names = dict.fromkeys(_name(n) for found in origins.values() for n in found)
    shapes = tuple(_described(node.scheduler.name_to_buf[name].node) for name in largest)
    return Kernel(part or "other", kind, read, written, shapes, " ".join(names), flops, rate)


def _origins(buffer) -> list[torch.fx.Node]:
    """The operations that a buffer is computed by, the last one first."""
    return sorted(getattr(buffer, "origins", ()), reverse=True)


def _part(origins) -> str | None:
    """That of the last operation that has one."""
    return next((_general(n.meta["part"]) for n in origins if "part" in n.meta), None)


def _general(part: str) -> str:
    """Without the layer: norms and sums of what the kernels do not take are by the kind of use."""
    if part.startswith("gradients of examples"):
        return "gradients of examples"
    words = part.split()
    return " ".join(words[:2]) if words[0] in ("norms,", "sums,") else part


def _product(node) -> tuple[str, float, float]:
    """(the library's name, operations, how many a second) of a call; of a generated kernel ("", 0, 1)."""
    if not node.is_extern():
        return "", 0.0, 1.0
    origin = node.node.get_origin_node() or next((n for n in _origins(node.node) if _name(n) in EXTERN), None)
    if origin is None:
        return type(node.node).__name__, 0.0, BF16
    return _name(origin), _flops(origin), BF16 if _rate(origin) == PRODUCTS else FP32_PRODUCTS


def _described(buffer) -> str:
    """dtype[sizes], and how a picture lies."""
    try:
        sizes, strides = ([int(n) for n in of] for of in (buffer.get_size(), buffer.get_stride()))
    except (NotImplementedError, AttributeError):
        return "several"
    last = len(sizes) == 4 and strides[1] == 1 and sizes[2] * sizes[3] > 1
    return f"{str(buffer.get_dtype()).removeprefix('torch.')}{sizes}" + (" last" if last else "")


def again(kernel: Kernel) -> int:
    """Bytes of what a generated kernel writes a second time: buffers of one description that it makes several of."""
    sizes = list(zip(kernel.shapes, sorted(kernel.written.values(), reverse=True), strict=True))
    seen: Counter[str] = Counter()
    total = 0
    for shape, size in sizes:
        total += size if seen[shape] and size > 1e6 else 0
        seen[shape] += 1
    return total


def shared(found: list[Kernel]) -> tuple[int, int]:
    """Of so many layers whose norms and sums are taken by our kernels, how many are measured and summed from the same buffers.
    Of others the compiler computes an operand twice, and may round it twice."""
    measured, summed = ([set(k.read) for k in found if k.kind == kind] for kind in ("conv_statistics", "conv_sums"))
    return sum(any(len(a & b) >= 2 for b in summed) for a in measured), len(measured)


def report(title: str, found: list[Kernel], largest: int) -> None:
    total = sum(k.seconds for k in found)
    print(f"{title}: {len(found)} kernels, {sum(k.bytes for k in found) / 1e6:,.0f} MB, "
          f"{sum(k.flops for k in found) / 1e9:,.0f} GFLOP, at least {1e3 * total:.3f} ms")  # fmt: skip
    parts: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in found:
        parts[f"{kernel.part}, {kernel.kind}" if kernel.part != LIBRARY.get(kernel.kind) else kernel.part].append(
            kernel
        )
    for name, group in sorted(parts.items(), key=lambda item: -sum(k.seconds for k in item[1])):
        print(f"{1e3 * sum(k.seconds for k in group):8.3f} ms {sum(sum(k.read.values()) for k in group) / 1e6:7.0f} MB read "
              f"{sum(sum(k.written.values()) for k in group) / 1e6:7.0f} written {len(group):4d} x {name}")  # fmt: skip
    twice = sum(again(k) for k in found if k.kind in ("elementwise", "reduction"))
    print(
        f"{1e3 * twice / BANDWIDTH:8.3f} ms of these: {twice / 1e6:.0f} MB that kernels write besides another of the same shape"
    )
    same, layers = shared(found)
    if layers:
        print(f"{same} of {layers} layers with kernels are measured and summed from the same buffers")
    for kernel in sorted(found, key=lambda k: -k.seconds)[:largest]:
        shapes = " ".join(kernel.shapes[:5])
        reads = " ".join(f"{n / 1e6:.0f}" for n in sorted(kernel.read.values(), reverse=True)[:6])
        print(f"    {1e3 * kernel.seconds:.3f} ms {kernel.part}, {kernel.kind}: {kernel.operations[:70]} -> {shapes[:150]} "
              f"from {reads} MB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("cnn", "wrn", "vit", "text", "compact"), default="wrn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--plain", action="store_true", help="a step without privacy")
    parser.add_argument("--kernels", action="store_true", help="with the library's own kernels (DPIVON_CONV_KERNELS=1)")
    parser.add_argument("--largest", type=int, default=0, help="list this many kernels")
    args = parser.parse_args()
    torch.set_num_threads(1)
    program = (
        plain_program(args.model, args.batch) if args.plain else private_program(args.model, args.batch, args.kernels)
    )
    title = "plain" if args.plain else "private, with kernels" if args.kernels else "private"
    # Plain training is compiled as torch does it by itself.
    found = kernels(program, {} if args.plain else told(again=args.kernels))
    report(f"{title}, {args.model}, b = {args.batch}", found, args.largest)


if __name__ == "__main__":
    main()
