"""Every Python block of every page runs, in order, in an empty folder, and does what the page says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_pages import PAGES, fences, run
from torch import nn

from dpivon.durable.ledger import read
from dpivon.errors import pip_line

Names = dict[str, Any]


def accuracy(names: Names, labels: str = "test_y") -> float:
    return float((names["prediction"].label == names[labels]).float().mean())


def readme(names: Names, folder: Path, said: str) -> None:
    printed = re.fullmatch(
        r"epsilon 1\.00, accuracy (0\.\d+)\nsure of \d+% of them, accuracy there ([01]\.\d+)\n", said
    )
    assert printed is not None
    assert 0.99 < names["trained"].predictor.epsilon <= 1.0
    assert float(printed[1]) > 0.8
    assert float(printed[2]) > float(printed[1])


def index(names: Names, folder: Path, said: str) -> None:
    assert 7.9 < names["fitted"].epsilon <= 8.0
    assert (names["prediction"].label == names["y"][1400:]).float().mean() > 0.6


def quickstart(names: Names, folder: Path, said: str) -> None:
    assert names["engine"].get_epsilon(1e-4) == pytest.approx(names["plan"].epsilon)
    assert accuracy(names) > 0.6
    assert (folder / "posterior.safetensors").exists()


def from_opacus(names: Names, folder: Path, said: str) -> None:
    """The page explains the difference of the two ε by q alone: then each is what the accountant says for its q."""
    from dpivon.privacy.accounting import epsilon

    theirs, ours = (float(line) for line in said.splitlines()[:2])
    assert ours == pytest.approx(epsilon([(1.0, 256 / 1797, 8)], 1e-4, "rdp"), rel=1e-6)
    assert theirs == pytest.approx(epsilon([(1.0, 1 / 8, 8)], 1e-4, "rdp", orders="opacus"), rel=1e-6)


def gotchas(names: Names, folder: Path, said: str) -> None:
    lines = said.splitlines()
    for line, words in zip(
        lines,
        (
            "captures raw gradients",
            "divides by the weights",
            "BatchNorm1d",
            "twice on one",
            "poisson_sampling",
            "clippping",
        ),
        strict=True,
    ):
        assert words in line


def methods(names: Names, folder: Path, said: str) -> None:
    assert names["engine"].get_epsilon(1e-4) <= 8.0
    assert (names["prediction"].label == names["digits"].test.y).float().mean() > 0.4
    assert names["ensemble"].epsilon(1e-4) <= 8.0
    assert (folder / "posterior.safetensors").exists()


def bayes(names: Names, folder: Path, said: str) -> None:
    assert len(names["posterior"]) > 1
    assert names["optimizer"].temperature().wanted == 0.1


def checkpoints(names: Names, folder: Path, said: str) -> None:
    assert read(folder / "run" / "ledger.jsonl").releases == 20 + 10
    assert len(names["engine"].accountant) == 30
    assert len(list((folder / "run").glob("release-*.safetensors"))) == 2


def integrations(names: Names, folder: Path, said: str) -> None:
    assert names["classifier"].epsilon_ <= 8.0
    assert names["classifier"].score(names["x"][1400:], names["y"][1400:]) > 0.6
    assert names["private"].epsilon <= 8.0
    assert any((folder / "runs").iterdir())


def estimator(names: Names, folder: Path, said: str) -> None:
    assert (names["prediction"].label == names["digits"].validation.y).float().mean() > 0.6
    assert names["expected"](1.0) == pytest.approx(2 * math.exp(-0.5) / math.sqrt(2 * math.pi))
    assert names["expected"](4.0) == pytest.approx(0.079, abs=5e-4)  # what the page says


def layer_rule(names: Names, folder: Path, said: str) -> None:
    """The page's own comparison with the loop must see a rule that is wrong."""
    from dpivon.privacy.clipping import FlatClipping
    from dpivon.privacy.layers import Dense
    from dpivon.privacy.layers.registry import FORWARDS, RULES

    scale, low_rank = names["LayerScale"], names["LowRank"]
    x, y = names["x"], names["y"]
    fresh = nn.Sequential(nn.Linear(6, 8), scale(8), nn.Tanh(), low_rank(8, 3, rank=2)).double()
    right = [names["by_loop"](fresh, x, y, FlatClipping(bound)) for bound in (0.05, 1e6)]
    FORWARDS[low_rank] = names["low_rank"]
    try:
        for rule, agrees in (
            (names["layer_scale"], True),
            (lambda layer, inputs, g: {layer.gain: Dense((g * inputs[0]).mean(1))}, False),
        ):
            RULES[scale] = rule
            ruled = [names["by_rule"](fresh, x, y, FlatClipping(bound)) for bound in (0.05, 1e6)]
            same = all(
                torch.allclose(a, b, rtol=1e-10, atol=1e-12)
                for one, other in zip(ruled, right, strict=True)
                for a, b in zip(one, other, strict=True)
            )
            assert same is agrees
    finally:
        del RULES[scale], FORWARDS[low_rank]


def method(names: Names, folder: Path, said: str) -> None:
    assert names["engine"].get_epsilon(1e-4) <= 4.0
    assert (names["prediction"].label == names["digits"].validation.y).float().mean() > 0.8


#: What must be true after a page ran, beyond having run.
CHECKS: dict[str, Callable[[Names, Path, str], None]] = {
    "README.md": readme,
    "docs/index.md": index,
    "docs/quickstart.md": quickstart,
    "docs/from-opacus.md": from_opacus,
    "docs/gotchas.md": gotchas,
    "docs/methods.md": methods,
    "docs/bayes.md": bayes,
    "docs/checkpoints.md": checkpoints,
    "docs/integrations.md": integrations,
    "docs/add-a-curvature-estimator.md": estimator,
    "docs/add-a-layer-rule.md": layer_rule,
    "docs/add-a-method.md": method,
}
SLOW = [f"docs/{name}.md" for name in ("choosing", "index", "integrations", "methods", "transformers")]
WITH_PYTHON = [page for page, path in PAGES.items() if fences(path.read_text(), "python")]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in WITH_PYTHON])
def test_the_python_of_a_page_runs_and_does_what_the_page_says(page: str, tmp_path: Path, capsys: Any) -> None:
    if page == "docs/integrations.md":
        pytest.importorskip("lightning.pytorch", reason=pip_line("lightning"))
        pytest.importorskip("tensorboard", reason=pip_line("tensorboard"))
    names = run(page, tmp_path)
    CHECKS.get(page, lambda *_: None)(names, tmp_path, capsys.readouterr().out)


def test_every_check_belongs_to_a_page_with_python() -> None:
    assert set(CHECKS) <= set(WITH_PYTHON)
