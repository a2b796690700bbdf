"""Tables of the pages against the registry, and against the files that measurements left."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from docs_pages import DOCS, ROOT

from dpivon import budget
from dpivon.errors import pip_line
from dpivon.methods import METHODS

METHODS_PAGE = (DOCS / "methods.md").read_text()
RUNS = json.loads((ROOT / "experiments" / "strong_privacy" / "results" / "choosing.json").read_text())


def test_the_tables_say_what_the_registry_says() -> None:
    lines = METHODS_PAGE.splitlines()
    for m in METHODS.values():
        assert f"| `{m.name}` | {m.optimises} | {m.posterior} | {m.predicts} | {m.reference} |" in lines
        assert any(line.startswith(f"| `{m.name}` |") and line.endswith(f"| {m.choose} |") for line in lines), m.name


def test_the_quickstart_has_the_epsilon_of_the_demo() -> None:
    plan = budget(dataset_size=1297, batch_size=256, epochs=40, delta=1e-4, target_epsilon=4.0, accountant="rdp")
    assert f"{plan.epsilon:.3f}" in (DOCS / "quickstart.md").read_text()


def test_the_same_line_has_the_same_step_size_on_every_page() -> None:
    line = re.compile(r"IVON\(\w+\.parameters\(\), lr=([\d.]+), ess=len\(train_set\)\)")
    found = {page.name: line.findall(page.read_text()) for page in [ROOT / "README.md", *DOCS.glob("*.md")]}
    assert {"README.md", "quickstart.md", "from-opacus.md"} <= {name for name, sizes in found.items() if sizes}
    assert {size for sizes in found.values() for size in sizes} == {"3.0"}


def test_every_extra_of_an_integration_is_named() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras.keys() - {"dev", "docs", "fuzz"}:  # those are for working on the library
        assert f"| `{pip_line(extra)}` |" in (DOCS / "integrations.md").read_text(), extra
    assert extras["all"] == [f"dpivon[{','.join(e for e in extras if e not in ('all', 'dev', 'docs', 'fuzz'))}]"]


def test_sentences_about_the_width() -> None:
    """Three products of N_ess and h₀ that are alike have one width and one NLL, and draws never beat the mean."""
    width = {(r["value"], r["h0_"]): r for r in RUNS["rows"] if r["sweep"] == "width"}
    for size, h0 in ((0.1, 10.0), (1.0, 1.0), (10.0, 0.1)):
        assert f"{width[size, h0]['std']:.3f}" == f"{width[1.0, 1.0]['std']:.3f}"
        assert width[size, h0]["point_nll"] == pytest.approx(width[1.0, 1.0]["point_nll"], abs=0.01)
    assert all(r["drawn_nll"] > r["point_nll"] - 0.001 for r in width.values() if r["std"] < 0.8)
