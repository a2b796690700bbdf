"""Predictions of a stack's runs, from a row of means and a row of standard deviations each.

Forward passes are made where the runs are, in fp32 whatever they were trained in; on a GPU convolutions are in TF32, torch's
default. Predictions stay there and are scored there. Every fast way to make them is compared with the eager one on the stack
at hand before it is used, so that a mistake in a kernel or a compiler costs time, never a result:

    mean over images and rows of ½ Σ_c |p_c − q_c|   ≤   2e-3, and 2 % of what two neighbouring images differ by

The second matters for a network that predicts nearly the same for every image, so that a wrong image would hardly show.
TF32, whichever way it rounds to ten bits, stays below a quarter of both: the tests emulate it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.data import MEAN, STD
from dpivon.errors import bad
from dpivon.metrics import batch_scores
from dpivon.predict import ClassPrediction, entropy, prediction_of
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.precision import compiled
from dpivon.stacked import Network, PaperNetwork, Stack


class Passes(Protocol):
    """Logits of images that all rows see."""

    name: str
    at_once: int  # images that are best handed over together
    joins: bool  # whether they may be of several sets

    def logits(self, rows: Sequence[Tensor], images: Tensor) -> Iterable[Tensor]:
        """[n, classes] of every row of parameters in turn, for n normalised images."""
        ...


AT_ONCE = 64  # on a CPU: what stays in a core's cache
LARGE = 5000  # on a GPU: enough to fill it, and launches cost nothing beside it


class EagerPasses:
    """The twin that every other way is held to. There is one model, into which every row is put."""

    name = "torch's own operations"
    joins = False  # a set's scores do not depend on what stands beside it, to the last bit

    def __init__(self, network: Network, device: torch.device) -> None:
        self.network = network
        self.at_once = LARGE if device.type == "cuda" else AT_ONCE
        self._model: nn.Module | None = None

    def logits(self, rows: Sequence[Tensor], images: Tensor) -> Iterator[Tensor]:
        if self._model is None:
            self._model = self.network.model(rows[0]).eval()
        if (
            not images.is_cuda and images.dim() == 4
        ):  # a CPU is about twice as fast so; a GPU's norms want channels first
            images = images.contiguous(memory_format=torch.channels_last)
        for row in rows:
            yield self.network.load(row, self._model)(images)


class CompiledPasses:
    """One model with memory of its own, into which every row is copied, so that the program finds it where it was compiled for.

    Images come in calls of one size, ``batch``, the last of them padded: the compiled program has this one shape.
    """

    at_once = 32768
    joins = True

    def __init__(self, network: Network, device: torch.device, *, channels_last: bool, batch: int = 2048) -> None:
        self.network, self.device, self.batch = network, device, batch
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.name = "a compiled network" + (", channels last" if channels_last else "")
        self._loose: nn.Module | None = None

    def logits(self, rows: Sequence[Tensor], images: Tensor) -> Iterator[Tensor]:
        n = len(images)
        calls = self._calls(images)
        for row in rows:
            self._load(row)
            yield torch.cat([self._run(call) for call in calls])[:n]

    def _calls(self, images: Tensor) -> Sequence[Tensor]:
        short = -len(images) % self.batch
        padded = F.pad(images, (*(0, 0) * (images.dim() - 1), 0, short)) if short else images
        padded = padded.contiguous(memory_format=self.format if images.dim() == 4 else torch.contiguous_format)
        return padded.split(self.batch)

    def _load(self, row: Tensor) -> None:
        """A network may put a row into a model without copying it; the compiled model keeps its own memory."""
        if self._loose is None:
            self._loose = self.network.model(row).eval()
            self._fixed = copy.deepcopy(self._loose).to(memory_format=self.format)  # type: ignore[call-overload]
            self._run = compiled(self._fixed, self.device)
        loaded = self.network.load(row, self._loose)
        for mine, theirs in zip(self._fixed.parameters(), loaded.parameters(), strict=True):
            mine.copy_(theirs)


class KernelPasses:
    """All rows at once: :class:`dpivon.privacy.kernels.paper.forward.Forward`."""

    name = "kernels"
    at_once = 32768  # their answers are small; how many images go through at once is the kernels' business
    joins = True

    def __init__(self, layout: Layout, device: torch.device) -> None:
        from dpivon.privacy.kernels.paper.forward import Forward  # needs Triton

        self.forward = Forward(layout, device)

    def logits(self, rows: Sequence[Tensor], images: Tensor) -> Tensor:
        return self.forward.logits(torch.stack(list(rows)), images)


TOLERANCE, SHARE = 2e-3, 0.02
COMPARED_IMAGES, COMPARED_ROWS = 64, 3
WORTH_IT = 5_000_000  # passes: fewer are made before anything is compiled
SWITCH = "DPIVON_EVALUATION"  # "eager" in the environment keeps everything else out


def eager_will_do(device: torch.device, passes: int) -> bool:
    """Whether there is nothing to choose, or nothing to gain in so many passes."""
    if device.type != "cuda" or passes < WORTH_IT:
        return True
    if (asked := os.environ.get(SWITCH, "")) not in ("", "eager"):
        raise bad(SWITCH, asked, "is not known", "Set it to eager, or leave it out")
    return asked == "eager"


def chosen(network: Network, rows: Sequence[Tensor], images: Tensor, say: Callable[[str], None]) -> Passes:
    """A way for this network on a GPU; ``say`` hears of every one that was tried in vain."""
    eager = EagerPasses(network, images.device)
    return first_that_agrees(fast_ways(network, rows[0]), eager, rows, images, say)


def first_that_agrees(
    ways: Iterator[Callable[[], Passes]],
    eager: Passes,
    rows: Sequence[Tensor],
    images: Tensor,
    say: Callable[[str], None],
) -> Passes:
    """Whatever goes wrong with a way, in making it or in using it, the next one is tried; the eager one is the last."""
    for make in ways:
        try:
            way = make()
            off, allowed = apart(way, eager, rows, images)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            say(f"evaluation: a faster way failed ({type(error).__name__}: {first}); trying another")
            continue
        if off <= allowed:  # NaN is not
            return way
        say(f"evaluation: {way.name} is off by {off:.2g} where {allowed:.2g} is allowed, and is not used")
    return eager


@torch.no_grad()
def apart(way: Passes, eager: Passes, rows: Sequence[Tensor], images: Tensor) -> tuple[float, float]:
    """How far two ways are apart where they are looked at, and how far they may be."""
    places = _spread(len(rows), COMPARED_ROWS).tolist()
    some = _spread(len(images), COMPARED_IMAGES).to(images.device)
    said = [logits[some] for i, logits in enumerate(way.logits(rows, images)) if i in places]
    twin = list(eager.logits([rows[i] for i in places], images[some]))
    ours, theirs = (torch.stack(logits).double().softmax(-1) for logits in (said, twin))
    off = float(_difference(ours, theirs))
    neighbours = float(_difference(theirs, theirs.roll(1, dims=1)))
    return off, min(TOLERANCE, SHARE * neighbours)


def fast_ways(network: Network, row: Tensor) -> Iterator[Callable[[], Passes]]:
    """Ways worth trying, the fastest first. The kernels know TF32 alone: with exact torch they are torch's own.

    torch takes TF32 where this says "tf32", as it does by default: ``cudnn.allow_tf32 = False`` leaves "none" behind.
    """
    device = row.device
    if isinstance(network, PaperNetwork) and torch.backends.cudnn.conv.fp32_precision == "tf32":  # type: ignore[attr-defined]
        yield lambda: KernelPasses(network.layout, device)
    if any(isinstance(layer, nn.Conv2d) for layer in network.model(row).modules()):
        yield lambda: CompiledPasses(network, device, channels_last=True)
    yield lambda: CompiledPasses(network, device, channels_last=False)


def _difference(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum(-1).mean() / 2


def _spread(n: int, wanted: int) -> Tensor:
    """Some of n places, from the first to the last."""
    return torch.linspace(0, n - 1, min(n, wanted)).round().long()


# At the "mean" and, with a posterior, the "average" of draws: one per set.
Predictions = dict[str, list[ClassPrediction]]


def posterior_row(stack: Stack, i: int) -> tuple[Tensor, Tensor]:
    """Mean (or the average of iterates, where the run keeps one) and standard deviation of run i."""
    row = stack._row(i)
    return stack.average[row], stack.std[row]


@torch.no_grad()
def predict_row(
    network: Network,
    mean: Tensor,
    std: Tensor,
    sets: Sequence[Tensor],
    *,
    samples: int,
    seed: int,
    passes: Passes | None = None,
) -> Predictions:
    """Predict several sets of images, all with the same draws. ``passes`` makes the forward passes; by default eagerly."""
    rows, way = draw_rows(mean, std, samples=samples, seed=seed), passes or EagerPasses(network, mean.device)
    parts = [_sums(way, rows, images) for images in _blocks(sets, way)]
    first, total, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    sizes, draws = [len(images) for images in sets], len(rows) - 1
    out = {"mean": [prediction_of(probs, entropy(probs), 0) for probs in first.split(sizes)]}
    if draws:
        pairs = zip((total / draws).split(sizes), (entropies / draws).split(sizes), strict=True)
        out["average"] = [prediction_of(probs, expected, draws) for probs, expected in pairs]
    return out


def scores(found: Mapping[str, Sequence[ClassPrediction]], labels: Tensor) -> dict[str, float]:
    """accuracy, nll, ece and brier on the first set, and mc_… of the average; NaN where the run has diverged."""
    names = {"mean": "", "average": "mc_"}
    each = batch_scores(torch.stack([predictions[0].probs for predictions in found.values()]), labels)
    out = {f"{names[way]}{k}": v for way, scores in zip(found, each, strict=True) for k, v in scores.items()}
    return out | ({"mc_samples": found["average"][0].samples} if "average" in found else {})


def draw_rows(mean: Tensor, std: Tensor, *, samples: int, seed: int) -> list[Tensor]:
    """Rows of parameters: the mean, and ``samples`` draws if there is a posterior."""
    if not bool((std > 0).any()):
        return [mean]
    generator = torch.Generator(mean.device).manual_seed(seed)
    draws = (torch.randn(mean.shape, generator=generator, device=mean.device) for _ in range(samples))
    return [mean, *(mean + std * eps for eps in draws)]


def normalised(images: Tensor) -> Tensor:
    """Bytes as a network takes them; images that are normalised already stay as they are."""
    return images.float().div(255).sub(MEAN).div(STD) if images.dtype == torch.uint8 else images


def _blocks(sets: Sequence[Tensor], way: Passes) -> Iterator[Tensor]:
    """Normalised images that go through the network together: of one set, or of several if the way permits it."""
    joined = [torch.cat([normalised(images) for images in sets])] if way.joins else sets
    return (normalised(part) for images in joined for part in images.split(way.at_once))


def _sums(way: Passes, rows: Sequence[Tensor], images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities at the first row, and sums over the others of probabilities and of their entropies."""
    first, *others = (logits.softmax(-1) for logits in way.logits(rows, images))
    none = first.new_zeros(len(first), dtype=torch.float64)
    return first, sum(others, torch.zeros_like(first)), sum((entropy(probs) for probs in others), none)
