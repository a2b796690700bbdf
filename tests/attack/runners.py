"""One short training of a case on each path, and what is seen of it: the sums about to be noised, and what the model keeps.

Sampling rate 1 makes membership certain: D is a batch of all rows and D∖{x} one of all but x, with N and b declared alike.
σ is 1e-9, so that what an engine releases is its sum to nine digits. The learning rate is 0, so that a parameter that moves
was moved by a forward pass.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from attack_case import Case, mapped, tensors
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import dpivon
from dpivon.audit.stack_session import TracedNetwork
from dpivon.privacy.stack import StackedMechanism
from dpivon.stacked import Run, Stack

STEPS, SIGMA = 2, 1e-9
Theta = dict[str, Tensor]
#: Of a case, a batch, the rows of each world, and C.
Runner = Callable[[Case, Any, Sequence[Sequence[int]], float], "list[Seen]"]


@dataclass
class Seen:
    """What a run shows."""

    sums: list[Tensor]  # one per release, flat, in double
    state: dict[str, Any]  # what the model holds afterwards
    thetas: list[Theta]  # where gradients were taken; empty for the first weights


class Rows(Dataset):
    """Some rows of a batch, one per example."""

    def __init__(self, batch: Any, rows: Sequence[int], dim: int) -> None:
        self.batch, self.rows, self.dim = batch, list(rows), dim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        inputs, targets = self.batch
        row = self.rows[i]
        return mapped(lambda t: t.select(self.dim, row), inputs), mapped(lambda t: t[row], targets)

    def collate(self, examples: list[Any]) -> Any:
        inputs, targets = default_collate(examples)
        return (mapped(lambda t: t.movedim(0, 1), inputs) if self.dim else inputs), targets


@dataclass
class Loop:
    """A private model, optimizer and loader, as a training loop has them."""

    case: Case
    engine: dpivon.PrivacyEngine
    module: nn.Module
    model: Any
    optimizer: Any
    loader: Any
    criterion: Any
    mine: list[int] | None  # the rows of this rank; None where the loader draws all there are
    thetas: list[Theta] = field(default_factory=list)

    def loss(self, batch: Any) -> Tensor:
        if self.case.whole:
            return self.criterion(self.model, batch)
        return self.criterion(self.model(batch[0]), batch[1])

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        with self.case.around():
            self.loss(batch).backward()
        self.optimizer.step()

    def batches(self) -> Iterator[Any]:
        for drawn in self.loader:
            if self.mine is None:
                yield drawn
            else:
                data = self.loader.dataset
                yield self.loader.collate_fn([data[i] for i in self.mine])

    def note_theta(self) -> None:
        self.thetas.append({n: q.detach().clone() for n, q in self.module.named_parameters()})


def own_loop(case: Case, batch: Any, rows: Sequence[int], bound: float, *, ranks: bool = False) -> Seen:
    """The caller's own loop; with ``ranks`` on the process group, every rank on its own rows."""
    torch.manual_seed(1)
    module, _, criterion = case.build()
    size = next(tensors(batch[1])).shape[0]
    data = Rows(batch, range(size) if ranks else rows, case.batch_dim)
    loader = DataLoader(data, batch_size=1, collate_fn=data.collate)
    engine = dpivon.PrivacyEngine(distributed=ranks)
    options = {"dataset_size": size, "expected_batch_size": size, **case.options}
    if options.get("clipping") == "per_layer":
        bound = [bound] * sum(q.requires_grad for q in module.parameters())  # type: ignore[assignment]
    if options.get("grad_sample_mode") == "ghost":
        options["criterion"] = criterion
    model, optimizer, *ghost, private = engine.make_private(
        module=module,
        optimizer=case.optimizer(module.parameters()),
        data_loader=loader,
        noise_multiplier=SIGMA,
        max_grad_norm=bound,
        **options,
    )
    check = getattr(engine, "check", None)
    mine = [i for i in rows if i % dist.get_world_size() == dist.get_rank()] if ranks else None
    if options.get("wrap_model") is False:
        model = module  # which the caller goes on using
    run = Loop(case, engine, module, model, optimizer, private, ghost[0] if ghost else criterion, mine)
    if check is not None:
        with case.around():
            check(criterion)
    sums: list[Tensor] = []
    optimizer.attach_step_hook(lambda o: sums.append(_released(o, module)))
    for _ in range(STEPS):
        torch.manual_seed(2)  # a random forward draws the same in both worlds
        if case.loop is not None:
            case.loop(run)
        else:
            for drawn in run.batches():
                run.step(drawn)
    return Seen(sums, kept(module), run.thetas)


def _released(optimizer: Any, module: nn.Module) -> Tensor:
    release, divisor = optimizer.last_release, optimizer.spec.divisor
    return flat([release.gradients[q].detach() for q in module.parameters() if q.requires_grad]) * divisor


def fit(case: Case, batch: Any, rows: Sequence[int], bound: float) -> Seen:
    """``dpivon.fit``, whose steps on a CPU are the ordinary ones."""
    model, _, _ = case.build()
    inputs, targets = _taken(batch, rows)
    size = next(tensors(batch[1])).shape[0]
    torch.manual_seed(2)
    with captured() as sums:
        fitted = dpivon.fit(
            model, inputs, targets, lr=1e-30, batch_size=size, epochs=STEPS, delta=1e-5, noise_multiplier=SIGMA,
            max_grad_norm=bound, dataset_size=size, method="dp-sgd", loss=case.each, seed=3,
        )  # fmt: skip
    return Seen([s[0] for s in sums], kept(fitted.model), [])


def stacked(case: Case, batch: Any, worlds: Sequence[Sequence[int]], bound: float) -> list[Seen]:
    """One run of a stack per world, all in the fixed program that a GPU captures."""
    model, _, _ = case.build()
    size = next(tensors(batch[1])).shape[0]
    network = TracedNetwork(lambda: copy.deepcopy(model), case.each)
    runs = [Run("dp-sgd", 3 + k, SIGMA, bound, 1e-30, size) for k in range(len(worlds))]
    there = torch.zeros(len(worlds), size, dtype=torch.int8)
    for k, rows in enumerate(worlds):
        there[k, list(rows)] = 1
    torch.manual_seed(2)
    with captured() as sums:
        start = network.pack(model).expand(len(worlds), -1)
        stack = Stack(runs, network, *batch, start=start, block=STEPS, steps=STEPS)
        streams = stack.sampler.streams
        streams.poisson = lambda examples, rates, first, steps: there.expand(steps, -1, -1)  # type: ignore[method-assign]
        for _ in stack.train(STEPS):
            pass
    return [Seen([s[k] for s in sums], kept(stack.model(k)), []) for k in range(len(worlds))]


def _taken(batch: Any, rows: Sequence[int]) -> Any:
    return mapped(lambda t: t[list(rows)], batch)


@contextmanager
def captured() -> Iterator[list[Tensor]]:
    """The sums of all stacks inside, as they come to be noised."""
    sums: list[Tensor] = []
    release = StackedMechanism.release

    def watched(self: StackedMechanism, total: Tensor, step: Tensor) -> Tensor:
        sums.append(total.detach().double().clone())
        return release(self, total, step)

    StackedMechanism.release = watched  # type: ignore[method-assign]
    try:
        yield sums
    finally:
        StackedMechanism.release = release  # type: ignore[method-assign]


def flat(parts: Sequence[Tensor]) -> Tensor:
    dense = [t.to_dense() if t.is_sparse else t for t in parts]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in dense]
    return torch.cat([t.flatten().double() for t in real])


_TORCHS_OWN = set(vars(nn.Module()))


def kept(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and plain attributes that hold numbers or tensors, by name."""
    found: dict[str, Any] = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, layer in module.named_modules():
        for key, value in vars(layer).items():
            if key not in _TORCHS_OWN:
                found |= dict(_leaves(f"{name}.{key}".lstrip("."), value))
    return {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in found.items()}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | numbers.Number | str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple | set):
        for i, item in enumerate(value):
            yield from _leaves(f"{name}[{i}]", item)


def _one_by_one(run: Callable[..., Seen], **options: Any) -> Runner:
    return lambda case, batch, worlds, bound: [run(case, batch, rows, bound, **options) for rows in worlds]


RUNNERS: dict[str, Runner] = {
    "own loop": _one_by_one(own_loop),
    "fit": _one_by_one(fit),
    "stacked": stacked,
    "ddp": _one_by_one(own_loop, ranks=True),
}
