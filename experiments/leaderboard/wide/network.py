"""WRN-16-4 in the order of De et al., its features, and its prior as a file.

A prior's features are brought to mean 0 and standard deviation :data:`UNIT` on images of its random process, which costs no
privacy; the last normalisation takes that in, so that the network stays one without further layers. The file keeps every
weight of a convolution in about five bits, so that it is below 2 MB and can be committed: rounding changes a weight by 3 % of
its filter's size, and what is trained from the file starts from the rounded weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.models import WideResNet
from experiments.leaderboard.priors.scores import SHIFTS

FORMAT, VERSION = "dpivon_wide_prior", "2"
#: The largest weight of a filter in the file; the others are multiples of its 31st part.
LEVELS = 31
#: Of a feature: 256 of them have norm 4, which leaves the other layers' gradients their part of a clipped one. With p × p
#: places there are p² times as many, and their unit is 1/p of it; so is :data:`HEAD`.
UNIT = 0.25
#: Root mean square of the logits' weights after their phase. A clipped gradient is shared out by the scales of its tensors: at
#: this one the logits have a part of it, and they hardly count in the w of dp-steady.
HEAD = 0.25


class WideNetwork(WideResNet):
    """WRN-16-4 whose last layer sees means over the parts of a grid of places × places, in place of one mean over all."""

    def __init__(self, places: int = 1, toy: bool = False, relu_first: bool = True) -> None:
        sizes = {"depth": 10, "width": 1, "groups": 4} if toy else {}
        super().__init__(**sizes, relu_first=relu_first)
        self.places = places
        if places > 1:
            self.head = nn.Linear(self.head.in_features * places**2, self.head.out_features)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) if self.places == 1 else averaged(self.maps(x), self.places)


def averaged(maps: Tensor, places: int) -> Tensor:
    """Means over the parts of a grid, [n, channels · places²]."""
    return F.avg_pool2d(maps, maps.shape[-1] // places).flatten(1)


def wide(toy: bool = False, places: int = 1, relu_first: bool = True) -> WideNetwork:
    return WideNetwork(places, toy, relu_first)


class Wrapped(nn.Module):
    """A function of images in bf16, channels last, where there is a GPU."""

    def __init__(self, network: WideResNet, features: bool = False) -> None:
        super().__init__()
        self.network, self.of_features = network, features

    def forward(self, x: Tensor) -> Tensor:
        made = self.network.features if self.of_features else self.network
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            found: Tensor = made(x.contiguous(memory_format=torch.channels_last))
        return found.float()


@torch.no_grad()
def features(network: WideResNet, images: Tensor, views: bool = False) -> Tensor:
    """[N, channels], each image's from that image alone; with ``views`` the mean over ten shifted and mirrored copies."""
    made, side = Wrapped(network, features=True), images.shape[-1]
    found = []
    for x in images.split(2500):
        if not views:
            found.append(made(x))
            continue
        padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
        each = [padded[..., 2 + i : 2 + i + side, 2 + j : 2 + j + side] for i, j in SHIFTS]
        found.append(torch.stack([made(v) for one in each for v in (one, one.flip(-1))]).mean(0))
    return torch.cat(found)


@torch.no_grad()
def balanced(network: WideNetwork) -> WideNetwork:
    """The same function with logits' weights of size :data:`HEAD`; features take the rest, in the last normalisation."""
    factor = float(network.head.weight.square().mean().sqrt()) * network.places / HEAD
    if factor > 0.0:
        network.norm.weight *= factor
        network.norm.bias *= factor
        network.head.weight /= factor
    return network


def rounded(value: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution's weights as whole numbers up to LEVELS, and every filter's unit."""
    unit = value.detach().float().abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12) / LEVELS
    return (value.detach().float() / unit).round().to(torch.int8), unit


def as_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a file would give them back."""
    found = dict(tensors)
    for name, value in tensors.items():
        if value.dim() == 4:
            whole, unit = rounded(value)
            found[name] = whole.float() * unit
    return found


def write_prior(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a prior's file whole."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if value.dim() == 4:
            value, unit = rounded(value)
            arrays[f"{name}.unit"] = unit.cpu().numpy()
        arrays[name] = value.detach().cpu().numpy()
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, metadata=np.array(json.dumps({FORMAT: VERSION, **metadata})), **arrays)
    partial.replace(path)


def process_of(path: Path) -> str:
    """The random process that a prior was learned from."""
    with np.load(path, allow_pickle=False) as file:
        return str(_metadata(path, file)["process"])


def _metadata(path: Path, file: Mapping[str, np.ndarray]) -> dict[str, str]:
    found: dict[str, str] = json.loads(str(file["metadata"])) if "metadata" in file else {}
    if found.get(FORMAT) != VERSION:
        raise SystemExit(f"{path}: is not a prior of version {VERSION}. Give what learn.py wrote.")
    return found


def read_prior(path: Path) -> dict[str, Tensor]:
    """The tensors of a prior's file."""
    with np.load(path, allow_pickle=False) as file:
        _metadata(path, file)
        tensors = {name: torch.from_numpy(file[name]) for name in file.files if name != "metadata"}
    units = {name: tensors.pop(name) for name in [n for n in tensors if n.endswith(".unit")]}
    return {n: t.float() * units[f"{n}.unit"] if f"{n}.unit" in units else t for n, t in tensors.items()}


@torch.no_grad()
def take(network: WideNetwork, tensors: Mapping[str, Tensor]) -> None:
    """Put a prior's weights into the network; its head stays."""
    for name, p in network.named_parameters():
        if not name.startswith("head."):
            p.copy_(tensors[f"network.{name}"])


@torch.no_grad()
def load_wide(path: Path, toy: bool = False, places: int = 1) -> WideNetwork:
    """The network of a prior's file, its features in their unit and its logits at zero."""
    tensors, network = read_prior(path), wide(toy, places)
    take(network, tensors)
    factor = UNIT / places / tensors["feature_std"].clamp_min(1e-3)
    network.norm.weight *= factor
    network.norm.bias.copy_((network.norm.bias - tensors["feature_mean"]) * factor)
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    return network
