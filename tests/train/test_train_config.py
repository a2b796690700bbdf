"""A file, flags over it, a schema under both; every wrong value is one sentence."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from clinic import clinic
from dpivon import DpivonError, budget
from dpivon.sources.columns import CSVFormat
from dpivon.sources.schema import draft, draft_from_sample, read_schema
from dpivon.train import config as configs
from dpivon.train import resolve
from dpivon.train.networks import choose

BASE: dict[str, Any] = {"data": "x.csv", "epsilon": 2.0, "delta": 1e-4, "dataset_size": 800, "classes": ["a", "b"]}


def refused(words: str, **flags: Any) -> None:
    with pytest.raises(DpivonError, match=words) as caught:
        resolve({**BASE, **flags})
    assert "\n" not in str(caught.value)


def test_flags_override_the_file_and_both_the_schema(tmp_path: Path) -> None:
    options = clinic(tmp_path)
    file = tmp_path / "run.yaml"
    told = {k: v for k, v in options.items() if k not in ("epsilon", "schema")}
    file.write_text(yaml.safe_dump({**told, "epsilon": 9, "schema": options["schema"], "classes": ["no", "yes"]}))
    config = resolve({"epsilon": 1.5, "target": None, "columns": {"age": {"min": 5, "max": 6}}}, file)
    assert (config.epsilon, config.classes, config.target, config.ignore) == (1.5, ("no", "yes"), "ill", ("note",))
    assert config.columns["age"].min == 5
    assert config.columns["sex"].categories == ("f", "m")
    assert list(config.columns) == ["age", "dose", "sex"]


def test_what_is_written_is_what_is_read_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    config = resolve({**clinic(tmp_path), "seed": 3, "options": {"hess_init": 0.5, "curvature": "gradsq"}})
    configs.write(config, tmp_path)
    assert configs.read(tmp_path) == config == resolve({}, tmp_path / "config.yaml")
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600


def test_defaults_are_functions_of_declared_numbers() -> None:
    config = resolve(BASE)  # the data does not even exist
    assert (config.batch_size, config.epochs, config.method, config.lr) == (100, 40, "dp-steady", 3.5)
    assert resolve({**BASE, "delta": "1e-4"}) == config  # as YAML reads it
    config = resolve({**BASE, "method": "dp-ivon-gradsq"})
    plan = budget(dataset_size=800, batch_size=100, epochs=40, delta=1e-4, target_epsilon=2.0, accountant="rdp")
    assert config.lr == pytest.approx(min(0.5, 0.5 * 100 / (plan.noise_multiplier * plan.steps**0.5)))
    assert resolve({**BASE, "method": "dp-ivon-gradsq", "epsilon": 0.3}).lr < config.lr
    assert resolve({**BASE, "method": "dp-adam"}).lr == 0.01
    assert resolve({**BASE, "dataset_size": 10, "delta": 1e-3}).batch_size == 10
    for start in ("images-32", "strokes-8", __file__):  # the last is a prior of one's own
        config = resolve({**BASE, "start_from": start})
        assert (config.lr, config.last_layer) == (3.5, True)
    assert resolve({**BASE, "start_from": "images-32", "last_layer": False}).lr == 1.75
    assert resolve({**BASE, "start_from": "strokes-8", "last_layer": False}).lr == 0.45
    assert resolve({**BASE, "start_from": __file__, "last_layer": False}).lr == 1.75
    config = resolve({**BASE, "start_from": "images-32", "method": "dp-adam"})
    assert (config.lr, config.last_layer) == (0.01, False)
    assert resolve({**BASE, "start_from": "images-32", "lr": 3.0}).lr == 3.0
    assert resolve({**BASE, "start_from": "a-run-that-is-gone"}).lr == 3.5


@pytest.mark.parametrize("name", ["data", "epsilon", "delta", "dataset_size", "classes"])
def test_what_is_needed_is_asked_for(name: str) -> None:
    refused(f"^{name}=None: is needed", **{name: None})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"epsilon": 0}, "epsilon=0: .*greater than 0"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"epsilon": "much"}, "epsilon='much'"),
        ({"delta": 0.5}, "^delta=0.5: 0.5 is not below 1/N"),
        ({"delta": 0}, "delta=0"),
        ({"dataset_size": 0}, "dataset_size=0"),
        ({"dataset_size": 2.5}, "dataset_size=2.5"),
        ({"classes": ["a"]}, "classes"),
        ({"classes": ["a", "a"]}, "named twice"),
        ({"classes": [True, False]}, "put it in quotes"),
        ({"batch_size": 801}, "larger than N = 800"),
        ({"method": "ivon"}, "'ivon' is not one of dp-sgd"),
        ({"method": "magic"}, "'magic' is not one of"),
        ({"network": "vgg"}, "'vgg' is not one of auto"),
        ({"channels": 2}, "channels"),
        ({"image_size": 2}, "image_size=2"),
        ({"columns": {"age": {"min": 3, "max": 3}}}, "min must be less than max"),
        ({"columns": {"age": {"min": 3}}}, "columns.age.max=None: field required"),
        ({"columns": {"age": "old"}}, "columns.age"),
        ({"columns": {"age": {"categories": []}}}, "columns.age"),
        ({"columns": {"age": {"categories": ["a", "a"]}}}, "a category is named twice"),
        ({"task": "ranking"}, "task='ranking': is not one of"),
        ({"mystery": 1}, "mystery=1"),
        ({"accountant": "guess"}, "accountant='guess'"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_wrong_values_are_refused(flags: dict[str, Any], words: str) -> None:
    refused(words, **flags)


@pytest.mark.parametrize("content", ["- a list", "{", "epsilon: [1", "\x00"])
def test_files_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(DpivonError, match="config="):
        resolve(BASE, tmp_path / "run.yaml")
    with pytest.raises(DpivonError, match="does not exist"):
        resolve(BASE, tmp_path / "none.yaml")


def test_a_draft_has_names_only_and_is_refused_until_it_is_filled_in(tmp_path: Path) -> None:
    text = draft(["age", "sex: it's", "ill"], "ill")
    (tmp_path / "a.yaml").write_text(text)
    raw = yaml.safe_load(text)
    assert list(raw["columns"]) == ["age", "sex: it's"]
    assert raw["columns"]["age"] == {"min": None, "max": None}
    with pytest.raises(DpivonError, match=r"^columns\.age: is not filled in: state min and max, or categories"):
        read_schema(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(text.replace("{min: , max: }", "{min: 0, max: 9}"))
    refused("^classes=None: is needed", schema=str(tmp_path / "b.yaml"), classes=None)
    semicolons = CSVFormat(delimiter=";", decimal=",")
    (tmp_path / "c.yaml").write_text(draft(["patientId", "age", "ill"], "ill", semicolons).replace(": }", ": 1}"))
    assert yaml.safe_load((tmp_path / "c.yaml").read_text())["id"] == "patientId"
    (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text().replace("min: ,", "min: 0,"))
    schema = read_schema(tmp_path / "c.yaml")
    assert (schema.delimiter, schema.decimal, list(schema.columns)) == (";", ",", ["age"])
    given = resolve(BASE | {"schema": str(tmp_path / "c.yaml"), "delimiter": "\\t"})
    assert (given.delimiter, given.decimal, given.id) == ("\t", ",", "patientId")


def test_a_draft_from_a_public_sample_has_its_ranges_and_texts(tmp_path: Path) -> None:
    sample = {
        "age": ["3", "80", ""],
        "sex": ["f", "m", "f"],
        "note": [str(f"p{i}") for i in range(30)],
        "ill": ["no", "yes", "no"],
    }
    text = draft_from_sample(sample, "ill", Path("open.csv"))
    raw = yaml.safe_load(text)
    assert raw["columns"]["age"] == {"min": 3, "max": 80}
    assert raw["columns"]["sex"] == {"categories": ["f", "m"]}
    assert raw["columns"]["note"] == {"min": None, "max": None}
    assert raw["classes"] == ["no", "yes"]
    assert "open.csv" in raw["source"]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((30,), "mlp"),
        ((1, 8, 8), "small"),
        ((3, 32, 32), "paper"),
        ((1, 28, 28), "paper"),
        ((3, 64, 64), "wrn-16-4"),
        ((1, 8, 9), "mlp"),
    ],
)
def test_the_network_follows_from_the_shape_and_takes_it(shape: tuple[int, ...], kind: str) -> None:
    import torch

    network = choose("auto", shape, 3, (8,))
    assert network.kind == kind
    assert network.build()(torch.zeros(2, *shape)).shape == (2, 3)


def test_a_network_that_cannot_take_the_shape_is_refused() -> None:
    with pytest.raises(DpivonError, match="network='paper': cannot take an example of shape 30"):
        choose("paper", (30,), 2, (8,))
