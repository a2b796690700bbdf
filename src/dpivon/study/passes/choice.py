"""The fastest way that says what the eager one says, found out on the stack at hand before anything is scored with it.

So a mistake in a kernel or a compiler costs time, never a result. A way is given all the rows and pictures it is tried on, as
it will be in use, and looked at in a few places. What is compared is probabilities, as half the sum of their differences:

    mean over pictures and rows of ½ Σ_c |p_c − q_c|   ≤   2e-3, and 2 % of what two neighbouring pictures differ by

The second matters for a network that says nearly the same of every picture, so that a wrong picture would hardly show. TF32,
whichever way it rounds to ten bits, stays below a quarter of both: the tests emulate it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dpivon.errors import bad
from dpivon.stacked import Network, PaperNetwork
from dpivon.study.passes.compiled import CompiledPasses, convolves
from dpivon.study.passes.eager import EagerPasses
from dpivon.study.passes.kernels import KernelPasses
from dpivon.study.passes.way import Passes

TOLERANCE, SHARE = 2e-3, 0.02
PICTURES, ROWS = 64, 3  # that are looked at
WORTH_IT = 5_000_000  # passes: fewer are made before anything is compiled
SWITCH = "DPIVON_EVALUATION"  # "eager" in the environment keeps everything else out


def eager_will_do(device: torch.device, passes: int) -> bool:
    """Whether there is nothing to choose, or nothing to gain in so many passes."""
    return device.type != "cuda" or passes < WORTH_IT or _switched_off()


def chosen(network: Network, rows: Sequence[Tensor], pictures: Tensor, say: Callable[[str], None]) -> Passes:
    """A way for this network on a GPU; ``say`` hears of every one that was tried in vain."""
    eager = EagerPasses(network, pictures.device)
    return first_that_agrees(fast_ways(network, rows[0]), eager, rows, pictures, say)


def first_that_agrees(
    ways: Iterator[Callable[[], Passes]],
    eager: Passes,
    rows: Sequence[Tensor],
    pictures: Tensor,
    say: Callable[[str], None],
) -> Passes:
    """Whatever goes wrong with a way, in making it or in using it, the next one is tried; the eager one is the last."""
    for make in ways:
        try:
            way = make()
            off, allowed = apart(way, eager, rows, pictures)
        except Exception as error:
            words = str(error).strip().splitlines()
            say(
                f"evaluation: a faster way failed ({type(error).__name__}: {words[0] if words else ''}); trying another"
            )
            continue
        if off <= allowed:  # NaN is not
            return way
        say(f"evaluation: {way.name} is off by {off:.2g} where {allowed:.2g} is allowed, and is not used")
    return eager


@torch.no_grad()
def apart(way: Passes, eager: Passes, rows: Sequence[Tensor], pictures: Tensor) -> tuple[float, float]:
    """How far two ways are apart where they are looked at, and how far they may be."""
    places, some = _spread(len(rows), ROWS).tolist(), _spread(len(pictures), PICTURES).to(pictures.device)
    said = [logits[some] for i, logits in enumerate(way.logits(rows, pictures)) if i in places]
    twin = list(eager.logits([rows[i] for i in places], pictures[some]))
    ours, theirs = (torch.stack(logits).double().softmax(-1) for logits in (said, twin))
    off = float(_difference(ours, theirs))
    neighbours = float(_difference(theirs, theirs.roll(1, dims=1)))
    return off, min(TOLERANCE, SHARE * neighbours)


def fast_ways(network: Network, row: Tensor) -> Iterator[Callable[[], Passes]]:
    """Ways worth trying, the fastest first. The kernels know TF32 alone: who told torch to be exact gets what torch does.

    torch takes TF32 where this says "tf32", as it does by default: ``cudnn.allow_tf32 = False`` leaves "none" behind.
    """
    device = row.device
    if isinstance(network, PaperNetwork) and torch.backends.cudnn.conv.fp32_precision == "tf32":  # type: ignore[attr-defined]
        yield lambda: KernelPasses(network.layout, device)
    if convolves(network.model(row)):
        yield lambda: CompiledPasses(network, device, channels_last=True)
    yield lambda: CompiledPasses(network, device, channels_last=False)


def _difference(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum(-1).mean() / 2


def _spread(n: int, wanted: int) -> Tensor:
    """Some of n places, from the first to the last."""
    return torch.linspace(0, n - 1, min(n, wanted)).round().long()


def _switched_off() -> bool:
    value = os.environ.get(SWITCH, "")
    if value not in ("", "eager"):
        raise bad(SWITCH, value, "is not known", "Set it to eager, or leave it out")
    return value == "eager"
