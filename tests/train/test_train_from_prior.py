"""`dpivon train --start-from` a prior: the recipe's last layer on its features, and a temperature, kept and published."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner
from whole_runs import Dies, posterior, same, slow

import dpivon
from dpivon import DpivonError, recipe
from dpivon.cli import app
from dpivon.data.images import load_digits
from dpivon.durable.ledger import read as read_ledger
from dpivon.errors import PrivacyWarning, StorageError
from dpivon.models import SmallCNN
from dpivon.priors import Features
from dpivon.privacy import temperature
from dpivon.privacy.accounting.recorded import LEDGER, history
from dpivon.privacy.counting import ROUNDS, sets_cost, shares_cost
from dpivon.privacy.temperature import HALVINGS, temperature_noise
from dpivon.temperature import temper
from dpivon.train import last_layer, load, resolve, train
from dpivon.train import run as running
from dpivon.train.published import FEATURES
from prior_cases import plain, small

N, HELD_OUT, DELTA = 400, 20, 1e-4
PLAN: dict[str, Any] = {"delta": DELTA, "batch_size": 100, "epochs": 3, "accountant": "rdp", "seed": 3}


@pytest.fixture(autouse=True, scope="module")
def _few_tell_the_temperature() -> Any:
    """That of so many digits is worth its cost, and a twentieth of them can tell it."""
    with pytest.MonkeyPatch.context() as patch:
        noise = temperature_noise(0.4, DELTA, accountant="rdp")
        patch.setattr(recipe, "WORTH", recipe.blur(noise, HELD_OUT) * (1 + 1e-9))
        patch.setattr(running, "_report", lambda folder, watcher: None)
        yield


def digits(path: Path, begin: int, end: int) -> str:
    found = load_digits().train
    x, y = found.x[begin:end, 0] * 16, found.y[begin:end]
    np.savez(path, x=x.numpy().astype(np.uint8), y=y.numpy())
    return str(path)


def pixels(path: str | Path) -> Tensor:
    """As a run reads them: on [−1, 1]."""
    return torch.from_numpy(np.load(path)["x"]).float().unsqueeze(1) / 8 - 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run from a prior on digits that nothing interrupted: its options and its summary."""
    folder = tmp_path_factory.mktemp("from-prior")
    options = PLAN | {
        "data": digits(folder / "train.npz", 0, N), "test": digits(folder / "test.npz", 1000, 1200), "epsilon": 4.0,
        "classes": list("0123456789"), "value_bounds": {"min": 0, "max": 16}, "dataset_size": N,
        "start_from": "strokes-8", "out": str(folder / "run"),
    }  # fmt: skip
    return options, train(resolve(options))


def test_it_is_the_recipe_of_the_library(made: Any, tmp_path: Path) -> None:
    options, summary = made
    features = Features.of(SmallCNN(), "strokes-8", (1, 8, 8), input_mean=0.5, input_std=0.5)
    x, y = pixels(options["data"]), load_digits().train.y[:N]
    same_plan: dict[str, Any] = PLAN | {"target_epsilon": 4.0, "out": tmp_path / "run"}
    trained: Any = dpivon.steady(SmallCNN(), x, y, start_from=features, **same_plan)
    published = load(Path(options["out"]))
    for ours, theirs in zip(
        (published.posterior.mean, published.posterior.variance),
        (trained.predictor.posterior.mean, trained.predictor.posterior.variance),
        strict=True,
    ):
        assert all(torch.equal(ours[name], theirs[name]) for name in {**ours, **theirs})
    charged = history(read_ledger(Path(options["out"]) / LEDGER), 0)
    assert charged == trained.predictor.history
    assert [steps for _, _, steps in charged] == [12, HALVINGS]
    assert 3.9 < summary["epsilon"] == trained.predictor.account.get_epsilon(DELTA) <= 4.0
    assert published.description.dataset_size == N - HELD_OUT
    assert summary["sampling_rate"] == 100 / (N - HELD_OUT)
    # Its temperature is that of probabilities, and what the layer sees is what the library's sees.
    t = published.decision.temperature
    assert t == summary["decision"]["temperature"] != 1
    raw = trained.predictor.predict(pixels(options["test"]), 0).probs
    torch.testing.assert_close(published.predict(pixels(options["test"]), samples=0).probs, temper(raw, t))
    assert summary["metrics"]["mc_accuracy"] > 0.8
    said = " ".join(summary["public_inputs"])
    assert f"Of the N rows about {HELD_OUT} were not trained on" in said
    assert "images they are flat on: strokes-8" in said
    assert summary["task"]["network"] == "one linear layer on features of small"


def predictions(folder: Path, data: str, out: Path) -> str:
    result = CliRunner().invoke(app, ["predict", str(folder), data, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out.read_text()


def test_the_published_folder_predicts_by_itself(made: Any, tmp_path: Path) -> None:
    options, _ = made
    run, out = Path(options["out"]), tmp_path / "published"
    assert CliRunner().invoke(app, ["export", str(run), "--out", str(out)]).exit_code == 0
    assert predictions(out, options["test"], tmp_path / "a") == predictions(run, options["test"], tmp_path / "b")
    published, x = load(out), pixels(options["test"])
    program = torch.export.load(out / "model.pt2").module()  # in plain PyTorch
    torch.testing.assert_close(program(x), published.predict(x, samples=0).probs, rtol=1e-4, atol=1e-5)
    assert "one linear layer on features of small" in (out / "model-card.md").read_text()
    (out / FEATURES).unlink()
    with pytest.raises(DpivonError, match="is not an existing file"):
        load(out)


@slow
def test_another_process_predicts_the_same(made: Any, tmp_path: Path) -> None:
    options, _ = made
    words = ["predict", options["out"], options["test"], "--out", str(tmp_path / "there")]
    subprocess.run([sys.executable, "-m", "dpivon", *words], check=True)
    here = predictions(Path(options["out"]), options["test"], tmp_path / "here")
    assert (tmp_path / "there").read_text() == here


@pytest.mark.parametrize("after", [5, 12])
def test_it_goes_on_to_the_bit_with_the_features_that_it_was_begun_with(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    options, summary = made
    options = options | {"out": str(tmp_path / "run")}
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(after))
    monkeypatch.setattr(Features, "of", None)  # they are not made again
    found = train(resolve(options))
    assert same(posterior(options["out"]), posterior(made[0]["out"]))
    assert (found["epsilon"], found["releases"]) == (summary["epsilon"], summary["releases"])
    assert found["decision"] == summary["decision"]


def test_other_features_are_other_data(made: Any, tmp_path: Path) -> None:
    """The noise that was drawn for one sum is never added to another."""
    options = made[0] | {"out": str(tmp_path / "run")}
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(5))
    releases = read_ledger(tmp_path / "run" / LEDGER).releases
    network = SmallCNN()
    Features(network, pixels(made[0]["test"]).repeat(3, 1, 1, 1), shift=1).save(tmp_path / "run" / FEATURES)
    with pytest.raises(DpivonError, match="data"):
        train(resolve(options))
    assert read_ledger(tmp_path / "run" / LEDGER).releases == releases


def test_other_rows_that_are_held_out_are_other_data_too(made: Any, tmp_path: Path) -> None:
    options = made[0] | {"out": str(tmp_path / "run"), "data": str(tmp_path / "train.npz")}
    shutil.copyfile(made[0]["data"], options["data"])
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(5))
    x, y = pixels(options["data"]), load_digits().train.y[:N]
    kept = torch.ones(N).bool()
    kept[int(recipe.left_out(x, y, HELD_OUT / N).nonzero()[0])] = False
    np.savez(options["data"], x=((x[kept, 0] + 1) * 8).numpy().astype(np.uint8), y=y[kept].numpy())
    with pytest.raises(DpivonError, match="was begun with other data"):
        train(resolve(options))


class Hears(running.Watcher):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_what_is_said_of_the_features_has_no_number_of_examples(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs of a run go further than its folder."""
    monkeypatch.setattr(last_layer, "CHUNK", 100)
    monkeypatch.setattr(last_layer, "TOLD", 0.0)
    hears, few = Hears(), N - 3
    options = made[0] | {"out": str(tmp_path / "run"), "data": digits(tmp_path / "few.npz", 0, few), "epochs": 1}
    train(resolve(options), hears)
    assert "Making 192 features of each example." in hears.said
    assert [said[:8] for said in hears.said if "tenths" in said] == ["2 tenths", "5 tenths", "7 tenths"]
    assert not any(str(few) in said for said in hears.said)


def test_a_temperature_is_charged_once_whatever_dies(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, summary = made
    options = options | {"out": str(tmp_path / "run")}
    with monkeypatch.context() as patch:
        patch.setattr(running, "publish", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(resolve(options))
    found = train(resolve(options))
    assert (found["releases"], found["decision"]) == (summary["releases"], summary["decision"])


@pytest.mark.parametrize("answers", [0, 4])
def test_a_choice_of_temperature_that_dies_stays_charged_and_no_more_than_the_plan_is_spent(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """The answer that was asked for is charged before it is made; what is left of the budget buys no second choice."""
    options, summary = made
    options, left = options | {"out": str(tmp_path / "run")}, iter(range(answers))
    real = temperature.release
    with monkeypatch.context() as patch:
        patch.setattr(temperature, "release", lambda *given: real(*given) if next(left, None) is not None else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(resolve(options))
    record = read_ledger(tmp_path / "run" / LEDGER)
    assert history(record, 0)[1][2] == answers + 1
    with pytest.warns(PrivacyWarning, match=f"{answers + 1} releases were made and lost"):
        found = train(resolve(options))
    assert (found["releases"], found["epsilon"]) == (summary["releases"], summary["epsilon"])
    assert load(tmp_path / "run").decision.temperature == 1


@slow
def test_shares_and_sets_are_of_tempered_probabilities_and_all_within_epsilon(made: Any, tmp_path: Path) -> None:
    held = digits(tmp_path / "held.npz", 500, 900)
    others = {"prior": "count", "coverage": 0.8, "calibration": held, "epsilon": 8.0}
    summary = train(resolve(made[0] | others | {"out": str(tmp_path / "run")}))
    charged = history(read_ledger(tmp_path / "run" / LEDGER), 0)
    shares = shares_cost(8.0, DELTA, counted=True)
    noise = temperature_noise(0.8, DELTA, accountant="rdp") * HALVINGS**0.5
    assert charged[0] == (shares[0], 1.0, 1)
    assert charged[2:] == [(noise, 1.0, HALVINGS), (shares[0], 1.0, ROUNDS), sets_cost(8.0, DELTA)]
    assert 7.8 < summary["epsilon"] <= 8.0
    decision = load(tmp_path / "run").decision
    assert decision.temperature != 1
    assert len(decision.factors) == len(decision.thresholds) == 10


def test_other_methods_and_no_last_layer_train_all_weights(made: Any, tmp_path: Path) -> None:
    for i, change in enumerate(({"method": "dp-sgd"}, {"last_layer": False})):
        config = resolve(made[0] | change | {"out": str(tmp_path / str(i)), "epochs": 1})
        assert not config.last_layer
        train(config)
        assert load(tmp_path / str(i)).posterior.matches(SmallCNN())
        assert not (tmp_path / str(i) / FEATURES).exists()
        assert len(history(read_ledger(tmp_path / str(i) / LEDGER), 0)) == 1  # and no temperature


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "dp-adam", "last_layer": True}, "^last_layer=True: is trained by dp-steady, and the method is dp-adam"),
        ({"start_from": None, "last_layer": True}, "^last_layer=True: needs --start-from"),
        ({"unit": "id"}, "whose guarantee is for rows"),
        ({"network": "mlp", "hidden": [8]}, "start_from='strokes-8': is not of this network"),
        ({"start_from": "a file"}, "names no random process.*--no-last-layer"),
        ({"options": {"raise": 1.0}}, "raise=1.0: is not an option of 'dp-steady'"),
    ],
)  # fmt: skip
def test_what_has_no_last_layer_is_named_before_anything_is_written(
    made: Any, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    if change.get("start_from"):
        change = {"start_from": str(tmp_path / "public.safetensors")}
        plain(small()).save(change["start_from"])
    with pytest.raises(DpivonError, match=said):
        train(resolve(made[0] | change | {"out": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()


def test_a_number_is_predicted_by_all_weights(made: Any) -> None:
    options = {name: value for name, value in made[0].items() if name != "classes"}
    config = resolve(options | {"task": "regression", "target_bounds": {"min": 0, "max": 9}})
    assert not config.last_layer
    with pytest.raises(DpivonError, match="last_layer=True: is of one column of classes"):
        resolve(options | {"task": "regression", "target_bounds": {"min": 0, "max": 9}, "last_layer": True})


def test_next_years_run_goes_on_with_the_features_and_both_are_counted(made: Any, tmp_path: Path) -> None:
    options, first = made
    shutil.copytree(options["out"], tmp_path / "one")
    later = options | {"start_from": str(tmp_path / "one"), "out": str(tmp_path / "two"), "epsilon": 8.0}
    later |= {"data": digits(tmp_path / "new.npz", N, 2 * N)}
    second = train(resolve(later))
    record = read_ledger(tmp_path / "two" / LEDGER)
    assert (record.earlier, record.releases) == (first["releases"], first["releases"] + second["steps"] + HALVINGS)
    assert 7.8 < second["epsilon"] <= 8.0
    assert (tmp_path / "two" / FEATURES).read_bytes() == (tmp_path / "one" / FEATURES).read_bytes()
    assert second["metrics"]["mc_accuracy"] >= first["metrics"]["mc_accuracy"] - 0.05
    before = load(tmp_path / "one")
    learner = before.description.learner(start=before.posterior, features=before.features)
    (group,) = learner.optimizer.param_groups
    decay = learner.optimizer._prior_of(learner.model.weight, group)["prior_decay"]
    spread = before.posterior.variance["weight"] / recipe.WIDTH  # predictions have a part of it
    torch.testing.assert_close(decay, 1 / (spread * group["ess"]))
    with pytest.raises(DpivonError, match="last_layer=False: but the run in"):
        train(resolve(later | {"last_layer": False, "out": str(tmp_path / "none")}))
    shutil.rmtree(tmp_path / "one")  # a finished run needs it no more
    assert train(resolve(later)) == second


def test_a_disk_that_is_full_when_features_are_published_is_named_and_gone_on_from(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, summary = made
    options = options | {"out": str(tmp_path / "run")}

    def full(source: Path, to: Path) -> None:
        Path(to).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dpivon.train.published.shutil.copyfile", full)
        with pytest.raises(StorageError, match=r"features\.safetensors: cannot be written.*make room"):
            train(resolve(options))
    assert train(resolve(options))["releases"] == summary["releases"]
    assert (tmp_path / "run" / "model" / FEATURES).read_bytes() == (tmp_path / "run" / FEATURES).read_bytes()


def test_a_damaged_file_of_features_is_named(made: Any, tmp_path: Path) -> None:
    shutil.copytree(made[0]["out"], tmp_path / "run")
    path = tmp_path / "run" / "model" / FEATURES
    whole = path.read_bytes()
    for damaged in (whole[:1000], whole.replace(b'"shift":"1"', b'"shift":"9"'), whole.replace(b"128 64", b"128 63")):
        path.write_bytes(damaged)
        with pytest.raises(DpivonError, match="features"):
            load(tmp_path / "run")
    told = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert told["last_layer"] is True
