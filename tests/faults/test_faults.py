"""The fault table with real processes, a few of each; fifty kills in the slow suite and in results/reliability."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def campaign(out, *arguments):
    root = HERE.parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root / "src"), *sys.path])}
    command = [sys.executable, str(HERE / "fault_campaign.py"), *map(str, arguments), "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(out.read_text())


def check(report, kills, flips):
    faults = report["faults"]
    assert {name: row["failures"] for name, row in faults.items() if row["failures"]} == {}
    assert report["survived"] == report["tried"] == kills + kills // 3 + 2 * flips + 4
    assert faults["SIGKILL at a random moment"]["tried"] == kills
    assert faults["bit flipped or end cut off"]["checkpoints"]["found_and_fell_back"] > 0.8 * flips


def test_killed_stopped_damaged_and_out_of_disk(tmp_path):
    check(campaign(tmp_path / "faults.json", "--kills", 6, "--flips", 20), 6, 20)


@pytest.mark.slow
def test_killed_fifty_times(tmp_path):
    report = campaign(tmp_path / "faults.json", "--kills", 50, "--flips", 200, "--seed", 1)
    check(report, 50, 200)
    assert report["faults"]["SIGKILL at a random moment"]["releases_lost_and_repeated"] > 10
