"""All weights of a network in flat coordinates, after a last layer on flat features: CIFAR-10, from a prior.

    python -m experiments.leaderboard.flat paper --data DATA --work WORK --table flat.csv --epsilons 3 --arms dp-steady:0.3@0.35
    python -m experiments.leaderboard.flat paper --data DATA --work WORK --table flat.csv --judge --seeds 1 2 3 --epsilons 3

A prior's features are flat for a last layer (:mod:`dpivon.priors.features`). Here they are for every convolution: it has its
prior weights W₀ and a trained Θ, which starts at zero,

    y = W₀ x + s Θ A x

with x a patch of its input, A the inverse root of its covariance on images of the random process, damped as there, and s the
root mean square of W₀ A⁻¹. So Θ is in units of the prior, and noise is spread evenly over what the layer sees. Networks, priors
and WORK are those of :mod:`experiments.leaderboard.linear`.

An arm is METHOD:RATE@SHARE: the head is trained first, alone, at the full batch, with the σ at which that spends SHARE of ε by
itself; then Θ and the head together. Both and a reserve for calibration are composed. The network averages the features of an
image and its mirror image, and those of ten copies where it is scored. Without ``--judge`` 45,000 training images are
trained on and 5,000 scored; with it all 50,000 and the test set, by the best arm of the validation rows at that ε unless
``--arms`` says. Temperatures are fitted on the validation images, which are trained on with ``--judge``; they are not charged.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon import Augmentation
from dpivon.data.images import tuning_places
from dpivon.machine import hardware_name
from dpivon.metrics import accuracy, ece, nll
from dpivon.models import PaperCNN
from dpivon.models.standardised import StandardisedConv2d
from dpivon.models.wrn import Block
from dpivon.optim.average import window_decay
from dpivon.priors import Features
from dpivon.priors.features import PLACES, flat
from dpivon.privacy.accounting import epsilon, noise_multiplier
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.temperature import temper
from experiments.leaderboard.linear import features_of, made, process_images
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import Split, load_split
from experiments.leaderboard.priors.predictions import RESERVE
from experiments.leaderboard.priors.private import DELTA, C
from experiments.leaderboard.priors.scores import SHIFTS, best_temperature
from experiments.leaderboard.wide.heads import ACCOUNTANT, Arm, trained_heads
from experiments.leaderboard.wide.network import WideNetwork, averaged

HEAD_STEPS, BATCH = 160, 4096
#: Images of the process whose patches a covariance is of, and how many patches.
IMAGES, PATCHES = 1024, 100_000
#: Of a flat feature, against 1 in a last layer that is trained alone: the share of a clipped gradient that is the head's.
UNITS = {"paper": 0.064, "wide": 0.045}


@dataclass(frozen=True)
class Cell:
    """One run."""

    network: str
    epsilon: float
    method: str
    lr: float
    share: float
    seed: int
    steps: int
    unit: float

    @property
    def head(self) -> Arm:
        return Arm(self.epsilon, "dp-steady", 3.5, HEAD_STEPS, self.seed)


NAMES = tuple(field.name for field in fields(Cell))
SCORES = ("head_accuracy", "one_accuracy", "one_nll", "one_ece", "accuracy", "nll", "ece", "temperature")
COLUMNS = (
    *("split", *NAMES, "batch", "delta", "max_grad_norm", "head_noise_multiplier", "noise_multiplier", "epsilon_spent"),
    *("train_size", *SCORES, "seconds", "accountant", "device", "torch", "commit"),
)


class FlatConv(nn.Module):
    """A convolution with its prior weights, and Θ, which sees flat patches of what it saw of a process's images."""

    def __init__(self, prior: nn.Conv2d, seen: Tensor) -> None:
        super().__init__()
        weight = prior.standardised() if isinstance(prior, StandardisedConv2d) else prior.weight
        into, out, (size, _), (stride, _) = prior.in_channels, prior.out_channels, prior.kernel_size, prior.stride
        padding = size // 2
        self.conv = nn.Conv2d(into, out, size, stride, padding, bias=prior.bias is not None).to(seen.device)
        self.conv.load_state_dict({**prior.state_dict(), "weight": weight.detach()})
        generator = torch.Generator().manual_seed(0)
        each = -(-PATCHES // len(seen))
        patches = []
        for x in seen.split(64):
            found = F.unfold(x, size, padding=padding, stride=stride).mT
            places = torch.randperm(found.shape[1], generator=generator)[:each]
            patches.append(found[:, places.to(found.device)].flatten(0, 1))
        matrix = flat(torch.cat(patches))[1].T
        start = torch.linalg.solve(matrix.double().T, weight.detach().double().flatten(1).T)  # W₀ A⁻¹, transposed
        matrix = matrix * start.square().mean().sqrt().float()
        matrix = F.pad(matrix, (0, 0, 0, -len(matrix) % 32))  # zeros, as many channels as products are fast with
        self.flat = nn.Conv2d(into, len(matrix), size, stride, padding, bias=False)
        self.flat.weight = nn.Parameter(matrix.view(-1, *weight.shape[1:]))
        self.requires_grad_(False)
        self.theta = nn.Conv2d(len(matrix), out, 1, bias=False)
        nn.init.zeros_(self.theta.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x) + self.theta(self.flat(x))
        return found


@torch.no_grad()
def in_flat_coordinates(body: nn.Module, images: Tensor) -> nn.Module:
    """A copy that is trained in Θ alone."""
    seen: dict[str, list[Tensor]] = {}
    convolutions = {name: m for name, m in body.named_modules() if isinstance(m, nn.Conv2d)}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: seen.setdefault(name, []).append(given[0])

    hooks = [m.register_forward_pre_hook(note(name)) for name, m in convolutions.items()]
    for x in images.split(256):
        body(x)
    for hook in hooks:
        hook.remove()
    made = copy.deepcopy(body).requires_grad_(False)
    for name, conv in convolutions.items():
        parent, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(parent), leaf, FlatConv(conv, torch.cat(seen.pop(name))))
    return made


def maps(body: nn.Module, x: Tensor) -> list[Tensor]:
    """Rows of what the last layers see and, in places, of the last map at every resolution before, as ``Features`` has them."""
    early = []
    if isinstance(body, PaperCNN):
        for i, block in enumerate(body.features):
            assert isinstance(block, nn.Sequential)
            *layers, pool = block
            for layer in layers:
                x = layer(x)
            if i + 1 < len(body.features):
                early.append(averaged(x, PLACES))
            x = pool(x)
        return [x.flatten(1), *early]
    assert isinstance(body, WideNetwork)
    x = body.stem(x)
    for block in body.blocks:
        assert isinstance(block, Block)
        skip = x
        if block.skip is not None:
            assert block.skip_norm is not None
            skip = block.skip_norm(F.relu(x))
            before, skip = skip, block.skip(skip)
            if before.shape[-1] > skip.shape[-1]:
                early.append(averaged(before, PLACES))
        x = skip + block.conv2(block.norm2(F.relu(block.conv1(block.norm1(F.relu(x))))))
    return [averaged(body.norm(F.relu(x)), body.places), *early]


class FlatNetwork(nn.Module):
    """A network up to its last map, in flat coordinates, and a last layer on flat features of all its maps."""

    def __init__(self, features: Features, images: Tensor, unit: float) -> None:
        super().__init__()
        self.body = in_flat_coordinates(features.body, images)
        self.body.head = nn.Identity()  # of no use here
        self.flat = nn.Linear(features.width, features.width).requires_grad_(False)
        self.flat.weight.data = unit * features.matrix.T.contiguous()
        self.flat.bias.data = -(features.mean @ features.matrix) * unit
        self.head, self.unit = nn.Linear(features.width, 10), unit

    def take(self, head: nn.Linear) -> None:
        """Put a head in that was trained on flat features."""
        self.head.weight.data.copy_(head.weight.detach() / self.unit)
        self.head.bias.data.copy_(head.bias.detach())

    def seen(self, x: Tensor) -> Tensor:
        return torch.cat(maps(self.body, x), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits((self.seen(x) + self.seen(x.flip(-1))) / 2)

    def logits(self, seen: Tensor) -> Tensor:
        found: Tensor = self.head(self.flat(seen))
        return found

    @torch.no_grad()
    def probabilities(self, x: Tensor, copies: bool) -> Tensor:
        """Of images, or of the mean features of their ten copies."""
        side, moves = x.shape[-1], SHIFTS if copies else SHIFTS[:1]
        found = []
        for part in x.split(1000):
            padded = F.pad(part, (2, 2, 2, 2), mode="reflect")
            each = [padded[..., 2 + i : 2 + i + side, 2 + j : 2 + j + side] for i, j in moves]
            if copies:
                each += [view.flip(-1) for view in each]
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                seen = torch.stack([self.seen(view).float() for view in each]).mean(0)
            found.append(self.logits(seen).softmax(1))
        return torch.cat(found)


class Group:
    """Cells of one length and unit, trained as one stack."""

    def __init__(self, cells: Sequence[Cell], split: Split, features: Features, flattened: Tensor) -> None:
        self.cells, self.split, self.flattened, self.first = list(cells), split, flattened, cells[0]
        device, self.size = split.images.device, len(split.labels)
        self.rate = min(1.0, BATCH / self.size)
        self.head_sigmas = [noise_multiplier(c.share * c.epsilon, DELTA, 1.0, HEAD_STEPS, ACCOUNTANT) for c in cells]
        self.costs = [[c.head.cost(sigma), RESERVE] for c, sigma in zip(cells, self.head_sigmas, strict=True)]
        self.sigmas = [
            noise_multiplier(c.epsilon, DELTA, self.rate, c.steps, ACCOUNTANT, also=cost)
            for c, cost in zip(cells, self.costs, strict=True)
        ]
        made = FlatNetwork(features, process_images(self.first.network, IMAGES).to(device), self.first.unit).to(device)
        self.network = AnyNetwork(lambda: copy.deepcopy(made))

    def train(self) -> Stack:
        """The trained stack: heads first, then everything."""
        cells, split, began = self.cells, self.split, time.monotonic()
        runs = [
            c.head.run(f"{split.name} {c}", sigma, self.size) for c, sigma in zip(cells, self.head_sigmas, strict=True)
        ]
        starts = []
        for head in trained_heads(runs, HEAD_STEPS, self.flattened, split.labels):
            model = self.network.template()
            assert isinstance(model, FlatNetwork)
            model.take(head.to(split.images.device))
            starts.append(self.network.pack(model))
        self.heads = [self._scores(self.network.model(start))["accuracy"] for start in starts]
        stack = Stack(
            [self._run(c, sigma) for c, sigma in zip(cells, self.sigmas, strict=True)],
            self.network,
            split.images,
            split.labels,
            start=torch.stack(starts),
            dtype=torch.bfloat16 if split.images.is_cuda else torch.float32,
            steps=self.first.steps,
            augment=Augmentation(1, crop=2),
        )
        for done in stack.train(self.first.steps):
            print(f"  {done:,} of {self.first.steps:,} steps, {time.monotonic() - began:.0f} s", flush=True)
        self.seconds = time.monotonic() - began
        return stack

    def _run(self, cell: Cell, sigma: float) -> Run:
        seed = int(hashlib.sha256(f"{cell} {self.split.name}".encode()).hexdigest()[:15], 16)
        # Θ starts at zero and is in units of the prior, so w is 1.
        options = {"scale": 1.0} if cell.method == "dp-steady" else {"ema": window_decay(float(cell.steps))}
        return Run(cell.method, seed, sigma, C, cell.lr, BATCH, options)

    def _scores(self, model: nn.Module) -> dict[str, float]:
        """Of the images as they are, and of ten copies; each at the temperature that fits it best."""
        assert isinstance(model, FlatNetwork)
        split, y, found = self.split, self.split.score_labels, {}
        for kind, copies in (("one_", False), ("", True)):
            probs = model.probabilities(split.score_images, copies)
            t = best_temperature(model.probabilities(split.fit_images, copies), split.fit_labels)
            shown = temper(probs, t)
            found |= {f"{kind}accuracy": accuracy(probs, y), f"{kind}nll": nll(shown, y), f"{kind}ece": ece(shown, y)}
        return {name: round(value, 5) for name, value in (found | {"temperature": t}).items()}

    def rows(self, stack: Stack) -> list[dict[str, Any]]:
        shared = {"split": self.split.name, "batch": BATCH, "delta": DELTA, "max_grad_norm": C, "train_size": self.size}
        shared |= {"seconds": round(self.seconds / len(self.cells), 1), "accountant": ACCOUNTANT}
        shared |= tables.facts(self.split.images.device) | {"device": hardware_name(self.split.images.device)}
        found = []
        for i, cell in enumerate(self.cells):
            charged = [(self.sigmas[i], self.rate, stack.mechanism.charged), *self.costs[i]]
            own = {"noise_multiplier": round(self.sigmas[i], 4), "head_noise_multiplier": round(self.head_sigmas[i], 4)}
            own |= {"epsilon_spent": round(epsilon(charged, DELTA, ACCOUNTANT), 5), "head_accuracy": self.heads[i]}
            found.append(shared | asdict(cell) | own | self._scores(stack.model(i, averaged=True)))
        return found


def arms(
    words: Sequence[str], rows: Sequence[tables.Row], network: str, target: float
) -> list[tuple[str, float, float, float]]:
    """Method, rate, share and unit: as written, or those of the best validation row of every method at this ε."""
    if words:
        each = (word.replace("@", ":").split(":") for word in words)
        return [(method, float(rate), float(share), UNITS[network]) for method, rate, share in each]
    mine = [r for r in rows if (r["network"], r["split"], float(r["epsilon"])) == (network, "validation", target)]
    if not mine:
        raise SystemExit(f"--epsilons {target:g}: has no validation rows to choose by. Give --arms METHOD:RATE@SHARE.")
    best = {r["method"]: r for r in sorted(mine, key=lambda r: float(r["accuracy"]))}
    return [(m, float(r["lr"]), float(r["share"]), float(r["unit"])) for m, r in best.items()]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=tuple(UNITS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for features")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 7.5])
    parser.add_argument("--arms", nargs="+", default=[], metavar="METHOD:RATE@SHARE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split, table = load_split(a.data, device, judge=a.judge, toy=a.toy), tables.read(a.table)
    cells = [
        Cell(a.network, e, method, rate, share, seed, a.steps, unit)
        for e in a.epsilons
        for method, rate, share, unit in arms(a.arms, table, a.network, e)
        for seed in a.seeds
    ]
    known = {tuple(r[n] for n in NAMES) for r in table if r["split"] == split.name}
    cells = [c for c in dict.fromkeys(cells) if tuple(str(v) for v in asdict(c).values()) not in known]
    print(f"{len(cells)} runs to train, {len(split.labels):,} images, {device}", flush=True)
    if not cells:
        return
    features = features_of(a.network, a.work, device, a.toy)
    if a.toy:
        seen = features(split.images)
    else:
        seen, labels = made(a.network, a.data, a.work, device)["train"]
        seen = seen if a.judge else seen[torch.from_numpy(tuning_places(len(labels))[0]).to(device)]
    group = Group(cells, split, features, seen)
    rows = group.rows(group.train())
    tables.append(a.table, rows, COLUMNS)
    for row in rows:
        print("  " + " ".join(f"{n}={row[n]}" for n in ("split", *NAMES, "head_accuracy", *SCORES[1:])), flush=True)


if __name__ == "__main__":
    main()
