"""YAML that people write, or that came from a stranger."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dpivon.errors import ArgumentError
from dpivon.report.run_folder import _config
from dpivon.sources.schema import read_schema
from dpivon.study.plan import config as studies
from dpivon.train import config as trainings
from dpivon.yaml_files import parse_yaml

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
READERS = {
    "study": studies.resolve,
    "schema": read_schema,
    "config": lambda path: trainings.resolve({}, path),
    "report": _config,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_aliases_are_refused_wherever_yaml_is_read(reader, tmp_path: Path) -> None:
    """Ten lines stood for 3.5 billion values, and took 19 s to refuse."""
    path = tmp_path / "config.yaml"
    path.write_text(LAUGHS)
    with pytest.raises(ArgumentError, match=r"\*a0 is an alias, which is not read; write its value out"):
        reader(path)


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: 1}\nc:\n  <<: *a", "[&x 1, *x]"])
def test_every_kind_of_alias_is_one(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="is an alias"):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["x: " + "1:" * 500 + "1", "x: " + "9" * 500, "a: " + "b" * 1_000_000])
def test_what_takes_long_to_read_is_refused_by_its_length(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="characters"):
        parse_yaml(text)


def test_the_rest_is_read_as_ever() -> None:
    text = "a: &unused [1, 2.5, 1e-3, null, yes]\nb: {c: 12:30, d: text}\ne: 'long " + "text" * 500 + "'\n"
    assert parse_yaml(text) == yaml.safe_load(text)
