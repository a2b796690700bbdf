"""WRN-16-4 from its prior under privacy: the head first, then all weights.

    python -m experiments.leaderboard.wide.private --data DATA --prior wide.npz --table runs.csv \
        --epsilons 1 --batch 2048 --steps 250 --views 4 --arms dp-steady:0.7 dp-sgd:0.06@0.2:dp-sgd:3 dp-steady:0.7@0

An arm is METHOD:RATE, and after @ how its head is trained if not as ``--head`` says: SHARE:METHOD:RATE, or 0 for not at all;
``scratch`` after @ is a run from new weights, beside others from the prior. With ``--norm-first`` the network has the other
order, norm before ReLU, and no prior.
Both phases and the charged calibration are composed: the head has the σ at which it spends its share of ε by itself, all
weights the least σ with which everything together spends ε. Runs of one call are one stack and differ in ε, method and rate.
``--arms best`` takes the best rate of every method, and ``--arms chosen`` the best of all, by the validation rows at that ε.
``--judge`` trains on all 50,000 training images and scores the test set. A stack that runs out of time is kept in ``--work``
and goes on with the next call. ``--warm`` makes six steps, to fill the compiler's caches and to time them.

How large a batch: the noise of a whole run, σ/(b√T), is within a few percent of its least where σ is above about 2.5. Below
that a larger batch is worth its time.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpivon import Augmentation
from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.optim.average import window_decay
from dpivon.privacy.accounting import epsilon, noise_multiplier
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import Split, load_split
from experiments.leaderboard.priors.predictions import RESERVE
from experiments.leaderboard.priors.private import DELTA, C
from experiments.leaderboard.priors.scores import scores
from experiments.leaderboard.wide.heads import ACCOUNTANT, FLAT, Arm, Row, flattened, trained_heads
from experiments.leaderboard.wide.network import WideNetwork, Wrapped, balanced, features, load_wide, wide

HEADS = "dpivon_wide_heads"
#: What stands for a prior's name in runs from new weights, in either order.
SCRATCH, NORM_FIRST = "scratch", "scratch, norm first"


@dataclass(frozen=True)
class Cell:
    """One private run; ``prior`` is the name of a file, or how new weights are made."""

    prior: str
    epsilon: float
    method: str
    lr: float
    seed: int
    batch: int
    steps: int
    views: int
    places: int
    share: float
    head_steps: int
    head_method: str
    head_lr: float

    def stream(self, what: str) -> int:
        return int(hashlib.sha256(f"{self} {what}".encode()).hexdigest()[:15], 16)


NAMES = tuple(field.name for field in fields(Cell))
COLUMNS = (
    *("split", *NAMES, "head_noise_multiplier", "delta", "max_grad_norm", "noise_multiplier"),
    *("epsilon_spent", "train_size", "head_accuracy", "accuracy", "nll", "ece", "temperature", "tempered_nll"),
    *("tempered_ece", "tta_accuracy", "tta_nll", "tta_ece", "seconds", "precision", "device", "torch", "commit"),
    "accountant",
)


class Group:
    """Cells of one batch size, length and number of views, trained as one stack."""

    def __init__(self, cells: Sequence[Cell], split: Split, a: argparse.Namespace) -> None:
        self.cells, self.split, self.a = list(cells), split, a
        self.device, self.size = split.images.device, len(split.labels)
        self.cuda = self.device.type == "cuda"
        first = cells[0]
        self.steps, self.rate = first.steps, first.batch / self.size
        self.heads = [Arm(c.epsilon, c.head_method, c.head_lr, c.head_steps) for c in cells]
        self.head_sigmas = [self._head_sigma(c) for c in cells]
        self.sigmas = [
            noise_multiplier(c.epsilon, DELTA, self.rate, self.steps, ACCOUNTANT, also=[*self._head_cost(i), RESERVE])
            for i, c in enumerate(cells)
        ]
        name = hashlib.sha256(repr([split.name, self.cells]).encode()).hexdigest()[:16]
        self.folder = a.work / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.network = AnyNetwork(self._new)
        self.seconds = 0.0

    def _head_sigma(self, c: Cell) -> float:
        return noise_multiplier(c.share * c.epsilon, DELTA, 1.0, c.head_steps, ACCOUNTANT) if c.head_steps else 0.0

    def _head_cost(self, i: int) -> list[tuple[float, float, int]]:
        return [self.heads[i].cost(self.head_sigmas[i])] if self.cells[i].head_steps else []

    def _new(self) -> WideNetwork:
        return wide(self.a.toy, self.cells[0].places, self.cells[0].prior != NORM_FIRST)

    def _prior(self) -> WideNetwork:
        return load_wide(self.a.prior, self.a.toy, self.cells[0].places)

    def networks(self) -> list[WideNetwork]:
        """First weights, with their trained heads: made once and kept, so that nothing is released twice."""
        made = []
        for cell in self.cells:
            torch.manual_seed(cell.seed)
            made.append(self._new() if cell.prior in (SCRATCH, NORM_FIRST) else self._prior())
        places = [i for i, c in enumerate(self.cells) if c.head_steps]
        if not places:
            return made
        path = self.folder / "heads.safetensors"
        if not path.is_file():
            prior = self._prior().to(self.device)
            x, found = features(prior, self.split.images, views=True), {}
            for is_flat in (False, True):
                mine = [i for i in places if self.cells[i].head_method.startswith(FLAT) == is_flat]
                to = flattened(prior, self.a.prior, self.device, self.a.toy) if mine and is_flat else None
                # A cell's own stream: rates of one ε do not share the noise of their heads.
                runs = [
                    self.heads[i].run(f"{self.split.name} {self.cells[i]}", self.head_sigmas[i], self.size)
                    for i in mine
                ]
                made_ = trained_heads(runs, self.a.head_steps, x, self.split.labels, to) if mine else []
                found |= dict(zip(mine, made_, strict=True))
            rows = torch.stack([nn.utils.parameters_to_vector(found[i].parameters()).detach().cpu() for i in places])
            write_tensors(path, {"rows": rows}, {HEADS: "1"})
        tensors, _ = read_tensors(path, key=HEADS, version="1", what="heads", fix="Delete it")
        for i, row in zip(places, tensors["rows"], strict=True):
            nn.utils.vector_to_parameters(row, made[i].head.parameters())
            balanced(made[i])
        return made

    def stack(self, networks: Sequence[WideNetwork]) -> Stack:
        augment = Augmentation(self.cells[0].views, flip=True, crop=4)
        runs = []
        for cell, sigma in zip(self.cells, self.sigmas, strict=True):
            options = {} if cell.method == "dp-steady" else {"ema": window_decay(float(self.steps))}
            runs.append(Run(cell.method, cell.stream(self.split.name), sigma, C, cell.lr, cell.batch, options))
        return Stack(
            runs,
            self.network,
            self.split.images,
            self.split.labels,
            start=torch.stack([self.network.pack(network) for network in networks]),
            dtype=torch.bfloat16 if self.cuda else torch.float32,
            steps=self.steps,
            augment=augment,
            block=min(32, max(2, self.steps // 8)),
        )

    def train(self) -> Stack | None:
        """The trained stack; None if there was no time to finish it, and it was kept."""
        networks = self.networks()
        self.head_accuracy = [
            self._accuracy(n) if c.head_steps else 0.0 for n, c in zip(networks, self.cells, strict=True)
        ]
        print(
            f"  heads: {[round(v, 4) for v in self.head_accuracy]}, σ {[round(s, 3) for s in self.sigmas]}", flush=True
        )
        stack = self.stack(networks)
        kept = StackCheckpoints(stack, self.folder)
        self.seconds, began = float(kept.restore().get("seconds", 0.0)), time.monotonic()
        for done in stack.train(self.steps - stack.steps_done):
            self._wait()
            print(f"  {done:,} of {self.steps:,} steps, {time.monotonic() - began:.0f} s", flush=True)
            if time.time() > self.a.until:
                break
        self.seconds += time.monotonic() - began
        if stack.steps_done < self.steps:
            kept.save({"seconds": self.seconds})
            kept.settle()
        kept.close()
        return stack if stack.steps_done >= self.steps else None

    def warm(self) -> None:
        torch.manual_seed(0)
        stack, began = self.stack([self._new() for _ in self.cells]), time.monotonic()
        stack.block = 3
        for _ in range(2):
            list(stack.train(3))
            self._wait()
            took, began = time.monotonic() - began, time.monotonic()
            peak = torch.cuda.max_memory_allocated() / 2**30 if self.cuda else 0.0
            print(f"warm {self.cells[0]}: three steps in {took:.1f} s, peak {peak:.1f} GB", flush=True)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def _accuracy(self, network: WideNetwork) -> float:
        shown = Wrapped(network.to(self.device))
        right = [shown(x).argmax(1) for x in self.split.score_images.split(2500)]
        network.cpu()
        return float((torch.cat(right) == self.split.score_labels).double().mean())

    def rows(self, stack: Stack) -> list[dict[str, Any]]:
        shared = {"split": self.split.name, "delta": DELTA, "max_grad_norm": C, "train_size": self.size}
        shared |= {"seconds": round(self.seconds / len(self.cells), 1)} | tables.facts(self.device)
        shared |= {"precision": "bfloat16" if self.cuda else "float32", "accountant": ACCOUNTANT}
        found = []
        for i, cell in enumerate(self.cells):
            # What the stack charged, a resumed one's lost steps included, and the head's phase.
            charged = [(self.sigmas[i], self.rate, stack.mechanism.charged), *self._head_cost(i), RESERVE]
            own = {
                "noise_multiplier": round(self.sigmas[i], 4),
                "epsilon_spent": round(epsilon(charged, DELTA, ACCOUNTANT), 4),
            }
            own |= {
                "head_noise_multiplier": round(self.head_sigmas[i], 4),
                "head_accuracy": round(self.head_accuracy[i], 5),
            }
            model = stack.model(i, averaged=True)
            assert isinstance(model, WideNetwork)
            found.append(shared | own | asdict(cell) | scores(Wrapped(model), self.split))
        return found

    def keep(self, stack: Stack, folder: Path) -> None:
        """The weights that were scored, in half of their bytes: what is predicted from them later is a little rounded."""
        folder.mkdir(exist_ok=True)
        for i, cell in enumerate(self.cells):
            name = f"{cell.prior}-{self.split.name}-{cell.method}-{cell.epsilon:g}-{cell.seed}.safetensors"
            tensors = {n: p.detach().bfloat16() for n, p in stack.model(i, averaged=True).named_parameters()}
            write_tensors(folder / name, tensors, {"dpivon_wide_run": "1", "cell": repr(cell)})


Choice = tuple[str, str, float, float, str, float]


def arms(words: Iterable[str], rows: Sequence[Row], target: float, prior: str, places: int, head: str) -> list[Choice]:
    """Prior, method, rate, and the head's share, method and rate: as written, or chosen by validation rows."""
    found: list[Choice] = []
    for word in words:
        if word not in ("best", "chosen"):
            own, _, other = word.partition("@")
            method, rate = own.split(":")
            start, other = (SCRATCH, "0") if other == SCRATCH else (prior, other or head)
            share, *trained = other.split(":")
            first, speed = trained if trained else ("", "0")
            found.append((start, method, float(rate), float(share), first, float(speed)))
            continue
        wanted = "validation", target, prior, places
        mine = [r for r in rows if (r["split"], float(r["epsilon"]), r["prior"], int(r["places"])) == wanted]
        if not mine:
            raise SystemExit(f"--arms {word}: no validation rows at ε={target:g} from {prior}. Give METHOD:RATE.")
        mine.sort(key=lambda r: -float(r["accuracy"]))
        best = {r["method"]: r for r in reversed(mine)}.values() if word == "best" else mine[:1]
        for r in best:
            trained_by = r["head_method"], float(r["head_lr"])
            found.append((prior, r["method"], float(r["lr"]), float(r["share"]), *trained_by))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prior", type=Path, help="a file of learn.py; without it, from scratch")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0])
    parser.add_argument("--arms", nargs="+", default=["dp-steady:1.4"])
    parser.add_argument("--head", default="0.35:dp-sgd:1", help="share of ε that it spends by itself, method, rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--places", type=int, default=1, help="of the features, in each direction: 1, 2, 4 or 8")
    parser.add_argument("--head-steps", type=int, default=160)
    parser.add_argument("--work", type=Path, default=Path("/tmp/wide-work"))
    parser.add_argument("--until", type=float, default=math.inf, help="the time, of date +%%s, to stop and keep at")
    parser.add_argument("--norm-first", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    if a.norm_first and a.prior is not None:
        parser.error("--norm-first: has no prior. Leave --prior out.")
    if a.toy:
        a.batch, a.steps, a.head_steps = 16, 4, 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split, table = load_split(a.data, device, judge=a.judge, toy=a.toy), tables.read(a.table)
    prior = a.prior.stem if a.prior is not None else NORM_FIRST if a.norm_first else SCRATCH
    cells = [
        Cell(
            start, e, method, lr, seed, a.batch, a.steps, a.views, a.places, share, a.head_steps if share else 0, *head
        )
        for e in a.epsilons
        for start, method, lr, share, *head in arms(
            a.arms, table, e, prior, a.places, "0" if a.prior is None else a.head
        )
        for seed in a.seeds
    ]
    known = {tuple(r[n] for n in NAMES) for r in table if r["split"] == split.name}
    cells = [c for c in dict.fromkeys(cells) if a.warm or tuple(str(v) for v in asdict(c).values()) not in known]
    print(f"{len(cells)} runs to train, {len(split.labels):,} images, {device}", flush=True)
    if not cells:
        return
    group = Group(cells, split, a)
    if a.warm:
        group.warm()
        return
    stack = group.train()
    if stack is None:
        print("out of time; the stack is kept, and the same command goes on", flush=True)
        return
    made = group.rows(stack)
    tables.append(a.table, made, COLUMNS)
    if a.judge:
        group.keep(stack, a.table.parent / "wide-means")
    for row in made:
        named = " ".join(
            str(row[n]) for n in ("split", "epsilon", "method", "lr", "seed", "batch", "steps", "views", "places")
        )
        found = " ".join(
            f"{n}={row[n]}" for n in ("head_accuracy", "accuracy", "tempered_nll", "tempered_ece", "tta_accuracy")
        )
        print(f"  {named}: {found}", flush=True)


if __name__ == "__main__":
    main()
