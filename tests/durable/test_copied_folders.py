"""A run's folder that is copied and gone on with twice: where the copies differ, they share neither noise nor batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from resumable import STEPS, Run
from torch import Tensor

from dpivon.durable.ledger import read
from dpivon.errors import PrivacyWarning

BEGUN = 3


class Watched(Run):
    """Notes every sum, its noise, and the batch it was made of."""

    def __init__(self, folder: Path, change: Callable[[Run], None] = lambda run: None, **options) -> None:
        super().__init__(folder, "adam", **options)
        self.noises: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.batches: list[Tensor] = []
        self.change = change
        noise, normal = self.optimizer.noise, self.optimizer.noise.normal
        self.drawn: list[tuple[Tensor, Tensor]] = []

        def watched(like: Tensor, std: float) -> Tensor:
            self.drawn.append((like.flatten(), normal(like, std).flatten()))
            return self.drawn[-1][1].view_as(like)

        noise.normal = watched
        restore = self.kept.restore

        def restored():
            found = restore()
            self.change(self)
            return found

        self.kept.restore = restored

    def step(self, x: Tensor, y: Tensor) -> None:
        self.drawn.clear()
        super().step(x, y)
        if self.drawn:  # it was released
            sums, noises = zip(*self.drawn, strict=True)
            self.sums.append(torch.cat(sums))
            self.noises.append(torch.cat(noises))
            self.batches.append(x)


def begun(folder: Path, copies: int, lost: int = 0) -> list[Path]:
    """Copies of a run that stopped after some steps, the last of them lost."""
    first = Run(folder / "first", "adam").train(stop_at=BEGUN)
    first.kept.save()
    if lost:
        first.train(stop_at=lost, resume=False)
    first.close()
    found = [folder / f"copy {i}" for i in range(copies)]
    for path in found:
        shutil.copytree(folder / "first", path)
    return found


def gone_on(folder: Path, change: Callable[[Run], None] = lambda run: None, **options) -> Watched:
    run = Watched(folder, change, **options)
    run.train()
    run.close()
    return run


def lr(value: float) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = value

    return change


def loss(factor: float, rate: float = 0.05) -> Callable[[Run], None]:
    """Another loss, as a changed program would have; at a learning rate of 0 the weights would not tell."""

    def change(run: Run) -> None:
        lr(rate)(run)
        net, forward = run.net, run.net.forward
        net.forward = lambda x: factor * forward(x)

    return change


def alike(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=False)]


def test_copies_that_go_on_alike_are_the_run_that_never_stopped(tmp_path):
    whole = gone_on(tmp_path / "whole")
    copies = [gone_on(path) for path in begun(tmp_path, 2)]
    for copied in copies:
        assert alike(copied.noises, whole.noises[BEGUN:]) == [True] * (STEPS - BEGUN)
        assert torch.equal(copied.weights, whole.weights)


def test_copies_with_another_learning_rate_share_nothing_but_the_sum_they_have_in_common(tmp_path):
    one, two = (gone_on(path, lr(rate)) for path, rate in zip(begun(tmp_path, 2), (0.05, 0.4), strict=True))
    same = alike(one.sums, two.sums)
    assert same == [True] + [False] * (STEPS - BEGUN - 1)  # the first is one release, made twice
    assert alike(one.noises, two.noises) == same
    assert not any(alike(one.batches[1:], two.batches[1:]))
    flat = [torch.cat(run.noises[1:]) for run in (one, two)]
    assert not set(flat[0].tolist()) & set(flat[1].tolist())
    assert abs(float(torch.corrcoef(torch.stack(flat))[0, 1])) < 5 / len(flat[0]) ** 0.5


@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_copies_with_another_loss_share_one_batch_and_no_noise(tmp_path, rate):
    """Nothing tells them apart before their first sum."""
    one, two = (gone_on(path, loss(f, rate)) for path, f in zip(begun(tmp_path, 2), (1.0, 2.0), strict=True))
    assert not any(alike(one.sums, two.sums))
    assert not any(alike(one.noises, two.noises))
    assert alike(one.batches, two.batches) == [True] + [False] * (STEPS - BEGUN - 1)


def test_a_lost_release_is_not_made_again_by_a_copy_that_differs(tmp_path):
    whole = gone_on(tmp_path / "whole")
    (path,) = begun(tmp_path, 1, lost=2)
    with pytest.warns(PrivacyWarning, match="not the one that was lost"):
        run = gone_on(path, loss(2.0))
    assert read(path / "ledger.jsonl").releases == BEGUN + 2 + len(run.noises)
    assert not set(torch.cat(whole.noises).tolist()) & set(torch.cat(run.noises).tolist())


def test_evidence_in_the_ledger_does_not_tell_the_noise(tmp_path):
    """It is keyed by what the checkpoint alone has, and noise is not."""
    copies = begun(tmp_path, 2)
    runs = [Watched(path) for path in copies]
    for i, run in enumerate(runs):
        restore = run.kept.restore
        run.kept.restore = lambda run=run, restore=restore, i=i: (
            restore(),
            setattr(run.kept._journal, "key", bytes([i])),
        )[0]
        run.train()
        run.close()
    assert all(alike(runs[0].noises, runs[1].noises))
    told = [read(path / "ledger.jsonl").evidence for path in copies]
    assert all(told[0][at] != told[1][at] for at in range(BEGUN, STEPS))
