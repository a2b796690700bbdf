"""Ranks are forked, for speed; beside a GPU autograd has threads that a forked process lacks."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if (
                "distributed" in item.path.parts
                and item.path.name != "test_example.py"
                and "gpu" not in item.path.parts
            ):
                item.add_marker(pytest.mark.skip(reason="forks: hide the GPU with CUDA_VISIBLE_DEVICES=''"))
