"""The example as people start it: torchrun, gloo on this machine's loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(ranks: int, out: Path, *more: str) -> tuple[int, float, float]:
    """(the step it began at, ε, accuracy), as printed."""
    done = subprocess.run(
        [*COMMAND, str(ranks), str(EXAMPLE), "--out", str(out), *more],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(rf"{ranks} ranks, begun at step (\d+): ε = ([\d.]+) at δ = 1e-5, accuracy ([\d.]+)", done.stdout)
    assert found, done.stdout
    return int(found[1]), float(found[2]), float(found[3])


@pytest.mark.slow
def test_the_example_trains_and_goes_on_with_other_ranks(tmp_path) -> None:
    begun, epsilon, accuracy = start(2, tmp_path)
    assert begun == 0
    assert 2.9 < epsilon <= 3.0
    assert accuracy > 0.88
    again, same, sharded = start(1, tmp_path, "--fsdp")  # nothing is left to do: it predicts what was learned
    assert (again, same) == (200, epsilon)
    assert abs(sharded - accuracy) < 0.03


@pytest.mark.slow
def test_the_example_shards(tmp_path) -> None:
    begun, epsilon, accuracy = start(2, tmp_path, "--fsdp")
    assert begun == 0
    assert 2.9 < epsilon <= 3.0
    assert accuracy > 0.88
