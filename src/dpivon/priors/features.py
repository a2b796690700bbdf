"""What a prior's network sees, in flat coordinates: features for a private linear layer.

Under privacy a linear layer learns with one step size and one size of noise in every direction, while the features of a
network differ in size by thousands. On images of the prior's random process their mean μ and covariance Σ are no one's data,
so dividing by the root of Σ costs no privacy:

    x ↦ A (f(x) − μ),   A = c (Σ + σ̄² I)^(-1/2)

with f the network up to its last linear layers and σ̄² the mean variance, which keeps directions that the process hardly shows
from being noise alone. c makes the mean variance of a coordinate 1, for which the default step of ``dp-steady`` is made.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dpivon.errors import bad, check_whole
from dpivon.posterior import Posterior
from dpivon.priors.processes import MIXTURES, images
from dpivon.priors.start import check_free, start_from

#: Images of a process that Σ is of, and the most features: Σ's roots take minutes with more.
IMAGES, MOST = 8192, 8192
#: Images that run through the network at a time.
CHUNK = 500
#: Built-in priors of images that may be mirrored: photographs have no handedness, digits have.
MIRRORED = frozenset({"images-32"})
#: A shift of the copies whose features are averaged, in sides of the image.
SHIFT = 1 / 16


class Features(nn.Module):
    """A frozen network up to its last linear layers, and flat coordinates of what it sees: [N, ...] to [N, width].

    >>> features = dpivon.priors.Features(pretrained, public_images, mirror=True)
    >>> trained = dpivon.steady(nn.Linear(features.width, 10), features(x), y, target_epsilon=1, ...)

    :func:`dpivon.steady` does the same with ``start_from=features``. Features are averaged over moved copies of an image.

    Args:
        network: copied, in evaluation mode. Its weights must know no one's private data.
        public: inputs that are public or made up, as ``network`` takes them: 2,000 or more. μ and Σ are of these.
        shift: average over the image and four copies that are moved by so many pixels.
        mirror: average over mirrored copies too.

    Attributes:
        width: how many features there are.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, network: nn.Module, public: Tensor, *, shift: int = 0, mirror: bool = False) -> None:
        super().__init__()
        self.shift, self.mirror = check_whole("shift", shift, "Use 2 for images of 32×32, or 0"), mirror
        if (self.shift or mirror) and public.dim() != 4:
            fix = "Leave shift and mirror out, or give inputs [N, channels, height, width]"
            raise bad("public", tuple(public.shape), "are not images, which alone can be moved", fix)
        self.body = copy.deepcopy(network).eval().requires_grad_(False)
        self.cut = last_layers(self.body)
        seen = self.seen(public)
        if not torch.isfinite(seen).all():
            problem = "gives features that are not finite"
            raise bad("network", type(network).__name__, problem, "Look at its weights and at public")
        self._check_rows(public[:CHUNK], seen[:CHUNK])
        if not 2 <= seen.shape[1] <= MOST:
            problem = f"gives {seen.shape[1]:,} features, and 2 to {MOST:,} can be flattened"
            raise bad("network", type(network).__name__, problem, "Pool them before its last linear layer")
        mean, matrix = flat(seen)
        self.register_buffer("mean", mean)
        self.register_buffer("matrix", matrix)
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
        fix = "Give fit its Fitted as after=. If no one's private data is in it, give Posterior(its mean, its variance)"
        check_free(found, prior, fix)
        process = found.metadata.get("process", "")
        if process not in MIXTURES:
            problem = "names no random process, so there are no images to flatten its features on"
            raise bad("start_from", shown, problem, "Give dpivon.priors.Features(network, public inputs)")
        if len(shape) != 3 or shape[1] != shape[2]:
            fix = "Give inputs [N, channels, side, side]"
            raise bad("inputs", shape, "is not the shape of square images, which its process makes", fix)
        channels, side, _ = shape
        generator = Generator(next(network.parameters()).device).manual_seed(0)
        made = torch.cat([images(process, 512, generator, side, channels) for _ in range(IMAGES // 512)])
        public = (made.float() / 255 - float(found.metadata["input_mean"])) / float(found.metadata["input_std"])
        shift = max(1, round(SHIFT * side)) if shift is None else shift
        return cls(network, public, shift=shift, mirror=shown in MIRRORED if mirror is None else mirror)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.seen(x) - self.mean) @ self.matrix).to(x.device)

    @torch.no_grad()
    def seen(self, x: Tensor) -> Tensor:
        """What the last layers get, averaged over the copies: an example's from that example alone."""
        device = next(self.body.parameters()).device
        return torch.cat([self._averaged(part.to(device)) for part in x.split(CHUNK)])

    def _averaged(self, x: Tensor) -> Tensor:
        d = self.shift
        padded = F.pad(x, (d, d, d, d), mode="reflect") if d else x
        moves = ((0, 0), (d, 0), (-d, 0), (0, d), (0, -d)) if d else ((0, 0),)
        total: Any = 0.0
        for i, j in moves:
            moved = padded[..., d + i : d + i + x.shape[-2], d + j : d + j + x.shape[-1]] if d else x
            total = total + self._seen(moved) + (self._seen(moved.flip(-1)) if self.mirror else 0.0)
        found: Tensor = total / (len(moves) * (2 if self.mirror else 1))
        return found

    def _seen(self, x: Tensor) -> Tensor:
        got: list[Tensor] = []
        hook = self.body.get_submodule(self.cut).register_forward_pre_hook(lambda _, given: got.append(given[0]))
        try:
            self.body(x)
        finally:
            hook.remove()
        if len(got) != 1 or got[0].shape[0] != len(x):
            problem = f"gives its layer {self.cut} no row for each of {len(x)} examples"
            raise bad("network", type(self.body).__name__, problem, "Give a network whose last layer sees one row each")
        return got[0].flatten(1).float()

    def _check_rows(self, some: Tensor, together: Tensor) -> None:
        """Refuse a network in which one example changes another's features; public inputs show it."""
        alone = torch.cat([self.seen(x) for x in some[:8].split(1)])
        if not torch.allclose(together[: len(alone)], alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
            problem = "mixes the examples of a batch, so that one person's data would be in the features of another's"
            raise bad("network", type(self.body).__name__, problem, "Use layers that keep examples apart")


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
