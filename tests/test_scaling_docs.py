"""The cost model of docs/scaling.md: what it predicts, and what it takes for granted."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from benchmarks import cost_model

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "scaling.md").read_text()


def test_links_and_commands_exist():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    for module in re.findall(r"python -m (benchmarks\.\w+)", TEXT):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_the_fit_predicts_what_it_was_not_fitted_to():
    c = cost_model.constants()
    seen = cost_model.h200()[90, 256][0]
    assert c.example * 90 * 256 + c.parameter * 90 * cost_model.CNN == pytest.approx(seen, rel=0.05)


def test_the_largest_part_is_that_of_simulated_batches():
    torch.manual_seed(0)
    for batch, ranks in ((1024, 64), (512, 8)):
        parts = torch.poisson(torch.full((20_000, ranks), batch / ranks))
        expected = float(parts.max(1).values.mean())
        assert cost_model.largest_part(batch, ranks) == pytest.approx(expected, rel=0.005)
    assert cost_model.largest_part(64.0, 1) == pytest.approx(64.0)


def test_parameters_of_the_model_are_a_transformers():
    full, lora = cost_model.FULL, cost_model.LORA
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, bias=False)
    products = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert full.parameters / full.layers / full.width**2 == products / 64**2 == 12
    sides = sum(sum(p.shape) for p in layer.parameters() if p.dim() == 2)
    assert lora.trained / lora.layers / lora.rank / lora.width == sides / 64 == 16
    assert math.isclose(full.trained, full.parameters)
