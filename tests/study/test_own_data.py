"""Studies over a user's own data set and network: arrays, a table with its schema, images, import paths."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tiny_study import FAST

from dpivon.errors import ArgumentError
from dpivon.study.plan.config import load_own, resolve
from dpivon.study.plan.data import load_data, train_size
from dpivon.study.plan.plan import noise_seed, read_plan
from dpivon.study.results import table
from dpivon.study.results.folder import merge
from dpivon.study.run.runner import run_study

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs" / "studies.md"
MODULE = """
import torch
from torch import nn

def pair(n=40):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()

def four():
    return *pair(30), *pair(10)

def one():
    return torch.zeros(3)

def net(shape, classes, width=4):
    return nn.Sequential(nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, classes))

def narrow(shape):
    return nn.Linear(shape[0], 1)
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Resolve a small study over ``dataset`` and ``network``, in a folder that holds the user's module."""
    (tmp_path / "own_study.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_study", raising=False)

    def make(dataset, network="mlp", **more):
        values = {"name": "own", "epochs": 1, "delta": 1e-3, "mc_samples": 2, "dataset": dataset, "network": network}
        values["grid"] = {"batch_size": [10], "noise_multiplier": [1], "max_grad_norm": [1]}
        values["methods"] = [{"method": "dp-sgd", "lr": 0.1}, {"method": "dp-ivon-gradsq", "lr": 0.1}]
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / "s.yaml").write_text(yaml.safe_dump(values | more))
        return resolve(tmp_path / "files" / "s.yaml")

    (tmp_path / "files").mkdir()
    yield make
    sys.modules.pop("own_study", None)


def arrays(path, n=40, shape=(1, 8, 8), **more):
    draw = np.random.default_rng(0)
    y = np.arange(n) % 3
    values = {"x": draw.integers(0, 256, (n, *shape)).astype(np.uint8), "y": y}
    np.savez(path, **(values | more))
    return values


def rows(plan, out):
    assert run_study(plan, out, FAST).finished == len(plan.runs)
    found = table.read(out / "runs.csv")
    assert all(0 <= row["accuracy"] <= 1 for row in found)
    return found


def test_a_study_over_arrays_runs_and_refuses_other_data(study, tmp_path):
    test = {"x_test": np.zeros((6, 1, 8, 8), np.uint8), "y_test": np.arange(6) % 3}
    given = arrays(tmp_path / "files" / "scans.npz", **test)
    plan = study({"path": "scans.npz", "value_bounds": {"min": 0, "max": 255}}, "small")
    assert (plan.dataset, plan.outputs, plan.data.examples, plan.data.shape) == ("scans.npz", 3, 40, [1, 8, 8])
    assert plan.data.declared["path"] == str(tmp_path / "files" / "scans.npz")
    x, y, test_x, test_y = load_own(plan.data, tmp_path)
    torch.testing.assert_close(x, torch.from_numpy(given["x"]).float() / 127.5 - 1)
    assert (y.tolist(), test_y.tolist()) == (given["y"].tolist(), [0, 1, 2, 0, 1, 2])
    assert (test_x == -1).all()
    found = rows(plan, tmp_path / "out")
    assert {(r["dataset"], r["network"], r["train_size"]) for r in found} == {("scans.npz", "small", 40)}

    arrays(tmp_path / "files" / "scans.npz", **(test | {"y_test": np.zeros(6, np.int64)}))
    with pytest.raises(ArgumentError, match=r"dataset='.*scans.npz': is not what the study was planned on"):
        load_data(plan, tmp_path, CPU)
    other = study({"path": "scans.npz", "value_bounds": {"min": 0, "max": 255}}, "small")
    with pytest.raises(ArgumentError, match="holds results on other data"):
        run_study(other, tmp_path / "out", FAST)
    rows(other, tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"holds results on other data .* than"):
        merge(tmp_path / "out", [tmp_path / "other"])
    assert {noise_seed(plan, r) for r in plan.runs}.isdisjoint(noise_seed(other, r) for r in other.runs)


def test_a_plan_is_the_same_wherever_its_files_are(study, tmp_path):
    arrays(tmp_path / "files" / "scans.npz")
    plan = study({"path": "scans.npz", "test_fraction": 0.25})
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "files" / "scans.npz").rename(tmp_path / "elsewhere" / "scans.npz")
    data = load_data(read_plan(tmp_path / "plan.json"), tmp_path / "elsewhere", CPU)
    assert (data.size, len(data.eval_labels)) == (30, 10)
    moved = study({"path": "../elsewhere/scans.npz", "test_fraction": 0.25})
    assert moved.data.identity == plan.data.identity
    raw = json.loads((tmp_path / "plan.json").read_text())
    for change in (
        {"data": 3},
        *({"data": raw["data"] | {key: 0}} for key in ("declared", "digest", "examples")),
        {"data": None},
        {"arguments": 3},
        {"dataset": "digits"},
    ):
        (tmp_path / "bad.json").write_text(json.dumps(raw | change))
        with pytest.raises(ArgumentError):
            read_plan(tmp_path / "bad.json")


def test_the_test_set_is_a_public_fraction_and_tuning_never_sees_it(study, tmp_path):
    arrays(tmp_path / "files" / "scans.npz", x=np.arange(80.0).reshape(40, 2))
    plans = [study({"path": "scans.npz", "test_fraction": 0.25}, split=split) for split in ("final", "tuning")]
    final, tuning = (load_data(plan, tmp_path, CPU) for plan in plans)
    whole = set(range(0, 80, 2))
    test, train = ({int(x[0]) for x in part} for part in (final.eval_images, final.images))
    assert (len(test), test | train, test & train) == (10, whole, set())
    assert {int(x[0]) for part in (tuning.images, tuning.eval_images) for x in part} == train
    assert (tuning.size, len(tuning.eval_labels)) == (27, 3)
    for plan, data in zip(plans, (final, tuning), strict=True):
        assert train_size(plan.dataset, plan.split, (), plan.data) == data.size
    other = load_data(study({"path": "scans.npz", "test_fraction": 0.25, "split_seed": 1}), tmp_path, CPU)
    assert {int(x[0]) for x in other.eval_images} != test


PATIENTS = {"path": "patients.csv", "schema": "patients.yaml", "dataset_size": 40, "test_fraction": 0.2}


def patients(folder):
    lines = [f"{age},{'fm'[age % 2]},{'yes' if age > 60 else 'no'}" for age in range(40, 80)]
    (folder / "patients.csv").write_text("\n".join(["age,sex,ill", *lines]) + "\n")
    columns = {"age": {"min": 0, "max": 120}, "sex": {"categories": ["f", "m"]}}
    schema = {"target": "ill", "classes": ["no", "yes"], "columns": columns, "source": "made up"}
    (folder / "patients.yaml").write_text(yaml.safe_dump(schema))


def test_a_study_over_a_table_with_its_schema(study, tmp_path):
    patients(tmp_path / "files")
    grid = {"batch_size": [8], "epsilon": [2], "max_grad_norm": [1]}
    plan = study(PATIENTS, {"name": "mlp", "arguments": {"hidden": [4]}}, grid=grid)
    assert (plan.data.examples, plan.outputs, plan.data.shape) == (32, 2, [6])
    assert plan.data.declared["columns"]["age"] == {"min": 0.0, "max": 120.0}  # the schema's content is in the plan
    found = rows(plan, tmp_path / "out")
    assert {row["network"] for row in found} == {'mlp {"hidden": [4]}'}
    assert all(1.9 < row["epsilon"] <= 2 for row in found)  # calibrated to the declared N without the test set


def test_a_study_over_an_image_folder(study, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, n in (("photos", 6), ("photos-test", 2)):
        for i, name in enumerate(("cat", "dog")):
            (tmp_path / "files" / part / name).mkdir(parents=True)
            for j in range(n):
                image.new("L", (8, 8), 100 * i + j).save(tmp_path / "files" / part / name / f"{j}.png")
    own = {"path": "photos", "test": "photos-test", "classes": ["cat", "dog"], "image_size": 8, "channels": 1}
    plan = study(own | {"dataset_size": 12}, "small")
    data = load_data(plan, tmp_path, CPU)
    assert (data.size, data.eval_labels.tolist(), tuple(data.images.shape[1:])) == (12, [0, 0, 1, 1], (1, 8, 8))
    with pytest.raises(ArgumentError, match=r"dataset_size=13: .*photos has 12 examples"):
        study(own | {"dataset_size": 13}, "small")


def test_a_study_over_import_paths(study, tmp_path):
    own = {"path": "own_study:pair", "arguments": {"n": 50}, "test_fraction": 0.2}
    plan = study(own, {"name": "own_study:net", "arguments": {"width": 5}})
    assert (plan.data.examples, plan.outputs, len(plan.architecture)) == (40, 2, 16)
    found = rows(plan, tmp_path / "out")
    assert {(r["dataset"], r["network"]) for r in found} == {("own_study:pair", 'own_study:net {"width": 5}')}
    assert study("own_study:four", "own_study:net").data.examples == 30
    assert noise_seed(plan, plan.runs[0]) != noise_seed(study(own, "own_study:net"), plan.runs[0])
    sys.modules["own_study"].net = lambda shape, classes, width: torch.nn.Linear(shape[0], classes)
    with pytest.raises(ArgumentError, match="network='own_study:net': is not what the study was planned with"):
        run_study(plan, tmp_path / "again", FAST)


def test_text_is_whole_numbers(study, tmp_path):
    np.savez(tmp_path / "files" / "text.npz", x=np.arange(80).reshape(20, 4), y=np.arange(20) % 2)
    arguments = {"vocabulary": 80, "width": 8, "heads": 2, "depth": 1}
    rows(study({"path": "text.npz", "test_fraction": 0.5}, {"name": "text", "arguments": arguments}), tmp_path / "out")


@pytest.mark.parametrize(
    ("dataset", "network", "words"),
    [
        ("imagenet", "mlp", "dataset='imagenet': is neither a built-in data set nor a path nor an import path"),
        ("nowhere.npz", "mlp", "nowhere.npz': does not exist"),
        ({"path": "digits", "test_fraction": 0.1}, "small", "dataset='digits': is built in"),
        ("a.npz", "mlp", "test_fraction=None: leaves no test set of 40 examples"),
        ({"path": "a.npz", "test_fraction": 0.001}, "mlp", "test_fraction=0.001: leaves no test set"),
        ({"path": "b.npz", "test_fraction": 0.5}, "mlp", "test_fraction=0.5: but .*b.npz has a test set"),
        ({"path": "a.npz", "test_fraction": 2}, "mlp", "dataset.test_fraction=2"),
        ({"path": "a.npz", "tests": "b.npz"}, "mlp", "dataset.tests"),
        ({"path": "a.npz", "classes": ["a", "b"], "test_fraction": 0.5}, "mlp", "classes=.*no meaning for arrays"),
        ({"path": "nan.npz", "test_fraction": 0.5}, "mlp", "nan.npz': cannot be used .x is not finite"),
        (
            {"path": "shape.npz", "test_fraction": 0.5},
            "mlp",
            r"shape.npz': cannot be used .x has shape \(4, 2\), and y has \(3,\)",
        ),
        (PATIENTS | {"dataset_size": None}, "mlp", "dataset_size=None: is needed: it is never read off"),
        (PATIENTS | {"dataset_size": 39}, "mlp", "dataset_size=39: .*patients.csv has 40 examples"),
        (PATIENTS | {"test": "patients.csv"}, "mlp", "test='.*patients.csv': is the training data"),
        ({"path": "a.npz", "test": "b.npz"}, "mlp", "test='.*b.npz': has no meaning for arrays"),
        (PATIENTS | {"schema": "none.yaml"}, "mlp", "schema='.*none.yaml': does not exist"),
        ("own_study:missing", "mlp", "dataset='own_study:missing': could not be imported"),
        ("own_study:one", "mlp", "dataset='own_study:one': returned a Tensor"),
        ({"path": "own_study:pair", "arguments": {"m": 1}}, "mlp", "cannot be called with m"),
        ("own_study:four", "own_study:absent", "network='own_study:absent': could not be imported"),
        ("own_study:four", "large", "network='large': is not a known network"),
        ("own_study:four", {"arguments": {}}, "network.name"),
    ],
)
def test_what_is_wrong_is_named(study, tmp_path, dataset, network, words):
    files = tmp_path / "files"
    arrays(files / "a.npz")
    arrays(files / "b.npz", x_test=np.zeros((3, 1, 8, 8)), y_test=np.arange(3))
    np.savez(files / "nan.npz", x=np.full((4, 2), np.nan), y=np.arange(4))
    np.savez(files / "shape.npz", x=np.zeros((4, 2)), y=np.arange(3))
    patients(files)
    with pytest.raises(ArgumentError, match=words):
        study(dataset, network)


def test_a_network_that_does_not_fit_is_named_before_it_trains(study, tmp_path):
    for network, words in (
        ("own_study:narrow", r"returns \(2, 1\) for two examples of 2 classes"),
        ("text", r"cannot take examples of shape \(3,\) and type torch.float32"),
        ("small", "takes square images"),
    ):
        with pytest.raises(ArgumentError, match=words):
            run_study(study("own_study:four", network), tmp_path / "out" / network, FAST)


def test_what_only_built_in_images_have_is_refused(study):
    for more, words in (
        ({"classes": [0, 1]}, "classes=.*selects classes of cifar10"),
        ({"evaluate": {"ood": ["fashion-mnist"]}}, "evaluate: extra inputs are not permitted"),
    ):
        with pytest.raises(ArgumentError, match=words):
            study("own_study:four", **more)


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    blocks = re.findall(r"^```(python|yaml)\n(.*?)^```", DOCS.read_text(), re.S | re.M)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "spirals", raising=False)
    Path("spirals.py").write_text(next(text for kind, text in blocks if kind == "python"))
    values = {}
    for kind, text in blocks:
        values |= yaml.safe_load(text) if kind == "yaml" else {}
    small = {"epochs": 1, "seeds": 1, "grid": {"batch_size": [64], "epsilon": [8], "max_grad_norm": [1]}}
    Path("study.yaml").write_text(yaml.safe_dump(values | small))
    found = rows(resolve(Path("study.yaml")), tmp_path / "out")
    assert {row["train_size"] for row in found} == {300}
    sys.modules.pop("spirals", None)
