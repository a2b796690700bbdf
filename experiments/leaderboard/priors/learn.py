"""Learn a prior for the paper's CNN: :mod:`dpivon.priors` on images of a random process.

    python -m experiments.leaderboard.priors.learn leaves --out leaves.safetensors --seconds 300

The loss is taken of a projection of the hidden units, or, with ``--wide``, of the feature maps below them: the 128 hidden
units are then no bottleneck, and the file's hidden layer is the one of :mod:`spread`. The file holds the network with logits
of zero. The same command goes on from the last checkpoint, momentum included.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.models import PaperCNN
from dpivon.priors import MIXTURES, learning
from dpivon.priors.learning import state_of
from experiments.leaderboard.priors.spread import spread_hidden

FORMAT, VERSION = "dpivon_prior_experiment", "1"


@dataclass(frozen=True)
class Settings(learning.Settings):
    """``wide`` takes the loss of the feature maps."""

    wide: bool = False


class Features(learning.Projected):
    """The 128 hidden units of the paper's CNN, or its feature maps, and the projection that the loss is taken of."""

    def __init__(self, wide: bool = False) -> None:
        nn.Module.__init__(self)
        self.network: PaperCNN
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


class Learning(learning.Learning):
    """With a file of the network alone, and momentum in what it goes on from."""

    settings: Settings
    model: Features

    def __init__(self, settings: Settings, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        super().__init__(Features(settings.wide), settings, device)

    def metadata(self) -> dict[str, str]:
        return super().metadata() | {FORMAT: VERSION}

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
