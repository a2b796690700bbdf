"""The kernels of convolutions without a GPU, where Triton is installed: interpreted against the loop, and compiled for one."""

from __future__ import annotations

import importlib.util

import pytest
from scripts import run

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton, which comes with torch for GPUs", allow_module_level=True)


@pytest.mark.slow
def test_the_kernels_interpreted_give_the_gradients_of_the_loop():
    assert run("convs_interpreted.py", TRITON_INTERPRET="1").count("ok") == 32


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_with_tensor_cores_and_hardly_a_spill(tmp_path):
    said = run("convs_compiled.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert said.count("bytes spilled") == 24
