"""What a prior's network sees, in flat coordinates: features for a private linear layer.

Under privacy a linear layer learns with one step size and one size of noise in every direction, while the features of a
network differ in size by thousands. On images of the prior's random process their mean μ and covariance Σ are no one's data,
so dividing by the root of Σ costs no privacy:

    x ↦ A (f(x) − μ),   A = c (Σ + σ̄² I)^(-1/2)

with σ̄² the mean variance, which keeps directions that the process hardly shows from being noise alone. c makes the mean
variance of a coordinate 1, for which the default step of ``dp-steady`` is made.

f is what the network's last linear layers see and, where the network makes maps smaller, the last map at every resolution
before: means over its places, each map divided by its root mean variance. Early layers see what late ones have lost, and
one linear layer on both costs hardly more noise.

Features go into a training whole, so an example's must be of that example alone. That holds by how they are made: the network
runs on one example at a time (``torch.func.vmap``), on a copy that is thrown away, whatever it would do with a batch.
This is the one module of the package that is given private inputs. It learns nothing from them, and what it returns is as
private as they are.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.errors import bad, check_whole
from dpivon.posterior import Posterior
from dpivon.priors.learning import MEAN, STD
from dpivon.priors.processes import MIXTURES, images
from dpivon.priors.start import check_free, start_from

#: Images of a process that Σ is of, the fewest public inputs, and the most features: Σ's roots take minutes with more.
IMAGES, FEWEST, MOST = 8192, 500, 8192
#: Images that run through the network at a time.
CHUNK = 500
#: A shift of the copies whose features are averaged, in sides of the image.
SHIFT = 1 / 16
#: Places of a map, in each direction, that means are taken over.
PLACES = 4
#: Of the file that :meth:`Features.save` writes.
FORMAT, VERSION = "dpivon_features", "1"


class Features(nn.Module):
    """A frozen network up to its last linear layers, and flat coordinates of what it sees: [N, ...] to [N, width].

    >>> features = dpivon.priors.Features(pretrained, public_images, mirror=True)
    >>> trained = dpivon.steady(pretrained, x, y, start_from=features, target_epsilon=1, ...)

    That trains ``features.last_layer(classes)`` on ``features(x)``. Features are averaged over moved copies of an image.

    Args:
        network: copied, in evaluation mode. Its weights must know no one's private data.
        public: public or made-up inputs, as ``network`` takes them: 500 or more, better thousands. μ and Σ are of these.
        shift: average over the image and four copies that are moved by so many pixels.
        mirror: average over mirrored copies too.

    Attributes:
        width: how many features there are.
        parts: how many of them are what the last layers see, and of each map.
    """

    parts: tuple[int, ...] = ()
    mean: Tensor
    matrix: Tensor

    def __init__(self, network: nn.Module, public: Tensor, *, shift: int = 0, mirror: bool = False) -> None:
        super().__init__()
        self.shift, self.mirror = check_whole("shift", shift, "Use 2 for images of 32×32, or 0"), mirror
        if not isinstance(public, Tensor) or len(public) < FEWEST:
            shown = len(public) if isinstance(public, Tensor) else type(public).__name__
            raise bad("public", shown, f"is not a tensor of {FEWEST} rows or more", "Give thousands of public inputs")
        if (self.shift or mirror) and (public.dim() != 4 or min(public.shape[2:]) <= self.shift):
            fix = "Leave shift and mirror out, or give inputs [N, channels, height, width]"
            raise bad("public", tuple(public.shape), "are not images that can be moved so far", fix)
        self.body = copy.deepcopy(network).eval().requires_grad_(False)
        self.cut = last_layers(self.body)
        seen = self.seen(public)
        if not torch.isfinite(seen).all():
            problem = "gives features that are not finite"
            raise bad("network", type(network).__name__, problem, "Look at its weights and at public")
        if not 2 <= seen.shape[1] <= MOST:
            problem = f"gives {seen.shape[1]:,} features, and 2 to {MOST:,} can be flattened"
            raise bad("network", type(network).__name__, problem, "Pool them before its last linear layer")
        if float(seen.var(0).mean()) < 1e-12:
            raise bad("public", tuple(public.shape), "give features that are all alike", "Give inputs that differ")
        sizes = torch.cat([part.var(0).mean().expand(n) for part, n in self._split(seen)])
        units = torch.where(sizes < 1e-12, 1.0, sizes.rsqrt())  # a map that is always the same is not blown up
        mean, matrix = flat(seen * units)
        if not torch.isfinite(matrix).all():
            raise bad("public", tuple(public.shape), "give features that are all alike", "Give inputs that differ")
        self.register_buffer("mean", mean / units)
        self.register_buffer("matrix", units.unsqueeze(1) * matrix)
        self.width = seen.shape[1]

    @classmethod
    def of(
        cls,
        network: nn.Module,
        prior: str | os.PathLike[str] | Posterior,
        shape: tuple[int, ...],
        *,
        shift: int | None = None,
        mirror: bool | None = None,
        input_mean: float | None = None,
        input_std: float | None = None,
    ) -> Features:
        """Those of a prior that names its random process, with μ and Σ of its images.

        Args:
            network: whose weights the prior's are; it is copied.
            prior: as of :func:`~dpivon.priors.start_from`, with ``input_mean`` and ``input_std``.
            shape: (channels, side, side) of the images.
            shift: in place of a sixteenth of the side.
            mirror: in place of the prior's own.
            input_mean: of the inputs that will be given.
            input_std: see above.
        """
        network, shown = copy.deepcopy(network), prior if isinstance(prior, str) else type(prior).__name__
        found = start_from(network, prior, input_mean=input_mean, input_std=input_std)
        fix = "If no one's private data is in it, give dpivon.priors.Features(network, public inputs)"
        check_free(found, prior, fix)
        process = found.metadata.get("process", "")
        if process not in MIXTURES:
            problem = "names no random process, so there are no images to flatten its features on"
            fix = "Give dpivon.priors.Features(network, public inputs), or train all weights (--no-last-layer)"
            raise bad("start_from", shown, problem, fix)
        if len(shape) != 3 or shape[1] != shape[2]:
            fix = "Give inputs [N, channels, side, side], or train all weights (--no-last-layer)"
            raise bad("inputs", shape, "is not the shape of square images, which its process makes", fix)
        channels, side, _ = shape
        mean, std = float(found.metadata["input_mean"]), float(found.metadata["input_std"])
        shift = max(1, round(SHIFT * side)) if shift is None else shift
        mirror = found.metadata.get("mirror") == "yes" if mirror is None else mirror
        return cls(network, made_up(process, side, channels, mean, std), shift=shift, mirror=mirror)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: the network's weights, μ and A. A has width² numbers, 51 MB for ``images-32``."""
        own = {"parts": " ".join(map(str, self.parts)), "shift": str(self.shift), "mirror": str(int(self.mirror))}
        write_tensors(path, self.state_dict(), {FORMAT: VERSION, **own})

    @classmethod
    def load(cls, path: str | os.PathLike[str], network: nn.Module) -> Features:
        """What :meth:`save` wrote, for a copy of the same ``network``, whose own weights may be anything, or on ``meta``."""
        fix = "Give a file of Features.save, and the network that it is of"
        tensors, own = read_tensors(path, key=FORMAT, version=VERSION, what="features", fix=fix)
        tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.body = copy.deepcopy(network).eval().requires_grad_(False)
        made.cut = last_layers(made.body)
        try:
            made.parts = tuple(int(part) for part in own["parts"].split())
            made.shift, made.mirror = int(own["shift"]), own["mirror"] == "1"
            made.mean, made.matrix = (nn.Buffer(tensors.pop(name)) for name in ("mean", "matrix"))
            (made.width,) = made.mean.shape
            weights = {name.removeprefix("body."): t for name, t in tensors.items()}
            made.body.load_state_dict(weights, assign=True)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            problem = f"does not hold the features of this network ({str(error).splitlines()[0]})"
            raise bad("path", os.fspath(path), problem, fix) from None
        whole = all(torch.isfinite(t).all() for t in (made.mean, made.matrix, *tensors.values()))
        if not whole or made.shift < 0 or made.matrix.shape != (made.width, made.width):
            raise bad("path", os.fspath(path), "holds values that no features have", fix)
        return made

    def last_layer(self, classes: int) -> nn.Linear:
        """A linear layer of zero on these features."""
        layer = nn.Linear(self.width, classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    def train(self, mode: bool = True) -> Features:
        """Stays in evaluation mode: a normalisation in training mode would be of a batch."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.seen(x) - self.mean) @ self.matrix).to(x.device)

    @torch.no_grad()
    def seen(self, x: Tensor) -> Tensor:
        """What the last layers get, averaged over the copies."""
        device = next(self.body.parameters()).device
        return torch.cat([self._averaged(part.to(device)) for part in x.split(CHUNK)])

    def together(self, x: Tensor) -> Tensor:
        """f(x) − μ for ``torch.export``, which knows no ``vmap``: examples run through the network side by side."""

        def of_all(x: Tensor) -> Tensor:
            with Watched(self.body, self.cut, x.shape[0]) as watched:
                self.body(x)
            return torch.cat(watched.found()[: len(self.parts) or 1], 1).float()

        return self._averaged(x, of_all) - self.mean

    def _averaged(self, x: Tensor, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        of, d = of or self._seen, self.shift
        padded = F.pad(x, (d, d, d, d), mode="reflect") if d else x
        moves = ((0, 0), (d, 0), (-d, 0), (0, d), (0, -d)) if d else ((0, 0),)
        total: Any = 0.0
        for i, j in moves:
            moved = padded[..., d + i : d + i + x.shape[-2], d + j : d + j + x.shape[-1]] if d else x
            total = total + of(moved) + (of(moved.flip(-1)) if self.mirror else 0.0)
        found: Tensor = total / (len(moves) * (2 if self.mirror else 1))
        return found

    def _split(self, seen: Tensor) -> Iterable[tuple[Tensor, int]]:
        return zip(seen.split(self.parts, 1), self.parts, strict=True)

    def _seen(self, x: Tensor) -> Tensor:
        body = copy.deepcopy(self.body)  # what it keeps of these examples goes with it

        def of_one(example: Tensor) -> tuple[Tensor, ...]:
            with Watched(body, self.cut) as watched:
                body(example.unsqueeze(0))
            return tuple(part.squeeze(0) for part in watched.found())

        try:
            found = torch.func.vmap(of_one, randomness="error")(x)
        except RuntimeError as error:
            problem = f"cannot run on one example of shape {tuple(x.shape[1:])} by itself: {str(error).splitlines()[0]}"
            fix = "Give inputs as it takes them, and layers that keep examples apart, change no buffer and draw nothing"
            raise bad("network", type(self.body).__name__, problem, fix) from error
        if "matrix" not in self._buffers:
            self.parts = tuple(part.shape[1] for part in found)
        known = self.parts or (self.width,)  # without maps, if it was saved when these were not among the features
        found = found if self.parts else found[:1]
        if tuple(part.shape[1] for part in found) != known:
            problem = "have other numbers of features than the public inputs had"
            raise bad("inputs", tuple(x.shape[1:]), problem, "Give inputs of the same size")
        return torch.cat(found, 1).float()


class Watched:
    """A network that runs once, on so many examples: what its last layers see, and the last map at every resolution.

    A map after which no layer with weights comes before the last layers tells what these see, and is left out. So are all maps
    where they make more than :data:`MOST`.
    """

    def __init__(self, body: nn.Module, cut: str, examples: int = 1) -> None:
        self.body, self.cut, self.examples = body, body.get_submodule(cut), examples
        self.seen: list[Tensor] = []
        self.maps: dict[tuple[int, ...], tuple[int, Tensor]] = {}
        self.layers = 0

    def __enter__(self) -> Watched:
        self.hooks = [self.cut.register_forward_pre_hook(lambda _, given: self.seen.append(given[0]))]
        self.hooks += [m.register_forward_hook(self._made) for m in self.body.modules()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _made(self, module: nn.Module, _: object, output: object) -> None:
        if self.seen:
            return
        self.layers += any(True for _ in module.parameters(recurse=False))
        shown = isinstance(output, Tensor) and output.dim() == 4 and output.is_floating_point()
        if isinstance(output, Tensor) and shown and output.shape[0] == self.examples:
            self.maps[tuple(output.shape[2:])] = self.layers, output

    def found(self) -> tuple[Tensor, ...]:
        """A row per example for each: a map in as many places as give no more numbers than the last layers see."""
        last = torch.cat([seen.reshape(self.examples, -1) for seen in self.seen], 1)
        rows = [last]
        for side, (layers, shown) in self.maps.items():
            places = min(PLACES, *side)
            while places > 1 and shown.shape[1] * places**2 > last.shape[1]:
                places //= 2
            if layers < self.layers:
                rows.append(F.adaptive_avg_pool2d(shown, places).flatten(1))
        return tuple(rows) if sum(row.shape[1] for row in rows) <= MOST else (last,)


def made_up(
    process: str, side: int, channels: int = 3, mean: float = MEAN, std: float = STD, count: int | None = None
) -> Tensor:
    """Images of a random process, normalised as inputs are; the same ones on every device."""
    generator = Generator().manual_seed(0)
    parts = [images(process, 512, generator, side, channels) for _ in range((count or IMAGES) // 512)]
    return (torch.cat(parts).float() / 255 - mean) / std


def flat(seen: Tensor) -> tuple[Tensor, Tensor]:
    """μ and A of the inputs [M, d]."""
    seen = seen.double()
    mean = seen.mean(0)
    covariance = (seen - mean).T @ (seen - mean) / len(seen)
    sizes, axes = torch.linalg.eigh(covariance)
    sizes = sizes.clamp_min(0.0)
    roots = (sizes + sizes.mean().clamp_min(1e-12)).rsqrt()
    unit = (sizes * roots.square()).mean().clamp_min(1e-24).rsqrt()
    return mean.float(), (unit * (axes * roots) @ axes.T).float()


def last_layers(network: nn.Module) -> str:
    """The name of the first of the linear layers that a network ends in; its last one, if all its layers are linear.

    Layers without parameters may stand between them. Maps tell more of the classes than hidden units that follow them do.
    """
    own = [(name, m) for name, m in network.named_modules() if any(True for _ in m.parameters(recurse=False))]
    before = [i for i, (_, m) in enumerate(own) if not isinstance(m, nn.Linear)]
    first = before[-1] + 1 if before else len(own) - 1
    if first == len(own) or not own[first][0]:
        problem = "does not end in a linear layer, which one of the classes' would take the place of"
        raise bad("network", type(network).__name__, problem, "Add an nn.Linear as its last layer")
    return own[first][0]
