"""Private training on CIFAR-10 from scratch and from priors.

    python -m experiments.leaderboard.priors.private compare --data DATA --priors leaves.safetensors … --table runs.csv

A plan (:mod:`plans`) says which runs; runs with one batch size, length and number of views are trained as one stack. Rows are
appended when a stack is evaluated, and runs that have their row are left out. A stack that runs out of time is kept in
``--work`` and goes on with the next call. ``--judge`` trains on all 50,000 training images and scores the test set.

Head first: the first phase is a stack of its own, a linear layer on the prior's hidden units. Its gradients are clipped and
noised in 1,290 coordinates, with the σ of the second phase. σ is calibrated to the steps of both together, and to the charged
maps of :mod:`predictions`. A baseline has the recipe's first phase: only the second differs.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpivon import Augmentation
from dpivon.durable.tensors import read_tensors, write_tensors
from dpivon.models import PaperCNN
from dpivon.optim.average import window_decay
from dpivon.optim.steady import weight_scale
from dpivon.privacy.accounting import epsilon, noise_multiplier
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import Split, load_split
from experiments.leaderboard.priors.plans import JUDGED, PLANS, Cell, key_of, same_round
from experiments.leaderboard.priors.predictions import RESERVE, drawn_rows, mapped_rows
from experiments.leaderboard.priors.scores import scores
from experiments.leaderboard.priors.starts import Starts, hidden_units

DELTA, C = 1e-5, 1.0
#: Examples of all runs of a stack together: with more, its buffers near the GPU's memory.
ROOM = 26 * 4096
#: r of the first phase: the recipe's rate from scratch, since its logits begin at zero.
HEAD_RATE = 3.5
HEAD = "dpivon_head_phase"
SIGMAS = Path(__file__).with_name("sigmas.json")


class Pieces:
    """What all stacks share: the data, the first weights, and until when they may run."""

    def __init__(self, split: Split, starts: Starts, work: Path, until: float, toy: bool) -> None:
        self.split, self.starts, self.work, self.until, self.toy = split, starts, work, until, toy
        self.device = split.images.device
        self.size = len(split.labels)

    @property
    def late(self) -> bool:
        return time.time() > self.until


class Group:
    """Cells that are trained as one stack."""

    def __init__(self, cells: Sequence[Cell], pieces: Pieces) -> None:
        self.cells, self.pieces = list(cells), pieces
        first, split = cells[0], pieces.split
        # A toy makes every kind of stack, small: its rows say what they would be at full size.
        self.batch, epochs = (first.batch // 128, 2) if pieces.toy else (first.batch, first.epochs)
        self.total = -(-pieces.size // self.batch) * epochs
        self.head_steps = min(first.head_steps, self.total // 2)
        self.steps = self.total - self.head_steps
        self.rate = self.batch / pieces.size
        self.sigmas = [sigma(cell.epsilon, self.rate, self.total) for cell in cells]
        name = hashlib.sha256(repr([split.name, self.cells]).encode()).hexdigest()[:16]
        self.folder = pieces.work / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.augment = Augmentation(first.views, flip=True, crop=4) if first.views > 1 else None
        # The kernels of the paper's network make no augmentations.
        self.network = PaperNetwork() if self.augment is None else AnyNetwork(PaperCNN)
        self.scales = [self._scale(cell) for cell in cells]

    def _scale(self, cell: Cell) -> float:
        """w of the weights as they were learned: another geometry is not to change r's unit."""
        row = self.network.pack(self.pieces.starts.learned(cell))
        return weight_scale(row.split([r * c for r, c in self.network.matrices]), self.network.matrices)

    def train(self) -> Stack | None:
        """The trained stack; None if there was no time to finish it, and it was kept."""
        split, pieces = self.pieces.split, self.pieces
        networks = [pieces.starts.network(cell) for cell in self.cells]
        if self.head_steps:
            self._heads(networks)
        stack = Stack(
            [self._run(cell, s, w) for cell, s, w in zip(self.cells, self.sigmas, self.scales, strict=True)],
            self.network,
            split.images,
            split.labels,
            start=torch.stack([self.network.pack(network) for network in networks]),
            dtype=torch.bfloat16 if pieces.device.type == "cuda" else torch.float32,
            steps=self.steps,
            augment=self.augment,
        )
        kept = StackCheckpoints(stack, self.folder)
        self.seconds, began = float(kept.restore().get("seconds", 0.0)), time.monotonic()
        for done in stack.train(self.steps - stack.steps_done):
            if done % 320 == 0:
                print(f"  {done:,} of {self.steps:,} steps, {time.monotonic() - began:.0f} s", flush=True)
            if pieces.late:
                break
        if pieces.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.monotonic() - began
        if stack.steps_done < self.steps:
            kept.save({"seconds": self.seconds})
            kept.settle()
        kept.close()
        return stack if stack.steps_done >= self.steps else None

    def _run(self, cell: Cell, sigma_: float, scale: float) -> Run:
        averaged = {"ema": window_decay(float(self.steps))}
        options = {"scale": scale} if cell.method == "dp-steady" else averaged
        return Run(cell.method, cell.stream(self.pieces.split.name), sigma_, C, cell.lr, self.batch, options)

    def _heads(self, networks: Sequence[PaperCNN]) -> None:
        """The first phase: put trained logits into the networks. Made once and kept, so that nothing is released twice."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, cell in enumerate(self.cells):
            drawn = cell.seed if cell.keep == "body" else 0
            alike.setdefault((cell.start, cell.body, cell.features, cell.keep, drawn), []).append(i)
        for number, places in enumerate(alike.values()):
            path = self.folder / f"heads-{number}.safetensors"
            if not path.is_file():
                write_tensors(path, {"rows": self._head_rows(networks[places[0]], places)}, {HEAD: "1"})
            rows, _ = read_tensors(path, key=HEAD, version="1", what="heads", fix="Delete it")
            for i, row in zip(places, rows["rows"], strict=True):
                nn.utils.vector_to_parameters(row, networks[i].head.logits.parameters())

    def _head_rows(self, network_: PaperCNN, places: Sequence[int]) -> Tensor:
        """Trained logits of cells that start from one prior in one geometry, so that their features are the same."""
        split, steps = self.pieces.split, self.head_steps
        features = hidden_units(network_, split.images)
        last = network_.head.logits
        network = AnyNetwork(lambda: nn.Linear(last.in_features, last.out_features))
        runs = [
            Run("dp-steady", self.cells[i].stream(f"{split.name} head"), self.sigmas[i], C, HEAD_RATE, self.batch)
            for i in places
        ]
        zeros = torch.zeros(len(runs), network.size)
        stack = Stack(runs, network, features, split.labels, start=zeros, steps=steps)
        for _ in stack.train(steps):
            pass
        return torch.stack([network.pack(stack.model(i, averaged=True)) for i in range(len(runs))])

    def rows(self, stack: Stack, plan: str) -> list[dict[str, Any]]:
        """One per run, in the order of the cells."""
        shared = {
            "plan": f"toy {plan}" if self.pieces.toy else plan,
            "split": self.pieces.split.name,
            "delta": DELTA,
            "max_grad_norm": C,
        }
        shared |= {"steps": self.total, "train_size": self.pieces.size, "stack_size": len(self.cells)}
        shared |= {"seconds": round(self.seconds / len(self.cells), 2)} | tables.facts(self.pieces.device)
        shared |= {"precision": "bfloat16" if self.pieces.device.type == "cuda" else "float32"}
        found = []
        for i, (cell, s, w) in enumerate(zip(self.cells, self.sigmas, self.scales, strict=True)):
            # What the stack charged, a resumed one's lost steps included, and the head's phase before it.
            charged = stack.mechanism.charged + self.head_steps
            own = {"noise_multiplier": round(s, 4), "scale": round(w, 5)}
            own |= {"epsilon_spent": round(epsilon([(s, self.rate, charged), RESERVE], DELTA, "rdp"), 4)}
            own |= dict(zip(CELL, cell.key, strict=True)) | scores(stack.model(i, averaged=True), self.pieces.split)
            found.append(shared | own)
        return found

    def predictions(self, stack: Stack, made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What else the trained runs can predict; draws for the recipe alone, which has a spread of its own."""
        found, split = [], self.pieces.split
        for i, cell in enumerate(self.cells):
            model, seed = stack.model(i, averaged=True).eval(), cell.stream(f"{split.name} maps")
            rows = mapped_rows(model, split, seed)
            if cell.method == "dp-steady":
                spread = {n: v.sqrt() for n, v in stack.posterior(i, averaged=True).variance.items()}
                rows += drawn_rows(model, split, spread, seed)
            own = {name: made[i][name] for name in tables.SHARED}
            found += [own | row for row in rows]
        return found

    def keep(self, stack: Stack, folder: Path) -> None:
        """The weights that were scored, so that no training is needed to predict again; of public data, so they may be kept."""
        folder.mkdir(exist_ok=True)
        for i, cell in enumerate(self.cells):
            name = f"{self.pieces.split.name}-{cell.method}-{cell.epsilon:g}-{cell.seed}.safetensors"
            tensors = {n: p.detach() for n, p in stack.model(i, averaged=True).named_parameters()}
            write_tensors(folder / name, tensors, {"dpivon_prior_run": "1", "cell": repr(cell)})


CELL = tuple(Cell.__dataclass_fields__)
#: Plans whose runs are predicted from in every way.
PREDICTED = ("settle", "final")


@cache
def sigma(target: float, rate: float, steps: int) -> float:
    """The σ at which the steps and the charged maps spend ε, from ``sigmas.json`` where it was made before."""
    name = f"{target} {rate} {steps} {RESERVE}"
    known = json.loads(SIGMAS.read_text()) if SIGMAS.is_file() else {}
    found = float(known.get(name) or _raised(target, rate, steps))
    spent = epsilon([(found, rate, steps), RESERVE], DELTA, "rdp")
    if spent > target:
        raise SystemExit(f"{SIGMAS}: {name} has σ={found}, which spends ε={spent}. Delete the file.")
    return found


def _raised(target: float, rate: float, steps: int) -> float:
    """The library's calibration of the steps alone, raised by a tenth of a percent until the maps fit in too."""
    found = noise_multiplier(target, DELTA, rate, steps, "rdp")
    while epsilon([(found, rate, steps), RESERVE], DELTA, "rdp") > target:
        found *= 1.001
    return found


def grouped(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells in stacks: of one batch size, length, number of views and length of the first phase."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.batch, cell.epochs, cell.views, cell.head_steps), []).append(cell)
    out = []
    for each in groups.values():
        most = max(1, ROOM // each[0].batch)
        parts = -(-len(each) // most)
        size = -(-len(each) // parts)  # about equal
        out += [each[i : i + size] for i in range(0, len(each), size)]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=list(PLANS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--priors", type=Path, nargs="*", default=[], help="files of learn.py; their stems are their names"
    )
    parser.add_argument("--table", type=Path, required=True, help="the CSV to append to, and to choose by")
    parser.add_argument("--work", type=Path, default=Path("/tmp/priors-work"))
    parser.add_argument(
        "--until", type=float, default=math.inf, help="the time, of date +%%s, at which to stop and keep"
    )
    parser.add_argument("--judge", action="store_true", help="train on all training images and score the test set")
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    if (a.plan in JUDGED) != a.judge:
        raise SystemExit(
            f"plan={a.plan}, --judge={a.judge}: {' and '.join(JUDGED)} need --judge, and no other takes it."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, priors = same_round(tables.read(a.table), a.plan), {path.stem: path for path in a.priors}
    split = load_split(a.data, device, judge=a.judge, toy=a.toy, fashion=a.plan == "fashion")
    cells = PLANS[a.plan](rows, list(priors))
    known = {key_of(row) for row in rows if row["split"] == split.name}
    left = [cell for cell in dict.fromkeys(cells) if cell.key not in known]
    pieces = Pieces(split, Starts(priors), a.work, a.until, a.toy)
    print(f"{a.plan}: {len(left)} of {len(cells)} runs to train, {len(split.labels):,} images, {device}", flush=True)
    for i, cells in enumerate(groups := grouped(left), start=1):
        if pieces.late:
            print(f"{a.plan}: out of time before stack {i} of {len(groups)}; the same command goes on", flush=True)
            return
        began, group = time.monotonic(), Group(cells, pieces)
        print(f"{a.plan}: stack {i} of {len(groups)}, {len(cells)} runs like {cells[0]}", flush=True)
        stack = group.train()
        if stack is None:
            print(f"{a.plan}: out of time in stack {i}; it is kept, and the same command goes on", flush=True)
            return
        made = group.rows(stack, a.plan)
        if a.plan in PREDICTED:
            group.keep(stack, a.table.parent / "means")
        tables.append(a.table, made)
        if a.plan in PREDICTED:
            predictions = group.predictions(stack, made)
            tables.append(a.table.with_name("predictions.csv"), predictions, tables.PREDICTIONS)
        for row in made:
            named = " ".join(str(row[n]) for n in ("start", "epsilon", "method", "lr", "batch", "epochs", "views"))
            extra = " ".join(f"{n}={row[n]}" for n in ("head_steps", "body", "features", "keep", "seed"))
            told = " ".join(str(row[n]) for n in ("accuracy", "tempered_nll", "tempered_ece", "tta_accuracy"))
            print(f"  {named} {extra}: {told}", flush=True)
        print(f"{a.plan}: stack {i} took {time.monotonic() - began:.0f} s, {group.seconds:.0f} of training", flush=True)
        del stack, group
        gc.collect()
        if device.type == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
