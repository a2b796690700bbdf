"""What methods did where a plan says nothing, kept beside its results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dpivon.errors import ArgumentError
from dpivon.methods import METHODS
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results.folder import claim, merge

PLAN = Plan("p", "digits", "small", "final", 1, 1e-4, 2, 0, (PlannedRun("dp-sgd", 64, 1.0, 1.0, 0, 0.5),))


def test_results_of_two_defaults_never_meet(tmp_path, monkeypatch):
    """A folder that was begun when a method had another default: its ids mean other runs today. What the study names itself,
    and what another method does, is no reason to stop."""
    folder = tmp_path / "study"
    folder.mkdir()
    steady = replace(PLAN, runs=(PlannedRun("dp-steady", 64, 1.0, 1.0, 0, 3.5, {"trace": 0.25}),))
    claim(folder, steady)
    kept = json.loads((folder / "defaults.json").read_text())["dp-steady"]
    assert kept["curvature"] == METHODS["dp-steady"].defaults["curvature"]
    assert "trace" not in kept
    claim(folder, steady)
    other = replace(METHODS["dp-steady"], defaults={**METHODS["dp-steady"].defaults, "curvature": "averaged-fisher"})
    monkeypatch.setitem(METHODS, "dp-steady", other)
    with pytest.raises(ArgumentError, match="results of dp-steady with curvature = 'whole-fisher' where a study says"):
        claim(folder, steady)
    with pytest.raises(ArgumentError, match="results of dp-steady with curvature"):  # nor may it grow
        claim(
            folder, replace(steady, runs=(*steady.runs, PlannedRun("dp-steady", 64, 1.0, 1.0, 1, 3.5, {"trace": 0.25})))
        )
    named = replace(steady, runs=(PlannedRun("dp-steady", 64, 1.0, 1.0, 0, 3.5, {"curvature": "whole-fisher"}),))
    again = tmp_path / "named"
    again.mkdir()
    claim(again, named)
    monkeypatch.setitem(METHODS, "dp-steady", replace(other, defaults={**other.defaults, "curvature": "whole-fisher"}))
    claim(again, named)
    parts = [tmp_path / "a", tmp_path / "b"]
    for part in parts:
        part.mkdir()
        claim(part, steady)
        monkeypatch.setitem(METHODS, "dp-steady", other)
    with pytest.raises(
        ArgumentError, match=r"others='.*b': holds results of dp-steady with curvature = 'averaged-fisher'"
    ):
        merge(tmp_path / "all", parts)
    (folder / "defaults.json").write_text("[1, 2")
    with pytest.raises(ArgumentError, match="is not a table of options by method"):
        claim(folder, steady)
    (folder / "defaults.json").unlink()  # results that are older than this file
    claim(folder, steady)
    assert not (folder / "defaults.json").exists()
