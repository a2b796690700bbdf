"""The recipe from a prior: the last layer first, then all weights, within one plan, one account and one ledger."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpivon
import dpivon.optim.steady
import dpivon.recipe
from dpivon import ArgumentError
from dpivon.durable.ledger import read
from dpivon.models import PaperCNN
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import LEDGER, history, started_from
from dpivon.privacy.temperature import temperature_cost, temperature_noise

N, EPOCHS, HEAD = 300, 14, 2
PLAN: dict[str, Any] = {"target_epsilon": 4.0, "delta": 1e-5, "batch_size": 1000, "dataset_size": 10_000}
PLAN |= {"epochs": EPOCHS, "accountant": "rdp", "seed": 3}
STEPS = {"head": 10 * HEAD, "all": 10 * EPOCHS}
TEMPERATURE = temperature_cost(temperature_noise(0.4, 1e-5, accountant="rdp"))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (N,), generator=generator)
    return torch.eye(3)[y] * 2 + torch.randn(N, 3, generator=generator), y


def network(classes: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, classes))


def prior() -> dpivon.Posterior:
    """Of a network with other classes, and no one's data."""
    named = {n: 1.5 * p.detach() for n, p in network(7).named_parameters()}
    return dpivon.Posterior(named, {n: torch.ones_like(p) for n, p in named.items()})


def phases(monkeypatch: Any) -> list[tuple[dict[str, Any], dpivon.Fitted]]:
    """What ``steady`` gives to ``fit``, and what it gets, from now on."""
    found, fit = [], dpivon.fit

    def remembered(*args: Any, **options: Any) -> dpivon.Fitted:
        found.append((options, fit(*args, **options)))
        return found[-1][1]

    monkeypatch.setattr(dpivon.recipe, "fit", remembered)
    return found


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x[n], y[n]) for x, y in ((a.mean, b.mean), (a.variance, b.variance)) for n in {*x, *y} if n in x
    )


def test_it_is_two_trainings_by_hand_with_one_noise_and_the_temperature(monkeypatch: Any) -> None:
    x, y = data()
    made = phases(monkeypatch)
    seen: list[tuple[int, int]] = []
    trained = dpivon.steady(network(), x, y, start_from=prior(), on_progress=lambda *at: seen.append(at), **PLAN)
    monkeypatch.undo()
    fitted: Any = trained.predictor

    plan = {key: value for key, value in PLAN.items() if key not in ("seed", "target_epsilon")}
    sigma = dpivon.budget(**plan, target_epsilon=4.0, also=[TEMPERATURE]).noise_multiplier
    common = {**plan, "noise_multiplier": sigma}
    model = network()
    dpivon.priors.start_from(model, prior())
    size = (1 / (3 * 3)) ** 0.5  # of an initialisation with three inputs, whatever the prior has learned
    model[0].requires_grad_(False)
    head = dpivon.fit(model, x, y, **common | {"epochs": HEAD}, seed=3)
    after = copy.deepcopy(head.model).requires_grad_()
    also = [*head.history, TEMPERATURE]
    drawn = hashlib.sha256(f"3 after {head.posterior.digest}".encode()).digest()
    seed = int.from_bytes(drawn[:8], "big") >> 2
    options = {"scale": size, "trace": 0.25}
    rest = {**common, "epochs": EPOCHS - HEAD, "lr": 2.25, "options": options, "also": also, "seed": seed}
    by_hand = dpivon.fit(after, x, y, **rest)

    assert same(fitted.posterior, by_hand.posterior)
    assert len(fitted.posterior.mean) == 4
    assert fitted.history == [(sigma, 0.1, STEPS["all"]), TEMPERATURE]
    assert fitted.budget == dpivon.budget(**plan, target_epsilon=4.0, also=[TEMPERATURE])
    assert 3.98 < fitted.account.get_epsilon(1e-5) == fitted.epsilon == by_hand.epsilon <= 4.0
    assert seen[-1] == (STEPS["all"], STEPS["all"])
    assert (STEPS["head"], STEPS["all"]) in seen
    assert [at for at, _ in seen] == sorted({at for at, _ in seen})
    # The first phase changed nothing but the last layer.
    start = {n: p.detach() for n, p in model.named_parameters()}
    first = made[0][1]
    assert set(first.posterior.mean) == {"2.weight", "2.bias"}
    assert all(torch.equal(first.model.get_parameter(n), start[n]) for n in ("0.weight", "0.bias"))
    assert not torch.equal(first.model.get_parameter("2.weight"), start["2.weight"])
    assert first.history == [(sigma, 0.1, STEPS["head"])]


def test_the_head_is_a_linear_layer_on_what_the_prior_computes(monkeypatch: Any) -> None:
    """To rounding, a step is that of a linear classifier on features that are functions of one example."""
    x, y = data()
    made = phases(monkeypatch)
    dpivon.steady(network(), x, y, start_from=prior(), **PLAN)
    monkeypatch.undo()
    options, first = made[0]
    model = network()
    dpivon.priors.start_from(model, prior())
    given = {key: value for key, value in options.items() if key not in ("inputs", "labels")}
    alone = dpivon.fit(copy.deepcopy(model[2]), model[:2](x).detach(), y, **given)
    torch.testing.assert_close(first.posterior.mean["2.weight"], alone.posterior.mean["weight"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.posterior.mean["2.bias"], alone.posterior.mean["bias"], rtol=1e-4, atol=1e-5)


def test_what_the_caller_says_is_of_all_weights_and_the_callers_model_stays(monkeypatch: Any) -> None:
    x, y = data()
    made, model = phases(monkeypatch), network()
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    dpivon.steady(model, x, y, start_from=prior(), lr=0.5, options={"trace": 2.0, "scale": 0.3}, **PLAN)
    (first, _), (second, fitted) = made
    assert "options" not in first
    assert "lr" not in first
    assert second["lr"] == 0.5
    assert second["options"] == {"trace": 2.0, "scale": 0.3}
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert set(fitted.posterior.mean) == {"0.weight", "2.weight", "2.bias"}  # what was frozen stays so
    assert torch.equal(fitted.model.get_parameter("0.bias"), prior().mean["0.bias"])


def test_where_the_last_layer_is_all_there_is_to_train_it_is_trained_by_itself() -> None:
    x, y = data()
    model = network()
    model[0].requires_grad_(False)
    trained = dpivon.steady(model, x, y, start_from=prior(), **PLAN)
    dpivon.priors.start_from(model, prior())
    plain = dpivon.steady(model, x, y, **PLAN)
    assert same(trained.predictor.posterior, plain.predictor.posterior)  # type: ignore[attr-defined]


def test_a_built_in_prior_begins_a_network_of_images() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 2, (16,))
    options = {"target_epsilon": 8.0, "delta": 1e-3, "batch_size": 8, "epochs": 2, "lr": 1e-6}
    model = PaperCNN(classes=2)
    trained: Any = dpivon.steady(model, x, y, start_from="images-32", **options).predictor
    start = dpivon.priors.start_from(model, "images-32")
    for name, p in trained.model.named_parameters():
        moved = float((p.detach() - start.mean[name]).abs().max())
        assert moved > 1e-3 if name.startswith("head.logits") else moved < 1e-3, name
    assert sum(steps for _, _, steps in trained.history) == 4


# ---- a run that is kept


@pytest.mark.parametrize("at", [STEPS["head"] // 2, STEPS["head"], STEPS["head"] + 1, STEPS["all"] - 1, None])
def test_a_kept_run_goes_on_to_the_bit_and_its_ledger_names_every_release(tmp_path: Path, at: int | None) -> None:
    def stop(done: int, steps: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    given = {**PLAN, "start_from": prior()}
    whole: Any = dpivon.steady(network(), *data(), **given, out=tmp_path / "whole")
    out, spent = tmp_path / "run", 0.0
    if at is not None:
        with pytest.raises(KeyboardInterrupt):
            dpivon.steady(network(), *data(), **given, out=out, on_progress=stop)
        begun = out if (out / LEDGER).exists() else out / "head"
        spent = epsilon(history(read(begun / LEDGER), 0), 1e-5, "rdp")
        assert len(list(history(read(begun / LEDGER), 0))) == 1
    for _ in range(2):  # the second finds it finished
        made: Any = dpivon.steady(network(), *data(), **given, out=out)
        record = read(out / LEDGER)
        assert same(made.predictor.posterior, whole.predictor.posterior)
        assert made.temperature == whole.temperature
        assert record.releases == STEPS["all"] + TEMPERATURE[2]
        assert made.predictor.history == history(record, 0) == whole.predictor.history
        assert started_from(record, 0) == {read(out / "head" / LEDGER).id: STEPS["head"]}
        assert spent < epsilon(history(record, 0), 1e-5, "rdp") == made.predictor.account.get_epsilon(1e-5) <= 4.0


def test_a_kept_run_is_the_stacks_run_but_for_its_draws(tmp_path: Path) -> None:
    """Alike in plan, account and how far the weights go, by all three ways."""
    given = {**PLAN, "start_from": prior()}
    stacked: Any = dpivon.steady(network(), *data(), **given).predictor
    kept: Any = dpivon.steady(network(), *data(), **given, out=tmp_path / "run").predictor
    dataset: Any = dpivon.steady(network(), TensorDataset(*data()), **given).predictor
    assert stacked.budget == kept.budget == dataset.budget
    assert stacked.history == kept.history == dataset.history
    start = network()
    dpivon.priors.start_from(start, prior())
    a, b, c = (
        torch.cat([(f.posterior.mean[n] - p.detach()).flatten() for n, p in start.named_parameters()]).norm()
        for f in (stacked, kept, dataset)
    )
    assert 0.6 < float(a / b) < 1.6
    assert 0.6 < float(a / c) < 1.6


def test_an_earlier_phase_that_was_changed_or_is_missing_is_refused(tmp_path: Path) -> None:
    given = {**PLAN, "start_from": prior()}
    out = tmp_path / "run"
    dpivon.steady(network(), *data(), **given, out=out)
    (out / "head").rename(tmp_path / "head")
    with pytest.raises(ArgumentError, match="no run from a prior was begun in it"):
        dpivon.steady(network(), *data(), **given, out=out)
    (out / "head").mkdir()
    with pytest.raises(ArgumentError, match="the finished run of the last layer in head/ is gone"):
        dpivon.steady(network(), *data(), **given, out=out)
    assert not any((out / "head").iterdir())  # nothing was trained for it
    dpivon.steady(network(), *data(), **{**given, "seed": 4}, out=tmp_path / "other")
    (out / "head").rmdir()
    (tmp_path / "other" / "head").rename(out / "head")
    with pytest.raises(ArgumentError, match="has changed since"):
        dpivon.steady(network(), *data(), **given, out=out)
    assert read(out / LEDGER).releases == STEPS["all"] + TEMPERATURE[2]


@pytest.mark.parametrize("which", ["head", "."])
def test_a_ledger_that_is_gone_or_an_older_copy_counts_for_nothing_less(which: str, tmp_path: Path) -> None:
    given, out = {**PLAN, "start_from": prior()}, tmp_path / "run"
    dpivon.steady(network(), *data(), **given, out=out)
    ledger = out / which / LEDGER
    lines = ledger.read_text().splitlines(keepends=True)
    (out / "temperature.json").unlink()
    for text in (None, "".join(lines[: len(lines) // 2])):
        ledger.unlink()
        if text is not None:
            ledger.write_text(text)
        with pytest.raises(
            ArgumentError, match=r"holds a finished run of \d+ releases and (no ledger|a ledger of \d+)"
        ):
            dpivon.steady(network(), *data(), **given, out=out)
        assert text is not None or not ledger.exists()
        ledger.touch()


# ---- refused, before anything is released


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 8), nn.Conv1d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.linear(x).relu().unsqueeze(-1)).squeeze(-1)
        return out


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = network()
    model[2].requires_grad_(False)
    return model


def private() -> dpivon.Posterior:
    return dpivon.Posterior(prior().mean, prior().variance, {"method": "dp-steady"})


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (Convolved, {}, "model='Convolved': does not end in a linear layer"),
        (lambda: nn.Linear(3, 3), {}, "model='Linear': does not end in a linear layer of its own"),
        (tied, {}, "does not end in a linear layer of its own"),
        (frozen, {}, r"start_from=.*2\.weight is frozen"),
        (network, {"epochs": 1}, "epochs=1: is too few for two phases"),
        (network, {"epochs": 2.5}, "epochs=2.5: must be a whole number"),
        (network, {"start_from": network()}, "start_from='Sequential': is no prior"),
        (network, {"out": __file__}, "is a file"),
        (network, {"start_from": "images-64"}, "neither a prior by name nor a file"),
        (network, {"start_from": "images-32"}, "is not of this network"),
        (network, {"start_from": private()}, "was trained by dp-steady, and what that cost"),
        (network, {"lr": -1.0}, "lr=-1.0"),
        (network, {"options": {"raise": 1.0}}, "are not options of 'dp-steady'"),
        (network, {"noise_multiplier": 1.0}, "both were given"),
        (network, {"after": dpivon.Fitted(network(), prior(), dpivon.budget(
            dataset_size=100, batch_size=10, epochs=1, delta=1e-3, noise_multiplier=1.0))}, "begins anew"),
    ],
)  # fmt: skip
def test_what_cannot_begin_so_is_named_and_nothing_is_released(
    model: Any, given: dict[str, Any], said: str, monkeypatch: Any
) -> None:
    made = phases(monkeypatch)
    with pytest.raises(ArgumentError, match=said):
        dpivon.steady(model(), *data(), **{**PLAN, "start_from": prior(), **given})
    assert made == []


def test_a_folder_with_other_things_in_it_is_refused_before_anything_is_released(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match="is not empty"):
        dpivon.steady(network(), *data(), **PLAN, start_from=prior(), out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
