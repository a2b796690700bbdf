"""The fault table with real processes, a few of each; fifty kills in the slow suite and in tests/reliability."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from moments import POINTS

HERE = Path(__file__).parent


def campaign(out, *arguments):
    root = HERE.parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root / "src"), *sys.path])}
    command = [sys.executable, str(HERE / "fault_campaign.py"), *map(str, arguments), "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert out.is_file(), done.stderr
    return json.loads(out.read_text())


def check(report, kills, aimed, flips):
    faults = report["faults"]
    assert {name: row["failures"] for name, row in faults.items() if row["failures"]} == {}
    deaths = kills + kills // 2 + 2 * kills // 5 + kills // 3 + 2 * len(POINTS) * aimed
    assert report["survived"] == report["tried"] == deaths + 2 * flips + 4
    assert faults["SIGKILL at a random moment of training"]["tried"] == kills
    for name in ("SIGKILL in the middle of a write", "SIGKILL in the middle of a write of a stack"):
        assert faults[name]["points"] == dict.fromkeys(POINTS, aimed)
        assert faults[name]["runs_ended_bit_equal"] == (len(POINTS) - 1) * aimed
    assert faults["bit flipped or end cut off"]["checkpoints"]["found_and_fell_back"] > 0.8 * flips


@pytest.mark.slow
def test_killed_stopped_damaged_and_out_of_disk(tmp_path):
    check(campaign(tmp_path / "faults.json", "--kills", 3, "--aimed", 1, "--flips", 20), 3, 1, 20)


@pytest.mark.slow
def test_killed_fifty_times(tmp_path):
    report = campaign(tmp_path / "faults.json", "--kills", 50, "--aimed", 2, "--flips", 200, "--seed", 1)
    check(report, 50, 2, 200)
    row = report["faults"]["SIGKILL at a random moment of training"]
    assert row["releases_lost"] > 10
    assert sum(n > 0 for n in row["killed_by_releases_made"]) >= 8  # all over the run
