"""Learn a prior: self-supervised training of the paper's CNN on images of a random process.

    python -m experiments.leaderboard.priors.learn leaves --out leaves.safetensors --seconds 300

Two random views of an image should be close on the sphere (alignment) and different images spread over it (uniformity):

    ℓ = mean ‖z − z′‖² + ½ Σ_views log mean_{i≠j} exp(−2 ‖z_i − z_j‖²)      (Wang and Isola, 2020)

The loss is taken of a projection of the hidden units, or, with ``--wide``, of the feature maps below them: the 128 hidden
units are then no bottleneck, and the file's hidden layer is the one of :mod:`spread`. The file holds the network with logits
of zero. The same command goes on from the last checkpoint; the cosine of the learning rate follows the time or the steps,
whichever is further along. On a GPU the loss is compiled.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dpivon.data import MEAN, STD
from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.models import PaperCNN
from experiments.leaderboard.priors.processes import MIXTURES, images
from experiments.leaderboard.priors.spread import spread_hidden

SIDE = 32
#: Of the images that views are taken of.
POOL_SIDE = 48
#: Random numbers that one view takes.
DRAWS = 12
FORMAT, VERSION = "dpivon_prior_experiment", "1"


@dataclass(frozen=True)
class Settings:
    """As published for this loss (evidence: lr .12 per 256 images, momentum .9, decay 1e-4), at a batch that fills a GPU."""

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
    wide: bool = False


class Features(nn.Module):
    """The 128 hidden units of the paper's CNN, or its feature maps, and the projection that the loss is taken of."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.network, self.wide = PaperCNN(), wide
        hidden = self.network.head.hidden
        inputs, between = (hidden.in_features, 512) if wide else (hidden.out_features, 256)
        self.projection = nn.Sequential(nn.Linear(inputs, between), nn.ReLU(), nn.Linear(between, 128))

    def hidden(self, x: Tensor) -> Tensor:
        head = self.network.head
        h: Tensor = head.relu(head.hidden(head.flatten(self.network.features(x))))
        return h

    def forward(self, x: Tensor) -> Tensor:
        seen = self.network.features(x).flatten(1) if self.wide else self.hidden(x)
        return F.normalize(self.projection(seen).float(), dim=1)

    def trained(self) -> list[nn.Parameter]:
        """What the loss depends on."""
        parts = [self.network.features, self.projection] + ([] if self.wide else [self.network.head.hidden])
        return [p for part in parts for p in part.parameters()]


def views(pixels: Tensor, draws: Tensor) -> Tensor:
    """One view of each image: a crop of 8 to 100 % of the area, flipped, jittered by ±40 % in four of five, grey in one of
    five; then normalised as inputs are. ``draws`` [n, DRAWS] are uniform."""
    n, channels = pixels.shape[:2]
    d = draws.unbind(1)
    area, shape = 0.08 + 0.92 * d[0], torch.exp((2 * d[1] - 1) * math.log(4 / 3))
    w, h = (area * shape).sqrt().clamp(max=1.0), (area / shape).sqrt().clamp(max=1.0)
    x0, y0 = (2 * d[2] - 1) * (1 - w), (2 * d[3] - 1) * (1 - h)
    zero = torch.zeros_like(w)
    rows = torch.stack([w * torch.where(d[4] < 0.5, -1.0, 1.0), zero, x0, zero, h, y0], 1).view(n, 2, 3)
    where = F.affine_grid(rows, [n, channels, SIDE, SIDE], align_corners=False)
    x = F.grid_sample(pixels.float() / 255, where, align_corners=False, padding_mode="reflection")
    brightness, contrast, saturation = (0.6 + 0.8 * each.view(n, 1, 1, 1) for each in d[5:8])
    y = x * brightness
    y = (y - (middle := y.mean((1, 2, 3), keepdim=True))) * contrast + middle
    y = (y - (grey := y.mean(1, keepdim=True))) * saturation + grey
    # A tint in place of a turn of the hue, which most colour models define for three channels alone.
    tint = (torch.stack(d[8:11], 1)[:, :channels] - 0.5).view(n, -1, 1, 1) * 0.2
    kind = d[11].view(n, 1, 1, 1)  # one number decides both: below .8 jittered, and its last part grey
    x = torch.where(kind < 0.8, y + tint, x)
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


class Learning:
    """The pool of images, the network, its momentum, and where it is in its schedule."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        torch.manual_seed(settings.seed)
        self.model = self.build().to(device)
        self.parameters = self.model.trained()
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.generator = Generator(device).manual_seed(settings.seed)
        self.step, self.seconds = 0, 0.0
        self.loss: Callable[[Tensor, Tensor], Tensor] = self._loss
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            self.loss = torch.compile(self._loss, dynamic=False)

    def build(self) -> Features:
        return Features(self.settings.wide)

    def _loss(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """[alignment, uniformity]."""
        with torch.autocast(self.device.type, torch.bfloat16):
            z = self.model(views(torch.cat([pixels, pixels]), draws))
        a, b = z.chunk(2)
        return torch.stack([alignment(a, b), (uniformity(a) + uniformity(b)) / 2])

    def fill(self) -> None:
        """Make the pool, a few thousand images at a time."""
        began, s = time.monotonic(), self.settings
        parts = [images(s.process, min(4096, s.pool - i), self.generator, POOL_SIDE) for i in range(0, s.pool, 4096)]
        self.pool = torch.cat(parts)
        int(self.pool[-1].sum())  # waits for the device
        took = time.monotonic() - began
        print(f"{s.process}: {len(self.pool):,} images in {took:.1f} s, {len(self.pool) / took:,.0f}/s", flush=True)

    def rate(self) -> float:
        s = self.settings
        done = min(1.0, max(self.step / s.steps, self.seconds / s.seconds))
        peak = s.lr * s.batch / 256
        return peak * min(1.0, (self.step + 1) / s.warmup) * 0.5 * (1 + math.cos(math.pi * done))

    def advance(self) -> Tensor:
        """One step; the two parts of the loss."""
        s, g = self.settings, self.generator
        if self.step % s.every == s.every - 1:
            at = torch.randint(s.pool - s.fresh + 1, (1,), generator=g, device=self.device)
            self.pool[int(at) : int(at) + s.fresh] = images(s.process, s.fresh, g, POOL_SIDE)
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

    def learn(self, out: Path, limit: float) -> bool:
        """Go on for up to ``limit`` seconds, saving every half minute; True when the schedule is at its end."""
        s = self.settings
        self.restore(out)
        began = last = saved = time.monotonic()
        first = at = self.step
        while self.step < s.steps and self.seconds < s.seconds and last - began < limit:
            parts = self.advance()
            if self.step % 100 and self.step > first + 1:
                continue
            align, spread = parts.tolist()  # waits for the device, so the clock is right
            now = time.monotonic()
            self.seconds += now - last  # the first step's compiling included: the schedule ends when it was said to
            last = now
            if self.step == first + 1:
                print(f"{s.process}: first step after {now - began:.1f} s", flush=True)
            if now - saved > 30:
                pace = (self.step - at) / (now - saved)
                told = f"{self.step:,} steps, {self.seconds:.0f} s, {pace:.0f} steps/s"
                print(f"{s.process}: {told}, align {align:.3f} uniform {spread:.3f}", flush=True)
                self.save(out)
                saved, at = now, self.step
        self.save(out)
        print(f"{s.process}: {self.step:,} steps in {self.seconds:.0f} s", flush=True)
        return self.step >= s.steps or self.seconds >= s.seconds

    def metadata(self) -> dict[str, str]:
        facts = {FORMAT: VERSION, "process": self.settings.process, "settings": repr(self.settings)}
        return facts | {"steps": str(self.step), "seconds": f"{self.seconds:.1f}"}

    def save(self, out: Path) -> None:
        """The prior itself, and beside it what is needed to go on."""
        metadata = self.metadata()
        network = {name: p.detach() for name, p in self.model.network.state_dict().items()}
        network |= {name: torch.zeros_like(p) for name, p in network.items() if name.startswith("head.logits")}
        if self.settings.wide:
            hidden = spread_hidden(self.model.network, self.settings.process)
            network |= {"head.hidden.weight": hidden[0], "head.hidden.bias": hidden[1]}
        write_tensors(out, network, metadata)
        both = {"model": [p.detach() for p in self.parameters], "momentum": self.momentum}
        write_tensors(
            state_of(out), {f"{kind}.{i}": t for kind, each in both.items() for i, t in enumerate(each)}, metadata
        )

    def restore(self, out: Path) -> None:
        state = state_of(out)
        if not state.is_file():
            return
        tensors, metadata = read_tensors(state, key=FORMAT, version=VERSION, what="learning", fix="Delete it")
        if metadata["settings"] != repr(self.settings):
            raise SystemExit(f"{state}: is of {metadata['settings']}. Delete it, or give the same settings.")
        self.step, self.seconds = int(metadata["steps"]), float(metadata["seconds"])
        with torch.no_grad():
            for i, (p, m) in enumerate(zip(self.parameters, self.momentum, strict=True)):
                p.copy_(tensors[f"model.{i}"])
                m.copy_(tensors[f"momentum.{i}"])
        self.generator.manual_seed(self.settings.seed + self.step)  # other images than the first time
        print(f"{self.settings.process}: goes on at {self.step:,} steps, {self.seconds:.0f} s", flush=True)


def state_of(out: Path) -> Path:
    return out.with_suffix(".state.safetensors")


def load_prior(path: Path) -> PaperCNN:
    """The network of a file that :mod:`learn` wrote."""
    tensors, _ = read_tensors(path, key=FORMAT, version=VERSION, what="prior", fix="Give what learn.py wrote")
    network = PaperCNN()
    network.load_state_dict(tensors)
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("process", choices=list(MIXTURES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the schedule, over all calls")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="the same in steps; the earlier end counts")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds that this call may learn for, from now")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wide", action="store_true", help="the loss of the feature maps, not of the hidden units")
    parser.add_argument("--toy", action="store_true", help="few images and steps, for a CPU")
    a = parser.parse_args()
    settings = Settings(a.process, a.seconds, a.steps, seed=a.seed, wide=a.wide)
    if a.toy:
        settings = replace(settings, steps=8, batch=32, pool=128, fresh=32, every=4, warmup=4)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    learning = Learning(settings, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    learning.fill()
    learning.learn(a.out, a.limit)


if __name__ == "__main__":
    main()
