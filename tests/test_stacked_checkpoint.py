"""Stacks on disk: restored to the bit, and never charged less for having been killed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from dpivon import budget
from dpivon.errors import ArgumentError, PrivacyError
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.stacked.checkpoint import Ledger, charged, restore, save

RUNS = [
    Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, 8),
    Run("dp-sgd", 12, 0.5, 1.0, 0.1, 8),
    Run("dp-adam", 13, 2.0, 0.5, 0.01, 8),
]


def stack(runs=RUNS, block=4, size=60):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 4, 4, generator=generator)
    labels = torch.randint(0, 10, (size,), generator=generator)
    return Stack(runs, AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10))), images, labels, block=block)


def go(s, steps):
    for _ in s.train(steps):
        pass
    return s


def test_a_restored_stack_goes_on_as_if_it_had_never_stopped(tmp_path):
    whole = go(stack(), 11)
    first, ledger = go(stack(block=3), 5), Ledger(tmp_path / "charged.json")
    save(first, tmp_path / "s", {"seconds": 2.5})
    ledger.write(charged(first))
    second = stack()
    assert restore(second, tmp_path / "s", ledger) == {"seconds": 2.5}
    assert second.steps_done == 5
    go(second, 6)
    for a, b in zip(whole.parts, second.parts, strict=True):
        for name in a.state:
            assert torch.equal(a.state[name], b.state[name]), name
    for i in range(3):
        assert second.epsilon(i, 1e-3) == whole.epsilon(i, 1e-3)


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_what_was_reserved_and_lost_is_charged_again(tmp_path, with_checkpoint):
    ledger = Ledger(tmp_path / "charged.json")
    if with_checkpoint:
        saved = go(stack(), 4)
        save(saved, tmp_path / "s", {})
    ledger.write(10)  # six more (or ten) were about to be made when the machine died
    again = stack()
    restore(again, tmp_path / "s", ledger)
    done = 4 if with_checkpoint else 0
    assert again.steps_done == done
    go(again, 12 - done)
    for i, run in enumerate(RUNS):
        expected = budget(
            dataset_size=60, batch_size=8, steps=10 + 12 - done, delta=1e-3, noise_multiplier=run.noise_multiplier
        )
        assert again.epsilon(i, 1e-3) == expected.epsilon
    assert again.mechanism.reserved == 0  # what was lost covers no step to come
    whole = go(stack(), 12)
    assert torch.equal(again.mean, whole.mean)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "charged.json")
    save(go(stack(), 2), tmp_path / "s", {})
    ledger.write(2)
    others = [
        stack([*RUNS[:2], Run("dp-adam", 14, 2.0, 0.5, 0.01, 8)]),
        stack(RUNS[:2]),
        stack(size=61),
    ]
    for other in others:
        with pytest.raises(ArgumentError, match=r"other runs.*Delete"):
            restore(other, tmp_path / "s", ledger)
    whole = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(whole[:100])
    with pytest.raises(ArgumentError, match="cannot be read"):
        restore(stack(), tmp_path / "s", ledger)


def test_a_missing_or_unreadable_ledger_is_never_taken_for_an_empty_one(tmp_path):
    ledger = Ledger(tmp_path / "charged.json")
    assert ledger.read() == 0
    save(go(stack(), 2), tmp_path / "s", {})
    with pytest.raises(PrivacyError, match="missing"):
        restore(stack(), tmp_path / "s", ledger)
    ledger.path.write_text("{")
    with pytest.raises(PrivacyError, match="nobody knows what was charged"):
        restore(stack(), tmp_path / "s", ledger)


def test_seeds_are_not_written(tmp_path):
    secret = 0x1234_5678_9ABC_DEF
    save(stack([Run("dp-sgd", secret, 1.0, 1.0, 0.1, 8)]), tmp_path / "s", {})
    content = (tmp_path / "s").read_bytes()
    assert str(secret).encode() not in content
    assert secret.to_bytes(8, "little") not in content
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert set(json.loads(header["__metadata__"]["dpivon_stack"])) == {"step", "runs", "accounts", "extra"}
