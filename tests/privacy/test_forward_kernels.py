"""The forward kernels of the paper's network without a GPU, where Triton is installed: interpreted, and compiled for one."""

from __future__ import annotations

import importlib.util

import pytest
from scripts import run

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton, which comes with torch for GPUs", allow_module_level=True)


@pytest.mark.slow
def test_the_kernels_interpreted_train_as_the_loop_does():
    assert run("forward_interpreted.py", TRITON_INTERPRET="1").count("ok") == 2


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_and_spill_nothing(tmp_path):
    said = run("forward_compiled.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert said.count("0 bytes spilled") == 12
