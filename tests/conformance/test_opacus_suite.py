"""Opacus's own tests, run against our engine with a degenerate IVON in place of SGD.

They run in a process of their own, with ``opacus_plugin``. A failing test fails here, by name; a test may only be left
out if ``refused.txt`` gives the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
OPTIONS = ["-m", "pytest", "-q", "--no-header", "-W", "ignore", "-p", "opacus_plugin", "-p", "no:cacheprovider"]
BAD = ("failure", "error")
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
#: Those that `make test` runs; `make test-all` and `make conformance` run all.
QUICK = {"schedulers.noise_scheduler_test", "poisson_test"}


def test_at_most_ten_refusals_each_with_its_reason():
    lines = [line for line in (HERE / "refused.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10
    assert all(re.search(r"#\s*\S", line) for line in lines)


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """The selected modules in one process: it imports torch and Opacus once. Its cases, by module."""
    selected = {
        item.callspec.params["module"]
        for item in request.session.items
        if item.path == HERE / "test_opacus_suite.py" and "outcome" in item.fixturenames
    }
    modules = [module for module in MODULES if module in selected]
    folder, source = tmp_path_factory.mktemp("opacus"), Path(__file__).parents[2] / "src"
    report = folder / "report.xml"
    run = subprocess.run(
        [sys.executable, *OPTIONS, f"--junitxml={report}", "--refused", str(HERE / "refused.txt"), "--pyargs"]
        + [f"opacus.tests.{module}" for module in modules],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(source), str(HERE)])},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    words = run.stdout[-4000:] + run.stderr[-2000:]
    assert report.exists(), words
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = {m: [c for c in cases if c.find(f"properties/property[@value='{m}']") is not None] for m in modules}
    assert sum(map(len, found.values())) == len(cases), words  # each is of one module; an error in collection of none
    assert run.returncode == int(any(case.find(kind) is not None for case in cases for kind in BAD)), words
    return found


@pytest.mark.parametrize("module", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MODULES])
def test_opacus_module_passes_against_our_engine(module, outcome):
    cases = outcome[module]
    wrong = {str(c.get("name")): bad.text for c in cases for kind in BAD if (bad := c.find(kind)) is not None}
    passed = sum(c.find("skipped") is None for c in cases) - len(wrong)
    print(f"\n{module}: {passed} passed, {len(cases) - passed - len(wrong)} skipped, {len(wrong)} failed")
    assert not wrong, "\n".join(f"{name}: {words}" for name, words in wrong.items())
    assert passed > 0
