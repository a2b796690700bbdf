"""A hidden layer that loses little of the feature maps: their principal components on images of a random process.

    python -m experiments.leaderboard.priors.spread filters.safetensors --process filters --out filters-spread.safetensors

Self-supervised learning makes hidden units that ignore what its views change, and a linear probe on them is hardly better
than one on random units. Here the 128 units are the first 128 principal components of the maps of synthetic images, each
divided by the square root of its deviation, turned at random so that all units are alike, and scaled to deviation 1.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Generator, Tensor

from dpivon.data import MEAN, STD
from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.models import PaperCNN
from dpivon.priors.processes import MIXTURES, images

#: Images that the components are of: four for each of the maps' 2,048 coordinates.
IMAGES = 8192
#: Units' bias, in deviations: at 0 the rectifier loses more, above 1 the units' common mean takes most of the clipped norm.
SHIFT = 0.5


@torch.no_grad()
def spread_hidden(network: PaperCNN, process: str, count: int = 0) -> tuple[Tensor, Tensor]:
    """Weight and bias of the hidden layer, decided by the maps and the process alone."""
    hidden = network.head.hidden
    device = hidden.weight.device
    count = count or (IMAGES if device.type == "cuda" else 512)
    g = Generator(device).manual_seed(0)
    network = copy.deepcopy(network).to(memory_format=torch.contiguous_format)
    found = []
    for i in range(0, count, 512):
        pixels = images(process, min(512, count - i), g, 32)
        found.append(network.features((pixels.float() / 255 - MEAN) / STD).flatten(1).double())
    maps = torch.cat(found)
    middle = maps.mean(0)
    values, vectors = torch.linalg.eigh((maps - middle).T @ (maps - middle) / len(maps))
    units = hidden.out_features
    components = vectors[:, -units:].T / values[-units:].clamp_min(1e-8).pow(0.25).unsqueeze(1)
    turn = torch.linalg.qr(torch.randn(units, units, generator=g, device=device, dtype=torch.float64))[0]
    weight = turn @ components
    weight = weight / ((maps - middle) @ weight.T).std(0).clamp_min(1e-6).unsqueeze(1)
    return weight.float(), (SHIFT - weight @ middle).float()


def main() -> None:
    from experiments.leaderboard.priors.learn import FORMAT, VERSION, load_prior

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prior", type=Path)
    parser.add_argument("--process", choices=list(MIXTURES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, metadata = read_tensors(a.prior, key=FORMAT, version=VERSION, what="prior", fix="Give what learn.py wrote")
    weight, bias = spread_hidden(load_prior(a.prior).to(device), a.process, IMAGES)
    tensors |= {"head.hidden.weight": weight.cpu(), "head.hidden.bias": bias.cpu()}
    write_tensors(a.out, tensors, metadata | {FORMAT: VERSION, "hidden": f"principal components on {a.process}"})


if __name__ == "__main__":
    main()
