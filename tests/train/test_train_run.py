"""Whole runs: they learn within the budget and read nothing off the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from whole_runs import slow

import dpivon
from clinic import HEADER, clinic, rows, write_csv
from dpivon import DpivonError, budget
from dpivon.train import load, resolve, train
from dpivon.train import run as running
from dpivon.train.artefacts import read_progress
from dpivon.train.loop import Loop
from dpivon.train.run import Watcher, describe

pytestmark = pytest.mark.usefixtures("no_report")


FILES = {"config.yaml", "ledger.jsonl", "model", "progress.jsonl", "summary.json", "posterior.json"}


def test_it_learns_within_the_budget(tmp_path: Path) -> None:
    """85 % at ε = 4 on 300 rows, where always saying the more frequent class reaches less than 65 %."""
    options = clinic(tmp_path) | {"epochs": 20, "test": str(tmp_path / "test.csv"), "hidden": [16]}
    summary = train(resolve(options))
    labels = [row[4] for row in rows(200, seed=1)]
    assert max(labels.count("yes"), labels.count("no")) / 200 < 0.65
    assert summary["metrics"]["mc_accuracy"] > 0.85
    assert 3.9 < summary["epsilon"] <= 4.0


def test_a_run_in_bf16_learns_and_stays_in_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, per_example = [], dpivon.PerExampleLoss.per_example

    def watched(self: Any, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))  # outputs come out in fp32 again
        return per_example(self, outputs, labels)

    monkeypatch.setattr(dpivon.PerExampleLoss, "per_example", watched)
    options = clinic(tmp_path) | {"epochs": 20, "test": str(tmp_path / "test.csv"), "precision": "bf16"}
    summary = train(resolve(options))
    assert seen.count(True) == summary["steps"]
    assert summary["metrics"]["mc_accuracy"] > 0.8
    with pytest.raises(DpivonError, match="precision"):
        train(resolve(options | {"precision": "fp32"}))


def test_many_short_epochs_write_fewer_lines_and_the_last(tmp_path: Path) -> None:
    train(resolve(clinic(tmp_path) | {"epochs": 60, "batch_size": 300, "accountant": "rdp"}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(2, 61, 2))
    assert lines[-1]["step"] == 60


def test_the_folder_is_as_agreed(whole: Any) -> None:
    options, summary = whole
    folder = Path(options["out"])
    assert FILES | {"test.npz"} <= {path.name for path in folder.iterdir()}
    assert {path.name for path in (folder / "model").iterdir()} == {
        "decision.json", "model.json", "model.safetensors", "posterior.safetensors", "privacy.json",
    }  # fmt: skip
    assert json.loads((folder / "summary.json").read_text()) == summary
    plan = budget(dataset_size=300, batch_size=50, epochs=4, delta=1e-4, target_epsilon=4.0)
    assert summary["noise_multiplier"] == plan.noise_multiplier
    assert summary["epsilon"] == summary["epsilon_by_accountant"]["pld"] == plan.epsilon
    assert summary["epsilon_by_accountant"].keys() == {"rdp", "prv", "pld"}
    assert (summary["steps"], summary["releases"], summary["sampling_rate"]) == (24, 24, 1 / 6)
    assert summary["task"] == {
        "kind": "table", "classes": ["yes", "no"], "inputs": "a row of 3 columns", "network": "mlp with hidden layers of 8",
        "target": "ill",
    }  # fmt: skip
    assert summary["heldout_is_private"] is False
    assert any("made up" in sentence for sentence in summary["public_inputs"])
    assert any("300" in sentence for sentence in summary["public_inputs"])
    assert len(summary["choices_not_made"]) >= 5
    lines = read_progress(folder / "progress.jsonl")
    assert [line.step for line in lines] == [6, 12, 18, 24]
    assert [line.epsilon for line in lines] == sorted(line.epsilon for line in lines)
    assert all(line.heldout_nll > 0 and 0 <= line.heldout_accuracy <= 1 for line in lines)
    widths = json.loads((folder / "posterior.json").read_text())["layers"]
    assert all(0 < w["sd_q05"] <= w["sd_median"] <= w["sd_q95"] for w in widths)
    with np.load(folder / "test.npz", allow_pickle=False) as test:
        assert test["probabilities"].shape == test["mean_probabilities"].shape == (200, 2)
        assert test["probabilities"].dtype == np.float32
        assert test["targets"].tolist() == [["yes", "no"].index(row[4]) for row in rows(200, seed=1)]
        right = (test["probabilities"].argmax(1) == test["targets"]).mean()
    assert summary["metrics"]["mc_accuracy"] == pytest.approx(right)


def test_predicting_from_the_published_folder_is_predicting_in_the_process(whole: Any, tmp_path: Path) -> None:
    options, _ = whole
    config = resolve(options | {"out": str(tmp_path / "again")})
    description = describe(config)
    examples = description.inputs.read(config.data, config.classes)
    (tmp_path / "again").mkdir()
    with torch.random.fork_rng():
        loop = Loop(config, description, examples, tmp_path / "again")
        loop.train(None, lambda line, step: None)
    loop.close()
    ours = loop.learner.predict(examples.inputs, 32, generator=torch.Generator().manual_seed(0))
    moved = tmp_path / "elsewhere"
    (Path(options["out"]) / "model").rename(moved)
    try:
        published = load(moved)
        theirs = published.predict(published.description.inputs.read(config.data, None).inputs)
    finally:
        moved.rename(Path(options["out"]) / "model")
    assert torch.equal(ours.probs, theirs.probs)
    assert torch.equal(ours.mutual_information, theirs.mutual_information)
    assert theirs.mutual_information.max() > 0


@pytest.mark.parametrize(
    "method", ["dp-sgld", pytest.param("dp-sgd", marks=slow), pytest.param("dp-bbp", marks=slow), "dp-mc-dropout"]
)
def test_every_kind_of_posterior_is_published_whole(tmp_path: Path, method: str) -> None:
    options = clinic(tmp_path) | {"method": method, "epochs": 2, "ema": None}
    config = resolve(options)
    description = describe(config)
    examples = description.inputs.read(config.data, config.classes)
    train(config)
    Path(config.out).rename(tmp_path / "first")
    with torch.random.fork_rng():
        loop = Loop(
            config, description, examples, tmp_path / "first"
        )  # goes on at the end, so it holds the final state
        loop.train(None, lambda line, step: None)
    loop.close()
    ours = loop.learner.predict(examples.inputs, config.samples, generator=torch.Generator().manual_seed(0))
    theirs = load(tmp_path / "first").predict(examples.inputs)
    assert torch.equal(ours.probs, theirs.probs)
    assert (tmp_path / "first" / "posterior.json").exists() == (method in ("dp-sgld", "dp-bbp"))


def test_the_model_description_does_not_need_a_single_row(tmp_path: Path) -> None:
    config = resolve(clinic(tmp_path))
    full = describe(config)
    write_csv(tmp_path / "train.csv", [])
    assert describe(config) == full
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(9, 4)), y=np.zeros(9))
    np.savez(tmp_path / "b.npz", x=np.zeros((0, 4)), y=np.zeros(0))
    base = {
        "epsilon": 1.0,
        "delta": 1e-4,
        "dataset_size": 9,
        "classes": ["0", "1"],
        "value_bounds": {"min": 0, "max": 1},
    }
    one, other = (describe(resolve({**base, "data": str(tmp_path / name)})) for name in ("a.npz", "b.npz"))
    assert one == other


def test_other_rows_change_neither_the_preprocessing_nor_model_json(whole: Any, tmp_path: Path) -> None:
    """Half of the training rows replaced by absurd ones: the others are encoded to the same bits, the files are the same."""
    options, _ = whole
    table = rows(300)
    absurd = [[1e12, "lots", "z", "", "no"] if i % 2 else row for i, row in enumerate(table)]
    changed = options | {"data": str(write_csv(tmp_path / "train.csv", absurd)), "out": str(tmp_path / "run")}
    with pytest.raises(DpivonError, match="dose: 150 of 300 cells are no numbers"):
        train(resolve(changed))
    train(resolve(changed), proceed=True)
    files = [Path(o["out"]) / "model" / "model.json" for o in (options, changed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    one, other = (describe(resolve(o)).inputs.read(o["data"], ("yes", "no")) for o in (options, changed))
    assert torch.equal(one.inputs[::2], other.inputs[::2])
    assert not torch.equal(one.inputs[1::2], other.inputs[1::2])
    summaries = [json.loads((Path(o["out"]) / "summary.json").read_text()) for o in (options, changed)]
    assert all(
        summaries[0][key] == summaries[1][key] for key in ("epsilon", "public_inputs", "choices_not_made", "task")
    )


def test_the_number_of_rows_is_never_counted(whole: Any, tmp_path: Path) -> None:
    """Fewer or more rows than N change neither q, nor σ, nor the number of steps."""
    options, summary = whole
    for n in (20, 400):
        data = write_csv(tmp_path / f"{n}.csv", rows(n))
        other = {"data": str(data), "out": str(tmp_path / str(n)), "test": None, "epochs": 4}
        found = train(resolve(options | other), proceed=True)
        for key in ("steps", "noise_multiplier", "sampling_rate", "dataset_size", "epsilon"):
            assert found[key] == summary[key]


def test_mistakes_are_found_before_anything_is_written(tmp_path: Path) -> None:
    options = clinic(tmp_path)
    table = rows(300)
    table[290][4] = "perhaps"
    write_csv(tmp_path / "bad.csv", table)
    for change, words in (
        ({"data": str(tmp_path / "bad.csv")}, "'perhaps' of row 291"),
        ({"test": str(tmp_path / "bad.csv")}, "'perhaps' of row 291"),
        ({"heldout": str(tmp_path / "none.csv")}, "^heldout=.*does not exist"),
        ({"test": str(tmp_path)}, "^test=.*of the kind image"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"test": str(tmp_path / ".." / tmp_path.name / "train.csv")}, "^test=.*is the training data"),
        ({"heldout": options["data"]}, "^heldout=.*is the training data"),
        ({"out": str(tmp_path / "test.csv" / "run")}, "^out=.*cannot be made|is a file"),
        ({"ignore": []}, "neither range nor categories"),
        ({"target": "wellness"}, "target='wellness': is not a column"),
        ({"columns": {"weight": {"min": 0, "max": 1}}}, "columns='weight': is not a column"),
        ({"options": {"beta7": 1.0}}, "beta7"),
    ):
        if "ignore" in change:
            (tmp_path / "schema.yaml").write_text((tmp_path / "schema.yaml").read_text().replace("[note]", "[]"))
        with pytest.raises(DpivonError, match=words):
            train(resolve(options | change))
        assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "ledger.jsonl").exists()
        if "ignore" in change:
            clinic(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"jitter": 0.25}, r"^jitter=0\.25: is not an option"), ({"beta1": 2.0}, "^beta1=2")],
)
def test_an_option_that_a_method_has_not_leaves_the_folder_free(tmp_path: Path, options: Any, words: str) -> None:
    """The folder had remembered it, and what was mended then was another run that could not have it."""
    config = resolve({**clinic(tmp_path), "method": "dp-steady", "options": options})
    with pytest.raises(DpivonError, match=words):
        train(config)
    assert not Path(config.out).exists()


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    options = clinic(tmp_path)
    with pytest.raises(DpivonError, match="is not empty and holds no run"):
        train(resolve(options | {"out": str(tmp_path)}))
    with pytest.raises(DpivonError, match="is a file"):
        train(resolve(options | {"out": str(tmp_path / "test.csv")}))


@pytest.mark.slow
def test_images_end_to_end(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for part, n in (("train", 30), ("test", 20)):
        for i in range(n):
            for name, level in (("dark", 60), ("light", 190)):
                folder = tmp_path / part / name
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draw.integers(level - 50, level + 50, (9, 11), dtype=np.uint8)).save(
                    folder / f"{i}.png"
                )
    summary = train(
        resolve(
            {"data": str(tmp_path / "train"), "test": str(tmp_path / "test"), "classes": ["dark", "light"], "image_size": 8,
             "channels": 1, "epsilon": 8.0, "delta": 1e-3, "dataset_size": 60, "epochs": 10, "out": str(tmp_path / "run"),
             "method": "dp-adam"}
        )
    )  # fmt: skip
    assert summary["metrics"]["mc_accuracy"] > 0.9
    assert summary["task"]["network"] == "small"
    with np.load(tmp_path / "run" / "test.npz", allow_pickle=False) as test:
        assert test["images"].shape == (32, 8, 8, 3)
        assert test["images"].dtype == np.uint8
        entropy = -(test["probabilities"] * np.log(np.maximum(test["probabilities"], 1e-30))).sum(1)
        shown = entropy[test["image_index"]]
        assert shown[:16].max() <= np.sort(entropy)[16]
        assert shown[16:].min() >= np.sort(entropy)[-17]


def test_arrays_end_to_end(tmp_path: Path) -> None:
    """Zeros and ones among scikit-learn's digits: 85 % at ε = 4."""
    digits = pytest.importorskip("sklearn.datasets").load_digits(n_class=2)
    for name, part in (("a", slice(0, 300)), ("b", slice(300, None))):
        np.savez(tmp_path / f"{name}.npz", x=digits.data[part], y=digits.target[part])
    summary = train(
        resolve(
            {"data": str(tmp_path / "a.npz"), "test": str(tmp_path / "b.npz"), "classes": ["0", "1"], "epsilon": 4.0,
             "value_bounds": {"min": 0, "max": 16}, "delta": 1e-4, "dataset_size": 300, "batch_size": 50, "epochs": 4,
             "lr": 0.5, "out": str(tmp_path / "run")}
        )
    )  # fmt: skip
    assert summary["metrics"]["mc_accuracy"] > 0.85
    assert summary["epsilon"] <= 4.0


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_a_tighter_accountant_calibrates_less_noise(whole: Any, tmp_path: Path, accountant: str) -> None:
    found = train(resolve(whole[0] | {"accountant": accountant, "out": str(tmp_path / "run")}))
    said = {name: found[name] for name in ("dataset_size", "epochs", "delta", "target_epsilon")}
    loose = dpivon.budget(**said, batch_size=found["expected_batch_size"], accountant="rdp")
    assert found["noise_multiplier"] < 0.95 * loose.noise_multiplier
    assert 3.9 < found["epsilon"] == found["epsilon_by_accountant"][accountant] <= 4.0


def test_nothing_published_can_be_code(whole: Any) -> None:
    folder = Path(whole[0]["out"]) / "model"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    assert dpivon.Posterior.load(folder / "posterior.safetensors").num_parameters > 0
    told = json.loads((folder / "model.json").read_text())
    assert told["inputs"]["columns"]["age"] == {"min": 0.0, "max": 100.0}
    assert HEADER[3] not in told["inputs"]["columns"]
    assert "seed" not in json.dumps(told)


def test_a_description_that_asks_for_all_memory_is_refused(whole: Any, tmp_path: Path) -> None:
    for path in (Path(whole[0]["out"]) / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    told = json.loads((tmp_path / "model.json").read_text())
    told["network"]["hidden"] = [65536, 65536, 65536, 65536]
    (tmp_path / "model.json").write_text(json.dumps(told))
    with pytest.raises(DpivonError, match=r"describes a network of 1\d+ weights, and its posterior has"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["{", '{"format": 2}', "[]", '{"network": {"kind": "os.system"}}'])
def test_a_damaged_description_is_refused(whole: Any, tmp_path: Path, damage: str) -> None:
    for path in (Path(whole[0]["out"]) / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.json").write_text(damage)
    with pytest.raises(DpivonError, match="model"):
        load(tmp_path)
    with pytest.raises(DpivonError, match="holds no published model"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("state", ["there", "broken"])
def test_the_report_is_asked_for_and_cannot_spoil_a_finished_run(state: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()
    built: list[Path] = []
    monkeypatch.setattr(running, "build", lambda folder: 1 / 0 if state == "broken" else built.append(folder))
    said: list[str] = []
    watcher = Watcher()
    watcher.say = said.append  # type: ignore[method-assign]
    running._report(tmp_path, watcher)
    assert built == ([tmp_path] if state == "there" else [])
    assert bool(said) == (state != "there")
    assert all("report.html was not written" in line for line in said)
