"""Logs of a private run, read back from TensorBoard's and MLflow's own files."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.errors import MissingPackage, need, pip_line
from dpivon.integrations.tracking import NOT_PRIVATE, PrivateLog, mlflow_log, tensorboard_log

STEPS = 6


class Memory:
    def __init__(self) -> None:
        self.written: list[tuple[int, str, float]] = []
        self.stated: dict[str, str] = {}

    def scalars(self, values: Any, step: int) -> None:
        self.written += [(step, tag, value) for tag, value in values.items()]

    def settings(self, values: Any) -> None:
        self.stated |= values

    def close(self) -> None:
        pass


def private_run(sigma: float = 1.0, optimizer: str = "ivon") -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 5), torch.randint(3, (60,)))
    model = nn.Sequential(nn.Linear(5, 3))
    if optimizer == "ivon":
        inner: Any = dpivon.IVON(model.parameters(), lr=0.1, ess=60)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpivon.PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=sigma,
        max_grad_norm=0.5,
    )
    return engine, *made


def train(log: PrivateLog, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """A pass; ε after every step as the engine says it."""
    spent = []
    for x, y in loader:
        optimizer.zero_grad()
        optimizer.step(lambda x=x, y=y: _backward(F.cross_entropy(model(x), y)))
        log.observe()
        spent.append(log.engine.get_epsilon(1e-3))
    return spent


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def test_tensorboard_holds_epsilon_noise_and_diagnostics(tmp_path):
    pytest.importorskip("tensorboard", reason=pip_line("tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine, model, optimizer, loader = private_run()
    with tensorboard_log(optimizer, engine, tmp_path, delta=1e-3, every=2) as log:
        spent = train(log, model, optimizer, loader)
        log.public("test_accuracy", 0.5)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    epsilon = found.Scalars("privacy/epsilon")
    assert [e.step for e in epsilon] == [1, 2, 4, 6]
    assert [e.value for e in epsilon] == pytest.approx([spent[i] for i in (0, 1, 3, 5)], rel=1e-6)
    assert {e.value for e in found.Scalars("privacy/noise_multiplier")} == {1.0}
    rms = [row.gradient_rms for row in log.diagnostics.rows]
    assert [e.value for e in found.Scalars("diagnostics/gradient_rms")] == pytest.approx(rms, rel=1e-6)
    assert "diagnostics/std_median" in found.Tags()["scalars"]
    assert not any(tag.startswith(NOT_PRIVATE) for tag in found.Tags()["scalars"])


@pytest.mark.slow
def test_mlflow_holds_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # tests talk to nobody
    mlflow = pytest.importorskip("mlflow", reason=pip_line("mlflow"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database package
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        engine, model, optimizer, loader = private_run()
        with mlflow_log(optimizer, engine, delta=1e-3, every=3) as log:
            run = mlflow.active_run().info.run_id
            spent = train(log, model, optimizer, loader)
        assert mlflow.active_run() is None
        history = mlflow.MlflowClient().get_metric_history(run, "privacy/epsilon")
        assert [(m.step, m.value) for m in history] == [(i + 1, pytest.approx(spent[i])) for i in (0, 2, 5)]
        assert mlflow.get_run(run).data.params["privacy/sample_rate"] == repr(10 / 60)
        with mlflow.start_run():
            log = mlflow_log(optimizer, engine, delta=1e-3)
            log.close()
            assert mlflow.active_run() is not None  # the caller's own run is the caller's to end
    finally:
        mlflow.set_tracking_uri(before)


def test_losses_are_marked_and_warned_of_once():
    engine, _, optimizer, _ = private_run()
    sink = Memory()
    log = PrivateLog(optimizer, engine, sink, delta=1e-3)
    with pytest.warns(dpivon.PrivacyWarning, match="NOT_PRIVATE/loss.*ε does not cover") as caught:
        log.not_private("loss", 2.5)
    assert len(caught) == 1
    log.not_private("loss", 2.0)  # a second warning would be an error
    assert [(tag, value) for _, tag, value in sink.written] == [("NOT_PRIVATE/loss", 2.5), ("NOT_PRIVATE/loss", 2.0)]


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_diagnostics_of_a_run_without_noise_are_not_called_public():
    engine, model, optimizer, loader = private_run(sigma=0.0)
    sink = Memory()
    train(PrivateLog(optimizer, engine, sink, delta=1e-3, every=1), model, optimizer, loader)
    values = {tag: value for _, tag, value in sink.written}
    assert values["privacy/epsilon"] == math.inf
    assert f"{NOT_PRIVATE}/gradient_rms" in values
    assert not any(tag.startswith("diagnostics/") for tag in values)


def test_nothing_that_is_unknown_is_written():
    engine, model, optimizer, loader = private_run(optimizer="sgd")
    sink = Memory()
    log = PrivateLog(optimizer, engine, sink, delta=1e-3, every=1)
    assert log.observe() is None  # before the first release
    train(log, model, optimizer, loader)
    assert log.observe() is None  # the same release again
    assert {step for step, _, _ in sink.written} == set(range(1, STEPS + 1))
    assert not any(math.isnan(value) for _, _, value in sink.written)
    assert not any("hess" in tag for _, tag, _ in sink.written)
    assert sink.stated["expected_batch_size"] == "10.0"


def test_a_plain_optimizer_is_refused():
    engine, *_ = private_run()
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(dpivon.ArgumentError, match=r"optimizer='SGD'.*not private"):
        PrivateLog(plain, engine, Memory(), delta=1e-3)


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    real = importlib.import_module

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in ("lightning", "tensorboard", "mlflow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(importlib, "import_module", missing)
    for package, extra in (("lightning.pytorch", "lightning"), ("tensorboard", "tensorboard"), ("mlflow", "mlflow")):
        with pytest.raises(
            MissingPackage, match=rf"{package}: is not installed.*pip install 'dpivon\[{extra}\]'"
        ) as info:
            need(package, extra)
        assert isinstance(info.value, ImportError)
        assert isinstance(info.value, dpivon.DpivonError)
    engine, _, optimizer, _ = private_run()
    with pytest.raises(MissingPackage):
        tensorboard_log(optimizer, engine, "nowhere", delta=1e-3)
    with pytest.raises(MissingPackage):
        mlflow_log(optimizer, engine, delta=1e-3)
