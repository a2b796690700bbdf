"""The recipe beside the paper's methods with what the recipe has: its page from made-up rows."""

from __future__ import annotations

from typing import Any

import pytest
from experiments.paper.provenance import provenance
from experiments.strong_privacy.__main__ import PAPER, RESULTS
from experiments.strong_privacy.attribution import page, tables

from dpivon.study.results import table

FOLDER = RESULTS / "attribution"


def rows(method: str, accuracies: dict[float, list[float]], lr: float = 0.001, **more: Any) -> list[dict[str, Any]]:
    found = []
    for sigma, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            own = {"method": method, "batch_size": 512, "noise_multiplier": sigma, "max_grad_norm": 10.0, "seed": seed}
            scores = {"accuracy": accuracy, "tempered_nll": 2.0 - accuracy, "tempered_ece": 0.01}
            found.append(own | scores | {"lr": lr, "epsilon": 1.0, "code": "abc", "commit": "abc1234"} | more)
    return found


@pytest.mark.parametrize(("gain", "verdict"), [(0.03, "its points are its own"), (0.001, "not shown to be its own")])
def test_the_bar_is_the_interval_against_the_better_baseline_of_each_cell(gain: float, verdict: str) -> None:
    sgd = {5.0: [0.50, 0.51, 0.49], 15.0: [0.40, 0.41, 0.40]}
    adam = {5.0: [0.52, 0.53, 0.50], 15.0: [0.36, 0.37, 0.38]}
    ours = {5.0: [x + gain for x in (0.52, 0.53, 0.50)], 15.0: [x + gain for x in (0.40, 0.42, 0.39)]}
    tried = [*rows("dp-sgd", sgd, 0.001), *rows("dp-sgd", sgd, 0.003)]
    text = page([*rows("dp-sgd", sgd), *rows("dp-adam", adam)], rows("dp-steady", ours), rows("dp-sgd", sgd), tried)
    text = " ".join(text.split())
    assert verdict in text
    assert f"{100 * gain:+.2f} points" in text
    assert "beyond which a better one may lie: DP-SGD at σ = 5, DP-SGD at σ = 15." in text
    assert "Commit abc1234." in text


def test_a_page_says_how_many_seeds_each_method_has() -> None:
    more = {"hardware": "a GPU", "torch": "2", "seconds": 60.0, "id": ""}
    three, one = rows("dp-ivon-gradsq", {5.0: [0.5, 0.5, 0.5]}, **more), rows("dp-sgd", {5.0: [0.5]}, **more)
    assert "3 runs, 3 seeds a cell (±" in provenance(three, None)
    assert "4 runs, 1 seed a cell of DP-SGD, 3 seeds a cell of DP-IVON-Gradsq (±" in provenance([*three, *one], None)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the study has not been run")
def test_the_committed_page_follows_from_its_tables() -> None:
    tuning = table.read(FOLDER.with_name("attribution-tuning") / "tuning.csv")
    assert page(*tables(RESULTS, PAPER), tuning) == (FOLDER / "attribution.md").read_text()
