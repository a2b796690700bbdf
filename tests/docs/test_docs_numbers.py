"""Tables of the pages against the registry, and against the files that measurements left."""

from __future__ import annotations

import json
import math
import re
import tomllib
from typing import Any

import pytest
from docs_pages import DOCS, ROOT

from dpivon import budget
from dpivon.errors import pip_line
from dpivon.methods import METHODS

METHODS_PAGE = (DOCS / "methods.md").read_text()
CHOOSING = (DOCS / "choosing.md").read_text()
RUNS = json.loads((ROOT / "experiments" / "strong_privacy" / "results" / "choosing.json").read_text())


def test_the_tables_say_what_the_registry_says() -> None:
    lines = METHODS_PAGE.splitlines()
    for m in METHODS.values():
        assert f"| `{m.name}` | {m.optimises} | {m.posterior} | {m.predicts} | {m.reference} |" in lines
        assert any(line.startswith(f"| `{m.name}` |") and line.endswith(f"| {m.choose} |") for line in lines), m.name


def test_the_costs_are_those_that_were_measured() -> None:
    together, later = (
        json.loads((ROOT / "benchmarks" / "results" / f"methods-cpu{part}.json").read_text())["rows"]
        for part in ("", "-calm")
    )
    for name, row in {**later, **together}.items():
        if name in METHODS:
            said = f"| `{name}` | {row['time']:.2f} | {row['memory']:.2f} | {row['floats']:.0f} |"
            assert said in METHODS_PAGE, said
    assert f"DP-Adam came out at {later['dp-adam']['time']:.2f} there" in " ".join(METHODS_PAGE.split())


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


def best(sweep: str, **said: float) -> dict[str, Any]:
    rows = [r for r in RUNS["rows"] if r["sweep"] == sweep and all(r[k] == v for k, v in said.items())]
    return min(rows, key=lambda r: r["point_nll"])


def score(row: dict[str, Any]) -> str:
    return f"{100 * row['point_accuracy']:.1f} % | {row['point_nll']:.2f} ± {row['point_nll_std']:.2f} |"


@pytest.mark.parametrize("bound", [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0])
def test_choosing_the_bound(bound: float) -> None:
    row = best("bound", value=bound)
    assert f"| {bound:g} | {row['lr_']:g} | {row['lr_'] * bound:g} | {score(row)}" in CHOOSING


@pytest.mark.parametrize("batch", [32, 64, 128, 256, 512, 1024])
def test_choosing_the_batch(batch: int) -> None:
    row = best("batch", value=batch)
    steps, sigma = 20 * math.ceil(1297 / batch), row["noise_multiplier"]
    assert f"| {batch} | {steps} | {sigma:.2f} | {sigma / batch:.4f} | {row['lr_']:g} | {score(row)}" in CHOOSING


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 16.0])
def test_choosing_the_learning_rate(epsilon: float) -> None:
    row = best("lr", epsilon=epsilon)
    assert f"| {epsilon:g} | {row['noise_multiplier']:.2f} | {row['value']:g} | {score(row)}" in CHOOSING


def test_sentences_about_the_noise_and_the_width() -> None:
    text = " ".join(CHOOSING.split())
    sigma = {r["value"]: r for r in RUNS["rows"] if r["sweep"] == "sigma"}
    price = {p["sigma"]: p["epsilon"] for p in RUNS["prices"]["256"]}
    assert f"σ = 0.5 costs ε = {price[0.5]:.0f} and buys {100 * sigma[0.5]['point_accuracy']:.1f} %" in text
    assert f"σ = 2 costs {price[2.0]:.1f} and gives {100 * sigma[2.0]['point_accuracy']:.1f} %" in text
    for s in (8.0, 16.0):
        assert f"{100 * sigma[s]['point_accuracy']:.1f} % at σ = {s:g} (ε = {price[s]:.2f})" in text
    width = {(r["value"], r["h0_"]): r for r in RUNS["rows"] if r["sweep"] == "width"}
    for size, h0 in ((0.1, 10.0), (1.0, 1.0), (10.0, 0.1)):
        assert f"{width[size, h0]['std']:.3f}" == "0.028"
        assert f"{width[size, h0]['point_nll']:.2f}" in ("0.25", "0.26")
    assert all(r["drawn_nll"] > r["point_nll"] - 0.001 for r in width.values() if r["std"] < 0.8)
    again = [
        next(r for r in RUNS["rows"] if r["sweep"] == sweep and all(r[k] == v for k, v in said.items()))
        for sweep, said in (
            ("lr", {"epsilon": 4.0, "value": 3.0}),
            ("batch", {"value": 256, "lr_": 3.0}),
            ("bound", {"value": 1.0, "lr_": 3.0}),
        )
    ]
    assert "NLL {:.2f}, {:.2f} and {:.2f}".format(*sorted(r["point_nll"] for r in again)) in text
    low, high = min(r["point_accuracy"] for r in again), max(r["point_accuracy"] for r in again)
    assert f"accuracy {100 * low:.1f} to {100 * high:.1f} %" in text
    assert f"{RUNS['runs']} runs" in text
    assert f"{RUNS['seconds']:.0f} s" in text
