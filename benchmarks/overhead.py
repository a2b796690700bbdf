"""What a step of the user's own loop costs besides arithmetic: Python, and the launching of operations.

    python -m benchmarks.overhead                             # this machine's CPU, one thread
    python -m benchmarks.overhead --models cnn --rounds 200 --json overhead.json

On a GPU such a loop waits for Python. Here the networks have the layers and tensors of those in ``benchmarks.step``, but are so thin,
and batches so small, that arithmetic hardly counts; what is left is the host's work. The branches are those that a GPU would
take (:func:`as_on_a_gpu`), though every operation runs on the CPU. Contenders take turns step by step, and the median is taken,
so ratios within one run hold on a busy machine. Operations are counted by torch's dispatcher: the same on every machine.
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
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.models import PaperCNN, TextEncoder, VisionTransformer, WideResNet
from dpivon.optim import tensors
from dpivon.privacy import clipping
from dpivon.privacy.gradients import bookkeeping
from dpivon.privacy.layers import conv, memory

BATCH = 2
CONTENDERS = {
    "plain": "non-private SGD",
    "opacus-hooks": "Opacus DP-SGD, hooks",
    "sgd": "dpivon DP-SGD",
    "adam": "dpivon DP-Adam",
    "ivon": "dpivon DP-IVON",
}
REFUSED = {("opacus-hooks", "text"), ("opacus-hooks", "vit")}  # attention as torch has it
#: name: (network, one example's shape, elements up to which its parameters are summed side by side). The last is as much smaller
#: than the library's as the network is thinner, so that the same parameters are small.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "cnn": (lambda: PaperCNN(widths=(8, 16, 16), hidden=80, image_size=8), (3, 8, 8), 1100),
    "text": (lambda: TextEncoder(vocabulary=64, length=8, width=16), (8,), 128),
    "vit": (lambda: VisionTransformer(image_size=8, width=16), (3, 8, 8), 128),
    "wrn": (lambda: WideResNet(width=1), (3, 8, 8), 1024),
}


class Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Take the branches of a GPU: lists are joined, memory is not pooled, and no value is looked at."""

    def alike(several: list[Tensor]) -> bool:
        return len({t.dtype for t in several}) == 1

    def fresh(shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    with (
        mock.patch.object(tensors, "joins", alike),
        mock.patch.object(clipping, "readable", lambda t: False),
        mock.patch.object(conv, "_in_cache", lambda out: False),
        mock.patch.object(memory.Pool, "lend", lambda pool, shape, dtype: torch.empty(shape, dtype=dtype)),
    ):
        yield


def make_step(contender: str, network: str) -> Callable[[], None]:
    """A function that makes one step on one fixed batch."""
    torch.manual_seed(0)
    build, shape, _ = NETWORKS[network]
    model, loss_fn = build(), nn.CrossEntropyLoss()
    x = torch.randint(64, (BATCH, *shape)) if network == "text" else torch.randn(BATCH, *shape)
    y = torch.randint(4, (BATCH,))
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
    with as_on_a_gpu(), mock.patch.object(bookkeeping, "_SMALL", NETWORKS[network][2]):
        steps = {name: make_step(name, network) for name in contenders}
        operations = {}
        for name, step in steps.items():
            for _ in range(5):  # state is made, memory is found
                step()
            with Counting() as counting:
                step()
            operations[name] = counting.operations
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in steps.items():
                began = time.thread_time()
                step()
                times[name].append(time.thread_time() - began)
    return {
        name: {"ms": 1e3 * statistics.median(times[name]), "operations": operations[name]} for name in contenders
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json")
    args = parser.parse_args()
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    facts = {
        "command": " ".join(["python -m benchmarks.overhead", *sys.argv[1:]]),
        "hardware": f"{platform.machine()}, 1 thread",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "batch": BATCH,
        "rounds": args.rounds,
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items() if key != "command"))
    networks = {}
    for network in args.models:
        contenders = [name for name in args.only if (name, network) not in REFUSED]
        rows = networks[network] = measured(network, args.rounds, contenders)
        print(f"{network:62s} {'ms':>7s} {'/ hooks':>8s} {'/ plain':>8s} {'operations':>11s}")
        for name, row in rows.items():
            for key, base in (("over_hooks", "opacus-hooks"), ("over_plain", "plain")):
                row[key] = row["ms"] / rows[base]["ms"] if base in rows else float("nan")
            print(
                f"  {CONTENDERS[name]:60s} {row['ms']:7.2f} {row['over_hooks']:8.2f} {row['over_plain']:8.2f} "
                f"{row['operations']:11d}"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(facts | {"networks": networks}, file, indent=1)


if __name__ == "__main__":
    main()
