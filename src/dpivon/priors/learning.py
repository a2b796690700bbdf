"""Self-supervised learning on images of a random process: what a network may know before it sees anyone's data.

Two random views of an image should be close on the sphere (alignment) and different images spread over it (uniformity):

    ℓ = mean ‖z − z′‖² + ½ Σ_views log mean_{i≠j} exp(−2 ‖z_i − z_j‖²)      (Wang and Isola, 2020)

z is a projection of what the network's last linear layer sees. The cosine of the learning rate follows the time or the steps,
whichever is further along. On a GPU the loss is compiled.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.errors import bad, check_choice
from dpivon.posterior import Posterior
from dpivon.priors.processes import MIXTURES, images
from dpivon.terminal import say

#: Of the images that views are taken of, in sides of a view: so that a crop is seldom enlarged.
MARGIN = 1.5
#: Random numbers that one view takes.
DRAWS = 12
#: What inputs are normalised by, as :func:`dpivon.data.normalised` does; public constants.
MEAN, STD = 0.5, 0.25
FORMAT, VERSION = "dpivon_prior_learning", "1"


@dataclass(frozen=True)
class Settings:
    """As published for this loss (lr .12 per 256 images, momentum .9, decay 1e-4), at a batch that fills a GPU."""

    process: str
    seconds: float
    steps: int = 200_000
    batch: int = 1024
    pool: int = 262_144
    fresh: int = 2048  # images that replace old ones …
    every: int = 128  # … after so many steps
    lr: float = 0.12
    warmup: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("process", self.process, tuple(MIXTURES), "Name a random process or a mixture of them")


def views(pixels: Tensor, draws: Tensor, side: int = 32) -> Tensor:
    """One view of each image: a crop of 8 to 100 % of the area, flipped, jittered by ±40 % in four of five, grey in one of
    five; then normalised as inputs are. ``draws`` [n, DRAWS] are uniform."""
    n, channels = pixels.shape[:2]
    d = draws.unbind(1)
    area, shape = 0.08 + 0.92 * d[0], torch.exp((2 * d[1] - 1) * math.log(4 / 3))
    w, h = (area * shape).sqrt().clamp(max=1.0), (area / shape).sqrt().clamp(max=1.0)
    x0, y0 = (2 * d[2] - 1) * (1 - w), (2 * d[3] - 1) * (1 - h)
    zero = torch.zeros_like(w)
    rows = torch.stack([w * torch.where(d[4] < 0.5, -1.0, 1.0), zero, x0, zero, h, y0], 1).view(n, 2, 3)
    where = F.affine_grid(rows, [n, channels, side, side], align_corners=False)
    x = F.grid_sample(pixels.float() / 255, where, align_corners=False, padding_mode="reflection")
    brightness, contrast, saturation = (0.6 + 0.8 * each.view(n, 1, 1, 1) for each in d[5:8])
    y = x * brightness
    y = (y - (middle := y.mean((1, 2, 3), keepdim=True))) * contrast + middle
    y = (y - (grey := y.mean(1, keepdim=True))) * saturation + grey
    # A tint in place of a turn of the hue, which most colour models define for three channels alone.
    tint = torch.stack(d[8:11], 1)[:, torch.arange(channels, device=x.device) % 3]
    kind = d[11].view(n, 1, 1, 1)  # one number decides both: below .8 jittered, and its last part grey
    x = torch.where(kind < 0.8, y + (tint - 0.5).view(n, -1, 1, 1) * 0.2, x)
    x = torch.where((kind * 5) % 1 < 0.2, x.mean(1, keepdim=True).expand_as(x), x)
    return (x.clamp(0, 1) - MEAN) / STD


def alignment(z: Tensor, other: Tensor) -> Tensor:
    """mean ‖z − z′‖²."""
    return (z - other).square().sum(1).mean()


def uniformity(z: Tensor) -> Tensor:
    """log mean_{i≠j} exp(−2‖z_i − z_j‖²) of points on the sphere."""
    n = len(z)
    near = (4 * (z @ z.T) - 4).exp()
    return ((near.sum() - near.diagonal().sum()) / (n * (n - 1))).log()


class Projected(nn.Module):
    """A network up to its last linear layer, and the projection that the loss is taken of."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        names = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
        if not names:
            raise bad(
                "network", type(network).__name__, "has no linear layer to learn features for", "Give it one, last"
            )
        self.head = names[-1]
        self.width = int(network.get_submodule(self.head).in_features)  # type: ignore[arg-type]
        self.body = copy.deepcopy(network)
        self.body.set_submodule(self.head, nn.Identity())
        for name, p in self.body.named_parameters():  # the same parameters, and no others
            parent, _, last = name.rpartition(".")
            setattr(self.body.get_submodule(parent), last, network.get_parameter(name))
            assert network.get_parameter(name).shape == p.shape
        self.projection = nn.Sequential(nn.Linear(self.width, 256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.body(x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x)
        return F.normalize(self.projection(seen.flatten(1)).float(), dim=1)

    def trained(self) -> list[nn.Parameter]:
        """What the loss depends on."""
        return [*self.body.parameters(), *self.projection.parameters()]


class Learning:
    """The pool of images, the network, its momentum, and where it is in its schedule.

    Args:
        model: features and projection; ``trained()`` are the parameters of the loss.
        settings: process, length, batch.
        device: where.
        shape: (channels, side) of the network's inputs.
    """

    def __init__(
        self, model: Projected, settings: Settings, device: torch.device, shape: tuple[int, int] = (3, 32)
    ) -> None:
        self.settings, self.device, (self.channels, self.side) = settings, device, shape
        self.model = model.to(device)
        self.parameters: list[Tensor] = list(self.model.trained())
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.generator = Generator(device).manual_seed(settings.seed)
        self.step, self.seconds = 0, 0.0
        self.loss: Callable[[Tensor, Tensor], Tensor] = self._loss
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """[alignment, uniformity]."""
        with torch.autocast(self.device.type, torch.bfloat16):
            z = self.model(views(torch.cat([pixels, pixels]), draws, self.side))
        a, b = z.chunk(2)
        return torch.stack([alignment(a, b), (uniformity(a) + uniformity(b)) / 2])

    def _images(self, n: int) -> Tensor:
        return images(self.settings.process, n, self.generator, int(MARGIN * self.side), self.channels)

    def fill(self) -> None:
        """Make the pool, a few thousand images at a time."""
        began, s = time.monotonic(), self.settings
        self.pool = torch.cat([self._images(min(4096, s.pool - i)) for i in range(0, s.pool, 4096)])
        int(self.pool[-1].sum())  # waits for the device
        took = time.monotonic() - began
        say(f"{s.process}: {len(self.pool):,} images in {took:.1f} s, {len(self.pool) / took:,.0f}/s")

    def rate(self) -> float:
        """Of the next step."""
        s = self.settings
        done = min(1.0, max(self.step / s.steps, self.seconds / s.seconds))
        peak = s.lr * s.batch / 256
        return peak * min(1.0, (self.step + 1) / s.warmup) * 0.5 * (1 + math.cos(math.pi * done))

    def advance(self) -> Tensor:
        """One step; the two parts of the loss."""
        s, g = self.settings, self.generator
        if self.step % s.every == s.every - 1:
            at = int(torch.randint(s.pool - s.fresh + 1, (1,), generator=g, device=self.device))
            self.pool[at : at + s.fresh] = self._images(s.fresh)
        index = torch.randint(s.pool, (s.batch,), generator=g, device=self.device)
        draws = torch.rand(2 * s.batch, DRAWS, generator=g, device=self.device)
        parts = self.loss(self.pool[index], draws)
        gradients = torch.autograd.grad(parts.sum(), self.parameters)
        with torch.no_grad():  # SGD with momentum 0.9 and decay 1e-4
            torch._foreach_mul_(self.momentum, 0.9)
            torch._foreach_add_(self.momentum, gradients)
            torch._foreach_add_(self.momentum, self.parameters, alpha=1e-4)
            torch._foreach_add_(self.parameters, self.momentum, alpha=-self.rate())
        self.step += 1
        return parts.detach()

    @property
    def ended(self) -> bool:
        """Whether the schedule is at its end."""
        return self.step >= self.settings.steps or self.seconds >= self.settings.seconds

    def learn(self, out: Path, limit: float = math.inf) -> bool:
        """Go on for up to ``limit`` seconds, saving every half minute; True when the schedule is at its end."""
        s = self.settings
        self.restore(out)
        began = last = saved = time.monotonic()
        first = at = self.step
        while not self.ended and last - began < limit:
            parts = self.advance()
            if self.step % 100 and self.step > first + 1:
                continue
            align, spread = parts.tolist()  # waits for the device, so the clock is right
            now = time.monotonic()
            self.seconds += now - last  # the first step's compiling included: the schedule ends when it was said to
            last = now
            if self.step == first + 1:
                say(f"{s.process}: first step after {now - began:.1f} s")
            if now - saved > 30:
                pace = (self.step - at) / (now - saved)
                so_far = f"{self.step:,} steps, {self.seconds:.0f} s, {pace:.0f} steps/s"
                say(f"{s.process}: {so_far}, align {align:.3f} uniform {spread:.3f}")
                self.save(out)
                saved, at = now, self.step
        self.save(out)
        say(f"{s.process}: {self.step:,} steps in {self.seconds:.0f} s")
        return self.ended

    # ---- files

    def _named(self) -> dict[str, Tensor]:
        projection = self.model.projection.named_parameters(prefix="projection")
        return {**dict(self.model.network.named_parameters()), **dict(projection)}

    def metadata(self) -> dict[str, str]:
        """What a file says of itself."""
        facts = {FORMAT: VERSION, "process": self.settings.process, "settings": repr(self.settings)}
        return facts | {"steps": str(self.step), "seconds": f"{self.seconds:.1f}"}

    def save(self, out: Path) -> None:
        """The prior, and beside it what learning goes on from; momentum is that of ten steps, and is not kept."""
        self.posterior().save(out)
        named = self._named()
        write_tensors(state_of(out), {name: p.detach() for name, p in named.items()}, self.metadata())

    def restore(self, out: Path) -> None:
        """Go on from the file beside ``out``, if there is one; with more seconds or steps the cosine is a longer one."""
        state = state_of(out)
        if not state.is_file():
            return
        tensors, metadata = read_tensors(state, key=FORMAT, version=VERSION, what="learning", fix="Delete it")
        if metadata["process"] != self.settings.process:
            problem = f"is of process {metadata['process']!r}, not {self.settings.process!r}"
            raise bad("out", str(state), problem, "Delete it, or give the same process")
        self.step, self.seconds = int(metadata["steps"]), float(metadata["seconds"])
        named = self._named()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(tensors[name])
        self.generator.manual_seed(self.settings.seed + self.step)  # other images than the first time
        say(f"{self.settings.process}: goes on at {self.step:,} steps, {self.seconds:.0f} s")

    def posterior(self) -> Posterior:
        """N(μ, v) for ``prior=``: μ as learned, v a tensor's mean square; a last layer of zero, with v = 1."""
        mean, variance = {}, {}
        for name, p in self.model.network.named_parameters():
            size = p.detach().float().square().mean().clamp_min(1e-4)
            last = name.startswith(f"{self.model.head}.")
            mean[name] = torch.zeros_like(p, dtype=torch.float32) if last else p.detach().float().clone()
            variance[name] = torch.ones_like(mean[name]) if last else size.expand(p.shape).clone()
        return Posterior(mean, variance, {"method": "random process", "process": self.settings.process})


def state_of(out: Path) -> Path:
    """Where learning keeps what it goes on from."""
    return out.with_suffix(".state.safetensors")


def learn(
    network: nn.Module,
    out: str | os.PathLike[str],
    *,
    process: str = "filters",
    seconds: float = 300.0,
    shape: tuple[int, int] = (3, 32),
    device: torch.device | str | None = None,
    **settings: int | float,
) -> Posterior:
    """Learn a prior for ``network`` on images of a random process, and write it to ``out``; the same call goes on.

    >>> prior = dpivon.priors.learn(PaperCNN(), "prior.safetensors", process="filters", seconds=300)
    >>> dpivon.fit(model, x, y, prior=prior, …)

    Args:
        network: ends in a linear layer, whose inputs are the features. It is copied.
        out: the prior's file; beside it is one that learning goes on from.
        process: a name of :data:`MIXTURES`.
        seconds: length of the schedule, over all calls.
        shape: (channels, side) of the network's inputs.
        device: a GPU if there is one.
        **settings: further fields of ``Settings``.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    made = Settings(process, seconds, **settings)  # type: ignore[arg-type]
    torch.manual_seed(made.seed)
    learning = Learning(Projected(copy.deepcopy(network)), made, where, shape)
    learning.fill()
    learning.learn(Path(out))
    return learning.posterior().to("cpu")
