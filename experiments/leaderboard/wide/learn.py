"""Learn a prior for WRN-16-4: self-supervised training on images of a random process, as :mod:`dpivon.priors`.

    python -m experiments.leaderboard.wide.learn generators --out wide.npz --seconds 540 --data DATA

The loss is taken of a projection of the last maps at 4×4 places, before they are averaged: what a view must not show, such as
where things are, is then forgotten in the projection and not in the network (as by Tang et al., 2023, with 8×8 places).

A file of below 2 MB holds what private training starts from; beside it is one of 29 MB with the projection, in bfloat16, which
learning goes on from. (Momentum is in neither: it is that of ten steps.) With more ``--seconds`` the same command goes on
later, at the rate that the longer cosine then has. ``--start`` takes the network of another prior, with a new projection and a
schedule from its beginning. With ``--data`` a linear probe on CIFAR-10 follows the progress: it is not private, and nothing is
learned or chosen from it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.priors import MIXTURES, Learning, Settings
from dpivon.priors.learning import MEAN, STD, Projected, state_of
from experiments.leaderboard.priors.data import Split, load_split
from experiments.leaderboard.priors.probe import ridge_accuracy
from experiments.leaderboard.wide.network import (
    WideNetwork,
    as_kept,
    averaged,
    features,
    read_prior,
    take,
    wide,
    write_prior,
)

#: What a file that learning goes on from is marked by.
STATE, VERSION = "dpivon_wide_learning", "1"

#: Seconds between two probes.
PROBE_EVERY = 75.0
#: Images that a probe is fitted to.
PROBED = 12_000
#: Images of the process that features are measured on.
MEASURED = 8192
#: Places of the maps that the projection sees, in each direction.
PLACES = 4


class WideFeatures(Projected):
    """The features of WRN-16-4 and the projection that the loss is taken of."""

    def __init__(self, toy: bool) -> None:
        nn.Module.__init__(self)
        self.network = wide(toy, PLACES)  # type: ignore[assignment]
        into, hidden = self.network.head.in_features, 64 if toy else 2048  # type: ignore[attr-defined]
        first = nn.Linear(into, hidden, bias=False)
        self.projection = nn.Sequential(first, nn.GroupNorm(16, hidden), nn.ReLU(), nn.Linear(hidden, 128))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.network.features(x.contiguous(memory_format=torch.channels_last))
        return F.normalize(self.projection(seen).float(), dim=1)

    def trained(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if not name.startswith("network.head")]


class WideLearning(Learning):
    """Learning with a probe, whose schedule may be made longer."""

    def __init__(self, settings: Settings, device: torch.device, probed: Split | None = None) -> None:
        torch.manual_seed(settings.seed)
        self.toy = settings.batch < 64
        super().__init__(WideFeatures(self.toy), settings, device)
        torch.backends.cudnn.benchmark = True
        self.probed, self.last_probe = probed, 0.0

    @torch.no_grad()
    def save(self, out: Path) -> None:
        kept = {n: p.detach().contiguous() for n, p in self.model.named_parameters() if "network.head." not in n}
        state = {n: p if n.startswith("network.") else p.bfloat16() for n, p in kept.items()}
        write_tensors(state_of(out), state, self.metadata())
        kept = {name: p for name, p in kept.items() if name.startswith("network.")}
        # Features are measured on the network as its file will have it.
        network = wide(self.toy, PLACES).to(self.device)
        take(network, as_kept(kept))
        seen = features(network, self.shown())
        seen = seen.unflatten(1, (-1, PLACES**2)).mean(2)  # the means over all places, channel by channel
        write_prior(out, kept | {"feature_mean": seen.mean(0), "feature_std": seen.std(0)}, self.metadata())
        if self.probed is not None and (self.ended or time.monotonic() - self.last_probe > PROBE_EVERY):
            self.last_probe = time.monotonic()
            for places in (1, PLACES):
                found = 100 * self._probe(network, places)
                print(
                    f"{self.settings.process}: {self.step:,} steps, linear probe, {places}: {found:.2f} %", flush=True
                )

    def _probe(self, network: WideNetwork, places: int) -> float:
        assert self.probed is not None
        x, held = (features(network, i) for i in (self.probed.images[:PROBED], self.probed.score_images))
        parts = [averaged(t.unflatten(1, (-1, PLACES, PLACES)), places).double() for t in (x, held)]
        return ridge_accuracy(parts[0], self.probed.labels[:PROBED], parts[1], self.probed.score_labels)

    def shown(self) -> Tensor:
        """Images of the process as the network takes them, from the middle of the pool's."""
        whole = self.pool[:MEASURED]
        margin = (whole.shape[-1] - 32) // 2
        return (whole[..., margin : margin + 32, margin : margin + 32].float() / 255 - MEAN) / STD

    def restore(self, out: Path) -> None:
        state = state_of(out)
        if not state.is_file():
            return
        tensors, metadata = read_tensors(state, key=STATE, version=VERSION, what="prior", fix="Delete it")
        if metadata["process"] != self.settings.process:
            raise SystemExit(f"{out}: is of {metadata['process']}. Delete it, or give the same process.")
        self.step, self.seconds = int(metadata["steps"]), float(metadata["seconds"])
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in tensors:
                    p.copy_(tensors[name])
        self.generator.manual_seed(self.settings.seed + self.step)  # other images than the first time
        print(f"{self.settings.process}: goes on at {self.step:,} steps, {self.seconds:.0f} s", flush=True)

    @torch.no_grad()
    def begin_from(self, path: Path) -> None:
        """Take the network of another prior, but nothing of its schedule."""
        take(self.model.network, read_prior(path))  # type: ignore[arg-type]

    def metadata(self) -> dict[str, str]:
        return {STATE: VERSION} | super().metadata()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("process", choices=list(MIXTURES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0, help="length of the schedule, over all calls")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds that this call may learn for, from now")
    parser.add_argument("--batch", type=int, default=512, help="images per step, of two views each")
    parser.add_argument("--data", type=Path, default=None, help="CIFAR-10, for the probe")
    parser.add_argument("--start", type=Path, default=None, help="a prior whose network learning begins with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="a small network, few images and steps, for a CPU")
    a = parser.parse_args()
    settings = Settings(a.process, a.seconds, 10**7, a.batch, pool=131_072, fresh=1024, every=64, seed=a.seed)
    if a.toy:
        settings = replace(settings, steps=8, batch=32, pool=128, fresh=32, every=4, warmup=4)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    probed = None if a.data is None else load_split(a.data, device, judge=False, toy=a.toy)
    learning = WideLearning(settings, device, probed)
    if a.start is not None:
        learning.begin_from(a.start)
    learning.fill()
    learning.learn(a.out, a.limit)


if __name__ == "__main__":
    main()
