"""What a step of the user's own loop costs besides arithmetic: Python, and the launching of operations.

    python -m benchmarks.overhead                             # this machine's CPU, one thread
    python -m benchmarks.overhead --models cnn --rounds 200 --json overhead.json
    python -m benchmarks.overhead --transformers              # counts of Hugging Face's, beside plain training

On a GPU such a loop waits for Python. Here the networks have the layers and tensors of those in ``benchmarks.step``, but are
so thin, and batches so small, that arithmetic hardly counts; what is left is the host's work. The branches are those that a GPU
would take (:func:`as_on_a_gpu`), though every operation runs on the CPU. Times are the processor's, contenders take turns a few
steps at a time, and the median is taken: ratios within one run say most. Operations are counted by torch's dispatcher, views
apart from the rest, which a GPU would have to launch: the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.models import PaperCNN, TextEncoder, VisionTransformer, WideResNet
from dpivon.optim import tensors
from dpivon.privacy import clipping
from dpivon.privacy.gradients import side_by_side
from dpivon.privacy.layers import bounded, conv, linear, memory, unsummed, uses
from dpivon.privacy.precision import capturing

BATCH = 2
STEPS = 5  # in one turn of a contender
FEW = 160  # elements of a last layer's weight, of which gradients are made; a hidden layer's has more
CONTENDERS = {
    "plain": "non-private SGD",
    "opacus-hooks": "Opacus DP-SGD, hooks",
    "sgd": "dpivon DP-SGD",
    "adam": "dpivon DP-Adam",
    "ivon": "dpivon DP-IVON",
}
REFUSED = {("opacus-hooks", "text"), ("opacus-hooks", "vit")}  # attention as torch has it
#: name: (network, one example's shape, gradients of an example that are put side by side). The last is as much smaller than a
#: GPU's as the network is thinner, so that as many parameters are as in the whole one with the batches of ``benchmarks.step``.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "cnn": (lambda: PaperCNN(3, 4, widths=(2, 4, 4), hidden=24, groups=2, image_size=16), (3, 16, 16), 300),
    "text": (lambda: TextEncoder(vocabulary=16, length=8, width=8), (8,), 420),
    "vit": (lambda: VisionTransformer(image_size=8, width=8), (3, 8, 8), 760),
    "wrn": (lambda: WideResNet(width=2, groups=2, base=2), (3, 8, 8), 900),
}


class Counting(TorchDispatchMode):
    """Counts operations, and how many of them launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        self.launches += not func.is_view
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Take the branches of a GPU: lists are joined, memory is not pooled, and no value is looked at."""

    def alike(several: list[Tensor]) -> bool:
        return len({t.dtype for t in several}) == 1

    def untraced(t: Tensor) -> bool:
        return not capturing()

    with (
        mock.patch.object(tensors, "joins", alike),
        mock.patch.object(clipping, "readable", return_value=False),
        mock.patch.object(side_by_side, "launches_cost", untraced),
        mock.patch.object(uses, "launches_cost", untraced),
        mock.patch.object(bounded, "launches_cost", untraced),
        mock.patch.object(linear, "launches_cost", untraced),
        mock.patch.object(unsummed, "launches_cost", untraced),
        mock.patch.object(conv, "_in_cache", return_value=False),
        mock.patch.object(memory.Pool, "lend", lambda pool, shape, dtype: torch.empty(shape, dtype=dtype)),
    ):
        yield


@contextmanager
def thin(network: str) -> Iterator[None]:
    """Limits in bytes as much smaller as the network and its batch are."""
    with (
        mock.patch.object(side_by_side, "_TRAY", 4 * BATCH * NETWORKS[network][2]),
        mock.patch.object(uses, "_FEW_BYTES", 4 * BATCH * FEW),
    ):
        yield


def batch_of(network: str) -> tuple[Tensor, Tensor]:
    shape = (BATCH, *NETWORKS[network][1])
    return torch.randint(16, shape) if network == "text" else torch.randn(shape), torch.randint(4, (BATCH,))


def make_step(contender: str, network: str) -> Callable[[], None]:
    """A function that makes one step on one fixed batch."""
    torch.manual_seed(0)
    build = NETWORKS[network][0]
    model, loss_fn = build(), nn.CrossEntropyLoss()
    x, y = batch_of(network)
    made = {
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True),
        "ivon": lambda: dpivon.IVON(model.parameters(), lr=1e-3, ess=50_000),
    }.get(contender, lambda: torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True))
    optimizer = made()
    if contender != "plain":
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
        loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
        if contender == "opacus-hooks":
            from opacus import PrivacyEngine

            engine = PrivacyEngine(accountant="rdp")
        else:
            engine = dpivon.PrivacyEngine()
        model, optimizer, *_ = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)

    def step() -> None:
        optimizer.zero_grad()
        if contender == "ivon":
            with optimizer.sampled_params(train=True):
                loss_fn(model(x), y).backward()
        else:
            loss_fn(model(x), y).backward()
        optimizer.step()

    return step


def measured(network: str, rounds: int, contenders: list[str]) -> dict[str, dict[str, float]]:
    """Milliseconds and operations of a step, by contender."""
    with as_on_a_gpu(), thin(network):
        steps = {name: make_step(name, network) for name in contenders}
        counts = {}
        for name, step in steps.items():
            for _ in range(5):  # state is made, memory is found
                step()
            with Counting() as counting:
                step()
            counts[name] = {"operations": counting.operations, "launches": counting.launches}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in steps.items():
                step()  # awake again, and not measured
                for _ in range(STEPS):
                    began = time.thread_time()
                    step()
                    times[name].append(time.thread_time() - began)
    return {name: {"ms": 1e3 * statistics.median(times[name]), **counts[name]} for name in contenders}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json")
    parser.add_argument("--transformers", action="store_true", help="count those of Hugging Face, and time nothing")
    args = parser.parse_args()
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    facts: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.overhead", *sys.argv[1:]]),
        "hardware": f"{platform.machine()}, 1 thread",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "batch": BATCH,
    }
    if args.transformers:
        from benchmarks.launches import print_counts

        write(args.json, facts | {"models": print_counts()})
        return
    facts["rounds"] = args.rounds
    print(", ".join(f"{key} {value}" for key, value in facts.items() if key != "command"))
    networks = {}
    for network in args.models:
        contenders = [name for name in args.only if (name, network) not in REFUSED]
        rows = networks[network] = measured(network, args.rounds, contenders)
        print(f"{network:62s} {'ms':>7s} {'/ hooks':>8s} {'/ plain':>8s} {'operations':>11s} {'launches':>9s}")
        for name, row in rows.items():
            for key, base in (("over_hooks", "opacus-hooks"), ("over_plain", "plain")):
                if base in rows:
                    row[key] = row["ms"] / rows[base]["ms"]
            ratios = " ".join(
                f"{row[key]:8.2f}" if key in row else f"{'–':>8s}" for key in ("over_hooks", "over_plain")
            )
            print(f"  {CONTENDERS[name]:60s} {row['ms']:7.2f} {ratios} {row['operations']:11d} {row['launches']:9d}")
    write(args.json, facts | {"networks": networks})


def write(path: str | None, found: dict[str, Any]) -> None:
    if path is not None:
        with open(path, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
