"""fit(out=…): a run that is kept, accounted and gone on with, to the bit on a CPU, wherever it was killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpivon
from dpivon.durable.ledger import read
from dpivon.privacy.accounting.recorded import LEDGER, epsilons, history
from dpivon.privacy.temperature import HALVINGS

DELTA = 1e-3
PLAN: dict[str, Any] = {
    "method": "dp-ivon-gradsq",
    "lr": 0.2,
    "batch_size": 20,
    "epochs": 4,
    "delta": DELTA,
    "target_epsilon": 4.0,
    "accountant": "rdp",
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def row(fitted: dpivon.Fitted) -> torch.Tensor:
    names = sorted(fitted.posterior.mean)
    return torch.cat([t[name].flatten() for t in (fitted.posterior.mean, fitted.posterior.std) for name in names])


@pytest.mark.parametrize("method", ["dp-ivon-gradsq", "dp-steady"])
def test_a_kept_run_learns_what_its_folder_says_and_again_it_is_finished(tmp_path, method):
    options = PLAN | {"method": method, "lr": {"dp-steady": 3.5}.get(method, 0.2), "epochs": 8, "seed": 1}
    if method == "dp-ivon-gradsq":
        options["options"] = {"hess_init": 1.0}
    seen: list[tuple[int, int]] = []
    fitted = dpivon.fit(network(), *data(), **options, out=tmp_path / "run", on_progress=lambda *at: seen.append(at))
    x, y = data()
    assert float((fitted.predict(x).label == y).float().mean()) > 0.8
    assert seen[-1] == (80, 80)
    record = read(tmp_path / "run" / LEDGER)
    assert record.releases == fitted.budget.steps == 80
    assert epsilons(history(record, 0), DELTA)["rdp"] == pytest.approx(fitted.epsilon)
    assert fitted.account.get_epsilon(DELTA) == pytest.approx(fitted.epsilon)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] <= 4.0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    again = dpivon.fit(network(), *data(), **options, out=tmp_path / "run")
    assert torch.equal(row(again), row(fitted))
    assert read(tmp_path / "run" / LEDGER).releases == 80
    with pytest.raises(dpivon.ArgumentError, match="other arguments"):
        dpivon.fit(network(), *data(), **options | {"lr": 0.3}, out=tmp_path / "run")


@pytest.mark.slow
def test_a_dataset_is_trained_on_as_tensors_are_and_evaluated_beside(tmp_path):
    options = PLAN | {"seed": 3, "augment": None}
    tensors = dpivon.fit(network(), *data(), **options, out=tmp_path / "a")
    scores = iter(range(100))
    dataset = dpivon.fit(
        network(),
        TensorDataset(*data()),
        **options,
        out=tmp_path / "b",
        evaluate=lambda learner: {"score": next(scores)},
    )
    assert torch.equal(row(tensors), row(dataset))
    lines = [json.loads(line) for line in (tmp_path / "b" / "progress.jsonl").read_text().splitlines()]
    assert [line["not_private"] for line in lines] == [{"score": i} for i in range(4)]
    with pytest.raises(dpivon.ArgumentError, match="labels"):
        dpivon.fit(network(), data()[0], **options)


def test_a_kept_run_is_the_stacks_run_but_for_its_draws():
    """The same plan by both: alike in ε, steps and the noise of a step, which is nearly all there is here."""
    options = PLAN | {"lr": 1e-3, "method": "dp-sgd", "options": {"momentum": 0.0}, "max_grad_norm": 1e-6}
    kept = dpivon.fit(network(), TensorDataset(*data()), **options)
    stacked = dpivon.fit(network(), *data(), **options)
    assert kept.epsilon == stacked.epsilon
    assert kept.budget == stacked.budget
    start = torch.cat([p.detach().flatten() for p in network().parameters()])
    moved = [
        float((torch.cat([p.detach().flatten() for p in f.model.parameters()]) - start).norm()) for f in (kept, stacked)
    ]
    assert 0.7 < moved[0] / moved[1] < 1.4


def test_a_kept_run_has_the_prior_that_a_stack_has(tmp_path):
    """Gradients are clipped to nothing, so that the pull to the prior is all there is, and both make the same steps."""
    start = network()
    mean = {name: torch.full_like(p, 0.3) for name, p in start.named_parameters()}
    prior = dpivon.Posterior(mean, {name: torch.full_like(p, 0.01) for name, p in start.named_parameters()})
    options = PLAN | {"max_grad_norm": 1e-9, "options": {"hess_init": 0.1, "beta2": 1.0}, "prior": prior, "lr": 0.05}
    kept = dpivon.fit(start, *data(), **options, out=tmp_path / "run")
    stacked = dpivon.fit(start, *data(), **options)
    assert kept.path == stacked.path == "eager (on cpu)"
    for name, p in start.named_parameters():
        torch.testing.assert_close(kept.posterior.mean[name], stacked.posterior.mean[name], rtol=1e-4, atol=1e-5)
        assert float((kept.posterior.mean[name] - p.detach()).abs().max()) > 0.01
    with pytest.raises(dpivon.ArgumentError, match="other arguments"):
        dpivon.fit(start, *data(), **options | {"prior": None}, out=tmp_path / "run")


@pytest.mark.parametrize("kept", [False, True])
def test_a_bar_is_shown_where_it_is_wanted_and_nothing_to_a_file(tmp_path, capsys, kept):
    options = PLAN | ({"out": tmp_path / "run"} if kept else {})
    dpivon.fit(network(), *data(), **options | {"epochs": 1})
    assert capsys.readouterr().err == ""
    dpivon.fit(network(), *data(), **options | {"epochs": 1, "progress": True, "out": tmp_path / "b" if kept else None})
    assert re.search(r"10/10  ε = \d\.\d\d\d", capsys.readouterr().err)


def test_what_is_charged_later_must_not_pass_by_the_ledger(tmp_path):
    fitted = dpivon.fit(network(), *data(), **PLAN, out=tmp_path)
    with pytest.raises(dpivon.PrivacyError, match=r"was closed|would spend"):
        dpivon.calibrate_temperature(fitted, data(), account=fitted.account, noise_multiplier=50.0)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_recipe_is_kept_with_its_temperature(tmp_path, accountant):
    plan = {"target_epsilon": 4.0, "delta": 1e-5, "batch_size": 1000, "epochs": 2, "dataset_size": 20_000}
    options = plan | {"seed": 1, "out": tmp_path, "accountant": accountant}

    def spent() -> tuple[int, float]:
        record = read(tmp_path / LEDGER)
        return record.releases, epsilons(history(record, 0), 1e-5)[accountant]

    trained = dpivon.steady(network(), *data(), **options)
    releases, epsilon = spent()
    assert releases == trained.predictor.budget.steps + HALVINGS
    assert trained.predictor.account.get_epsilon(1e-5) == epsilon <= 4.0
    again = dpivon.steady(network(), *data(), **options)
    assert again.temperature == trained.temperature
    assert spent() == (releases, epsilon)
    (tmp_path / "temperature.json").unlink()  # as if it was killed between its charge and its end
    with pytest.warns(dpivon.PrivacyWarning, match="temperature"):
        assert dpivon.steady(network(), *data(), **options).temperature == 1.0
    assert spent()[1] <= 4.0


# ---- killed


def _child(folder: str) -> None:
    """What is killed: some 40 steps, slowed down so that a kill lands among them, saved after every third."""
    from dpivon.train.kept import KeptRun

    step = KeptRun._step

    def slowly(self: Any, batch: Any) -> bool:
        went_on = step(self, batch)
        if self.done % 3 == 0 and self.kept is not None:
            self.kept.save()
        print(self.done, flush=True)
        time.sleep(0.01)
        return went_on

    KeptRun._step = slowly  # type: ignore[method-assign]
    dpivon.fit(network(), *data(), **PLAN, seed=7, out=folder)


def killed_and_resumed(folder: Path, moments: list[int], draw: random.Random) -> torch.Tensor:
    """A run that is killed after so many steps in each of its processes, a little later every time."""
    spent = 0.0
    for steps in moments:
        command = [sys.executable, __file__, str(folder)]
        own = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as child:
            assert child.stdout is not None
            for count, _ in enumerate(child.stdout, start=1):
                if count == steps:
                    time.sleep(0.012 * draw.random())
                    child.send_signal(signal.SIGKILL)
                    break
            else:
                raise AssertionError("the run had ended before it was killed")
        now = epsilons(history(read(folder / LEDGER), 0), DELTA)["rdp"]
        assert now >= spent
        spent = now
    fitted = dpivon.fit(network(), *data(), **PLAN, seed=7, out=folder)
    assert read(folder / LEDGER).releases == 40
    assert spent <= fitted.account.get_epsilon(DELTA) <= 4.0
    return row(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_killed_five_times_goes_on_to_the_bit(tmp_path, seed):
    expected = row(dpivon.fit(network(), *data(), **PLAN, seed=7, out=tmp_path / "whole"))
    draw = random.Random(seed)
    got = killed_and_resumed(tmp_path / "killed", [draw.randint(1, 8) for _ in range(5)], draw)
    assert torch.equal(got, expected)


if __name__ == "__main__":
    _child(sys.argv[1])


def other_rows(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1.0, y


def other_labels(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, 1 - y


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize("changed", [other_rows, other_labels])
def test_a_finished_run_is_not_returned_for_other_data(tmp_path, changed, as_dataset):
    options = PLAN | {"epochs": 1, "out": tmp_path}
    fitted = dpivon.fit(network(), *([TensorDataset(*data())] if as_dataset else data()), **options)
    again = dpivon.fit(network(), *([TensorDataset(*data())] if as_dataset else data()), **options)
    assert torch.equal(row(again), row(fitted))
    other = changed(*data())
    with pytest.raises(dpivon.ArgumentError, match=r"out=.*other data"):
        dpivon.fit(network(), *([TensorDataset(*other)] if as_dataset else other), **options)
    assert read(tmp_path / LEDGER).releases == fitted.budget.steps


@pytest.mark.slow
def test_nor_for_rows_of_other_people(tmp_path):
    options = PLAN | {"epochs": 1, "out": tmp_path, "dataset_size": 100, "rows_per_user": 2}
    ids = torch.arange(200) // 2
    fitted = dpivon.fit(network(), *data(), user_ids=ids, **options)
    assert torch.equal(row(dpivon.fit(network(), *data(), user_ids=ids, **options)), row(fitted))
    with pytest.raises(dpivon.ArgumentError, match=r"out=.*other data"):
        dpivon.fit(network(), *data(), user_ids=torch.arange(200) % 100, **options)


def test_a_finished_run_without_checkpoints_says_that_data_are_not_compared(tmp_path):
    options = PLAN | {"epochs": 1, "out": tmp_path}
    fitted = dpivon.fit(network(), *data(), **options)
    for path in tmp_path.glob("release-*.safetensors"):
        path.unlink()
    with pytest.warns(UserWarning, match="not compared"):
        again = dpivon.fit(network(), *data(), **options)
    assert torch.equal(row(again), row(fitted))
