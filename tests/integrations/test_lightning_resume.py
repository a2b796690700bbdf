"""A Lightning run that goes on from a checkpoint: with its ledger, and never with less than was spent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import dpivon
from dpivon.errors import pip_line

lightning = pytest.importorskip("lightning.pytorch", reason=pip_line("lightning"))
import test_lightning  # noqa: E402
from test_lightning import Digits, callback, loader, losses, some_digits, trainer  # noqa: E402

from dpivon.integrations.lightning import PrivateTraining  # noqa: E402

pytestmark = test_lightning.pytestmark


@pytest.fixture(scope="module")
def digits():
    return some_digits()


class Stop(lightning.Callback):
    """Saves after some steps, and breaks off after more of them."""

    def __init__(self, path: Any, save: int, stop: int) -> None:
        self.path, self.save, self.stop = path, save, stop

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.save:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == self.stop:
            raise RuntimeError("killed")


def kept(folder: Any, **options: Any) -> PrivateTraining:
    return callback(engine=dpivon.PrivacyEngine(ledger=folder / "ledger.jsonl"), **options)


def broken_off(data: Any, folder: Any, **options: Any) -> PrivateTraining:
    private = kept(folder, **options)
    fitted = trainer(private)
    fitted.callbacks.append(Stop(folder / "run.ckpt", save=4, stop=7))
    with pytest.raises(RuntimeError, match="killed"):
        fitted.fit(Digits(), loader(data))
    private.engine.ledger.close()
    return private


@pytest.mark.parametrize("options", [{}, {"loss_fn": losses, "capture": True}], ids=["eager", "compiled"])
def test_a_run_goes_on_with_its_ledger_and_stops_at_its_budget(digits, tmp_path, options):
    """Three of twelve steps were lost: they stay charged, and the resumed run makes that many fewer."""
    first, module = broken_off(digits, tmp_path, **options), Digits()
    second = kept(tmp_path, **options)
    assert second.epsilon == first.epsilon > 0
    fitted = trainer(second)
    fitted.fit(module, loader(digits), ckpt_path=tmp_path / "run.ckpt")
    assert fitted.global_step == 9  # it went on from 4
    assert len(second.engine.accountant) == 12
    assert first.epsilon < second.epsilon <= 8.0
    assert second.optimizer.drawn_by == ("os-entropy", "os-entropy")  # though the first run's noise was seeded
    assert fitted.optimizers[0].param_groups[0]["lr"] == 0.25  # the scheduler goes on too
    second.engine.ledger.close()
    third = kept(tmp_path, **options)
    with pytest.raises(dpivon.PrivacyError, match="target_epsilon"):  # from the same checkpoint there is nothing left
        trainer(third).fit(Digits(), loader(digits), ckpt_path=tmp_path / "run.ckpt")
    assert third.epsilon == second.epsilon


def test_after_an_error_the_trainer_runs_the_step_of_its_next_fit(digits, tmp_path):
    fitted = trainer(callback(loss_fn=losses))
    fitted.callbacks.append(Stop(tmp_path / "run.ckpt", save=2, stop=3))
    with pytest.raises(RuntimeError, match="killed"):
        fitted.fit(Digits(), loader(digits))
    module, private = Digits(), callback()
    fitted.callbacks[:] = [private]
    fitted.fit(module, loader(digits))
    assert len(private.engine.accountant) > 0
    assert not torch.equal(module.net[0].weight, Digits().net[0].weight)


def refused(private: PrivateTraining, data: Any, path: Any, message: str) -> None:
    before = len(private.engine.accountant)
    with pytest.raises(dpivon.DpivonError, match=message):
        trainer(private).fit(Digits(), loader(data), ckpt_path=path)
    assert len(private.engine.accountant) == before
    if private.engine.ledger is not None:
        private.engine.ledger.close()


def test_a_checkpoint_is_not_resumed_without_its_ledger(digits, tmp_path):
    broken_off(digits, tmp_path)
    checkpoint, path = tmp_path / "run.ckpt", tmp_path / "ledger.jsonl"
    refused(callback(), digits, checkpoint, r"ckpt_path=.*no account.*ledger=")
    whole = path.read_text()
    path.unlink()
    refused(kept(tmp_path), digits, checkpoint, "not the ledger")
    path.write_text("".join(whole.splitlines(keepends=True)[:4]))
    refused(kept(tmp_path), digits, checkpoint, "cut short")
    path.write_text(whole)
    other = trainer(callback(), max_epochs=1)
    other.fit(Digits(), loader(digits))
    other.save_checkpoint(tmp_path / "other.ckpt")
    refused(kept(tmp_path), digits, tmp_path / "other.ckpt", "not written by a run with a ledger")


def test_a_checkpoint_that_was_looked_at_before_says_nothing_of_another(digits, tmp_path):
    """What `validate` read of a run with a ledger is forgotten when `fit` is given a checkpoint without one."""
    broken_off(digits, tmp_path)
    other = trainer(callback(), max_epochs=1)
    other.fit(Digits(), loader(digits))
    other.save_checkpoint(tmp_path / "other.ckpt")
    private, module = kept(tmp_path), Digits()
    both = trainer(private)
    both.validate(module, DataLoader(digits, batch_size=300), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    with pytest.raises(dpivon.ArgumentError, match="not written by a run with a ledger"):
        both.fit(module, loader(digits), ckpt_path=tmp_path / "other.ckpt")
