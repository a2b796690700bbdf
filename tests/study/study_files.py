"""Studies as YAML: a small good one, and all of the experiments."""

from __future__ import annotations

from pathlib import Path

import experiments.strong_privacy  # noqa: F401  registers the estimators that its studies name

DIGEST_OF_THE_PAPER = "32677ca8258877f7"  # as its results have it
ROOT = Path(__file__).parents[2]
STUDIES = {p.name: p for p in ROOT.glob("experiments/*/studies/*")} | {"quick.yaml": ROOT / "examples" / "study.yaml"}
RESULTS = {p.name: p for p in ROOT.glob("experiments/*/results/*/")}
GOOD = """
name: a
dataset: digits
network: small
epochs: 2
delta: 1e-4
grid: {batch_size: [32, 64], noise_multiplier: [1], max_grad_norm: [1, 2]}
methods:
  - {method: dp-sgd, lr: [0.1, 0.2]}
  - {method: dp-ivon-gradsq, lr: 0.1, options: {ess: [100, 200], hess_init: 0.5}}
"""
