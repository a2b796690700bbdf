"""Opacus's own tests, run against our engine with a degenerate IVON in place of SGD.

Each module runs in a process of its own with ``opacus_plugin``. A failing test fails here, by name; a test may only be left
out if ``refused.txt`` gives the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPTIONS = ["-m", "pytest", "-q", "--no-header", "-W", "ignore", "-p", "opacus_plugin", "-p", "no:cacheprovider"]
MODULES = [
    "privacy_engine_test",
    "privacy_engine_validation_test",
    "batch_memory_manager_test",
    "gradient_accumulation_test",
    "randomness_test",
    "schedulers.noise_scheduler_test",
    "schedulers.grad_clip_scheduler_test",
    "poisson_test",
    "dpdataloader_test",
    "accountants_test",
    "grad_sample_module_fast_gradient_clipping_test",
    "grad_sample_hooks_fast_gradient_clipping_test",
]


def test_at_most_ten_refusals_each_with_its_reason():
    lines = [line for line in (HERE / "refused.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10
    assert all(re.search(r"#\s*\S", line) for line in lines)


@pytest.mark.parametrize("module", MODULES)
def test_opacus_module_passes_against_our_engine(module, tmp_path):
    source = Path(__file__).parents[2] / "src"
    run = subprocess.run(
        [sys.executable, *OPTIONS, "--refused", str(HERE / "refused.txt"), "--pyargs", f"opacus.tests.{module}"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(source), str(HERE)])},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    closing = run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.stderr[-2000:]
    print(f"\n{module}: {closing}")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", closing)
