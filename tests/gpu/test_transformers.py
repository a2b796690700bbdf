"""Every stock model of transformers in bf16 on a GPU: one example moves the clipped sum by at most C."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from transformer_models import MODELS, check_neighbours

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = list(dict(reversed(MODELS)).items())[::-1]  # the first task of every model


@pytest.mark.parametrize(("name", "task"), FIRST)
@pytest.mark.parametrize("tuning", ["all", "LoRA"])
def test_one_example_moves_the_sum_by_at_most_C(name, task, tuning, monkeypatch):
    check_neighbours(name, task, tuning, "cuda", monkeypatch)
